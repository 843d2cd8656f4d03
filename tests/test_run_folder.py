"""Whose folder `output_dir` is: what a run may take, what it never touches, and that one at a time writes there."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_trainer_resume import sealed

from tnt_hf.recipes.checkpoints import checkpoints, delete_old_checkpoints
from tnt_hf.recipes.run_folder import LOCK, check_output, check_unused, claim_output, sole_run


BEFORE, NOW = {"adam_beta1": 2, "seed": 1}, {"adam_beta1": 0.9, "seed": 1}


@pytest.fixture
def output(tmp_path):
    """The folder of a run with the settings BEFORE that ended before it saved anything."""
    folder = tmp_path / "run"
    claim_output(folder, BEFORE)
    return folder


def write(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("something")


def test_a_run_that_saved_nothing_leaves_its_folder_free(output):
    check_output(output, NOW)
    write(output / "runs" / "events", output / "converted" / "config.json", output / "training_log.jsonl")
    write(output / "loss.png", output / "gates.png", output / "gates.png.partial", output / ".tnt-train.lock")
    check_output(output, NOW)


def test_a_full_disk_is_told_with_the_file(output):
    (output / ".recipe.yaml.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*recipe.yaml'"):
        claim_output(output, NOW)


SAVED = ["checkpoint-5/complete.json", "checkpoint-5/config.json", "model.safetensors", "adapter_model.safetensors"]


@pytest.mark.parametrize("name", [*SAVED, "training.json", "thesis.txt", "evaluation/x"])
def test_what_a_run_saved_or_did_not_write_is_never_taken(output, name):
    write(output / name)
    with pytest.raises(ValueError, match="belongs to another run, adam_beta1 is 0.9 and was 2; choose another outp"):
        check_output(output, NOW)
    check_output(output, BEFORE)  # the run itself goes on


DEFAULTS = {
    "seed": 0,
    "mode": "pretrain",
    "weight_decay": 0.0,
    "optim": "adamw_torch_fused",
    "lora": {},
    "plots": True,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_the_same_setting_given_or_not(output, name):
    """Of a recipe, a dataclass of ours and one of the library; an enum, a mapping."""
    write(output / "model.safetensors")
    check_output(output, BEFORE | ({name: DEFAULTS[name]} if name not in BEFORE else {}))
    claim_output(output, {name: DEFAULTS[name]})
    check_output(output, {})


@pytest.mark.parametrize(
    "decides",
    [{"lr_scheduler_type": "reduce_lr_on_plateau"}, {"lr_scheduler_type": "greedy"}, {"load_best_model_at_end": True}],
    ids=str,
)
def test_how_often_is_evaluated_may_change_where_it_decides_nothing(output, decides):
    write(output / "model.safetensors")
    often = {"eval_strategy": "steps", "eval_steps": 2}
    claim_output(output, often)
    check_output(output, often | {"eval_steps": 5, "save_steps": 3})
    claim_output(output, often | decides)
    with pytest.raises(ValueError, match="belongs to another run, eval_steps is 5 and was 2"):
        check_output(output, often | decides | {"eval_steps": 5})
    check_output(output, often | decides | {"logging_steps": 1})
    follows = {"eval_strategy": "steps", "logging_steps": 2} | decides
    claim_output(output, follows)
    with pytest.raises(ValueError, match="belongs to another run, logging_steps is 5 and was 2"):
        check_output(output, follows | {"logging_steps": 5})


@pytest.mark.parametrize("decides", [{}, {"load_best_model_at_end": True}], ids=str)
def test_a_run_that_had_no_room_or_no_time_goes_on_with_more(output, decides):
    write(output / "model.safetensors")
    claim_output(output, decides)
    more = {"ddp_timeout": 9999, "dataloader_prefetch_factor": 4, "eval_accumulation_steps": 1}
    check_output(output, decides | more | {"torch_empty_cache_steps": 1})
    if decides:
        with pytest.raises(ValueError, match="per_device_eval_batch_size is 1 and was the default"):
            check_output(output, decides | {"per_device_eval_batch_size": 1})
    else:
        check_output(output, {"per_device_eval_batch_size": 1})


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(OSError, match="output_dir='.*run'.* locks no files .No locks.; choose another"):
        with sole_run(tmp_path / "run"):
            raise AssertionError("it has the folder")


def test_without_settings_it_is_somebody_elses(output):
    (output / "recipe.yaml").unlink()
    write(output / "converted" / "config.json")
    check_output(output, NOW)  # a conversion is made before the folder is claimed
    write(output / "loss.png")
    with pytest.raises(ValueError, match=r"holds files of something else \(loss.png\), choose another"):
        check_output(output, NOW)


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [\n", "\x00"])
def test_settings_that_cannot_be_read_are_nobodys(output, text):
    (output / "recipe.yaml").write_text(text)
    write(output / "model.safetensors")
    with pytest.raises(ValueError, match="its recipe.yaml .* its owner is unknown; choose another"):
        check_output(output, NOW)


@pytest.mark.parametrize("field", ["dataset_name", "eval_dataset_name"])
def test_a_run_does_not_write_into_its_data(tmp_path, field, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("data/a.txt"), Path("data2/b.txt"))
    Path("link").symlink_to("data")
    for place in ("data", "data/run", "data/deep/run", "link/run", "data2/../data/run"):
        with pytest.raises(ValueError, match=f"lies in {field}='data', so what the run writes would be read as data"):
            check_output(Path(place), {field: "data"})
    check_output(Path("data2/run"), {field: "data"})
    check_output(Path("data3"), {field: "user/data"})


HOLDER = """
import os, sys, time
from pathlib import Path
from tnt_hf.recipes.run_folder import sole_run
with sole_run(Path(sys.argv[1])):
    child = os.fork()  # as dataloader workers are made, which outlive a killed run for seconds
    if not child:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def test_a_folder_that_cannot_be_made_is_known_before_anything_is_loaded(tmp_path, monkeypatch):
    write(tmp_path / "file")
    with pytest.raises(FileExistsError, match="output_dir='.*file/a/b': .*file is a file"):
        check_output(tmp_path / "file" / "a" / "b", NOW)
    check_output(tmp_path / "a" / "b", NOW)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anywhere
    with pytest.raises(PermissionError, match=f"output_dir='.*a/b': nothing can be written to {tmp_path}"):
        check_output(tmp_path / "a" / "b", NOW)


@pytest.mark.long
def test_one_run_at_a_time_and_a_killed_one_is_none(tmp_path):
    output = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, output], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        for enter in (sole_run(output).__enter__, lambda: check_unused(output)):
            with pytest.raises(ValueError, match="run': another run is writing to it; wait, or end it"):
                enter()
        assert (output / LOCK).exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # lives
        with sole_run(output):
            assert (output / LOCK).exists()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait()
    assert not list(output.iterdir())


def test_looking_whether_a_folder_is_used_makes_nothing(tmp_path):
    check_unused(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / LOCK).write_text("")  # left by a run that was killed
    check_unused(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_settings_are_a_recipe(output):
    assert (output / "recipe.yaml").read_text() == "adam_beta1: 2\nseed: 1\n"
    assert [path.name for path in output.iterdir()] == ["recipe.yaml"]


def test_the_best_checkpoint_stays_however_it_is_named(tmp_path, monkeypatch):
    sealed(tmp_path, 1, 2, 3)
    monkeypatch.chdir(tmp_path)
    delete_old_checkpoints(".", 2, best=str(tmp_path / "checkpoint-1"))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def test_a_checkpoint_that_is_a_link_is_deleted(tmp_path):
    sealed(tmp_path, 2, 3)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    sealed(elsewhere, 1)
    (tmp_path / "checkpoint-1").symlink_to(elsewhere / "checkpoint-1")
    for limit in (2, 1):
        delete_old_checkpoints(tmp_path, limit)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "elsewhere"]
