"""Attention over a window, or within packed documents, whose cost grows with T W and not with T T.

Axis legend
    B batch   T queries   S keys, cached and new; the queries are the last T of them   P persistent keys in front
    H query heads, a multiple of Hkv heads of keys and values   D head width   W tokens of the window, the query's own
    included
    N blocks of C queries each, whose windows lie within W' + C keys, W' = W filled up to a multiple of 8

SDPA treats a window like any other mask: it computes all T S scores and reads a mask of that size. Here every block of
queries is given the keys its windows can reach, which is the same sum over the same terms. On a GPU FlashAttention
knows windows and documents, and takes half-precision tokens as they are. Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision_tnt import autocast_dtype


SMALLEST_BLOCK = 128  # queries; below this the blocks' own overhead counts
# Queries in front of the blocks. From so many on SDPA on a CPU takes queries by 256 and keys by 512, and a matrix
# product promises the same bits for the same shape alone.
SMALLEST_HEAD, QUERY_ROWS, KEY_ROWS = 768, 256, 512
FLASH_WIDTH = 256  # widest head of FlashAttention


class Window(NamedTuple):
    """What stands in a mask's place: queries see what is at most `width - 1` tokens behind them and in their document.

    Padding around a row's tokens is a document of its own."""

    width: int | None  # W, or None: everything before
    documents: Tensor | None  # [B, S] int, equal within a document
    bounds: tuple[Tensor, int, Tensor, int] | None  # for flash, of `_bounds`
    front: int = 0  # most padding in front of a row


def window_of(
    width: int | None,
    embeds: Tensor,
    cached: int,
    documents: Tensor | None,
    persistent: int,
    valid: Tensor | None = None,
) -> Window | None:
    """
    The `Window` of a call, or `None` where a mask serves as well or padding lies between the tokens of a row.

    Args:
        width: of the window in tokens, `None` for full attention.
        embeds: `[B, T, hidden]`, of the device and dtype that attention will have.
        cached: keys of earlier calls. documents: `[B, T]` int, at least 0, equal within a document; without cached
            keys. persistent: learned keys in front of all. valid: `[B, cached + T]` bool, `None` without padding.
    """
    B, T = embeds.shape[:2]
    cuts = width is not None and cached + T > width
    flash = (cuts or documents is not None) and T > 1 and not persistent and _flash_runs(embeds)
    if not flash and (width is None or _blocks(T, cached, width)[0] < 2):
        return None
    front = 0
    if valid is not None:
        if bool((_starts(valid) & valid).sum(1).max() > 1):
            return None
        documents = torch.where(valid, 0 if documents is None else documents, -1)
        front = int(valid.int().argmax(1).max())
        if not flash and _blocks(T, cached, width, front)[0] < 2:
            return None
    return Window(width, documents, _bounds(documents, T) if flash and documents is not None else None, front)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: Window,
    persistent: int = 0,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """
    softmax(q k^T scaling) v over the keys that `window` lets a query see, and the persistent ones.

    Args:
        query: `[B, H, T, D]`. key, value: `[B, Hkv, P + S, D]`, of which the first `persistent` are always seen.

    Returns:
        `[B, T, H, D]`.
    """
    flash = not persistent and not dropout and query.shape[-1] % 8 == 0 and query.shape[-1] <= FLASH_WIDTH
    flash = flash and _flash_runs(query)
    options = {"scale": scaling, "dropout_p": dropout}
    if query.shape[1] != key.shape[1]:
        if flash or query.device.type != "cpu":
            # FlashAttention is told of groups since torch 2.12; with a mask, SDPA on a GPU has no fast kernel for them
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        else:
            options["enable_gqa"] = True
    if flash:
        return _flash(query, key, value, window, scaling)
    # The compiler cannot differentiate the blocks of rows whose length it is not told.
    blocks = _in_blocks_eager if torch.compiler.is_compiling() and torch.is_grad_enabled() else _in_blocks
    return blocks(query, key, value, window, persistent, options)


# -------------------------------------------------------------------------------------------------------------- blocks


def _blocks(T: int, cached: int, width: int, front: int = 0) -> tuple[int, int, int]:
    """N, C and W'. The T - N C queries in front of the blocks have whole `QUERY_ROWS` for those whose windows reach
    before the first key that is not padding: a converted model is its source to the bit as long as its window hides
    nothing."""
    reach = _filled(width, 8)
    C = max(SMALLEST_BLOCK, width // 2)
    return max(0, T - max(SMALLEST_HEAD, _filled(front + reach - cached, QUERY_ROWS))) // C, C, reach


def _filled(n: int, size: int) -> int:
    """The next multiple of `size`."""
    return -(-n // size) * size


def _in_blocks(query, key, value, window, persistent, options):
    B, T, P = len(query), query.shape[2], persistent
    S = key.shape[2] - P
    N, C, reach = (0, T, 0) if window.width is None else _blocks(T, S - T, window.width, window.front)
    head = T - N * C  # as many queries, and keys up to the last of them, in one product
    outputs, ids = [], window.documents
    if head:
        last = S - T + head
        end = min(_filled(last, KEY_ROWS), S)
        seen = F.pad(_seen(head, last, window.width, query.device), (0, end - last))
        if ids is not None:
            seen = seen & (ids[:, S - T : last, None] == ids[:, None, :end])[:, None]
        parts = query[:, :, :head], key[:, :, : P + end], value[:, :, : P + end]
        outputs.append(F.scaled_dot_product_attention(*parts, F.pad(seen, (P, 0), value=True), **options))
    if N:
        first = S - T + head - reach  # the first key that a block's window reaches
        seen = _seen(C, reach + C, window.width, query.device)
        if ids is not None:
            here, there = ids[:, S - T + head :].unflatten(1, (N, C)), ids[:, first:].unfold(1, reach + C, C)
            seen = (seen & (here[..., None] == there[:, :, None])[:, :, None]).flatten(0, 1)

        def blocks(x):  # [B, Hkv, P + S, D] -> [B N, Hkv, P + W' + C, D]; without persistent keys and for B = 1 a view
            near = x[:, :, P + first :].unfold(2, reach + C, C).permute(0, 2, 1, 4, 3)
            if P:
                near = torch.cat([x[:, None, :, :P].expand(-1, N, -1, -1, -1), near], 3)
            return near.flatten(0, 1)

        q = query[:, :, head:].unflatten(2, (N, C)).transpose(1, 2).flatten(0, 1)
        seen = F.pad(seen, (P, 0), value=True)
        o = F.scaled_dot_product_attention(q, blocks(key), blocks(value), seen, **options)
        outputs.append(o.unflatten(0, (B, N)).transpose(1, 2).flatten(2, 3))
    return torch.cat(outputs, 2).transpose(1, 2)


_in_blocks_eager = torch.compiler.disable(_in_blocks)


def _seen(queries: int, keys: int, width: int | None, device: torch.device) -> Tensor:
    """`[1, 1, queries, keys]` bool: which keys the last `queries` of `keys` tokens see."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    return (seen if width is None else seen & (distance < width))[None, None]


# --------------------------------------------------------------------------------------------------------------- flash


def _flash_runs(x: Tensor) -> bool:
    """Whether torch's own FlashAttention takes tokens like x: in half precision, on an NVIDIA GPU since Ampere, unless
    it is switched off (`torch.backends.cuda.enable_flash_sdp`)."""
    device, dtype = x.device, _rounded(x)
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.float16, torch.bfloat16):
        return False
    wanted = torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.is_flash_attention_available()
    return wanted and torch.cuda.get_device_capability(device)[0] >= 8


def _rounded(x: Tensor) -> torch.dtype:
    """The dtype that SDPA computes in: autocast leaves float64 as it is."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype


def _starts(ids: Tensor) -> Tensor:
    """`[B, T]` bool: where another value begins, the first of a row included."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)


def _bounds(documents: Tensor, T: int) -> tuple[Tensor, int, Tensor, int]:
    """The first queries `[documents + 1]` int32 among B T and their end, the most of a document; the same of the keys
    among B S. A document whose tokens are all cached has no queries."""
    B, S = documents.shape
    row, first = _starts(documents).nonzero(as_tuple=True)
    queries, keys = row * T + (first - (S - T)).clamp_min(0), row * S + first
    queries, keys = F.pad(queries, (0, 1), value=B * T).int(), F.pad(keys, (0, 1), value=B * S).int()
    return queries, int(queries.diff().max()), keys, int(keys.diff().max())


def _flash(query, key, value, window, scaling):
    from torch.nn.attention.varlen import varlen_attn

    (B, H, T, D), S = query.shape, key.shape[2]
    if window.bounds is None:
        ends = torch.arange(B + 1, device=query.device, dtype=torch.int32)
        queries, keys, longest, longest_key = ends * T, ends * S, T, S
    else:
        queries, longest, keys, longest_key = window.bounds
    q, k, v = (x.to(_rounded(x)).transpose(1, 2).reshape(-1, H, D) for x in (query, key, value))
    behind = -1 if window.width is None else window.width - 1
    o = varlen_attn(q, k, v, queries, keys, longest, longest_key, scale=scaling, window_size=(behind, 0))
    return o.unflatten(0, (B, T))
