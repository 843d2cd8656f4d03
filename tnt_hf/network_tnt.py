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


def product(x: Tensor, w: Tensor) -> Tensor:
    """x @ w; `bmm` spares a chunk's many small products the broadcasting logic of `matmul`."""
    return torch.bmm(x, w) if x.dim() == 3 else x @ w


def activate(name: str, z: Tensor) -> Tensor:
    """phi(z)."""
    return F.silu(z) if name == "silu" else F.gelu(z)


def through_activation(name: str, grad: Tensor, z: Tensor) -> Tensor:
    """grad * phi'(z)."""
    if name == "gelu":
        return torch.ops.aten.gelu_backward(grad, z)
    if not torch.is_grad_enabled():  # one fused kernel, which has no derivative of its own
        return torch.ops.aten.silu_backward(grad, z)
    s = torch.sigmoid(z)
    return grad * s * (1 + z * (1 - s))


def curvature(name: str, z: Tensor) -> Tensor:
    """phi''(z), which only the outer backward needs."""
    if name == "silu":
        s = torch.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))
    return torch.exp(-0.5 * z * z) * (2 - z * z) * (1 / math.sqrt(2 * math.pi))


class Standardised(NamedTuple):
    """LayerNorm without its affine part: h = (y - mean) / s, with what its derivatives need."""

    y: Tensor
    h: Tensor
    mean: Tensor
    inverse: Tensor  # 1 / s, s = sqrt(var + eps)


def standardise(y: Tensor, eps: float) -> Standardised:
    h, mean, inverse = torch.native_layer_norm(y, y.shape[-1:], None, None, eps)
    return Standardised(y, h, mean, inverse)


def through_standardise(grad: Tensor, n: Standardised) -> Tensor:
    """grad times the Jacobian of h: (grad without its components along 1 and h) / s."""
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(grad, n.y, n.y.shape[-1:], n.mean, n.inverse, None, None, [True, False, False])[0]


def apply_net(net: Net, weights: list[Tensor], x: Tensor, ln: tuple[Tensor, Tensor] | None) -> Tensor:
    """f(W, x) for rows x `[..., n, K]` and weights `[..., d_in, d_out]`."""
    y = x
    for w in weights[:-1]:
        y = activate(net.activation, product(y, w))
    y = product(y, weights[-1])
    if ln is not None:
        y = torch.addcmul(ln[1], ln[0], standardise(y, net.eps).h)
    return y + x if net.residual else y


def residual_target(net: Net, k: Tensor, v: Tensor) -> Tensor:
    """What f(W, k) - v adds to the network's output: k - v with the residual, else -v."""
    return k - v if net.residual else -v


def inner_gradient(net: Net, weights: list[Tensor], k: Tensor, target: Tensor, ln: tuple[Tensor, Tensor] | None):
    """The factors of g_{l,t} = a_{l-1,t}^T delta_{l,t} at `weights` (W_xi), in closed form.

    `target` is `residual_target(net, k, v)`. Returns `(a, delta, error, tape)`: layer inputs a_0..a_{L-1}, loss
    gradients delta_1..delta_L (both lists of `[..., C, width]`), the error f(W, k) - v, and what the outer backward
    wants to see again.
    """
    a, z = [k], []
    for w in weights[:-1]:
        z.append(product(a[-1], w))
        a.append(activate(net.activation, z[-1]))
    y = product(a[-1], weights[-1])
    if ln is None:
        error, normed, u = y + target, None, None
        delta = [error]
    else:
        normed = standardise(y, net.eps)
        error = torch.addcmul(ln[1] + target, ln[0], normed.h)
        u = ln[0] * error
        delta = [through_standardise(u, normed)]
    grad_act = []
    for w, x in zip(reversed(weights[1:]), reversed(z)):
        grad_act.insert(0, product(delta[0], w.transpose(-1, -2)))
        delta.insert(0, through_activation(net.activation, grad_act[0], x))
    return a, delta, error, (z, grad_act, normed, u)


def bounded(lr: Tensor, a: list[Tensor], delta: list[Tensor], bound: float) -> Tensor:
    """theta_t with |g_t| over all layers limited to `bound`: the chunk then moves by at most sum(theta) * bound."""
    square = sum((x * x).sum(-1) * (d * d).sum(-1) for x, d in zip(a, delta))
    return lr * (bound / square.clamp_min(bound * bound).sqrt())
