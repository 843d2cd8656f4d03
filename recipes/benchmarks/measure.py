"""How every benchmark here measures: contestants take turns in one process, so a busy machine slows all of them alike.

Both clocks are kept. `wall` is what a user waits for; `cpu` is the processor time of the measuring thread, which other
processes on a shared machine disturb far less. Ratios are formed inside a round and only then summarised.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tnt_hf.conversion.files import write_json
from tnt_hf.recipes import allocator
from tnt_hf.recipes.environment import command_line
from tnt_hf.recipes.environment import environment as recipes_environment


NOT_MEASURED = "not measured"


def environment(seed: int, **more) -> dict:
    """Command, date and seed beside what [`~recipes.environment.environment`] tells."""
    found = recipes_environment(("titans-pytorch",))
    if found["gpus"]:  # SDPA's fastest kernels are among the library's
        import torch

        found["cudnn"] = torch.backends.cudnn.version()
    found |= {"malloc": allocator.settings(), "seed": seed, **more}
    return {"command": command_line(), "date": time.strftime("%Y-%m-%d", time.gmtime()), **found}


def write(path: Path, content: dict) -> None:
    """A result into a folder that is made if need be, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def take_turns(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    tell: Callable[[str], object] = lambda text: None,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, dict]:
    """Seconds of each call, per contestant: `{"wall": [rounds], "cpu": [rounds]}`. Who goes first rotates. `tell`
    shows whose turn it is; `wait` returns when what a GPU was given is done."""
    names = list(contestants)
    seconds = {name: {"wall": [], "cpu": []} for name in names}
    for _ in range(warmup):
        for name in names:
            tell(f"{name}, warming up")
            contestants[name]()
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            tell(f"{name}, round {turn + 1} of {rounds}")
            wait()
            wall, cpu = time.perf_counter(), time.thread_time()
            contestants[name]()
            wait()
            seconds[name]["cpu"].append(time.thread_time() - cpu)
            seconds[name]["wall"].append(time.perf_counter() - wall)
    return seconds


def spread(values: list[float], digits: int = 3) -> dict:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def waiting(device: str) -> Callable[[], object]:
    """What `take_turns` waits with on that device."""
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def times_faster(seconds: dict[str, dict], ours: str, other: str, clock: str) -> dict:
    """How many times faster `ours` was than `other`: round by round, then summarised."""
    return spread([b / a for a, b in zip(seconds[ours][clock], seconds[other][clock])])


def columns(rows: list[tuple]) -> list[str]:
    """Lines of a table, the first row its head: text to the left, numbers to the right."""
    cells = [["" if x is None else f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    aligned = [[x.ljust(n) if i == 0 else x.rjust(n) for i, (x, n) in enumerate(zip(row, widths))] for row in cells]
    return ["  ".join(row).rstrip() for row in aligned]


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
