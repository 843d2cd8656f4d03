"""Which files of a folder are data, and of which split."""

import logging
import re
from pathlib import Path

from tnt_hf.recipes.file_formats import TABLES, TEXTS, kind_of


log = logging.getLogger(__name__)
SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation"}
SPLIT_NAMES |= {"dev": "validation", "val": "validation", "test": "test", "testing": "test", "eval": "test"}
READABLE = f"readable are {', '.join(sorted(TABLES))} and text such as .txt, .md and .py, all but .parquet also as .gz"


def declares_a_dataset(folder: Path) -> bool:
    """Whether the README.md of a folder has a YAML header that declares a dataset."""
    readme = folder / "README.md"
    header = re.match(r"---\n(.*?)\n---", readme.read_text("utf-8", "replace"), re.S) if readme.is_file() else None
    return header is not None and re.search(r"^(configs|dataset_info):", header[1], re.M) is not None


def declared_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
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

    A table belongs to the split that its name begins with (`test-00000.parquet`) or that its folder is called, any
    other file to train.
    """
    found = {path for path in folder.rglob("*") if path.is_file()}
    found = {x for x in found if not any(p[0] == "." or p == "__pycache__" for p in x.relative_to(folder).parts)}
    tables = {path for path in found if kind_of(path) in TABLES}
    texts = {path for path in found if kind_of(path) in TEXTS}
    decisive = {path for path in tables if kind_of(path) != ".json"}  # source trees hold settings in .json files
    chosen = tables if decisive or not texts else texts
    if not chosen:
        raise ValueError(f"dataset_name={str(folder)!r}: holds no file that can be read, {READABLE}")
    if skipped := sorted(found - chosen):
        log.warning("%s: %d files are not read, the first is %s", folder, len(skipped), skipped[0])
    splits: dict[str, list[Path]] = {}
    for path in sorted(chosen, key=lambda path: path.relative_to(folder).as_posix()):
        names = [re.match(r"[a-z]*", path.name.lower())[0], path.parent.name.lower()] if path in tables else []
        if path.parent == folder:
            names = names[:1]
        splits.setdefault(next((SPLIT_NAMES[name] for name in names if name in SPLIT_NAMES), "train"), []).append(path)
    return splits
