"""From the projections to what the memories see: causal convolution, SiLU and length 1.

Axis legend
    B batch   T tokens of this call   H heads of a part (q, k or v)   D memory head width   C channels of q, k and v
    together   taps = kernel - 1 earlier tokens   P = B H programs   G query heads per memory head   K width of the
    feature map's keys

Travels with every pushed checkpoint.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiler_tnt import fuses, is_exporting
from .convolution_tnt import TNTCausalConv, convolve, documents_of, is_plain
from .features_tnt import quadratic
from .precision_tnt import cast, full_precision, wide
from .projection_tnt import unit_vectors


def memory_tokens(
    convs: list[nn.Module],
    parts: tuple[Tensor, Tensor, Tensor],
    taps: int,
    tail: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    head_dim: int,
    silu: bool,
    units: tuple[bool, bool, bool],
    dtype: torch.dtype,
    operands: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """
    Args:
        convs: of each part, or none. parts: q, k, v `[B, T, H D]`.
        taps, tail, mask, segment_ids: as in `convolve`.
        silu: of q and k. units: which parts get length 1, heads by heads.
        dtype: of the arithmetic. operands: what Triton's kernels multiply, where these tokens are only for them.

    Returns:
        The tokens `[B, T, H, D]` of each part, in `dtype` or `operands`, and the next call's tail `[B, C, taps]`.
    """
    kinds = list(zip([silu, silu, False], units))
    by_kernel = operands is not None and not is_exporting()  # a program is torch, but for the memories
    if by_kernel and tail is None and mask is None and all(is_plain(f, TNTCausalConv, *parts) for f in convs):
        documents = None if segment_ids is None else documents_of(segment_ids)
        weights = [conv.weight for conv in convs] or [None] * len(parts)
        tokens = [_fused(*part, documents, head_dim, *kind, operands) for *part, kind in zip(parts, weights, kinds)]
        return tokens, _tail(parts, taps, documents) if convs else None
    if convs:
        parts, tail = convolve(convs, parts, taps, tail, mask, segment_ids)
    tokens = []
    with full_precision(parts[0].device):
        for x, (silu, unit) in zip(parts, kinds):
            x = x.to(dtype).unflatten(-1, (-1, head_dim))
            x = F.silu(x) if silu else x
            tokens.append(unit_vectors(x) if unit else x)
    return tokens, tail


def memory_token(
    parts: Sequence[Tensor], channels: tuple[int, int, int], D: int, feature_map: str, value_norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The same of one token that is convolved already, its feature map applied, as programs P = B H.

    Args:
        parts: q, k and v `[B, 1, H D]`, or one tensor with all of them, which is overwritten.
        channels: of q, k and v. D: head width.

    Returns:
        q `[P, G, K]`, k `[P, 1, K]`, v `[P, 1, D]`, float32 at least.
    """
    B, H, dtype = parts[0].shape[0], channels[1] // D, wide(parts[0].dtype)
    if fuses():
        x = parts if len(parts) > 1 else parts[0].split(channels, -1)
        q, k, v = (cast(y, dtype).view(B, -1, D) for y in x)
        q, k = (_feature(F.silu(y) if feature_map == "silu" else y, feature_map) for y in (q, k))
        v = v / _length(v) if value_norm else v
    else:  # in place, and together
        x = cast(torch.cat(parts, -1) if len(parts) > 1 else parts[0], dtype).view(B, -1, D)
        keys, v = x[:, :-H], x[:, -H:]
        if feature_map == "silu":
            F.silu(keys, inplace=True)
        units = x if value_norm else keys
        units.div_(_length(units))
        if feature_map == "quadratic":
            keys = quadratic(keys)
        q, k = keys[:, :-H], keys[:, -H:]
    return q.reshape(B * H, -1, q.shape[-1]), k.reshape(B * H, 1, -1), v.reshape(B * H, 1, D)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(1e-12)


def _feature(x: Tensor, feature_map: str) -> Tensor:
    return quadratic(x, _length(x)) if feature_map == "quadratic" else x / _length(x)


@torch.compiler.disable
def _fused(*args) -> Tensor:
    from .kernels_features_tnt import TritonFeatures

    return TritonFeatures.apply(*args)


def _tail(parts: tuple[Tensor, ...], taps: int, documents: Tensor | None) -> Tensor:
    x = torch.cat([part[:, -taps:] for part in parts], -1).transpose(1, 2)
    if documents is not None:  # what comes next sees the last one alone
        x = x.masked_fill((documents[:, -taps:] != documents[:, -1:])[:, None], 0.0)
    return F.pad(x, (taps - x.shape[2], 0))
