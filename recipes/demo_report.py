"""What the demo shows while it runs and how it prints: bars, lines, perplexities, tables.

Axis legend: N windows   T tokens of a window
"""

import math
import sys
import time
from collections.abc import Callable

import numpy as np


POSITIONS = ((1, 32), (32, 128), (128, 256), (256, None))  # of the predicted token in its window: [from, to)
LINE_SECONDS = 20  # between two lines of a phase where there is no terminal to redraw


class Progress:
    """One bar per phase on a terminal; a line now and then elsewhere, so that a log stays readable.

    Args:
        say: takes the lines that belong to the story.
    """

    def __init__(self, say: Callable[[str], object] = print):
        self.say, self.bars, self.printed = say, {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for bar in self.bars.values():
            bar.close()

    def show(self, report: str | tuple[str, int, int, float]) -> None:
        """Takes a report of a job: lines for the terminal, or (phase, step, steps, loss)."""
        if isinstance(report, str):
            self._say(report)
        else:
            self._step(*report)

    def _say(self, text: str) -> None:
        if self.bars:
            from tqdm import tqdm

            with tqdm.external_write_mode():
                self.say(text)
        else:
            self.say(text)

    def _step(self, phase: str, step: int, steps: int, loss: float) -> None:
        if sys.stderr.isatty():
            from tqdm import tqdm

            if phase not in self.bars:
                self.bars[phase] = tqdm(total=steps, desc=phase.ljust(26), unit="step", dynamic_ncols=True)
            bar = self.bars[phase]
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)
        elif step == steps or time.perf_counter() - self.printed.get(phase, 0.0) > LINE_SECONDS:
            self.printed[phase] = time.perf_counter()
            print(f"         {phase:26s} step {step:4d} of {steps}   loss {loss:.3f}", file=sys.stderr, flush=True)


def text_result(losses: np.ndarray, bytes_per_token: float) -> dict:
    """Perplexity and bits per byte of losses `[N, T - 1]` (entry t is of token t + 1), and perplexity by position."""
    mean = float(losses.mean())
    ranges = {f"{a}-{(b or losses.shape[1] + 1) - 1}": losses[:, a - 1 : b and b - 1] for a, b in POSITIONS}
    return {
        "perplexity": math.exp(mean),
        "bits_per_byte": mean / math.log(2) / bytes_per_token,
        "perplexity_by_position": {name: math.exp(part.mean()) for name, part in ranges.items() if part.size},
    }


def difference(a: np.ndarray, b: np.ndarray) -> dict:
    """Mean loss of `a` minus that of `b` (nats per token, minus: `a` is better), standard error over windows."""
    per_window = (a - b).mean(1)
    return {
        "mean": float(per_window.mean()),
        "standard_error": float(per_window.std(ddof=1) / math.sqrt(len(per_window))),
    }


def table(rows: list[list]) -> list[str]:
    """Lines with the first column aligned to the left and numbers to the right."""
    cells = [
        [f"{x:.3f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
