"""A warning where what is evaluated on was trained on: `training_note`."""

import json
from pathlib import Path

import pytest
from test_data_sources import jsonl, write

from tnt_hf.recipes.evaluation_note import training_note


def note_of(folder: Path, training: dict, data: str, held_out: float, config=None, split=None, text_column="text"):
    """The warning of a model in `folder` whose record says `training` of its data."""
    (folder / "training.json").write_text(json.dumps({"data": training}))
    return training_note(folder, data, config, split, text_column, held_out)


def test_training_on_the_same_text_is_told(tmp_path):
    def note(data: dict, held_out: float):
        return note_of(tmp_path, data, "python-stdlib", held_out)

    assert "eval_share=0.0" in note({"name": "python-stdlib"}, 0.05)
    assert "is not held out" in note({"name": "python-stdlib", "eval_share": 0.05}, 0.0)
    assert note({"name": "python-stdlib", "eval_share": 0.05}, 0.05) is None
    assert note({"name": "other"}, 0.05) is None
    assert training_note(tmp_path / "none", "python-stdlib", None, None, "text", 0.05) is None
    found = note_of(tmp_path, {"name": "./texts/a.jsonl"}, "texts/a.jsonl", 0.0)
    assert "is not held out" in found, "however the path is spelled"
    assert note_of(tmp_path, {"name": "./texts/a.jsonl"}, "texts/b.jsonl", 0.0) is None


@pytest.mark.parametrize(
    ("config", "split", "same"),
    [
        ("en", "train", True),
        ("en", None, True),
        ("en", "training", True),
        ("en", "validation", False),
        (None, "train", False),
    ],
)
def test_another_split_or_configuration_is_other_text(tmp_path, config, split, same):
    data = {"name": "owner/texts", "config": "en", "split": "train"}
    assert (note_of(tmp_path, data, "owner/texts", 0.0, config, split) is not None) == same


@pytest.mark.parametrize("data", [5, {"name": 5}, {"name": "python-stdlib", "eval_share": "x"},
                                  {"name": "python-stdlib", "split": [5]}, {"name": ["a"]}], ids=str)  # fmt: skip
def test_what_a_hand_edited_record_says_of_the_data_costs_no_evaluation(data, tmp_path):
    assert note_of(tmp_path, data, "python-stdlib", 0.05) is None


@pytest.mark.parametrize(
    "trained, evaluated, split, same",
    [
        ("data", "data/en/a.jsonl", None, True),
        ("data", "data/en", None, True),
        ("data/en", "data", None, True),  # the other way round
        ("data/en/a.jsonl", "data", None, True),
        ("data", "data/test.jsonl", None, False),  # a split that was not trained on
        ("data", "data/other/test", None, False),
        ("data/en", "data", "test", False),
        ("data", "elsewhere.jsonl", None, False),
        ("data", "data/none.jsonl", None, False),
    ],
)
def test_files_that_were_trained_on_are_the_same_text_wherever_they_are_looked_for(
    trained, evaluated, split, same, tmp_path
):
    for name in ("data/en/a.jsonl", "data/b.jsonl", "data/test.jsonl", "data/other/test/c.jsonl", "elsewhere.jsonl"):
        write(tmp_path / name, jsonl([{"text": name}]))
    found = note_of(tmp_path, {"name": str(tmp_path / trained)}, str(tmp_path / evaluated), 0.0, split=split)
    assert (found is not None) == same


@pytest.mark.parametrize(
    "files, evaluated, safe",
    [
        ({"data/a.txt": "a", "data/en/b.txt": "b"}, "data", True),
        ({"data/a.txt": "a", "data/en/b.txt": "b"}, "data/en", False),  # a name from another folder is another name
        ({"data/en/b.jsonl": jsonl([{"text": "b"}])}, "data/en", True),  # a row is told by what it says
    ],
)
def test_a_share_that_was_held_out_is_one_of_the_same_names(files, evaluated, safe, tmp_path):
    for name, content in files.items():
        write(tmp_path / name, content)
    training = {"name": str(tmp_path / "data"), "eval_share": 0.1}
    assert (note_of(tmp_path, training, str(tmp_path / evaluated), 0.1) is None) == safe
    assert "is not held out" in note_of(tmp_path, training, str(tmp_path / evaluated), 0.2)


def test_a_share_that_was_held_out_is_one_of_the_same_columns(tmp_path):
    """A table with a text beside its conversations: training told rows by one of them, evaluation reads the other."""
    messages = [{"role": "user", "content": "x"}]
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "x", "summary": "y", "messages": messages}]))

    def note(columns: list[str], **how):
        return note_of(tmp_path, {"name": str(path), "eval_share": 0.1, "columns": columns}, str(path), 0.1, **how)

    assert note(["messages", "messages", "tools"]) is not None
    assert note(["text", "text"]) is None
    assert note(["text", "text"], text_column="summary") is not None
