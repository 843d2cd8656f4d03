"""A run that was killed goes on to the bit, from a checkpoint that is complete, and only as the run it was."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from train_killer import CONFIG, samples, trainer
from transformers import TrainerCallback, TrainerState, TrainingArguments

from tnt_hf.conversion import LiZACallback, lora_config
from tnt_hf.recipes.callbacks import ChunkSizeSchedule
from tnt_hf.recipes.checkpoints import (
    FIXED,
    FORMAT,
    PIECE,
    PIECES,
    SEAL,
    _differences,
    callback_settings,
    checkpoints,
    delete_old_checkpoints,
    fault,
    latest_complete_checkpoint,
    run_state,
    weights_digest,
)
from tnt_hf.recipes.objectives import next_token
from tnt_hf.termination import Terminated


SHORT = {"max_steps": 4, "save_steps": 2, "eval_on_start": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "out"
    trainer(folder, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT).fit()
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "out")


def killer(tmp_path: Path, *parts: str) -> str:
    script = Path(__file__).with_name("train_killer.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, script, tmp_path, *parts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


# --- deaths ---


@pytest.mark.long
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path):
    """SIGKILL between and inside steps, inside saves and in the middle of a write; a full disk; two processes."""
    assert killer(tmp_path, "steps", "saves", "full", "ranks") == "5 deaths"


@pytest.mark.long
def test_sigterm_leaves_a_checkpoint_and_the_run_goes_on_to_the_bit(tmp_path):
    """`enable_jit_checkpoint`: amid a step, after one, after the last, in an evaluation, in one of two processes;
    also where those that load data get it."""
    assert killer(tmp_path, "sigterm") == "8 deaths"


@pytest.mark.slow
def test_a_run_killed_anywhere_ends_as_if_nothing_had_happened(tmp_path):
    assert int(killer(tmp_path, "steps", "saves", "ranks", "sigterm", "every").split()[0]) > 100


# --- which checkpoint ---


def test_a_run_keeps_its_best_checkpoint_beside_the_newest(tmp_path):
    settings = {"max_steps": 3, "save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "save_total_limit": 2}
    run = trainer(tmp_path, **settings, load_best_model_at_end=True)
    run.objective = lambda *call: (-next_token(*call)[0], None)  # worse with every step
    run.fit()
    assert [x.name for x in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]
    best, saved = (load_file(x / "model.safetensors") for x in (tmp_path / "checkpoint-1", tmp_path))
    assert all(torch.equal(best[name], saved[name]) for name in best)


@pytest.mark.long
@pytest.mark.parametrize("left", [0, 1])
def test_the_best_checkpoint_is_found_where_a_run_was_moved_to(tmp_path, left):
    settings = {"save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "load_best_model_at_end": True}

    def fit(folder, steps):
        run = trainer(folder, max_steps=steps, **settings)
        run.objective = lambda *call: (-next_token(*call)[0], None)  # worse with every step
        return run.fit()

    fit(tmp_path / "a", 3)
    for name in ("training.json", "model.safetensors"):  # as a death in the last save leaves it
        (tmp_path / "a" / name).unlink()
    (tmp_path / "a").rename(tmp_path / "b")
    metrics = fit(tmp_path / "b", 3 + left)
    best, saved = (load_file(x / "model.safetensors") for x in (tmp_path / "b" / "checkpoint-1", tmp_path / "b"))
    assert all(torch.equal(best[name], saved[name]) for name in best)
    state = json.loads((tmp_path / "b" / "checkpoint-1" / "trainer_state.json").read_text())
    assert metrics["eval_loss"] == state["best_metric"]
    shutil.rmtree(tmp_path / "b" / "checkpoint-1")
    with pytest.raises(ValueError, match="load_best_model_at_end: .*checkpoint-1"):
        fit(tmp_path / "b", 3 + left)


def test_what_is_best_to_the_last_but_one_stays_with_it(tmp_path):
    """Where the newest is damaged, the run goes on from the one before, and from the best that it knew."""
    settings = {"save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "save_total_limit": 2, "max_steps": 4}
    signs = iter([1, 2, 3, 0, 3, 0])  # the loss of each evaluation: the fourth is the best

    def fit():
        run = trainer(tmp_path, **settings, load_best_model_at_end=True)
        evaluate = run.evaluate

        def evaluated(*args, **kwargs):
            found = evaluate(*args, **kwargs)
            found["eval_loss"] = run.state.log_history[-1]["eval_loss"] = float(next(signs))
            return found

        run.evaluate = evaluated
        return run.fit()

    fit()
    assert [x.name for x in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    for name in ("training.json", "model.safetensors", "checkpoint-4/optimizer.pt"):
        (tmp_path / name).write_bytes(b"damaged")
    (tmp_path / "training.json").unlink()
    signs = iter([0])
    fit()
    assert fault(tmp_path / "checkpoint-4") is None


def test_an_epochs_evaluation_belongs_to_its_last_step(tmp_path):
    """It is made before that step is saved: who goes on from there has it behind, and what it did to the rates."""
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.9}}
    settings = {"eval_strategy": "epoch", "save_steps": 5, "max_steps": 13, **plateau}

    def fit(folder):
        run = trainer(folder, **settings)
        run.fit()
        entries = [x for x in run.state.log_history if "eval_loss" in x or "learning_rate" in x]
        return [(x["step"], x.get("eval_loss"), x.get("learning_rate")) for x in entries]

    whole = fit(tmp_path / "a")
    assert [step for step, loss, _ in whole if loss is not None] == [5, 10, 13]
    assert whole[-2][2] < whole[0][2], "the rate fell after 10"
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "checkpoint-10", tmp_path / "b" / "checkpoint-10")
    assert fit(tmp_path / "b") == whole
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sigterm_saves_at_the_end_of_its_step_whatever_else_is_saved(tmp_path):
    """With `save_strategy="best"` an evaluation that brings no new best takes a save back."""

    class Terminate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "enable_jit_checkpoint": True}
    settings |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first stays the best
    run = trainer(tmp_path, more=[Terminate()], **settings)
    with pytest.raises(Terminated):
        run.fit()
    assert run.state.global_step == 3 and latest_complete_checkpoint(tmp_path).name == "checkpoint-3"
    saved = [json.loads((x / "trainer_state.json").read_text()) for x in checkpoints(tmp_path)]
    assert [x["num_input_tokens_seen"] for x in saved] == [128, 3 * 128]  # the best one's, too


@pytest.mark.parametrize("size", [10, 3 * PIECES * PIECE])
def test_weights_are_told_apart_from_their_first_to_their_last_byte(tmp_path, size):
    path, seen = tmp_path / "model.safetensors", set()
    for content in (bytes(size), b"1" + bytes(size - 1), bytes(size - 1) + b"1", bytes(size + 1)):
        path.write_bytes(content)
        seen.add(weights_digest(tmp_path))
    path.rename(tmp_path / "other.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    seen.add(weights_digest(tmp_path))
    assert len(seen) == 5


def test_a_run_that_is_over_keeps_its_time_and_its_tokens(copy):
    again = trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT)
    again.fit()
    before = json.loads((checkpoints(copy)[-1] / "progress_0.json").read_text())["seconds"]
    assert again.had_ended and again.seconds > before > 0
    assert again._tokens_logged == again.state.num_input_tokens_seen == 4 * 4 * 32


def test_only_complete_checkpoints_count(copy, caplog):
    first, last = checkpoints(copy)
    assert (first.name, last.name) == ("checkpoint-2", "checkpoint-4") and latest_complete_checkpoint(copy) == last
    weights = last / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    with caplog.at_level(logging.WARNING):
        assert latest_complete_checkpoint(copy) == first
    assert f"{last} is not complete" in caplog.text and f"{size - 1} bytes instead of {size}" in caplog.text
    os.truncate(weights, size + 1)
    assert f"{size + 1} bytes instead of {size}" in fault(last)
    (first / "rng_state.pth").unlink()
    assert fault(first) == "rng_state.pth is missing"
    assert latest_complete_checkpoint(copy) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_checkpoint_that_has_changed_is_not_gone_on_from(copy, name):
    first, last = checkpoints(copy)
    weights = last / "model.safetensors"
    expected, damaged = weights.read_bytes(), bytearray((last / name).read_bytes())
    damaged[-9] ^= 1
    (last / name).write_bytes(damaged)
    assert fault(last) is None and fault(last, intact=True).startswith(f"{name} is not what was written: its SHA-256")
    assert latest_complete_checkpoint(copy, intact=True) == first
    state = {"digest": "abc", "shuffle": {"seed": 1}}
    with pytest.raises(
        ValueError, match=f"checkpoint-4'?: is not a complete checkpoint, {name} is not what was written"
    ):
        trainer(copy, data_state=state, **SHORT).fit(resume=last)
    trainer(copy, data_state=state, **SHORT).fit()
    assert weights.read_bytes() == expected and fault(last, intact=True) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": 3}'])
def test_an_unreadable_seal_is_no_seal(copy, text):
    last = checkpoints(copy)[-1]
    (last / SEAL).write_text(text)
    assert SEAL in fault(last) and latest_complete_checkpoint(copy) == checkpoints(copy)[0]


def test_folders_of_other_names_are_none(tmp_path):
    for name in ("checkpoint-x", "checkpoint-1.partial", "checkpoint", "my-checkpoint-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert checkpoints(tmp_path) == [] and latest_complete_checkpoint(tmp_path / "absent") is None


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 100, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]


def sealed(folder: Path, *steps: int) -> None:
    for step in steps:
        path = folder / f"checkpoint-{step}"
        path.mkdir()
        (path / SEAL).write_text(json.dumps({"format": FORMAT, "files": {}, "run": {}}))


def test_a_partial_checkpoint_never_costs_a_complete_one(tmp_path):
    sealed(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint-4").mkdir()  # newer, and partial
    delete_old_checkpoints(tmp_path, limit=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    "limit, left", [(1, [1, 4]), (2, [1, 4]), (3, [1, 3, 4]), *((x, [1, 2, 3, 4]) for x in (None, 0, -1))]
)
def test_the_best_and_the_newest_checkpoint_stay(tmp_path, limit, left):
    """As in `Trainer` the best one is among the `save_total_limit`, unless that leaves no room for the newest."""
    sealed(tmp_path, 1, 2, 3, 4)
    delete_old_checkpoints(tmp_path, limit, best=str(tmp_path / "checkpoint-1"))
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in left]


def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path, monkeypatch):
    sealed(tmp_path, 1, 2)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # before it could delete anything
        delete_old_checkpoints(tmp_path, limit=1)
    assert fault(tmp_path / "checkpoint-1") is not None and fault(tmp_path / "checkpoint-2") is None
    assert len(os.listdir(tmp_path)) == 2
    delete_old_checkpoints(tmp_path, limit=1)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_a_folder_that_cannot_be_renamed_is_deleted_where_it_is(tmp_path):
    sealed(tmp_path, 1, 2)
    (tmp_path / ".deleted-checkpoint-1").write_text("in the way")
    delete_old_checkpoints(tmp_path, limit=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_checkpoint_can_be_named(copy, capsys):
    first, last = checkpoints(copy)
    expected = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    state = {"digest": "abc", "shuffle": {"seed": 1}}
    again = trainer(copy, data_state=state, **SHORT)
    again.fit(resume=first)
    assert f"going on from {first}\n" in capsys.readouterr().out
    assert (last / "model.safetensors").read_bytes() == expected
    (last / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-4'?: is not a complete checkpoint, optimizer.pt is missing"):
        trainer(copy, data_state=state, **SHORT).fit(resume=last)


def test_a_folder_that_is_not_there_cannot_be_named(tmp_path):
    with pytest.raises(ValueError, match="resume='.*nowhere': there is no such folder"):
        trainer(tmp_path, **SHORT).fit(resume=tmp_path / "nowhere")


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path):
    trainer(tmp_path, save_only_model=True, max_steps=1).fit()
    with pytest.raises(ValueError, match="checkpoint-1 was saved with save_only_model=True"):
        trainer(tmp_path, save_only_model=True, max_steps=2).fit()


def test_never_refuses_a_folder_with_checkpoints(copy):
    with pytest.raises(ValueError, match="resume='never' .*: .* holds checkpoint-4 already"):
        trainer(copy, **SHORT).fit(resume="never")


def test_a_run_that_has_ended_takes_no_further_step(copy, caplog):
    """Four steps of five in an epoch: `Trainer` alone would take another one."""
    before = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    (copy / "training.json").unlink()
    again = trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT)
    metrics = again.fit()
    assert (copy / "model.safetensors").read_bytes() == before and again.state.global_step == 4
    record = json.loads((copy / "training.json").read_text())
    assert record["steps"] == 4 and record["metrics"] == metrics and record["tokens_trained"] == 4 * 4 * 32


def test_a_run_that_died_in_its_last_save_ends_with_the_best_weights_and_the_last_chunk_sizes(tmp_path):
    settings = {"max_steps": 6, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": False}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    metrics = trainer(tmp_path, **settings).fit()
    names = ("model.safetensors", "config.json")
    expected = [(tmp_path / name).read_bytes() for name in names]
    assert expected[0] == (tmp_path / "checkpoint-2" / names[0]).read_bytes(), "the best is not the last"
    assert json.loads(expected[1])["local_chunk_sizes"] == [4, 8] != CONFIG["local_chunk_sizes"]
    for name in (*names, "training.json"):
        (tmp_path / name).unlink()
    assert trainer(tmp_path, **settings).fit() == metrics
    assert [(tmp_path / name).read_bytes() for name in names] == expected


def test_a_run_that_has_ended_and_has_its_results_writes_none_of_them(copy):
    """On a full disk they would be lost."""
    times = {path: path.stat().st_mtime_ns for path in (copy / "model.safetensors", copy / "training.json")}
    again = trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT)
    assert again.fit() == json.loads((copy / "training.json").read_text())["metrics"]
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.parametrize("left", [None, 0, 7, 1000])
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_results_of_a_run_that_has_ended_are_written_again(copy, caplog, left, sharded):
    path, expected = copy / "model.safetensors", (copy / "model.safetensors").read_bytes()
    if sharded:
        path = path.rename(copy / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(load_file(path), path.name)}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink() if left is None else os.truncate(path, left)
    trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT).fit()
    assert (copy / "model.safetensors").read_bytes() == expected and (sharded or path.exists())
    assert f"The results in {copy} are written again, from {copy / 'checkpoint-4'}: " in caplog.text
    caplog.clear()
    trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT).fit()
    assert "written again" not in caplog.text


# --- the same run ---


CHANGES = {
    "seed": ({"seed": 2}, "seed=2: the run was begun with 1"),
    "batch": ({"per_device_train_batch_size": 4}, "per_device_train_batch_size=4: the run was begun with 2"),
    "accumulation": ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1: the run was begun with 2"),
    "workers": ({"dataloader_num_workers": 1}, "dataloader_num_workers=1: the run was begun with 0"),
    "rate": ({"learning_rate": 1e-4}, "learning_rate=0.0001: the run was begun with 0.01"),
    "schedule": ({"lr_scheduler_type": "linear"}, "lr_scheduler_type='linear': the run was begun with 'cosine'"),
    "data": (
        {"data_state": {"digest": "xyz", "shuffle": {"seed": 1}}},
        "data.digest='xyz': the run was begun with 'a",
    ),
    "nested": ({"data_state": {"digest": "abc", "shuffle": {"seed": 2}}}, "data.shuffle.seed=2: the run was begun wi"),
    "more data": (
        {"data_state": {"digest": "abc", "shuffle": {"seed": 1}, "packing": True}},
        "data.packing=True: the run was begun with nothing",
    ),
    "no data": ({"data_state": {"shuffle": {"seed": 1}}}, "data.digest=nothing: the run was begun with 'abc'"),
    "model": ({"config": {"global_chunk_size": 16}}, "model_config.global_chunk_size=16: the run was begun with 8"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_run_is_refused_and_the_setting_named(run, name):
    changes, message = CHANGES[name]
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if "runs" not in path.parts)
    state = {"data_state": {"digest": "abc", "shuffle": {"seed": 1}}}
    with pytest.raises(ValueError) as error:
        trainer(run, **SHORT | state | changes).fit()
    assert message in str(error.value) and "checkpoint-4" in str(error.value) and "\n" not in str(error.value)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if "runs" not in path.parts)


# Of every setting that decides which rows a step sees or what it does with them, another value.
OTHERWISE = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 3,
    "dataloader_num_workers": 3,
    "dataloader_drop_last": True,
    "train_sampling_strategy": "sequential",
    "seed": 3,
    "data_seed": 3,
    "num_train_epochs": 7.0,
    "optim": "adafactor",
    "optim_args": "scale_parameter=False",
    "learning_rate": 0.3,
    "weight_decay": 0.3,
    "adam_beta1": 0.3,
    "adam_beta2": 0.3,
    "adam_epsilon": 0.3,
    "max_grad_norm": 0.3,
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"power": 3.0},
    "warmup_steps": 3,
    "bf16": True,
    "fp16": True,
    "neftune_noise_alpha": 0.3,
}


def test_every_setting_that_decides_a_step_is_compared(tmp_path):
    args = vars(TrainingArguments(str(tmp_path), use_cpu=True))
    before = run_state(SimpleNamespace(**args), 1, {}, {})
    assert OTHERWISE.keys() == {*FIXED}
    for name, value in OTHERWISE.items():
        (difference,) = _differences(before, run_state(SimpleNamespace(**args | {name: value}), 1, {}, {}))
        assert difference.startswith(f"{name}={value!r}: the run was begun with")


def test_other_data_is_told_in_words():
    before, now = ({"data": {"data": x, "tokenizer": x, "packing": True}} for x in ("8bd6", "2f43"))
    assert list(_differences(before, now)) == [
        "dataset_name: the content of the data is not what it was when the run was begun",
        "tokenizer: what it does is not what it was when the run was begun",
    ]


def test_another_schedule_of_chunk_sizes_is_refused(run):
    again = trainer(run, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT)
    again.remove_callback(ChunkSizeSchedule)
    again.add_callback(ChunkSizeSchedule({4: [8, 8]}))
    with pytest.raises(ValueError, match=r"callbacks.ChunkSizeSchedule.4=\[8, 8\]: the run was begun with \[4, 8\]"):
        again.fit()


def test_another_schedule_of_mixing_is_another_run():
    before, now = (callback_settings([LiZACallback(final_weight=weight)]) for weight in (0.5, 0.4))
    assert "LiZACallback.final_weight=0.4: the run was begun with 0.5" in list(_differences(before, now))


def test_more_steps_are_allowed_and_said(copy, caplog):
    left = copy / "checkpoint-5" / "of a run that died while saving"
    left.parent.mkdir()
    left.touch()
    longer = trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT | {"max_steps": 5})
    with caplog.at_level(logging.WARNING):
        longer.fit()
    assert "max_steps=5: the run was begun with 4" in caplog.text
    assert TrainerState.load_from_json(str(copy / "checkpoint-5" / "trainer_state.json")).global_step == 5
    assert not left.exists()


def test_how_often_it_saves_and_logs_is_as_it_is_told_to_go_on(copy):
    shutil.rmtree(copy / "checkpoint-4")
    again = trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT | {"save_steps": 1})
    again.fit()
    assert [path.name for path in checkpoints(copy)] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_a_tied_weight_is_not_said_to_be_missing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for steps in (2, 4):
        run = trainer(tmp_path, **SHORT | {"max_steps": steps}, config={"tie_word_embeddings": True})
        run.fit()
    assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
    assert "max_steps=4: the run was begun with 2" in caplog.text and "missing" not in caplog.text


def test_a_model_that_could_not_be_saved_is_not_said_to_be_of_the_run_before(copy, monkeypatch):
    longer = trainer(copy, data_state={"digest": "abc", "shuffle": {"seed": 1}}, **SHORT | {"max_steps": 5})
    save = longer.save_model

    def save_model(output_dir=None, **options):
        if output_dir is None:
            raise OSError("No space left on device")
        save(output_dir, **options)  # a checkpoint's

    monkeypatch.setattr(longer, "save_model", save_model)
    with pytest.raises(OSError, match="No space left on device.; checkpoint-5 is complete and intact"):
        longer.fit()
    assert not (copy / "training.json").exists()


def test_the_summary_of_a_continued_run_is_of_its_own_steps(tmp_path):
    """Saved between two logs: the loss of the steps before is handed on to the next log, and counts for that only."""
    first, losses = trainer(tmp_path, **SHORT, logging_steps=3), []
    first.fit()
    before = json.loads((tmp_path / "checkpoint-2" / "progress_0.json").read_text())["loss"]
    shutil.rmtree(tmp_path / "checkpoint-4")
    second = trainer(tmp_path, **SHORT, logging_steps=3)
    second.fit()
    for run in (first, second):
        losses.append([entry for entry in run.state.log_history if "train_loss" in entry][-1]["train_loss"])
    assert before > 0 and losses[1] == pytest.approx((4 * losses[0] - before) / 2)


class Endless(torch.utils.data.IterableDataset):
    """A stream that begins again at its end."""

    def __init__(self, passes: int):
        self.passes = passes

    def __iter__(self):
        for _ in range(self.passes):
            yield from samples(12)


@pytest.mark.long
def test_a_stream_goes_on_where_it_stopped(tmp_path):
    weights = []
    for _ in range(2):
        trainer(tmp_path, data=Endless(9), **SHORT).fit()
        weights.append((tmp_path / "model.safetensors").read_bytes())
        shutil.rmtree(tmp_path / "checkpoint-4")
    assert weights[0] == weights[1]


def test_adapters_go_on_to_the_bit(tmp_path):
    """LoRA beside a memory that is trained in full; what is saved at the end is the merged model."""
    weights = []
    for _ in range(2):
        base = trainer(tmp_path).model
        torch.manual_seed(1)
        model = get_peft_model(base, lora_config(base, r=2, lora_dropout=0.1))
        trainer(tmp_path, model=model, **SHORT).fit()
        weights.append((tmp_path / "model.safetensors").read_bytes())
        shutil.rmtree(tmp_path / "checkpoint-4")
    assert weights[0] == weights[1] and (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()


def test_a_stream_that_ends_before_the_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="train_dataset: the stream ended in step 4 of 4"):
        trainer(tmp_path / "out", data=Endless(1), **SHORT).fit()


def test_what_died_in_its_last_save_ends_with_the_last_weights_unless_the_best_are_asked_for(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer(tmp_path, **SHORT, **settings).fit()
    last = (tmp_path / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "training.json"):
        (tmp_path / name).unlink()
    again = trainer(tmp_path, **SHORT, **settings)
    again.fit()
    assert again.state.best_model_checkpoint.endswith("checkpoint-2")
    assert (tmp_path / "model.safetensors").read_bytes() == last


def test_training_goes_on_without_a_cache_after_a_save(tmp_path):
    class Look(TrainerCallback):
        used: list[bool] = []

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.used.append(model.config.use_cache)

    trainer(tmp_path, more=[look := Look()], max_steps=2, save_steps=1).fit()
    assert look.used == [False, False]


def test_no_epoch_is_evaluated_before_the_delay(tmp_path):
    run = trainer(tmp_path, eval_strategy="epoch", eval_delay=2, max_steps=13)
    run.fit()
    assert [x["step"] for x in run.state.log_history if "eval_loss" in x] == [10, 13]
