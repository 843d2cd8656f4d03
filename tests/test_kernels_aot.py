"""Every Triton kernel compiles for sm_90 where no GPU is, fits it, and spills no more than on record.

`kernel_figures.json` holds what `kernel_resources.py --record` measured. A figure may fall, then record it; a rise is
a slower kernel.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


triton = pytest.importorskip("triton")

TOOL = Path(__file__).with_name("kernel_resources.py")
RECORD = json.loads(TOOL.with_name("kernel_figures.json").read_text())
KERNELS = RECORD["kernels"]
USUAL = [f"local {way}, C=16 m=1" for way in ("forward", "backward")]
SHARED_BYTES = 227 << 10  # what one program may have of an SM of sm_90


def measured(names: list[str], tmp_path) -> dict:
    """The tool's figures, from a process without the interpreter and without kernels compiled before."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TOOL.parents[1])}
    done = subprocess.run([sys.executable, TOOL, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["kernels"]


def compare(names: list[str], tmp_path) -> dict:
    if triton.__version__ != RECORD["triton"]:
        pytest.skip(f"recorded with triton {RECORD['triton']}, this is {triton.__version__}: compilers differ")
    found = measured(names, tmp_path)
    for name, figures in found.items():
        for spills in ("spill_loads", "spill_stores"):
            assert figures[spills] <= KERNELS[name][spills], f"{name}: {spills} {figures[spills]}"
        assert figures["shared_bytes"] <= SHARED_BYTES, f"{name}: {figures['shared_bytes']} bytes of shared memory"
    return found


def test_the_forward_of_the_usual_local_memory_spills_nothing_and_its_backward_no_more_than_on_record(tmp_path):
    """Forward and backward at chunk 16, head width 64, hidden width 64, bfloat16."""
    forward = compare(USUAL, tmp_path)[USUAL[0]]
    assert forward["spill_loads"] == forward["spill_stores"] == 0


@pytest.mark.slow
def test_every_kernel(tmp_path):
    compare([name for name in KERNELS if name not in USUAL], tmp_path)


@pytest.mark.slow
def test_the_record_has_every_kernel(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import kernel_resources as k; print(*k.ROWS, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.strip().split("|")) == set(KERNELS)
