"""SIGTERM, which a cluster sends before it takes a machine away, saves a checkpoint and stops the run.

`Trainer`'s own way, `JITCheckpointCallback`, saves amid a step, from which no run goes on exactly, and what comes
after it cannot tell such a run from one that has ended.
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback

from tnt_hf.termination import Terminated


class CheckpointOnTermination(TrainerCallback):
    """
    A SIGTERM makes the running optimizer step the last, or the one that is being evaluated: a checkpoint is saved, and
    [`Terminated`] raised. More of them change nothing: `torchrun` passes its own on to processes that have had theirs.

    Several processes agree on it at every step, so that all stop after the same one, whichever got the signal.

    Raises:
        ValueError: the training does not run in the main thread, the only one that Python tells of signals.
    """

    def __init__(self):
        self._received, self.agreed, self._before = False, False, None
        self._training = torch.zeros((), dtype=torch.bool).share_memory_()  # for the processes that load data

    def on_train_begin(self, args, state, control, **kwargs):
        self._received, self.agreed = False, False
        self._training.fill_(True)
        self._before = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def restore(self) -> None:
        """Hands the signal back, here and in the processes that load data."""
        self._training.fill_(False)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def shield(self, loader: DataLoader) -> None:
        """SIGTERM does not end the processes that load data while the training goes on, which would fail without
        them: clusters send it to every process of a job."""
        loader = getattr(loader, "base_dataloader", loader)  # inside of accelerate's
        first = loader.worker_init_fn
        if loader.num_workers and getattr(first, "func", None) is not _begin_shielded:
            loader.worker_init_fn = partial(_begin_shielded, self._training, first)

    def on_step_end(self, args, state, control, **kwargs):
        self.agreed = self._received
        if dist.is_initialized():
            anywhere = torch.tensor(int(self._received), device=args.device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            self.agreed = bool(anywhere)
        control.should_save |= self.agreed

    on_evaluate = on_step_end

    def on_save(self, args, state, control, **kwargs):
        if self.agreed:
            if dist.is_initialized():
                dist.barrier()  # the first process declares the checkpoint complete; to leave before would end it, too
            raise Terminated


def _begin_shielded(training: Tensor, first: Callable | None, worker: int) -> None:
    def on_termination(number: int, frame: FrameType | None) -> None:
        if not training:  # the training's process has no use for this one any more, and waits for its end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_termination)
    if first is not None:
        first(worker)
