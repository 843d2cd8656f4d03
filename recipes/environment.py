"""Hardware, versions and commit: what it takes to read or repeat a result."""

import hashlib
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


PACKAGES = ("tnt-hf", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "triton", "numpy")


def environment(packages: tuple[str, ...] = ()) -> dict:
    """The machine, the versions of what is installed of `PACKAGES` and `packages`, and in a git checkout the commit.

    `source_sha256` is of the modules of tnt_hf that were imported, which a commit does not promise.
    """
    import torch  # here, as programs that only print their help import this file

    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)  # else the repository is somebody else's
    status = tracked and _git("status", "--porcelain")
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # whose names say little: of vectors, "AVX2"
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.system(),
        "python": platform.python_version(),
        # torch's own word, which names the build
        "versions": {n: v for n in (*PACKAGES, *packages) if (v := _version(n))} | {"torch": str(torch.__version__)},
        "commit": tracked and _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
        "source_sha256": _source_digest(),
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line() -> str:
    """How this program was started, as `python -m`; of absolute paths, which say nothing elsewhere, the last part."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec else Path(sys.argv[0]).stem
    portable = [Path(x).name if Path(x).is_absolute() else x for x in sys.argv[1:]]
    return "python -m " + " ".join([module, *portable])


def peak_memory_bytes(device) -> int:
    """Most bytes this process had at once: of a GPU `device` its memory, otherwise resident memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _source_digest() -> str:
    import tnt_hf

    files = sorted(Path(tnt_hf.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
