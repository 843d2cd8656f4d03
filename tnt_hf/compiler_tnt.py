"""What differs while a model is compiled or exported, and one decoded token in the words that a compiler likes.

Axis legend
    B batch   P programs   n rows of a program, few   K inner width   V outer width

A compiler makes one loop of a sum of products and the elementwise work around it. For a `bmm` or `linear` it calls a
library, which for one token costs more than the arithmetic. Travels with every pushed checkpoint.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .precision_tnt import autocast_dtype, cast, wide


FEW_ROWS = 16  # of 64 rows, 2,048 wide, the library is ahead; a dynamic batch may have as many


if torch.__version__ < (2, 12):  # whose compiler takes `is_exporting()` for true in all that it compiles

    def is_exporting() -> bool:
        """Whether this becomes a program of `torch.export`."""
        return torch.compiler._is_exporting_flag
else:
    is_exporting = torch.compiler.is_exporting


@torch.compiler.disable
def apart(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """`function` of these arguments, in no graph: where one would break in it, and be made anew for every chunk size,
    until torch gives up on compiling the functions around it as well."""
    return function(*args, **kwargs)


def fuses() -> bool:
    """Whether this is being compiled. An exported program may be run operation by operation, so it is not meant."""
    return torch.compiler.is_compiling() and not is_exporting()


def fused_product(x: Tensor, w: Tensor) -> Tensor:
    """x w, of `[P, n, K]` and `[P, K, V]`."""
    return (x[..., None] * w[:, None]).sum(2)


def fused_linear(x: Tensor, layer: nn.Linear) -> Tensor | None:
    """layer(x) of one token per row, x `[B, K]` or `[B, 1, K]`. `None` where it had better be called: not compiled,
    many rows or tokens, autocast, a weight that is not a plain tensor."""
    if not fuses() or type(layer.weight) is not nn.Parameter or autocast_dtype(x.device) is not None:
        return None
    if not statically_known_true(x[..., 0].numel() <= FEW_ROWS):
        return None
    weight, dtype = layer.weight, wide(x.dtype)
    y = (cast(x, dtype)[..., None, :] * cast(weight, dtype)).sum(-1)
    return cast(y if layer.bias is None else y + layer.bias, x.dtype)
