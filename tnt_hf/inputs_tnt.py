"""The checks of the memory's public ops: every argument's shape, dtype and range, before any compute.

Axis legend
    B batch   T tokens   H memory (key/value) heads   Hq query heads   K key width   V value width   L layers

Each raises a `ValueError` that names the argument and what it got. Travels with every pushed checkpoint.
"""

import math

import torch
from torch import Tensor

from .features_tnt import feature_width


TINY = torch.finfo(torch.float32).tiny


def check_tensor(name: str, x: Tensor, shape: tuple, like: Tensor | None = None) -> None:
    """`name` is a floating point tensor of `shape` (`None`: any size) that is not empty, on the device of `like`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(
            f"{name} must be a floating point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        )
    if x.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape)):
        raise ValueError(f"{name} must have shape {['*' if n is None else n for n in shape]}, got {list(x.shape)}")
    if 0 in x.shape:
        raise ValueError(f"{name} must not be empty, got shape {list(x.shape)}")
    if like is not None:
        check_device(name, x, like)


def check_device(name: str, x: Tensor, like: Tensor) -> None:
    """`name` is where `like`, the queries or keys, is."""
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like q, got {x.device}")


def check_flag(name: str, value) -> None:
    """`value` is a bool: any other, like "no", would count as its truth."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value) -> None:
    """`value` is a positive finite number, also as a normal one of float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not TINY <= value < math.inf:
        raise ValueError(f"{name} must be a positive finite number of at least {TINY:.3g}, got {value!r}")


def check_positive(name: str, value, optional: bool = False) -> None:
    """`value` counts tokens: an int of at least 1, or `None` where that is allowed."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 63:
        raise ValueError(f"{name} must be a positive number of tokens{' or None' if optional else ''}, got {value!r}")


def check_rows(q: Tensor, k: Tensor, mask, segment_ids) -> None:
    """Query heads fit the key heads; mask `[B, T]` is bool, segment_ids `[B, T]` integers."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q must have a multiple of k's {k.shape[2]} heads, got {q.shape[2]}")
    for name, x in (("mask", mask), ("segment_ids", segment_ids)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        check_device(name, x, q)
        if tuple(x.shape) != tuple(q.shape[:2]):
            raise ValueError(f"{name} must have shape {list(q.shape[:2])}, got {list(x.shape)}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (False = absent), got {mask.dtype}")
    if segment_ids is not None and (
        segment_ids.is_floating_point() or segment_ids.is_complex() or segment_ids.dtype == torch.bool
    ):
        raise ValueError(f"segment_ids must be integers, got {segment_ids.dtype}")


def check_inputs(
    q, k, v, lr, weights, momentum, decay, layernorm, residual, mask, segment_ids, state, feature_map
) -> None:
    """All tensors of `memory_chunkwise` against each other."""
    check_tensor("q", q, (None, None, None, None))
    B, T, _, K = q.shape
    check_tensor("k", k, (B, T, None, K), q)
    H = k.shape[2]
    check_tensor("v", v, (B, T, H, None), q)
    for name, x in (("lr", lr), ("momentum", momentum), ("decay", decay)):
        if x is not None or name == "lr":
            check_tensor(name, x, (B, T, H), q)
    check_rows(q, k, mask, segment_ids)
    if residual and feature_map != "identity":
        raise ValueError(f"residual=True needs keys as wide as values, unlike feature_map={feature_map!r}")
    if isinstance(weights, Tensor) or not hasattr(weights, "__len__") or not len(weights):
        raise ValueError(f"weights must be a list that holds at least one layer, got {_brief(weights)}")
    width = K = feature_width(feature_map, K)
    for i, w in enumerate(weights):
        check_tensor(f"weights[{i}]", w, (H, width, v.shape[3] if i == len(weights) - 1 else None), q)
        width = w.shape[2]
    if residual and K != v.shape[3]:
        raise ValueError(f"residual=True needs keys and values of one width, got K={K}, V={v.shape[3]}")
    if layernorm is not None:
        if not isinstance(layernorm, (tuple, list)) or len(layernorm) != 3:
            raise ValueError(f"layernorm must be (gain, bias, eps), got {_brief(layernorm)}")
        check_tensor("layernorm gain", layernorm[0], (H, v.shape[3]), q)
        check_tensor("layernorm bias", layernorm[1], (H, v.shape[3]), q)
        check_number("layernorm eps", layernorm[2])
    if state is not None:
        for name in ("weights", "chunk_weights", "momentum"):
            tensors = getattr(state, name, ())
            if tensors is None and name == "momentum":
                continue
            if not isinstance(tensors, (tuple, list)) or len(tensors) != len(weights):
                raise ValueError(
                    f"initial_state.{name} must hold {len(weights)} layers, got {_brief(tensors or state)}"
                )
            for i, (x, w) in enumerate(zip(tensors, weights)):
                check_tensor(f"initial_state.{name}[{i}]", x, (B, *w.shape), q)
        check_projection_state(state.projection, state.time, q, H, K)


def check_projection_state(M: Tensor | None, time: Tensor, q: Tensor, H: int, K: int) -> None:
    """M `[B, H, K, K]` or `None`, and memory time `[B]` int64."""
    B = q.shape[0]
    if M is not None:
        check_tensor("initial_state.projection", M, (B, H, K, K), q)
    if not isinstance(time, Tensor) or tuple(time.shape) != (B,) or time.dtype != torch.int64:
        found = f"{time.dtype} {list(time.shape)}" if isinstance(time, Tensor) else _brief(time)
        raise ValueError(f"initial_state.time must be int64 [{B}], got {found}")
    check_device("initial_state.time", time, q)
    if time.is_cpu and not torch.compiler.is_compiling() and bool((time < 0).any()):  # on a GPU a look would wait
        raise ValueError(f"initial_state.time must count tokens, got {time.tolist()}")


def _brief(x) -> str:
    """A value for a message; of tensors and what holds them only the type."""
    return repr(x) if x is None or isinstance(x, (str, int, float)) else f"a {type(x).__name__}"
