"""One JSON per run in a folder, so that a study can be stopped at any time and goes on where it was."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tnt_hf.recipes.benchmarks.measure import write


def path_of(folder: Path, name: str, seed: int) -> Path:
    """The file of a run."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-seed{seed}.json"


def read(folder: Path, name: str, seed: int, settings: dict) -> dict | None:
    """
    A run that is done, or `None`.

    Raises:
        ValueError: it was made with other settings.
    """
    path = path_of(folder, name, seed)
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    if changed := sorted(key for key in settings if found["settings"].get(key) != settings[key]):
        raise ValueError(f"{path}: was made with another {', '.join(changed)}; choose another folder with --runs")
    return found


def run_all(folder: Path, names: list[str], seeds: list[int], settings: dict, work: Callable[..., dict]) -> None:
    """
    `work(name, seed, tell)` for every run that is not there yet, one after the other; each is written when it is done.

    Args:
        settings: ready for JSON, and in every run; what all runs of a study must have in common.
    """
    settings, start = json.loads(json.dumps(settings)), time.perf_counter()
    todo = [(name, seed) for name in names for seed in seeds if read(folder, name, seed, settings) is None]
    for number, (name, seed) in enumerate(todo, 1):
        if read(folder, name, seed, settings) is None:  # another process may have made it
            found = {"name": name, "seed": seed, "settings": settings, **work(name, seed, _progress(name, seed))}
            write(path_of(folder, name, seed), found)
        passed = time.perf_counter() - start
        print(f"[{passed:5.0f} s] {number} of {len(todo)}: {name}, seed {seed}", file=sys.stderr, flush=True)


def collect(folder: Path, names: list[str], seeds: list[int], settings: dict) -> dict[str, dict[int, dict]]:
    """What is there of `{name: {seed: result}}`."""
    settings = json.loads(json.dumps(settings))
    found = {name: {seed: read(folder, name, seed, settings) for seed in seeds} for name in names}
    return {name: {seed: x for seed, x in runs.items() if x is not None} for name, runs in found.items()}


def _progress(name: str, seed: int) -> Callable[[int, int, float], None]:
    """A line at every fifth of a training."""

    def tell(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 5) == 0 and steps >= 50:
            print(f"    {name}, seed {seed}: step {step} of {steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    return tell
