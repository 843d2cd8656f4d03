"""A memory that reads at its chunk's start (the global memory of TNT) on the GPU: the scan over its chunks, forward
and exact backward.

Axis legend
    P programs: grid rows x memory heads   N chunks of all programs   C tokens per chunk (2048)   G query heads per
    memory head   L layers (1 or 2)   K key, V value width

All tokens of a chunk read f(W_xi, q) and contribute to one update

    W_C = A W_0 + (1 - A) W_target + D S_0 - sum_i c_i g_i        S_C = m S_0 - sum_i s_i g_i

so only the updates are sequential. A chunk is far more than a tile: programs take a split of it each and leave their
shares of the two sums, which are then added in a fixed order (no atomics: the same numbers every time). The weights
before every chunk are kept, T / C copies, and the reads of all chunks run at once. Backward mirrors this: all reads at
once, then the updates from the last chunk to the first, from the kept weights. Travels with every pushed checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels_chunk_tnt import read, read_reverse, write_reverse, write_sums
from .kernels_parts_tnt import operand, rows_of_tile, unavailable


PROGRAMS = 264  # to be had by splitting chunks, where there are fewer: two for every processor of an H200
# Operands of one head's weights: what shared memory holds, with their gradients and a momentum's in the backward.
MOST_BYTES = 32 << 10
# Rows of a tile, at most: more do not fit in registers; the second where weights take over MOST_BYTES / 2.
READ_ROWS, READ_REVERSE_ROWS, WRITE_ROWS = (64, 64), (64, 32), (64, 32)
WRITE_REVERSE_ROWS, WRITE_REVERSE_ROWS_MOMENTUM = (32, 16), (16, 16)


def unsupported(q: Tensor, v: Tensor, weights: list[Tensor]) -> str | None:
    """Why these kernels cannot run a memory with operands like q `[..., K]`, v `[..., V]` and `weights`, or `None`."""
    if len(weights) > 2:
        return f"the kernels know memories of 1 or 2 layers, got {len(weights)}"
    widths = {"the key width": q.shape[-1], "the value width": v.shape[-1], "the hidden width": weights[0].shape[-1]}
    size = _operand_bytes(q, weights)
    if size > MOST_BYTES:
        return f"one head's weights may take {MOST_BYTES} bytes in {q.dtype}, got {size}"
    return unavailable(q.device, q.dtype, widths)


def _operand_bytes(q: Tensor, weights: list[Tensor]) -> int:
    return sum(w.shape[-2] * w.shape[-1] for w in weights) * q.element_size()


class TritonGlobal(torch.autograd.Function):
    """`reverse_tnt.ChunkScan` for reads at the chunk's start: the same arguments, results and gradients. q, k, v in
    float32 or bfloat16 are the operands, all else is float32."""

    @staticmethod
    def forward(ctx, plan, depth, q, k, v, theta, c, A, D, s_end, m_end, gain, bias, *states):
        (W0, xi, S0, target), norm = _layers(states, depth), None if gain is None else (gain, bias)
        kernels, train = _Chunks(plan, q, k, v, W0, norm), any(ctx.needs_input_grad)
        weight = (theta if c is None else c[:, -1]).contiguous()
        s_end = None if s_end is None else s_end.contiguous()
        W, S = [w.clone() for w in W0], None
        if s_end is not None:
            S = [torch.zeros_like(w) for w in W] if S0 is None else [s.clone() for s in S0]
        starts, momenta = kernels.blank(W), kernels.blank(W) if train and S is not None else []
        xi_end = [torch.empty_like(w) for w in W]
        loss = torch.zeros_like(weight) if plan.keep_loss else None
        for j, (n, first) in enumerate(zip(plan.counts, plan.starts)):
            rest, here = _after(plan, j), slice(first, first + n)
            for i, w in enumerate(xi if plan.carried and j == 0 else W):
                starts[i][here] = w[:n]
                xi_end[i][rest:n] = w[rest:n]
            for x, s in zip(momenta, S or ()):
                x[here] = s[:n]
            n = n if plan.keep_state or plan.keep_loss else rest
            if n == 0:
                break
            here = slice(first, first + n)
            sums, sums_S = kernels.sums(here, starts, weight, s_end, loss)
            for i in range(depth):
                w, s = W[i][:n], None if S is None else S[i][:n]
                if A is not None:
                    keep = A[here, -1, None, None]
                    w.mul_(keep) if target is None else torch.lerp(target[i][:n], w, keep, out=w)
                if s is not None:
                    w.addcmul_(D[here, -1, None, None], s)
                    s.mul_(m_end[here, None, None]).sub_(sums_S[i].sum(1))
                w.sub_(sums[i].sum(1))
        if train:
            ctx.save_for_backward(q, k, v, theta, c, A, D, s_end, m_end, gain, bias, *states, *starts, *momenta)
        ctx.plan, ctx.depth = plan, depth
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        final = [None] * (3 * depth)
        if plan.keep_state:
            final = [*W, *_full(plan, W, xi_end), *(S or [None] * depth)]
        return kernels.read(starts), loss, *final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, _, *d_final):
        plan, L = ctx.plan, ctx.depth
        q, k, v, *coef = ctx.saved_tensors[:9]
        (gain, bias), rest = ctx.saved_tensors[9:11], ctx.saved_tensors[11:]
        (W0, _, S0, target), starts, momenta = _layers(rest, L), rest[4 * L : 5 * L], rest[5 * L :]
        theta, c, A, D, s_end, m_end = coef
        d_theta, d_c, d_A, d_D, d_s, d_m = (None if x is None else torch.zeros_like(x) for x in coef)
        norm = None if gain is None else (gain, bias)
        kernels = _Chunks(plan, q, k, v, W0, norm)
        d_k, d_v = torch.zeros_like(kernels.k), torch.zeros_like(kernels.v)
        weight = (theta if c is None else c[:, -1]).contiguous()
        d_weight = torch.zeros_like(weight)
        d_target = None if target is None else [torch.zeros_like(x) for x in target]
        d_norm = None if norm is None else [torch.zeros_like(x) for x in norm]
        d_q, read_shares, norm_shares = kernels.read_reverse(starts, d_o.to(q.dtype).contiguous())

        # the gradients of all programs' states behind the chunk that comes next; at first, of the final ones
        def zeros(wanted=True):
            return [torch.zeros_like(w) for w in W0] if wanted else None

        d_W, d_S, d_xi, d_end = zeros(), zeros(s_end is not None), zeros(plan.carried), zeros()
        if plan.keep_state:
            last = d_final[L : 2 * L]
            d_W = [x + y for x, y in zip(d_final, _full(plan, last, d_end))]
            d_end = _full(plan, d_end, last)
            d_S = d_S and [x.clone() for x in d_final[2 * L :]]
        for j, n, first in reversed(list(zip(range(len(plan.counts)), plan.counts, plan.starts))):
            rest, carried = _after(plan, j), plan.carried and j == 0
            written = n if plan.keep_state else rest
            here, to = slice(first, first + written), d_xi if carried else d_W
            shares, shares_norm = kernels.sums_reverse(here, starts, weight, s_end, d_W, d_S, d_k, d_v, d_weight, d_s)
            for i in range(L):
                dw = d_W[i][:written]
                if s_end is not None:
                    ds, S = d_S[i][:written], momenta[i][here]
                    d_D[here, -1] += (dw * S).sum((1, 2))
                    d_m[here] += (ds * S).sum((1, 2))
                    ds.mul_(m_end[here, None, None]).addcmul_(D[here, -1, None, None], dw)
                if A is not None:
                    keep, moved = A[here, -1, None, None], (W0[i][:written] if carried else starts[i][here])
                    if target is not None:
                        moved = moved - target[i][:written]
                        d_target[i][:written].addcmul_(1 - keep, dw)
                    d_A[here, -1] += (dw * moved).sum((1, 2))
                    dw.mul_(keep)
                to[i][:n] += read_shares[i][first : first + n].sum(1)
                to[i][rest:n] += d_end[i][rest:n]
                to[i][:written] += shares[i].sum(1)
            for d, reads, writes in zip(d_norm or (), norm_shares, shares_norm):
                d[:n, 0] += reads[first : first + n].sum(1)
                d[:written, 0] += writes.sum(1)
        (d_theta if c is None else d_c[:, -1]).copy_(d_weight)
        none = [None] * L
        d_coef, d_S = (d_theta, d_c, d_A, d_D, d_s, d_m), none if S0 is None else d_S
        return (
            None,
            None,
            d_q,
            d_k,
            d_v,
            *d_coef,
            *(d_norm or (None, None)),
            *d_W,
            *(d_xi or none),
            *d_S,
            *(d_target or none),
        )


def _layers(states, depth: int) -> list[list[Tensor] | None]:
    """A flat tuple of W, W_xi, S and target as lists, `None` for one that is absent."""
    kinds = (states[i * depth : (i + 1) * depth] for i in range(4))
    return [None if x[0] is None else list(x) for x in kinds]


def _after(plan, j: int) -> int:
    """Programs that have another chunk after chunk j."""
    return plan.counts[j + 1] if j + 1 < len(plan.counts) else 0


def _full(plan, yes, no) -> list[Tensor]:
    """`yes` in programs whose last chunk is complete, `no` in the others."""
    if isinstance(plan.full, Tensor):
        return [torch.where(plan.full[:, None, None], x, y) for x, y in zip(yes, no)]
    return [x.clone() for x in (yes if plan.full else no)]


class Shape(NamedTuple):
    """How a chunk is spread over programs."""

    splits: int
    tiles: int  # of each split
    rows: int  # of a tile


def spread(rows: int, chunks: int, most: int) -> Shape:
    """Splits such that `chunks` chunks of `rows` rows, in tiles of `most` at most, make about `PROGRAMS` programs."""
    BR = rows_of_tile(rows, most)
    tiles = -(-rows // BR)
    each = -(-tiles // max(1, min(tiles, PROGRAMS // chunks)))
    return Shape(-(-tiles // each), each, BR)


class _Chunks:
    """The four kernels with all that is the same for every chunk. A pointer that a kernel does not look at (of a
    second layer, a LayerNorm, a momentum, a loss) is any tensor."""

    def __init__(self, plan, q: Tensor, k: Tensor, v: Tensor, W: list[Tensor], norm):
        self.q, self.k, self.v, self.W = q.contiguous(), k.contiguous(), v.contiguous(), W
        self.used = sum(plan.counts) == len(q)
        bound = getattr(plan, "bound", None)
        self.bound, self.eps = bound or 0.0, plan.net.eps
        self.sides = {
            "K": q.shape[2], "E": W[0].shape[2], "V": v.shape[2], "L": len(W), "ACT": plan.net.activation,
            "RESIDUAL": plan.net.residual, "NORM": norm is not None, "DT": operand(q.dtype),
        }  # fmt: skip
        self.bounded = bound is not None
        self.large = 2 * _operand_bytes(q, W) > MOST_BYTES  # which of the tiles' rows
        self.norm = self.spread_norm = W[:1] * 2
        if norm is not None:
            self.norm, self.spread_norm = [x[:, 0].contiguous() for x in norm], self.blank([x[:, 0] for x in norm])
            for x, y in zip(self.spread_norm, self.norm):
                for n, first in zip(plan.counts, plan.starts):
                    x[first : first + n] = y[:n]

    def blank(self, like: list[Tensor]) -> list[Tensor]:
        """[N, ...] for what chunks keep of `like` [P, ...]; chunks that no program of a dense grid uses are 0."""
        return [(x.new_empty if self.used else x.new_zeros)(len(self.q), *x.shape[1:]) for x in like]

    def _shares(self, chunks: int, splits: int) -> tuple[list[Tensor], list[Tensor]]:
        """Room for the splits' shares of sums over tokens: of weights, and of the LayerNorm's two vectors."""
        weights = [w.new_empty(chunks, splits, *w.shape[1:]) for w in self.W]
        return weights, [x.new_empty(chunks, splits, *x.shape[1:]) for x in self.norm] if self.sides["NORM"] else []

    def read(self, starts: list[Tensor]) -> Tensor:
        """f(W, q) of all chunks, `[N, C G, V]`."""
        N, R, _ = self.q.shape
        shape, o = spread(R, N, READ_ROWS[self.large]), self.q.new_empty(N, R, self.sides["V"])
        read[(N, shape.splits)](
            self.q, starts[0], starts[-1], *self.spread_norm, o, self.eps, R, shape.tiles, BR=shape.rows, **self.sides,
            num_warps=4,
        )  # fmt: skip
        return o

    def read_reverse(self, starts: list[Tensor], d_o: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """d_q, and the shares of the gradients of weights and LayerNorm, per chunk."""
        N, R, _ = self.q.shape
        shape, d_q = spread(R, N, READ_REVERSE_ROWS[self.large]), torch.empty_like(self.q)
        shares, norm = self._shares(N, shape.splits)
        read_reverse[(N, shape.splits)](
            self.q, starts[0], starts[-1], self.spread_norm[0], d_o, d_q, shares[0], shares[-1],
            *(norm or self.norm), self.eps, R, shape.tiles, BR=shape.rows, **self.sides, num_warps=8,
        )  # fmt: skip
        return d_q, shares, norm

    def sums(self, here: slice, starts: list[Tensor], weight: Tensor, s_end: Tensor | None, loss: Tensor | None):
        """The shares of sum c_i g_i and of sum s_i g_i in the programs of one chunk; fills `loss`."""
        n, C = here.stop - here.start, self.k.shape[1]
        shape = spread(C, n, WRITE_ROWS[self.large])
        shares, _ = self._shares(n, shape.splits)
        shares_S = shares if s_end is None else self._shares(n, shape.splits)[0]
        write_sums[(n, shape.splits)](
            self.k[here], self.v[here], starts[0][here], starts[-1][here], *self.norm, weight[here],
            (weight if s_end is None else s_end)[here], (weight if loss is None else loss)[here], shares[0],
            shares[-1], shares_S[0], shares_S[-1], self.eps, self.bound, C, shape.tiles, BR=shape.rows,
            MOMENTUM=s_end is not None, BOUND=self.bounded, LOSS=loss is not None, **self.sides, num_warps=8,
        )  # fmt: skip
        return shares, shares_S

    def sums_reverse(self, here: slice, starts, weight, s_end, d_W, d_S, d_k, d_v, d_weight, d_s):
        """The shares of the gradients of weights and LayerNorm, given d_W and d_S behind the chunk; fills the rest."""
        n, C = here.stop - here.start, self.k.shape[1]
        if n == 0:
            return self._shares(0, 1)
        rows = WRITE_REVERSE_ROWS if s_end is None else WRITE_REVERSE_ROWS_MOMENTUM
        shape = spread(C, n, rows[self.large])
        s, d_s, d_S = (weight, d_weight, d_W) if s_end is None else (s_end, d_s, d_S)
        shares, norm = self._shares(n, shape.splits)
        write_reverse[(n, shape.splits)](
            self.k[here], self.v[here], starts[0][here], starts[-1][here], *self.norm, weight[here], s[here], d_W[0],
            d_W[-1], d_S[0], d_S[-1], d_k[here], d_v[here], d_weight[here], d_s[here], shares[0], shares[-1],
            *(norm or self.norm), self.eps, self.bound, C, shape.tiles, BR=shape.rows, MOMENTUM=s_end is not None,
            BOUND=self.bounded, **self.sides, num_warps=8,
        )  # fmt: skip
        return shares, norm
