"""What begins before torch and transformers are imported, which takes seconds.

Only the command line gains by it. Nothing is decided here: what is copied is what the conversion would copy, into the
folder it would use, and if it finds a mistake or needs other shards, the copies are stopped and removed. Where shards
are linked, what the memory starts as a copy of is read meanwhile, into the page cache.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from tnt_hf.conversion.files import ROOM, check_room, copy_unread
from tnt_hf.conversion.layout import base_names
from tnt_hf.conversion.source import Source, locate, read_source
from tnt_hf.conversion.staging import Staging, check_target, target_of


AHEAD = 2**17  # bytes the kernel is asked for at a time; it caps what one call reads ahead
COPIED = tuple(f".self_attn.{x}_proj.weight" for x in "qkv")  # into the memory, where it has projections of its own
READ = 2**30  # bytes of linked or copied shards that are read without being asked to: a few seconds


class HeadStart:
    """
    The shards of `checkpoint` on their way into the folder of `staging`, two at a time. Use as a context.

    Attributes:
        staging: entered, for the conversion to go on with.
        copied: bytes so far.
    """

    def __init__(self, checkpoint: Source, staging: Staging):
        self.staging, self.copied = staging, 0
        self._advance, self._lock, self._stop = lambda count: None, Lock(), Event()
        self._pool = ThreadPoolExecutor(2)
        self._names = base_names(checkpoint.shards.values())
        self._copies = {
            origin: self._pool.submit(copy_unread, origin, staging.folder / name, self._count)
            for origin, name in self._names.items()
        }

    def _count(self, count: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("the conversion has stopped")
        with self._lock:
            self.copied += count
            self._advance(count)

    def follow(self, advance: Callable[[int], object]) -> None:
        """Tell `advance` the bytes copied so far, and from now on."""
        with self._lock:
            advance(self.copied)
            self._advance = advance

    def take(self, origin: Path) -> Future | None:
        """The copy of one shard, which gives its SHA-256 where that is known; `None` if there is none."""
        return self._copies.get(origin)

    def drop(self) -> None:
        """Stop, and remove what was copied: the conversion needs other shards."""
        self.__exit__()
        for name in self._names.values():
            (self.staging.folder / name).unlink(missing_ok=True)
        self._copies, self.copied = {}, 0

    def __enter__(self) -> "HeadStart":
        return self

    def __exit__(self, *exc_info) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def head_start(
    source: str, output: str, settings: dict[str, Any], say: Callable[[str], object], stack: ExitStack
) -> HeadStart | None:
    """
    Begin to copy, if it is clear that copies will be needed, or to read ahead, if links will be.

    Args:
        source, output, settings, say: of `convert_checkpoint`.
        stack: closes the copies and their folder.

    Returns:
        `None` where shards can be linked, are read or are written anew, and where something is wrong, which
        `convert_checkpoint` says.
    """
    if settings.get("check") or {"dtype", "probe"} & settings.keys() or not Path(source).is_dir():
        return None
    try:
        folder, target = locate(source, settings.get("revision")), target_of(output)
        check_target(target, bool(settings.get("overwrite")))
        checkpoint = read_source(folder, source)
        existing = next(parent for parent in target.parents if parent.exists())
        inside = target == folder or folder in target.parents or target in folder.parents
        shards = [path.stat() for path in checkpoint.shards.values()]
        total = sum(stat.st_size for stat in shards)
        linkable = settings.get("link") != "copy" and all(x.st_dev == existing.stat().st_dev for x in shards)
        if inside or (settings.get("check") is None and total <= READ):
            return None
        if linkable:
            if not any(name.startswith("memory_") for name in settings):
                read_ahead(checkpoint, stack)
            return None
        if settings.get("link") == "link":
            return None
        check_room(existing, total + ROOM)
        staging = stack.enter_context(Staging(target, bool(settings.get("overwrite")), say))
    except (OSError, ValueError):
        return None
    return stack.enter_context(HeadStart(checkpoint, staging))


def read_ahead(checkpoint: Source, stack: ExitStack) -> None:
    """Have the kernel read what the memories start as copies of, until `stack` is left."""
    stop = Event()

    def ask() -> None:
        for tensor in checkpoint.tensors.values():
            if not tensor.name.endswith(COPIED):
                continue
            with suppress(OSError), tensor.path.open("rb", buffering=0) as file:  # the conversion will tell
                for start in range(tensor.start, tensor.start + tensor.nbytes, AHEAD):
                    if stop.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, AHEAD, os.POSIX_FADV_WILLNEED)

    if hasattr(os, "posix_fadvise"):
        stack.callback(stop.set)
        Thread(target=ask, daemon=True).start()
