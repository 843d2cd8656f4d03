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
import torch.nn.functional as F
from torch import Tensor

from .coefficients_tnt import Coef
from .network_tnt import Standardised, standardise, through_standardise
from .scan_tnt import Block, Plan, Tape, c_end, copied, grouped, ungrouped, weighted


class Rebuilt(NamedTuple):
    """A block's networks, from the tape and elementwise functions. d W_i of a chunk is one product left_i^T right_i
    over all its rank-one terms, (x, d_y) of the reads, (a, d_z) and (d_g, delta): x, a and delta are views into these
    two."""

    left: list[Tensor]  # [P, C G + C (+ C), d_in] rows x, a, d_g (no d_g in the first layer)
    right: list[Tensor]  # [P, C G + C (+ C), d_out] rows d_y, d_z, delta
    x: list[Tensor]  # layer inputs of the read
    a: list[Tensor]
    delta: list[Tensor]
    slope: list[Tensor]  # phi'(z) of the hidden layers
    curve: list[Tensor]  # dl/da phi''(z)
    read_slope: list[Tensor]
    read_y: Tensor  # f(W, q) before the LayerNorm
    pairs: list[Tensor]  # x . a of the upper layers, if the tape has it
    error: Tensor
    normed: Standardised | None
    u: Tensor | None  # dl/dh
    ln: list[Tensor] | None


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
    grad: list[Tensor | None]  # to fill: of q, k, v and the Coef
    d_target: list[Tensor] | None
    d_ln: list[Tensor] | None


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


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of each program's matrices, [P, K, V] -> [P]; `bmm` is many times slower here."""
    return (x * y).flatten(1).sum(1)


class BlockBackward:
    """Closed-form gradient of a block. Adds into `Backward`'s sums; `run` takes and returns the `Running`."""

    def __init__(self, back: Backward, block: Block, built: Rebuilt, q, d_o, coef: Coef):
        self.back, self.block, self.built, self.q, self.d_o, self.coef = back, block, built, q, d_o, coef
        plan, a, delta = back.plan, built.a, built.delta
        self.L, self.J, self.C, self.rows, self.current = (
            len(a),
            len(block.sizes),
            a[0].shape[1],
            q.shape[1],
            plan.current,
        )
        self.narrow = [x.shape[-1] <= y.shape[-1] for x, y in zip(a, delta)]  # a is the narrower factor
        self.grad = [None if x is None else x[block.here] for x in back.grad]
        self.plain = self.current and coef.A is None and coef.D is None
        self.A = self.D = self.d_pairs = None
        self._reads()
        self._cuts()

    def _reads(self):
        """The reads, o = f(W_t, q) as a masked attention over the chunk's writes or f(W_xi, q): all of the top layer
        but its product with the weights."""
        built, block, plan, (x, a, delta) = self.built, self.block, self.back.plan, self.built[2:5]
        self.top = self.d_o
        if built.ln is not None:
            normed = standardise(built.read_y, plan.net.eps)
            block.fold(self.back.d_ln[0], (self.d_o * normed.h).sum(1, keepdim=True))
            block.fold(self.back.d_ln[1], self.d_o.sum(1, keepdim=True))
            self.top = through_standardise(built.ln[0] * self.d_o, normed)
        self.d_a = self.d_x = None
        self.d_delta = torch.zeros_like(delta[-1])
        if self.current:
            coef, G = self.coef, plan.groups
            c = coef.theta[:, None, :].expand(-1, self.C, self.C).tril() if coef.c is None else coef.c
            self.pairs, self.A, self.D = (grouped(y, G) for y in (c, coef.A, coef.D))
            self.A, self.D = (None if y is None else y[..., None] for y in (self.A, self.D))
            upper = built.pairs or [torch.bmm(y, z.transpose(1, 2)) for y, z in zip(x[1:], a[1:])]
            self.p = [torch.bmm(x[0], a[0].transpose(1, 2)), *upper]
            self.minus = [torch.mul(self.pairs, y).neg_() for y in self.p]
            g = torch.bmm(self.top, delta[-1].transpose(1, 2))
            d_p = torch.mul(self.pairs, g).neg_()
            self.d_pairs = g.mul_(self.p[-1])
            self.d_delta = torch.bmm(self.minus[-1].transpose(1, 2), self.top)
            self.d_a, self.d_x = torch.bmm(d_p.transpose(1, 2), x[-1]), torch.bmm(d_p, a[-1])
        into = built.right[-1][:, : self.rows]
        into.copy_(self.top) if self.A is None else torch.mul(self.A, self.top, out=into)

    def _cuts(self):
        """Everything per chunk: a loop over views made here is a third faster than slicing as it goes."""
        block, built, J, rows, C = self.block, self.built, self.J, self.rows, self.C

        def chunks(tensors):  # per chunk, the parts of the tensors
            return list(zip(*map(block.cut, tensors))) if tensors else [()] * J

        def maybe(tensor):
            return [None] * J if tensor is None else block.cut(tensor)

        coef, a, delta = self.coef, built.a, built.delta
        self.c_end, self.s_end = c_end(coef)[..., None], None if coef.s_end is None else coef.s_end[..., None]
        pushed = [x for pair in weighted(c_end(coef), a, delta) for x in pair]
        pushed_S = [] if coef.s_end is None else [x for pair in weighted(coef.s_end, a, delta) for x in pair]
        self.pushed_, self.pushed_S_, self.c_end_, self.s_end_ = (
            chunks(pushed),
            chunks(pushed_S),
            *map(maybe, (self.c_end, self.s_end)),
        )
        self.coef_, self.d_coef_ = (list(zip(*map(maybe, x))) for x in (coef, self.grad[3:]))
        self.A_, self.D_, self.top_, self.d_x_, self.d_a_, self.d_delta_ = map(
            maybe, (self.A, self.D, self.top, self.d_x, self.d_a, self.d_delta)
        )
        self.pairs_, self.minus_ = (
            maybe(self.pairs if self.current and self.L > 2 else None),
            chunks(self.minus if self.current else ()),
        )
        self.x_, self.a_, self.delta_, self.left_, self.right_ = map(
            chunks, (built.x, a, delta, built.left, built.right)
        )
        self.slope_, self.curve_, self.read_slope_ = map(chunks, (built.slope, built.curve, built.read_slope))
        self.d_y_ = chunks([x[:, :rows] for x in built.right])
        self.d_z_ = chunks([x[:, rows : rows + C] for x in built.right])
        self.d_g_ = chunks([x[:, rows + C :] for x in built.left])
        if built.ln is not None:
            gain, normed, u = built.ln[0], built.normed, built.u
            u_h = (u * normed.h).mean(-1, True) * normed.inverse
            both = torch.stack([normed.h, delta[-1]], 1).mul_((normed.inverse / u.shape[-1])[:, None])
            self.norm_ = chunks([*normed, u, u_h, gain * gain, -gain, both])
        self.d_v_ = block.cut(self.grad[2])
        self.out = {name: [None] * J for name in ("q", "k", "wide")}
        lists = ("g", "moved", "moved_S", "through_W", "through_S", "d_y")
        self.per_layer = {name: [[None] * J for _ in range(self.L)] for name in lists}

    def run(self, run: Running, entries: list) -> Running:
        plan, tape, way = self.back.plan, self.back.tape, self.back.way
        d_W, d_S, d_xi, W = run
        for j in reversed(range(self.J)):
            n, step = self.block.sizes[j], self.block.steps[j]
            S = None
            if way == "replay":
                W, S = entries.pop()
            elif way == "keep":
                W, S = tape.states[step]
            elif step in tape.states:
                W = copied(tape.states[step][0])
            else:
                for i, w in enumerate(W):
                    w.baddbmm_(self.pushed_[j][2 * i].transpose(1, 2), self.pushed_[j][2 * i + 1])
            carried = plan.carried and step == 0
            start = self.back.xi if carried else W
            rest = 0 if step == len(plan.counts) - 1 else plan.counts[step + 1]
            end_W, end_S, end_xi = end_gradients(plan, rest, n, d_W, d_S, self.back.ends, W)
            d_a, d_delta = self._chunk_reads(j, n, W, S, start)
            d_W, d_S = self._chunk_end(j, n, W, S, end_W, end_S, d_a, d_delta)
            self._chunk_inner(j, W, start, d_a, d_delta, carried)
            if carried:
                d_xi = [torch.zeros_like(w) for w in W]
            split = self.rows if carried and self.current else 0  # the reads saw W, the inner gradient W_xi
            for i, dw in enumerate(d_xi if carried else d_W):
                dw.baddbmm_(self.left_[j][i][:, split:].transpose(1, 2), self.right_[j][i][:, split:])
            if split:
                for i, dw in enumerate(d_W):
                    dw.baddbmm_(self.left_[j][i][:, :split].transpose(1, 2), self.right_[j][i][:, :split])
            if end_xi is not None:
                for x, y in zip(d_xi if carried else d_W, end_xi):
                    x += y
        self._finish()
        return Running(d_W, d_S, d_xi, W)

    def _chunk_reads(self, j, n, W, S, start):
        """The reads' products with the weights, top to bottom. Returns the reads' share of d a and d delta."""
        L, per_layer, d_y = self.L, self.per_layer, self.top_[j]
        d_a, d_delta = [None] * L, [None] * L
        d_a[-1], d_delta[-1] = self.d_a_[j], self.d_delta_[j]
        for i in reversed(range(L)):
            if self.plain and i == 0 and L > 1:
                break  # `_chunk_inner` has this product
            w = (W if self.current else start)[i].transpose(1, 2)
            add = self.d_x_[j] if i == L - 1 else None
            if not self.current or self.plain:
                r = torch.bmm(d_y, w) if add is None else add.baddbmm_(d_y, w)
            else:
                r = self._through_state(j, i, n, d_y, w, S)
                r = r if add is None else r.add_(add)
            if i == 0:
                self.out["q"][j] = r
                break
            if self.current and i < L - 1:
                d_p = per_layer["g"][i][j] * self.pairs_[j]
                r.baddbmm_(d_p, self.a_[j][i], alpha=-1)
                d_a[i] = torch.bmm(d_p.transpose(1, 2), self.x_[j][i]).neg_()
            if self.A is None:
                d_y = torch.mul(r, self.read_slope_[j][i - 1], out=self.d_y_[j][i - 1])
            else:
                d_y = r.mul_(self.read_slope_[j][i - 1])
                torch.mul(self.A_[j], d_y, out=self.d_y_[j][i - 1])
            if self.current:
                per_layer["g"][i - 1][j] = torch.bmm(d_y, self.delta_[j][i - 1].transpose(1, 2))
                d_delta[i - 1] = torch.bmm(self.minus_[j][i - 1].transpose(1, 2), d_y)
        for i in range(L):
            if d_delta[i] is None:
                d_delta[i] = torch.zeros_like(self.delta_[j][i])
            if d_a[i] is None and (i or not self.narrow[0]):
                d_a[i] = torch.zeros_like(self.a_[j][i])
        return d_a, d_delta

    def _through_state(self, j, i, n, d_y, w, S):
        """d x of the read x (A W_0 + (1 - A) W_target + D S_0); what d A and d D need is left in `per_layer`."""
        target, pull = self.back.target, None
        self.per_layer["d_y"][i][j] = d_y
        r = torch.bmm(d_y, w)
        if self.A is not None:
            if target is not None:
                pull = torch.bmm(d_y, target[i][:n].transpose(1, 2))
                r -= pull
            self.per_layer["through_W"][i][j] = r
            r = self.A_[j] * r if target is None else torch.addcmul(pull, self.A_[j], r)
        if S is not None:
            self.per_layer["through_S"][i][j] = moved = torch.bmm(d_y, S[i].transpose(1, 2))
            r = torch.addcmul(r, self.D_[j], moved)
        return r

    def _chunk_end(self, j, n, W, S, end_W, end_S, d_a, d_delta):
        """The chunk-end state W_C = A W_0 + (1 - A) W_target + D S_0 - sum_i c_{C,i} g_i and S_C. Returns d W_0, d
        S_0."""
        here, d_here, target = Coef(*self.coef_[j]), Coef(*self.d_coef_[j]), self.back.target
        D, m, keep = (None if x is None else x[..., None, None] for x in (here.D, here.m_end, here.A))
        d_W, d_S = [], None if S is None else []
        for i, dw in enumerate(end_W):
            self._through_end(j, i, dw, self.pushed_, self.c_end_[j], "moved", d_a, d_delta)
            if end_S is not None:
                self._through_end(j, i, end_S[i], self.pushed_S_, self.s_end_[j], "moved_S", d_a, d_delta)
            if S is not None:
                d_here.D[:, -1] += _dot(dw, S[i])
                if end_S is None:
                    ds = dw * D[:, -1]
                else:
                    d_here.m_end.add_(_dot(end_S[i], S[i]))
                    ds = end_S[i].mul_(m).addcmul_(dw, D[:, -1])
                if self.current:
                    ds.baddbmm_(self.x_[j][i].transpose(1, 2), self.D_[j] * self.per_layer["d_y"][i][j])
                d_S.append(ds)
            if keep is not None:
                d_keep = _dot(dw, W[i])
                if target is not None:
                    d_keep -= _dot(dw, target[i][:n])
                    self.back.d_target[i][:n].addcmul_(1 - keep[:, -1], dw)
                d_here.A[:, -1] += d_keep
                dw = dw.mul_(keep[:, -1])
            d_W.append(dw)
        return d_W, d_S

    def _through_end(self, j, i, dw, pushed_, weight, moved, d_a, d_delta):
        """-sum_i weight_i a_i^T delta_i in a state whose gradient is dw: into d a, d delta and (later) d weight."""
        scaled_a, scaled_delta = pushed_[j][2 * i : 2 * i + 2]
        if self.narrow[i]:
            self.per_layer[moved][i][j] = m = torch.bmm(self.delta_[j][i], dw.transpose(1, 2))
            if d_a[i] is not None:
                d_a[i].addcmul_(weight, m, value=-1)
            d_delta[i].baddbmm_(scaled_a, dw, alpha=-1)
        else:
            self.per_layer[moved][i][j] = m = torch.bmm(self.a_[j][i], dw)
            d_a[i].baddbmm_(scaled_delta, dw.transpose(1, 2), alpha=-1)
            d_delta[i].addcmul_(weight, m, value=-1)

    def _chunk_inner(self, j, W, start, d_a, d_delta, carried):
        """The inner gradient: a and delta as functions of k, v and W_xi. Fills d_z and d_g, leaves d q and d k."""
        L, d_z, d_g, slope = self.L, self.d_z_[j], self.d_g_[j], self.slope_[j]
        for i in range(L - 1):
            torch.mul(d_delta[i], slope[i], out=d_g[i + 1])
            torch.mul(d_delta[i], self.curve_[j][i], out=d_z[i])
            d_delta[i + 1].baddbmm_(d_g[i + 1], start[i + 1])
        lam = d_delta[-1]
        if self.built.ln is None:
            d_z[-1].copy_(lam)
            torch.neg(lam, out=self.d_v_[j])
        else:
            (*normed, u, u_h, gain2, minus_gain, both), h = self.norm_[j], self.norm_[j][1]
            normed = Standardised(*normed)
            along_h, along_top = (lam[:, None] * both).sum(-1, True).unbind(1)
            d_u = through_standardise(lam, normed)
            torch.mul(d_u, minus_gain, out=self.d_v_[j])
            d_h = d_u.mul_(gain2).addcmul_(lam, u_h, value=-1).addcmul_(u, along_h, value=-1)
            torch.addcmul(through_standardise(d_h, normed), h, along_top, value=-1, out=d_z[-1])
        for i in reversed(range(1, L)):
            d_a[i].baddbmm_(d_z[i], start[i].transpose(1, 2))
            d_z[i - 1].addcmul_(d_a[i], slope[i - 1])
        if L == 1 or not self.narrow[0]:
            self.out["wide"][j] = d_a[0]
        fused = self.plain and L > 1
        if fused and not carried:
            both = self.right_[j][0][:, : self.rows + self.C]
            both = torch.bmm(both, start[0].transpose(1, 2)).split_with_sizes((self.rows, self.C), 1)
            self.out["q"][j], self.out["k"][j] = both
        else:
            if fused:
                self.out["q"][j] = torch.bmm(self.d_y_[j][0], W[0].transpose(1, 2))
            self.out["k"][j] = torch.bmm(d_z[0], start[0].transpose(1, 2))

    def _finish(self):
        """What only leaves the block, for all its chunks."""
        block, built, coef, per_layer, L = self.block, self.built, self.coef, self.per_layer, self.L
        G, net, (x, a, delta) = self.back.plan.groups, self.back.plan.net, built[2:5]
        d_q, d_k, d_v, d_coef = *self.grad[:3], Coef(*self.grad[3:])
        d_c_end = d_coef.theta if coef.c is None else d_coef.c[:, -1]

        def stacked(pieces, like):
            pieces = [torch.zeros_like(y) if m is None else m for m, y in zip(pieces, block.cut(like))]
            return block.stack(pieces)

        dq, dk = block.stack(self.out["q"]), block.stack(self.out["k"])
        if self.out["wide"][0] is not None:
            dk += block.stack(self.out["wide"])
        for i in range(L):
            for weight, d_weight, name in ((self.c_end, d_c_end, "moved"), (self.s_end, d_coef.s_end, "moved_S")):
                if any(m is not None for m in per_layer[name][i]):
                    like = a[i] if self.narrow[i] else delta[i]
                    m = stacked(per_layer[name][i], like)
                    d_weight.sub_((like * m).sum(-1))
                    if i == 0 and self.out["wide"][0] is None:
                        dk.addcmul_(weight, m, value=-1)
            if self.A is not None:
                d_coef.A.add_(ungrouped((block.stack(per_layer["through_W"][i]) * x[i]).sum(-1), G))
                if self.back.target is not None:
                    d_y = block.stack(per_layer["d_y"][i])
                    block.fold_product(self.back.d_target[i], x[i], d_y - self.A * d_y)
            if any(m is not None for m in per_layer["through_S"][i]):
                d_coef.D.add_(ungrouped((stacked(per_layer["through_S"][i], x[i]) * x[i]).sum(-1), G))
            if self.current and i < L - 1:
                g = block.stack(per_layer["g"][i])
                if i == 0:
                    d_p = g * self.pairs
                    dq.baddbmm_(d_p, a[0], alpha=-1)
                    dk.baddbmm_(d_p.transpose(1, 2), self.q, alpha=-1)
                self.d_pairs.addcmul_(g, self.p[i])
        torch.add(dq, self.d_o, out=d_q) if net.residual else d_q.copy_(dq)
        if self.current:
            d_pairs = ungrouped(self.d_pairs, G)
            d_coef.theta.sub_(d_pairs.tril_().sum(1)) if coef.c is None else d_coef.c.sub_(d_pairs)
        d_error = -d_v
        if built.ln is not None:
            d_u = through_standardise(self.d_delta, built.normed)
            block.fold(self.back.d_ln[0], (d_u * built.error + d_error * built.normed.h).sum(1, keepdim=True))
            block.fold(self.back.d_ln[1], d_error.sum(1, keepdim=True))
        torch.add(dk, d_error, out=d_k) if net.residual else d_k.copy_(dk)
