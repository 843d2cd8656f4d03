"""The memory network f(W, x) and the closed-form gradient of its own loss 1/2 |f(W, k) - v|^2.

Axis legend
    n rows (tokens of a chunk)   K key width   V value width   L layers   leading axes: anything that batches a matrix
    product

    z_1 = x W_1, a_1 = phi(z_1), ..., y = z_L, optional h = LayerNorm(y), optional + x
    g_l = a_{l-1}^T delta_l per token: rank one, so (a, delta) are all that is ever kept of a gradient

No torch.autograd: the memory learns in eval(), no_grad() and inference_mode() alike. Travels with every pushed
checkpoint.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiler_tnt import fused_product, fuses


SMALLEST_NORM = 1e-12  # of F.normalize
ROUNDING = 16  # last bits that |g_t| may be off, some for each of the lengths it is made of


class Net(NamedTuple):
    """The memory network's shape: everything that is not a tensor."""

    activation: str
    residual: bool
    eps: float  # of the LayerNorm


def product(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ w; `bmm` spares a chunk's many small products the broadcasting logic of `matmul`."""
    if x.dim() != 3:
        return x @ w
    return fused_product(x, w) if fuses() else torch.bmm(x, w, out=out)


def activate(name: str, z: Tensor) -> Tensor:
    """phi(z)."""
    return F.silu(z) if name == "silu" else F.gelu(z)


def through_activation(name: str, grad: Tensor, z: Tensor) -> Tensor:
    """grad * phi'(z)."""
    if name == "gelu":
        return torch.ops.aten.gelu_backward.default(grad, z)
    if not torch.is_grad_enabled():  # one fused kernel, which has no derivative of its own
        return torch.ops.aten.silu_backward.default(grad, z)
    s = torch.sigmoid(z)
    return grad * s * (1 + z * (1 - s))


class Standardised(NamedTuple):
    """LayerNorm without its affine part: h = (y - mean) / s, with what its derivatives need."""

    y: Tensor
    h: Tensor
    mean: Tensor
    inverse: Tensor  # 1 / s, s = sqrt(var + eps)


def standardise(y: Tensor, eps: float) -> Standardised:
    """Mean 0 and variance 1 over the last axis of `[..., width]`."""
    if torch.is_grad_enabled():  # to autograd the fused kernel's mean and inverse are constants
        mean = y.mean(-1, keepdim=True)
        inverse = torch.rsqrt((y - mean).square().mean(-1, keepdim=True) + eps)
        return Standardised(y, (y - mean) * inverse, mean, inverse)
    h, mean, inverse = torch.native_layer_norm(y, (y.shape[-1],), None, None, eps)
    return Standardised(y, h, mean, inverse)


def through_standardise(grad: Tensor, n: Standardised) -> Tensor:
    """grad times the Jacobian of h: (grad without its components along 1 and h) / s."""
    if torch.is_grad_enabled():
        along_h = (grad * n.h).mean(-1, keepdim=True)
        return (grad - grad.mean(-1, keepdim=True) - n.h * along_h) * n.inverse
    backward = torch.ops.aten.native_layer_norm_backward.default
    return backward(grad, n.y, (n.y.shape[-1],), n.mean, n.inverse, None, None, [True, False, False])[0]


def apply_net(net: Net, weights: list[Tensor], x: Tensor, ln: tuple[Tensor, Tensor] | None) -> Tensor:
    """f(W, x) for rows x `[..., n, K]` and weights `[..., d_in, d_out]`."""
    y = x
    for w in weights[:-1]:
        y = activate(net.activation, product(y, w))
    y = product(y, weights[-1])
    if ln is not None:
        y = torch.addcmul(ln[1], ln[0], standardise(y, net.eps).h)
    return y + x if net.residual else y


def inner_offset(net: Net, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """What the error f(W, k) - v holds besides the weights: k (with the residual) - v + the LayerNorm's bias."""
    offset = k - v if net.residual else -v
    return offset if bias is None else offset.add_(bias)


def pass_through(net: Net, weights: list[Tensor], x: Tensor, outs=None):
    """Inputs `[x, a_1, ...]` and products `[z_1, ..., y]` of all layers. `outs`: where to leave the products (`None`s:
    anywhere)."""
    a, z = [x], []
    for i, w in enumerate(weights):
        if i:
            a.append(activate(net.activation, z[-1]))
        z.append(product(a[-1], w, outs and outs[i]))
    return a, z


def inner_gradient(
    net: Net,
    weights: list[Tensor],
    k: Tensor,
    offset: Tensor,
    gain: Tensor | None,
    passed: tuple[list[Tensor], list[Tensor]] | None = None,
    room: list[Tensor | None] | None = None,
):
    """The factors of g_{l,t} = a_{l-1,t}^T delta_{l,t} at `weights` (W_xi), in closed form.

    `offset` is `inner_offset(...)`, `gain` the LayerNorm's. Returns `(a, delta, error)`: layer inputs a_0..a_{L-1},
    loss gradients delta_1..delta_L (both lists of `[..., C, width]`) and the error f(W, k) - v. `passed`: what
    `pass_through` says of k, if that is at hand. `room`: where to leave dl/da behind each hidden layer, for the outer
    backward; then the error takes the place of y, which it wants to see again only with a LayerNorm.
    """
    a, z = passed or pass_through(net, weights, k)
    grad_act, y = room or [None] * len(weights), z[-1]
    if gain is None:
        delta = error = torch.add(y, offset, out=None if room is None else y)
    else:
        normed = standardise(y, net.eps)
        error = torch.addcmul(offset, gain, normed.h)
        delta = through_standardise(gain * error, normed)
    deltas = [delta]
    for i in range(len(a) - 2, -1, -1):
        delta = through_activation(net.activation, product(delta, weights[i + 1].mT, grad_act[i]), z[i])
        deltas.append(delta)
    return a, deltas[::-1], error


def slopes(name: str, parts: list[Tensor], out: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """phi'(z) of rows z `[P, n, width]`, and scale * phi''(z) of the last C of them, for the outer backward; phi(z)
    goes to `out`. `parts`: z in pieces along n; `scale`: `[P, C, width]`, C at most the last piece's rows."""
    C = scale.shape[1]
    if name == "silu":  # few and small buffers: time goes by the bytes that leave the cache
        s, sizes = out.new_empty(out.shape), [z.shape[1] for z in parts]
        for z, a, s_z in zip(parts, out.split(sizes, 1), s.split(sizes, 1)):
            torch.mul(z, torch.sigmoid(z, out=s_z), out=a)
        z, a, s_z = (x[:, -C:] for x in (z, a, s_z))
        curve = torch.add(z, a, alpha=-2).add_(2).mul_(scale).mul_(torch.addcmul(s_z, s_z, s_z, value=-1))
        return torch.lerp(out, torch.ones((), dtype=s.dtype, device=s.device), s, out=s), curve  # a + s (1 - a)
    z = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    out.copy_(F.gelu(z))  # `gelu.out` leaves a strided float32 buffer unwritten
    slope = torch.ones_like(z)  # slow with ones that are expanded
    torch.ops.aten.gelu_backward.grad_input(slope, z, grad_input=slope)
    z = z[:, -C:]
    square = z * z
    bell = torch.add(torch.full_like(square[:1, :1, :1], -0.5 * math.log(2 * math.pi)), square, alpha=-0.5).exp_()
    return slope, bell.mul_(square.neg_().add_(2)).mul_(scale)


def norms(x: Tensor, out: Tensor | None = None, keepdim: bool = False) -> Tensor:
    """Lengths of the vectors along the last axis."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=keepdim, out=out)


def excess(a: list[Tensor], delta: list[Tensor], bound: float) -> Tensor:
    """|g_t| / bound over all layers, 1 where the bound holds, of the `norms` of a and delta per layer. No square of
    theirs or of the bound leaves the range of a dtype. Not for autograd, where `hypot` has no gradient at 0."""
    size = functools.reduce(torch.hypot, [x * d for x, d in zip(a, delta)])
    return (size if bound == 1 else size.div_(bound)).clamp_min_(1)


def bounded(lr: Tensor, a: list[Tensor], delta: list[Tensor], bound: float) -> Tensor:
    """theta_t with |g_t| over all layers limited to `bound`: the chunk then moves by at most sum(theta) * bound."""
    parts = torch.stack([smooth_norms(x) * smooth_norms(d) / bound for x, d in zip(a, delta)], -1)
    # scaled, for |g_t| may be in the range of a dtype, and its square not
    most = parts.detach().amax(-1).clamp(torch.finfo(parts.dtype).tiny, torch.finfo(parts.dtype).max)
    size = smooth_norms(parts / most[..., None]) * most
    return lr / torch.where(exceeds(size), size, size.detach()).clamp_min(1)


def exceeds(size: Tensor) -> Tensor:
    """Where the outer gradient meets a bound, of |g_t| / bound. Not at the bound itself, up to rounding: there is the
    first gradient of a linear memory with W_init = 0, whose key and value have the length 1, for a bound of 1."""
    return size > 1 + ROUNDING * torch.finfo(size.dtype).eps


def smooth_norms(x: Tensor) -> Tensor:
    """`norms` with a second derivative at 0, where nothing is bounded: 0."""
    zero = (x == 0).all(-1)
    return norms(torch.where(zero[..., None], 1.0, x)).masked_fill(zero, 0.0)


def smooth_unit_vectors(x: Tensor, least: float = SMALLEST_NORM) -> Tensor:
    """`F.normalize(x, dim=-1, eps=least)` with all derivatives where x is 0, too: a vector has no direction there to
    change, and the slope of what `F.normalize` computes there, 1e12, is too much for float32 after a few layers."""
    size = smooth_norms(x)[..., None]
    return torch.where(size > least, x, x.detach()) / size.clamp_min(least)
