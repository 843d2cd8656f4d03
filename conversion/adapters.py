"""LoRA on models with memory, through peft: q, k, v and o get low-rank adapters; the memory itself is trained.

    inject(model, config)                             memory
    model = get_peft_model(model, lora_config(model)) LoRA; or both in one call: get_tptt_model
    Trainer(model, ...) / model.save_pretrained(dir)  the adapter's folder also holds the injection settings
    load_injected(dir)                                the same model again
    unload(model.merge_and_unload())                  LoRA merged, memory taken out; unload(model) gives the source

An adapter is LoRA and memory together: `with model.disable_adapter()` is the model without both. A memory that
`load_injected` loaded with a whole model is the model's own and stays, with the weights it was loaded with, the
reference of TRL's losses. Of one that was trained or read since `inject`, or merged, save the model and load it first.
"""

import copy
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from .architectures import ARCHITECTURES
from .inject import inject, unload
from .injected_attention import is_injected
from .injection_config import LiZAConfig, TNTInjectionConfig, injection_from_dict
from .language_model import language_model


MEMORY = "memory"
ALL_LINEAR = "all-linear"  # what peft calls every linear layer but the head
TNT_TARGETS = [f"self_attn.{name}_proj" for name in "qkvo"]
# Ways of initialising LoRA that leave the weights they adapt as they are.
HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# What settings are called in TPTT.
TPTT_NAMES = {
    "operator_mode": "operator",
    "mag_weight": "weight",
    "max_chunk_size": "chunk_size",
    "lora_config": "get_tptt_model(lora=...)",
    "base_model_name": "get_tptt_model(base)",
}


@dataclass
class InjectedLoraConfig(LoraConfig):
    """
    peft's `LoraConfig` plus the injection settings, which are thus saved in every `adapter_config.json`. peft alone
    warns that it does not know `tnt_injection`, and continues without a memory.

    Args:
        tnt_injection: `model.config.tnt_injection`. If it has since changed, the live model's value is saved.
    """

    tnt_injection: dict[str, Any] | None = field(default=None, metadata={"help": "Settings of tnt_hf's inject()"})

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        live = getattr(getattr(self, "host", None), "tnt_injection", None)
        return {**super().to_dict(), "tnt_injection": copy.deepcopy(live or self.tnt_injection)}


def lora_config(model: nn.Module, **overrides: Any) -> LoraConfig:
    """
    The `LoraConfig` for a model with memory: rank 8, alpha 16, dropout 0.05 on q, k, v and o of every layer, under the
    names they have in this architecture, and the memory in `modules_to_save`: W_init, gates, projections and the
    Memory-as-Gate weight are trained and saved in full. The memory's own projections get no LoRA.

    Args:
        model: an injected model (see [`inject`]) or a TNT model; inside a `PeftModel`, for another adapter.
        overrides: fields of `LoraConfig`. `target_modules` may be anything peft accepts; matches of a name or pattern
            inside the memory are left out. `modules_to_save` is in addition to the memory.

    Returns:
        `LoraConfig`; an [`InjectedLoraConfig`] for an injected model.

    Raises:
        ValueError: a model that is neither, an unknown field, a value out of range, or a target that is nowhere or
            only in the memory.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    targets, transposed = _targets(base)
    _check_overrides(overrides)
    values = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "task_type": "CAUSAL_LM", "target_modules": targets}
    values |= {"fan_in_fan_out": transposed, **overrides}
    memories = [name for name, _ in base.named_modules() if name.endswith(f".{MEMORY}")]
    if memories:
        # what is saved in full gets no LoRA from peft, whatever the targets say
        values["modules_to_save"] = [MEMORY, *(x for x in values.get("modules_to_save") or [] if x != MEMORY)]
    settings = getattr(base.config, "tnt_injection", None)
    if settings is None:
        config = LoraConfig(**values)
    else:
        config = InjectedLoraConfig(**values, tnt_injection=copy.deepcopy(settings))
        config.host = base.config
    _check_saved(values.get("modules_to_save") or [], base)
    wanted = values["target_modules"]
    parameters = values.get("target_parameters")
    if inside := _only_inside(wanted, parameters, base):
        reason = "is inside the memory, which is trained in full and gets no LoRA"
        field, given = (
            ("target_parameters", parameters) if inside[0] in (parameters or ()) else ("target_modules", wanted)
        )
        raise ValueError(f"{field}={given!r}: {inside[0]!r} {reason}.")
    found = any(check_target_module_exists(config, name) for name, _ in base.named_modules())
    if wanted != ALL_LINEAR and not found:
        raise ValueError(f"target_modules={wanted!r}: match no module of {type(base).__name__}.")
    return config


def get_tptt_model(
    base: PreTrainedModel | str | os.PathLike,
    config: LiZAConfig | TNTInjectionConfig | dict[str, Any],
    lora: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PeftModel:
    """
    A pretrained model, a memory and LoRA in one call, as in TPTT: [`inject`], then peft with [`lora_config`].

    Differences from TPTT 0.12.1: it also loads the model, if given its name; returns only the `PeftModel`, because the
    operator's state is in the model's own cache; includes LoRA (there: `TpttModel`); finds the layers by architecture
    and not by name, and refuses an unknown architecture. Its settings are called `operator` (there `operator_mode`),
    `weight` (`mag_weight`) and `chunk_size` (`max_chunk_size`); `max_self_attn_length` keeps its name. The operators
    are the published ones, always in float32 at least, and causal, so there are no `linear_precision`,
    `bidirectional`, `cross_gate`, `pooling_config` and `padding_side`.

    Args:
        base: a model, changed in place; or a folder or Hub id, of which only the language model is taken.
        config: [`LiZAConfig`], [`TNTInjectionConfig`], or either as a dict (`LiZAConfig` if it names no `"kind"`).
        lora: overrides of [`lora_config`].
        kwargs: for `AutoModelForCausalLM.from_pretrained`, when `base` is a name.

    Raises:
        ValueError: see [`inject`] and [`lora_config`]. A model that was passed in is then unchanged.

    ```python
    model = get_tptt_model("Qwen/Qwen3-0.6B", {"operator": "delta_rule", "weight": 0.5}, lora={"r": 16})
    ```
    """
    if isinstance(config, dict):
        if renamed := [name for name in config if name in TPTT_NAMES]:
            raise ValueError(f"config[{renamed[0]!r}]: is {TPTT_NAMES[renamed[0]]} here.")
        config = injection_from_dict({"kind": LiZAConfig.kind, **config})
    elif not isinstance(config, (LiZAConfig, TNTInjectionConfig)):
        raise ValueError(f"config: must be a LiZAConfig, a TNTInjectionConfig or a dict, not {type(config).__name__}.")
    lora = {} if lora is None else lora
    if not isinstance(lora, dict):
        raise ValueError(f"lora={type(lora).__name__}: must be a dict of LoraConfig's fields or None.")
    _check_overrides(lora)
    if isinstance(base, (str, os.PathLike)):
        name, base = base, language_model(AutoModelForCausalLM.from_pretrained(base, **kwargs))
        if getattr(base.config, "tnt_injection", None) is not None:
            raise ValueError(f"base={str(name)!r}: holds a memory, which would be lost; load it with load_injected.")
    elif kwargs:
        raise ValueError(f"{', '.join(kwargs)}: only for a base that is loaded here, not a {type(base).__name__}.")
    check_no_adapters(base)
    inject(base, config)
    try:
        with unchanged_on_failure(base):
            return get_peft_model(base, lora_config(base, **lora))
    except Exception:
        unload(base)
        raise


def check_no_adapters(model: object) -> None:
    """Raises ValueError: a model without its `PeftModel` has adapters already, which another would replace."""
    added = sorted(getattr(model, "peft_config", None) or {})
    if not added or isinstance(model, PeftModel):
        return
    how = "they are of a PeftModel: pass that, or take them out with its unload()"
    if getattr(model, "_hf_peft_config_loaded", False):
        how = f"add_adapter or from_pretrained put it in: take it out with model.delete_adapter({added[0]!r})"
    raise ValueError(f"base={type(model).__name__}: has the adapter {added[0]!r}, which another would replace; {how}.")


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """A context in which peft adds an adapter to `model`. If that fails, it undoes what peft leaves behind: what was
    added until then, and frozen weights."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        yield
    except Exception:
        take_out_wrappers(model)
        model.__dict__.pop("peft_config", None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
        raise


def take_out_wrappers(model: nn.Module) -> None:
    """Put the layers that peft wrapped back in their places; `model.delete_adapter` leaves the wrappers there."""
    for name, module in reversed(list(model.named_modules())):  # wrappers may hold adapters
        if isinstance(model.get_submodule(name.rpartition(".")[0]), TrainableTokensWrapper):
            continue  # which finds what it wraps through the adapter that it holds
        if isinstance(module, BaseTunerLayer):
            model.set_submodule(name, module.get_base_layer())
        elif isinstance(module, AuxiliaryTrainingWrapper):
            model.set_submodule(name, module.original_module)


def check_not_merged(model: nn.Module) -> None:
    """Raises ValueError: an adapter is merged into a weight, which is then no longer the original."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise ValueError(
                f"{name}: an adapter is merged into its weight; model.unmerge_adapter() takes it out (up to rounding)."
            )


def without_adapters(model: PeftModel) -> PreTrainedModel:
    """
    The model inside a `PeftModel` without its adapters, which are not merged: its weights are the original ones. The
    memory is the one `inject` made. peft's `requires_grad = False` stays.

    Raises:
        ValueError: not a `PeftModel`; adapters that changed the model's own weights.
    """
    if not isinstance(model, PeftModel):
        how = "pass the PeftModel itself."
        if added := sorted(getattr(model, "peft_config", {})):
            how = f"take out what add_adapter put in, model.delete_adapter({added[0]!r})."
        raise ValueError(f"model: must be a PeftModel, not {type(model).__name__}; {how}")
    for name, config in model.peft_config.items():
        start, bias = getattr(config, "init_lora_weights", True), getattr(config, "bias", "none")
        if start not in HARMLESS_STARTS:
            raise ValueError(f"init_lora_weights={start!r} of adapter {name!r}: has changed the model's own weights.")
        if bias != "none":
            raise ValueError(f"bias={bias!r} of adapter {name!r}: has trained the model's own biases.")
    check_not_merged(model)
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.set_adapter([])  # the original comes back, not the trained copy
    return model.unload()


def _targets(base: nn.Module) -> tuple[list[str], bool]:
    """Names of the projections that get LoRA, and whether their weights are transposed."""
    kind = getattr(getattr(base, "config", None), "model_type", None)
    if kind == "tnt":
        return TNT_TARGETS, False
    injected = isinstance(base, nn.Module) and any(is_injected(module) for module in base.modules())
    if injected and kind in ARCHITECTURES:
        return ARCHITECTURES[kind].lora_targets, ARCHITECTURES[kind].conv1d
    raise ValueError(
        f"model={type(base).__name__}: has no injected memory and is not a TNT model; inject(model, config) it first."
    )


def _check_overrides(overrides: dict[str, Any]) -> None:
    known = [x.name for x in fields(LoraConfig) if x.init]
    if unknown := [name for name in overrides if name not in known]:
        raise ValueError(f"{unknown[0]}={overrides[unknown[0]]!r}: is not a field of LoraConfig: {', '.join(known)}.")

    def check(name: str, accepted: bool, reason: str) -> None:
        if name in overrides and not accepted:
            raise ValueError(f"{name}={overrides[name]!r}: must be {reason}.")

    r, alpha, dropout = (overrides.get(name, 0.5) for name in ("r", "lora_alpha", "lora_dropout"))
    check("r", isinstance(r, int) and not isinstance(r, bool) and r > 0, "an integer of at least 1")
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    check("lora_alpha", number and 0 < alpha < math.inf, "a positive, finite number")
    check("lora_dropout", isinstance(dropout, (int, float)) and 0 <= dropout < 1, "a number in [0, 1)")
    for name in ("modules_to_save", "target_parameters"):
        value = overrides.get(name)
        check(name, value is None or _are_names(value), "a list of names")
    targets = overrides.get("target_modules")
    check("target_modules", isinstance(targets, str) or _are_names(targets), "a list of names, or a pattern")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(f"target_modules={targets!r}: is not a pattern ({error}).") from error


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple, set)) and all(isinstance(name, str) for name in value)


def _check_saved(saved: list[str], base: nn.Module) -> None:
    """
    Raises:
        ValueError: what is to be saved in full is, for peft, also a part of the memory, which it would put into a
            copy of its own: peft goes by how names end.
    """
    names = [name for name, _ in base.named_modules()]
    inside = [name for name in names if f".{MEMORY}." in name]
    for entry in saved:
        if entry == MEMORY or not (found := next((name for name in inside if name.endswith(entry)), None)):
            continue
        reason = f"is also the end of {found!r}, a part of the memory, which is saved in full"
        others = [name.split(".") for name in names if name.endswith(entry) and name not in inside]
        for parts in sorted(others, key=lambda parts: parts[-1] != entry):  # what it names, before what ends like it
            longer = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
            if fits := [end for end in longer if not any(name.endswith(end) for name in inside)]:
                reason += f"; name {fits[0]!r}"
                break
        raise ValueError(f"modules_to_save={saved[1:] if saved[0] == MEMORY else saved!r}: {entry!r} {reason}.")


def _only_inside(targets: Any, parameters: Any, base: nn.Module) -> list[str]:
    """The targets that are in the memory and nowhere else, such as the names of its convolutions, and of parameters
    those that are in it, too, which peft leaves nobody to take out of it."""
    names, inside = [name for name, _ in base.named_modules()], []
    for target in parameters or ():
        inside += [target for name, _ in base.named_parameters() if f".{MEMORY}." in name and name.endswith(target)]
    for target in [targets] if isinstance(targets, str) else targets or []:
        pattern = target if isinstance(targets, str) else rf"(.*\.)?{re.escape(target)}"
        places = [name for name in names if re.fullmatch(pattern, name)]
        if places and all(f".{MEMORY}." in f"{place}." for place in places):
            inside.append(target)
    return inside
