"""A block's networks as the outer backward sees them, from what the forward left on its tape: elementwise work only.

Axis legend
    C tokens per chunk   G query heads per memory head   L layers of the memory network
    P programs: grid rows x heads of a block's chunks

Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .coefficients_tnt import Coef
from .features_tnt import ring_products
from .network_tnt import Standardised, exceeds, excess, slopes, standardise, through_standardise
from .plan_tnt import Block, Plan
from .scan_tnt import Tape, c_end, s_end, weighted


class Pull(NamedTuple):
    """A gradient bound as it is met by the outer backward: g_i is scaled by `scale` `[P, C]`, and of -s_i dL/ds_i
    `to_a` a and `to_delta` delta, `[P, C, 1]`, flow into the a and delta of each layer."""

    scale: Tensor
    to_a: list[Tensor]
    to_delta: list[Tensor]


class Rebuilt(NamedTuple):
    """A block's networks, from the tape and elementwise functions. d W_i of a chunk is one product left_i^T right_i
    over all its rank-one terms, (x, d_y) of the reads, (a, d_z) and (d_g, delta): x, a and delta are views into these
    two."""

    left: list[Tensor]  # [P, C G + C (+ C), d_in] rows x, a, d_g (no d_g in the first layer, which is qk's)
    right: list[Tensor]  # [P, C G + C (+ C), d_out] rows d_y, d_z, delta
    x: list[Tensor]  # layer inputs of the read
    a: list[Tensor]
    delta: list[Tensor]
    slope: list[Tensor]  # [P, C G + C, width] phi'(z) of the hidden layers, read and key
    curve: list[Tensor]  # dl/da phi''(z)
    read_y: Tensor | None  # f(W, q) before the LayerNorm
    pairs: list[Tensor]  # x . a of the upper layers, if the tape has it
    error: Tensor
    normed: Standardised | None
    u: Tensor | None  # dl/dh
    ln: list[Tensor] | None
    tokens: Tensor  # [P, C G + C, K] q and k: left_1, or what it is the products of
    pull: Pull | None  # with a gradient bound
    coef: Coef  # of the bounded gradients
    pushed: list[tuple[Tensor, Tensor]]  # factors of what the chunks write to W, see `weighted`
    pushed_S: list[tuple[Tensor, Tensor]] | None


def rebuild(plan: Plan, block: Block, tape: Tape, L: int, qk, offset, ln, coef: Coef) -> Rebuilt:
    """A block's networks from what its chunks left on the tape: elementwise work only."""
    tokens, offset, coef = qk[block.here], offset[block.here], coef.part(block.here)
    ln = None if ln is None else [block.spread(x) for x in ln]
    (rows, C), name = plan.rows(qk), plan.net.activation
    both = rows + C
    key, read, grad_act, pairs, norm = ([x if x is None else x[block.here] for x in y] for y in tape[:-1])
    hidden = zip(read[:-1], key) if plan.current else zip(key[:-1])
    top, read_y = key[-1] if plan.current else key[-1][:, rows:], read[-1] if plan.current else key[-1][:, :rows]
    left = [ring_products(tokens) if plan.quadratic else tokens]
    q, k = left[0][:, :rows], left[0][:, rows:]
    x, a, delta, slope, curve, right = [q], [k], [], [], [], []
    for i, z in enumerate(hidden):
        width = z[0].shape[-1]
        left.append(q.new_empty(len(q), both + C, width))
        right.append(q.new_empty(len(q), both + (C if i else 0), width))
        x.append(left[-1][:, :rows])
        a.append(left[-1][:, rows:both])
        slope_, curve_ = slopes(name, z, left[-1][:, :both], grad_act[i])
        slope.append(slope_)
        curve.append(curve_)
        delta.append(torch.mul(grad_act[i], slope_[:, rows:], out=right[-1][:, both:] if i else None))
    normed = u = None
    error = last = top
    if ln is not None:
        normed = standardise(top, plan.net.eps)
        error = torch.addcmul(offset, ln[0], normed.h)
        u = ln[0] * error
        last = through_standardise(u, normed)
    delta.append(last)
    right.append(q.new_empty(len(q), both + (C if L > 1 else 0), last.shape[-1]))
    if L > 1:
        right[-1][:, both:] = last
    pull = None if plan.bound is None else bound_pull(norm[:L], norm[L:], plan.bound)
    coef = coef if pull is None else coef.shrunk(pull.scale)
    pushed = weighted(c_end(coef), a, delta)
    pushed_S = None if coef.s_end is None else weighted(s_end(coef), a, delta)
    return Rebuilt(
        left, right, x, a, delta, slope, curve, read_y, pairs, error, normed, u, ln, tokens, pull, coef,
        pushed, pushed_S,
    )  # fmt: skip


def bound_pull(a: list[Tensor], delta: list[Tensor], bound: float) -> Pull:
    """What a gradient bound adds to the backward, from the norms. With e^2 = sum_l |a_l|^2 |delta_l|^2 / bound^2 the
    scale of g is s = 1 / e where e `exceeds` 1, and dL = -(s dL/ds) d(e^2) / 2 e^2."""
    e = excess(a, delta, bound)
    share = torch.where(exceeds(e), 1 / (e * bound), 0.0)
    to_a, to_delta = ([(share * x).square_()[..., None] for x in sizes] for sizes in (delta, a))
    return Pull(e.reciprocal(), to_a, to_delta)
