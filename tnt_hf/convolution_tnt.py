"""The causal depthwise convolution on the memory's q, k and v, over the valid tokens of each document.

Axis legend
    B batch   T tokens of this call   C channels of q, k and v together   taps = kernel - 1 earlier tokens

Travels with every pushed checkpoint.
"""

import torch
from torch import Tensor, nn

from .grid_tnt import document_starts, made_once


class TNTCausalConv(nn.Conv1d):
    """Depthwise convolution of `[B, C, L]` without padding that starts near the identity on the newest tap."""

    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)


def convolve(
    convs: list[nn.Module],
    parts: tuple[Tensor, ...],
    taps: int,
    tail: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """
    Causal depthwise convolution over the valid tokens of each document, as if each stood alone.

    Args:
        convs: one for each of parts, which are `[B, T, channels]` and C channels together.
        tail: `[B, C, taps]`, each row's last valid inputs before this call; `None` at the beginning.
        mask: `[B, T]` bool, `False` = absent. segment_ids: `[B, T]` int, a change starts a new document.

    Returns:
        The result `[B, T, C]`, 0 at absent tokens, and the next call's tail.
    """
    x, channels = torch.cat(parts, -1), [part.shape[-1] for part in parts]
    B, T, C = x.shape
    tail = x.new_zeros(B, C, taps) if tail is None else tail.to(x.dtype)
    if segment_ids is None and (mask is None or T == 1):
        window = torch.cat([tail, x.transpose(1, 2)], -1)
        new_tail, y = window[..., -taps:], _depthwise(convs, channels, window).transpose(1, 2)
        if mask is not None:
            new_tail, y = torch.where(mask[..., None], new_tail, tail), y * mask[..., None]
        return y, new_tail
    # Move valid tokens together, documents apart by `taps` zeros, and look the results up again.
    given, mask = mask, torch.ones(B, T, dtype=torch.bool, device=x.device) if mask is None else mask
    place = taps + mask.cumsum(1) - 1
    length = taps + T
    if segment_ids is not None:
        documents, last = made_once(_documents, given, segment_ids)
        place = place + documents * taps
        length += last * taps
    # Absent tokens share a slot nobody reads.
    target = torch.where(mask, place, length)[..., None].expand(-1, -1, C)
    row = torch.cat([tail.transpose(1, 2), x.new_zeros(B, length + 1 - taps, C)], 1).scatter(1, target, x)
    y = _depthwise(convs, channels, row[:, :length].transpose(1, 2)).transpose(1, 2)
    y = y.gather(1, (place - taps).clamp_min(0)[..., None].expand(-1, -1, C)) * mask[..., None]
    last = torch.where(mask, place, taps - 1).amax(1)
    recent = last[:, None] + torch.arange(1 - taps, 1, device=x.device)
    return y, row.gather(1, recent[..., None].expand(-1, -1, C)).transpose(1, 2)


def _documents(mask: Tensor | None, segment_ids: Tensor) -> tuple[Tensor, int]:
    """Numbers `[B, T]` of the documents of each row, from 0, and the largest."""
    documents = document_starts(segment_ids, mask).cumsum(1)
    return documents, int(documents.max())


def _depthwise(convs: list[nn.Module], channels: list[int], window: Tensor) -> Tensor:
    """`[B, C, L]` -> `[B, C, L - taps]`."""
    if not (torch.is_grad_enabled() or torch.is_autocast_enabled(window.device.type)):
        if all(_is_one_product(conv, window) for conv in convs):
            # For one token a convolution's set-up costs many times its arithmetic.
            weight = torch.cat([conv.weight for conv in convs])[:, 0]
            wide = window if window.dtype.itemsize >= 4 else window.float()
            return (wide * weight).sum(-1, keepdim=True).to(window.dtype)
    # Called as modules, so that adapters on them take effect.
    return torch.cat([conv(part) for conv, part in zip(convs, window.split(channels, 1))], 1)


def _is_one_product(conv: nn.Module, window: Tensor) -> bool:
    """Whether calling `conv` multiplies each channel of `window` by its weights and does nothing else."""
    if not isinstance(conv, TNTCausalConv):
        return False
    if conv._forward_hooks or conv._forward_pre_hooks or "forward" in vars(conv):
        return False
    weight = conv.weight
    return window.shape[2] == weight.shape[2] and window.dtype == weight.dtype
