"""The weight w of Memory-as-Gate, O = w O_memory + (1 - w) O_attention, over the steps of a `Trainer` run.

w is a 0-dim buffer `weight` of every module that mixes, so it is saved with the model; a schedule is a function of the
optimizer step alone, so a run that is killed and resumed sees the same weights as one that was not.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)
MODES = ("constant", "gradual", "cyclic", "switch", "ramp")


def mag_modules(model: nn.Module) -> Iterator[nn.Module]:
    """
    The modules of `model` that mix memory and attention by a scheduled weight: they have a 0-dim buffer `weight` and
    set `is_memory_as_gate = True`, as LiZA's and the gate `memory_gate="mix"` do. Also found inside wrappers; in a
    peft model, those of the active adapters, not those of other adapters or the originals kept aside.
    """
    weight = model._buffers.get("weight")
    if getattr(model, "is_memory_as_gate", False) and weight is not None and weight.dim() == 0:
        yield model
    copies, parts = getattr(model, "modules_to_save", None), model.children()
    if isinstance(copies, nn.ModuleDict):  # peft's wrapper: one copy per adapter beside the original
        parts = [copies[name] for name in model.active_adapters if name in copies]
    for part in parts:
        yield from mag_modules(part)


def _saved_with_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Those of `mag_modules` that peft saves: they are in copies that it trains."""
    for module in model.modules():
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            yield from mag_modules(module)


@torch.no_grad()
def set_aside_alike(model: nn.Module) -> None:
    """
    What peft keeps aside of each memory gets the weight of the adapter in use. While the adapter is there nobody hears
    it, where a disabled one is the source model; but peft makes the next adapter out of it, and TRL, whose reference
    policy is one, then copies parameters only. A memory that the model was loaded or made with keeps its own.
    """
    for module in model.modules():
        memory = getattr(module, "memory", None)
        if getattr(module, "keeps_memory", True) or not isinstance(
            getattr(memory, "modules_to_save", 0), nn.ModuleDict
        ):
            continue
        for ours, aside in zip(mag_modules(memory), mag_modules(memory.original_module), strict=True):
            aside.weight.copy_(ours.weight)


class LiZACallback(TrainerCallback):
    """
    Schedules the Memory-as-Gate weight of every injected module.

    The weight is set when training begins and after every optimizer step, from `state.global_step`: step number s
    (from 0) trains with `weight_at(s)`; anything evaluated, logged or saved after it has `weight_at(s + 1)`.
    Gradient accumulation does not change it. It is logged as `mag_weight`.

    Args:
        mode: `"gradual"` goes linearly from `initial_weight` to `final_weight` over `transition_step` steps and stays;
            `"constant"` is `final_weight` throughout; `"cyclic"` takes the next value of `weight_list` at every step;
            `"switch"` alternates between 0 (memory off) and `final_weight` every `switch_period` steps, 0 first;
            `"ramp"` goes linearly from 0, the unchanged source model, to `final_weight` over `transition_step` steps.
        initial_weight, final_weight: in [0, 1].
        transition_step: optimizer steps, at least 1.
        weight_list: values in [0, 1] for `"cyclic"`, by default `[initial_weight, final_weight]`.
        switch_period: optimizer steps, at least 1.

    The names and modes are TPTT's. Differences from TPTT 0.12.1: the model comes from the `Trainer` and is not an
    argument; the first step also has its scheduled weight; `initial_weight` starts at 0.01 and not 0; `"switch"` sets
    the weight to 0 where TPTT sets `disable_linear_attn`, which gives the same output; `"ramp"`, which crashes there,
    ends at `final_weight`. Numbers must be plain numbers: one-element lists are refused.

    Reporters that the `Trainer` lists before its callbacks (TensorBoard, W&B) have already seen a log entry when
    `mag_weight` joins it; `state.log_history` has it. To let them see it too, move the callback to the front:
    `trainer.callback_handler.callbacks.insert(0, callback)`.

    Raises:
        ValueError: an unknown mode or a number out of range; when training begins, a model without such a module.
    """

    def __init__(
        self,
        mode: str = "gradual",
        initial_weight: float = 0.01,
        final_weight: float = 0.5,
        transition_step: int = 100,
        weight_list: list[float] | None = None,
        switch_period: int = 1,
    ):
        if not isinstance(mode, str) or mode not in MODES:
            shown = repr(mode) if isinstance(mode, str) else type(mode).__name__
            raise ValueError(f"mode={shown}: must be one of {MODES} (the model comes from the Trainer)")
        for name, value in (("initial_weight", initial_weight), ("final_weight", final_weight)):
            _check_weight(name, value)
        for name, value in (("transition_step", transition_step), ("switch_period", switch_period)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a positive number of optimizer steps")
        if weight_list is not None:
            if not isinstance(weight_list, list | tuple) or not weight_list:
                raise ValueError(f"weight_list={weight_list!r}: must be a list of at least one weight")
            for i, value in enumerate(weight_list):
                _check_weight(f"weight_list[{i}]", value)
        self.mode = mode
        self.initial_weight, self.final_weight = float(initial_weight), float(final_weight)
        self.transition_step, self.switch_period = transition_step, switch_period
        self.weight_list = [float(w) for w in (weight_list or (initial_weight, final_weight))]

    @property
    def settings(self) -> dict[str, Any]:
        """What a run is continued with only if it is the same."""
        return dict(vars(self))

    def weight_at(self, step: int) -> float:
        """The weight after `step` optimizer steps, with which step number `step` (from 0) trains."""
        if self.mode == "constant":
            return self.final_weight
        if self.mode == "cyclic":
            return self.weight_list[step % len(self.weight_list)]
        if self.mode == "switch":
            return self.final_weight if step // self.switch_period % 2 else 0.0
        start = 0.0 if self.mode == "ramp" else self.initial_weight
        done = min(step / self.transition_step, 1.0)
        return (1 - done) * start + done * self.final_weight

    def check(self, model: nn.Module | None) -> None:
        """Raises ValueError for a model that mixes nothing; warns of an adapter that will lack the weight."""
        if model is None or next(mag_modules(model), None) is None:
            raise ValueError(
                f"model={type(model).__name__}: has no module with a Memory-as-Gate weight, so there is nothing to "
                "schedule: in a recipe give --mag_schedule null; or inject LiZA, or memory with the gate 'mix'"
            )

        aside = {id(x) for x in mag_modules(model)} - {id(x) for x in _saved_with_adapters(model)}
        if aside and any(getattr(x, "peft_config", None) for x in model.modules()):
            logger.warning(
                "The scheduled weight is part of the base model and not of its adapter, which is saved without it:"
                " make the adapter with lora_config(model), or save the merged model."
            )

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Set the weight for the coming step, the first or a resumed one; the model must have one."""
        self.check(model)
        self._set(model, state.global_step)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Set the weight for the coming step."""
        self._set(model, state.global_step)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        """Add the model's current `mag_weight`."""
        module = None if model is None or logs is None else next(mag_modules(model), None)
        if module is not None:
            logs["mag_weight"] = module.weight.item()
            # the Trainer has copied `logs` into its history before callbacks see them
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1]["mag_weight"] = logs["mag_weight"]

    @torch.no_grad()
    def _set(self, model: nn.Module, step: int) -> None:
        for module in mag_modules(model):
            module.weight.fill_(self.weight_at(step))
        set_aside_alike(model)


def _check_weight(name: str, value) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: must be a number in [0, 1]")
