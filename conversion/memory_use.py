"""Peak anonymous memory of this process while something runs: what must be there, without mapped files and caches."""

import threading
from collections.abc import Callable
from pathlib import Path


INTERVAL = 0.005  # seconds between samples


def anonymous_bytes(process: int | str = "self") -> int | None:
    """Anonymous resident memory of a process now, by default this one; `None` where there is no such process or the
    system does not tell (it is Linux's RssAnon)."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), None)


class PeakMemory:
    """Samples in a thread of its own between `with` and its end.

    Attributes:
        start, peak: bytes when it began and at most; `None` where the system does not tell.
    """

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self.start is not None:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self.start is not None:
            self._thread.join()
            self.peak = max(self.peak, anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.peak = max(self.peak, anonymous_bytes())


def with_peak(function: Callable[[], dict]) -> tuple[dict, int | None]:
    """What `function()` returns, and the most bytes while it ran."""
    with PeakMemory() as memory:
        result = function()
    return result, memory.peak
