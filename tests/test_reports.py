"""`report_to`: the packages that show curves get every number of the log, and one that is not there is named."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tnt_hf.recipes.train import check_reports


RUN = """
--config tnt_debug/stage1 --max_steps 2 --warmup_steps 0 --logging_steps 1 --memory_logging_steps 1
--hidden_size 32 --intermediate_size 48 --num_attention_heads 2 --tokenizer_vocab_size 257 --sequence_length 32
--max_position_embeddings 32 --eval_rows 2 --per_device_train_batch_size 2 --dataset_name text --eval_share 0
--save_strategy no --use_cpu --plots false --output_dir run
""".split()


def trained(folder: Path, package: str, **environment: str) -> list[dict]:
    """The log of a run of two steps in a process of its own that reports to `package` and sees no network."""
    pytest.importorskip(package)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("a memory reads and writes; " * 40)
    command = [sys.executable, "-m", "tnt_hf.recipes.train", *RUN, "--report_to", package]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "run" / "training_log.jsonl").read_text().splitlines()]


def numbers(log: list[dict]) -> list[float]:
    """Losses of the steps, gradient norms and surprise, as they were logged."""
    return [entry[key] for key in ("loss", "grad_norm", "memory/surprise") for entry in log if key in entry]


def records(path: Path) -> bytes:
    """What the records of wandb's file say: LevelDB's log, blocks of 32 KiB in which 7 bytes stand before a record."""
    data, found, place = path.read_bytes(), b"", 7
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        end = place + 7 + int.from_bytes(data[place + 4 : place + 6], "little")
        found, place = found + data[place + 7 : end], end
    return found


def test_wandb_gets_the_log(tmp_path):
    log = trained(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    kept = records(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    assert len(numbers(log)) == 6 and all(str(number).encode() in kept for number in numbers(log))


def test_trackio_gets_the_log(tmp_path):
    log = trained(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    import sqlite3

    [database] = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(database).execute("select metrics from metrics").fetchall()
    values = [value for (row,) in rows for value in json.loads(row).values()]
    assert len(numbers(log)) == 6 and set(numbers(log)) <= {x for x in values if isinstance(x, float)}


def test_a_package_that_is_not_there_is_named():
    absent = [name for name in ("wandb", "trackio", "swanlab") if find_spec(name) is None]
    for name in absent:
        with pytest.raises(ValueError, match=rf"report_to=\['{name}'\]: .*requires {name} to be installed"):
            check_reports([name])
    with pytest.raises(ValueError, match="wnadb is not supported"):
        check_reports(["wnadb"])


def test_a_package_that_nobody_knows_is_named():
    with pytest.raises(ValueError, match=r"report_to=\['papers'\]: papers is not supported"):
        check_reports(["papers"])
