"""All or nothing: a folder is built under another name and appears under its own when it is complete.

The work lies in `.<name>.tnt-partial-<random>/` beside the target, so that renaming is atomic. Its `owner.lock` is
locked for as long as its process lives, however that ends: what carries no lock any more is left over, and the next
run for the same target removes it. `model/` in it is the folder to be, `old/` the one being replaced.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import IO, Any

from tnt_hf.conversion.files import flush, sha256
from tnt_hf.conversion.manifest import MANIFEST, change_of, read_manifest
from tnt_hf.settings import check_text


LOCK = "owner.lock"
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux


class Staging:
    """
    A context in which `folder` is filled; `commit` makes it `target`. Left without a commit, nothing remains.

    Args:
        target: resolved path of the folder to be.
        overwrite: replace `target` if it is a converted checkpoint (has a manifest), as it was made.
        say: told about leftovers of earlier runs.

    Raises:
        FileExistsError: `target` exists and may not be replaced. ValueError: it is a mount point.
    """

    def __init__(self, target: Path, overwrite: bool, say: Callable[[str], object]):
        self.target, self.overwrite, self.say = target, overwrite, say

    def __enter__(self) -> "Staging":
        clean_up(self.target, self.say)
        check_target(self.target, self.overwrite)
        self.made = [path for path in self.target.parents if not path.exists()]
        self.target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.root, self.lock = owned_folder(
                self.target.parent, _prefix(self.target), f"output={str(self.target)!r}"
            )
        except OSError:
            self._remove_parents()
            raise
        self.folder = self.root / "model"
        self.folder.mkdir()
        return self

    def __exit__(self, *exc_info) -> None:
        if _undo(self.root, self.target, self.say):
            shutil.rmtree(self.root, ignore_errors=True)
        self.lock.close()
        self._remove_parents()

    def _remove_parents(self) -> None:
        """What was made on the way to the target, as long as it is empty."""
        with suppress(OSError):
            for path in self.made:
                path.rmdir()

    def commit(self) -> None:
        """Make the folder the target. Whenever the process dies, the target is the old folder or the new one."""
        for folder in (*(path for path in self.folder.rglob("*") if path.is_dir()), self.folder, self.root):
            flush(folder)
        check_target(self.target, self.overwrite)
        if self.target.is_dir() and any(self.target.iterdir()):
            if not _exchange(self.folder, self.target):
                # Two steps: between them the old folder is in `old/`, from where `_undo` brings it back.
                os.rename(self.target, self.root / "old")
                os.rename(self.folder, self.target)
        else:
            os.rename(self.folder, self.target)
        flush(self.target.parent)


def target_of(output: str | os.PathLike) -> Path:
    """
    The resolved path of a folder to be.

    Raises:
        ValueError: no name, a link that leads to itself, or a path that is not text.
    """
    if not str(output).strip():
        raise ValueError(f"output={str(output)!r}: must name a folder; the working directory is '.'")
    try:
        target = Path(output).expanduser().resolve()
    except (RuntimeError, OSError) as error:  # the former of Python up to 3.12
        raise ValueError(f"output={str(output)!r}: leads nowhere ({error})") from None
    if any(path.is_symlink() for path in (target, *target.parents)):  # which later ones leave as they are
        raise ValueError(f"output={str(output)!r}: leads nowhere (a link to itself)")
    check_text("output", str(target))
    return target


def check_target(target: Path, overwrite: bool) -> None:
    """
    Whether a folder may appear at `target`.

    Raises:
        FileExistsError: something is there: a file, or a folder with content that is not a converted checkpoint, that
            `overwrite` does not cover or that the conversion did not write, or not as it is now.
        ValueError: a file system is mounted there: no other folder can take its place.
    """
    if not target.exists():
        return
    if os.path.ismount(target):
        raise ValueError(
            f"output={str(target)!r}: is a mount point, which cannot be replaced; name a folder inside it"
        )
    if not target.is_dir():
        raise FileExistsError(errno.EEXIST, "exists and is not a folder", str(target))
    if not any(target.iterdir()):
        return
    try:
        files = read_manifest(target)["files"]
    except (OSError, ValueError) as error:
        reason = f"holds files but no {MANIFEST} that can be read: not a conversion, never overwritten"
        raise FileExistsError(errno.EEXIST, reason, str(target)) from error
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "exists; overwrite=True (--overwrite) replaces it", str(target))
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_symlink() or path.is_file()}
    if added := sorted(found - {MANIFEST, *files}):
        reason = f"holds {added[0]!r}, which no conversion wrote: never overwritten, move it away first"
        raise FileExistsError(errno.EEXIST, reason, str(target))
    for name in sorted(found & files.keys()):
        if change := _lost_change(target / name, files[name]):
            reason = f"holds {name!r}, which was changed since the conversion ({change}): move it away first"
            raise FileExistsError(errno.EEXIST, reason, str(target))


def _lost_change(path: Path, entry: dict[str, Any]) -> str | None:
    """What is different in a file, if it would be gone with its folder."""
    if not path.is_file():  # a link to nothing
        return None
    if entry.get("how") == "linked" and path.stat().st_nlink > 1:  # the source's own file, which stays there
        return None
    return change_of(path, entry, _digest)


def _digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=1024)
def _digest_of(path: Path, *state: int) -> str:
    """Read once, though a folder is looked at before the work and after it."""
    return sha256(path)


def owned_folder(parent: Path, prefix: str, what: str) -> tuple[Path, IO[str]]:
    """
    A new folder in `parent`, and its lock, held until that is closed.

    Raises:
        OSError: it cannot be made, or its file system locks no files; the latter names `what`.
    """
    while True:  # until no other run cleans it up before it is locked
        root = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = (root / LOCK).open("x")
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(root / LOCK)):
                return root, lock
        except (FileNotFoundError, BlockingIOError):
            pass
        except OSError as error:
            shutil.rmtree(root, ignore_errors=True)
            lock.close()
            reason = f"its file system locks no files ({error.strerror})"
            raise OSError(error.errno, f"{what}: {reason}; choose another") from error
        lock.close()


def left_over(parent: Path, prefix: str) -> Iterator[Path]:
    """The folders of [`owned_folder`] that no process owns any more, each locked while it is looked at."""
    for root in sorted(parent.glob(f"{escape(prefix)}*")):
        if root.is_symlink() or not root.is_dir():
            continue
        try:
            lock = (root / LOCK).open("r+")
        except FileNotFoundError:
            with suppress(OSError):  # not empty, or gone
                root.rmdir()  # killed before it held anything
            continue
        except OSError:  # another user's
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # its process lives, or nobody can tell
                continue
            yield root


def clean_up(target: Path, say: Callable[[str], object]) -> None:
    """Remove what runs for `target` left behind that were killed, and undo a replacement that one of them began."""
    if not target.parent.is_dir():
        return
    for root in left_over(target.parent, _prefix(target)):
        with suppress(FileNotFoundError):  # as above
            if _undo(root, target, say):
                shutil.rmtree(root)
                say(f"removed {root.name}, left over from an interrupted run")


def _undo(root: Path, target: Path, say: Callable[[str], object]) -> bool:
    """Bring back what a run was replacing in two steps, of which it took one; whether `root` holds nothing to lose."""
    if not ((root / "old").is_dir() and (root / "model").is_dir()):
        return True
    try:
        os.rename(root / "old", target)
    except OSError as error:
        why = f"cannot go back to {target} ({error.strerror})"
        warnings.warn(f"{root / 'old'}, which an interrupted run was replacing, {why}", stacklevel=2)
        return False
    say(f"brought back {target}, which an interrupted run was replacing")
    return True


def _prefix(target: Path) -> str:
    return f".{target.name}.tnt-partial-"


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, where the system can; whether it did."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS):
        return False  # a file system or kernel without it
    raise OSError(code, os.strerror(code), str(second))
