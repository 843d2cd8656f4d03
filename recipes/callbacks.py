"""Schedules of a training run and its progress display.

A schedule is a function of the optimizer step and the seed alone: a run that was killed and goes on sees the same
values, and all processes agree without talking.
"""

import random
from typing import Any

from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from tnt_hf.conversion.injected_attention import is_injected
from tnt_hf.recipes.memory_statistics import host_of


NARROWED = 8  # a narrowed window keeps this fraction of its tokens


class WindowDropout(TrainerCallback):
    """
    Narrows the sliding window of attention to an eighth (at least the token itself) during random optimizer steps.

    A model whose window sees enough learns to ignore its memory. In a narrowed step the nearest tokens, which hold the
    syntax of a sentence, still reach attention; what was said before them has to come out of the memory. All layers
    with a window are narrowed, as a model has one window; layers with full attention keep it. Between steps, and so in
    evaluation and in what is saved, the window is what the configuration says.

    Args:
        probability: of a step to be narrowed, in [0, 1].
        warmup_steps: optimizer steps over which the probability grows linearly from 0.
        seed: of the run. Whether step s is narrowed depends on (seed, s) only.

    Raises:
        ValueError: a number out of range; when training begins, a model without a window or one whose memory cannot
            work with the narrowed window (`allow_memory_gap` of [`TNTConfig`]).
    """

    def __init__(self, probability: float, warmup_steps: int = 0, seed: int = 0):
        if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 <= probability <= 1:
            raise ValueError(f"window_dropout={probability!r}: must be a probability in [0, 1]")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(f"window_dropout_warmup_steps={warmup_steps!r}: must be a number of steps >= 0")
        self.probability, self.warmup_steps, self.seed = probability, warmup_steps, seed
        self._undo = None

    @property
    def settings(self) -> dict[str, Any]:
        """What a continued run must have in common with this one."""
        return {"probability": self.probability, "warmup_steps": self.warmup_steps}

    def narrows(self, step: int) -> bool:
        """Whether optimizer step number `step` (from 0) sees the narrowed window."""
        probability = self.probability * min(1.0, (step + 1) / max(self.warmup_steps, 1))
        return random.Random(f"window dropout, seed {self.seed}, step {step}").random() < probability

    def share(self, first: int, last: int) -> float:
        """The share of narrowed steps among those from number `first` to `last`, which is not included."""
        return sum(map(self.narrows, range(first, last))) / max(last - first, 1)

    def check(self, model: nn.Module) -> None:
        """Raises ValueError for a model that cannot be narrowed."""
        narrow_window(model)()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Refuse an unsuitable model before it trains."""
        self.check(model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Narrow the window of this step, or not."""
        self.restore()
        if self.narrows(state.global_step):
            self._undo = narrow_window(model)

    def on_step_end(self, args, state, control, **kwargs):
        """Back to the configured window, before anything is logged, evaluated or saved."""
        self.restore()

    def restore(self) -> None:
        """Widen the window again, if it is narrowed."""
        if self._undo is not None:
            self._undo()
            self._undo = None


def narrow_window(model: nn.Module):
    """
    Narrow the window of a TNT model or of a model with an injected memory.

    Returns:
        A function that widens it again.

    Raises:
        ValueError: no layer has a window, or the memory refuses the narrowed one.
    """
    inner = host_of(model)
    if hasattr(inner, "set_sliding_window"):
        config = inner.config
        layers = [i for i, kind in enumerate(config.layer_types) if "sliding" in kind and inner._attends(i)]
        window = config.sliding_window
        if layers and window is not None:
            noted = "window_narrowed" in vars(config)
            inner.set_sliding_window(max(1, window // NARROWED), layers)

            def widen():
                inner.set_sliding_window(window, layers)
                if not noted:
                    vars(config).pop("window_narrowed", None)

            return widen
    windows = {m: m.max_self_attn_length for m in inner.modules() if is_injected(m) and m.max_self_attn_length}
    if not windows:
        raise ValueError(f"window_dropout: no layer of {type(inner).__name__} has a sliding window to narrow")
    for module, window in windows.items():
        module.max_self_attn_length = max(1, window // NARROWED)

    def undo():
        for module, window in windows.items():
            module.max_self_attn_length = window

    return undo


class ChunkSizeSchedule(TrainerCallback):
    """
    Sets the chunk sizes of the local memories (tokens) at given optimizer steps.

    Args:
        schedule: `{step: sizes}`; from optimizer step number `step` (from 0) on, the sizes are `sizes`, one for all
            local memories or one each. Before the first the model's own hold. The trained model keeps the last.

    Raises:
        ValueError: a step that is not a number >= 0 or is named twice, sizes that are not numbers; when training
            begins, and before any step, sizes that the model refuses.
    """

    def __init__(self, schedule: dict[int | str, int | list[int]]):
        self.schedule = {}
        for step, sizes in schedule.items():
            if isinstance(step, bool) or not str(step).isdecimal():
                raise ValueError(f"chunk_size_schedule: {step!r} must be a number of optimizer steps >= 0")
            if int(step) in self.schedule:
                raise ValueError(f"chunk_size_schedule: step {int(step)} is named twice")
            numbers = sizes if isinstance(sizes, list) else [sizes]
            if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
                raise ValueError(
                    f"chunk_size_schedule: from step {step}: {sizes!r} must be a number of tokens, or a list of them"
                )
            self.schedule[int(step)] = sizes
        if not self.schedule:
            raise ValueError(f"chunk_size_schedule={schedule!r}: names no step")

    @property
    def settings(self) -> dict[str, Any]:
        """What a continued run must have in common with this one."""
        return {str(step): self.schedule[step] for step in sorted(self.schedule)}

    def sizes_at(self, step: int) -> int | list[int] | None:
        """The sizes of optimizer step number `step` (from 0), `None` for the model's own."""
        begun = [start for start in self.schedule if start <= step]
        return self.schedule[max(begun)] if begun else None

    def check(self, model: nn.Module) -> None:
        """Try all sizes. Raises ValueError for a model without local memories, or one that refuses some."""
        inner = host_of(model)
        if not hasattr(inner, "set_local_chunk_sizes") or not (
            inner.config.local_chunk_sizes and inner.config.memory_layer_indices
        ):
            raise ValueError(f"chunk_size_schedule: {type(inner).__name__} has no local memories")
        own = list(inner.config.local_chunk_sizes)
        for step, sizes in self.schedule.items():
            try:
                inner.set_local_chunk_sizes(sizes)
            except ValueError as error:
                raise ValueError(f"chunk_size_schedule: from step {step}: {error}") from None
            finally:
                inner.config.local_chunk_sizes = list(own)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Refuse an unsuitable model, then set the sizes of the first, or a resumed, step."""
        self.check(model)
        # A step that is over had these sizes; a checkpoint between two of them is evaluated as it was trained.
        self._set(host_of(model), max(state.global_step - 1, 0))

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Set the sizes of this step."""
        self._set(host_of(model), state.global_step)

    def _set(self, model: nn.Module, step: int) -> None:
        sizes = self.sizes_at(step)
        if sizes is not None:
            model.set_local_chunk_sizes(sizes)


class _Short:
    """Leaves what is said about single layers and groups to the log files: it would fill the terminal."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        short = {name: value for name, value in (logs or {}).items() if "/" not in name}
        if short.keys() - {"epoch"}:
            super().on_log(args, state, control, logs=short, **kwargs)


class Progress(_Short, ProgressCallback):
    """A progress bar, and one line for every log."""


class Printer(_Short, PrinterCallback):
    """One line for every log, where there shall be no progress bar."""
