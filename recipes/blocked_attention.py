"""Causal attention in blocks of queries, for small models that train on a CPU.

The library's fused kernel costs about four times as much there: it treats a window like any other mask, and its
backward pass is slow for narrow heads. Both numbers are equal up to the order of sums. Only for whole rows without
padding, packing or a cache, as in training and evaluation on windows of equal length; anything else is refused.

Axis legend: B batch   T tokens   H query heads   K key/value heads   D head width   W tokens of the window
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


NAME = "blocked_causal"
BLOCK = 64  # queries; the fastest of 32, 64 and 128 here


@lru_cache
@torch.inference_mode(False)  # what evaluation left in the cache must serve training
def _bias(queries: int, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """`[queries, keys]`: 0 where the last `queries` of `keys` tokens may look, minus infinity elsewhere."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(~seen, -torch.inf)


def blocked_causal_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    An attention function of the library's interface.

    Args:
        query: `[B, H, T, D]`. key, value: `[B, K, T, D]`, H a multiple of K.
        sliding_window: tokens a query sees, its own included; `None` is all before it.

    Returns:
        `[B, T, H, D]`, and `None` for the weights.

    Raises:
        ValueError: a mask, dropout, or keys of earlier calls.
    """
    B, H, T, D = query.shape
    for name, value_, allowed in (("attention_mask", attention_mask, None), ("dropout", dropout, 0.0)):
        if value_ is not allowed and value_ != allowed:
            raise ValueError(f"{name}={value_!r}: attn_implementation={NAME!r} is for whole rows only.")
    if key.shape[2] != T:
        raise ValueError(
            f"past_key_values holds {key.shape[2] - T} tokens: attn_implementation={NAME!r} has no cache."
        )
    q = (query * (D**-0.5 if scaling is None else scaling)).flatten(0, 1)
    k, v = (x.repeat_interleave(H // x.shape[1], 1).flatten(0, 1) for x in (key, value))
    k, parts = k.transpose(1, 2), []
    for start in range(0, T, BLOCK):
        stop, first = min(start + BLOCK, T), 0 if sliding_window is None else max(0, start - sliding_window + 1)
        bias = _bias(stop - start, stop - first, sliding_window, q.dtype)
        scores = torch.baddbmm(bias, q[:, start:stop], k[:, :, first:stop])
        parts.append(torch.softmax(scores, -1).to(v.dtype) @ v[:, first:stop])
    return torch.cat(parts, 1).unflatten(0, (B, H)).transpose(1, 2), None


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask of [`blocked_causal_attention`], which needs none. Raises `ValueError` for padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(f"attention_mask holds padding: attn_implementation={NAME!r} is for whole rows only.")


def register() -> str:
    """Makes `attn_implementation=NAME` known to the library; returns the name."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, blocked_causal_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME
