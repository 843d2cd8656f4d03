"""Triton kernels of the Q-K projection: q_t M_t, M_t = M_0 + sum_{i<=t} u_i^T u_i, forward and exact backward.

Axis legend
    P programs: grid rows x memory heads   N chunks of all programs   C tokens per chunk (at most 64)
    G query heads per memory head   K key width   B batch   T tokens   S tokens between resets   H memory heads

The sums before each chunk are one short sequential pass per program (a product per chunk); what a chunk reads then
depends on nothing else, so all chunks' outputs run at once. Backward takes the same sums again and those of q^T d_out
from the last chunk to the first. Travels with every pushed checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .derivative_tnt import once_differentiable, saved
from .kernels_parts_tnt import (
    NOWHERE,
    PLACES,
    SM_90,
    chunk_place,
    dot,
    jit,
    load,
    nearest,
    operand,
    place,
    row_norms,
    rows_of_tile,
    shared_memory,
    store,
    tables,
    through_unit,
    tl,
    triton,
    unit,
)


COLUMNS = 32  # of M in one program of the sequential pass
ELEMENTS = 2048  # of a tile of rows that are normalised


@jit(do_not_specialize=PLACES)
def running_sums(
    a, b, M, before, after, starts, lengths, B, T, S, H, C, G: tl.constexpr, K: tl.constexpr, BC: tl.constexpr,
    BN: tl.constexpr, REVERSE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """before[chunk] `[K, K]` = M + the sum of a^T b over a program's earlier (REVERSE: later) chunks, after = M + the
    sum over all of them. a, b `[N, C G, K]`; one program per (program, BN columns)."""
    p, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    row, x = tl.arange(0, BC), tl.arange(0, K)
    everywhere = x < K
    total = load(M, p * K + x, everywhere, columns, K)
    length = tl.load(lengths + p)
    if H is not None:
        begin, step, tokens = place(p, B, T, S, H)
    for back in range(length):
        j = length - 1 - back if REVERSE else back
        chunk = tl.load(starts + j) + p
        if H is not None:
            token, inside = begin + nearest(j * C + row, tokens) * step, row < tl.minimum(C, tokens - j * C)
        else:
            token, inside = chunk * C + nearest(row, C), row < C
        store(before, chunk * K + x, everywhere, columns, total, K)
        for g in range(G):
            rows = token * G + g
            total += dot(tl.trans(load(a, rows, inside, x, K)), load(b, rows, inside, columns, K), DT)
    store(after, p * K + x, everywhere, columns, total, K)


@jit(do_not_specialize=PLACES)
def project(
    q, u, M, out, norms, P, B, T, S, H, C, G: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, DT: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """out = (causal part of q u^T) u + q M with the chunk's M, or that of length 1 and its norms `[N, C G]`; one
    program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    row, x = tl.arange(0, BC), tl.arange(0, K)
    causal = row[:, None] >= row[None, :]
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    token, inside = begin + nearest(row, tokens) * step, row < tokens
    U = load(u, token, inside, x, K)
    W = load(M, chunk * K + x, x < K, x, K).to(DT)
    for g in range(G):
        rows = token * G + g
        Q = load(q, rows, inside, x, K)
        pairs = tl.where(causal, dot(Q, tl.trans(U), DT), 0.0)
        value = dot(pairs, U, DT) + dot(Q, W, DT)
        if NORMALIZE:
            norm = row_norms(value)
            tl.store(norms + rows, norm, mask=inside)
            value = unit(value, norm)
        store(out, rows, inside, x, value, K)


@jit
def through_norm(out, norms, d_out, d_raw, R, K: tl.constexpr, BR: tl.constexpr):
    """d (out norm) of BR of R rows, from d out."""
    row, x = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, K)
    y, d = load(out, row, row < R, x, K).to(tl.float32), load(d_out, row, row < R, x, K).to(tl.float32)
    norm = tl.load(norms + row, mask=row < R, other=0.0)
    store(d_raw, row, row < R, x, through_unit(d, y, norm), K)


@jit(do_not_specialize=PLACES)
def project_reverse(
    q, u, M, d_M, d_out, d_q, d_u, P, B, T, S, H, C, G: tl.constexpr, K: tl.constexpr, BC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """The gradients of `project` and of the chunk's own update of M, d_M `[N, K, K]` being that of M behind it."""
    chunk = tl.program_id(0).to(tl.int64)
    row, x = tl.arange(0, BC), tl.arange(0, K)
    causal = row[:, None] >= row[None, :]
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    token, inside = begin + nearest(row, tokens) * step, row < tokens
    U = load(u, token, inside, x, K)
    W = tl.load(M + chunk * K * K + x[None, :] * K + x[:, None]).to(DT)  # transposed
    behind = load(d_M, chunk * K + x, x < K, x, K) + tl.load(d_M + chunk * K * K + x[None, :] * K + x[:, None])
    dU = dot(U, behind, DT)
    for g in range(G):
        rows = token * G + g
        Q, d = load(q, rows, inside, x, K), load(d_out, rows, inside, x, K)
        d_pairs = tl.where(causal, dot(d, tl.trans(U), DT), 0.0).to(DT)
        store(d_q, rows, inside, x, dot(d_pairs, U, DT) + dot(d, W, DT), K)
        pairs = tl.where(causal, dot(Q, tl.trans(U), DT), 0.0).to(DT)
        dU += dot(tl.trans(d_pairs), Q, DT) + dot(tl.trans(pairs), d, DT)
    store(d_u, token, inside, x, dU, K)


class TritonProjection(torch.autograd.Function):
    """`projection_tnt._RunningProjection` on the GPU: q `[N, C G, K]`, unit keys u `[N, C, K]` (float32 or bfloat16),
    or with `dense` `[B, T, heads, K]`, M `[P, K, K]` float32. Returns q_t M_t like q, with `normalize` of length 1,
    and the rows' last M."""

    @staticmethod
    def forward(ctx, grid, dense, q, u, M, normalize):
        q, u, M = q.contiguous(), u.contiguous(), M.contiguous()
        ctx.walk = walk = _Walk(*grid, dense or NOWHERE)
        before, after = walk.sums(u, u, M, 1, False)
        out, norms = torch.empty_like(q), M.new_empty(q.shape[:-1]) if normalize else None
        project[(walk.chunks,)](
            q, u, before, out, norms, *walk.place, walk.C, walk.groups, **walk.sides(q), NORMALIZE=normalize,
            num_warps=4, **_stages(q),
        )  # fmt: skip
        ctx.save_for_backward(q, u, M, *((out, norms) if normalize else ()))
        return out, after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_M):
        (q, u, M, *normed), walk = saved(ctx), ctx.walk
        with torch.cuda.device_of(q):  # autograd's own threads have it, compiled autograd has not
            d_out, d_q, d_u = d_out.to(q.dtype).contiguous(), torch.empty_like(q), torch.empty_like(u)
            if normed:
                K = q.shape[-1]
                d_raw, rows, R = torch.empty_like(q), max(1, ELEMENTS // K), q.numel() // K
                through_norm[(triton.cdiv(R, rows),)](*normed, d_out, d_raw, R, K, rows, num_warps=4)
                d_out = d_raw
            before, _ = walk.sums(u, u, M, 1, False)
            behind, d_M = walk.sums(q, d_out, d_M.contiguous(), walk.groups, True)
            project_reverse[(walk.chunks,)](
                q, u, before, behind, d_out, d_q, d_u, *walk.place, walk.C, walk.groups, **walk.sides(q), num_warps=8,
                **_stages(q),
            )  # fmt: skip
        return None, None, d_q, d_u, d_M, None


def _stages(q: Tensor) -> dict:
    """The compiler's default of 3 takes half as much shared memory again, which GPUs other than sm_90 may not have."""
    return {"num_stages": 1} if q.dtype == torch.bfloat16 and shared_memory(q.device) < SM_90 else {}


class _Walk(NamedTuple):
    """The chunks of all programs, and how the kernels find their tokens."""

    counts: list[int]
    starts: list[int]
    chunks: int  # N, with those that a dense grid does not use
    C: int
    groups: int
    dense: tuple

    @property
    def place(self) -> tuple:
        return self.counts[0], *self.dense

    def sides(self, q: Tensor) -> dict:
        return {"K": q.shape[-1], "BC": rows_of_tile(self.C), "DT": operand(q.dtype)}

    def sums(self, a: Tensor, b: Tensor, M: Tensor, groups: int, reverse: bool) -> tuple[Tensor, Tensor]:
        """The states before (behind, in reverse) each chunk `[N, K, K]` and the last ones `[P, K, K]`."""
        K = a.shape[-1]
        # chunks that no program of a dense grid uses are zero rows, and must not meet what memory held before
        empty = M.new_empty if sum(self.counts) == self.chunks else M.new_zeros
        # as the operand that it is; in reverse it is added to its transpose first
        before = empty(self.chunks, K, K, dtype=M.dtype if reverse else a.dtype)
        after, columns = torch.empty_like(M), min(K, COLUMNS)
        places = tables(tuple(self.counts), tuple(self.starts), M.device)
        running_sums[(len(M), triton.cdiv(K, columns))](
            a, b, M, before, after, *places, *self.dense, self.C, groups, K, rows_of_tile(self.C), columns, reverse,
            operand(a.dtype), num_warps=4,
        )  # fmt: skip
        return before, after
