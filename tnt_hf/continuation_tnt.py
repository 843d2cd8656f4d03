"""What a model may go on from: which caches can hold a memory, which masks agree with what it has read, and which rows
of a batch `generate` has ended. A memory cannot forget, so what it must not read is refused or marked before it reads.

Axis legend
    B batch   T tokens of this call

Travels with every pushed checkpoint.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, QuantizedCache
from transformers.generation import StoppingCriteriaList

from .cache_name_tnt import CACHE_NAME
from .cache_tnt import FINGERPRINT, TNTCache
from .compiler_tnt import is_exporting
from .configuration_tnt import TNTConfig
from .state_tnt import StateLayout


# Why a cache cannot be gone on from, as its attribute `unusable`, beside that it was INTERRUPTED.
UNANSWERED = "holds the tokens of a call that broke off after its last layer, without a result"
BEAMS = "holds the running beams of a beam search, not the sequences that it returned"


def check_cache(cache: Any, config: TNTConfig, layout: StateLayout | None = None) -> None:
    """
    Refuse what cannot hold a memory, before any compute.

    Raises:
        ValueError: the cache is an offloaded or quantized one, a `DynamicCache()` without a config, one of another
            architecture or with other chunk sizes, whose state means something else here, or not a cache at all.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"{CACHE_NAME} must be a transformers Cache such as TNTCache(config), got {type(cache).__name__}."
        )
    fields, layout = vars(config), StateLayout.of(config) if layout is None else layout
    if isinstance(cache, TNTCache) and any(cache.fingerprint[name] != fields[name] for name in FINGERPRINT):
        check_usable(cache)
        cache.adapt(config)
    if not layout.layers:
        return
    hint = "use TNTCache(model.config)"
    if cache.offloading:
        raise ValueError(f"{CACHE_NAME}: offloading=True does not move the memory's state; {hint}.")
    if isinstance(cache, QuantizedCache):
        raise ValueError(f"{CACHE_NAME}: {type(cache).__name__} keeps no memory state; {hint}.")
    if cache.layer_class_to_replicate is not None:
        raise ValueError(
            f"{CACHE_NAME}: {type(cache).__name__}() without config has no place for the memory's state; {hint}."
        )
    if len(cache.layers) != fields["num_hidden_layers"]:
        raise ValueError(
            f"{CACHE_NAME} has {len(cache.layers)} layers, num_hidden_layers={config.num_hidden_layers}; {hint}."
        )
    if not isinstance(cache, TNTCache):
        if (filled_with := getattr(cache, "filled_with", None)) is None:
            filled_with = cache.filled_with = {name: fields[name] for name in FINGERPRINT}
        different = [name for name in FINGERPRINT if filled_with[name] != fields[name]]
        if different == ["local_chunk_sizes"] and int(cache.get_seq_length()) == 0:  # it was reset
            filled_with["local_chunk_sizes"] = fields["local_chunk_sizes"]
        elif different:
            name = different[0]
            raise ValueError(
                f"{name}: the cache was filled with {filled_with[name]!r}, the model has {fields[name]!r}; {hint}."
            )
    for i in layout.layers:
        layer = cache.layers[i]
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            raise ValueError(
                f"{CACHE_NAME}: layer {i} is a {type(layer).__name__}, which keeps no memory state"
                f" (as where prefix tuning filled it); {hint}."
            )
        if layer.number_of_states != layout.slots:
            raise ValueError(
                f"{CACHE_NAME}: layer {i} has {layer.number_of_states} state slots, but"
                f" local_chunk_sizes={config.local_chunk_sizes} needs {layout.slots}; {hint}."
            )


def check_kept(module: nn.Module, cache: Any) -> None:
    """
    Raises:
        ValueError: a caller's cache with gradient checkpointing, under which no layer reads or writes one.
    """
    checkpointed = module.training and getattr(module, "gradient_checkpointing", False)
    # since transformers 5.24, which renamed the argument, nothing is checkpointed without gradients
    if cache is not None and checkpointed and (torch.is_grad_enabled() or CACHE_NAME == "past_key_values"):
        raise ValueError(
            f"{CACHE_NAME} is given with gradient checkpointing in training mode, where layers neither read nor write"
            " it: call activation_checkpointing_disable() or eval(), or pass whole sequences without a cache."
        )


def check_used(use_cache: bool | None) -> None:
    """
    Raises:
        ValueError: `use_cache=False` beside a cache: `generate` would give the memory all tokens again with each.
    """
    if use_cache is False:
        raise ValueError(
            f"use_cache=False: {CACHE_NAME} is given, which reads every token once; leave one of them out."
        )


def check_usable(cache: Cache) -> None:
    """
    Raises:
        ValueError: `cache` holds something else than the tokens it was given: a call that filled it broke off between
            two layers or behind the last, or it went through a beam search. `reset()` makes it usable again. Nothing
            is asked of tensors; compiled code neither notes such things nor asks.
    """
    reason = getattr(cache, "unusable", None)
    if reason is None:
        return
    for layer in cache.layers:
        states = isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values())
        if states or hasattr(layer, "get_seq_length") and int(layer.get_seq_length()):
            raise ValueError(f"{CACHE_NAME} {reason}: go on with another cache.")
    cache.unusable = None


def check_prompt(cache: Cache, given: int, columns: int, whole: bool = True, new: bool = True) -> None:
    """
    What `generate` reads behind cached tokens: `given` columns of `input_ids` or `inputs_embeds`, which the library
    cuts to the new ones by the `columns` of the mask. It drops a mask of ones before anybody else sees it.

    Args:
        whole: whether it takes the whole conversation. new: or, with a mask of all of it, its new tokens.

    Raises:
        ValueError: they are neither.
    """
    past = int(cache.get_seq_length())
    if not past or (whole and columns == given > past) or (new and columns == past + given):
        return
    ways = ["the whole conversation"] * whole + ["only the new tokens with an attention_mask of all tokens"] * new
    raise ValueError(
        f"attention_mask has {columns} columns, the prompt {given}, and {CACHE_NAME} holds {past} tokens already: to"
        f" go on from a cache pass {', or '.join(ways)}."
    )


def note_tokens(cache: Cache, sequences: Tensor) -> None:
    """Note in a [`TNTCache`] what tokens it holds: the first of `sequences` `[B, columns]`, if those are all."""
    if not isinstance(cache, TNTCache):
        return
    past, mask, cache.ended.mask = int(cache.get_seq_length()), cache.ended.mask, None
    whole = 0 < past <= sequences.shape[1]  # not where only the new ones were passed
    cache.tokens_noted = [past, _digests(sequences, mask, past)] if whole else None


def check_tokens(cache: Cache, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """
    Raises:
        ValueError: `input_ids` `[B, T]`, which begin with the cached tokens, begin with others than those noted last.
    """
    tokens, noted = getattr(cache, "tokens_noted", None) or (0, [])
    if tokens != int(cache.get_seq_length()) or len(noted) != len(input_ids):
        return  # nobody knows: other calls have read tokens since, or rows were moved
    found = _digests(input_ids, attention_mask, tokens)
    if different := [row for row, digests in enumerate(zip(found, noted)) if len({*digests}) > 1]:
        raise ValueError(
            f"input_ids: row {different[0]} does not begin with the {tokens} tokens that {CACHE_NAME} holds. Append"
            " new tokens to those that `generate` returned (a conversation that is templated or tokenized again may"
            " begin otherwise), or start with another cache."
        )


def _digests(ids: Tensor, mask: Tensor | None, tokens: int) -> list[str]:
    """A digest of the first `tokens` of every row of `ids` `[B, T]`; it does not matter what stands for padding."""
    ids = ids[:, :tokens]
    ids = ids if mask is None or mask.ndim != 2 else ids.masked_fill(mask[:, :tokens].to(ids.device) == 0, -1)
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in ids.to("cpu", torch.int64).contiguous().numpy()]


def check_continuation(cache: Cache, attention_mask: Any, past: int | Tensor, length: int) -> None:
    """
    A cached conversation goes on only if every token in it is known to be valid or padding.

    Raises:
        ValueError: `attention_mask` has not one column per cached and new token, calls tokens padding that the memory
            has read or the other way round, or is missing although the cache holds padding.
    """
    if torch.compiler.is_compiling():
        return
    check_usable(cache)
    if not (past := int(past)):
        cache.holds_padding, cache.agreed = False, 0
    elif isinstance(attention_mask, Tensor):
        if attention_mask.ndim != 2:
            return
        if attention_mask.shape[1] != past + length:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, but {CACHE_NAME} holds {past} tokens and"
                f" {length} are new: it must cover all {past + length}."
            )
        # looking at a mask takes as long as it is wide: of one that a decoding loop adds columns to, the first counts
        if length > 1 or getattr(cache, "agreed", 0) != past:
            check_mask(cache, attention_mask, past)
        cache.agreed = past + 1 if length == 1 else 0
    elif attention_mask is None and getattr(cache, "holds_padding", False):
        if (read := tokens_read(cache)) is not None and bool((read == past).all()):  # rows with padding were left out
            cache.holds_padding = False
            return
        raise ValueError(
            f"attention_mask is None or all ones, but some of the {past} tokens in {CACHE_NAME} are padding"
            f" (`generate` feeds rows that have ended padding): pass the mask of all {past + length} tokens."
        )


def check_positions(
    cache: Cache,
    past: int | Tensor,
    length: int,
    position_ids: Tensor | None,
    default: Callable[[], Tensor],
    attention_mask: Tensor | None,
) -> None:
    """
    Tokens that follow are placed as those in the cache were, as far as that is known: compiled calls note nothing.

    Args:
        length: T.
        default: gives the positions of a call without `position_ids`, which count padding.
        attention_mask: `[B, past + T]`, zero at padding, or of more dimensions, which says nothing here.

    Raises:
        ValueError: no `position_ids` behind tokens that were given others than `default()`, as `generate` gives rows
            that are padded in front; or the other way round, others than `default()` behind padding that was counted.
            Every key would be taken for one further away or nearer.
    """
    if torch.compiler.is_compiling() or any(x is not None and x.is_meta for x in (position_ids, attention_mask)):
        return
    past = int(past)
    own, counts = (bool(past) and getattr(cache, name, False) for name in ("own_positions", "counts_padding"))
    if own and position_ids is None:
        raise ValueError(
            f"position_ids is None, but the {past} tokens in {CACHE_NAME} were given positions of their own, as"
            " `generate` does with rows that are padded in front: pass those of the new tokens (with `generate`'s,"
            " (attention_mask.cumsum(1) - 1)[:, -T:])."
        )
    if past and length == 1 and getattr(cache, "placed", None) == past:
        cache.placed = past + 1  # of a decoding loop the first token counts, as for the mask
        return
    mask = attention_mask.to(torch.bool) if attention_mask is not None and attention_mask.ndim == 2 else None
    behind = None if mask is None else mask[:, past:] & ~mask[:, :1]  # tokens of rows that are padded in front
    other = None
    if position_ids is not None:
        others = default()
        other = position_ids.to(others.device) != others
        if counts and mask is not None and bool((other & behind & mask[:, :past].any(1, keepdim=True)).any()):
            raise ValueError(
                f"position_ids do not count padding, but those of the {past} tokens in {CACHE_NAME} do, as in any"
                " call without position_ids: leave them out, or fill the cache with"
                " position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0), as `generate` does."
            )
        own = own or bool((other if mask is None else other & mask[:, past:]).any())
    if mask is not None:
        counts = counts or bool((behind if other is None else behind & ~other).any())
    begun = mask is None or bool(mask.any(1).all())  # every row: the next token is placed as this one
    cache.placed = past + 1 if length == 1 and begun else None
    cache.own_positions, cache.counts_padding = own, counts


def check_program(cache: Cache, position_ids: Tensor | None) -> None:
    """
    Raises:
        ValueError: `torch.export` makes a program that goes on from a [`TNTCache`], and gets no `position_ids`.
    """
    if position_ids is not None or not is_exporting() or not isinstance(cache, TNTCache):
        return
    if any(layer.is_initialized for layer in cache.layers) or tokens_read(cache) is not None:
        raise ValueError(f"position_ids=None: a program that goes on from {CACHE_NAME} cannot count its tokens.")


def check_batch(
    cache: Cache | None, attention_mask: Any, past: int | Tensor, batch: int, length: int, position_ids: Any = None
) -> None:
    """
    Raises:
        ValueError: `attention_mask` is not `[B, past + T]`, or one to be added to scores; `position_ids` is not
            `[1 or B, T]`, or the cache holds another number of rows.
    """
    if torch.compiler.is_compiling():
        return
    read, shape = None if cache is None else tokens_read(cache), (batch, int(past) + length)
    if read is not None and len(read) != batch:
        raise ValueError(f"{CACHE_NAME} holds {len(read)} rows, and {batch} are given: each row continues its own.")
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask has the shape {list(attention_mask.shape)}: it must be {list(shape)}, a column for each"
            f" of {int(past)} cached and {length} new tokens."
        )
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and attention_mask.is_floating_point():
        if bool((other := ~(attention_mask >= 0)).any()):
            raise ValueError(
                f"attention_mask holds {float(attention_mask[other][0])}: it must be 1 at tokens and 0 at padding, as"
                " every mask of two dimensions; none is added to scores."
            )
    if position_ids is not None and tuple(position_ids.shape) not in ((1, length), (batch, length)):
        raise ValueError(f"position_ids has the shape {list(position_ids.shape)}: it must be {[batch, length]}.")


def check_left_to_right(kwargs: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: `is_causal=False`, of the call or the configuration. The library would make masks that show the
            future, but only where it makes them, and a memory never reads ahead.
    """
    if kwargs.get("is_causal") not in (None, True):
        raise ValueError(
            f"is_causal={kwargs['is_causal']!r}: a TNT model reads from left to right, and must be causal."
        )


def check_whole_rows(config: TNTConfig | None = None) -> None:
    """
    config: of a TNT model, which may have no memory and no window.

    Raises:
        ValueError: accelerate gives each process a part of every row. Attention is told of that by who shards it; a
            memory, and a window, would begin anew in each part, and nothing but wrong gradients would show it.
    """
    if torch.compiler.is_compiling() or (state := sys.modules.get("accelerate.state")) is None:
        return
    parallel = state.AcceleratorState._shared_state.get("parallelism_config")
    for name in ("sp_size", "cp_size"):
        if (size := getattr(parallel, name, None) or 1) == 1:
            continue
        if config is None or {*config.layer_types} != {"full_attention"}:
            raise ValueError(
                f"{name}={size}: gives every process a part of a sequence, and a memory or a window would begin anew"
                " in each; shard rows and weights instead (data parallelism, FSDP)."
            )


def check_mask(cache: Cache, attention_mask: Tensor, past: int) -> None:
    """
    Raises:
        ValueError: `attention_mask` `[B, past + T]` says that the memory has read another number of valid tokens.
    """
    said, read = attention_mask[:, :past].to(torch.bool).sum(1), tokens_read(cache)
    if read is not None and len(read) == len(said) and said.tolist() != read.tolist():
        raise ValueError(
            f"attention_mask calls {said.tolist()} of the {past} cached tokens of each row valid, but the memory has"
            f" read {read.tolist()}, and cannot forget: pass the mask they were read with, or go on without the cache."
        )


def tokens_read(cache: Cache) -> Tensor | None:
    """Valid tokens `[B]` that the memory in `cache` has read, its memory time; `None` if there is no memory."""
    # of an injected model's cache some layers may hold the state of its own linear attention
    for i in getattr(cache, "memory_layers", range(len(cache.layers))):
        layer = cache.layers[i]
        if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.has_previous_state[0]:
            return layer.recurrent_states[layer.number_of_states - 1]
    return None


@dataclass
class EndedRows:
    """Which rows `[B]` bool of a batch have ended in one call of `generate`, while others have not: it feeds them
    padding and calls it valid, and what is known here keeps that out of the memory. Its mask tells them apart."""

    rows: Tensor | None = None
    mask: Tensor | None = None  # of all tokens so far, `None` if all are valid


class NotingCriteria(StoppingCriteriaList):
    """Stopping criteria that note in `ended` which rows they end."""

    def __init__(self, criteria: StoppingCriteriaList, ended: EndedRows):
        super().__init__(criteria)
        self.ended = ended

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        ended = rows = super().__call__(input_ids, scores, **kwargs)
        if self.ended.rows is not None:
            rows = rows | self.ended.rows
        self.ended.rows = rows if 0 < int(rows.sum()) < len(rows) else None
        return ended
