"""Triton kernels from the projections to what the memories see: causal convolution, SiLU and length 1, in one pass
over the tokens where torch takes a dozen, forward and exact backward.

Axis legend
    B batch   T tokens   H heads   D head width, C = H D channels   TAPS earlier tokens a convolution sees
    BT tokens of a tile

    z_t = sum_{j <= TAPS} weight[:, TAPS - j] x_{t - j} over tokens of t's document     s = SiLU(z) or z
    y = s / |s| or s

A token's gradient needs those of the TAPS tokens behind it, which its program computes again: what is read twice is in
the cache, what would be written is not. `TNTMemory.tokens` is the same in torch. Travels with every pushed checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels_parts_tnt import jit, load, phi, slope, store, tl, triton


ELEMENTS = 2048  # of a tile


@jit
def same_document(ids, first, t, other, T, IDS: tl.constexpr):
    """Whether tokens t and `other` of a row are there and of one document; ids `[B T]`, the row's first at `first`."""
    live = (t >= 0) & (t < T) & (other >= 0) & (other < T)
    if IDS:
        live = live & (
            tl.load(ids + first + t, mask=live, other=0) == tl.load(ids + first + other, mask=live, other=1)
        )
    return live


@jit
def convolved(x, weight, ids, first, t, T, columns, C, TAPS: tl.constexpr, IDS: tl.constexpr):
    """z of tokens t, [BT, D] in float32, 0 for tokens that are not there."""
    z = load(x, first + t, (t >= 0) & (t < T), columns, C).to(tl.float32)
    if TAPS > 0:
        z *= tl.load(weight + columns * (TAPS + 1) + TAPS).to(tl.float32)[None, :]
        for j in tl.static_range(1, TAPS + 1):
            live = same_document(ids, first, t, t - j, T, IDS)
            w = tl.load(weight + columns * (TAPS + 1) + TAPS - j).to(tl.float32)
            z += w[None, :] * load(x, first + t - j, live, columns, C).to(tl.float32)
    return z


@jit
def features(
    x, weight, ids, y, T, C,
    D: tl.constexpr, TAPS: tl.constexpr, IDS: tl.constexpr, ACT: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """y of one tile of tokens, one row of the batch and one head."""
    t, columns = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * D + tl.arange(0, D)
    first = tl.program_id(2).to(tl.int64) * T
    s = convolved(x, weight, ids, first, t, T, columns, C, TAPS, IDS)
    if ACT:
        s = phi(s, "silu")
    if UNIT:
        s = s / tl.maximum(tl.sqrt(tl.sum(s * s, 1)), 1e-12)[:, None]
    store(y, first + t, t < T, columns, s, C)


@jit
def features_reverse(
    x, weight, ids, d_y, d_x, d_weight, T, C,
    D: tl.constexpr, TAPS: tl.constexpr, IDS: tl.constexpr, ACT: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """d x of the same tile, and its part of d weight, `[B tiles, C, TAPS + 1]`."""
    t, columns = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * D + tl.arange(0, D)
    first = tl.program_id(2).to(tl.int64) * T
    tile = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    total = tl.zeros((BT, D), tl.float32)
    for j in tl.static_range(TAPS + 1):  # of the token j behind
        z = convolved(x, weight, ids, first, t + j, T, columns, C, TAPS, IDS)
        d = load(d_y, first + t + j, t + j < T, columns, C).to(tl.float32)
        if UNIT:
            s = phi(z, "silu") if ACT else z
            norm = tl.sqrt(tl.sum(s * s, 1))
            inverse = 1 / tl.maximum(norm, 1e-12)
            u = s * inverse[:, None]
            along = tl.where(norm > 1e-12, tl.sum(d * u, 1), 0.0)
            d = (d - u * along[:, None]) * inverse[:, None]
        if ACT:
            d *= slope(z, "silu")
        if TAPS == 0:
            total = d
        else:
            if j == 0:
                for i in tl.static_range(TAPS + 1):
                    past = load(x, first + t - i, same_document(ids, first, t, t - i, T, IDS), columns, C)
                    at = d_weight + (tile * C + columns) * (TAPS + 1) + TAPS - i
                    tl.store(at, tl.sum(d * past.to(tl.float32), 0))
            w = tl.load(weight + columns * (TAPS + 1) + TAPS - j).to(tl.float32)
            total += tl.where(same_document(ids, first, t + j, t, T, IDS)[:, None], w[None, :] * d, 0.0)
    store(d_x, first + t, t < T, columns, total, C)


class TritonFeatures(torch.autograd.Function):
    """x `[B, T, H D]`, weight of the convolution `[H D, 1, TAPS + 1]` or `None`, documents `[B, T]` int that are equal
    within one, or `None` for one per row -> y `[B, T, H, D]` of `dtype`."""

    @staticmethod
    def forward(ctx, x, weight, documents, D, silu, unit, dtype):
        x, weight, documents = (None if y is None else y.contiguous() for y in (x, weight, documents))
        ctx.save_for_backward(x, weight, documents)
        ctx.constants = _constants(weight, documents, D, silu, unit)
        B, T, C = x.shape
        y = x.new_empty(B, T, C // D, D, dtype=dtype)
        with torch.cuda.device_of(x):
            features[_grid(x, D, ctx.constants)](x, weight, documents, y, T, C, **ctx.constants, num_warps=4)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        x, weight, documents = ctx.saved_tensors
        (B, T, C), d_x, d_weight = x.shape, torch.empty_like(x), None
        grid = _grid(x, d_y.shape[3], ctx.constants)
        if weight is not None:
            d_weight = weight.new_empty(grid[0] * B, *weight.shape, dtype=torch.float32)
        with torch.cuda.device_of(x):
            features_reverse[grid](
                x, weight, documents, d_y.contiguous(), d_x, d_weight, T, C, **ctx.constants, num_warps=4
            )
        return d_x, None if weight is None else d_weight.sum(0).to(weight.dtype), *[None] * 5


def _constants(weight: Tensor | None, documents: Tensor | None, D: int, silu: bool, unit: bool) -> dict:
    taps = 0 if weight is None else weight.shape[2] - 1
    kind = {"TAPS": taps, "IDS": documents is not None, "ACT": silu, "UNIT": unit}
    return {"D": D, **kind, "BT": max(1, ELEMENTS // D)}


def _grid(x: Tensor, D: int, constants: dict) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], constants["BT"]), x.shape[2] // D, x.shape[0]
