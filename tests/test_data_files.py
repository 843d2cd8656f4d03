"""Which files of a folder are read, and as which split."""

import logging

import pytest
from test_data_sources import GOOD, jsonl, write

from tnt_hf.recipes.data_files import data_files, files_of
from tnt_hf.recipes.encoding import pieces_of


def splits(folder) -> dict[str, list[str]]:
    """The files of every split, by their names from the folder."""
    return {
        split: [path.relative_to(folder).as_posix() for path in found] for split, found in data_files(folder).items()
    }


@pytest.mark.parametrize(
    "names, expected",
    [
        (["test/en/a.jsonl", "train/en/a.jsonl"], {"test": ["test/en/a.jsonl"], "train": ["train/en/a.jsonl"]}),
        (["en/test/a.jsonl", "b.jsonl"], {"train": ["b.jsonl"], "test": ["en/test/a.jsonl"]}),
        (["train/test.jsonl"], {"test": ["train/test.jsonl"]}),  # what is nearest says more
        (["train/a.txt", "test/b.txt"], {"test": ["test/b.txt"], "train": ["train/a.txt"]}),
        (["Train/x/a.md", "Dev/x/b.md"], {"validation": ["Dev/x/b.md"], "train": ["Train/x/a.md"]}),
        (["train/a.txt", "more/test/b.txt"], {"train": ["more/test/b.txt", "train/a.txt"]}),
        (["src/a.py", "test/b.py"], {"train": ["src/a.py", "test/b.py"]}),  # a source tree
    ],
)
def test_folders_named_after_a_split_hold_it(names, expected, tmp_path):
    for name in names:
        write(tmp_path / name, GOOD)
    assert splits(tmp_path) == expected


@pytest.mark.parametrize(
    "names, read",
    [
        (["train.json", "README.md", "LICENSE.txt"], ["train.json"]),
        (["a.json.gz", "readme.txt"], ["a.json.gz"]),
        (["settings.json", "README.md", "a.py"], ["README.md", "a.py"]),  # a source tree
        (["README.md"], ["README.md"]),
    ],
)
def test_a_readme_beside_tables_is_no_text(names, read, tmp_path):
    for name in names:
        write(tmp_path / name, "[]" if ".json" in name else "text")
    assert splits(tmp_path) == {"train": read}


def test_files_of_other_splits_are_told(tmp_path, caplog):
    for name in ("a.jsonl", "b.jsonl", "test.jsonl"):
        write(tmp_path / name, jsonl([{"text": name}]))
    with caplog.at_level(logging.WARNING):
        assert [path.name for path in files_of(tmp_path, None, "training")] == ["a.jsonl", "b.jsonl"]
    assert "read as the split 'train'; the files of others are not: {'test': 1}" in caplog.text
    caplog.clear()
    (tmp_path / "test.jsonl").unlink()
    assert len(files_of(tmp_path, None, "train")) == 2 and not caplog.text


def test_a_long_text_of_windows_is_cut_between_lines():
    text = "one line and\r\nanother\r\n\r\n" * 40
    pieces = pieces_of(text, 100)
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(
        piece.startswith("another") and not previous[-3].isspace() for previous, piece in zip(pieces, pieces[1:])
    )
