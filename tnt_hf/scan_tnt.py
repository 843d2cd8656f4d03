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

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .coefficients_tnt import Coef
from .features_tnt import ring_products
from .network_tnt import (
    Net,
    activate,
    excess,
    inner_gradient,
    inner_offset,
    norms,
    pass_through,
    standardise,
)
from .plan_tnt import BLOCK_ELEMENTS, Plan, blocks, whole


# -------------------------------------------------------------------------------------- one chunk of the dual form


def grouped(x: Tensor | None, groups: int) -> Tensor | None:
    """[P, C, ...] -> [P, C G, ...]: a token's query heads are extra rows of its chunk."""
    return x if x is None or groups == 1 else x.repeat_interleave(groups, 1)


def ungrouped(x: Tensor, groups: int) -> Tensor:
    """[P, C G, ...] -> [P, C, ...], summed: the adjoint of `grouped`."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def weighted(weights: Tensor, a: list[Tensor], delta: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The factors (x, y) with sum_i x_i^T y_i = sum_i weights_i g_i per layer, `weights` `[P, C, 1]`: of a and delta,
    the narrower one is scaled."""
    return [(weights * x, y) if x.shape[-1] <= y.shape[-1] else (x, weights * y) for x, y in zip(a, delta)]


def scores(plan: Plan, qk: Tensor) -> Tensor:
    """q . k of the chunks in qk, `[P, C G, C]`. Of the products that `plan.quadratic` stands for it is the square."""
    rows, _ = plan.rows(qk)
    return torch.bmm(qk[:, :rows], qk[:, rows:].mT)


def through_scores(plan: Plan, grad: Tensor, d_first: Tensor, dots: Tensor, qk: Tensor) -> None:
    """grad of qk += what flows through the first layer's x . a, whose gradient is `d_first`, which is overwritten.
    dots: `scores` of qk."""
    rows, _ = plan.rows(qk)
    d = d_first.mul_(dots).mul_(2) if plan.quadratic else d_first
    grad[:, :rows] += torch.bmm(d, qk[:, rows:])  # `baddbmm_` into a part of a tensor would go program by program
    grad[:, rows:] += torch.bmm(d.mT, qk[:, :rows])


def first_pairs(plan: Plan, qk: Tensor, coef: Coef, causal: Tensor) -> Iterator[Tensor]:
    """c_{t,i} (x . a_i) of the first layer, chunk by chunk `[P, C G, C]`: no weights are needed for it, so it is made
    for many chunks at once."""
    for block in blocks(plan, max(1, BLOCK_ELEMENTS // (plan.counts[0] * causal.numel()))):
        p, of_block = scores(plan, qk[block.here]), coef.part(block.here)
        p = p.square_() if plan.quadratic else p
        if coef.c is None:
            p.mul_(causal).mul_(of_block.theta[:, None])
        else:
            p.mul_(grouped(of_block.c, plan.groups))
        yield from block.cut(p)


def _read_chunk(net: Net, W, S, target, q, A, D, first, pairs, pushed, zs, ps):
    """f(W_t, q) before the LayerNorm, for the chunk's queries. `first` `[P, C G, C]`: x . a of the first layer, each
    times what of its delta is read. `pushed`: (a, delta) of the writes that the layers above read, to be weighted by
    `pairs` `[(P,) C G, C]`; `zs`: where to leave the z of all layers (the last is the result, `None`: anywhere); `ps`:
    and x . a of the upper ones."""
    x, last = q, len(W) - 1
    for i, w in enumerate(W):
        out = zs[i]
        y = torch.bmm(x, w, out=out)
        if A is not None:
            y = torch.mul(A, y, out=out) if target is None else torch.lerp(torch.bmm(x, target[i]), y, A, out=out)
        if S is not None:
            y = torch.addcmul(y, D, torch.bmm(x, S[i]), out=out)
        a, delta = pushed[i]
        p = pairs * torch.bmm(x, a.mT, out=ps[i]) if i else first
        y = torch.baddbmm(y, p, delta, alpha=-1, out=out)
        if i < last:
            x = activate(net.activation, y)


class Ends(NamedTuple):
    """How the state before a chunk enters the state behind it, `[P, 1, 1]` each: W_C = keep W_0 + D S_0, S_C = m
    S_0."""

    keep: Tensor | None
    D: Tensor | None
    m: Tensor | None

    @classmethod
    def of(cls, coef: Coef) -> "Ends":
        last = (None if x is None else x[:, -1] for x in (coef.A, coef.D))
        return cls(*(None if x is None else x[:, None, None] for x in (*last, coef.m_end)))


def write_chunk(W, S, target, ends: Ends, pushed, pushed_S, into=None):
    """Weights and momentum after the chunk: W_C = A W_0 + (1 - A) W_target + D S_0 - sum_i c_{C,i} g_i and S_C
    likewise. `pushed`, `pushed_S`: their sums' factors, see `weighted`. `into`: tensors (W, S) for the result, the
    old ones even; a write costs several passes over weights, and fresh memory costs as much as a pass."""
    new_W, new_S = [], None if pushed_S is None else []
    to_W, to_S = into or ([None] * len(W), None)
    keep, D, m = ends
    for i, (w, (x, y)) in enumerate(zip(W, pushed)):
        out = to_W[i]
        if keep is not None:
            out = w = torch.mul(keep, w, out=out) if target is None else torch.lerp(target[i], w, keep, out=out)
        if S is not None:
            out = w = torch.addcmul(w, D, S[i], out=out)
        new_W.append(torch.baddbmm(w, x.mT, y, alpha=-1, out=out))
        if pushed_S is not None:
            x, y = pushed_S[i]
            if S is None:
                new_S.append(-torch.bmm(x.mT, y))
            else:
                new_S.append(torch.mul(m, S[i], out=to_S and to_S[i]).baddbmm_(x.mT, y, alpha=-1))
    return new_W, new_S


def c_end(coef: Coef) -> Tensor:
    """c_{C,i}, `[P, C, 1]`: how much of each g_i is in the weights after the chunk."""
    return (coef.theta if coef.c is None else coef.c[:, -1])[..., None]


def s_end(coef: Coef) -> Tensor | None:
    """The same for the momentum."""
    return None if coef.s_end is None else coef.s_end[..., None]


def _causal(rows: int, C: int, like: Tensor) -> Tensor:
    """[C G, C]: 1 where the write comes no later than the read."""
    token = torch.arange(rows, device=like.device) // (rows // C)
    return (token[:, None] >= torch.arange(C, device=like.device)).to(like.dtype)


def cut(x: list[Tensor] | None, n: int) -> list[Tensor] | None:
    """The first n programs of each tensor."""
    return x if x is None or len(x[0]) == n else [y[:n] for y in x]


def copied(x: list[Tensor] | None) -> list[Tensor] | None:
    """Tensors of their own, to be written in place."""
    return None if x is None else [y.clone() for y in x]


class Tape(NamedTuple):
    """What the forward keeps for the backward: the parts of the networks that cost a product with the weights, for
    all programs, and the states before some of the chunks (`states` has their steps as keys)."""

    # [N H, C, width] z of the key's hidden layers, and at the top y with a LayerNorm, without one the error. Reads of
    # "chunk_start" see the same weights: [N H, C G + C, width], a token's queries and then its key
    key: list[Tensor]
    read: list[Tensor | None]  # [N H, C G, width] the same for reads of "current"; y only with a LayerNorm
    grad_act: list[Tensor]  # [N H, C, width] dl/da behind the hidden layers
    pairs: list[Tensor]  # [N H, C G, C] x . a of the upper layers, if that is small
    norm: list[Tensor]  # [N H, C] with a gradient bound: |a| of all layers, then |delta|
    states: dict[int, tuple[list[Tensor], list[Tensor] | None] | None]


def blank_tape(plan: Plan, qk: Tensor, W: list[Tensor], coef: Coef, ln, steps) -> Tape:
    """A tape for `scan` to fill, with the states before `steps`."""
    widths, (rows, C), every = [w.shape[2] for w in W], plan.rows(qk), whole(plan, len(qk))
    # x . a is dear where `a` is wide, and small where C is; with theta on a it would not be x . a
    wide = coef.c is not None or all(w.shape[1] > w.shape[2] for w in W[1:])
    read = [every.blank(qk, rows, n) for n in (widths if ln else widths[:-1])] if plan.current else []
    return Tape(
        [every.blank(qk, C if plan.current else rows + C, n) for n in widths],
        [*read, None] if plan.current and ln is None else read,
        [every.blank(qk, C, n) for n in widths[:-1]],
        [every.blank(qk, rows, C) for _ in widths[1:]] if plan.current and C <= W[0].shape[2] and wide else [],
        [every.blank(qk, C) for _ in 2 * widths] if plan.bound is not None else [],
        dict.fromkeys(steps),
    )


def offsets(plan: Plan, qk: Tensor, v: Tensor, ln) -> Tensor:
    """`inner_offset` of all chunks, [N H, C, V]."""
    k = qk[:, plan.rows(qk)[0] :]
    return inner_offset(plan.net, k, v, None if ln is None else whole(plan, len(k)).spread(ln[1]))


def scan(plan: Plan, qk, offset, coef, ln, target, xi, W, S, tape: Tape | None = None):
    """All chunks in order. Returns o `[N H, C G, V]`, the inner losses `[N H, C]` (or `None`) and the rows' final W,
    W_xi, S (lists, or `None`). qk: `[N H, C G + C, K]`, a chunk's queries and then its keys; offset: `offsets(...)`.

    `coef` is that of unbounded gradients. `tape`: to fill. Writes in place: not for autograd, see `ChunkScan`.
    """
    losses, ended, last, (rows, C), L = [], [], len(plan.counts) - 1, plan.rows(qk), len(W)
    q, k = qk.split([rows, C], 1)
    net, current, owned = plan.net, plan.current, False  # owned: W and S are this scan's to overwrite
    every = whole(plan, len(q))
    o = tape.read[-1] if tape is not None and current else None
    o = every.blank(q, rows, W[-1].shape[2]) if o is None else o
    none = [(None,) * L] * (last + 1)
    keys, reads, grad_acts, all_pairs = none, [(None,) * (L - 1) + (x,) for x in every.cut(o)], none, none
    if tape is not None:
        keys, grad_acts = every.cuts(tape.key), every.cuts(tape.grad_act)
        if current:
            reads = every.cuts([*tape.read[:-1], o])
        else:
            z_keys = every.cuts([x[:, rows:] for x in tape.key])
        if tape.pairs:
            all_pairs = every.cuts([None, *tape.pairs])
    sizes = [None] * 2 * L
    if plan.bound is not None:
        sizes = tape.norm if tape is not None else sizes
        length = norms(k, sizes[0])  # of the products, its square
        sizes = [length.square_() if plan.quadratic else length, *sizes[1:]]
    inputs, sizes = every.cuts([qk, q, k, offset]), every.cuts(sizes)
    coefs, written = [Coef(*x) for x in every.cuts(coef)], every.cuts([c_end(coef), s_end(coef)])
    ends = list(map(Ends._make, every.cuts(Ends.of(coef))))
    if current:
        causal = _causal(rows, C, q)
        firsts = first_pairs(plan, qk, coef, causal)
        A, D = (None if x is None else grouped(x, plan.groups)[..., None] for x in (coef.A, coef.D))
        scalars = every.cuts([A, D])
    for j, n in enumerate(plan.counts):
        (both_j, q_j, k_j, offset_j), key, read = inputs[j], keys[j], reads[j]
        if plan.quadratic:
            both_j = ring_products(both_j)
            q_j, k_j = both_j[:, :rows], both_j[:, rows:]
        if tape is not None and j in tape.states:
            tape.states[j] = W, S
        start = xi if plan.carried and j == 0 else W
        if j == 0 or n < plan.counts[j - 1]:
            gain, goal = None if ln is None else ln[0][:n], cut(target, n)
        if not current:
            a, z = pass_through(net, start, both_j, key)
            a = [x[:, rows:] for x in a]
            if tape is None:
                read[-1].copy_(z[-1][:, :rows])
                z = [x[:, rows:] for x in z]
            else:
                z = z_keys[j]
        else:
            a, z = pass_through(net, start, k_j, key)
        a, delta, error = inner_gradient(net, start, k_j, offset_j, gain, (a, z), grad_acts[j])
        c, (end, end_S) = coefs[j], written[j]
        first = next(firsts) if current else None
        if plan.bound is not None:
            of_a, of_delta = sizes[j][:L], sizes[j][L:]
            of_a = [of_a[0], *map(norms, a[1:], of_a[1:])]
            shrink = excess(of_a, list(map(norms, delta, of_delta)), plan.bound).reciprocal_()
            if current:
                first.mul_(shrink[:, None])
            c = c.shrunk(shrink)
            end, end_S = c_end(c), s_end(c)
        pushed = weighted(end, a, delta)
        if current:
            pairs, seen = (causal, pushed) if c.c is None else (grouped(c.c, plan.groups), list(zip(a, delta)))
            A, D = scalars[j]
            _read_chunk(net, W, S, goal, q_j, A, D, first, pairs, [(None, delta[0]), *seen[1:]], read, all_pairs[j])
        if plan.keep_loss:
            losses.append(0.5 * error.square().sum(-1))
        rest = 0 if j == last else plan.counts[j + 1]
        if plan.keep_state or j < last:
            final = plan.keep_state and rest < n
            pushed_S = None if end_S is None else weighted(end_S, a, delta)
            W, S = write_chunk(W, S, goal, ends[j], pushed, pushed_S, (W, S) if owned and not final else None)
            owned = tape is None or j + 1 not in tape.states
            if final:  # these rows end here
                xi_end = [x[rest:] for x in (W if plan.full is True else start)]
                if isinstance(plan.full, Tensor):
                    full = plan.full[rest:n, None, None]
                    xi_end = [torch.where(full, w[rest:], x) for w, x in zip(W, xi_end)]
                ended.append(([x[rest:] for x in W], xi_end, S and [x[rest:] for x in S]))
            if rest < n:
                W, S = cut(W, rest), cut(S, rest)
    final = [None if x[0] is None else [torch.cat(y[::-1]) for y in zip(*x)] for x in zip(*ended)] or [None] * 3
    if tape is not None and not current:
        o.copy_(tape.key[-1][:, :rows])
    if ln is not None:
        gain, bias = (every.spread(x) for x in ln)
        o = standardise(o, net.eps).h
        o = torch.addcmul(bias, gain, o, out=o)
    o = o.add_(q) if net.residual else o
    return o, every.stack(losses) if plan.keep_loss else None, *final


def end_gradients(plan: Plan, kept: int, n: int, run_W, run_S, ends, W):
    """Gradients of (W, S) behind a chunk: rows [0, kept) run on, rows [kept, n) ended here and get their final
    state's gradients. Also what the ended rows' W_xi adds to the chunk's start."""
    d_W, d_xi, d_S = ends
    if kept == n:
        return run_W, run_S, None
    if d_W is None:  # nobody asked for the final state
        if not kept:
            return [torch.zeros_like(w) for w in W], None, None
        run_W, run_S = (y and [F.pad(x, (0, 0, 0, 0, 0, n - kept)) for x in y] for y in (run_W, run_S))
        return run_W, run_S, None
    final_W, final_S, final_xi = ([x[kept:n] for x in y] if y is not None else None for y in (d_W, d_S, d_xi))
    full = plan.full[kept:n, None, None] if isinstance(plan.full, Tensor) else plan.full
    to_W = [torch.where(full, x, 0.0) if isinstance(full, Tensor) else x * full for x in final_xi]
    end_W = [x + y for x, y in zip(final_W, to_W)]
    end_xi = [F.pad(x - y, (0, 0, 0, 0, kept, 0)) for x, y in zip(final_xi, to_W)]
    if kept:
        end_W = [torch.cat([x, y]) for x, y in zip(run_W, end_W)]
        final_S = final_S and [torch.cat([x, y]) for x, y in zip(run_S, final_S)]
    return end_W, final_S if kept else copied(final_S), end_xi
