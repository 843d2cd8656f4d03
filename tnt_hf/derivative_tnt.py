"""What backwards written by hand cannot do: second derivatives, and transforms of `torch.func`. Travels with every
pushed checkpoint."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad


OF_A_MODEL = "; a model has memory_implementation, and needs attn_implementation='eager', too"


def once_differentiable(backward: Callable) -> Callable:
    """
    The `backward` of a `torch.autograd.Function` that autograd cannot differentiate again. torch's decorator of this
    name lets `torch.autograd.grad` of a gradient pass, and leaves out what goes through the function.

    Raises:
        RuntimeError: `create_graph=True`, which is to differentiate once more; many gradients at once.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: implementation='chunk', 'native' and 'triton' have first derivatives only, "
                f"'naive' has all{OF_A_MODEL}"
            )
        if any(batched(x) for x in grads):
            raise RuntimeError(
                "is_grads_batched=True (or vectorize=True): implementation='chunk', 'native' and 'triton' take one "
                f"gradient at a time, 'naive' takes many{OF_A_MODEL}"
            )
        return backward(ctx, *grads)

    return checked


def saved(ctx) -> list[torch.Tensor | None]:
    """What `save_for_backward` was given, row after row, as kernels read it: hooks on saved tensors may have changed
    strides. To be read once: gradient checkpointing makes it."""
    return [None if x is None else x.contiguous() for x in ctx.saved_tensors]


def batched(x: torch.Tensor | None) -> bool:
    """Whether x stands for many gradients: `is_grads_batched` of `torch.autograd.grad`, `vectorize` of Jacobians."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def transformed() -> bool:
    """Whether a transform of `torch.func` (grad, jvp, vmap, ...) runs, which knows torch's own operations alone."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def has_tangent(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them carries a forward-mode derivative. That a level of those is open says nothing: it may be
    another thread's."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def check_transforms() -> None:
    """
    Raises:
        RuntimeError: what calls this is not a torch operation and cannot be transformed.
    """
    if transformed():
        raise RuntimeError(
            f"torch.func: implementation='chunk', 'native' and 'triton' cannot be transformed, 'naive' can{OF_A_MODEL}"
        )
