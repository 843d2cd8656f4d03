"""The memory network f(W, x) and the closed-form gradient of its own loss 1/2 |f(W, k) - v|^2.

Axis legend
    n rows (tokens of a chunk)   K key width   V value width   L layers   leading axes: anything that batches a matrix
    product

    z_1 = x W_1, a_1 = phi(z_1), ..., y = z_L, optional h = LayerNorm(y), optional + x
    g_l = a_{l-1}^T delta_l per token: rank one, so (a, delta) are all that is ever kept of a gradient

No torch.autograd: the memory learns in eval(), no_grad() and inference_mode() alike. Travels with every pushed
checkpoint.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Net(NamedTuple):
    """The memory network's shape: everything that is not a tensor."""

    activation: str
    residual: bool
    eps: float  # of the LayerNorm


def activation_and_slope(name: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """Activation and its slope, phi(z) and phi'(z)."""
    if name == "silu":
        s = torch.sigmoid(z)
        a = z * s
        return a, torch.addcmul(s, a, 1 - s)
    cdf = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return z * cdf, cdf + z * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def activation_curvature(name: str, z: Tensor) -> Tensor:
    """phi''(z), which only the outer backward needs."""
    if name == "silu":
        s = torch.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))
    return torch.exp(-0.5 * z * z) * (2 - z * z) * (1 / math.sqrt(2 * math.pi))


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def standardise(y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm without its affine part: (h, s) with h = (y - mean) / s, s = sqrt(var + eps)."""
    if not torch.is_grad_enabled():  # one fused kernel, whose own backward knows nothing of s
        h, _, inverse = torch.native_layer_norm(y, y.shape[-1:], None, None, eps)
        return h, inverse.reciprocal()
    y = y - mean(y)
    s = torch.sqrt(mean(y * y) + eps)
    return y / s, s


def project_out(x: Tensor, h: Tensor) -> Tensor:
    """The Jacobian of the standardisation, up to 1/s: x minus its components along 1 and h."""
    return x - mean(x) - h * mean(x * h)


def apply_net(net: Net, weights: list[Tensor], x: Tensor, ln: tuple[Tensor, Tensor] | None) -> Tensor:
    """f(W, x) for rows x `[..., n, K]` and weights `[..., d_in, d_out]`."""
    y = x
    for w in weights[:-1]:
        y = (F.silu if net.activation == "silu" else F.gelu)(y @ w)
    y = y @ weights[-1]
    if ln is not None:
        y = ln[0] * standardise(y, net.eps)[0] + ln[1]
    return y + x if net.residual else y


def inner_gradient(net: Net, weights: list[Tensor], k: Tensor, v: Tensor, ln: tuple[Tensor, Tensor] | None):
    """The factors of g_{l,t} = a_{l-1,t}^T delta_{l,t} at `weights` (W_xi), in closed form.

    Returns `(a, delta, error, tape)`: layer inputs a_0..a_{L-1}, loss gradients delta_1..delta_L (both lists of
    `[..., C, width]`), the error f(W, k) - v, and what the outer backward wants to see again.
    """
    a, z, slope = [k], [], []
    for w in weights[:-1]:
        z.append(a[-1] @ w)
        act, d_act = activation_and_slope(net.activation, z[-1])
        a.append(act)
        slope.append(d_act)
    y = a[-1] @ weights[-1]
    h = s = u = None
    if ln is not None:
        h, s = standardise(y, net.eps)
        y = ln[0] * h + ln[1]
    error = y + k - v if net.residual else y - v
    if ln is None:
        top = error
    else:
        u = ln[0] * error
        top = project_out(u, h) / s
    delta, grad_act = [top], []
    for w, d_act in zip(reversed(weights[1:]), reversed(slope)):
        grad_act.insert(0, delta[0] @ w.transpose(-1, -2))
        delta.insert(0, grad_act[0] * d_act)
    return a, delta, error, (z, slope, grad_act, h, s, u)


def bounded(lr: Tensor, a: list[Tensor], delta: list[Tensor], bound: float) -> Tensor:
    """theta_t with |g_t| over all layers limited to `bound`: the chunk then moves by at most sum(theta) * bound."""
    square = sum((x * x).sum(-1) * (d * d).sum(-1) for x, d in zip(a, delta))
    return lr * (bound / square.clamp_min(bound * bound).sqrt())
