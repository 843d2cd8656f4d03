"""The Q-K projection of TNT (Appendix C-D): q_t M_t, M_t = sum of k^T k / |k|^2 since the last reset.

Axis legend
    B batch   T tokens   H memory (key/value) heads   G query heads per memory head (Hq = H G)   K key width
    C tokens per chunk   N chunks of all rows

It is plain linear attention with k = v and does not depend on a memory's chunk size, so memories that share a reset
interval share one call. Travels with every pushed checkpoint.
"""

import math

import torch
from torch import Tensor

from .derivative_tnt import check_transforms, once_differentiable, transformed
from .grid_tnt import Layout, batch_layout, dense_grid, document_starts
from .inputs_tnt import check_flag, check_positive, check_projection_state, check_rows, check_tensor
from .kernels_choice_tnt import choose, unsupported_projection
from .kernels_parts_tnt import INTERPRETED
from .network_tnt import SMALLEST_NORM, smooth_unit_vectors
from .operators_tnt import Like, as_operator
from .precision_tnt import full_precision, wide


IMPLEMENTATIONS = ("chunk", "naive", "triton", "auto")
PROJECTION_CHUNK = 64  # tokens; the projection does not depend on it, 64 balances its two matrix products


class _Unit(torch.autograd.Function):
    """x / |x|, with a backward of three passes over x where that of `F.normalize` takes a dozen, and on a CPU of one:
    weight_norm's, which is g / n (d - w (d . w) / n^2) for rows w. 0 where x is: see `smooth_unit_vectors`."""

    @staticmethod
    def forward(ctx, x):
        out, norm = _over_norm(x)
        ctx.save_for_backward(out, norm)
        ctx.set_materialize_grads(False)
        return out, norm  # that of the second is for second derivatives

    @staticmethod
    def backward(ctx, d_out, d_norm):
        d_x = None if d_out is None else _Unit.through(d_out, *ctx.saved_tensors)
        if d_norm is None:
            return d_x
        to_norm = d_norm * ctx.saved_tensors[0]
        return to_norm if d_x is None else d_x + to_norm

    @staticmethod
    def through(d_out: Tensor, out: Tensor, norm: Tensor) -> Tensor:
        again = torch.is_grad_enabled()  # to be differentiated again
        size = norm.masked_fill(norm <= SMALLEST_NORM, math.inf)
        if out.is_cpu and out.dtype.itemsize >= 4 and out.numel() and not (again or torch.compiler.is_compiling()):
            g, rows = size.reciprocal().reshape(-1, 1), (-1, out.shape[-1])
            d, w = d_out.reshape(rows).contiguous(), out.reshape(rows).contiguous()
            backward = torch.ops.aten._weight_norm_interface_backward.default
            return backward(d, w, g, torch.ones_like(g), 0)[0].view_as(out)
        along = (d_out * out).sum(-1, keepdim=True)
        return torch.addcmul(d_out, out, along, value=-1).div_(size)


def _over_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(SMALLEST_NORM), norm


def unit_vectors(x: Tensor) -> Tensor:
    """x / |x| over the last axis of `[..., K]`, 0 where x is, and so its gradient."""
    # a compiler fuses it, and with `dynamic=True` knows no number inside a Function
    if transformed() or torch.compiler.is_compiling():
        return smooth_unit_vectors(x)
    return _Unit.apply(x)[0] if torch.is_grad_enabled() and x.requires_grad else _over_norm(x)[0]


class _RunningProjection(torch.autograd.Function):
    """q_t M_t with M_t = M_0 + sum_{i<=t} u_i^T u_i for unit keys u: linear attention with k = v. Backward sums M
    again: undoing it leaves a rounding error where M was 0, which has a direction and a steep one."""

    @staticmethod
    def forward(ctx, counts, starts, groups, q, u, M):
        ctx.save_for_backward(q, u, M)
        ctx.grid = counts, starts, groups
        out, M = _room(q, counts), M.clone()
        with torch.inference_mode():  # where an operation costs less; autograd is given what was made outside
            for n, first in zip(counts, starts):
                here = slice(first, first + n)
                x, y = q[here], u[here]
                pairs = _causal(torch.bmm(x, y.mT), groups)
                torch.bmm(x, M[:n], out=out[here]).baddbmm_(pairs, y)
                M[:n].baddbmm_(y.mT, y)
        return out, M

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_M):
        with full_precision(d_out.device):  # unlike the forward, it may be called inside one
            return None, None, None, *_projection_gradients(*ctx.saved_tensors, *ctx.grid, d_out, d_M)


@torch.compiler.disable  # of compiled autograd
def _projection_gradients(q, u, M, counts, starts, groups, d_out, d_M):
    M, d_M, d_q, d_u = M.clone(), d_M.clone(), _room(q, counts), _room(u, counts)
    with torch.inference_mode():
        before = []
        for n, first in zip(counts, starts):
            y = u[first : first + n]
            before.append(M[:n].clone())
            M[:n].baddbmm_(y.mT, y)
        for n, first in zip(reversed(counts), reversed(starts)):
            here = slice(first, first + n)
            x, y, d = q[here], u[here], d_out[here]
            d_pairs, pairs = (_causal(torch.bmm(z, y.mT), groups) for z in (d, x))
            torch.bmm(d, before.pop().mT, out=d_q[here]).baddbmm_(d_pairs, y)
            to_u = torch.bmm(y, d_M[:n] + d_M[:n].mT, out=d_u[here])
            to_u.baddbmm_(d_pairs.mT, x).baddbmm_(pairs.mT, d)
            d_M[:n].baddbmm_(x.mT, d)
    return d_q, d_u, d_M


def _room(x: Tensor, counts: list[int]) -> Tensor:
    """Like x, to be filled, with zeros where programs are not used."""
    return torch.empty_like(x) if sum(counts) == len(x) else torch.zeros_like(x)


def _causal(pairs: Tensor, groups: int) -> Tensor:
    """[P, C G, C] with zeros for a token t of any query head and a later token i, in place."""
    for pair in [pairs] if groups == 1 else pairs.unflatten(1, (-1, groups)).unbind(2):
        pair.tril_()
    return pairs


def _results(q, k, *, output_final_state=False, **options):
    """What `project_queries` returns, for `torch.export`."""
    B, _, H, K = k.shape
    return Like(tuple(q.shape), q.dtype), Like((B, H, K, K), wide(q.dtype)) if output_final_state else None


@as_operator("project_queries", _results)
def project_queries(
    q: Tensor,
    k: Tensor,
    *,
    reset_interval: int | None,
    normalize: bool = True,
    unit_keys: bool = False,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    implementation: str = "chunk",
) -> tuple[Tensor, Tensor | None]:
    """The Q-K projection of TNT (Appendix C-D): q~_t = q_t M_t, M_t = sum of k^T k / |k|^2 from the last reset to t
    inclusive.

    It does not depend on a chunk size, so memories that share a reset interval share one call.

    Args:
        q: `[B, T, Hq, K]` queries, Hq a multiple of H. k: `[B, T, H, K]` keys.
        reset_interval: tokens of memory time between resets of M, `None` = never.
        normalize: L2-normalise q~ (|q M| grows with the shard; `False` is the paper).
        unit_keys: k is known to have length 1 (or 0), so that nobody divides by it again.
        mask, segment_ids: `[B, T]`, as in `memory_chunkwise`.
        initial_state: `(M [B, H, K, K], time [B])` before the first token.
        output_final_state: also return M after the last one.
        implementation: "chunk" (torch), "naive" (token by token), "triton" (its products with q's dtype as operands;
        a single token that goes on from a state needs no kernel) or "auto", as in `memory_chunkwise`.

    Returns:
        `(q~ [B, T, Hq, K] in q's dtype, M [B, H, K, K] or None)`.

    Raises:
        ValueError: a shape, dtype, `reset_interval` or `implementation` that does not fit, with its name and value.
        RuntimeError: as `memory_chunkwise`.
    """
    check_tensor("q", q, (None, None, None, None))
    check_tensor("k", k, (q.shape[0], q.shape[1], None, q.shape[3]), q)
    check_positive("reset_interval", reset_interval, optional=True)
    check_rows(q, k, mask, segment_ids)
    check_flag("normalize", normalize)
    check_flag("unit_keys", unit_keys)
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            raise ValueError(f"initial_state must be (M, time), got a {type(initial_state).__name__}")
        check_projection_state(*initial_state, q, k.shape[2], q.shape[3])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    dtype = wide(q.dtype)
    sizes = dtype, q.shape[3], q.dtype, q.shape[2] // k.shape[2]
    how = choose("implementation", implementation, q.device, unsupported_projection, *sizes)
    if initial_state is not None:
        initial_state = initial_state[0].to(dtype), initial_state[1]
    rest = dtype, reset_interval, normalize, mask, segment_ids, initial_state, output_final_state
    with full_precision(q.device):
        if q.shape[1] == 1 and initial_state is not None and segment_ids is None:
            return _project_one(q, k, *rest)
        if how == "naive":
            return _project_tokens(q, k, *rest)
        return _project_many(q, k, unit_keys, how, *rest)


def _project_one(q, k, dtype, interval, normalize, mask, segment_ids, initial_state, output_final_state):
    M, time = initial_state
    u = smooth_unit_vectors(k.to(dtype)[:, 0, :, None])
    old = M if interval is None else M * (time % interval != 0).view(-1, 1, 1, 1)
    new = torch.addcmul(old, u.transpose(-1, -2), u)
    x = q.to(dtype)[:, 0].unflatten(1, (k.shape[2], -1))
    out = x @ old + (x @ u.transpose(-1, -2)) * u  # x @ new, with an exact direction behind a reset
    out = smooth_unit_vectors(out) if normalize else out
    if mask is not None:
        present = mask.view(-1, 1, 1, 1)
        out, new = torch.where(present, out, 0.0), torch.where(present, new, M)
    return out.flatten(1, 2)[:, None].to(q.dtype), new if output_final_state else None


def _project_tokens(q, k, dtype, interval, normalize, mask, segment_ids, initial_state, output_final_state):
    """Token by token, in torch's own operations."""
    B, T, H, K = k.shape
    M, time = initial_state or (
        q.new_zeros(B, H, K, K, dtype=dtype),
        torch.zeros(B, dtype=torch.long, device=q.device),
    )
    fresh = None if segment_ids is None else document_starts(segment_ids, mask)
    outputs = []
    for t in range(T):
        here = slice(t, t + 1)
        if fresh is not None:
            M, time = torch.where(fresh[:, t].view(-1, 1, 1, 1), 0.0, M), time.masked_fill(fresh[:, t], 0)
        present = None if mask is None else mask[:, here]
        o, M = _project_one(q[:, here], k[:, here], dtype, interval, normalize, present, None, (M, time), True)
        time = time + (1 if mask is None else mask[:, t])
        outputs.append(o)
    return torch.cat(outputs, 1), M if output_final_state else None


@torch.compiler.disable
def _project_many(
    q, k, unit_keys, how, dtype, interval, normalize, mask, segment_ids, initial_state, output_final_state
):
    check_transforms()
    B, T, Hq, K = q.shape
    H = k.shape[2]
    C = min(PROJECTION_CHUNK, interval or PROJECTION_CHUNK)
    M, time = initial_state or (None, None)
    if mask is None and segment_ids is None and M is None and (interval or C) % C == 0:
        layout = Layout(H, [dense_grid(B, T, C, interval, q.device)])
    else:
        layout = batch_layout(q, H, mask, segment_ids, time, C, interval, align=False)
    [grid] = layout.grids
    # Triton's interpreter is wrong for bfloat16
    operand = q.dtype if how == "triton" and not INTERPRETED else dtype
    dense = how == "triton" and layout.there is None
    [x], [u] = (
        ([q.to(operand)], [k]) if dense else (layout.rows(q.to(operand).unflatten(2, (H, -1))), layout.programs(k))
    )
    u = (u if unit_keys else unit_vectors(u.to(dtype))).to(operand)
    M = grid.rowwise(x.new_zeros(H, K, K, dtype=dtype), M)
    counts, starts = ([n * H for n in y] for y in (grid.counts, grid.starts))
    if how == "triton":
        from .kernels_projection_tnt import TritonProjection

        chunks = len(counts) * counts[0] if dense else len(u)
        with torch.cuda.device_of(q):
            walk = counts, starts, chunks, grid.size[2], Hq // H
            out, M = TritonProjection.apply(walk, grid.dense(H) if dense else None, x, u, M, normalize)
    else:
        out, M = _RunningProjection.apply(counts, starts, Hq // H, x, u, M)
        out = unit_vectors(out) if normalize else out
    if not dense:
        out = layout.tokens([out.unflatten(1, (grid.size[2], -1))]).flatten(2, 3)
    return out.to(q.dtype), M.unflatten(0, (-1, H))[grid.last_row] if output_final_state else None
