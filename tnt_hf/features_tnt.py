"""Feature maps of the memory's keys and queries.

Axis legend
    D memory head width   i, j the channels of a pair

Travels with every pushed checkpoint.
"""

import torch
from torch import Tensor


PAIRS: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}  # of `_pairs`


def _pairs(D: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """i <= j of all pairs and their weight, each `[D (D + 1) / 2]`; made once, as decoding would make them anew."""
    key = D, device, dtype
    if key not in PAIRS:
        with torch.inference_mode(False):
            i, j = torch.triu_indices(D, D, device=device)
            found = i, j, torch.where(i == j, torch.ones((), dtype=dtype, device=device), 2.0**0.5)
        if torch.compiler.is_compiling() or type(i) is not Tensor:
            return found
        PAIRS[key] = found
    return PAIRS[key]


def quadratic(x: Tensor) -> Tensor:
    """`[..., D]` -> `[..., D (D + 1) / 2]`: the products x_i x_j, weighted so that quadratic(x) . quadratic(y) is
    (x . y)^2. Keys of unit length keep it, and far more of them fit into a linear memory without interfering."""
    i, j, weight = _pairs(x.shape[-1], x.device, x.dtype)
    # `gather`, as `index_select` of a last axis costs several times as much, backward as well.
    x_i, x_j = (x.gather(-1, index.expand(*x.shape[:-1], -1)) for index in (i, j))
    return x_i * (x_j * weight)
