"""The scalars of the dual form, from theta, mu and alpha alone.

Axis legend
    P chunks of all programs (batch)   C tokens per chunk
    Cr rows kept: C (read "current") or only the last one (read "chunk_start")

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

    def shrunk(self, scale: Tensor | None) -> "Coef":
        """With every gradient g_i times scale_i, `[P, C]`: c and s_end are linear in theta_i."""
        if scale is None:
            return self
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


class _AllRows(torch.autograd.Function):
    """(theta, mu, 1 - alpha, present) -> c, A, D, s_end, m_end for every token of each chunk; recomputed in backward,
    so it keeps O(C)."""

    @staticmethod
    def forward(ctx, theta, mu, keep, present):
        ctx.save_for_backward(theta, mu, keep, present)
        c, N = _rows(theta, mu, keep, present)
        A, D, c = (x.transpose(0, 1).contiguous() for x in (c[1:, :, 0], c[1:, :, 1], c[1:, :, 2:]))
        return c, A, D, N[-1, :, 2:].clone(), N[-1, :, 1].clone()

    @staticmethod
    @once_differentiable
    @without_denormals
    def backward(ctx, dc, dA, dD, ds_end, dm_end):
        theta, mu, keep, present = ctx.saved_tensors
        c, N = _rows(theta, mu, keep, present)
        d_c = torch.cat([dA[..., None], dD[..., None], dc], -1).transpose(0, 1).contiguous()
        _carry_back(d_c, keep)
        d_N = d_c.clone() if present is None else d_c * present.t()[..., None]
        d_N[-1, :, 1:] += torch.cat([dm_end[:, None], ds_end], -1)
        d_mu = d_keep = None
        if mu is not None:
            _carry_back(d_N, mu)
            d_mu = (d_N * N[:-1]).sum(-1).t()
        if keep is not None:
            d_keep = (d_c * c[:-1]).sum(-1).t()
        token = torch.arange(theta.shape[1], device=theta.device)
        return d_N[token, :, token + 2].t(), d_mu, d_keep, None


def _carry_back(grad: Tensor, factor: Tensor | None) -> None:
    """grad_t += factor_{t+1} grad_{t+1} from the last token to the first, `[C, P, n]`; no factor is 1."""
    rows, factor = grad.unbind(0), _by_token(factor)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].add_(rows[t + 1]) if factor is None else rows[t].addcmul_(rows[t + 1], factor[t + 1])


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
