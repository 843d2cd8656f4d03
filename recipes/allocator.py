"""The C library's allocator, told to keep what is freed.

glibc maps a block above 32 MB from the system whenever one is asked for and gives it back when it is freed, and gives
back the end of its heap as well. The system clears every page before it hands it out, so a training step on a CPU,
which makes and frees a hundred tensors of all its tokens, spends much of its time on that.
"""

import ctypes
import os


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of <malloc.h>
ALL = -1

_kept = False


def keep_freed_memory() -> bool:
    """
    Keeps freed memory in the process, for good, and takes none by `mmap`. What the process holds is then its peak and
    what lies between blocks: a few tenths more.

    Returns:
        Whether it does. Not where the environment has settings of its own (`MALLOC_...`, `GLIBC_TUNABLES`), and not
        with another C library.
    """
    global _kept
    if not _kept and not _of_the_environment() and _is_glibc():
        libc = ctypes.CDLL(None)
        _kept = bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, ALL))
    return _kept


def settings() -> dict[str, str | bool]:
    """What the allocator was told, by the environment or here."""
    return {"keeps freed memory": True} if _kept else _of_the_environment()


def _of_the_environment() -> dict[str, str]:
    names = sorted(name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES")
    return {name: os.environ[name] for name in names}


def _is_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError):  # another system, another library
        return False
