"""The causal depthwise convolution on the memory's q, k and v, over the valid tokens of each document.

Axis legend
    B batch   T tokens of this call   C channels of q, k and v together   taps = kernel - 1 earlier tokens

Travels with every pushed checkpoint.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .derivative_tnt import batched, transformed
from .grid_tnt import document_starts, made_once


BLOCK = 256  # tokens
ACCELERATE = "accelerate.hooks"


class _Taps(torch.autograd.Function):
    """Depthwise convolution of x `[B, L, C]` with weight `[C, 1, K]`: y_t = sum_i weight_i x_{t + i}. Some tokens at a
    time, so that every tap finds them in the cache: several times as fast on a CPU as the library's kernel, whose
    layout `[B, C, L]` would slow down all that reads y as well. In half precision sums are float32, rounded once."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = _Taps.of(weight)
        y = x.new_empty(x.shape[0], x.shape[1] - len(taps) + 1, x.shape[2])
        for here, shifted in _Taps.blocks(x, len(taps), taps.dtype):
            total = torch.mul(shifted[0], taps[0], out=y[:, here] if y.dtype == taps.dtype else None)
            for part, tap in zip(shifted[1:], taps[1:]):
                total.addcmul_(part, tap)
            if y.dtype != taps.dtype:
                y[:, here] = total
        return y

    @staticmethod
    def of(weight: Tensor) -> Tensor:
        """`[K, C]`, in the precision of sums."""
        return weight[:, 0].t().to(torch.promote_types(weight.dtype, torch.float32)).contiguous()

    @staticmethod
    def blocks(x: Tensor, K: int, dtype: torch.dtype):
        """Some tokens of y at a time, and the tokens of x under each of the K taps."""
        T = x.shape[1] - K + 1
        for start in range(0, T, BLOCK):
            stop = min(start + BLOCK, T)
            seen = x[:, start : stop + K - 1].to(dtype)
            yield slice(start, stop), [seen[:, i : i + stop - start] for i in range(K)]

    @staticmethod
    def backward(ctx, d_y: Tensor):
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or batched(d_y):  # to be differentiated again, or many at once
            backward, wanted = torch.ops.aten.convolution_backward.default, [*ctx.needs_input_grad, False]
            sizes = None, [1], [0], [1], False, [0], len(weight)
            d_x, d_weight, _ = backward(d_y.transpose(1, 2), x.transpose(1, 2), weight, *sizes, wanted)
            return None if d_x is None else d_x.transpose(1, 2), d_weight
        taps = _Taps.of(weight)
        d_x, d_taps = torch.empty_like(x, dtype=taps.dtype), torch.zeros_like(taps)
        d_x[:, : len(taps) - 1] = 0.0
        blocks = zip(_Taps.blocks(x, len(taps), taps.dtype), _Taps.blocks(d_x, len(taps), taps.dtype))
        for (here, shifted), (_, d_shifted) in blocks:
            d = d_y[:, here].to(taps.dtype)
            torch.mul(d, taps[-1], out=d_shifted[-1])  # no block before wrote there
            for d_part, tap in zip(d_shifted[:-1], taps[:-1]):
                d_part.addcmul_(d, tap)
            if ctx.needs_input_grad[1]:  # in stage 2 they are frozen, and these passes take as long as all others
                for part, d_tap in zip(shifted, d_taps):
                    d_tap.add_((d * part).sum((0, 1)))
        return d_x.to(x.dtype), d_taps.t()[:, None].to(weight.dtype) if ctx.needs_input_grad[1] else None


class TNTCausalConv(nn.Conv1d):
    """Depthwise convolution of `[B, C, L]` without padding that starts near the identity on the newest tap."""

    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)

    def forward(self, window: Tensor) -> Tensor:
        unusual = torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()
        if not window.is_cpu or window.dim() != 3 or unusual:
            return super().forward(window)
        weight = self.weight
        if torch.is_autocast_enabled("cpu"):  # which casts a convolution's inputs, but for float64
            dtype = torch.get_autocast_dtype("cpu")
            window, weight = (x if x.dtype == torch.float64 else x.to(dtype) for x in (window, weight))
        if window.dtype != weight.dtype:
            return super().forward(window)
        return _Taps.apply(window.transpose(1, 2), weight).transpose(1, 2)

    own_forward = forward  # what C and Triton compute in its place, see `is_plain`


def convolve(
    convs: list[nn.Module],
    parts: tuple[Tensor, ...],
    taps: int,
    tail: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """
    Causal depthwise convolution over the valid tokens of each document, as if each stood alone.

    Args:
        convs: one for each of parts, which are `[B, T, channels]` and C channels together.
        tail: `[B, C, taps]`, each row's last valid inputs before this call; `None` at the beginning.
        mask: `[B, T]` bool, `False` = absent. segment_ids: `[B, T]` int, a change starts a new document.

    Returns:
        The result of each part `[B, T, channels]`, 0 at absent tokens, and the next call's tail.
    """
    before = [None] * len(parts) if tail is None else tail.to(parts[0].dtype).split([x.shape[2] for x in parts], 1)
    if segment_ids is None and mask is None:
        results = [_convolve(conv, x, taps, tail) for conv, x, tail in zip(convs, parts, before)]
    else:
        places = _Places.of(taps, mask, segment_ids)
        results = [_convolve_documents(conv, x, taps, tail, places) for conv, x, tail in zip(convs, parts, before)]
    return [y for y, _ in results], torch.cat([tail for _, tail in results], 1)


def convolve_token(
    convs: list[nn.Module], parts: tuple[Tensor, ...], tail: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same for one token after a tail, all parts together: y `[B, 1, C]` and the next tail."""
    x = torch.cat(parts, -1)
    tail = tail.to(x.dtype)
    window = torch.cat([tail, x.transpose(1, 2)], -1)
    new_tail = window[..., 1:]
    if not torch.is_autocast_enabled(window.device.type) and all(is_one_product(conv, window) for conv in convs):
        # For one token a convolution's set-up costs many times its arithmetic.
        weight = torch.cat([conv.weight for conv in convs])[:, 0]
        wide = window if window.dtype.itemsize >= 4 else window.float()
        y = (wide * weight).sum(-1)[:, None].to(window.dtype)
    else:
        windows = window.split([x.shape[2] for x in parts], 1)
        y = torch.cat([conv(part) for conv, part in zip(convs, windows)], 1).transpose(1, 2)
    if mask is not None:
        new_tail, y = torch.where(mask[..., None], new_tail, tail), y * mask[..., None]
    return y, new_tail


def _convolve(conv: nn.Module, x: Tensor, taps: int, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """One part `[B, T, c]` of which every token is there."""
    before = x.new_zeros(x.shape[0], taps, x.shape[2]) if tail is None else tail.transpose(1, 2)
    window = torch.cat([before, x], 1)
    # Called as a module, so that adapters on it take effect.
    return conv(window.transpose(1, 2)).transpose(1, 2), window[:, -taps:].transpose(1, 2)


class _Places(NamedTuple):
    """Where valid tokens stand once they are moved together, documents apart by `taps` zeros: `[B T]`, in rows of
    `length` and one more, a place nobody reads, for the absent."""

    mask: Tensor  # [B, T]
    length: int
    target: Tensor  # where a token goes
    source: Tensor  # where its result is found
    recent: Tensor  # [B taps] the row's last inputs

    @classmethod
    def of(cls, taps: int, mask: Tensor | None, segment_ids: Tensor | None) -> "_Places":
        given, like = mask, segment_ids if mask is None else mask
        mask = torch.ones(like.shape, dtype=torch.bool, device=like.device) if mask is None else mask
        place, length = taps + mask.cumsum(1) - 1, taps + mask.shape[1]
        if segment_ids is not None:
            documents, last = made_once(_documents, given, segment_ids)
            place = place + documents * taps
            length += last * taps
        last = torch.where(mask, place, taps - 1).amax(1)
        recent = last[:, None] + torch.arange(1 - taps, 1, device=mask.device)
        row = torch.arange(mask.shape[0], device=mask.device)[:, None]
        target, recent = (x + row * (length + 1) for x in (torch.where(mask, place, length), recent))
        source = (place - taps).clamp_min(0) + row * (length - taps)
        return cls(mask, length, target.flatten(), source.flatten(), recent.flatten())


def _convolve_documents(conv: nn.Module, x: Tensor, taps: int, tail: Tensor | None, places: _Places):
    """One part `[B, T, c]` with absent tokens or several documents."""
    B, _, c = x.shape
    rows = x.new_zeros(B * (places.length + 1), c)
    window = rows.unflatten(0, (B, -1))[:, : places.length]
    if tail is not None:
        window[:, :taps] = tail.transpose(1, 2)
    rows.index_copy_(0, places.target, x.flatten(0, 1))
    y = conv(window.transpose(1, 2)).transpose(1, 2).flatten(0, 1).index_select(0, places.source)
    recent = rows.index_select(0, places.recent).unflatten(0, (B, taps)).transpose(1, 2)
    return y.unflatten(0, (B, -1)) * places.mask[..., None], recent


def documents_of(segment_ids: Tensor) -> Tensor:
    """Numbers `[B, T]` of the documents of rows without padding, which differ wherever a new one starts."""
    return made_once(_documents, None, segment_ids)[0]


def _documents(mask: Tensor | None, segment_ids: Tensor) -> tuple[Tensor, int]:
    """Numbers `[B, T]` of the documents of each row, from 0, and the largest."""
    documents = document_starts(segment_ids, mask).cumsum(1)
    return documents, int(documents.max())


def is_one_product(conv: nn.Module, x: Tensor) -> bool:
    """Whether calling `conv` with a window like `x` multiplies each channel by its weights and does nothing else."""
    return is_plain(conv, TNTCausalConv, x) and conv.weight.dtype == x.dtype


def is_plain(module: nn.Module, kind: type, *tensors: Tensor) -> bool:
    """Whether `module` is of `kind` alone, with nothing put around or in the place of its forward, but for what moves
    inputs to its device: that is nothing, too, if `tensors` are there."""
    if type(module) is not kind or kind.forward is not kind.own_forward or not is_untouched(module):
        return False
    return "forward" not in vars(module) or is_on_one_device(module, tensors)


def is_untouched(module: nn.Module) -> bool:
    """Whether the class's forward is all that calling `module` runs, but for hooks of accelerate that only move inputs
    to its device."""
    if module._forward_hooks or module._forward_pre_hooks or _global_forward_hooks or _global_forward_pre_hooks:
        return False
    return "forward" not in vars(module) or _is_aligned(module)


def is_on_one_device(module: nn.Module, tensors: Iterable[Tensor | None]) -> bool:
    """Whether all parameters of `module` and all of `tensors` are in one place, so that a hook would move none."""
    return len({x.device for x in (*module.parameters(), *tensors) if x is not None}) < 2


def _is_aligned(module: nn.Module) -> bool:
    """Whether the forward of `module` is its class's in a wrapper of accelerate whose hooks leave weights where they
    are: `device_map="auto"` puts one around every module. Known by names, as accelerate need not be installed."""
    fields = vars(module)
    own, wrapper = fields.get("_old_forward"), getattr(fields["forward"], "func", None)
    if getattr(own, "__func__", None) is not type(module).forward or own.__self__ is not module:
        return False  # somebody's own forward, or that of the module it was copied from
    # a later wrapper is somebody else's
    return getattr(wrapper, "__module__", None) == ACCELERATE and _only_moves_inputs(fields.get("_hf_hook"))


def _only_moves_inputs(hook: object) -> bool:
    kind = type(hook)
    if kind.__module__ != ACCELERATE:
        return False
    if kind.__name__ == "SequentialHook":
        return all(_only_moves_inputs(each) for each in hook.hooks)
    return kind.__name__ == "AlignDevicesHook" and not (hook.offload or hook.no_grad)
