"""Jobs of the demo: each runs in a process of its own, tells how far it is, and ends when the demo does.

Axis legend: N windows of text   T tokens of a window
"""

import multiprocessing
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from tnt_hf.recipes.allocator import keep_freed_memory
from tnt_hf.recipes.demo_report import Progress


class Job:
    """What a job has to report: lines and progress while it runs, and seconds per phase in `seconds`.

    Args:
        name: of the job. reports: the queue of `run_jobs`. threads: of torch; a result depends on their number.
    """

    def __init__(self, name: str, reports, threads: int = 1):
        import torch
        from transformers.utils import logging

        keep_freed_memory()
        warnings.filterwarnings("ignore", category=FutureWarning)  # of one library to another
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.name, self.reports, self.seconds = name, reports, {}

    def say(self, text: str) -> None:
        """Lines for the terminal."""
        self.reports.put(text)

    @contextmanager
    def phase(self, name: str):
        """Times a phase; yields the function that reports its progress as (step, steps, loss)."""
        start = time.perf_counter()

        yield lambda step, steps, loss: self.reports.put((f"{self.name}, {name}", step, steps, loss))
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


# -------------------------------------------------------------------------------------------------------- the workers


_reports: Any = None  # the queue of a worker process


def _begin(reports) -> None:
    global _reports
    _reports = reports
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the demo itself ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _call(function: Callable, arguments: tuple) -> Any:
    return function(*arguments, _reports)


def run_jobs(jobs: dict, workers: int, after: dict[str, tuple[str, ...]] | None = None, say=print) -> dict:
    """
    Runs `{name: (function, *arguments)}` in `workers` processes and shows how far they are.

    A function gets the queue of reports as a further argument. A job that fails ends the demo; whatever ends it, an
    interrupt included, ends the workers too.

    Args:
        after: `{name: others}`, jobs that start when all others are done.
        say: takes the lines that jobs report.

    Returns:
        `{name: result}`.
    """
    waiting = dict(after or {})
    context = multiprocessing.get_context("spawn")
    reports, before = context.Queue(), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(reports,))
    running: dict[str, Any] = {}
    try:
        with Progress(say) as progress:
            while len(running) < len(jobs) or not all(job.done() for job in running.values()) or not reports.empty():
                done = {name for name, job in running.items() if job.done()}
                for name in done:
                    running[name].result()  # raises what the job raised
                for name, (function, *arguments) in jobs.items():
                    if name not in running and done.issuperset(waiting.get(name, ())):
                        running[name] = pool.submit(_call, function, tuple(arguments))
                try:
                    progress.show(reports.get(timeout=0.5))
                except queue.Empty:
                    pass
        return {name: running[name].result() for name in jobs}
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ------------------------------------------------------------------------------------------- what jobs have in common


def shuffled(train, count: int, seed: int):
    """`count` windows `[count, T]` in a random order that `seed` fixes, every one once before any comes again."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(len(train), generator=generator) for _ in range(-(-count // len(train)))]
    return train[torch.cat(rounds)[:count]]


def losses_by_position(model, ids):
    """Negative log-likelihood `[N, T - 1]` of every token of `ids` `[N, T]` but the first."""
    import torch

    from tnt_hf.recipes.evaluation_perplexity import Rows, token_losses

    model.eval()
    # Two at a time: the keys of a quadratic memory fit into the cache of a core then, which makes it twice as fast.
    return torch.stack(token_losses(model, Rows(list(ids), list(range(len(ids)))), batch_size=2)).float()
