"""The precision that a memory computes in: float32 at least, inside autocast as well. Travels with every pushed
checkpoint."""

from contextlib import AbstractContextManager, nullcontext

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(device: torch.device) -> AbstractContextManager:
    """Inside it autocast rounds nothing. The meta device has no autocast to turn off."""
    enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()
