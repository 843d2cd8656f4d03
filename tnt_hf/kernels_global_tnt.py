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

from .derivative_tnt import once_differentiable
from .kernels_chunk_tnt import advance, read, read_reverse, retreat, write_reverse, write_sums
from .kernels_parts_tnt import NOWHERE, REGISTERS, SM_80, SM_90, generation, operand, rows_of_tile, shared_memory


PROGRAMS = 264  # to be had by splitting chunks, where there are fewer: two for every processor of an H200
# Rows of a tile, at most: more do not fit in registers. The second number is for large weights, a LayerNorm, and
# float32 without wgmma, where operands pass through shared memory.
LARGE_BYTES = 16 << 10  # of operands of one head's weights
READ_ROWS, READ_REVERSE_ROWS, WRITE_ROWS = (64, 64), (64, 32), (64, 32)
WRITE_REVERSE_ROWS, WRITE_REVERSE_ROWS_MOMENTUM = (32, 16), (16, 16)


def _operand_bytes(q: Tensor, weights: list[Tensor]) -> int:
    return sum(w.shape[-2] * w.shape[-1] for w in weights) * q.element_size()


class TritonGlobal(torch.autograd.Function):
    """`reverse_tnt.ChunkScan` for reads at the chunk's start: the same arguments, results and gradients; with
    `plan.dense` q, k, v and o are `[B, T, heads, D]`. q, k, v in float32 or bfloat16 are the operands, all else is
    float32."""

    @staticmethod
    def forward(ctx, plan, depth, q, k, v, theta, c, A, D, s_end, m_end, gain, bias, *states):
        (W0, xi, S0, target), norm = _layers(states, depth), None if gain is None else (gain, bias)
        ends, train = _Ends.of(theta, c, A, D, s_end, m_end), any(ctx.needs_input_grad)
        chunks = _Chunks(plan, q, k, v, ends, W0, target, norm)
        W, S = [_own(w) for w in W0], None
        if ends.s is not None:
            S = _zeros(W) if S0 is None else [_own(s) for s in S0]
        starts, momenta = chunks.blank(W), chunks.blank(W) if train and S is not None else None
        for kept, state in ((starts, xi if plan.carried else W), (momenta, S)):
            for x, y in zip(kept or (), state or ()):
                x[: plan.counts[0]] = y
        xi_end = [torch.empty_like(w) for w in W]
        loss = torch.zeros_like(ends.weight) if plan.keep_loss else None
        for j, (n, first) in enumerate(zip(plan.counts, plan.starts)):
            rest = _after(plan, j)
            if plan.keep_state and rest < n:
                for x, start in zip(xi_end, starts):
                    x[rest:n] = start[first + rest : first + n]
            if n := n if plan.keep_state or plan.keep_loss else rest:
                then = plan.starts[j + 1] if rest else first
                chunks.advance(slice(first, first + n), slice(then, then + n), rest, W, S, starts, momenta, loss)
        if train:
            kept = (*starts, *(momenta or ()))
            ctx.save_for_backward(q, k, v, theta, c, A, D, s_end, m_end, gain, bias, *states, *kept)
        ctx.plan, ctx.depth = plan, depth
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        final = [None] * (3 * depth)
        if plan.keep_state:
            final = [*W, *_full(plan, W, xi_end), *(S or [None] * depth)]
        return chunks.read(starts), loss, *final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _, *d_final):
        plan, L, saved = ctx.plan, ctx.depth, ctx.saved_tensors  # to be read once: gradient checkpointing makes them
        q, k, v, *coef = saved[:9]
        (gain, bias), rest = saved[9:11], saved[11:]
        (W0, xi, S0, target), starts, momenta = _layers(rest, L), rest[4 * L : 5 * L], rest[5 * L :]
        norm, ends = None if gain is None else (gain, bias), _Ends.of(*coef)
        chunks = _Chunks(plan, q, k, v, ends, W0, target, norm)
        d_q, reads, norm_reads = chunks.read_reverse(starts, d_o.to(q.dtype).contiguous())
        # W and S: of all programs' states behind the chunk that comes next; at first, of the final ones
        d = _Gradients(
            _zeros(W0), _zeros(W0 if momenta else None), _zeros(xi), _zeros(target), *_zeros((k, v)),
            _Ends(*_zeros(ends)),
        )  # fmt: skip
        d_norm, d_end = _zeros(norm), None
        if plan.keep_state:
            last = d_final[L : 2 * L]
            d_end = None if plan.full is True else _full(plan, _zeros(W0), last)
            for to, x, y in zip(d.W, d_final, _full(plan, last, _zeros(W0))):
                torch.add(x, y, out=to)
            for to, x in zip(d.S or (), d_final[2 * L :]):
                to.copy_(x)
        for j, n, first in reversed(list(zip(range(len(plan.counts)), plan.counts, plan.starts))):
            here, rest, carried = slice(first, first + n), _after(plan, j), plan.carried and j == 0
            written = n if plan.keep_state else rest
            before = W0 if carried else [x[here] for x in starts]
            norm_writes = chunks.retreat(here, written, starts, before, momenta, reads, d, d.xi if carried else d.W)
            if d_end is not None and rest < n:
                for x, y in zip(d.xi if carried else d.W, d_end):
                    x[rest:n] += y[rest:n]
            for x, y, z in zip(d_norm or (), norm_reads, norm_writes):
                x[:n, 0] += y[here].sum(1)
                x[:written, 0] += z.sum(1)
        theta, c, A, D, *_ = coef
        d_theta, d_c = (d.ends.weight, None) if c is None else (torch.zeros_like(theta), d.ends.weight[:, None])
        d_A, d_D = (x if x is None else x[:, None] for x in (d.ends.A, d.ends.D))
        d_coef, none = (d_theta, d_c, d_A, d_D, d.ends.s, d.ends.m), [None] * L
        d_states = *d.W, *(d.xi or none), *(none if S0 is None else d.S), *(d.target or none)
        return None, None, d_q, d.k, d.v, *d_coef, *(d_norm or (None, None)), *d_states


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
    """What the backward fills in: of the state behind a chunk, and of all chunks' inputs."""

    W: list[Tensor]
    S: list[Tensor] | None
    xi: list[Tensor] | None
    target: list[Tensor] | None
    k: Tensor
    v: Tensor
    ends: _Ends


def _layers(states, depth: int) -> list[list[Tensor] | None]:
    """A flat tuple of W, W_xi, S and target as lists, `None` for one that is absent."""
    kinds = (states[i * depth : (i + 1) * depth] for i in range(4))
    return [None if x[0] is None else [y.contiguous() for y in x] for x in kinds]


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _zeros(like) -> list[Tensor | None] | None:
    """Contiguous zeros; `None` for `None`."""
    if like is None:
        return None
    return [None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in like]


def _after(plan, j: int) -> int:
    """Programs that have another chunk after chunk j."""
    return plan.counts[j + 1] if j + 1 < len(plan.counts) else 0


def _full(plan, yes, no) -> list[Tensor]:
    """`yes` in programs whose last chunk is complete, `no` in the others."""
    if isinstance(plan.full, Tensor):
        return [torch.where(plan.full[:, None, None], x, y) for x, y in zip(yes, no)]
    return [_own(x) for x in (yes if plan.full else no)]


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
    """The kernels with all that is the same for every chunk. A pointer that a kernel does not look at (of a second
    layer, a LayerNorm, a momentum, a target, a loss) is any tensor."""

    def __init__(self, plan, q: Tensor, k: Tensor, v: Tensor, ends: _Ends, W: list[Tensor], target, norm):
        self.q, self.k, self.v, self.ends, self.W = q.contiguous(), k.contiguous(), v.contiguous(), ends, W
        self.N, self.C = ends.weight.shape
        self.used, self.target = sum(plan.counts) == self.N, target or W
        self.place, self.groups = (plan.counts[0], *(plan.dense or NOWHERE)), plan.groups
        self.bound, self.eps = plan.bound or 0.0, plan.net.eps
        self.net = {
            "K": q.shape[-1], "E": W[0].shape[2], "V": v.shape[-1], "L": len(W), "ACT": plan.net.activation,
            "RESIDUAL": plan.net.residual, "NORM": norm is not None, "DT": operand(q.dtype),
        }  # fmt: skip
        room, half = shared_memory(q.device), q.dtype == torch.bfloat16
        # loads ahead of their use take as much shared memory again
        self.launch_read = {"num_warps": 4} | ({"num_stages": 1} if room < SM_80 and not half else {})
        all_registers = self.launch_read | {"num_warps": 8, "maxnreg": REGISTERS}
        self.launch = {"num_warps": 8} if generation(q.device) == 9 else all_registers
        # without tensor cores, in float32, it needs every one of them everywhere
        self.launch_write_reverse = self.launch if half else all_registers
        self.gates = {"MOMENTUM": ends.s is not None, "BOUND": plan.bound is not None}
        forget = "none" if ends.A is None else "zero" if target is None else "init"
        self.state = {"FORGET": forget, "MOMENTUM": ends.s is not None}
        narrow = room < SM_90 and not half
        self.large = narrow or norm is not None or _operand_bytes(q, W) > LARGE_BYTES  # which of the tiles' rows
        self.norm = self.spread_norm = W[:1] * 2
        if norm is not None:
            self.norm, self.spread_norm = [x[:, 0].contiguous() for x in norm], self.blank([x[:, 0] for x in norm])
            for x, y in zip(self.spread_norm, self.norm):
                for n, first in zip(plan.counts, plan.starts):
                    x[first : first + n] = y[:n]

    def blank(self, like: list[Tensor]) -> list[Tensor]:
        """[N, ...] for what chunks keep of `like` [P, ...]; chunks that no program of a dense grid uses are 0."""
        return [(x.new_empty if self.used else x.new_zeros)(self.N, *x.shape[1:]) for x in like]

    def _shares(self, chunks: int, splits: int) -> tuple[list[Tensor], list[Tensor]]:
        """Room for the splits' shares of sums over tokens: of weights, and of the LayerNorm's two vectors."""
        weights = [w.new_empty(chunks, splits, *w.shape[1:]) for w in self.W]
        return weights, [x.new_empty(chunks, splits, *x.shape[1:]) for x in self.norm] if self.net["NORM"] else []

    def _gates(self, here: slice, size: int) -> tuple[list[Tensor], dict]:
        """A, D, m of one chunk's programs, and the options of a kernel of a layer of `size` weights."""
        _, A, D, _, m = self.ends
        each = [self.ends.weight if x is None else x[here] for x in (A, D, m)]
        return each, {"size": size, "BLOCK": min(size, 1024), **self.state}

    def read(self, starts: list[Tensor]) -> Tensor:
        """f(W, q) of all chunks, `[N, C G, V]`, or as q has it."""
        shape = spread(self.C * self.groups, self.N, READ_ROWS[self.large])
        o = self.q.new_empty(*self.q.shape[:-1], self.net["V"])
        read[(self.N, shape.splits)](
            self.q, starts[0], starts[-1], *self.spread_norm, o, self.eps, *self.place, self.C, shape.tiles,
            self.groups, BR=shape.rows, **self.net, **self.launch_read,
        )  # fmt: skip
        return o

    def read_reverse(self, starts: list[Tensor], d_o: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """d_q, and the shares of the gradients of weights and LayerNorm, per chunk."""
        shape = spread(self.C * self.groups, self.N, READ_REVERSE_ROWS[self.large])
        (shares, norm), d_q = self._shares(self.N, shape.splits), torch.empty_like(self.q)
        read_reverse[(self.N, shape.splits)](
            self.q, starts[0], starts[-1], self.spread_norm[0], d_o, d_q, shares[0], shares[-1],
            *(norm or self.norm), self.eps, *self.place, self.C, shape.tiles, self.groups, BR=shape.rows, **self.net,
            **self.launch,
        )  # fmt: skip
        return d_q, shares, norm

    def advance(self, here: slice, then: slice, rest: int, W, S, starts, momenta, loss) -> None:
        """W and S behind the chunk at `here` (in place), which the first `rest` programs' next chunks start from."""
        n, weight = here.stop - here.start, self.ends.weight
        shape, s = spread(self.C, n, WRITE_ROWS[self.large]), weight if S is None else self.ends.s
        shares = self._shares(n, shape.splits)[0]
        shares_S = shares if S is None else self._shares(n, shape.splits)[0]
        write_sums[(n, shape.splits)](
            self.k, self.v, starts[0][here], starts[-1][here], *self.norm, weight[here], s[here],
            (weight if loss is None else loss)[here], shares[0], shares[-1], shares_S[0], shares_S[-1], self.eps,
            self.bound, here.start, *self.place, self.C, shape.tiles, BR=shape.rows, LOSS=loss is not None,
            **self.gates, **self.net, **self.launch,
        )  # fmt: skip
        for i, w in enumerate(W):
            gates, options = self._gates(here, w[0].numel())
            advance[(n, options["size"] // options["BLOCK"])](
                w, (S or W)[i], self.target[i], shares[i], shares_S[i], *gates, starts[i][then],
                (momenta or starts)[i][then], shape.splits, rest, KEPT=momenta is not None, **options, num_warps=4,
            )  # fmt: skip

    def retreat(self, here: slice, written: int, starts, before, momenta, reads, d: _Gradients, d_start):
        """From the gradients d.W, d.S behind the chunk at `here` to those before it (in place), `before` and `momenta`
        being the state there; only the first `written` programs wrote. Returns the LayerNorm's shares."""
        n, weight, d_weight = here.stop - here.start, self.ends.weight, d.ends.weight
        rows = WRITE_REVERSE_ROWS_MOMENTUM if momenta else WRITE_REVERSE_ROWS
        shape = spread(self.C, max(written, 1), rows[self.large])
        shares, norm = self._shares(written, shape.splits)
        s, d_s, d_S = (self.ends.s, d.ends.s, d.S) if momenta else (weight, d_weight, d.W)
        if written:
            write_reverse[(written, shape.splits)](
                self.k, self.v, starts[0][here], starts[-1][here], *self.norm, weight[here], s[here], d.W[0], d.W[-1],
                d_S[0], d_S[-1], d.k, d.v, d_weight[here], d_s[here], shares[0], shares[-1], *(norm or self.norm),
                self.eps, self.bound, here.start, *self.place, self.C, shape.tiles, BR=shape.rows, **self.gates,
                **self.net, **self.launch_write_reverse,
            )  # fmt: skip
        for i, dw in enumerate(d.W):
            gates, options = self._gates(here, dw[0].numel())
            to = [d_weight if x is None else x[here] for x in (d.ends.A, d.ends.D, d.ends.m)]
            retreat[(n,)](
                dw, d_S[i], d_start[i], (d.target or d.W)[i], before[i], (momenta or starts)[i][here], self.target[i],
                reads[i][here], shares[i] if written else reads[i], *gates, *to, reads[i].shape[1], shape.splits,
                written, **options, num_warps=4,
            )  # fmt: skip
        return norm
