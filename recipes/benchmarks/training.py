"""`Trainer` over samples in their order, for jobs that report their progress themselves and keep no checkpoints."""

import math
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class StopIfNotFinite(TrainerCallback):
    """Reports every step, and ends a training whose loss or gradient is not finite: `Trainer` itself would go on."""

    def __init__(self, tell: Callable[[int, int, float], None]):
        self.tell, self.losses = tell, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.tell(state.global_step, state.max_steps, logs["loss"])
            if not math.isfinite(logs["loss"]) or not math.isfinite(logs["grad_norm"]):
                raise FloatingPointError(
                    f"step {state.global_step}: loss {logs['loss']}, gradient norm {logs['grad_norm']}"
                )


def train_in_order(
    model: nn.Module,
    samples: list[dict],
    batch_size: int,
    seed: int,
    tell: Callable[[int, int, float], None],
    trainer: Callable[..., Trainer] = Trainer,
    **changes: Any,
) -> list[float]:
    """One pass over `samples`, in place.

    Args:
        tell: called with (step, steps, loss) after each step.
        trainer: makes the `Trainer` out of its usual arguments.
        changes: of the `TrainingArguments` below.

    Returns:
        The loss of every step.
    """
    follow = StopIfNotFinite(tell)
    with TemporaryDirectory() as folder:  # Trainer insists on one
        settings = {
            "output_dir": folder,
            "max_steps": len(samples) // batch_size,
            "per_device_train_batch_size": batch_size,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": seed,
        }
        run = trainer(model, TrainingArguments(**settings | changes), train_dataset=samples, callbacks=[follow])
        run.remove_callback(PrinterCallback)  # `tell` shows the progress
        run.train()
    model.config.use_cache = True  # Trainer turns it off, and it would be saved like that
    return follow.losses
