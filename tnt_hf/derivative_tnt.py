"""Backwards written by hand give first derivatives only. Travels with every pushed checkpoint."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """
    The `backward` of a `torch.autograd.Function` that autograd cannot differentiate again. torch's decorator of this
    name lets `torch.autograd.grad` of a gradient pass, and leaves out what goes through the function.

    Raises:
        RuntimeError: `create_graph=True`, which is to differentiate once more.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: memories and their convolution and norms have first derivatives only;"
                " memory_chunkwise(implementation='naive') has them all"
            )
        return backward(ctx, *grads)

    return checked
