"""Functions that `torch.export` takes as one operator each.

How many chunks the rows of a batch fill depends on its mask, and how many steps a scan has on its length: no graph of
the steps would serve every batch. With `tnt_hf::memory` and `tnt_hf::project_queries` in their place one graph does. A
program needs them where it is loaded: import tnt_hf before `torch.export.load`.

Travels with every pushed checkpoint.
"""

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiler_tnt import is_exporting
from .step_tnt import MemoryState


class Like(NamedTuple):
    """A tensor that is yet to be computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def as_operator(name: str, results: Callable[..., Any]) -> Callable:
    """
    A function of tensors, options and memory states that an exported program calls, instead of showing its steps.

    It has no gradient there. Everywhere else it is the function itself.

    Args:
        name: of the operator behind `tnt_hf::`.
        results: of the function's arguments, what the function returns with a `Like` in each tensor's place.
    """

    def decorate(function: Callable) -> Callable:
        def run(tensors: list[Tensor], call: str) -> list[Tensor]:
            found = []
            args, kwargs = _unpack(json.loads(call), tensors)
            _pack(function(*args, **kwargs), found)
            # an operator's results share no memory, and lie in it as `shapes` says
            return [x.clone(memory_format=torch.contiguous_format) for x in found]

        def shapes(tensors: list[Tensor], call: str) -> list[Tensor]:
            expected = []
            args, kwargs = _unpack(json.loads(call), tensors)
            _pack(results(*args, **kwargs), expected)
            return [tensors[0].new_empty(x.shape, dtype=x.dtype) for x in expected]

        schema = "(Tensor[] tensors, str call) -> Tensor[]"
        operator = torch.library.custom_op(f"tnt_hf::{name}", run, mutates_args=(), schema=schema)
        operator.register_fake(shapes)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not is_exporting():
                return function(*args, **kwargs)
            tensors = []
            call = json.dumps(_pack((args, kwargs), tensors))
            return _unpack(_pack(results(*args, **kwargs), []), operator(tensors, call))

        called.__code__ = called.__code__.replace(co_name=name)  # torch.compile counts compilations of a code object
        return called

    return decorate


def _pack(x: Any, tensors: list) -> Any:
    """x as JSON takes it; its tensors go to the end of `tensors`, and their places there stand for them."""
    if isinstance(x, (Tensor, Like)):
        tensors.append(x)
        return {"tensor": len(tensors) - 1}
    if isinstance(x, MemoryState):
        return {"state": {name: _pack(y, tensors) for name, y in vars(x).items()}}
    if isinstance(x, dict):
        return {"dict": {name: _pack(y, tensors) for name, y in x.items()}}
    if isinstance(x, tuple):
        return {"tuple": [_pack(y, tensors) for y in x]}
    return [_pack(y, tensors) for y in x] if isinstance(x, list) else x


def _unpack(x: Any, tensors: list) -> Any:
    """What `_pack` packed."""
    if isinstance(x, list):
        return [_unpack(y, tensors) for y in x]
    if not isinstance(x, dict):
        return x
    [(kind, content)] = x.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_unpack(content, tensors))
    content = {name: _unpack(y, tensors) for name, y in content.items()}
    return MemoryState(**content) if kind == "state" else content
