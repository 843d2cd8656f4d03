"""SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that it cleans up after itself."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM stopped a training, after a checkpoint."""


@contextmanager
def orderly_termination() -> Iterator[None]:
    """In here both signals raise `SystemExit` with the status a shell gives them. What is ignored stays so (nohup)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
