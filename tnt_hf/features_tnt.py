"""Feature maps of the memory's keys and queries.

Axis legend
    D memory head width   F = D (D + 1) / 2 pairs i <= j of its channels   S = D // 2 + 1 distances of a pair around a
    ring of D

Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .derivative_tnt import transformed


FEATURE_MAPS = ("identity", "quadratic")
ROOT_2 = 2.0**0.5
PAIRS: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}  # of `pairs`


def feature_width(name: str, D: int) -> int:
    """Width of what the memory sees of keys and queries D wide."""
    return D * (D + 1) // 2 if name == "quadratic" else D


def pairs(D: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """i <= j of all pairs and their weight, each `[F]`; made once, as decoding would make them anew. A graph that is
    being compiled can only take what is there already."""
    key = D, device, dtype
    if (found := PAIRS.get(key)) is None:
        with torch.inference_mode(False):
            i, j = torch.triu_indices(D, D, device=device)
            found = i, j, torch.where(i == j, torch.ones((), dtype=dtype, device=device), ROOT_2)
        if not torch.compiler.is_compiling() and not transformed() and type(i) is Tensor:
            PAIRS[key] = found
    return found


def quadratic(x: Tensor, size: Tensor | None = None) -> Tensor:
    """`[..., D]` -> `[..., F]`: the products x_i x_j, weighted so that quadratic(x) . quadratic(y) is (x . y)^2. Keys
    of unit length keep it, and far more of them fit into a linear memory without interfering. size: `[..., 1]` to
    divide x by."""
    *lead, D = x.shape
    i, j, weight = pairs(D, x.device, x.dtype)
    # `gather`, as `index_select` of a last axis costs several times as much, backward as well.
    x, y = x.gather(-1, i.expand(*lead, -1)), x.gather(-1, j.expand(*lead, -1))
    if size is not None:  # not before: a compiler would divide, and look for what to divide by, for each product anew
        x, y = x / size, y / size
    return x * (y * weight)


# ------------------------------------- the same for a chunk, by distance: neither gather nor scatter


class Ring(NamedTuple):
    """The basis of `ring_products` beside that of `quadratic`. Pairs at distance D / 2 are there twice, 1 / sqrt 2 as
    long."""

    pair: Tensor  # [S D] which of quadratic's products each one is
    scale: Tensor  # [S D, 1] its length beside that one's
    place: Tensor  # [F] where each of quadratic's products is to be found

    @classmethod
    def of(cls, D: int, like: Tensor) -> "Ring":
        """Of vectors D wide; dtype and device of `like`."""
        i, s = (torch.arange(n, device=like.device) for n in (D, D // 2 + 1))
        other = (i + s[:, None]) % D
        low, high = torch.minimum(i, other), torch.maximum(i, other)
        pair = (low * D - low * (low - 1) // 2 + high - low).flatten()
        scale = like.new_ones(len(s), D)
        if D % 2 == 0:
            scale[-1] /= ROOT_2
        place = pair.new_empty(feature_width("quadratic", D))
        place[pair.flip(0)] = torch.arange(len(pair), device=like.device).flip(0)
        return cls(pair, scale.flatten()[:, None], place)

    def enter(self, weights: Tensor) -> Tensor:
        """`[..., F, d]` for quadratic's products -> `[..., S D, d]` for the ring's, the same function."""
        return weights.index_select(-2, self.pair) * self.scale

    def leave(self, weights: Tensor) -> Tensor:
        """The inverse of `enter`."""
        return (weights / self.scale).index_select(-2, self.place)


def _around(x: Tensor) -> Tensor:
    """x `[..., D]` -> x_{(i + s) mod D}, a view `[..., S, D]`."""
    D = x.shape[-1]
    return torch.cat([x, x], -1).unfold(-1, D, 1)[..., : D // 2 + 1, :]


def _weigh(products: Tensor) -> None:
    """`[..., S, D]` of which all have the weight sqrt 2: squares have none, nor do pairs that are there twice."""
    for s in (0,) if products.shape[-1] % 2 else (0, -1):
        products[..., s, :].div_(ROOT_2)


def ring_products(x: Tensor) -> Tensor:
    """`[..., D]` -> `[..., S D]`: x_i x_{(i + s) mod D}, s by s, with scores (x . y)^2 like `quadratic`'s. Without
    autograd, see `through_ring_products`."""
    products = x.new_empty(*x.shape[:-1], x.shape[-1] // 2 + 1, x.shape[-1])
    torch.mul(x[..., None, :], _around(x * ROOT_2), out=products)
    _weigh(products)
    return products.flatten(-2)


def through_ring_products(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x `[..., D]` from that of its `ring_products` `[..., S D]`, which is overwritten."""
    D, y, grad = x.shape[-1], x * ROOT_2, grad.unflatten(-1, (-1, x.shape[-1]))
    _weigh(grad)
    d_x, half = (grad * _around(y)).sum(-2), D // 2
    other = x.new_empty(*grad.shape[:-1], half + D)  # of x_{(i + s) mod D}, with its end before its beginning
    torch.mul(grad, y[..., None, :], out=other[..., half:])
    other[..., :half] = other[..., D:]
    *outer, row, one = other.stride()
    return d_x.add_(other.as_strided(grad.shape, (*outer, row - 1, one), half).sum(-2))
