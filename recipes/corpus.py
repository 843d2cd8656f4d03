"""The source text of Python's standard library as a corpus.

Files are read in the order of their names, and which are held out follows from a hash of the name, so it does not
change when other files come or go.
"""

import hashlib
import os
import sysconfig
import tokenize
from dataclasses import dataclass, field
from pathlib import Path


# Left out: tests, installed packages, and folders whose files are tables or help texts rather than programs.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
HELD_OUT = 0.05  # the share of the files the demo does not train on, evaluated on unless asked otherwise


@dataclass
class Corpus:
    """Texts by relative file name, in the order of the names, and what happened while they were read."""

    train: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)
    other_encoding: list[str] = field(default_factory=list)  # not UTF-8, decoded as the file declares (PEP 263)
    unreadable: list[str] = field(default_factory=list)  # neither UTF-8 nor what it declares, or no permission

    def describe(self) -> dict:
        """Counts for a report: files, characters, and how many files needed another encoding or were left out."""
        return {
            "train_files": len(self.train),
            "train_characters": sum(map(len, self.train.values())),
            "held_out_files": len(self.held_out),
            "held_out_characters": sum(map(len, self.held_out.values())),
            "files_in_another_encoding": len(self.other_encoding),
            "files_left_out_as_unreadable": len(self.unreadable),
        }


def source_files(root: Path) -> list[Path]:
    """All `.py` files below `root` without `SKIPPED_FOLDERS`, in the order of their relative names."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def is_held_out(name: str, share: float) -> bool:
    """Whether a file belongs to the held-out part: a hash of its name falls into the first `share` of all hashes."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") < share * 2**64


def read_corpus(root: str | Path | None = None, held_out: float = HELD_OUT, min_characters: int = 1) -> Corpus:
    """Reads Python source text, from the standard library of the running interpreter unless `root` names a folder.

    Raises:
        ValueError: `held_out` is not in (0, 1), or `root` holds less text than `min_characters` or no held-out file.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be in (0, 1), got {held_out!r}")
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    corpus = Corpus()
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        try:
            raw = path.read_bytes()
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                with tokenize.open(path) as file:
                    text = file.read()
                corpus.other_encoding.append(name)
        except (UnicodeDecodeError, SyntaxError, OSError):  # SyntaxError: an encoding declaration nobody knows
            corpus.unreadable.append(name)
            continue
        part = corpus.held_out if is_held_out(name, held_out) else corpus.train
        part[name] = text.replace("\r\n", "\n")
    characters = sum(map(len, corpus.train.values()))
    if characters < min_characters or not corpus.held_out:
        raise ValueError(
            f"corpus {str(root)!r} must hold at least {min_characters} characters of Python source to train on and a"
            f" held-out file, found {characters} characters and {len(corpus.held_out)} held-out files"
        )
    return corpus
