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

from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.derivative_tnt import once_differentiable


NAME = "blocked_causal"
# Queries of a block, and elements of a step's scores over some heads: the fastest here. Wide scores stay in the cache.
WIDE = 64, 1 << 17
HALF = 128, 1 << 20  # these products take so long to begin that fewer and larger ones are faster


@lru_cache
@torch.inference_mode(False)  # what evaluation left in the cache must serve training
def _bias(queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[queries, keys]`: 0 where the last `queries` of `keys` tokens may look, minus infinity elsewhere."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = (distance >= 0) & (distance < (window or keys))
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)


class _Blocks(torch.autograd.Function):
    """softmax(q k^T + bias) v block by block, q, k, v `[B H, T, D]`. By hand because autograd's gradient of a slice is
    as long as the row, of every block. Memory is linear in T: a window's probabilities are kept for the backward, full
    attention's are computed again."""

    @staticmethod
    def forward(ctx, q, k, v, window):
        out, steps, kept = torch.empty_like(v), list(_Blocks.steps(q, window)), []
        if window is not None and any(ctx.needs_input_grad):
            kept = [q.new_empty(*q[here].shape[:2], k[there].shape[1]) for here, there in steps]
        with torch.inference_mode(), torch.autocast(q.device.type, enabled=False):
            for (here, there), p in zip(steps, kept or [None] * len(steps)):
                p = _Blocks.probabilities(q, k, here, there, window, p)
                out[here] = torch.bmm(p, v[there])
        ctx.save_for_backward(q, k, v, *kept)
        ctx.window = window
        return out

    @staticmethod
    def steps(q, window):
        """Of every step: which heads and queries, and which heads and keys. A window's keys begin at a multiple of
        the block if its width is one, a token before the first one seen: products of odd sides take longer."""
        (N, T), (block, elements) = q.shape[:2], HALF if q.dtype.itemsize < 4 else WIDE
        heads = max(1, elements // (block * (T if window is None else min(T, window + block))))
        for head in range(0, N, heads):
            these = slice(head, min(head + heads, N))
            for start in range(0, T, block):
                stop, first = min(start + block, T), 0 if window is None else max(0, start - window)
                yield (these, slice(start, stop)), (these, slice(first, stop))

    @staticmethod
    def probabilities(q, k, here, there, window, out=None):
        (_, rows), (_, keys) = here, there
        queries, count = rows.stop - rows.start, keys.stop - keys.start
        scores = torch.bmm(q[here], k[there].mT)
        bias = _bias(queries, count, window, scores.dtype, q.device)
        scores[..., -queries:] += bias[:, -queries:]  # what lies ahead
        if window is not None and rows.stop - window > keys.start:  # what the last queries no longer see
            scores[..., : rows.stop - window - keys.start] += bias[:, : rows.stop - window - keys.start]
        return torch.softmax(scores, -1, out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, *kept = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.inference_mode(), torch.autocast(q.device.type, enabled=False):
            for i, (here, there) in enumerate(_Blocks.steps(q, ctx.window)):
                p = kept[i] if kept else _Blocks.probabilities(q, k, here, there, ctx.window)
                d = d_out[here]
                d_v[there].baddbmm_(p.mT, d)
                d_scores = torch.bmm(d, v[there].mT)  # of p as yet
                torch._softmax_backward_data(d_scores, p, -1, p.dtype, grad_input=d_scores)
                d_q[here] = torch.bmm(d_scores, k[there])
                d_k[there].baddbmm_(d_scores.mT, q[here])
        return d_q, d_k, d_v, None


@torch.compiler.disable  # of many blocks, which it would spell out
def _run(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    return _Blocks.apply(q, k, v, window)


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
    device, (B, H, T, D) = query.device.type, query.shape
    if torch.is_autocast_enabled(device):  # which knows the library's kernel, and rounds its inputs
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    for name, value_, allowed in (("attention_mask", attention_mask, None), ("dropout", dropout, 0.0)):
        if value_ is not allowed and value_ != allowed:
            raise ValueError(f"{name}={value_!r}: attn_implementation={NAME!r} is for whole rows only.")
    if key.shape[2] != T:
        raise ValueError(f"{CACHE_NAME} holds {key.shape[2] - T} tokens: attn_implementation={NAME!r} has no cache.")
    q = (query * (D**-0.5 if scaling is None else scaling)).flatten(0, 1)
    groups = H // key.shape[1]
    k, v = ((x if groups == 1 else x.repeat_interleave(groups, 1)).flatten(0, 1) for x in (key, value))
    return _run(q, k, v, sliding_window).unflatten(0, (B, H)).transpose(1, 2), None


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask of [`blocked_causal_attention`], which needs none. Raises `ValueError` for padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(f"attention_mask holds padding: attn_implementation={NAME!r} is for whole rows only.")


def register() -> str:
    """Makes `attn_implementation=NAME` known to the library; returns the name."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, blocked_causal_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME
