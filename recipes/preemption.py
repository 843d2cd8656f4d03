"""SIGTERM, which a cluster sends before it takes a machine away, saves a checkpoint and stops the run.

`Trainer`'s own way, `JITCheckpointCallback`, saves amid a step, from which no run goes on exactly, and what comes
after it cannot tell such a run from one that has ended.
"""

import signal
from types import FrameType

import torch
import torch.distributed as dist
from transformers.trainer_callback import TrainerCallback

from tnt_hf.termination import Terminated


class CheckpointOnTermination(TrainerCallback):
    """
    A SIGTERM makes the running optimizer step the last, or the one that is being evaluated: a checkpoint is saved, and
    [`Terminated`] raised. A second SIGTERM does what it did before the training.

    Several processes agree on it at every step, so that all stop after the same one, whichever got the signal.

    Raises:
        ValueError: the training does not run in the main thread, the only one that Python tells of signals.
    """

    def __init__(self):
        self._received, self._agreed, self._before = False, False, None

    def on_train_begin(self, args, state, control, **kwargs):
        self._received, self._agreed = False, False
        self._before = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        self.restore()

    def restore(self) -> None:
        """Hands the signal back."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def on_step_end(self, args, state, control, **kwargs):
        self._agreed = self._received
        if dist.is_initialized():
            anywhere = torch.tensor(int(self._received), device=args.device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            self._agreed = bool(anywhere)
        control.should_save |= self._agreed

    on_evaluate = on_step_end

    def on_save(self, args, state, control, **kwargs):
        if self._agreed:
            if dist.is_initialized():
                dist.barrier()  # the first process declares the checkpoint complete; to leave before would end it, too
            raise Terminated
