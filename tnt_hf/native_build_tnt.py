"""The C compiler that makes `native_tnt`'s code for the processor it runs on, and where the result is kept.

A library is compiled once per processor and version of the source, in a few seconds, and then loaded from the user's
cache. It calls the OpenMP of torch itself, so both share threads.

Axis legend
    H memory heads   d_in, d_out widths of a layer of the memory network

Travels with every pushed checkpoint.
"""

import ctypes
import hashlib
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .native_chunk_tnt import SOURCE as CHUNK
from .native_forward_tnt import SOURCE as FORWARD
from .native_products_tnt import SOURCE as PRODUCTS
from .native_programs_tnt import SOURCE as PROGRAMS
from .native_reverse_tnt import SOURCE as REVERSE
from .native_scalars_tnt import SOURCE as SCALARS
from .native_token_tnt import SOURCE as TOKEN


BYTES = {torch.float32: 4, torch.float64: 8}
MAX_LAYERS = 8
# Addresses that the code is given, in this order, and those of which there is one per layer.
TENSORS = (
    "COUNTS STARTS FULL SLOTS HERE QUERY KEY VALUE THETA MU KEEP GAIN BIAS O LOSS "
    "D_O D_QUERY D_KEY D_VALUE D_THETA D_MU D_KEEP D_GAIN D_BIAS"
).split()
LAYERS = (
    "W XI S TARGET W_END XI_END S_END Z_KEY Z_READ GRAD_ACT KEPT_W KEPT_S "
    "D_W_END D_XI_END D_S_END D_W D_XI D_S D_TARGET"
).split()
PLACES = f"enum {{ {', '.join(TENSORS)}, FIXED }};\nenum {{ {', '.join(f'{x}_' for x in LAYERS)} }};\n"
SOURCE = (PRODUCTS, SCALARS, PLACES, f"#define MAX_LAYERS {MAX_LAYERS}", CHUNK, FORWARD, REVERSE, PROGRAMS, TOKEN)
SOURCE = "\n".join(SOURCE)
# Sums keep their order, nan and inf their meaning, whatever CC brings; linked with -ffast-math, a library would also
# round denormals of the whole process to 0.
EXACT = "-fno-fast-math"
FLAGS = (EXACT, "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
PROCESSOR = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
COMPILERS = ("gcc", "cc", "clang")
SECONDS = 300  # after which a compiler is taken to hang
AGAIN = 60  # seconds after which what the system refused is asked for again
logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """Why there is no library."""


@cache
def _report(field: str, reason: str) -> None:
    logger.warning("%s='auto' runs 'chunk' on the CPU: %s.", field, reason)


@cache
def _report_cache(reason: str) -> None:
    logger.warning(
        "the memory's C code was compiled for this process alone, as every other one will have to: %s."
        " XDG_CACHE_HOME names the folder of a cache.",
        reason,
    )


@torch.compiler.disable
def runs_native(field: str, value: str, weights: list[Tensor], tensors: tuple) -> bool:
    """Whether a memory's chunks, or its next token, run in native code: where `value` of `field` is "native", and
    where it is "auto", the memory is on the CPU and nothing is in the way (it says what, once).

    weights: `[H, d_in, d_out]`. tensors: all else that is read, or `None`.

    Raises:
        ValueError: "native" where it cannot run, with the reason.
    """
    device = weights[0].device
    if value == "auto" and device.type != "cpu":
        return False
    reason = _unsupported(device, weights, tensors)
    if reason is None:
        return True
    if value == "native":
        raise ValueError(f"{field}='native' cannot run here: {reason}; use 'auto' or 'chunk'")
    _report(field, reason)
    return False


def _unsupported(device: torch.device, weights: list[Tensor], tensors: tuple) -> str | None:
    if device.type != "cpu":
        return f"it is for the CPU, and the memory is on {device}"
    if len(weights) > MAX_LAYERS:
        return f"the memory network has {len(weights)} layers, more than {MAX_LAYERS}"
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (*weights, *tensors) if x is not None):
        return "a tensor is of a class of its own, whose numbers it cannot read"
    if torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return "operations of torch are being recorded, which C is not"
    return unavailable(torch.promote_types(weights[0].dtype, torch.float32))


_REASONS: dict[torch.dtype, tuple[str | None, float]] = {}  # and until when each holds
_LOCK = threading.Lock()  # threads that begin together compile once


def _unlock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_unlock)  # the thread that compiles is not in a fork


def unavailable(dtype: torch.dtype) -> str | None:
    """Why there is no library for `dtype`, or `None` if there is one; compiles it where it has to."""
    if not _settled(dtype):
        with _LOCK:
            if not _settled(dtype):
                _REASONS[dtype] = _tried(dtype)
    return _REASONS[dtype][0]


def _settled(dtype: torch.dtype) -> bool:
    return dtype in _REASONS and time.monotonic() < _REASONS[dtype][1]


def _tried(dtype: torch.dtype) -> tuple[str | None, float]:
    try:
        library(dtype)
    except Unavailable as reason:
        return str(reason), math.inf
    except OSError as reason:  # no room on the disk, no free file handle, no /proc: may be over later
        return str(reason), time.monotonic() + AGAIN
    return None, math.inf


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The code for float32 or float64.

    Raises:
        Unavailable: it cannot be compiled or loaded here.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in PROCESSOR:
        raise Unavailable(f"it is compiled on Linux on {' and '.join(PROCESSOR)}, not on {sys.platform} on {machine}")
    flags = (*FLAGS, *PROCESSOR[machine], f"-DREAL_BYTES={BYTES[dtype]}")
    name, (kept, unusable), unread = f"memory-{_key(flags)}.so", _cache(), ""
    try:
        if kept is not None and (kept / name).exists():
            if _is_whole(kept / name):  # a part of a library would end the process
                return _load_copy(kept / name)
            logger.info("%s is compiled again: it is not whole", name)
    except OSError as error:
        logger.info("%s is compiled again: %s", name, unread := str(error))
    if kept is not None and not os.access(kept, os.W_OK | os.X_OK):
        kept, unusable = None, f"{kept} cannot be written"
    place = (kept or _own_folder()) / name
    try:
        _compile(flags, place)
    except Unavailable as reason:
        raise Unavailable(f"{reason}; and of what was compiled before: {unread}" if unread else reason) from None
    if kept is None:
        _report_cache(unusable)
    try:
        return _load_copy(place)
    except OSError as error:
        raise Unavailable(f"what was compiled cannot be loaded: {error}") from None


def _load_copy(place: Path) -> ctypes.CDLL:
    """`_load`; where no file of the cache may be executed, its copy in a folder of this process."""
    try:
        return _load(place)
    except OSError:
        if place.parent == _own_folder():
            raise
        return _load(Path(shutil.copy(place, _own_folder())))


def _load(place: Path) -> ctypes.CDLL:
    # Torch's OpenMP, for whoever is loaded after it; paths may hold spaces, and other files any bytes.
    with open("/proc/self/maps", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as lines:
        loaded = {line.rstrip("\n").split(maxsplit=5)[-1] for line in lines}
    for path in loaded:
        if Path(path).name.startswith(("libgomp", "libiomp5")):
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    code = ctypes.CDLL(str(place), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    for function in (code.forward, code.backward):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
    code.token.argtypes = [ctypes.c_void_p] * 3
    return code


def _key(flags: tuple[str, ...]) -> str:
    """Names what the code depends on: itself, the flags, what CC says, the C library and what the processor can do."""
    processor = {}
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            processor.setdefault(name.strip(), value.strip())
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    able = (processor.get(name, "") for name in names)
    parts = (SOURCE, *flags, os.environ.get("CC", ""), *platform.libc_ver(), *able)
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _cache() -> tuple[Path | None, str]:
    """The user's cache, if none but the user and root can put code there, else why not; it may be a read-only one."""
    try:
        asked = Path(os.environ.get("XDG_CACHE_HOME", ""))  # ignored if relative, as its specification says
        folder = (asked if asked.is_absolute() else Path.home() / ".cache") / "tnt-hf"
        if not folder.is_absolute():
            return None, f"{folder} is no absolute path"
        if not folder.exists():
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # for all to read, as of an image
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # the latter without a home
        return None, str(error)
    if not folder.is_dir():
        return None, f"{folder} is no folder"
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        return None, f"others can put code into {folder}"
    return folder, ""


@cache
def _own_folder() -> Path:
    """A folder of this process, which goes with it."""
    import atexit

    folder, process = tempfile.mkdtemp(prefix="tnt-hf-"), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # a fork inherits this and may end before
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def _compiler() -> list[str]:
    """What CC names, or else the first that is found of gcc, cc, clang and the clang in the wheel of `ziglang`."""
    named = os.environ.get("CC")
    if named:
        try:
            command = [named] if shutil.which(named) else shlex.split(named)
        except ValueError:  # a quotation without end
            command = []
        if not command or shutil.which(command[0]) is None:
            raise Unavailable(f"CC names {named!r}, which was not found")
        return command
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    wheel = find_spec("ziglang")
    if wheel and wheel.origin:
        return [str(Path(wheel.origin).with_name("zig")), "cc"]
    raise Unavailable(f"no C compiler was found: {', '.join(COMPILERS)}, or what `pip install ziglang` brings")


def _compile(flags: tuple[str, ...], place: Path) -> None:
    """No OpenMP is linked: torch's threads would wait beside those of another."""
    compiler = _compiler()
    alone = ("-nostdlib",) * (Path(compiler[0]).name == "zig")  # else it builds a library first: 15 seconds
    logger.info("compiling %s, once for this processor", place.name)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        source, code, linked = (Path(scratch) / name for name in ("memory.c", "memory.o", place.name))
        source.write_text(SOURCE)
        _run([*compiler, *flags, "-c", source, "-o", code], scratch)
        _run([*compiler, "-shared", EXACT, *alone, code, "-o", linked, "-lm", "-lc"], scratch)
        if not linked.exists():
            raise Unavailable(f"{' '.join(compiler)!r} compiles nothing")
        content = linked.read_bytes()
        linked.write_bytes(content + hashlib.sha256(content).digest())
        linked.chmod(0o755)  # whatever the umask: it is code
        linked.replace(place)  # whoever compiles at the same time leaves the same


def _is_whole(place: Path) -> bool:
    """Whether a library ends with the digest of all before, which its loader does not look at."""
    content = place.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: list, scratch: str) -> None:
    # zig keeps what it makes on the way; here that goes with the folder
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": scratch, "ZIG_LOCAL_CACHE_DIR": scratch}
    options = {"capture_output": True, "text": True, "errors": "replace", "timeout": SECONDS, "env": environment}
    try:
        done = subprocess.run([*map(str, command)], **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler failed: {error}") from None
    if done.returncode:
        lines = [*done.stderr.splitlines(), f"exit status {done.returncode}"]
        raise Unavailable(f"the C compiler failed: {next((x for x in lines if 'error' in x), lines[0])}")
