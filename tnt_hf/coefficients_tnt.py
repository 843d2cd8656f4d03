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


def _products(x: Tensor) -> Tensor:
    """[..., C] -> [..., C, C+1]: entry (t, j) is the product of x_j..x_t, 1 at j = t + 1 and 0 beyond. No logarithm,
    so x = 0 is exact."""
    C = x.shape[-1]
    t, j = torch.arange(C, device=x.device)[:, None], torch.arange(C + 1, device=x.device)
    chain = torch.where(t >= j, x[..., :, None], 1.0).cumprod(-2)
    return chain * (t >= j - 1)


def _products_backward(chain: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `_products` with respect to x, without dividing by x."""
    before = F.pad(chain[..., :-1, :], (0, 0, 1, 0))
    before[..., 0, 0] = 1.0
    return ((chain[..., 1:].transpose(-1, -2) @ grad) * before).sum(-1)


class _AllRows(torch.autograd.Function):
    """(theta, mu, 1 - alpha, present) -> c, A, D, s_end, m_end for every token of each chunk; recomputed in backward,
    so it keeps O(C)."""

    @staticmethod
    def forward(ctx, theta, mu, keep, present):
        ctx.save_for_backward(theta, mu, keep, present)
        momentum, survive, scaled = _AllRows.terms(theta, mu, keep)
        E = survive[..., 1:] @ (scaled if present is None else scaled * present[..., None])
        D = E[..., 0].contiguous()
        return (
            E[..., 1:].contiguous(),
            survive[..., 0].contiguous(),
            D,
            scaled[..., -1, 1:].clone(),
            scaled[..., -1, 0].clone(),
        )

    @staticmethod
    def terms(theta, mu, keep):
        momentum = _products(torch.zeros_like(theta) if mu is None else mu)
        survive = _products(torch.ones_like(theta) if keep is None else keep)
        return momentum, survive, momentum * F.pad(theta, (1, 0), value=1.0)[..., None, :]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dc, dA, dD, ds_end, dm_end):
        theta, mu, keep, present = ctx.saved_tensors
        momentum, survive, scaled = _AllRows.terms(theta, mu, keep)
        dE = torch.cat([dD[..., None], dc], -1)
        d_scaled = survive[..., 1:].transpose(-1, -2) @ dE
        if present is not None:
            d_scaled = d_scaled * present[..., None]
            scaled = scaled * present[..., None]
        d_survive = torch.cat([dA[..., None], dE @ scaled.transpose(-1, -2)], -1)
        d_scaled[..., -1, :] += torch.cat([dm_end[..., None], ds_end], -1)
        d_theta = (d_scaled * momentum).sum(-2)[..., 1:]
        d_momentum = d_scaled * F.pad(theta, (1, 0), value=1.0)[..., None, :]
        d_mu = None if mu is None else _products_backward(momentum, d_momentum)
        d_keep = None if keep is None else _products_backward(survive, d_survive)
        return d_theta, d_mu, d_keep, None


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
