"""What an evaluation leaves that is killed while it writes, and who takes it away."""

import errno
import fcntl
import json
import os
import signal

import pytest
from forks import in_a_child
from train_killer import was_killed

from tnt_hf.recipes.evaluation_report import FORMAT, JSON, MARKDOWN, SCRATCH, check_output, write_evaluation


RESULTS = {"format": FORMAT, "model": "m", "settings": {}, "environment": {}}


def die_writing(folder, file: int) -> None:
    """Before so many files are in their place."""

    def work():
        rename, done = os.replace, []

        def replace(*names):
            if len(done) == file:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(rename(*names))

        os.replace = replace
        write_evaluation(folder, RESULTS)

    assert was_killed(in_a_child(work))


@pytest.mark.parametrize("file", [0, 1])
def test_the_next_evaluation_takes_away_what_a_killed_one_left(tmp_path, file):
    die_writing(tmp_path, file)
    (left,) = tmp_path.glob(f"{SCRATCH}*")
    assert (left / MARKDOWN).is_file()
    check_output(tmp_path, overwrite=True)  # before its model is loaded
    assert not left.exists()
    write_evaluation(tmp_path, RESULTS, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == [JSON, MARKDOWN]


def test_an_evaluation_that_is_being_written_is_left_alone(tmp_path, monkeypatch):
    rename, looked = os.replace, []

    def replace(*names):
        if not looked:
            looked.append(True)
            check_output(tmp_path, overwrite=True)
        rename(*names)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        write_evaluation(tmp_path, RESULTS)
    assert looked and sorted(os.listdir(tmp_path)) == [JSON, MARKDOWN]


def test_what_is_no_folder_of_an_evaluation_is_left_alone(tmp_path):
    (tmp_path / f"{SCRATCH}mine").mkdir()
    (tmp_path / f"{SCRATCH}mine" / "notes").touch()
    (tmp_path / f"{SCRATCH}file").touch()
    before = sorted(tmp_path.rglob("*"))
    check_output(tmp_path, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_where_no_file_can_be_locked_an_evaluation_is_written_all_the_same(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_evaluation(tmp_path, RESULTS)
    assert sorted(os.listdir(tmp_path)) == [JSON, MARKDOWN]
    assert json.loads((tmp_path / JSON).read_text())["model"] == "m"
