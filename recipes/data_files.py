"""Which files of a folder are data, and of which split."""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tnt_hf.recipes.file_formats import TABLES, TEXTS, kind_of


log = logging.getLogger(__name__)
SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation"}
SPLIT_NAMES |= {"dev": "validation", "val": "validation", "test": "test", "testing": "test"}
SPLIT_NAMES |= {"eval": "test", "evaluation": "test"}
READABLE = f"readable are {', '.join(sorted(TABLES))} and text such as .txt, .md and .py, all but .parquet also as .gz"


def files_of(path: Path, config: str | None, split: str) -> list[Path]:
    """
    The files of one split of `path`: itself, or those of a folder. One whose README.md declares a dataset in its YAML
    header has the splits and files that it declares; what is left out of another is said.

    Raises:
        ValueError: `path` is neither a file nor a folder, or there is no such configuration, split or file.
    """
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"dataset_name={str(path)!r}: is neither a file nor a folder")  # to open a pipe would wait
    if path.is_dir() and _declares_a_dataset(path):
        files = _declared_files(path, config)
    else:
        if config is not None:
            raise ValueError(f"dataset_config={config!r}: {path} is not a dataset with configurations")
        files, split = data_files(path) if path.is_dir() else {"train": [path]}, SPLIT_NAMES.get(split, split)
        if others := {name: len(found) for name, found in files.items() if name != split and split in files}:
            log.warning("%s: read as the split %r; the files of others are not: %s", path, split, others)
    if split not in files:
        raise ValueError(f"dataset_split={split!r}: {path} has only {', '.join(map(repr, files))}")
    return files[split]


def _declares_a_dataset(folder: Path) -> bool:
    """Whether the README.md of a folder has a YAML header that declares a dataset."""
    readme = folder / "README.md"
    header = re.match(r"---\n(.*?)\n---", readme.read_text("utf-8", "replace"), re.S) if readme.is_file() else None
    return header is not None and re.search(r"^(configs|dataset_info):", header[1], re.M) is not None


def _declared_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """The files of a local dataset repository by split, as its README.md declares them."""
    import datasets

    try:
        splits = datasets.load_dataset_builder(str(folder), config).config.data_files
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"dataset_name={str(folder)!r}, dataset_config={config!r}: {error}") from error
    return {str(split): [Path(file) for file in files] for split, files in splits.items()}


def data_files(folder: Path) -> dict[str, list[Path]]:
    """
    The readable files below `folder` by split, sorted: tables if there is one, otherwise texts; hidden ones never.

    A table belongs to the split that is a word of its name (`test-00000.parquet`, `wiki-test.jsonl`) or what one of
    its folders is called; a text to that which is its whole name, `test.txt`, or its first folder's where one of them
    is called train; and any other file to train: in source trees "test" is part of many names. A README or a licence
    beside tables is no text.

    Raises:
        ValueError: there is none, or one is a link to a file that is not there.
    """
    found = set(_files(folder))
    saved = {path.parent for path in found if path.suffix == ".arrow"}
    found -= {place / name for place in saved for name in ("state.json", "dataset_info.json")}
    found -= {place.parent / "dataset_dict.json" for place in saved}
    tables = {path for path in found if kind_of(path) in TABLES}
    texts = {path for path in found if kind_of(path) in TEXTS}
    decisive = {path for path in tables if kind_of(path) != ".json"}  # source trees hold settings in .json files
    beside = {path for path in texts if path.name.upper().partition(".")[0] in ("README", "LICENSE", "LICENCE")}
    chosen = tables if decisive or (tables and texts == beside) or not texts else texts
    if not chosen:
        hint = "; what save_to_disk of datasets wrote is not, write it with to_parquet" if saved else ""
        raise ValueError(f"dataset_name={str(folder)!r}: holds no file that can be read, {READABLE}{hint}")
    if lost := sorted(path for path in chosen if not path.exists()):
        raise ValueError(f"dataset_name={str(folder)!r}: {lost[0]} is a link to a file that is not there")
    if skipped := sorted(found - chosen):
        read, others = ("tables", "texts") if chosen == tables else ("texts", "tables")
        counts = read, len(chosen), others, len(skipped), skipped[0]
        log.warning("%s: only its %s (%d) are read; its %s (%d) are not, the first is %s", folder, *counts)
    folders = {path: path.relative_to(folder).parts[:-1] for path in chosen}
    named = any(parts and SPLIT_NAMES.get(parts[0].lower()) == "train" for parts in folders.values())
    splits: dict[str, list[Path]] = {}
    for path in sorted(chosen, key=lambda path: path.relative_to(folder).as_posix()):
        if path in tables:
            names = [*re.findall("[a-z]+", path.name.lower()), *map(str.lower, folders[path][::-1])]
        else:
            names = [path.name.lower().partition(".")[0]] if kind_of(path) == ".txt" else []
            names += [part.lower() for part in folders[path][:1] if named]
        splits.setdefault(next((SPLIT_NAMES[name] for name in names if name in SPLIT_NAMES), "train"), []).append(path)
    return splits


def _files(folder: Path) -> Iterator[Path]:
    """What lies below `folder` and is not hidden, also behind links, but those that lead to where one comes anyway."""
    root = folder.resolve()
    for name, folders, files in os.walk(folder, followlinks=True):
        here = Path(name)
        above = {x.resolve() for x in (here, *here.parents)}
        folders[:] = [x for x in folders if _is_open(x) and (here / x).resolve() not in above]
        folders[:] = [x for x in folders if not (here / x).is_symlink() or not _is_inside((here / x).resolve(), root)]
        yield from (here / x for x in files if _is_open(x) and ((here / x).is_file() or (here / x).is_symlink()))


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a walk from `root` comes to `path` without links."""
    return path.is_relative_to(root) and all(map(_is_open, path.relative_to(root).parts))


def _is_open(name: str) -> bool:
    return name[0] != "." and name != "__pycache__"
