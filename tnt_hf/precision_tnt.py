"""The precision that a memory computes in: float32 at least, inside autocast as well. Travels with every pushed
checkpoint."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which takes a microsecond where it does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast rounds to here, `None` where it is off. The meta device has none to ask."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def rounded(x: Tensor) -> Tensor:
    """x as autocast rounds it for a matrix product: done here, it is done and kept once for all layers that read x."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype != torch.float32 else x.to(dtype)


def full_precision(device: torch.device) -> AbstractContextManager:
    """Inside it autocast rounds nothing."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
