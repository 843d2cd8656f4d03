"""The manifest of a converted checkpoint: where it comes from, how it was made, and a digest per file.

`sha256` is the digest taken while converting, of every file whose bytes passed through our hands. The shards of a
large source, linked or copied by the kernel, do not unless asked for. Their entry has the digest that the Hub gave
them and says so (`sha256_from`), or else size and time of last change until `add_digests` reads them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tnt_hf.conversion.files import sha256, write_json
from tnt_hf.conversion.source import read_json


MANIFEST = "tnt_manifest.json"
FORMAT = 1
TAKEN, HUB = "the one taken when it was converted", "the one the Hub gave it"


def file_entry(path: Path, how: str, digest: str | None, read: bool = True) -> dict[str, Any]:
    """How one file came here (`"written"`, `"copied"` or `"linked"`), its size (bytes) and what identifies it. `read`
    is whether the digest was taken from its bytes."""
    stat = path.stat()
    entry = {"how": how, "size": stat.st_size, "sha256": digest}
    return entry | ({"mtime_ns": stat.st_mtime_ns} if digest is None else {} if read else {"sha256_from": HUB})


def write_manifest(folder: Path, files: dict[str, dict[str, Any]], conversion: dict[str, Any]) -> None:
    """Write the manifest of `folder`; an earlier one is replaced as a whole or not at all."""
    write_json(folder / MANIFEST, {"format": FORMAT, "conversion": conversion, "files": dict(sorted(files.items()))})


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """
    The manifest of a folder.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged.
    """
    path = Path(folder) / MANIFEST
    manifest = read_json(path)
    files = manifest.get("files")
    if (
        manifest.get("format") != FORMAT
        or not isinstance(files, dict)
        or not isinstance(manifest.get("conversion"), dict)
    ):
        raise ValueError(f"{path}: is not a manifest of format {FORMAT}")
    for name, entry in files.items():
        parts = Path(name).parts
        if (
            Path(name).is_absolute()
            or ".." in parts
            or not parts
            or not isinstance(entry, dict)
            or "size" not in entry
        ):
            raise ValueError(f"{path}: the entry of {name!r} is damaged")
    return manifest


def check_manifest(folder: str | os.PathLike, largest: int | None = None) -> list[str]:
    """
    What differs from the manifest, one sentence each; an empty list is a folder as it was converted. Reads every
    file that has a digest, or those of up to `largest` bytes; of others the size must do. Raises nothing about the
    folder's content: a missing or damaged manifest is a finding.
    """
    folder = Path(folder)
    try:
        files = read_manifest(folder)["files"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error}"]
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif change := change_of(path, entry, largest=largest):
            problems.append(f"{name}: {change}")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    later = (MANIFEST, ".", "evaluation/", "README.previous")  # `tnt eval` and `tnt push` leave these in there
    ignored = {name for name in found if name.startswith(later)}
    return problems + [f"{name}: not in the manifest" for name in sorted(found - set(files) - ignored)]


def change_of(
    path: Path, entry: dict[str, Any], digest: Callable[[Path], str] = sha256, largest: int | None = None
) -> str | None:
    """How a file differs from its entry, if it does. It is read, by `digest`, where nothing else tells, if it has no
    more than `largest` bytes."""
    stat = path.stat()
    if stat.st_size != entry["size"]:
        return f"{stat.st_size} bytes, {entry['size']} when converted"
    if entry.get("sha256") is None:
        if stat.st_mtime_ns != entry.get("mtime_ns"):
            return "changed after the conversion, which did not read it"
    elif (largest is None or stat.st_size <= largest) and digest(path) != entry["sha256"]:
        return f"its SHA-256 differs from {entry.get('sha256_from', TAKEN)}"
    return None


def without_digest(folder: str | os.PathLike) -> list[str]:
    """The files whose SHA-256 nobody knows yet: only a change of their size or time is noticed."""
    return [name for name, entry in read_manifest(folder)["files"].items() if entry.get("sha256") is None]


def add_digests(folder: str | os.PathLike) -> list[str]:
    """Read the files that were linked or copied unread, note their SHA-256 in the manifest, and return their names."""
    folder = Path(folder)
    manifest, unread = read_manifest(folder), without_digest(folder)
    for name in unread:
        manifest["files"][name] = file_entry(folder / name, manifest["files"][name]["how"], sha256(folder / name))
    if unread:
        write_manifest(folder, manifest["files"], manifest["conversion"])
    return unread
