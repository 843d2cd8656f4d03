"""Freed memory is kept where nothing was asked of the C library, seen by what the system has to hand out again."""

import json
import os
import subprocess
import sys

import pytest


SCRIPT = """
import json, resource, sys, torch
sys.argv[0] = "tnt"  # as the command line starts, which keeps `tnt_hf` from loading the models: seconds
from tnt_hf.recipes import allocator
kept = [allocator.keep_freed_memory(), allocator.keep_freed_memory()]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(8):
    faults()  # the heap grows until nothing small lands behind a block any more: by 2 to 8 of them, found in 25 runs
print(json.dumps({"kept": kept, "faults": faults(), "settings": allocator.settings()}))
"""
PAGES = 4 * 2**26 // os.sysconf("SC_PAGE_SIZE")


def ran(script: str = SCRIPT, **variables: str) -> dict:
    """What `script` says, in a process with no other setting of the allocator."""
    inherited = {k: x for k, x in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", script], env=inherited | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_a_block_that_was_freed_is_used_again():
    found = ran()
    assert found["kept"] == [True, True]
    assert found["faults"] < PAGES / 100, "the system handed the pages out again"
    assert found["settings"] == {"keeps freed memory": True}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, value",
    [("MALLOC_ARENA_MAX", "2"), pytest.param("GLIBC_TUNABLES", "glibc.malloc.check=0", marks=pytest.mark.slow)],
)
def test_settings_of_the_environment_are_left_alone(name, value):
    found = ran(**{name: value})
    assert found["kept"] == [False, False]
    assert found["settings"] == {name: value}
    assert found["faults"] > PAGES / 2, "nothing else kept it"


TRAINING = """
import io, json, sys
from contextlib import redirect_stdout
from tnt_hf.recipes import allocator, train
before = allocator.settings()
with redirect_stdout(io.StringIO()):
    train.prepare({given})
print(json.dumps([before, allocator.settings()]))
"""


@pytest.mark.long
def test_training_on_a_cpu_keeps_it(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 500)
    given = ["--config", "tnt_debug/stage1", "--dataset_name", str(text), "--eval_share", "0", "--eval_strategy", "no"]
    given += ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    assert ran(TRAINING.format(given=given)) == [{}, {"keeps freed memory": True}]
