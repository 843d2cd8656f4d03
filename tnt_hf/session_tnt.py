"""A session's file: there as a whole or not at all, and read only as it was written.

Axis legend
    the tensors of a [`TNTCache`], under its names for them

This file travels with every pushed checkpoint.
"""

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


DIGEST = "sha256"  # the field of the header that holds that of all else


def write_session(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """
    Write contiguous tensors of the CPU with what is said about them, and a digest of both.

    Raises:
        OSError: it cannot be written, or something is there that is no file; an older file is as it was.
    """
    place, partial = _regular(path), None
    metadata = metadata | {DIGEST: _digest(tensors, metadata)}
    try:
        handle, partial = tempfile.mkstemp(prefix=".tnt-session-", suffix=".partial", dir=place.parent)
        os.close(handle)
        save_file(tensors, partial, metadata=metadata)
        if place.exists():
            _pass_on_access(place, partial)
        with open(partial, "r+b") as file:
            os.fsync(file.fileno())  # some disks say only now that they are full
        os.replace(partial, place)
    except SafetensorError as error:
        code = int(found[1]) if (found := re.search(r"\(os error (\d+)\)", str(error))) else errno.EIO
        raise OSError(code, os.strerror(code) if found else str(error), str(path)) from error
    except OSError as error:  # of the partial file, which nobody knows
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def read_session(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """
    Tensors, on the CPU, and header of a safetensors file.

    Raises:
        ValueError: it is none. OSError: it cannot be read.
    """
    place = _regular(path)
    with open(place, "rb"):  # its errors name the file
        pass
    try:
        with safe_open(place, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"path={str(path)!r} is not a safetensors file: {error}") from error


def check_digest(tensors: dict[str, Tensor], metadata: dict[str, str], known: set[str]) -> None:
    """
    Raises:
        ValueError: the content is not what the digest was taken of; or there is none, as in files of earlier releases,
            and the header says something that those did not (`known`): a field's name is damaged.
    """
    said = metadata.get(DIGEST)
    if said is None and (unknown := sorted(metadata.keys() - known)):
        raise ValueError(f"session: unknown field {unknown[0]!r}: the file is damaged.")
    if said is not None and said != (found := _digest(tensors, metadata)):
        raise ValueError(f"session: {DIGEST}={said!r}, but that of its content is {found!r}: the file is damaged.")


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    said = sorted((name, value) for name, value in metadata.items() if name != DIGEST)
    found = hashlib.sha256(json.dumps(said).encode())
    for name in sorted(tensors):
        x = tensors[name]
        found.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy())  # the bytes as they lie there
    return found.hexdigest()


def _regular(path: str | os.PathLike) -> Path:
    """Where `path` leads to: a link stays one. A pipe or a device would be replaced by a file, or waited for."""
    place = Path(os.path.realpath(path))
    if os.path.lexists(place) and not place.is_file():
        code = errno.EISDIR if place.is_dir() else errno.EINVAL
        raise OSError(code, "a session needs a regular file, which this is not", str(path))
    return place


def _pass_on_access(old: Path, new: str) -> None:
    """Whoever may read or write a file may do so when it was replaced: the mode means its owner and group."""
    was = old.stat()
    mode = stat.S_IMODE(was.st_mode)
    if hasattr(os, "chown"):
        for ids in ((-1, was.st_gid), (was.st_uid, -1)):  # only the superuser gives files away, but to groups all may
            with suppress(OSError):
                os.chown(new, *ids)
        if os.stat(new).st_gid != was.st_gid:
            mode &= ~stat.S_IRWXG  # which meant another group
    os.chmod(new, mode)
