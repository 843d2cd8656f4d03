"""What backwards written by hand cannot do: second derivatives, and transforms of `torch.func`. Travels with every
pushed checkpoint."""

import functools
from collections.abc import Callable

import torch


OF_A_MODEL = "; a model has memory_implementation, and needs attn_implementation='eager', too"


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
                "create_graph=True: implementation='chunk', 'native' and 'triton' have first derivatives only, "
                f"'naive' has all{OF_A_MODEL}"
            )
        return backward(ctx, *grads)

    return checked


def transformed() -> bool:
    """Whether a transform of `torch.func` (grad, jvp, vmap, ...) runs, which knows torch's own operations alone."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def check_transforms() -> None:
    """
    Raises:
        RuntimeError: what calls this is not a torch operation and cannot be transformed.
    """
    if transformed():
        raise RuntimeError(
            f"torch.func: implementation='chunk', 'native' and 'triton' cannot be transformed, 'naive' can{OF_A_MODEL}"
        )
