"""Which tokens see which: attention masks, packed documents, default positions.

Axis legend
    B batch   T tokens of this call   P persistent tokens

This file travels with every pushed checkpoint.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
    flash_attention_mask,
)

from .cache_name_tnt import CACHE_NAME
from .cache_tnt import TNTCache
from .compiler_tnt import is_exporting
from .configuration_tnt import TNTConfig
from .grid_tnt import document_starts
from .window_tnt import window_of


MASKED = ("sdpa", "eager")  # whose masks of a window are made here
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def build_masks(
    config: TNTConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    segment_ids: Tensor | None = None,
) -> dict[str, Any]:
    """
    One mask per kind of attention, as its implementation wants it, plus `"memory"`: `[B, T]` bool of this call's valid
    tokens, or `None` if all are. (The library's own function makes a full causal one for `"hybrid_sliding"`.) For SDPA
    it is a `Window` where no mask of T T entries is needed.

    Padding between two parts of a conversation takes no room in the window of a [`TNTCache`] with SDPA, eager or flash
    attention; in the library's own caches and other kinds of attention it does, as in the base models.

    Raises:
        ValueError: an attention that cannot have persistent tokens or the packed rows, or whose windows are not those
            that the cache holds; a mask of attention alone where there is a memory, or none where the cache holds
            padding.
    """
    T, P, implementation = inputs_embeds.shape[1], config.num_persistent_tokens, config._attn_implementation
    _refuse_impossible(config, P, implementation, attention_mask, segment_ids)
    if isinstance(cache, TNTCache) and not torch.compiler.is_compiling():
        _check_windows(config, implementation, attention_mask, cache, T)
    masks: dict[str, Any] = {"memory": _memory_mask(attention_mask, T, cache)}
    given = attention_mask is not None and attention_mask.ndim != 2  # a finished mask of attention
    padded = masks["memory"] is not None or getattr(cache, "holds_padding", False)
    if T == 1 and not given and not padded and sees_whole_cache(implementation, cache):
        masks["sliding_attention"] = _full_window(config, implementation, cache, inputs_embeds)
        return masks | {"full_attention": None}
    by_valid_tokens = padded and counts_valid_tokens(implementation) and isinstance(cache, TNTCache | None)
    in_blocks = implementation == "sdpa" and not given and isinstance(cache, TNTCache | None)
    in_blocks = in_blocks and not (padded and torch.compiler.is_compiling()) and not is_exporting()
    same_document = None
    if segment_ids is not None:

        def same_document(batch_idx, head_idx, q_idx, kv_idx):
            return segment_ids[batch_idx, q_idx] == segment_ids[batch_idx, kv_idx]

    memory_only = set(config.memory_layer_indices) if config.variant == "lmm" else set()
    for i, kind in enumerate(config.layer_types):
        name = "sliding_attention" if "sliding" in kind else "full_attention"
        if i in memory_only or name in masks:
            continue
        cached = 0 if not isinstance(cache, TNTCache) else cache.cached_window(i)
        width = config.sliding_window if name == "sliding_attention" else None
        if in_blocks and (width is not None or not padded):
            valid = _keys(attention_mask, T, cached)[1] if padded else None
            masks[name] = window_of(width, inputs_embeds, cached, segment_ids, P, valid)
            if masks[name] is not None:
                continue
        if name == "sliding_attention" and by_valid_tokens and _leaves_out_padding(implementation):
            mask = _keys(attention_mask, T, cached)[1]  # flash attention leaves out the others and counts what is left
            if not torch.compiler.is_compiling() and bool(mask.all()):
                mask = None
        elif name == "sliding_attention" and by_valid_tokens:
            mask = _valid_window_mask(attention_mask, T, cached, config.sliding_window, segment_ids)
            if implementation == "eager":
                lowest = torch.finfo(inputs_embeds.dtype).min
                mask = torch.zeros_like(mask, dtype=inputs_embeds.dtype).masked_fill(~mask, lowest)
        else:
            create = create_sliding_window_causal_mask if name == "sliding_attention" else create_causal_mask
            mask = create(
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                **{CACHE_NAME: cache},
                position_ids=None,
                and_mask_function=same_document,
                layer_idx=i,
                allow_is_causal_skip=not P,
            )
        if P:
            mask = F.pad(mask, (P, 0), value=True if mask.dtype == torch.bool else 0.0)
        masks[name] = mask
    return masks


def _refuse_impossible(
    config: TNTConfig, P: int, implementation: str, attention_mask: Tensor | None, segment_ids: Tensor | None
) -> None:
    if P and implementation not in MASKED:
        raise ValueError(
            f"num_persistent_tokens={P} needs attn_implementation 'sdpa' or 'eager', not {implementation!r}."
        )
    # The library hands flash attention the documents of a single row without padding; others it would see as one.
    flash = segment_ids is not None and _leaves_out_padding(implementation)
    if flash and attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask: has padding beside packed documents, which"
            f" attn_implementation={implementation!r} does not keep apart then: leave the padding out, or take 'sdpa'."
        )
    if flash and len(segment_ids) > 1:
        raise ValueError(
            f"attn_implementation={implementation!r} keeps packed documents apart in one row at a time, and there are"
            f" {len(segment_ids)} rows: take a batch of 1 (longer rows), or 'sdpa'."
        )
    if attention_mask is not None and attention_mask.ndim != 2 and config.memory_layer_indices:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: memory layers need a 2-D mask [B, past + T] of"
            " valid tokens (or the dict of TNTForCausalLM.create_masks_for_generate)."
        )


def _check_windows(
    config: TNTConfig, implementation: str, attention_mask: Tensor | None, cache: TNTCache, T: int
) -> None:
    """With padding between valid tokens a cached window holds other keys where it counts columns. The kind of
    attention may have changed since they were cached."""
    by_columns = not counts_valid_tokens(implementation)
    changed = cache.windows_of_columns is not None and by_columns != cache.windows_of_columns
    if changed and cache.holds_padding and config.sliding_window is not None:
        earlier = None if attention_mask is None or attention_mask.ndim != 2 else attention_mask[:, :-T].to(torch.bool)
        if earlier is not None and bool((earlier[:, :-1] & ~earlier[:, 1:]).any()):
            units = ("columns", "valid tokens") if by_columns else ("valid tokens", "columns")
            raise ValueError(
                f"attn_implementation={implementation!r} has windows of {units[0]}, {CACHE_NAME} holds windows of"
                f" {units[1]} with padding between valid tokens: set the kind of attention that filled it."
            )
    cache.windows_of_columns = by_columns


def _memory_mask(attention_mask: Tensor | None, T: int, cache: Cache | None) -> Tensor | None:
    """`[B, T]` bool of this call's valid tokens, `None` if all are. That there is padding is noted in the cache."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    valid = attention_mask[:, -T:].to(torch.bool)
    if torch.compiler.is_compiling():
        return valid
    if bool(attention_mask.all()):
        return None
    if cache is not None:  # its own tokens count: a compiled call leaves no note of its padding
        cache.holds_padding = True
    return None if bool(valid.all()) else valid


def counts_valid_tokens(implementation: str) -> bool:
    """Whether windows of this kind of attention are of valid tokens, as a [`TNTCache`] keeps them: by a mask of this
    file, or because it leaves out what is padding. Others have a mask of the library, whose windows count columns."""
    return implementation in MASKED or _leaves_out_padding(implementation)


def _leaves_out_padding(implementation: str) -> bool:
    """Whether this is flash attention, under any name."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is flash_attention_mask


def sees_whole_cache(implementation: str, cache: Cache | None) -> bool:
    """Whether one token after `cache`, without padding, attends to all keys there are: then it needs no mask."""
    if torch.compiler.is_compiling() or implementation not in MASKED:
        return False
    return isinstance(cache, TNTCache)  # a static one has room for keys that are not there yet


def _full_window(config: TNTConfig, implementation: str, cache: TNTCache, inputs_embeds: Tensor) -> Tensor | None:
    """The mask of one token that sees all keys of its window. The library gives none until the window is full, and
    one of ones from then on, which SDPA rounds differently: a converted model has to do as its source does. A source
    with a wider window, or none, gives none for the first token that fills it, either."""
    sliding = (i for i, kind in enumerate(config.layer_types) if "sliding" in kind)
    layer = next(sliding, None)
    if layer is None or implementation != "sdpa":
        return None
    keys = cache.cached_window(layer) + 1
    if keys < config.sliding_window or (config.window_narrowed and cache.get_seq_length() < config.sliding_window):
        return None
    return inputs_embeds.new_ones((1, 1, 1, config.num_persistent_tokens + keys), dtype=torch.bool)


def _keys(mask: Tensor | None, T: int, cached: int) -> tuple[Tensor, Tensor]:
    """
    Places `[B, cached + T]` among the valid tokens of its row of each key, and whether it is valid. `mask`
    `[B, past + T]`; the cache holds the last `cached` valid tokens.
    """
    if mask is None:  # only in a compiled call: `check_continuation` looks at eager ones
        raise ValueError(f"attention_mask is None, but {CACHE_NAME} holds padding: pass the mask of all tokens.")
    mask = mask.to(torch.bool)
    past, new = mask[:, :-T].sum(1, keepdim=True), mask[:, -T:]
    earlier = past - cached + torch.arange(cached, device=mask.device)
    return torch.cat([earlier, past + new.cumsum(1) - 1], 1), torch.cat([earlier >= 0, new], 1)


def _valid_window_mask(mask: Tensor | None, T: int, cached: int, window: int, segment_ids: Tensor | None) -> Tensor:
    """
    `[B, 1, T, cached + T]` bool: which keys a query sees if `window` counts valid tokens, so that padding between two
    parts of a conversation changes nothing. `mask` and `cached` of `_keys`.
    """
    place, valid = _keys(mask, T, cached)
    distance = place[:, cached:, None] - place[:, None]
    seen = (distance >= 0) & (distance < window) & valid[:, None]
    if segment_ids is not None:
        seen &= segment_ids[:, :, None] == segment_ids[:, None]
    return seen[:, None]


def document_ids(
    position_ids: Tensor | None, mask: Tensor | None, batch: int, length: int, kwargs: dict[str, Any]
) -> Tensor | None:
    """
    `[B, T]` int64 that changes where a packed row starts a new document, or `None` if no row does: from `seq_idx`,
    `cu_seq_lens_q` (one row), or `position_ids` that do not increase from one valid token to the next. After padding
    only position 0 starts one: `generate` counts on from what it wrote at the padding of a right-padded prompt.

    Raises:
        ValueError: `seq_idx` or `cu_seq_lens_q` do not say of every token which document it is of.
    """
    if (seq_idx := kwargs.get("seq_idx")) is not None:
        _check_numbers(seq_idx, batch, length)
        ids = seq_idx.to(torch.long).expand(batch, -1)
        ids = document_starts(ids, mask).cumsum(1)  # numbers that come back are of another document
    elif name := next((x for x in ("cu_seq_lens_q", "cu_seq_lens_k") if kwargs.get(x) is not None), None):
        ends = torch.as_tensor(kwargs[name])
        if batch != 1:
            raise ValueError(f"{name} needs one packed row, input_ids has {batch}.")
        known = ends.tolist()
        if ends.ndim != 1 or not known or known[0] != 0 or known[-1] != length or known != sorted(known):
            raise ValueError(f"{name}={known}: must rise from 0 to the {length} tokens of the row.")
        ids = torch.bucketize(torch.arange(length, device=ends.device), ends[1:].to(torch.long), right=True)[None]
    elif position_ids is None or length == 1:
        return None
    else:
        positions = position_ids.expand(batch, -1)
        starts = document_starts(positions, mask, torch.le)
        if mask is not None:
            starts = starts & (F.pad(mask[:, :-1], (1, 0)) | (positions == 0))
        ids = starts.cumsum(1)
    one = (ids == ids[:, :1]).all()
    if is_exporting():  # a program takes one way for every batch
        torch._assert_async(one, "an exported model reads one document per row, but a row of this batch has several")
        return None
    return None if bool(one) else ids


def _check_numbers(seq_idx: Any, batch: int, length: int) -> None:
    """A number for each token. Fractions would be cut off, and what is too short spread over the row."""
    if not isinstance(seq_idx, Tensor) or seq_idx.dtype not in INTEGERS:
        what = f"a tensor of {seq_idx.dtype}" if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise ValueError(f"seq_idx is {what}: it must be a tensor of integers, the number of each token's document.")
    if seq_idx.ndim != 2 or seq_idx.shape[0] not in (1, batch) or seq_idx.shape[1] != length:
        raise ValueError(f"seq_idx has the shape {list(seq_idx.shape)}: it must be {[batch, length]}.")


def default_positions(
    config: TNTConfig, position_ids: Tensor, attention_mask: Tensor | None, segment_ids: Tensor | None
) -> Tensor:
    """
    Positions `[1 or B, T]` when none are given: those of the base models, except that padding between valid tokens is
    not counted. With persistent keys, which are not rotated, they count from the document's first token.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        valid = attention_mask.to(torch.bool)
        place = valid.long().cumsum(1) - 1
        if not config.num_persistent_tokens:
            place = place + valid.long().argmax(1, keepdim=True)  # padding in front counts, as in the base models
        T = position_ids.shape[1]
        position_ids = torch.where(valid[:, -T:], place[:, -T:], position_ids)
    if segment_ids is not None and config.num_persistent_tokens:
        starts = document_starts(segment_ids, None)
        position_ids = position_ids - torch.where(starts, position_ids, 0).cummax(1).values
    return position_ids
