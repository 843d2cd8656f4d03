"""Whether a memory runs in Triton: what the kernels can do, and what "auto" stands for.

Axis legend
    H memory heads   d_in, d_out widths of a layer of the memory network

No kernel is imported here: whoever has chosen them does that. Travels with every pushed checkpoint.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .kernels_parts_tnt import SM_90, WIDTHS, generation, shared_memory, unavailable


STATE_FLOATS = 2 * 64 * 256  # of W: what does not stay in registers is spilled, and beyond this does not compile
# Of W and S, float32 operands twice, where tensor cores have a memory of their own (sm_100): what was compiled with so
# many fits in, and some with twice as many do not.
TENSOR_MEMORY_FLOATS = 1 << 14
# Of keys. Narrower ones are right in the interpreter and on the emulated GPU, which checks every access; but an H100
# has stopped with an illegal one in the backward of a small model of 16 channels per head, and it is not known why.
LEAST_WIDTH = 64


@cache
def _report(field: str, reason: str) -> None:
    logging.getLogger(__name__).warning("%s='auto' runs 'chunk' on CUDA: %s.", field, reason)


def choose(field: str, value: str, device: torch.device, unsupported: Callable[..., str | None], *operands) -> str:
    """The implementation that `value` of `field` stands for: "auto" is "triton" on CUDA where that can run and keys
    have `LEAST_WIDTH` channels, else "chunk" (on CUDA it says why, once). `unsupported(device, *operands)` is one of
    those below. "native" is "chunk" here: whether chunks, or a decoded token, run in C, `native_build_tnt.runs_native`
    says, and all else is torch beside it.

    Raises:
        ValueError: "triton" where it cannot run, with the reason.
    """
    if value not in ("auto", "triton") or (value == "auto" and device.type != "cuda"):
        return "chunk" if value in ("auto", "native") else value
    reason = unsupported(device, *operands)
    if reason is None and value == "auto":
        [width, *_] = (x for x in operands if isinstance(x, int | list | tuple))  # or weights of that many rows
        reason = untrusted(width if isinstance(width, int) else width[0].shape[-2])
    if reason is None:
        return "triton"
    if value == "triton":
        raise ValueError(f"{field}='triton' cannot run here: {reason}; use 'auto' or 'chunk'")
    if not torch.compiler.is_compiling():  # a message would break the graph; the call that was not compiled had it
        _report(field, reason)
    return "chunk"


def untrusted(width: int) -> str | None:
    """Why "auto" leaves the kernels alone for keys of `width` channels, or `None`."""
    if width >= LEAST_WIDTH:
        return None
    return f"keys have {width} channels, and kernels for less than {LEAST_WIDTH} are not trusted on a GPU yet"


def unsupported_scan(
    device: torch.device,
    dtype: torch.dtype,
    read: str,
    weights: list[Tensor],
    operands: torch.dtype,
    momentum: bool,
    groups: int = 1,
) -> str | None:
    """Why the kernels cannot run a memory, or `None` if they can: on `device`, with state and arithmetic in `dtype`,
    for a read, weights `[H, d_in, d_out]`, q, k and v of type `operands`, with or without momentum, and `groups` query
    heads of each memory head."""
    if reason := unsupported_step(device, dtype, weights):
        return reason
    floats, room = sum(w.shape[1] * w.shape[2] for w in weights), shared_memory(device)
    if read == "current":
        if floats > STATE_FLOATS:
            return f"a head's weights are {floats} numbers, and the kernels hold {STATE_FLOATS}"
        state = floats * (2 if momentum else 1) * (2 if operands == torch.float32 else 1)
        if generation(device) in (10, 11) and state > TENSOR_MEMORY_FLOATS:
            return f"a head's state takes {state} numbers of tensor memory, and the kernels use {TENSOR_MEMORY_FLOATS}"
        # measured, rounded up: backward stages weights, gradients and those of a momentum, wgmma's operands in place
        light = operands == torch.bfloat16 and room >= SM_90
        need = (5 if not momentum else 6 if light else 9) * floats
        if operands == torch.float32:  # a block's hidden units, where there are many of them for narrow heads
            need = max(need, 512 * max(n for w in weights for n in w.shape[1:]))
        if groups > 1 and room < SM_90 and (len(weights) == 1 or operands == torch.float32):  # a loop stages its tiles
            need = max(need, (8 if len(weights) == 1 else 14) * floats)
    else:
        if any(n not in WIDTHS for w in weights for n in w.shape[1:]):
            found = [tuple(w.shape[1:]) for w in weights]
            return f"a memory that reads at its chunk's start has weights of {found}, and the kernels widths {WIDTHS}"
        # measured at head widths 64 and 128: weights, gradients and those of a momentum, and some of them transposed
        need = (7 if momentum else 5) * operands.itemsize * floats + 2304
    return f"a head's weights take {need} bytes, and a program has {room} on this GPU" if need > room else None


def unsupported_step(device: torch.device, dtype: torch.dtype, weights: list[Tensor]) -> str | None:
    """The same for one token of any memory."""
    widths = [weights[0].shape[-2], *(w.shape[-1] for w in weights)]
    if reason := unavailable(device):
        return reason
    if dtype != torch.float32:
        return f"the state would be {dtype}, and the kernels have float32"
    if len(weights) > 2:
        return f"the memory network has {len(weights)} layers, and the kernels 1 or 2"
    if any(n < 16 or n & (n - 1) for n in widths):
        return f"the memory network has widths {widths}, and the kernels powers of two from 16"
    return None


def unsupported_features(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """The same for q, k and v with heads of `width`, from the projections to the memories, computed in `dtype`."""
    if reason := unavailable(device):
        return reason
    if dtype != torch.float32:
        return f"they would be {dtype}, and the kernels have float32"
    if not 16 <= width <= 512 or width & (width - 1):
        return f"heads have the width {width}, and the kernels powers of two from 16 to 512"
    return None


def unsupported_projection(
    device: torch.device, dtype: torch.dtype, width: int, operands: torch.dtype, groups: int
) -> str | None:
    """The same for the Q-K projection of keys of `width`, computed in `dtype` of `operands`, for `groups` query heads
    of each key head."""
    if reason := unavailable(device):
        return reason
    if dtype != torch.float32:
        return f"the projection would be {dtype}, and the kernels have float32"
    if width not in WIDTHS:
        return f"keys have the width {width}, and the kernels one of {WIDTHS}"
    # measured, rounded up: a loop over float32 query heads stages its tiles, all else fits in every GPU's
    staged = operands != torch.bfloat16 and groups > 1
    need, room = 4 * width * width + 2304 * width if staged else 0, shared_memory(device)
    if need > room:
        return f"{groups} query heads of width {width} take {need} bytes, and a program has {room} on this GPU"
    return None
