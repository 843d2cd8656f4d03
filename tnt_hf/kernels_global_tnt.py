"""A memory that reads at its chunk's start (the global memory of TNT) on the GPU: the scan over its chunks, forward
and exact backward.

Axis legend
    P programs: grid rows x memory heads   N chunks of all programs   C tokens per chunk (2048)   G query heads per
    memory head   L layers (1 or 2)   K key, E hidden, V value width   FLOATS of all layers' weights: `packed`

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

from .derivative_tnt import once_differentiable, saved
from .kernels_chunk_tnt import read, read_reverse, write_reverse, write_sums
from .kernels_parts_tnt import (
    NOWHERE,
    REGISTERS,
    SM_80,
    SM_90,
    generation,
    operand,
    packed,
    rows_of_tile,
    shared_memory,
    unpacked,
)
from .kernels_state_tnt import advance, retreat


PROGRAMS = 264  # to be had by splitting chunks, where there are fewer: two for every processor of an H200
# Rows of a tile, at most: more do not fit in registers. The second number is for large weights, a LayerNorm, and
# float32 without wgmma, where operands pass through shared memory.
LARGE_BYTES = 16 << 10  # of operands of one head's weights
READ_ROWS, READ_REVERSE_ROWS, WRITE_ROWS = (64, 64), (64, 32), (64, 32)
WRITE_REVERSE_ROWS, WRITE_REVERSE_ROWS_MOMENTUM = (32, 16), (16, 16)
BLOCK, GROUP = 256, 16  # numbers of a state that a program of `advance` moves, and shares it takes up at once


def global_scan(plan, q, k, v, coef, ln, target, xi, W, S):
    """`scan_tnt.scan` for reads at the chunk's start, forward and backward: the same arguments and results, but q, k
    and v, with `plan.dense` `[B, T, heads, D]` as is o, are float32 or bfloat16 and all products' operands."""
    gain, bias = (None, None) if ln is None else (x[:, 0] for x in ln)
    states = (packed(x) for x in (W, xi, S, target))
    o, loss, *final = TritonGlobal.apply(plan, len(W), W[0].shape[2], q, k, v, *coef, gain, bias, *states)
    return o, loss, *(None if x is None else unpacked(x, [w.shape[1:] for w in W]) for x in final)


class TritonGlobal(torch.autograd.Function):
    """`reverse_tnt.ChunkScan` for reads at the chunk's start, of L layers E wide inside whose states are packed."""

    @staticmethod
    def forward(ctx, plan, L, E, q, k, v, theta, c, A, D, s_end, m_end, gain, bias, W0, xi, S0, target):
        ends = _Ends.of(theta, c, A, D, s_end, m_end)
        train = plan.graded and any(ctx.needs_input_grad)
        chunks = _Chunks(plan, L, E, q, k, v, ends, W0, target, gain, bias)
        W, S = _own(W0), None
        if ends.s is not None:
            S = torch.zeros_like(W) if S0 is None else _own(S0)
        starts, momenta = chunks.blank(W), chunks.blank(W) if train and S is not None else None
        starts[: len(W)] = xi if plan.carried else W
        if momenta is not None:
            momenta[: len(W)] = S
        xi_end = torch.empty_like(W) if plan.keep_state else None
        loss = torch.zeros_like(ends.weight) if plan.keep_loss else None
        for j, (n, first) in enumerate(zip(plan.counts, plan.starts)):
            rest = _after(plan, j)
            if plan.keep_state and rest < n:
                xi_end[rest:n] = starts[first + rest : first + n]
            if n := n if plan.keep_state or plan.keep_loss else rest:
                chunks.advance(first, n, plan.starts[j + 1] if rest else first, rest, W, S, starts, momenta, loss)
        if train:
            states = W0, xi, S0, target, starts, momenta
            ctx.save_for_backward(q, k, v, theta, c, A, D, s_end, m_end, gain, bias, *states)
        ctx.plan, ctx.net = plan, (L, E)
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        final = (W, _full(plan, W, xi_end), S) if plan.keep_state else (None, None, None)
        return chunks.read(starts), loss, *final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _, d_W_end, d_xi_end, d_S_end):
        plan, (q, k, v, *rest) = ctx.plan, saved(ctx)
        *coef, gain, bias, W0, xi, S0, target, starts, momenta = rest
        with torch.cuda.device_of(q):  # autograd's own threads have it, compiled autograd has not
            ends = _Ends.of(*coef)
            chunks = _Chunks(plan, *ctx.net, q, k, v, ends, W0, target, gain, bias)
            d_q, reads, norm_reads = chunks.read_reverse(starts, d_o.to(q.dtype).contiguous())
            # W and S: of all programs' states behind the chunk that comes next; at first, of the final ones
            zeros = torch.zeros_like(W0, memory_format=torch.contiguous_format)
            d_W, d_S, d_end = zeros, None if momenta is None else torch.zeros_like(zeros), None
            if plan.keep_state:
                d_W = _own(d_W_end).add_(_full(plan, d_xi_end, zeros))
                d_end = None if plan.full is True else _full(plan, zeros, d_xi_end)
                d_S = None if momenta is None else _own(d_S_end)
            d = chunks.gradients(d_W, d_S, xi, target)
            d_norm = None if gain is None else [torch.zeros_like(gain), torch.zeros_like(bias)]
            for j, n, first in reversed(list(zip(range(len(plan.counts)), plan.counts, plan.starts))):
                rest, carried = _after(plan, j), plan.carried and j == 0
                written = n if plan.keep_state else rest
                before, d_start = (W0, d.xi) if carried else (starts[first:], d.W)
                norm_writes = chunks.retreat(first, n, written, starts, before, momenta, reads, d, d_start)
                if d_end is not None and rest < n:
                    d_start[rest:n] += d_end[rest:n]
                for x, y, z in zip(d_norm or (), norm_reads, norm_writes):
                    x[:n] += y[first : first + n].sum(1)
                    x[:written] += z.sum(1)
        theta, c, *_ = coef
        d_theta, d_c = (d.ends.weight, None) if c is None else (torch.zeros_like(theta), d.ends.weight[:, None])
        d_A, d_D, d_m = (None if x is None else x.sum(1) for x in (d.ends.A, d.ends.D, d.ends.m))
        d_coef = d_theta, d_c, *(None if x is None else x[:, None] for x in (d_A, d_D)), d.ends.s, d_m
        d_states = d.W, d.xi, None if S0 is None else d.S, d.target
        return None, None, None, d_q, d.k, d.v, *d_coef, *(d_norm or (None, None)), *d_states


class _Ends(NamedTuple):
    """The coefficients at the chunks' ends: c_i and s_i `[N, C]`, A, D and m `[N]` (`None` where there is none)."""

    weight: Tensor
    A: Tensor | None
    D: Tensor | None
    s: Tensor | None
    m: Tensor | None

    @classmethod
    def of(cls, theta, c, A, D, s_end, m_end):
        A, D = (None if x is None else x[:, -1] for x in (A, D))
        each = theta if c is None else c[:, -1], A, D, s_end, m_end
        return cls(*(None if x is None else x.contiguous() for x in each))


class _Gradients(NamedTuple):
    """What the backward fills in: of the state behind a chunk, and of all chunks' inputs (of A, D and m `[N, blocks]`,
    to be added up)."""

    W: Tensor
    S: Tensor | None
    xi: Tensor | None
    target: Tensor | None
    k: Tensor
    v: Tensor
    ends: _Ends


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _after(plan, j: int) -> int:
    """Programs that have another chunk after chunk j."""
    return plan.counts[j + 1] if j + 1 < len(plan.counts) else 0


def _full(plan, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` in programs whose last chunk is complete, `no` in the others."""
    if isinstance(plan.full, Tensor):
        return torch.where(plan.full[:, None], yes, no)
    return _own(yes if plan.full else no)


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
    """The kernels with all that is the same for every chunk. A pointer that a kernel does not look at (of a LayerNorm,
    a momentum, a target, a loss) is any tensor."""

    def __init__(self, plan, L: int, E: int, q, k, v, ends: _Ends, W: Tensor, target, gain, bias):
        self.q, self.k, self.v, self.ends = q.contiguous(), k.contiguous(), v.contiguous(), ends
        self.N, self.C = ends.weight.shape
        self.W, self.target, self.used = W, W if target is None else target, sum(plan.counts) == self.N
        self.place, self.groups = (plan.counts[0], *(plan.dense or NOWHERE)), plan.groups
        self.bound, self.eps = plan.bound or 0.0, plan.net.eps
        self.net = {
            "K": q.shape[-1], "E": E, "V": v.shape[-1], "L": L, "ACT": plan.net.activation,
            "RESIDUAL": plan.net.residual, "NORM": gain is not None, "DT": operand(q.dtype),
        }  # fmt: skip
        room, half = shared_memory(q.device), q.dtype == torch.bfloat16
        # loads ahead of their use take as much shared memory again
        self.launch_read = {"num_warps": 4} | ({"num_stages": 1} if room < SM_80 and not half else {})
        all_registers = self.launch_read | {"num_warps": 8, "maxnreg": REGISTERS}
        self.launch = {"num_warps": 8} if generation(q.device) == 9 else all_registers
        # without tensor cores, in float32, it needs every one of them everywhere
        self.launch_write_reverse = self.launch if half else all_registers
        self.gates = {"MOMENTUM": ends.s is not None, "BOUND": plan.bound is not None}
        forget, floats = "none" if ends.A is None else "zero" if target is None else "init", W.shape[1]
        # a divisor of `floats`, whose layers' sides are powers of two from 16 on
        self.state = {"FLOATS": floats, "BLOCK": min(floats & -floats, BLOCK), "FORGET": forget, "num_warps": 4}
        self.state["MOMENTUM"], self.blocks = ends.s is not None, floats // self.state["BLOCK"]
        narrow = room < SM_90 and not half
        # which of the tiles' rows
        self.large = narrow or gain is not None or floats * q.element_size() > LARGE_BYTES
        self.norm = self.spread_norm = [W, W]
        if gain is not None:
            self.norm = [gain.contiguous(), bias.contiguous()]
            self.spread_norm = [self.blank(x) for x in self.norm]
            for x, y in zip(self.spread_norm, self.norm):
                for n, first in zip(plan.counts, plan.starts):
                    x[first : first + n] = y[:n]

    def blank(self, like: Tensor) -> Tensor:
        """[N, ...] for what chunks keep of `like` [P, ...]; chunks that no program of a dense grid uses are 0."""
        return (like.new_empty if self.used else like.new_zeros)(self.N, *like.shape[1:])

    def gradients(self, d_W: Tensor, d_S: Tensor | None, xi: Tensor | None, target: Tensor | None) -> _Gradients:
        """Zeros, but for the two that are given."""
        weight, A, D, s, m = self.ends
        xi, target, k, v, weight, s = (
            None if x is None else torch.zeros_like(x) for x in (xi, target, self.k, self.v, weight, s)
        )
        A, D, m = (None if x is None else self.blank(self.W.new_empty(0, self.blocks)) for x in (A, D, m))
        return _Gradients(d_W, d_S, xi, target, k, v, _Ends(weight, A, D, s, m))

    def _shares(self, chunks: int, splits: int) -> tuple[Tensor, list[Tensor]]:
        """Room for the splits' shares of sums over tokens: of weights, and of the LayerNorm's two vectors."""
        norm = [x.new_empty(chunks, splits, x.shape[1]) for x in self.norm] if self.net["NORM"] else []
        return self.W.new_empty(chunks, splits, self.W.shape[1]), norm

    def _gates(self) -> list[Tensor]:
        """A, D and m of all chunks."""
        return [self.ends.weight if x is None else x for x in (self.ends.A, self.ends.D, self.ends.m)]

    def read(self, starts: Tensor) -> Tensor:
        """f(W, q) of all chunks, `[N, C G, V]`, or as q has it."""
        shape = spread(self.C * self.groups, self.N, READ_ROWS[self.large])
        o = self.q.new_empty(*self.q.shape[:-1], self.net["V"])
        read[(self.N, shape.splits)](
            self.q, starts, *self.spread_norm, o, self.eps, *self.place, self.C, shape.tiles, self.groups,
            BR=shape.rows, **self.net, **self.launch_read,
        )  # fmt: skip
        return o

    def read_reverse(self, starts: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """d_q, and the shares of the gradients of weights and LayerNorm, per chunk."""
        shape = spread(self.C * self.groups, self.N, READ_REVERSE_ROWS[self.large])
        (shares, norm), d_q = self._shares(self.N, shape.splits), torch.empty_like(self.q)
        read_reverse[(self.N, shape.splits)](
            self.q, starts, self.spread_norm[0], d_o, d_q, shares, *(norm or self.norm), self.eps, *self.place, self.C,
            shape.tiles, self.groups, BR=shape.rows, **self.net, **self.launch,
        )  # fmt: skip
        return d_q, shares, norm

    def advance(self, first: int, n: int, then: int, rest: int, W, S, starts, momenta, loss) -> None:
        """W and S of n programs behind their chunks at `first` (in place), and where the next chunks of `rest` of them
        keep them, at `then`."""
        weight, shape = self.ends.weight, spread(self.C, n, WRITE_ROWS[self.large])
        shares = self._shares(n, shape.splits)[0]
        shares_S = shares if S is None else torch.empty_like(shares)
        write_sums[(n, shape.splits)](
            self.k, self.v, starts, *self.norm, weight, weight if S is None else self.ends.s,
            weight if loss is None else loss, shares, shares_S, self.eps, self.bound, first, *self.place, self.C,
            shape.tiles, BR=shape.rows, LOSS=loss is not None, **self.gates, **self.net, **self.launch,
        )  # fmt: skip
        advance[(n, self.blocks)](
            W, W if S is None else S, self.target, shares, shares_S, *self._gates(), starts,
            starts if momenta is None else momenta, first, then, rest, shape.splits, GROUP=_group(shape.splits),
            KEPT=momenta is not None, **self.state,
        )  # fmt: skip

    def retreat(self, first: int, n: int, written: int, starts, before, momenta, reads, d: _Gradients, d_start):
        """From the gradients d.W, d.S behind n programs' chunks at `first` to those before them (in place), `before`
        and `momenta` being the state there; only the first `written` wrote. Returns the LayerNorm's shares."""
        weight, rows = self.ends.weight, WRITE_REVERSE_ROWS if momenta is None else WRITE_REVERSE_ROWS_MOMENTUM
        shape = spread(self.C, max(written, 1), rows[self.large])
        shares, norm = self._shares(written, shape.splits)
        s, d_s, d_S = (weight, d.ends.weight, d.W) if momenta is None else (self.ends.s, d.ends.s, d.S)
        if written:
            write_reverse[(written, shape.splits)](
                self.k, self.v, starts, *self.norm, weight, s, d.W, d_S, d.k, d.v, d.ends.weight, d_s, shares,
                *(norm or self.norm), self.eps, self.bound, first, *self.place, self.C, shape.tiles, BR=shape.rows,
                **self.gates, **self.net, **self.launch_write_reverse,
            )  # fmt: skip
        parts = (weight if x is None else x for x in (d.ends.A, d.ends.D, d.ends.m))
        retreat[(n, self.blocks)](
            d.W, d_S, d_start, d.W if d.target is None else d.target, before, starts if momenta is None else momenta,
            self.target, reads, shares if written else reads, *self._gates(), *parts, first, written, reads.shape[1],
            shape.splits, GROUP=_group(max(reads.shape[1], shape.splits)), SAME=d_start is d.W, **self.state,
        )  # fmt: skip
        return norm


def _group(splits: int) -> int:
    """Shares to take up at once: a power of two, for which a kernel is compiled."""
    return min(GROUP, 1 << (splits - 1).bit_length())
