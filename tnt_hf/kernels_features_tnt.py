"""Triton kernels from the projections to what the memories see: causal convolution, SiLU and length 1, in one pass
over the tokens where torch takes a dozen, forward and exact backward.

Axis legend
    B batch   T tokens   H heads   D head width, C = H D channels   TAPS earlier tokens a convolution sees
    BT tokens of a tile

    z_t = sum_{j <= TAPS} weight[:, TAPS - j] x_{t - j} over tokens of t's document     s = SiLU(z) or z
    y = s / |s| or s

Backward computes z again; d z goes through memory once, as d x_t sums those of the tokens behind t, with the same
kernel. `tokens_tnt.memory_tokens` is the same in torch. Travels with every pushed checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .derivative_tnt import once_differentiable, saved
from .kernels_parts_tnt import jit, load, phi, row_norms, slope, store, through_unit, tl, triton, unit


ELEMENTS = 2048  # of a tile


@jit
def same_document(ids, first, t, other, T, IDS: tl.constexpr):
    """Whether tokens t and `other` of a row are there and of one document; ids `[B T]`, the row's first at `first`."""
    live = (t < T) & (other >= 0) & (other < T)
    if IDS:
        live = live & (
            tl.load(ids + first + t, mask=live, other=0) == tl.load(ids + first + other, mask=live, other=1)
        )
    return live


@jit
def convolved(
    x, weight, ids, first, t, T, columns, row_stride, TAPS: tl.constexpr, IDS: tl.constexpr, AHEAD: tl.constexpr
):
    """[BT, D] in float32: the sum over tokens t - j, or t + j if AHEAD; tokens that are not there get 0."""
    z = load(x, first + t, t < T, columns, row_stride).to(tl.float32)
    if TAPS > 0:
        z *= tl.load(weight + columns * (TAPS + 1) + TAPS).to(tl.float32)[None, :]
        for j in tl.static_range(1, TAPS + 1):
            other = t + j if AHEAD else t - j
            live = same_document(ids, first, t, other, T, IDS)
            w = tl.load(weight + columns * (TAPS + 1) + TAPS - j).to(tl.float32)
            z += w[None, :] * load(x, first + other, live, columns, row_stride).to(tl.float32)
    return z


@jit
def features(
    x, weight, ids, y, T, row_stride,
    D: tl.constexpr, TAPS: tl.constexpr, IDS: tl.constexpr, ACT: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """y of one tile of tokens, one row of the batch and one head."""
    t, columns = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * D + tl.arange(0, D)
    first = tl.program_id(2).to(tl.int64) * T
    s = convolved(x, weight, ids, first, t, T, columns, row_stride, TAPS, IDS, AHEAD)
    if ACT:
        s = phi(s, "silu")
    if UNIT:
        s = unit(s, row_norms(s))
    store(y, first + t, t < T, columns, s, row_stride)


@jit
def features_reverse(
    x, weight, ids, d_y, d_z, d_weight, T, row_stride,
    D: tl.constexpr, TAPS: tl.constexpr, IDS: tl.constexpr, ACT: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """d z of the same tile, and its part of d weight, `[B tiles, C, TAPS + 1]` (`None` for a frozen one)."""
    t, columns = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * D + tl.arange(0, D)
    first = tl.program_id(2).to(tl.int64) * T
    z = convolved(x, weight, ids, first, t, T, columns, row_stride, TAPS, IDS, False)
    d = load(d_y, first + t, t < T, columns, row_stride).to(tl.float32)
    if UNIT:
        s = phi(z, "silu") if ACT else z
        norm = row_norms(s)
        d = through_unit(d, unit(s, norm), norm)
    if ACT:
        d *= slope(z, "silu")
    store(d_z, first + t, t < T, columns, d, row_stride)
    if d_weight is not None:
        tile = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        for j in tl.static_range(TAPS + 1):
            past = load(x, first + t - j, same_document(ids, first, t, t - j, T, IDS), columns, row_stride)
            at = d_weight + (tile * row_stride + columns) * (TAPS + 1) + TAPS - j
            tl.store(at, tl.sum(d * past.to(tl.float32), 0))


class TritonFeatures(torch.autograd.Function):
    """x `[B, T, H D]`, weight of the convolution `[H D, 1, TAPS + 1]` or `None`, documents `[B, T]` int that are equal
    within one, or `None` for one per row -> y `[B, T, H, D]` of `dtype`."""

    @staticmethod
    def forward(ctx, x, weight, documents, D, silu, unit, dtype):
        x, weight, documents = (None if y is None else y.contiguous() for y in (x, weight, documents))
        ctx.save_for_backward(x, weight, documents)
        taps = 0 if weight is None else weight.shape[2] - 1
        ctx.constants = {"D": D, "TAPS": taps, "IDS": documents is not None, "BT": max(1, ELEMENTS // D)}
        ctx.kind = {"ACT": silu, "UNIT": unit}
        y = x.new_empty(*x.shape[:2], x.shape[2] // D, D, dtype=dtype)
        _launch(features, x, (x, weight, documents, y), ctx.constants | ctx.kind | {"AHEAD": False})
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        x, weight, documents = saved(ctx)
        d_y, d_z, d_weight = d_y.contiguous(), torch.empty_like(x), None
        if ctx.needs_input_grad[1]:
            d_weight = weight.new_empty(_tiles(x, ctx.constants) * len(x), *weight.shape, dtype=torch.float32)
        _launch(features_reverse, x, (x, weight, documents, d_y, d_z, d_weight), ctx.constants | ctx.kind)
        if weight is None:
            return d_z, *[None] * 6
        if d_weight is not None:
            d_weight = d_weight.sum(0).to(weight.dtype)
        d_x, kind = torch.empty_like(x), {"ACT": False, "UNIT": False, "AHEAD": True}
        _launch(features, x, (d_z, weight, documents, d_x), ctx.constants | kind)
        return d_x, d_weight, *[None] * 5


def _tiles(x: Tensor, constants: dict) -> int:
    return triton.cdiv(x.shape[1], constants["BT"])


def _launch(kernel, x: Tensor, tensors: tuple, constants: dict) -> None:
    B, T, C = x.shape
    with torch.cuda.device_of(x):
        kernel[_tiles(x, constants), C // constants["D"], B](*tensors, T, C, **constants, num_warps=4)
