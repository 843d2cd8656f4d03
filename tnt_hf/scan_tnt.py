"""The dual form of one memory: a chunk of tokens as matrix products, its scan over chunks, and the outer backward by
hand.

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

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .coefficients_tnt import Coef
from .network_tnt import (
    Net,
    activate,
    curvature,
    inner_gradient,
    residual_target,
    standardise,
    through_activation,
    through_standardise,
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


def _grouped(x: Tensor | None, groups: int) -> Tensor | None:
    """[P, C, ...] -> [P, C G, ...]: a token's query heads are extra rows of its chunk."""
    return x if x is None or groups == 1 else x.repeat_interleave(groups, 1)


def _ungrouped(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def _pair_weights(plan: Plan, coef: Coef, C: int) -> Tensor:
    c = coef.theta[:, None, :].expand(-1, C, C).tril() if coef.c is None else coef.c
    return _grouped(c, plan.groups)


def _read_chunk(plan: Plan, base, S, target, start, q, coef: Coef, a, delta, ln):
    """o `[P, C G, V]` for the chunk's queries, and per layer what the backward needs."""
    net, tape, x = plan.net, [], q
    if plan.current:
        pairs = _pair_weights(plan, coef, a[0].shape[1])
        A = None if coef.A is None else _grouped(coef.A, plan.groups)[..., None]
        D = None if coef.D is None else _grouped(coef.D, plan.groups)[..., None]
    for i, w in enumerate(base if plan.current else start):
        y, kept, moved, p = torch.bmm(x, w), None, None, None
        if plan.current:
            if A is not None:
                kept = y
                if target is None:
                    y = A * kept
                else:
                    pull = torch.bmm(x, target[i])
                    kept = y - pull
                    y = torch.addcmul(pull, A, kept)
            if S is not None:
                moved = torch.bmm(x, S[i])
                y = torch.addcmul(y, D, moved)
            p = torch.bmm(x, a[i].transpose(1, 2))
            y = torch.baddbmm(y, pairs * p, delta[i], alpha=-1)
        tape.append((x, kept, moved, p, y))
        x = activate(net.activation, y) if i < len(base) - 1 else y
    normed = None
    if ln is not None:
        normed = standardise(y, net.eps)
        y = torch.addcmul(ln[1], ln[0], normed.h)
    return (y + q if net.residual else y), (tape, normed)


def _write_chunk(base, S, target, coef: Coef, a, delta):
    """Weights and momentum after the chunk: W_C = A W_0 + (1 - A) W_target + D S_0 - sum_i c_{C,i} g_i and S_C
    likewise."""
    c_end = coef.theta if coef.c is None else coef.c[:, -1]
    new, new_S = [], None if coef.s_end is None else []
    for i, w in enumerate(base):
        if coef.A is not None:
            keep = coef.A[:, -1, None, None]
            w = keep * w if target is None else torch.lerp(target[i], w, keep)
        if S is not None:
            w = torch.addcmul(w, coef.D[:, -1, None, None], S[i])
        new.append(torch.baddbmm(w, (c_end[..., None] * a[i]).transpose(1, 2), delta[i], alpha=-1))
        if new_S is not None:
            push = (coef.s_end[..., None] * a[i]).transpose(1, 2)
            new_S.append(
                -torch.bmm(push, delta[i])
                if S is None
                else torch.baddbmm(coef.m_end[:, None, None] * S[i], push, delta[i], alpha=-1)
            )
    return new, new_S


def _cut(x, n):
    return None if x is None else [y[:n] for y in x]


def scan(plan: Plan, q, k, v, coef, ln, target, xi, W, S, bound=None, checkpoints=None):
    """All chunks in order. Returns o `[N H, C G, V]`, the inner losses `[N H, C]` (or `None`) and the rows' final W,
    W_xi, S (lists, or `None`).

    `coef` is a `Coef`, or a `BoundedCoef` with a gradient `bound`. `checkpoints`: {step: None}, to fill.
    """
    reads, losses, ended, last = [], [], [], len(plan.counts) - 1
    inner_target = residual_target(plan.net, k, v)
    for j, (n, first) in enumerate(zip(plan.counts, plan.starts)):
        here = slice(first, first + n)
        if checkpoints is not None and j in checkpoints:
            checkpoints[j] = (W, S)
        start = xi if plan.carried and j == 0 else W
        norm, goal = _cut(ln, n), _cut(target, n)
        a, delta, error, _ = inner_gradient(plan.net, start, k[here], inner_target[here], norm)
        c = coef.part(here) if bound is None else coef.part(here, a, delta, bound)
        reads.append(_read_chunk(plan, W, S, goal, start, q[here], c, a, delta, norm)[0])
        if plan.keep_loss:
            losses.append(0.5 * error.detach().square().sum(-1))
        rest = 0 if j == last else plan.counts[j + 1]
        if plan.keep_state or j < last:
            W, S = _write_chunk(W, S, goal, c, a, delta)
            if plan.keep_state and rest < n:  # these rows end here
                xi_end = [x[rest:] for x in (W if plan.full is True else start)]
                if isinstance(plan.full, Tensor):
                    full = plan.full[rest:n, None, None]
                    xi_end = [torch.where(full, w[rest:], x) for w, x in zip(W, xi_end)]
                ended.append(([x[rest:] for x in W], xi_end, S and [x[rest:] for x in S]))
            W, S = _cut(W, rest), _cut(S, rest)
    final = [None if x[0] is None else [torch.cat(y[::-1]) for y in zip(*x)] for x in zip(*ended)] or [None] * 3
    return _join(plan, reads, len(q)), _join(plan, losses, len(q)) if plan.keep_loss else None, *final


def _join(plan: Plan, pieces: list[Tensor], total: int) -> Tensor:
    """Chunk results in the grid's order; a dense grid has unused chunks behind the last shard's end."""
    ends = [*plan.starts[1:], total]
    return torch.cat(
        [
            F.pad(x, (0, 0) * (x.dim() - 1) + (0, b - a - len(x))) if b - a > len(x) else x
            for x, a, b in zip(pieces, plan.starts, ends)
        ]
    )


# ------------------------------------------------------------------------------------ the scan with a backward by hand


class ChunkScan(torch.autograd.Function):
    """`scan` with O(sqrt(steps)) kept states: backward goes through segments of chunks from the last to the first,
    replays the writes of one segment, then takes each chunk's gradient in closed form (through the reads, the
    chunk-end update and the inner gradient)."""

    @staticmethod
    def forward(ctx, plan, depth, q, k, v, theta, c, A, D, s_end, m_end, gain, bias, *states):
        coef, ln = Coef(theta, c, A, D, s_end, m_end), None if gain is None else (gain, bias)
        W, xi, S, target = (
            None if x[0] is None else list(x) for x in (states[i * depth : (i + 1) * depth] for i in range(4))
        )
        stride = math.isqrt(len(plan.counts) - 1) + 1
        checkpoints = dict.fromkeys(range(0, len(plan.counts), stride))
        o, loss, *final = scan(
            plan, q, k, v, coef, ln, target, xi, W, S, checkpoints=checkpoints if any(ctx.needs_input_grad) else None
        )
        ctx.save_for_backward(q, k, v, *coef, gain, bias, *states)
        ctx.plan, ctx.depth, ctx.checkpoints, ctx.stride = plan, depth, checkpoints, stride
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        return o, loss, *(y for x in final for y in (x or [None] * depth))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, _, *d_final):
        plan, L = ctx.plan, ctx.depth
        q, k, v, *rest = ctx.saved_tensors
        coef, (gain, bias), states = Coef(*rest[:6]), rest[6:8], rest[8:]
        ln = None if gain is None else (gain, bias)
        W0, xi, S0, target = (None if x[0] is None else x for x in (states[i * L : (i + 1) * L] for i in range(4)))
        d_W, d_xi, d_S = (None if x[0] is None else x for x in (d_final[i * L : (i + 1) * L] for i in range(3)))
        grad = [torch.zeros_like(x) if x is not None else None for x in (q, k, v, *coef)]
        d_target = None if target is None else [torch.zeros_like(x) for x in target]
        d_ln = None if ln is None else [torch.zeros_like(x) for x in ln]
        d_start = [None] * L
        inner_target = residual_target(plan.net, k, v)

        run_W = run_S = None  # gradients of the state behind the chunk, for the rows that run on
        for begin in reversed(ctx.checkpoints):
            replay, (W, S) = [], ctx.checkpoints[begin]
            ctx.checkpoints[begin] = None
            steps = range(begin, min(begin + ctx.stride, len(plan.counts)))
            for j in steps:
                n, here = plan.counts[j], slice(plan.starts[j], plan.starts[j] + plan.counts[j])
                W, S = _cut(W, n), _cut(S, n)
                start = xi if plan.carried and j == 0 else W
                inner = inner_gradient(plan.net, start, k[here], inner_target[here], _cut(ln, n))
                replay.append((start, W, S, inner))
                if j < steps[-1]:
                    W, S = _write_chunk(W, S, _cut(target, n), coef.part(here), inner[0], inner[1])
            for j in reversed(steps):
                n, here = plan.counts[j], slice(plan.starts[j], plan.starts[j] + plan.counts[j])
                kept = 0 if j == len(plan.counts) - 1 else plan.counts[j + 1]
                start, W, S, inner = replay.pop()
                end_W, end_S, end_xi = _end_gradients(plan, kept, n, run_W, run_S, d_W, d_S, d_xi, W)
                run_W, run_S, run_start = _chunk_backward(
                    plan, here, start, W, S, _cut(target, n), _cut(ln, n), q[here], k[here], v[here], coef.part(here),
                    inner, d_o[here], end_W, end_S, grad, _cut(d_target, n), _cut(d_ln, n),
                )  # fmt: skip
                if end_xi is not None:
                    for x, y in zip(run_start, end_xi):
                        x += y
                if start is xi:
                    d_start = run_start
        d_S0 = [None] * L if S0 is None else run_S
        none = [None] * L
        return None, None, *grad, *(d_ln or (None, None)), *run_W, *d_start, *d_S0, *(d_target or none)


def _end_gradients(plan: Plan, kept: int, n: int, run_W, run_S, d_W, d_S, d_xi, W):
    """Gradients of (W, S) behind a chunk: rows [0, kept) run on, rows [kept, n) ended here and get their final
    state's gradients."""
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
    return end_W, final_S, end_xi


def _chunk_backward(
    plan, here, start, W, S, target, ln, q, k, v, coef, inner, d_o, end_W, end_S, grad, d_target, d_ln
):
    """Closed-form gradient of one chunk, given those of its end state (consumed in place). Adds into `grad` (slices
    `here`), `d_target` and `d_ln`; returns d W_0, d S_0 and d W_xi (the same tensors as d W_0 where W_xi is W_0)."""
    net, L, G, C = plan.net, len(W), plan.groups, k.shape[1]
    a, delta, error, tape = inner
    d_q, d_k, d_v, d_theta, d_c, d_A, d_D, d_s, d_m = (None if x is None else x[here] for x in grad)

    # the chunk-end state
    c_end, d_c_end = (coef.theta, d_theta) if coef.c is None else (coef.c[:, -1], d_c[:, -1])
    d_a, d_delta, d_W, d_S = [], [], [], None if S is None else []
    for i, dw in enumerate(end_W):
        m = torch.bmm(delta[i], dw.transpose(1, 2))
        d_c_end -= (a[i] * m).sum(-1)
        d_a.append(m.mul_(-c_end[..., None]))
        d_delta.append(torch.bmm(a[i], dw).mul_(-c_end[..., None]))
        if end_S is not None:
            m = torch.bmm(delta[i], end_S[i].transpose(1, 2))
            d_s -= (a[i] * m).sum(-1)
            d_a[i].addcmul_(coef.s_end[..., None], m, value=-1)
            d_delta[i].addcmul_(coef.s_end[..., None], torch.bmm(a[i], end_S[i]), value=-1)
        if S is not None:
            d_D[:, -1] += (dw * S[i]).sum((1, 2))
            d_S.append(coef.D[:, -1, None, None] * dw)
            if end_S is not None:
                d_S[i].addcmul_(coef.m_end[:, None, None], end_S[i])
                d_m += (end_S[i] * S[i]).sum((1, 2))
        if coef.A is not None:
            keep = coef.A[:, -1, None, None]
            d_A[:, -1] += (dw * (W[i] if target is None else W[i] - target[i])).sum((1, 2))
            if target is not None:
                d_target[i].addcmul_(1 - keep, dw)
            dw = dw.mul_(keep)
        d_W.append(dw)
    d_start = d_W if start is W else [torch.zeros_like(x) for x in W]

    # the reads: o = f(W_t, q) as a masked attention over the chunk's writes, or f(W_xi, q)
    reads, normed = _read_chunk(plan, W, S, target, start, q, coef, a, delta, ln)[1]
    dy = d_o
    if ln is not None:
        d_ln[0] += (d_o * normed.h).sum(1, keepdim=True)
        d_ln[1] += d_o.sum(1, keepdim=True)
        dy = through_standardise(ln[0] * d_o, normed)
    pairs = _pair_weights(plan, coef, C) if plan.current else None
    A = None if coef.A is None or not plan.current else _grouped(coef.A, G)[..., None]
    D = None if coef.D is None or not plan.current else _grouped(coef.D, G)[..., None]
    d_pairs = None
    for i in reversed(range(L)):
        x, kept, moved, p, _ = reads[i]
        if not plan.current:
            d_start[i].baddbmm_(x.transpose(1, 2), dy)
            d_x = torch.bmm(dy, start[i].transpose(1, 2))
        else:
            g = torch.bmm(dy, delta[i].transpose(1, 2))
            d_p = pairs * g
            d_pairs = g.mul_(p) if d_pairs is None else d_pairs.addcmul_(g, p)
            d_delta[i].baddbmm_((pairs * p).transpose(1, 2), dy, alpha=-1)
            d_a[i].baddbmm_(d_p.transpose(1, 2), x, alpha=-1)
            dy_W = dy if A is None else A * dy
            d_W[i].baddbmm_(x.transpose(1, 2), dy_W)
            d_x = torch.bmm(dy_W, W[i].transpose(1, 2)).baddbmm_(d_p, a[i], alpha=-1)
            if A is not None:
                d_A += _ungrouped((dy * kept).sum(-1), G)
                if target is not None:
                    dy_T = dy - dy_W
                    d_target[i].baddbmm_(x.transpose(1, 2), dy_T)
                    d_x.baddbmm_(dy_T, target[i].transpose(1, 2))
            if S is not None:
                d_D += _ungrouped((dy * moved).sum(-1), G)
                d_S[i].baddbmm_(x.transpose(1, 2), D * dy)
                d_x.baddbmm_(D * dy, S[i].transpose(1, 2))
        dy = through_activation(net.activation, d_x, reads[i - 1][4]) if i else d_x
    torch.add(dy, d_o, out=d_q) if net.residual else d_q.copy_(dy)
    if plan.current:
        d_pairs = _ungrouped(d_pairs, G)
        if coef.c is None:
            d_theta -= d_pairs.tril_().sum(1)
        else:
            d_c -= d_pairs

    # the inner gradient: a and delta as functions of k, v and W_xi
    z, grad_act, normed, u = tape
    d_z = [None] * L
    for i in range(L - 1):
        d_g = through_activation(net.activation, d_delta[i], z[i])
        d_z[i] = d_delta[i].mul_(grad_act[i]).mul_(curvature(net.activation, z[i]))
        d_delta[i + 1].baddbmm_(d_g, start[i + 1])
        d_start[i + 1].baddbmm_(d_g.transpose(1, 2), delta[i + 1])
    d_error = d_z[-1] = d_delta[-1]
    if ln is not None:
        lam, h, inverse = d_delta[-1], normed.h, normed.inverse
        d_u = through_standardise(lam, normed)
        d_error = ln[0] * d_u
        d_h = ln[0] * d_error - (lam * (u * h).mean(-1, True) + u * (lam * h).mean(-1, True)) * inverse
        d_s_norm = (lam * delta[-1]).mean(-1, True) * inverse
        d_z[-1] = through_standardise(d_h, normed) - d_s_norm * h
        d_ln[0] += (d_u * error + d_error * h).sum(1, keepdim=True)
        d_ln[1] += d_error.sum(1, keepdim=True)
    torch.neg(d_error, out=d_v)
    for i in reversed(range(L)):
        d_a[i].baddbmm_(d_z[i], start[i].transpose(1, 2))
        d_start[i].baddbmm_(a[i].transpose(1, 2), d_z[i])
        if i:
            d_z[i - 1] += through_activation(net.activation, d_a[i], z[i - 1])
    torch.add(d_a[0], d_error, out=d_k) if net.residual else d_k.copy_(d_a[0])
    return d_W, d_S, d_start
