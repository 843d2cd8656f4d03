"""Files as bytes: copied, flushed, digested. Imports nothing heavy, so that a copy need not wait for torch."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


CHUNK = 2**17  # bytes read at a time; a multiple of every item size
COPY = 64 * 2**20  # bytes the kernel copies between two steps of the progress bar
ROOM = 8 * 2**20  # bytes for all that is not a tensor: code, configuration, tokenizer


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """A context whose OSErrors name a file, `path` if no other: on a full disk, to write and to close name none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def write_all(file, content) -> None:
    """Every byte, however many calls it takes. Raises OSError naming the file."""
    view = memoryview(content)
    with naming(file.name):
        while view:
            view = view[file.write(view) :]


def copy_file(source: Path, target: Path, advance: Callable[[int], object]) -> None:
    """All bytes of a file into a new one."""
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        copy_range(old, new, 0, os.fstat(old.fileno()).st_size, advance)


def copy_range(old, new, start: int, count: int, advance: Callable[[int], object]) -> None:
    """Append `count` bytes from `start` on of the file `old` to `new`, inside the kernel where it offers that."""
    in_kernel, left = hasattr(os, "copy_file_range"), count
    while left:
        try:
            if in_kernel:
                done = os.copy_file_range(old.fileno(), new.fileno(), min(left, COPY), start + count - left)
            else:
                old.seek(start + count - left)
                write_all(new, block := old.read(min(left, CHUNK)))
                done = len(block)
        except OSError:
            if not in_kernel:
                raise
            # Two file systems that cannot do it. What is wrong with the disk fails below as well, where it is known
            # which of the two files it is.
            in_kernel = False
            continue
        if not done:
            raise ValueError(f"{old.name}: ends {left} bytes too early")
        left -= done
        advance(done)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; the latter where its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """[`write_text`] of a JSON."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """
    Write a file that is there as a whole or not at all, in place of an older one; or to a device or a pipe.

    Raises:
        OSError: it cannot be written; an older one is as it was.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    place = path.resolve()  # a link stays one
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        flush(partial)
        os.replace(partial, place)
    except OSError as error:  # of the partial file, which nobody knows
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)
    flush(place.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_unread(origin: Path, path: Path, advance: Callable[[int], object]) -> str | None:
    """Copy a file inside the kernel, and return the SHA-256 that is known of it, if one is."""
    copy_file(origin, path, advance)
    flush(path)
    return known_digest(origin)


def known_digest(path: Path) -> str | None:
    """The SHA-256 that the Hub gave a file: its name in the Hub's cache, or what a download into a folder noted beside
    it, if the file was not changed since."""
    digest = path.name
    if path.parent.name != "blobs":
        note = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        try:
            _, digest, seconds = note.read_text().split()  # commit, ETag, time of the download
            if path.stat().st_mtime - 1 > float(seconds):  # the library allows a second too
                return None
        except (OSError, ValueError):
            return None
    return digest if re.fullmatch(r"[0-9a-f]{64}", digest) else None


def check_room(folder: Path, need: int) -> None:
    """Raises OSError if the file system of `folder` has less than `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(
            errno.ENOSPC, f"needs {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free", str(folder.parent.parent)
        )
