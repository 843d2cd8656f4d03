"""The precision that a memory computes in: float32 at least, inside autocast as well. Travels with every pushed
checkpoint."""

from contextlib import AbstractContextManager, nullcontext

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast rounds to here, `None` where it is off. The meta device has none to ask."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def full_precision(device: torch.device) -> AbstractContextManager:
    """Inside it autocast rounds nothing."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
