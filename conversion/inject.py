"""`inject(model, config)`: a memory beside the attention of any live causal LM, and `unload` to remove it again.

Every chosen attention module gets one submodule `memory`, so its tensors are `...self_attn.memory.*`. Nothing else
changes: no class, no weight, no `requires_grad`. Queries and keys reach the memory as attention gets them, after RoPE.
"""

import copy
import gc
import inspect
import sys
import warnings
from functools import partial

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .architectures import ARCHITECTURES, Architecture, Heads, architecture_of, memory_dtype
from .injected_attention import PREFIX, enter_attention, enter_model, is_injected, leave_model
from .injected_tnt import build_tnt
from .injection_config import SIZED, LiZAConfig, TNTInjectionConfig, injection_from_dict
from .liza import LiZAMemory


def inject(model: PreTrainedModel, config: LiZAConfig | TNTInjectionConfig, *, seed: int = 0) -> PreTrainedModel:
    """
    Put a memory beside the attention of a live model, before `o_proj`.

    At w = 0 ([`LiZAConfig`]) or with a closed gate ([`TNTInjectionConfig`]) the model computes what it did, bit for
    bit. The settings go into `model.config.tnt_injection` and are saved with it; the config becomes the model's own
    copy. A saved model is read back by `load_injected`, or by `inject` into its base and `load_state_dict`; loaded as
    a plain checkpoint it raises (where this module has been imported in its first call, elsewhere at once), unless
    `attn_implementation="sdpa"` asks for the base alone.

    Args:
        model: of an architecture in [`~conversion.architectures.ARCHITECTURES`], with sdpa or eager attention.
        config: [`LiZAConfig`] or [`TNTInjectionConfig`].
        seed: seed for the memory's random initial weights, the same as in a conversion with this seed; the global
            random state is not touched.

    Returns:
        `model` itself. The memory's parameters require gradients; those of the model are left as they were.

    Raises:
        ValueError: an unsupported model or attention implementation, one that has a memory already, the base of a
            causal LM that is there, too, layers out of range, or a configuration that does not fit the model. The
            model is then unchanged.

    ```python
    inject(model, LiZAConfig(operator="delta_rule", weight=0.0, max_self_attn_length=512))
    ```
    """
    row = architecture_of(model)
    if not isinstance(config, (LiZAConfig, TNTInjectionConfig)):
        raise ValueError(f"config: must be a LiZAConfig or a TNTInjectionConfig, not {type(config).__name__}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: must be an integer of 0 to {2**63 - 1}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says, it has said when the config was made
        config = type(config).from_dict(config.to_dict())  # the model's own, and checked again
    base = row.base_of(model)
    if model.get_output_embeddings() is None and _is_part(model):
        raise ValueError(
            f"model={type(model).__name__}: is a part of a model that would be saved without the settings; give that."
        )
    attentions = row.attention_modules(base)
    if any(map(is_injected, attentions.values())):
        raise ValueError("model: has an injected memory already; unload(model) it first.")
    if isinstance(config, TNTInjectionConfig) and (parts := getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(
            f"model: tensor parallelism (tp_plan) splits its heads over {parts} processes, and a TNT memory is of all"
            " heads of its layer; load it without."
        )
    # A saved injected model was loaded with the name it had.
    implementation = str(base.config._attn_implementation).removeprefix(PREFIX)
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={implementation!r}: memory can be injected into 'sdpa' or 'eager' attention; call"
            " model.set_attn_implementation('sdpa') first."
        )
    if base.config.output_attentions:
        raise ValueError(
            "config.output_attentions=True: transformers saves no configuration with it but that of 'eager'; set it to"
            " False and pass output_attentions=True in the call."
        )
    with torch.device("cpu"):
        memories = _build(attentions, row, config, base, seed)

    _own_config(model)
    base.config._attn_implementation = PREFIX + implementation
    # A plain attribute is saved: who loads the checkpoint without its memory gets an error, not another model.
    base.config.attn_implementation = PREFIX + implementation
    base.config.tnt_injection = config.to_dict()
    base.injected_with = config.to_dict()  # what its memories were made by, whatever becomes of the config
    model._is_stateful = True  # generate() refuses to roll a memory back
    parameters = tuple(inspect.signature(base.forward).parameters)
    base.register_forward_pre_hook(partial(enter_model, row, parameters), with_kwargs=True)
    base.register_forward_hook(leave_model, with_kwargs=True)
    for i, memory in memories.items():
        attentions[i].memory = memory.train(attentions[i].training)
        attentions[i].max_self_attn_length = config.max_self_attn_length
        attentions[i].keeps_memory = False  # where an adapter is disabled: see `is_disabled`
        attentions[i].register_forward_pre_hook(partial(enter_attention, row.cache), with_kwargs=True)
    return model


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r}: must be a model, not {type(model).__name__}.")


def unload(model: PreTrainedModel) -> PreTrainedModel:
    """
    Remove the memory, and LoRA with it: modules, hooks, settings and state-dict keys are the source's again, and so
    are the logits, bit for bit, as long as the model's own weights were not trained.

    Returns:
        `model` itself, or the model inside a PEFT wrapper.

    Raises:
        ValueError: a model without injected memory, or whose adapters were merged into its weights.
    """
    _check_module(model)
    if hasattr(model, "peft_config"):
        from .adapters import without_adapters  # needs peft

        model = without_adapters(model)
    elif "peft" in sys.modules:
        from .adapters import check_not_merged, take_out_wrappers

        check_not_merged(model)
        take_out_wrappers(model)
    take_out_memory(model)
    return model


def take_out_memory(model: PreTrainedModel) -> None:
    """`unload` for a model whose adapters stay.

    Raises:
        ValueError: a model without injected memory.
    """
    attentions = [x for x in model.modules() if "max_self_attn_length" in vars(x)]  # none that was compiled around one
    if not attentions:
        raise ValueError(f"model={type(model).__name__}: has no injected memory.")
    base = ARCHITECTURES[model.config.model_type].base_of(model)
    config = base.config
    for module in (base, *attentions):
        _remove_hooks(module)
    for attention in attentions:
        del attention.memory, attention.max_self_attn_length, attention.keeps_memory
    config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)
    del config.tnt_injection, config.attn_implementation, base.injected_with
    model.__dict__.pop("_is_stateful", None)


def set_max_self_attn_length(model: nn.Module, length: int | None) -> None:
    """
    Change the window of attention beside the memories, for schedules; `None` means the model's own.

    Raises:
        ValueError: a model without injected memory, a length below 1 token, or one that leaves tokens visible to no
            memory (see [`TNTConfig`]).
    """
    _check_module(model)
    attentions = [module for module in model.modules() if is_injected(module)]
    if not attentions:
        raise ValueError(f"model={type(model).__name__}: has no injected memory.")
    host, memory = attentions[0].config, attentions[0].memory
    settings = {**host.tnt_injection, "max_self_attn_length": length}
    # Sizes that followed the window stay as they are, also when the model is loaded again.
    settings |= {name: getattr(memory.config, name) for name in SIZED if settings.get(name) == "auto"}
    config = injection_from_dict(settings)
    if isinstance(config, TNTInjectionConfig):
        for attention in attentions:
            config.memory_config(host, attention.layer_idx)  # raises what loading would
    host.tnt_injection = config.to_dict()
    for module in model.modules():
        if "injected_with" in vars(module):
            module.injected_with = config.to_dict()
    for attention in attentions:
        attention.max_self_attn_length = length


def _build(
    attentions: dict[int, nn.Module], row: Architecture, config: LiZAConfig | TNTInjectionConfig, base, seed: int
) -> dict[int, nn.Module]:
    """The memory of each chosen layer, before anything is changed."""
    memories = {}
    for i in config.layer_indices(base.config):
        heads, (device, dtype) = Heads.of(base.config, i), memory_dtype(attentions[i], row, base.dtype)
        if isinstance(config, LiZAConfig):
            memories[i] = LiZAMemory(config, heads, i).to(device, dtype)
        else:
            own = config.memory_projections == "own"
            qkv = row.qkv_weights(attentions[i], heads, dtype) if own else None
            memories[i] = build_tnt(config.memory_config(base.config, i), i, qkv, device, dtype, seed)
    return memories


def _is_part(model: PreTrainedModel) -> bool:
    """Whether a module around `model` has the same configuration, as a causal LM around its base."""
    if frozen := gc.get_freeze_count():
        gc.unfreeze()  # what is frozen is not found
    try:
        holders = gc.get_referrers(model.config)  # modules, or what a module keeps its attributes in
    finally:
        if frozen:
            gc.freeze()
    parts = (x.get("_modules") if isinstance(x, dict) else getattr(x, "_modules", None) for x in holders)
    return any(part is model for own in parts if isinstance(own, dict) for part in own.values())


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a config that no other model shares, as models made from one config object do."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, partial) and hook.func in (enter_model, enter_attention):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in module._forward_hooks.items() if hook is leave_model]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
