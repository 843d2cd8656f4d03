"""The way of a memory into a model's attention, without state on any module.

Axis legend
    B batch   T tokens of this call   L keys (earlier tokens and this call's)   W tokens of the window

A forward pass hands everything down as keyword arguments, which all layers pass on to the attention interface:

    base model   pre-hook    2-D mask, documents; a cache that can hold memory
                 hook        that all layers have written to it
    attention    pre-hook    the module's input, and the cache as this layer may use it (`None` when checkpointed)
    interface    function    attention itself, over a window if asked; then `module.memory` joins its output

So recomputed layers, exceptions, copies, threads and models side by side need no care.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask, find_packed_sequence_indices, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils.generic import merge_with_config_defaults

from tnt_hf.cache_name_tnt import CACHE_NAME, take_cache
from tnt_hf.cache_tnt import INTERRUPTED
from tnt_hf.continuation_tnt import (
    check_batch,
    check_continuation,
    check_kept,
    check_used,
    check_whole_rows,
)
from tnt_hf.masks_tnt import document_ids
from tnt_hf.window_tnt import window_attention, window_of

from .architectures import Architecture
from .injected_cache import make_stateful, note_tokens


PREFIX = "tnt_inject_"
ARGUMENT = "tnt_memory"
# What keys and values of a host mean, beside what its injection says.
HOST = "model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"


class MemoryCall(NamedTuple):
    """What a memory needs besides q, k and v. A tuple, so that tools that move a call's tensors find them.

    mask `[B, T]` bool or `None`: all tokens are valid; segment_ids `[B, T]` int or `None`: one document per row;
    hidden_states `[B, T, hidden]` and the cache are added by the attention module.
    """

    mask: Tensor | None
    segment_ids: Tensor | None
    hidden_states: Tensor | None = None
    cache: Cache | None = None


# --------------------------------------------------------------------------------------------------------- base model


def enter_model(
    row: Architecture, parameters: tuple[str, ...], module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """
    Forward pre-hook of the base model; `parameters` are the names of its forward's arguments.

    Raises:
        ValueError: attention was changed or wrapped after `inject`; a mask that is not 2-D or does not cover
            the cached tokens; a cache that cannot hold the memory; packed documents that attention would mix.
    """
    given = dict(zip(parameters, args)) | kwargs
    tokens, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if (tokens is None) == (embeds is None):
        return args, kwargs  # the model has its own message
    shape = list(embeds.shape[:-1] if tokens is None else tokens.shape)
    if len(shape) != 2:
        name = "inputs_embeds, without its last axis," if tokens is None else "input_ids"
        raise ValueError(f"{name} has the shape {shape}: it must be [batch, tokens].")
    B, T = shape
    config = module.config
    if not str(config._attn_implementation).startswith(PREFIX):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r}: was changed after inject(), which would switch the"
            " memory off; unload(), change it, and inject again."
        )
    if not torch.compiler.is_compiling():
        check_injected_with(module)
    mask, cache = given.get("attention_mask"), take_cache(given)
    given[CACHE_NAME] = cache
    attentions = row.attention_modules(module)
    injected = list(filter(is_injected, attentions.values()))
    if not torch.compiler.is_compiling():
        for i, attention in attentions.items():
            if is_injected(attention) or (kind := type(attention).__name__) == row.attention_class:
                continue
            if any(map(is_injected, attention.modules())):
                raise ValueError(f"layer {i}: {kind} hides the injected memory of the attention inside it.")
    if _is_switched_off(injected[0]):
        if any(hasattr(x, "base_layer") and getattr(x, "disable_adapters", None) is False for x in module.modules()):
            raise ValueError(
                "the memory is switched off, but LoRA is not, as after enable_adapters() of transformers, which leaves"
                " out what is saved in full: [x.enable_adapters(True) for x in model.modules() if hasattr(x,"
                " 'modules_to_save')] switches it on."
            )
    if is_disabled(injected[0]):
        if getattr(cache, "tnt_injection", None) is not None and cache.get_seq_length():
            raise ValueError(f"{CACHE_NAME} was filled with the memory on, which disable_adapter() has switched off.")
        given[ARGUMENT] = MemoryCall(None, None)
        return (), given
    check_kept(module, cache)
    check_whole_rows()
    settings = {**config.tnt_injection, "disable_adapter": _is_switched_off(injected[0])}
    settings |= {name: vars(config).get(config.attribute_map.get(name, name)) for name in HOST}  # layers may differ
    slots = {attention.layer_idx: attention.memory.state_slots for attention in injected}
    if cache is not None:
        check_used(given.get("use_cache"))
        make_stateful(cache, slots, config.num_hidden_layers, settings)
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: a memory needs a 2-D mask [B, past + T] of valid tokens, not {found}.")
    segment_ids = documents(row, given, mask, cache, B, T)
    if segment_ids is not None:
        given["use_cache"] = False  # with a cache, attention would not tell documents apart
    elif cache is None and _uses_cache(module, use_cache=given.get("use_cache")):
        cache = given[CACHE_NAME] = DynamicCache(config=config)
        make_stateful(cache, slots, config.num_hidden_layers, settings)
    past = 0 if cache is None else cache.get_seq_length()
    if cache is not None:
        check_continuation(cache, mask, past, T)
    check_batch(cache, mask, past, B, T)
    if cache is not None and mask is None:
        check_places(given.get("position_ids"), past, T)
    if cache is not None:
        note_tokens(cache, T)
        if not torch.compiler.is_compiling():
            cache.unusable = INTERRUPTED  # until all layers have written to it
    valid = None
    if mask is not None:
        valid = mask[:, -T:].to(torch.bool)
        if not torch.compiler.is_compiling():
            if bool(valid.all()):
                valid = None
            elif cache is not None:
                cache.holds_padding = True
    if mask is not None and "position_ids" in parameters and given.get("position_ids") is None:
        free = _may_count(row, config, cache, past, T)
        if free and _sees_positions(injected) and (torch.compiler.is_compiling() or not bool(mask.all())):
            count = mask.to(torch.bool).cumsum(1) - 1  # as `generate` counts them
            given["position_ids"] = count.clamp_min(0)[:, -T:]
    given[ARGUMENT] = MemoryCall(valid, segment_ids)
    return (), given


def check_injected_with(module: nn.Module) -> None:
    """
    Raises:
        ValueError: the settings in the base model's configuration are no longer those its memories were made by.
    """
    settings, made = module.config.tnt_injection, module.injected_with
    if settings != made:
        name = next(name for name in {**made, **settings} if settings.get(name, ...) != made.get(name, ...))
        raise ValueError(
            f"tnt_injection[{name!r}]={settings.get(name)!r}: the memory was injected with {made.get(name)!r}, and"
            " would be saved as another. Set it back; unload(model) and inject it again with another value."
        )


def check_places(position_ids: Tensor | None, past: int, length: int) -> None:
    """
    `generate` drops a mask of ones, but not the positions it has counted by it: without padding no new token can have
    one of the cached tokens'. Asking a GPU takes as long as all that it still has to do, so one token is not asked of.

    Raises:
        ValueError: tokens that the cache holds are given again, or the mask did not count them.
    """
    if torch.compiler.is_compiling() or not past or position_ids is None or position_ids.ndim != 2:
        return
    if length > 1 or position_ids.is_cpu:
        if (first := int(position_ids.min())) < past:
            raise ValueError(
                f"position_ids begin at {first}, but {CACHE_NAME} holds {past} tokens already: count on from there,"
                " or pass `generate` the whole conversation, or its new tokens with an attention_mask of all of it."
            )


def leave_model(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """Forward hook of the base model, which [`enter_model`] has given the cache by name."""
    if (cache := kwargs.get(CACHE_NAME)) is not None and not torch.compiler.is_compiling():
        cache.unusable = None


def _sees_positions(injected: list[nn.Module]) -> bool:
    """Whether positions that count padding would change what a memory reads: a linear operator and a memory of
    attention's own keys get them after RoPE. A graph may not ask whether they are open."""
    memories = [x.memory for x in injected if x.memory.keys_after_rope]
    return bool(memories) and (torch.compiler.is_compiling() or any(x.is_open() for x in memories))


def _may_count(row: Architecture, config: Any, cache: Cache | None, past: int, length: int) -> bool:
    """Whether the base model computes the same with positions that do not count padding. The first call decides for a
    cache: tokens that were placed in two ways would be at wrong distances."""
    free = past + length <= row.shiftable(config)
    if cache is None or torch.compiler.is_compiling():
        return free
    if not past:
        cache.leaves_out_padding = free
    return getattr(cache, "leaves_out_padding", free)


@merge_with_config_defaults
def _uses_cache(module: nn.Module, use_cache: bool | None = None, **_: Any) -> bool:
    """Whether the base model is about to make a cache, which its own decorator decides."""
    return bool(use_cache)


def documents(
    row: Architecture, given: dict[str, Any], mask: Tensor | None, cache: Cache | None, batch: int, length: int
) -> Tensor | None:
    """
    `[B, T]` int64 that changes where a packed row starts a new document, or `None` if no row does: exactly where the
    library's attention mask separates them, which it does for `position_ids` alone, without mask and cache.

    Raises:
        ValueError: packed documents between which attention itself would look.
    """
    positions, mixed, named = given.get("position_ids"), None, True
    if positions is not None and positions.ndim == 3:  # multimodal RoPE's, of which the first of four count tokens
        positions, named = positions[0], len(positions) == 4
    if not row.separates_documents:
        mixed = f"a model with {row.attention_class} looks across documents; pass one document per row."
    elif not named:
        mixed = "three rows of positions name no documents to attention; put a fourth before them, the text's."
    elif mask is not None or cache is not None or given.get("use_cache"):
        other = "a cache (use_cache=True)" if mask is None else "an attention_mask"
        mixed = f"together with {other} attention would look across documents; pass position_ids alone."
    packed, separates = None, positions is not None and mixed is None
    if separates:
        packed = find_packed_sequence_indices(positions.expand(batch, -1))
    if torch.compiler.is_compiling():
        return packed
    if not separates:
        valid = None if mask is None else mask[:, -length:].to(torch.bool)
        if document_ids(positions, valid, batch, length, {}) is not None:
            raise ValueError(f"position_ids restart inside a row (packed documents): {mixed}")
    if (announced := document_ids(None, None, batch, length, given)) is not None:
        if packed is None or not torch.equal(announced.diff() != 0, packed.diff() != 0):
            raise ValueError(
                "cu_seq_lens_q or seq_idx name documents that position_ids do not: attention would look across them;"
                " pass position_ids that restart with each document."
            )
    return packed


def is_injected(module: nn.Module) -> bool:
    """Whether `module` is an attention module that `inject` gave a memory."""
    return hasattr(module, "max_self_attn_length")


def is_disabled(attention: nn.Module) -> bool:
    """Whether PEFT's `disable_adapter()` asks for a source without memory. A memory that the model was loaded with is
    its own: in place of the copy that an adapter trains, it is there as it was."""
    return _is_switched_off(attention) and not attention.keeps_memory


def _is_switched_off(attention: nn.Module) -> bool:
    return bool(getattr(attention.memory, "disable_adapters", False))


# ---------------------------------------------------------------------------------------------------------- attention


def enter_attention(cache_argument: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Forward pre-hook of an attention module, whose cache is called `cache_argument`.

    Raises:
        ValueError: the module was not called by its base model.
    """
    call = kwargs.get(ARGUMENT)
    if call is None:
        raise ValueError(f"{ARGUMENT}=None: call the injected model or its base model, not a layer of it.")
    hidden_states = args[0] if args else kwargs["hidden_states"]
    call = call._replace(hidden_states=hidden_states, cache=kwargs.get(cache_argument))
    return args, {**kwargs, ARGUMENT: call}


def _inject(kind: str, base: Callable, module: nn.Module, query, key, value, attention_mask, **kwargs):
    call: MemoryCall | None = kwargs.pop(ARGUMENT, None)
    if call is None:
        raise ValueError(
            f"attn_implementation={PREFIX + kind!r}: this model's memory was not loaded, or never injected; use"
            f" tnt_hf.conversion.load_injected, or pass attn_implementation={kind!r} for the base model alone, or to"
            " a trainer that makes a reference of the model's name its ref_model."
        )
    if not is_injected(module) or is_disabled(module):
        return base(module, query, key, value, attention_mask, **kwargs)
    T, L, window = query.shape[2], key.shape[2], module.max_self_attn_length
    near = None
    if window is not None and kind == "sdpa" and attention_mask is None:
        near = window_of(window, query[:, 0], L - T, None, 0)
    if near is not None:
        options = {name: kwargs[name] for name in ("scaling", "dropout") if name in kwargs}
        attn_output, attn_weights = window_attention(query, key, value, near, **options), None
    else:
        seen = (key, value, attention_mask)
        if window is not None:
            seen = narrow(query, key, value, attention_mask, window, additive=kind == "eager")
        attn_output, attn_weights = base(module, query, *seen, **kwargs)
    joined = module.memory(
        attn_output,
        query,
        key[:, :, -T:],
        value[:, :, -T:],
        call.hidden_states,
        mask=call.mask,
        segment_ids=call.segment_ids,
        cache=call.cache,
    )
    return joined, attn_weights


def injected_sdpa(module, query, key, value, attention_mask, **kwargs):
    """The library's sdpa attention and the module's memory; arguments and results of an attention function."""
    base = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return _inject("sdpa", base, module, query, key, value, attention_mask, **kwargs)


def injected_eager(module, query, key, value, attention_mask, **kwargs):
    """The model's own eager attention and the module's memory; arguments and results of an attention function."""
    base = sys.modules[type(module).__module__].eager_attention_forward
    return _inject("eager", base, module, query, key, value, attention_mask, **kwargs)


def narrow(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int, additive: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """
    Keys, values and mask with which attention sees the last `window` tokens, the query's own included.

    Args:
        query: `[B, Hq, T, D]`, the last T of the L tokens. key, value: `[B, H, L, D]`.
        mask: `[B or 1, 1 or Hq, T, L]` bool (`True` = seen) or additive; `None` is causal.
        additive: which of the two to make out of `None`.
    """
    T, L = query.shape[2], key.shape[2]
    keep = min(L, window + T - 1)  # older keys are outside every query's window
    key, value = key[:, :, L - keep :], value[:, :, L - keep :]
    mask = None if mask is None else mask[..., L - keep :]
    if T == 1 or L <= window:
        return key, value, mask
    place = torch.arange(keep, device=key.device)
    distance = place[keep - T :, None] - place
    seen = (distance >= 0) & (distance < window)
    if mask is None and not additive:
        return key, value, seen[None, None]
    if mask is not None and mask.dtype == torch.bool:
        return key, value, mask & seen
    # Not a sum, which would overflow.
    lowest = torch.finfo(query.dtype).min
    mask = torch.zeros((), dtype=query.dtype, device=key.device) if mask is None else mask
    return key, value, torch.where(seen[None, None], mask, lowest)


AttentionInterface.register(PREFIX + "sdpa", injected_sdpa)
AttentionInterface.register(PREFIX + "eager", injected_eager)
AttentionMaskInterface.register(PREFIX + "sdpa", sdpa_mask)
AttentionMaskInterface.register(PREFIX + "eager", eager_mask)
