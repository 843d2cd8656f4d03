"""How every benchmark here measures: contestants take turns in one process, so a busy machine slows all of them alike.

Both clocks are kept. `wall` is what a user waits for; `cpu` is the processor time of the measuring thread, which other
processes on a shared machine disturb far less. Ratios are formed inside a round and only then summarised.
"""

import hashlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

import tnt_hf


PACKAGES = ("torch", "transformers", "triton", "titans-pytorch", "numpy")


def environment(seed: int, **more) -> dict:
    """Hardware, versions, commit and command: what it takes to read or repeat a result."""
    return {
        "command": "python -m " + " ".join([_module_name(), *map(_portable, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "source_sha256": _source_digest(),
        "cpu": _cpu_model(),
        "cores": len(_usable_cores()),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "seed": seed,
        **more,
    }


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).stem


def _portable(argument: str) -> str:
    """Absolute paths say nothing on another machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _source_digest() -> str:
    """Of the package that was really imported, which a commit id does not promise."""
    files = sorted(Path(tnt_hf.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _usable_cores():
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def take_turns(contestants: dict[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, dict]:
    """Seconds of each call, per contestant: `{"wall": [rounds], "cpu": [rounds]}`. Who goes first rotates."""
    names = list(contestants)
    seconds = {name: {"wall": [], "cpu": []} for name in names}
    for _ in range(warmup):
        for name in names:
            contestants[name]()
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            wall, cpu = time.perf_counter(), time.thread_time()
            contestants[name]()
            seconds[name]["cpu"].append(time.thread_time() - cpu)
            seconds[name]["wall"].append(time.perf_counter() - wall)
    return seconds


def spread(values: list[float], digits: int = 3) -> dict:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def summarise(seconds: dict[str, dict], ours: str, tokens: int) -> dict:
    """Tokens per second of everyone and, per round, how many times faster `ours` was than each of the others."""
    report = {}
    for name, clocks in seconds.items():
        entry = {"seconds": {c: [round(x, 6) for x in values] for c, values in clocks.items()}}
        entry["tokens_per_second"] = {c: spread([tokens / x for x in values], 1) for c, values in clocks.items()}
        if name != ours:
            pairs = {c: list(zip(values, seconds[ours][c])) for c, values in clocks.items()}
            entry["speedup_per_round"] = {c: [round(a / b, 3) for a, b in x] for c, x in pairs.items()}
            entry["speedup"] = {c: spread([a / b for a, b in x]) for c, x in pairs.items()}
        report[name] = entry
    return report
