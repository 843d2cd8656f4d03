"""The dual form of one memory: a chunk of tokens as matrix products, and its scan over chunks. `reverse_tnt` has the
way back.

Axis legend
    C tokens per chunk   G query heads per memory head   K key width   V value width   L layers of the memory network
    P programs: grid rows x heads, the batch of every matrix product   N chunks over all rows, ordered by step and
    then by row

g_t is rank one per layer, g_{l,t} = a_{l-1,t}^T delta_{l,t}, so with W_0, S_0 at the chunk's entry and any row vector
x

    x W_{l,t} = A_t x W_{l,0} + (1 - A_t) x W_target + D_t x S_{l,0} - sum_{i<=t} c_{t,i} (x . a_{l-1,i}) delta_{l,i}

is a masked attention inside the chunk: no per-token weight exists. `memory_tnt.memory_naive` is what this is held to.
Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .coefficients_tnt import Coef
from .network_tnt import (
    Net,
    activate,
    inner_gradient,
    inner_offset,
    standardise,
)


class Plan(NamedTuple):
    """What a scan needs besides tensors. `counts` and `starts` are in programs (rows x heads)."""

    net: Net
    counts: list[int]
    starts: list[int]
    groups: int
    current: bool
    carried: bool  # step 0 takes its gradients at a carried W_xi
    full: Tensor | bool
    keep_state: bool
    keep_loss: bool


class Block(NamedTuple):
    """Some chunks in a row. What does not touch the weights is done for all programs of a block at once."""

    steps: range
    here: slice  # of the programs' axis
    sizes: list[int]  # programs of each chunk
    spans: list[int]  # and with the unused ones of a dense grid behind them

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1 and self.sizes == self.spans

    def cut(self, x: Tensor) -> list[Tensor]:
        """[programs, ...] -> per chunk."""
        if self.sizes == self.spans and len(self.sizes) == 1:
            return [x]
        pieces = x.split_with_sizes(self.spans)
        return pieces if self.sizes == self.spans else [y[:n] for y, n in zip(pieces, self.sizes)]

    def stack(self, pieces: list[Tensor]) -> Tensor:
        """The inverse of `cut`, with zeros at unused programs."""
        if self.sizes != self.spans:
            pads = [m - n for n, m in zip(self.sizes, self.spans)]
            pieces = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, m)) if m else x for x, m in zip(pieces, pads)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def spread(self, x: Tensor) -> Tensor:
        """Values of rows, for every chunk."""
        return self.stack([x[:n] for n in self.sizes])

    def fold(self, total: Tensor, x: Tensor) -> None:
        """total `[rows, ...]` += x `[programs, ...]`, the adjoint of `spread`."""
        if len(self.sizes) == 1:
            total[: self.sizes[0]] += x[: self.sizes[0]]
        elif self.even:
            total[: self.sizes[0]] += x.unflatten(0, (-1, self.sizes[0])).sum(0)
        else:
            for y, n in zip(self.cut(x), self.sizes):
                total[:n] += y

    def fold_product(self, total: Tensor, x: Tensor, y: Tensor) -> None:
        """total `[rows, K, V]` += x^T y of every chunk."""
        n = self.sizes[0]
        if self.even:  # one product with all rows of x and y
            x, y = (z.unflatten(0, (-1, n)).transpose(0, 1).flatten(1, 2) for z in (x, y))
            total[:n].baddbmm_(x.transpose(1, 2), y)
        else:
            for x_j, y_j, n in zip(self.cut(x), self.cut(y), self.sizes):
                total[:n].baddbmm_(x_j.transpose(1, 2), y_j)


def blocks(plan: Plan, length: int) -> list[Block]:
    """All chunks in order, `length` steps to a block."""
    steps, blocks = len(plan.counts), []
    for begin in range(0, steps, length):
        end = min(begin + length, steps)
        ends = [*plan.starts[begin + 1 : end], plan.starts[end - 1] + plan.counts[end - 1]]
        spans = [b - a for a, b in zip(plan.starts[begin:end], ends)]
        blocks.append(Block(range(begin, end), slice(plan.starts[begin], ends[-1]), plan.counts[begin:end], spans))
    return blocks


# ------------------------------------------------------------------------------------------- one chunk of the dual
# form


def grouped(x: Tensor | None, groups: int) -> Tensor | None:
    """[P, C, ...] -> [P, C G, ...]: a token's query heads are extra rows of its chunk."""
    return x if x is None or groups == 1 else x.repeat_interleave(groups, 1)


def ungrouped(x: Tensor, groups: int) -> Tensor:
    """[P, C G, ...] -> [P, C, ...], summed: the adjoint of `grouped`."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def weighted(weights: Tensor, a: list[Tensor], delta: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The factors (x, y) with sum_i x_i^T y_i = sum_i weights_i g_i per layer: of a and delta, the narrower one is
    scaled."""
    w = weights[..., None]
    return [(w * x, y) if x.shape[-1] <= y.shape[-1] else (x, w * y) for x, y in zip(a, delta)]


def _read_chunk(plan: Plan, base, S, target, start, q, coef: Coef, pairs, pushed, first=None):
    """y of all layers, for the chunk's queries: the hidden z, then f(W, q) before the LayerNorm; and x . a of
    all layers. `pushed`: (a, delta) of the writes that are read, to be weighted by `pairs` `[(P,) C G, C]`; `first`: q
    @ W_1 of the weights that are read, if at hand."""
    net, ys, ps, x = plan.net, [], [], q
    if plan.current:
        A = None if coef.A is None else grouped(coef.A, plan.groups)[..., None]
        D = None if S is None else grouped(coef.D, plan.groups)[..., None]
    for i, w in enumerate(base if plan.current else start):
        y = torch.bmm(x, w) if first is None or i else first
        if plan.current:
            if A is not None:
                y = A * y if target is None else torch.lerp(torch.bmm(x, target[i]), y, A)
            if S is not None:
                y = torch.addcmul(y, D, torch.bmm(x, S[i]))
            a, delta = pushed[i]
            ps.append(torch.bmm(x, a.transpose(1, 2)))
            y = torch.baddbmm(y, pairs * ps[i], delta, alpha=-1, out=None if torch.is_grad_enabled() else y)
        ys.append(y)
        x = activate(net.activation, y) if i < len(base) - 1 else None
    return ys, ps


def write_chunk(W, S, target, coef: Coef, pushed, pushed_S, in_place=False):
    """Weights and momentum after the chunk: W_C = A W_0 + (1 - A) W_target + D S_0 - sum_i c_{C,i} g_i and S_C
    likewise. `pushed`, `pushed_S`: their sums' factors, see `weighted`."""
    new_W, new_S = [], None if pushed_S is None else []
    no_grad = not torch.is_grad_enabled()
    keep, D, m = (x if x is None else x[..., None, None] for x in (coef.A, coef.D, coef.m_end))
    for i, w in enumerate(W):
        out = w if in_place else None
        if keep is not None:
            w = (
                torch.mul(keep[:, -1], w, out=out)
                if target is None
                else torch.lerp(target[i], w, keep[:, -1], out=out)
            )
            out = w if no_grad else None
        if S is not None:
            w = torch.addcmul(w, D[:, -1], S[i], out=out)
            out = w if no_grad else None
        new_W.append(torch.baddbmm(w, pushed[i][0].transpose(1, 2), pushed[i][1], alpha=-1, out=out))
        if pushed_S is not None:
            x, y = pushed_S[i]
            if S is None:
                new_S.append(-torch.bmm(x.transpose(1, 2), y))
            else:
                s = torch.mul(m, S[i], out=S[i] if in_place else None)
                new_S.append(torch.baddbmm(s, x.transpose(1, 2), y, alpha=-1, out=s if no_grad else None))
    return new_W, new_S


def _keeps_pairs(coef: Coef, W: list[Tensor], C: int) -> bool:
    wide = all(w.shape[1] > w.shape[2] for w in W[1:])
    return len(W) > 1 and C <= W[0].shape[2] and (coef.c is not None or wide)


def c_end(coef: Coef) -> Tensor:
    """c_{C,i}, `[P, C]`: how much of each g_i is in the weights after the chunk."""
    return coef.theta if coef.c is None else coef.c[:, -1]


def _causal(rows: int, C: int, like: Tensor) -> Tensor:
    """[C G, C]: 1 where the write comes no later than the read."""
    token = torch.arange(rows, device=like.device) // (rows // C)
    return (token[:, None] >= torch.arange(C, device=like.device)).to(like.dtype)


def padded(x: Tensor, like: Tensor) -> Tensor:
    """A dense grid may have unused programs at its end."""
    return F.pad(x, (0, 0, 0, 0, 0, len(like) - len(x))) if len(x) < len(like) else x


def _causal(rows: int, C: int, like: Tensor) -> Tensor:
    """[C G, C]: 1 where the write comes no later than the read."""
    token = torch.arange(rows, device=like.device) // (rows // C)
    return (token[:, None] >= torch.arange(C, device=like.device)).to(like.dtype)


def cut(x: list[Tensor] | None, n: int) -> list[Tensor] | None:
    """The first n programs of each tensor."""
    return None if x is None else [y[:n] for y in x]


def copied(x: list[Tensor] | None) -> list[Tensor] | None:
    """Tensors of their own, to be written in place."""
    return None if x is None else [y.clone() for y in x]


class Tape(NamedTuple):
    """What the forward keeps for the backward: per chunk the parts of the networks that cost a product with the
    weights (z and dl/da of the hidden layers and y, for the key; z and y for the query; x . a of the upper layers if
    it is small), and the states before some of the chunks."""

    chunks: list[tuple[Tensor, ...]]
    states: dict[int, tuple[list[Tensor], list[Tensor] | None] | None]


def scan(plan: Plan, q, k, v, coef, ln, target, xi, W, S, bound=None, tape: Tape | None = None):
    """All chunks in order. Returns o `[N H, C G, V]`, the inner losses `[N H, C]` (or `None`) and the rows' final W,
    W_xi, S (lists, or `None`).

    `coef` is a `Coef`, or a `BoundedCoef` with a gradient `bound`. `tape`: to fill; its `states` has the steps as
    keys.
    """
    reads, losses, ended, last, C = [], [], [], len(plan.counts) - 1, k.shape[1]
    in_place, owned = not torch.is_grad_enabled(), False  # owned: W and S are this scan's to overwrite
    whole = blocks(plan, last + 1)[0]
    offset = inner_offset(plan.net, k, v, None if ln is None else padded(whole.spread(ln[1]), k))
    both = torch.cat([k, q], 1)
    # x . a of the upper layers is dear where `a` is wide, and small where C is; with theta on a it would not be x . a
    keep_pairs = tape is not None and plan.current and _keeps_pairs(coef, W, C)
    causal = _causal(q.shape[1], C, q) if plan.current else None
    for j, (n, first) in enumerate(zip(plan.counts, plan.starts)):
        here = slice(first, first + n)
        if tape is not None and j in tape.states:
            tape.states[j] = (copied(W), copied(S)) if owned and in_place else (W, S)
        start = xi if plan.carried and j == 0 else W
        gain, goal = None if ln is None else ln[0][:n], cut(target, n)
        key_first = query_first = None
        if start is W or not plan.current:
            key_first, query_first = torch.bmm(both[here], start[0]).split_with_sizes((C, q.shape[1]), 1)
        a, delta, error, inner = inner_gradient(plan.net, start, k[here], offset[here], gain, key_first)
        c = coef.part(here) if bound is None else coef.part(here, a, delta, bound)
        pushed = weighted(c_end(c), a, delta)
        pairs, read = (causal, pushed) if c.c is None else (grouped(c.c, plan.groups), list(zip(a, delta)))
        ys, ps = _read_chunk(plan, W, S, goal, start, q[here], c, pairs, read, query_first)
        reads.append(ys[-1])
        if tape is not None:
            z, grad_act, normed, _ = inner
            top = error if ln is None else normed.y
            tape.chunks.append((*z, *grad_act, top, *ys, *(ps[1:] if keep_pairs else ())))
        if plan.keep_loss:
            losses.append(0.5 * error.detach().square().sum(-1))
        rest = 0 if j == last else plan.counts[j + 1]
        if plan.keep_state or j < last:
            final = plan.keep_state and rest < n
            pushed_S = None if c.s_end is None else weighted(c.s_end, a, delta)
            W, S = write_chunk(W, S, goal, c, pushed, pushed_S, in_place and owned and not final)
            owned = True
            if final:  # these rows end here
                xi_end = [x[rest:] for x in (W if plan.full is True else start)]
                if isinstance(plan.full, Tensor):
                    full = plan.full[rest:n, None, None]
                    xi_end = [torch.where(full, w[rest:], x) for w, x in zip(W, xi_end)]
                ended.append(([x[rest:] for x in W], xi_end, S and [x[rest:] for x in S]))
            if rest < n:
                W, S = cut(W, rest), cut(S, rest)
    final = [None if x[0] is None else [torch.cat(y[::-1]) for y in zip(*x)] for x in zip(*ended)] or [None] * 3
    o = _join(plan, reads, len(q))
    if ln is not None:
        gain, bias = (padded(whole.spread(x), q) for x in ln)
        o = torch.addcmul(bias, gain, standardise(o, plan.net.eps).h)
    o = o + q if plan.net.residual else o
    return o, _join(plan, losses, len(q)) if plan.keep_loss else None, *final


def _join(plan: Plan, pieces: list[Tensor], total: int) -> Tensor:
    """Chunk results in the grid's order; a dense grid has unused chunks behind the last shard's end."""
    ends = [*plan.starts[1:], total]
    return torch.cat(
        [
            F.pad(x, (0, 0) * (x.dim() - 1) + (0, b - a - len(x))) if b - a > len(x) else x
            for x, a, b in zip(pieces, plan.starts, ends)
        ]
    )
