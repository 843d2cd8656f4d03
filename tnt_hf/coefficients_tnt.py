"""The scalars of the dual form, from theta, mu and alpha alone.

Axis legend
    P chunks of all programs (batch)   C tokens per chunk
    Cr rows kept: C (read "current") or only the last one (read "chunk_start")
    n pieces of a chunk, s tokens each

Inside a chunk, with A_t = prod_{j<=t} (1 - alpha_j) and N_{j,i} = theta_i prod_{i<m<=j} mu_m:

    S_t = (prod_{m<=t} mu_m) S_0 - sum_{i<=t} N_{t,i} g_i
    W_t = A_t W_0 + (1 - A_t) W_target + D_t S_0 - sum_{i<=t} c_{t,i} g_i
    c_{t,i} = sum_{j<=t} (A_t / A_j) N_{j,i}        D_t = sum_{j<=t} (A_t / A_j) prod_{m<=j} mu_m

An absent token has theta = 0, mu = 1, alpha = 0 and `present` = 0: S passes it unchanged and is not added to W.
Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .denormals_tnt import without_denormals
from .derivative_tnt import once_differentiable
from .precision_tnt import full_precision


PIECE = 16  # most tokens whose rows are made one after another


class Coef(NamedTuple):
    """The dual form's scalars for P chunks. `c` `[P, Cr, C]`, `A`, `D` `[P, Cr]` with Cr = C rows (read "current") or
    only the last one (read "chunk_start"); `c` is `None` without momentum and forgetting, where c_{t,i} = theta_i.
    `s_end` `[P, C]`, `m_end` `[P]`: S at the end."""

    theta: Tensor
    c: Tensor | None = None
    A: Tensor | None = None
    D: Tensor | None = None
    s_end: Tensor | None = None
    m_end: Tensor | None = None

    def part(self, where: slice) -> "Coef":
        return Coef(*(None if x is None else x[where] for x in self))

    def shrunk(self, scale: Tensor) -> "Coef":
        """With every gradient g_i times scale_i, `[P, C]`: c and s_end are linear in theta_i."""
        c, s_end = self.c, self.s_end
        return self._replace(
            theta=self.theta * scale,
            c=None if c is None else c * scale[:, None],
            s_end=None if s_end is None else s_end * scale,
        )


def _rows(theta: Tensor, mu: Tensor | None, keep: Tensor | None, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """What W_t and S_t, t = 0..C, are made of: rows `[C + 1, P, 2 + C]` of the factors of W_0, S_0 and every -g_i, by
    the recurrence itself: N_t = mu_t N_{t-1} + theta_t e_t, c_t = (1 - alpha_t) c_{t-1} + N_t. No logarithm and no
    division, so mu = 0 and alpha = 1 are exact."""
    P, C = theta.shape
    c, N = theta.new_empty(C + 1, P, 2 + C), theta.new_zeros(C + 1, P, 2 + C)
    c[0] = 0.0
    c[0, :, 0] = N[0, :, 1] = 1.0
    token = torch.arange(C, device=theta.device)
    N[token + 1, :, token + 2] = theta.t()
    mu, keep, present = map(_by_token, (mu, keep, present))
    rows_c, rows_N = c.unbind(0), N.unbind(0)
    for t in range(C):
        if mu is not None:
            rows_N[t + 1].addcmul_(rows_N[t], mu[t])
        step = rows_N[t + 1] if present is None else rows_N[t + 1] * present[t]
        if keep is None:
            torch.add(rows_c[t], step, out=rows_c[t + 1])
        else:
            torch.addcmul(step, rows_c[t], keep[t], out=rows_c[t + 1])
    return c, N


def _by_token(x: Tensor | None) -> list[Tensor] | None:
    """[P, C] -> C tensors [P, 1]."""
    return None if x is None else list(x.t().contiguous()[..., None].unbind(0))


def _rows_backward(theta, mu, keep, present, c, N, d_c, d_last):
    """Gradients of theta, mu and keep through `_rows`: of all its c, `[C, P, 2 + C]` without the first, which is
    overwritten, and of the last N, `[P, 2 + C]`."""
    _carry_back(d_c, keep)
    d_N = d_c.clone() if present is None else d_c * present.t()[..., None]
    d_N[-1] += d_last
    d_mu = d_keep = None
    if mu is not None:
        _carry_back(d_N, mu)
        d_mu = (d_N * N[:-1]).sum(-1).t()
    if keep is not None:
        d_keep = (d_c * c[:-1]).sum(-1).t()
    token = torch.arange(theta.shape[1], device=theta.device)
    return d_N[token, :, token + 2].t(), d_mu, d_keep


def _carry_back(grad: Tensor, factor: Tensor | None) -> None:
    """grad_t += factor_{t+1} grad_{t+1} from the last token to the first, `[C, P, n]`; no factor is 1."""
    rows, factor = grad.unbind(0), _by_token(factor)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].add_(rows[t + 1]) if factor is None else rows[t].addcmul_(rows[t + 1], factor[t + 1])


class Pieces(NamedTuple):
    """A chunk's rows from those of its pieces, each a small chunk of its own: what a piece makes of the state that
    enters it, a_t W + d_t S and behind it m S, times what that state is made of. The recurrence then has n + s steps
    in place of C, and most of `[P, C, C]` is written once."""

    c: Tensor  # [s + 1, P n, 2 + s], `_rows` of the pieces
    N: Tensor
    W: Tensor  # [P, n, 2 + C]: rows of c and N before each piece
    S: Tensor

    @classmethod
    def of(cls, theta, mu, keep, present) -> "Pieces":
        (P, C), s = theta.shape, _piece(theta.shape[1])
        n = C // s
        c, N = _rows(*(None if x is None else x.reshape(P * n, s) for x in (theta, mu, keep, present)))
        W, S = (theta.new_zeros(P, n, 2 + C) for _ in range(2))
        W[:, 0, 0] = S[:, 0, 1] = 1.0
        new_W, new_S = (x[-1].view(P, n, 2 + s) for x in (c, N))
        for b, end in enumerate(range(s, C, s), 1):
            (a, d), m = new_W[:, b - 1, :2, None].unbind(1), new_S[:, b - 1, 1:2]
            torch.mul(W[:, b - 1], a, out=W[:, b]).addcmul_(S[:, b - 1], d)
            torch.mul(S[:, b - 1], m, out=S[:, b])
            W[:, b, 2 + end - s : 2 + end] = new_W[:, b - 1, 2:]
            S[:, b, 2 + end - s : 2 + end] = new_S[:, b - 1, 2:]
        return cls(c, N, W, S)

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """a, d `[P, n, s, 1]` and m `[P, n, 1]`."""
        P, n, _ = self.W.shape
        a, d = (self.c[1:, :, i].t().contiguous().view(P, n, -1, 1) for i in (0, 1))
        return a, d, self.N[-1, :, 1].view(P, n, 1)

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """c, A, D, s_end, m_end of the chunks."""
        if self.W.shape[1] == 1:
            A, D, c = (self.c[1:, :, i].transpose(0, 1).contiguous() for i in (0, 1, slice(2, None)))
            return c, A, D, self.N[-1, :, 2:].clone(), self.N[-1, :, 1].clone()
        (P, n, width), (a, d, m) = self.W.shape, self.factors
        s, C = a.shape[2], width - 2
        W, S = self.W[:, :, None], self.S[:, :, None]
        c = torch.mul(a, W[..., 2:], out=a.new_empty(P, n, s, C)).addcmul_(d, S[..., 2:])
        A, D = a * W[..., :1], (a * W[..., 1:2]).addcmul_(d, S[..., 1:2])
        c.view(P, n, s, n, s).diagonal(0, 1, 3).copy_(self.c[1:, :, 2:].view(s, P, n, s).permute(1, 0, 3, 2))
        s_end = self.S[:, -1, 2:] * m[:, -1]
        s_end[:, -s:] = self.N[-1, :, 2:].view(P, n, s)[:, -1]
        return c.view(P, C, C), A.view(P, C), D.view(P, C), s_end, self.S[:, -1, 1] * m[:, -1, 0]

    def gradients(self, dc, dA, dD, ds_end, dm_end) -> tuple[Tensor, Tensor]:
        """Of all rows of `self.c` but the first, and of the last of `self.N`."""
        if self.W.shape[1] == 1:
            d_c = torch.cat([dA[..., None], dD[..., None], dc], -1).transpose(0, 1).contiguous()
            return d_c, torch.cat([torch.zeros_like(dm_end)[:, None], dm_end[:, None], ds_end], -1)
        (P, n, _), (a, d, m) = self.W.shape, self.factors
        s = a.shape[2]
        dc, dA, dD = (x.reshape(P, n, s, -1) for x in (dc, dA, dD))
        into_W, into_S = (torch.cat([(x * dA).sum(2), (x * dD).sum(2), (x.mT @ dc).squeeze(2)], -1) for x in (a, d))
        run_W, run_S = torch.zeros_like(self.W), torch.zeros_like(self.S)  # of the rows after each piece
        run_S[:, -1, 1], run_S[:, -1, 2:] = dm_end, ds_end
        for b in range(n - 1, 0, -1):
            torch.addcmul(into_W[:, b], run_W[:, b], a[:, b, -1], out=run_W[:, b - 1])
            torch.addcmul(into_S[:, b], run_W[:, b], d[:, b, -1], out=run_S[:, b - 1])
            run_S[:, b - 1].addcmul_(run_S[:, b], m[:, b])
        own = 2 + torch.arange(n * s, device=dc.device).view(n, s).expand(P, n, s)  # a piece's own columns
        d_c = torch.empty_like(self.c[1:])
        d_last = torch.zeros_like(self.N[-1])
        to_c, to_last = d_c.view(s, P, n, 2 + s).permute(1, 2, 0, 3), d_last.view(P, n, 2 + s)
        state = torch.stack([self.W, self.S], 3)  # [P, n, 2 + C, 2]
        to_c[..., :2] = dc @ state[:, :, 2:] + dA * state[:, :, :1] + dD * state[:, :, 1:2]
        to_c[..., 2:] = dc.view(P, n, s, n, s).diagonal(0, 1, 3).permute(0, 3, 1, 2)
        to_c[:, :, -1, 0] += (run_W * self.W).sum(-1)
        to_c[:, :, -1, 1] += (run_W * self.S).sum(-1)
        to_c[:, :, -1, 2:] += run_W.gather(-1, own)
        to_last[..., 1] = (run_S * self.S).sum(-1)
        to_last[..., 2:] = run_S.gather(-1, own)
        return d_c, d_last


class _AllRows(torch.autograd.Function):
    """(theta, mu, 1 - alpha, present) -> c, A, D, s_end, m_end for every token of each chunk; what it needs of them
    is recomputed in backward, so it keeps O(C)."""

    @staticmethod
    def forward(ctx, *scalars):
        ctx.save_for_backward(*scalars)
        return Pieces.of(*scalars).rows()

    @staticmethod
    @once_differentiable
    @without_denormals
    def backward(ctx, *grads):
        scalars = ctx.saved_tensors  # checkpointing lets it be looked at once
        shape, pieces = scalars[0].shape, Pieces.of(*scalars)
        flat = [None if x is None else x.reshape(len(pieces.N[0]), -1) for x in scalars]
        with full_precision(grads[0].device):  # unlike the forward, it may be called inside autocast
            found = _rows_backward(*flat, pieces.c, pieces.N, *pieces.gradients(*grads))
        return *(None if x is None else x.reshape(shape) for x in found), None


def _piece(C: int) -> int:
    """Tokens of a piece: the largest divisor of C that is no more than `PIECE`."""
    return next(s for s in range(min(C, PIECE), 0, -1) if C % s == 0)


def _last_row(theta: Tensor, mu: Tensor | None, keep: Tensor | None, present: Tensor | None):
    """The chunk-end row of the same coefficients in O(C log C): a suffix scan over the maps (S, W) -> (mu S, keep W +
    mu S)."""
    C = theta.shape[-1]
    m = torch.zeros_like(theta) if mu is None else mu
    a = torch.ones_like(theta) if keep is None else keep
    w = torch.ones_like(theta) if present is None else present
    x = w * m  # what a unit of S becomes in W
    hop = 1
    while hop < C:
        m2, a2 = (F.pad(y[..., hop:], (0, hop), value=1.0) for y in (m, a))
        x2 = F.pad(x[..., hop:], (0, hop))
        m, a, x = m2 * m, a2 * a, x2 * m + a2 * x
        hop *= 2
    later_m, later_a = (F.pad(y[..., 1:], (0, 1), value=1.0) for y in (m, a))
    c = theta * (F.pad(x[..., 1:], (0, 1)) + later_a * w)
    return c[..., None, :], a[..., :1], x[..., :1], theta * later_m, m[..., 0]


def chunk_coefficients(theta, mu, keep, present, current: bool) -> Coef:
    """The coefficients of P chunks from theta, mu, keep = 1 - alpha and present, each `[P, C]` (the latter three may
    be `None`), for reads "current" (all rows) or "chunk_start" (the last)."""
    if mu is None and keep is None:
        return Coef(theta)
    c, A, D, s_end, m_end = (_AllRows.apply if current else _last_row)(theta, mu, keep, present)
    if mu is None:
        return Coef(theta, c, A)
    return Coef(theta, c, None if keep is None else A, D, s_end, m_end)
