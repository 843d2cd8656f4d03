"""Steps that are trained a second time: what the first pass saved is there until the second has saved it again."""

import itertools
import json
import os
import shutil
import signal
import sys

import pytest
from forks import in_a_child
from test_trainer_resume import sealed
from train_killer import Die, limit_files, outcome, trainer, was_killed

from tnt_hf.recipes.checkpoints import (
    REPLACED,
    SEAL,
    bring_back,
    checkpoints,
    delete_old_checkpoints,
    fault,
    make_room,
    next_start,
    seal,
    settle,
)
from tnt_hf.recipes.recipe_file import read_recipe
from tnt_hf.recipes.run_folder import check_output, check_unused, claim_output
from tnt_hf.recipes.train import prepare


EVERY = {"save_steps": 2}
ASIDE = f"{REPLACED}checkpoint-4"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of eight steps with four checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "out"
    trainer(folder, **EVERY).fit()
    return folder


@pytest.fixture
def copy(run, tmp_path):
    """It, without its record: a run that is to be ended again."""
    folder = shutil.copytree(run, tmp_path / "out")
    (folder / "training.json").unlink()
    return folder


def steps(folder) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in checkpoints(folder) if fault(path) is None]


def content(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is written again ---


def test_a_full_disk_costs_no_checkpoint_that_was_complete(copy):
    before = content(copy / "checkpoint-4")

    def fill():
        again = trainer(copy, **EVERY)
        limit_files(30_000)
        try:
            again.fit(resume=copy / "checkpoint-2")
        except OSError as error:
            assert "checkpoint-4 could not be written" in str(error), error
            return
        raise AssertionError("no error")

    assert in_a_child(fill) == 0
    assert content(copy / "checkpoint-4") == before and steps(copy) == [2, 4, 6, 8]
    assert not (copy / ASIDE).exists()


# Event, part of the path it names, and whether the new one is complete then.
MOMENTS = {
    "before its first file": ("open", "/checkpoint-4/", False),
    "before it is sealed": ("os.rename", f"/checkpoint-4/.{SEAL}", False),
    "before the old one is deleted": ("shutil.rmtree", f"/{ASIDE}", True),
    "while the old one is deleted": ("os.remove", "", True),  # by descriptors, so that no path is named
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_costs_no_checkpoint_that_was_complete(run, copy, moment):
    died, place, is_sealed = MOMENTS[moment]
    before = content(copy / "checkpoint-4")

    def work():
        again, removed = trainer(copy, **EVERY), itertools.count()

        def hook(event, arguments):
            path = f"{arguments[0]}" if event == died else ""
            here = place in path if place else path and "/" not in path and next(removed)  # one file is gone
            if here and (copy / ASIDE).exists():
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        again.fit(resume=copy / "checkpoint-2")

    assert was_killed(in_a_child(work))
    assert (fault(copy / "checkpoint-4") is None) == is_sealed
    assert (fault(copy / ASIDE) is None) == (died != "os.remove")
    check_unused(copy)
    assert steps(copy) == [2, 4, 6, 8] and not (copy / ASIDE).exists()
    assert is_sealed or content(copy / "checkpoint-4") == before
    assert in_a_child(lambda: trainer(copy, **EVERY).fit(resume=copy / "checkpoint-2")) == 0
    assert outcome(copy) == outcome(run)


def test_a_run_puts_back_what_a_killed_one_was_replacing(copy):
    """Also the library's own door, which looks into no folder before."""
    make_room(copy / "checkpoint-8")
    (copy / "checkpoint-8").mkdir()
    assert steps(copy) == [2, 4, 6]
    again = trainer(copy, **EVERY)
    again.fit()
    assert again.had_ended and steps(copy) == [2, 4, 6, 8]


def test_a_checkpoint_that_is_a_link_comes_back_as_one(tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    sealed(elsewhere, 1)
    link = tmp_path / "checkpoint-1"
    link.symlink_to(elsewhere / "checkpoint-1")
    make_room(link)
    assert not link.is_symlink()
    link.mkdir()
    bring_back(tmp_path)
    assert link.is_symlink() and fault(link) is None
    make_room(link)
    sealed(tmp_path, 1)
    settle(link)
    assert not link.is_symlink() and fault(elsewhere / "checkpoint-1") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "elsewhere"]


def test_a_checkpoint_that_cannot_be_moved_aside_stays(copy, monkeypatch):
    before = content(copy / "checkpoint-4")
    monkeypatch.setattr("pathlib.Path.rename", lambda *_: open("/dev/full/x"))  # of a file system that renames nothing
    with pytest.raises(OSError, match="checkpoint-4 could not be written"):
        trainer(copy, **EVERY).fit(resume=copy / "checkpoint-2")
    assert content(copy / "checkpoint-4") == before


def test_a_checkpoint_that_lies_aside_keeps_the_folder_to_its_run(tmp_path):
    claim_output(tmp_path, {"seed": 1})
    sealed(tmp_path, 4)
    make_room(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="belongs to another run, seed is 2 and was 1"):
        check_output(tmp_path, {"seed": 2})
    check_output(tmp_path, {"seed": 1})


def test_a_checkpoint_that_lies_aside_can_be_named(tmp_path):
    """It is put back before anybody looks for it."""
    (tmp_path / "text.txt").write_text("some words to learn\n" * 99)
    output = tmp_path / "out"
    words = f"--output_dir {output} --dataset_name {tmp_path}/text.txt --mode pretrain --model tnt --max_steps 2"
    words += f" --tokenizer_vocab_size 257 --use_cpu --report_to none --resume_from_checkpoint {output}/checkpoint-4"
    arguments = [*words.split(), "--chunk_size_schedule", "{9: 8}"]
    claim_output(output, read_recipe(arguments).given)
    with pytest.raises(ValueError, match="resume_from_checkpoint=.*checkpoint-4': there is no such folder"):
        prepare(arguments)
    sealed(output, 4)
    make_room(output / "checkpoint-4")
    with pytest.raises(ValueError, match="chunk_size_schedule: names step 9, but the run has 2 steps"):  # what is next
        prepare(arguments)
    assert fault(output / "checkpoint-4") is None


# --- what nobody can tell to be unfinished ---


def damaged(folder, seal) -> None:
    """A seal that is there and says something else, or cannot be read."""
    (folder / SEAL).unlink()
    (folder / SEAL).mkdir() if seal is None else (folder / SEAL).write_text(json.dumps(seal))


@pytest.mark.parametrize(
    "seal, error", [({"format": "tnt-checkpoint-2"}, "format='tnt-checkpoint-2' is not"), (None, "Is a directory")]
)
def test_a_checkpoint_that_may_be_complete_is_not_removed(tmp_path, seal, error):
    """That of another release, or of a disk that does not answer."""
    sealed(tmp_path, 4)
    damaged(tmp_path / "checkpoint-4", seal)
    before = content(tmp_path)
    for remove in (make_room, settle):
        with pytest.raises((ValueError, OSError), match=error):
            remove(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4").rename(tmp_path / ASIDE)
    with pytest.raises((ValueError, OSError), match=error):
        bring_back(tmp_path)
    assert {name.partition("/")[2]: x for name, x in content(tmp_path).items()} == {
        name.partition("/")[2]: x for name, x in before.items()
    }


def test_what_cannot_be_removed_is_named_with_what_waits_for_its_place(tmp_path, monkeypatch):
    sealed(tmp_path, 4)
    make_room(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / ".nfs0001").touch()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # of a file that another machine holds open
    with pytest.raises(OSError, match=f"so {ASIDE}, complete, cannot take its place: '.*/checkpoint-4'"):
        bring_back(tmp_path)
    assert fault(tmp_path / ASIDE) is None


def test_an_error_of_one_process_removes_nothing_that_others_write_to(tmp_path, monkeypatch):
    """What a complete checkpoint lies aside for is settled by the next session."""
    again = trainer(tmp_path, **EVERY)
    sealed(tmp_path, 4)
    for world_size, there in ((2, [ASIDE, "checkpoint-4"]), (1, ["checkpoint-4"])):
        monkeypatch.setattr(type(again.args), "world_size", world_size)
        with pytest.raises(OSError, match="could not be written"), again.saving(tmp_path / "checkpoint-4"):
            make_room(tmp_path / "checkpoint-4")
            (tmp_path / "checkpoint-4").mkdir()
            raise OSError("full")
        assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == there
    assert steps(tmp_path) == [4]


# --- what is deleted ---


def test_what_only_looks_like_a_run_s_is_left_alone(tmp_path):
    sealed(tmp_path, 2, 4)
    for name in (".deleted-thoughts", f"{REPLACED}checkpoint-keep", "checkpoint-keep"):
        (tmp_path / name).mkdir()
    bring_back(tmp_path)
    delete_old_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [4]
    kept = {".deleted-thoughts", f"{REPLACED}checkpoint-keep", "checkpoint-keep", "checkpoint-4"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_link_to_a_checkpoint_is_deleted_as_one(tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    sealed(elsewhere, 1)
    sealed(tmp_path, 2)
    (tmp_path / "checkpoint-1").symlink_to(elsewhere / "checkpoint-1")
    delete_old_checkpoints(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "elsewhere"]
    assert fault(elsewhere / "checkpoint-1") is None


@pytest.mark.parametrize(
    "limit, saved, named, left",
    [
        (1, 4, 2, [2, 4, 6, 8]),
        (1, 6, 2, [2, 6, 8]),
        (1, 8, 2, [2, 8]),
        (1, 8, None, [8]),
        (2, 8, 2, [2, 8]),
        (3, 8, 2, [2, 6, 8]),
        (1, 2, None, [2, 4, 6, 8]),
    ],
)
def test_what_an_earlier_pass_saved_does_not_count(tmp_path, limit, saved, named, left):
    sealed(tmp_path, 2, 4, 6, 8)
    at = None if named is None else tmp_path / f"checkpoint-{named}"
    delete_old_checkpoints(tmp_path, limit, saved=tmp_path / f"checkpoint-{saved}", named=at)
    assert steps(tmp_path) == left


def test_what_is_best_to_an_earlier_pass_stays_with_it(tmp_path):
    sealed(tmp_path, 2, 4, 6, 8)
    for path, best in zip(checkpoints(tmp_path), (2, 2, 2, 4)):
        (path / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": f"checkpoint-{best}"}))
    delete_old_checkpoints(tmp_path, 1, best=str(tmp_path / "checkpoint-2"), saved=tmp_path / "checkpoint-6")
    assert steps(tmp_path) == [2, 4, 6, 8]


def test_the_same_command_goes_on_after_a_kill_where_it_named_a_checkpoint(run, copy):
    settings = {**EVERY, "save_total_limit": 1}

    def again(*more):
        trainer(copy, more=more, **settings).fit(resume=copy / "checkpoint-2")

    assert was_killed(in_a_child(lambda: again(Die(5, "step"))))
    assert steps(copy) == [2, 4, 6, 8]
    assert in_a_child(again) == 0
    assert outcome(copy) == outcome(run) and steps(copy) == [2, 8]


def test_a_checkpoint_that_was_found_is_not_kept_as_one_that_was_named(copy):
    for step in (4, 6, 8):
        shutil.rmtree(copy / f"checkpoint-{step}")
    trainer(copy, **EVERY, save_total_limit=1).fit()
    assert steps(copy) == [8]


# --- what a session goes on from ---


@pytest.mark.parametrize("value", [True, False, "", " "])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, value):
    with pytest.raises(ValueError, match=f"resume={value!r}: must be 'auto', 'never' or the path"):
        trainer(tmp_path, **EVERY).fit(resume=value)


def test_the_library_s_own_door_goes_on_from_nothing_unseen(copy):
    """It would take a checkpoint that is not complete, and save those that belong to no run."""
    (copy / "checkpoint-8" / "optimizer.pt").unlink()
    for value in (True, str(copy / "checkpoint-8")):
        with pytest.raises(ValueError, match=f"resume_from_checkpoint={value!r}: would go on from what nobody"):
            trainer(copy, **EVERY).train(resume_from_checkpoint=value)


def test_a_best_checkpoint_that_is_not_to_be_loaded_may_be_damaged(copy):
    state = json.loads((copy / "checkpoint-6" / "trainer_state.json").read_text())
    shutil.rmtree(copy / "checkpoint-8")
    state |= {"best_model_checkpoint": str(copy / "checkpoint-2"), "best_global_step": 2}
    (copy / "checkpoint-6" / "trainer_state.json").write_text(json.dumps(state))
    seal(copy / "checkpoint-6", json.loads((copy / "checkpoint-6" / SEAL).read_text())["run"])
    (copy / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    trainer(copy, **EVERY).fit()
    assert steps(copy) == [4, 6, 8]


def test_what_an_interrupted_command_goes_on_from_is_told(tmp_path):
    sealed(tmp_path, 2, 4)
    args = trainer(tmp_path, **EVERY).args
    assert next_start(args) == tmp_path / "checkpoint-4"
    make_room(tmp_path / "checkpoint-4")
    assert next_start(args) == tmp_path / "checkpoint-4", "it comes back"
    args.resume_from_checkpoint = str(tmp_path / "checkpoint-2")
    assert next_start(args) == tmp_path / "checkpoint-2"
