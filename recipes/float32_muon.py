"""Muon whose matrix products are float32's."""

import torch
from torch.overrides import TorchFunctionMode


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` rounds its Newton-Schulz iteration to bfloat16. A CPU without instructions for it emulates
    them, which can take longer than the model's own forward and backward together."""

    def step(self) -> None:
        """As in torch, without a closure."""
        with _InFloat32():
            super().step()


class _InFloat32(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # Muon goes on in place
        return func(*args, **(kwargs or {}))
