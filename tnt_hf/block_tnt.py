"""The outer backward of a few chunks in a row, by hand: the gradient of the reads, of the chunk-end update and of the
inner gradient, in closed form.

Axis legend
    C tokens per chunk   G query heads per memory head   L layers of the memory network
    P programs: grid rows x heads of a block's chunks   J chunks of a block

Only the gradient of the state, d W and d S, has to go from chunk to chunk; all that does not touch the weights is done
for the programs of a `Block` at once. Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .coefficients_tnt import Coef
from .features_tnt import through_ring_products
from .network_tnt import Standardised, standardise, through_standardise
from .plan_tnt import Block, Plan
from .rebuild_tnt import Rebuilt
from .scan_tnt import Ends, Tape, c_end, copied, cut, end_gradients, grouped, s_end, scores, through_scores, ungrouped


class Running(NamedTuple):
    """What goes from chunk to chunk: gradients of the state and of the carried W_xi, and (to undo writes) the
    weights."""

    d_W: list[Tensor] | None
    d_S: list[Tensor] | None
    d_xi: list[Tensor] | None
    W: list[Tensor] | None


class Backward(NamedTuple):
    """What all blocks share."""

    plan: Plan
    way: str  # to the weights before a chunk: "keep", "undo" or "replay"
    tape: Tape
    xi: list[Tensor] | None
    target: list[Tensor] | None
    ln: tuple[Tensor, Tensor] | None
    ends: list[list[Tensor] | None]  # gradients of the final W, W_xi, S
    grad: list[Tensor | None]  # to fill: of qk, v and the Coef
    d_target: list[Tensor] | None
    d_ln: list[Tensor] | None
    room: list[Tensor]  # like W, for what is needed for a moment: fresh memory costs as much as several passes


def _dot(x: Tensor, y: Tensor, room: Tensor, out: Tensor) -> None:
    """Inner product of each program's matrices, [P, K, V] -> [P]; `bmm` is many times slower here."""
    torch.sum(torch.mul(x, y, out=room).flatten(1), 1, out=out)


class BlockBackward:
    """Closed-form gradient of a block. Adds into `Backward`'s sums; `run` takes and returns the `Running`."""

    def __init__(self, back: Backward, block: Block, built: Rebuilt, d_o):
        self.back, self.block, self.built, self.q, self.d_o = back, block, built, built.x[0], d_o
        self.coef = coef = built.coef
        plan, a, delta = back.plan, built.a, built.delta
        self.L, self.C, self.rows, self.current = len(a), a[0].shape[1], self.q.shape[1], plan.current
        self.narrow = [x.shape[-1] <= y.shape[-1] for x, y in zip(a, delta)]  # a is the narrower factor
        self.grad = [None if x is None else x[block.here] for x in back.grad]
        self.plain = self.current and coef.A is None and coef.D is None
        self._reads()
        self._rooms()
        self._cuts()

    def _reads(self):
        """The reads, o = f(W_t, q) as a masked attention over the chunk's writes or f(W_xi, q): all of the top layer
        but its product with the weights."""
        built, block, plan, (x, a, delta) = self.built, self.block, self.back.plan, self.built[2:5]
        self.A = self.D = self.d_x = None
        self.d_a, self.d_delta = [None] * self.L, [None] * self.L
        self.top = self.d_o
        if built.ln is not None:
            normed = standardise(built.read_y, plan.net.eps)
            block.fold(self.back.d_ln[0], (self.d_o * normed.h).sum(1, keepdim=True))
            block.fold(self.back.d_ln[1], self.d_o.sum(1, keepdim=True))
            self.top = through_standardise(built.ln[0] * self.d_o, normed)
        if self.current:
            coef, G = self.coef, plan.groups
            c = coef.theta[:, None] * self.q.new_ones(self.C, self.C).tril() if coef.c is None else coef.c
            self.pairs, self.A, self.D = (grouped(y, G) for y in (c, coef.A, coef.D))
            self.A, self.D = (None if y is None else y[..., None] for y in (self.A, self.D))
            upper = built.pairs or [torch.bmm(y, z.mT) for y, z in zip(x[1:], a[1:])]
            self.scores = scores(plan, built.tokens)
            self.p = [self.scores.square() if plan.quadratic else self.scores, *upper]
            self.minus = [torch.mul(self.pairs, y).neg_() for y in self.p]
            g = torch.bmm(self.top, delta[-1].mT)
            d_p = torch.mul(self.pairs, g).neg_()
            self.d_pairs = g.mul_(self.p[-1])
            self.d_delta[-1] = torch.bmm(self.minus[-1].mT, self.top)
            if self.L > 1:
                self.d_a[-1], self.d_x = torch.bmm(d_p.mT, x[-1]), torch.bmm(d_p, a[-1])
            else:
                self.d_first = d_p  # which goes to q and k past their products, see `_finish`
        into = built.right[-1][:, : self.rows]
        into.copy_(self.top) if self.A is None else torch.mul(self.A, self.top, out=into)

    def _rooms(self):
        """What the chunks fill in."""
        block, built, q, L = self.block, self.built, self.q, self.L
        x, a, delta = built[2:5]

        def blank(like, wanted=True):
            return block.blank(like, *like.shape[1:]) if wanted else None

        self.fresh = [y is None for y in self.d_delta]  # not yet written
        self.fresh_a = [y is None for y in self.d_a]
        self.d_delta = [blank(y) if z is None else z for y, z in zip(delta, self.d_delta)]
        self.d_a = [blank(y, i or not self.narrow[i]) if z is None else z for i, (y, z) in enumerate(zip(a, self.d_a))]
        narrow = [y if first else z for y, z, first in zip(a, delta, self.narrow)]
        self.moved, self.moved_S = [blank(y) for y in narrow], [blank(y, self.coef.D is not None) for y in narrow]
        self.g = [block.blank(q, self.rows, self.C) for _ in range(L - 1)] if self.current else []
        below = [y[:, : self.rows] for y in built.right[:-1]] if self.A is None else [blank(y) for y in x[1:]]
        self.d_y = [*below, self.top]  # gradients of the layers' x W_t
        self.through_W, self.through_S = ([blank(y, z is not None) for y in x] for z in (self.A, self.D))
        self.d_qk = block.blank(built.left[0], *built.left[0].shape[1:]) if self.back.plan.quadratic else self.grad[0]
        # reads of chunk-start weights and inner gradients go through the same weights, in one product
        self.d_hidden = [] if self.current else [blank(y) for y in built.slope]
        self.dots = q.new_zeros(3, L, len(q))  # of the chunk-end gradients: d W . S, d S . S, d W . (W - target)

    def _cuts(self):
        """Everything per chunk: views that are made at once are cheap."""
        cut, cuts, built, coef, rows, C = self.block.cut, self.block.cuts, self.built, self.coef, self.rows, self.C
        a, delta, L = built.a, built.delta, self.L

        def ends(weight, pushed, moved):  # of a chunk-end sum -sum_i weight_i a_i^T delta_i, per layer
            if weight is None:
                return [None] * len(self.block.sizes)
            scaled = [x if narrow else y for (x, y), narrow in zip(pushed, self.narrow)]
            return list(zip(cut(-weight), cuts(scaled), cuts(moved)))

        self.ends_ = ends(c_end(coef), built.pushed, self.moved)
        self.ends_S_ = ends(s_end(coef), built.pushed_S, self.moved_S)
        keep, D, m = Ends.of(coef)
        self.state_ = cuts([D, m, keep, None if keep is None or self.back.target is None else 1 - keep])
        self.dots_ = [cuts(() if y is None else x.unbind(0)) for x, y in zip(self.dots, (D, D, keep))]
        self.A_, self.D_, self.d_x_ = map(cut, (self.A, self.D, self.d_x))
        self.pairs_ = cut(self.pairs if self.current and L > 2 else None)
        self.minus_ = cuts([x.mT for x in self.minus[:-1]] if self.current else ())
        self.x_ = cuts(built.x if self.D is not None or L > 2 else ())
        self.a_, self.delta_, self.right_ = map(cuts, (a, delta, built.right))
        self.left_ = cuts([x.mT for x in built.left])
        self.d_a_, self.d_delta_, self.g_ = map(cuts, (self.d_a, self.d_delta, self.g))
        self.d_y_ = cuts(self.d_y if self.current else ())
        self.through_W_, self.through_S_ = cuts(self.through_W), cuts(self.through_S)
        self.slope_, self.curve_ = cuts([x[:, rows:] for x in built.slope]), cuts(built.curve)
        self.read_slope_ = cuts([x[:, :rows] for x in built.slope] if self.current else ())
        self.into_ = cuts([x[:, :rows] for x in built.right[:-1]] if self.A is not None else ())  # A d_y
        self.d_z_ = cuts([x[:, rows : rows + C] for x in built.right])
        self.d_g_ = cuts([x[:, rows + C :] for x in built.left])
        self.along, self.pull_ = None, None
        if built.pull is not None:
            self.along = self.block.blank(a[0], self.C, 1)
            self.pull_ = list(zip(cut(self.along), cuts([*built.pull.to_a, *built.pull.to_delta])))
        self.fused = not self.current or (self.plain and not self.back.plan.carried)
        if self.fused:
            self.both_ = cuts([x[:, : rows + C] for x in (built.right if not self.current else built.right[:1])])
            self.qk_, self.slopes_ = cut(self.d_qk), cuts(() if self.current else built.slope)
            self.d_hidden_ = cuts([*self.d_hidden, *(x[:, rows:] for x in self.d_hidden)])
        else:
            self.q_, self.k_ = cut(self.d_qk[:, :rows]), cut(self.d_qk[:, rows:])
        if built.ln is not None:
            gain, normed, u = built.ln[0], built.normed, built.u
            u_h = (u * normed.h).mean(-1, True) * normed.inverse
            both = torch.stack([normed.h, delta[-1]], 1).mul_((normed.inverse / u.shape[-1])[:, None])
            self.norm_ = cuts([*normed, u, u_h, gain * gain, both])

    def run(self, run: Running, entries: list) -> Running:
        plan, tape, way = self.back.plan, self.back.tape, self.back.way
        d_W, d_S, d_xi, W = run
        for j in reversed(range(len(self.block.sizes))):
            n, step = self.block.sizes[j], self.block.steps[j]
            S = None
            if way == "replay":
                W, S = entries.pop()
            elif way == "keep":
                W, S = tape.states[step]
            rest = 0 if step == len(plan.counts) - 1 else plan.counts[step + 1]
            d_W, d_S, end_xi = end_gradients(plan, rest, n, d_W, d_S, self.back.ends, W or tape.states[step][0])
            d_W, d_S = self._chunk_end(j, n, W, S, d_W, d_S)  # all of d W, then all of W: one at a time stays in cache
            if way == "undo":
                if step in tape.states:
                    W = copied(tape.states[step][0])
                else:
                    scaled, a, delta = self.ends_[j][1], self.a_[j], self.delta_[j]
                    for i, w in enumerate(W):
                        w.baddbmm_(scaled[i].mT, delta[i]) if self.narrow[i] else w.baddbmm_(a[i].mT, scaled[i])
            carried = plan.carried and step == 0
            start = self.back.xi if carried else W
            if self.current:
                self._chunk_reads(j, n, W, S)
            if self.pull_ is not None:
                self._chunk_bound(j)
            self._chunk_inner(j, start)
            if carried:
                d_xi = [torch.zeros_like(w) for w in W]
            if carried and self.current:  # the reads saw W, the inner gradient W_xi
                for i, (x, y) in enumerate(zip(self.left_[j], self.right_[j])):
                    d_W[i].baddbmm_(x[..., : self.rows], y[:, : self.rows])
                    d_xi[i].baddbmm_(x[..., self.rows :], y[:, self.rows :])
            else:
                for dw, x, y in zip(d_xi if carried else d_W, self.left_[j], self.right_[j]):
                    dw.baddbmm_(x, y)
            if S is not None and self.current:
                for ds, x, d_y in zip(d_S, self.x_[j], self.d_y_[j]):
                    ds.baddbmm_(x.mT, self.D_[j] * d_y)
            if end_xi is not None:
                for x, y in zip(d_xi if carried else d_W, end_xi):
                    x += y
        self._finish()
        return Running(d_W, d_S, d_xi, W)

    def _chunk_end(self, j, n, W, S, end_W, end_S):
        """The chunk-end state W_C = A W_0 + (1 - A) W_target + D S_0 - sum_i c_{C,i} g_i and S_C. Returns d W_0, d
        S_0 (but for the reads and the inner gradient)."""
        target, (D, m, keep, rest), dots = self.back.target, self.state_[j], [x[j] for x in self.dots_]
        d_W, d_S = [], None if S is None else []
        for i, (dw, room) in enumerate(zip(end_W, cut(self.back.room, n))):
            self._through_end(j, i, dw, self.ends_[j], True)
            if end_S is not None:
                self._through_end(j, i, end_S[i], self.ends_S_[j], False)
            elif self.moved_S[i] is not None:
                self.ends_S_[j][2][i].zero_()
            if S is not None:
                _dot(dw, S[i], room, dots[0][i])
                if end_S is None:
                    ds = dw * D
                else:
                    _dot(end_S[i], S[i], room, dots[1][i])
                    ds = end_S[i].mul_(m).addcmul_(dw, D)
                d_S.append(ds)
            if keep is not None:
                moved = W[i] if target is None else torch.sub(W[i], target[i][:n], out=room)
                _dot(dw, moved, room, dots[2][i])
                if target is not None:
                    self.back.d_target[i][:n].addcmul_(rest, dw)
                dw = dw.mul_(keep)
            d_W.append(dw)
        return d_W, d_S

    def _through_end(self, j, i, dw, end, first):
        """-sum_i weight_i a_i^T delta_i in a state whose gradient is dw: into d a, d delta and (later) d weight."""
        (minus_weight, scaled, moved), d_a, d_delta = end, self.d_a_[j][i], self.d_delta_[j][i]
        scaled, m, fresh, fresh_a = scaled[i], moved[i], first and self.fresh[i], first and self.fresh_a[i]
        if self.narrow[i]:
            torch.bmm(self.delta_[j][i], dw.mT, out=m)
            d_delta.baddbmm_(scaled, dw, alpha=-1, beta=0 if fresh else 1)
            if d_a is not None:
                torch.mul(minus_weight, m, out=d_a) if fresh_a else d_a.addcmul_(minus_weight, m)
        else:
            torch.bmm(self.a_[j][i], dw, out=m)
            d_a.baddbmm_(scaled, dw.mT, alpha=-1, beta=0 if fresh_a else 1)
            torch.mul(minus_weight, m, out=d_delta) if fresh else d_delta.addcmul_(minus_weight, m)

    def _chunk_reads(self, j, n, W, S):
        """The reads' products with the weights, top to bottom, and their share of d a and d delta."""
        L, d_y_, d_a, d_delta = self.L, self.d_y_[j], self.d_a_[j], self.d_delta_[j]
        for i in reversed(range(L)):
            if self.fused and i == 0:
                break  # `_chunk_inner` has this product
            w, d_y = W[i].mT, d_y_[i]
            r = self.d_x_[j] if i == L - 1 else None
            if not self.plain:
                moved = self._through_state(j, i, n, d_y, w, S)
                r = moved if r is None else r.add_(moved)
            elif r is None:
                r = torch.bmm(d_y, w, out=None if i else self.q_[j])
            else:
                r.baddbmm_(d_y, w)
            if i == 0:
                if r is not self.q_[j]:
                    self.q_[j].copy_(r)
                break
            if i < L - 1:
                d_p = self.g_[j][i] * self.pairs_[j]
                r.baddbmm_(d_p, self.a_[j][i], alpha=-1)
                d_a[i].baddbmm_(d_p.mT, self.x_[j][i], alpha=-1)
            d_y = torch.mul(r, self.read_slope_[j][i - 1], out=d_y_[i - 1])
            if self.A is not None:
                torch.mul(self.A_[j], d_y, out=self.into_[j][i - 1])
            torch.bmm(d_y, self.delta_[j][i - 1].mT, out=self.g_[j][i - 1])
            d_delta[i - 1].baddbmm_(self.minus_[j][i - 1], d_y)

    def _through_state(self, j, i, n, d_y, w, S):
        """d x of the read x (A W_0 + (1 - A) W_target + D S_0); what d A and d D need is left in `through_*`."""
        target, r = self.back.target, torch.bmm(d_y, w, out=self.through_W_[j][i])
        if self.A is not None:
            if target is None:
                r = self.A_[j] * r
            else:
                pull = torch.bmm(d_y, target[i][:n].mT)
                r = pull.addcmul_(self.A_[j], r.sub_(pull))
        if S is not None:
            r.addcmul_(self.D_[j], torch.bmm(d_y, S[i].mT, out=self.through_S_[j][i]))
        elif self.D is not None:
            self.through_S_[j][i].zero_()
        return r

    def _chunk_bound(self, j):
        """Through the scale s of a gradient bound: s dL/ds is <delta, dL/d delta> over all layers, as every use of g_i
        is linear in delta_i."""
        (along, shares), delta, d_delta = self.pull_[j], self.delta_[j], self.d_delta_[j]
        dot = delta[0] * d_delta[0]
        for y, d in zip(delta[1:], d_delta[1:]):
            dot = dot.addcmul_(y, d) if y.shape == dot.shape else torch.cat([dot, y * d], -1)
        torch.sum(dot, -1, keepdim=True, out=along)
        for x, d, share in zip((*self.a_[j], *delta), (*self.d_a_[j], *d_delta), shares):
            if d is not None:
                d.addcmul_(x, share * along, value=-1)

    def _chunk_inner(self, j, start):
        """The inner gradient: a and delta as functions of k, v and W_xi. Fills d_z and d_g, leaves d q and d k."""
        L, d_z, d_g, slope = self.L, self.d_z_[j], self.d_g_[j], self.slope_[j]
        d_a, d_delta = self.d_a_[j], self.d_delta_[j]
        for i in range(L - 1):
            torch.mul(d_delta[i], slope[i], out=d_g[i + 1])
            if self.current:
                torch.mul(d_delta[i], self.curve_[j][i], out=d_z[i])
            d_delta[i + 1].baddbmm_(d_g[i + 1], start[i + 1])
        lam = d_delta[-1]
        if self.built.ln is None:
            d_z[-1].copy_(lam)
        else:
            (*normed, u, u_h, gain2, both), h = self.norm_[j], self.norm_[j][1]
            normed = Standardised(*normed)
            along_h, along_top = (lam[:, None] * both).sum(-1, True).unbind(1)
            d_h = through_standardise(lam, normed).mul_(gain2)
            d_h.addcmul_(lam, u_h, value=-1).addcmul_(u, along_h, value=-1)
            torch.addcmul(through_standardise(d_h, normed), h, along_top, value=-1, out=d_z[-1])
        for i in reversed(range(1, L)):
            if self.current:
                d_a[i].baddbmm_(d_z[i], start[i].mT)
                d_z[i - 1].addcmul_(d_a[i], slope[i - 1])
            else:
                d_hidden = torch.bmm(self.both_[j][i], start[i].mT, out=self.d_hidden_[j][i - 1])
                self.d_hidden_[j][L + i - 2].add_(d_a[i])
                torch.mul(d_hidden, self.slopes_[j][i - 1], out=self.both_[j][i - 1])
                d_z[i - 1].addcmul_(d_delta[i - 1], self.curve_[j][i - 1])
        if self.fused:
            torch.bmm(self.both_[j][0], start[0].mT, out=self.qk_[j])
        else:
            torch.bmm(d_z[0], start[0].mT, out=self.k_[j])

    def _finish(self):
        """What only leaves the block, for all its chunks."""
        block, built, coef, L = self.block, self.built, self.coef, self.L
        G, net, (x, a, delta) = self.back.plan.groups, self.back.plan.net, built[2:5]
        (d_q, d_k), d_v, d_coef = self.d_qk.split([self.rows, self.C], 1), self.grad[1], Coef(*self.grad[2:])
        if self.d_a[0] is not None:
            d_k += self.d_a[0]
        ends = [(c_end(coef), d_coef.theta if coef.c is None else d_coef.c[:, -1], self.moved)]
        if coef.s_end is not None:
            ends.append((s_end(coef), d_coef.s_end, self.moved_S))
        for d, dots in zip((d_coef.D, d_coef.m_end, d_coef.A), self.dots.sum(1)):
            if d is not None:
                (d if d.dim() == 1 else d[:, -1]).add_(dots)
        for i in range(L):
            for weight, d_weight, moved in ends:
                d_weight.sub_(((a if self.narrow[i] else delta)[i] * moved[i]).sum(-1))
                if i == 0 and self.d_a[0] is None:
                    d_k.addcmul_(weight, moved[0], value=-1)
            if self.A is not None:
                d_coef.A.add_(ungrouped((self.through_W[i] * x[i]).sum(-1), G))
                if self.back.target is not None:
                    d_y = self.d_y[i]
                    block.fold_product(self.back.d_target[i], x[i], d_y - self.A * d_y)
            if self.D is not None:
                d_coef.D.add_(ungrouped((self.through_S[i] * x[i]).sum(-1), G))
            if self.current and i < L - 1:
                self.d_pairs.addcmul_(self.g[i], self.p[i])
        if self.current:
            d_pairs = ungrouped(self.d_pairs, G)
            d_coef.theta.sub_(d_pairs.tril_().sum(1)) if coef.c is None else d_coef.c.sub_(d_pairs)
        d_error = self.d_delta[-1]
        if built.ln is not None:
            d_u = through_standardise(self.d_delta[-1], built.normed)
            d_error = built.ln[0] * d_u
            block.fold(self.back.d_ln[0], (d_u * built.error + d_error * built.normed.h).sum(1, keepdim=True))
            block.fold(self.back.d_ln[1], d_error.sum(1, keepdim=True))
        if built.pull is not None:
            if self.d_a[0] is None:
                d_k.addcmul_(a[0], self.along * built.pull.to_a[0], value=-1)
            scale = built.pull.scale
            for d, s in ((d_coef.theta, scale), (d_coef.c, scale[:, None]), (d_coef.s_end, scale)):
                if d is not None:
                    d *= s
        torch.neg(d_error, out=d_v)
        if net.residual:
            d_q += self.d_o
            d_k += d_error
        if self.back.plan.quadratic:
            self.grad[0].copy_(through_ring_products(self.d_qk, built.tokens))
        if self.current:
            d_first = self.d_first if L == 1 else (self.g[0] * self.pairs).neg_()
            through_scores(self.back.plan, self.grad[0], d_first, self.scores, built.tokens)
