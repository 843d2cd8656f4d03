"""`scan_tnt.scan` and its way back in C: every program, which is a head of a grid row, runs through its chunks alone.

Axis legend
    C tokens per chunk   R = C G its query rows   K key width   V value width   L layers of the memory network
    P programs   N chunks over all programs, ordered by step and then by program

What torch does operation by operation for all programs, the C code does chunk by chunk for one: its matrices stay in
the cache, and there is no call between two products. `scan` and `ChunkScan` are what tests hold it to. Travels with
every pushed checkpoint.
"""

import ctypes
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .derivative_tnt import once_differentiable, saved
from .native_build_tnt import LAYERS, TENSORS, library
from .plan_tnt import Plan, keeps_all


INPUTS = TENSORS[: TENSORS.index("O")]
STATES = ("W", "XI", "S", "TARGET")
TAPE = ("Z_KEY", "Z_READ", "GRAD_ACT", "KEPT_W", "KEPT_S")


def native_scan(plan: Plan, q, k, v, scalars, ln, target, xi, W, S):
    """`scan_tnt.scan`, which autograd can follow.

    scalars: theta, mu, 1 - alpha and `present`, those of `chunk_coefficients`, `[N, C]`. With `plan.slots` q, k, v
    and o are those of the batch, `[B, T, heads, D]`, else of the chunks, `[N, C G, K]`, `[N, C, K]`, `[N, C, V]` and
    `[N, C G, V]`.
    """
    none = [None] * len(W)
    states = (*W, *(xi or none), *(S or none), *(target or none))
    *gates, present = scalars
    o, loss, *ends = NativeScan.apply(plan, len(W), present, q, k, v, *gates, *(ln or (None, None)), *states)
    return o, loss, *(None if x[0] is None else x for x in _split(ends, len(W)))


class NativeScan(torch.autograd.Function):
    """What `ChunkScan` keeps, it keeps: O(1) per token, and O(sqrt(steps)) states, or all where they are small."""

    @staticmethod
    def forward(ctx, plan, depth, present, q, k, v, theta, mu, keep, gain, bias, *states):
        inputs = (*_index(plan), plan.slots, present, q, k, v, theta, mu, keep, gain, bias)
        inputs, states = (_plain(y) for y in (inputs, states))
        W, P, momentum = states[:depth], plan.counts[0], mu is not None
        tape, stride = dict.fromkeys(TAPE, [None] * depth), 0
        if plan.graded and any(ctx.needs_input_grad):
            tape, stride = _blank_tape(plan, theta, W, gain is not None, momentum)
        every = _every(plan, q, len(theta))
        o = (q.new_empty if every else q.new_zeros)(*q.shape[:-1], v.shape[-1])
        loss = theta.new_zeros(theta.shape) if plan.keep_loss else None
        kinds = (plan.keep_state, plan.keep_state, plan.keep_state and momentum)
        ends = [[torch.empty_like(w) if kept else None for w in W] for kept in kinds]
        widths = [W[0].shape[1], *(w.shape[2] for w in W)]
        options = (plan.net.activation == "gelu", plan.net.residual, plan.current, plan.carried, plan.keep_state)
        options += (stride, plan.bound is not None, plan.quadratic, k.shape[-1], *_room(plan, k))
        shape = [P, len(plan.counts), theta.shape[1], plan.groups, depth, torch.get_num_threads(), *options, *widths]
        layers = dict(zip((*STATES, "W_END", "XI_END", "S_END"), (*_split(states, depth), *ends))) | tape
        _call("forward", plan, shape, dict(zip(INPUTS, inputs)) | {"O": o, "LOSS": loss}, layers)
        if stride:
            ctx.save_for_backward(*inputs, *states, *(x for y in tape.values() for x in y))
        ctx.plan, ctx.depth, ctx.shape, ctx.every = plan, depth, shape, every
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        return o, loss, *(x for y in ends for x in y)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _, *d_ends):
        plan, depth, tensors = ctx.plan, ctx.depth, saved(ctx)
        kinds = {x.dtype for x in tensors if x is not None and x.is_floating_point()} - {d_o.dtype}
        if kinds:
            raise RuntimeError(f"hooks on saved tensors returned {kinds.pop()} for what was {d_o.dtype}")
        named, rest = dict(zip(INPUTS, tensors)), tensors[len(INPUTS) :]
        layers = dict(zip((*STATES, *TAPE), _split(rest, depth)))
        # zeros are what the code adds to, or leaves alone: programs that a grid leaves out, an unread last chunk
        d_inputs = {f"D_{x}": _zeros(named[x]) for x in INPUTS[INPUTS.index("THETA") :]}
        made = torch.empty_like if ctx.every else torch.zeros_like
        d_inputs = {f"D_{x}": made(named[x]) for x in ("QUERY", "KEY", "VALUE")} | d_inputs
        d_states = {f"D_{x}": [_zeros(y) for y in layers[x]] for x in STATES}
        if named["MU"] is not None:
            d_states["D_S"] = [torch.zeros_like(w) for w in layers["W"]]
        d_o, *d_ends = _plain((d_o, *d_ends))
        layers |= d_states | dict(zip(("D_W_END", "D_XI_END", "D_S_END"), _split(d_ends, depth)))
        _call("backward", plan, ctx.shape, named | d_inputs | {"D_O": d_o}, layers)
        if layers["S"][0] is None:  # it began with zeros
            d_states["D_S"] = [None] * depth
        return None, None, None, *d_inputs.values(), *(x for y in d_states.values() for x in y)


def _call(name: str, plan: Plan, shape: list[int], tensors: dict, layers: dict) -> None:
    """
    Raises:
        MemoryError: there was no room for a thread to work in.
    """
    none, depth = [None] * shape[4], shape[4]
    ordered = [tensors.get(x) for x in TENSORS] + [y for x in LAYERS for y in layers.get(x, none)]
    places = (ctypes.c_void_p * len(ordered))(*(0 if x is None else x.data_ptr() for x in ordered))
    numbers = (ctypes.c_int64 * len(shape))(*map(int, shape))
    code = library(tensors["KEY"].dtype)
    if getattr(code, name)(numbers, places, plan.net.eps, plan.bound or 0.0):
        raise MemoryError(
            f"no room for {shape[5]} threads to run a memory of {depth} layers {shape[-depth - 1 :]} wide"
        )


def _index(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """counts, starts and full as tensors."""
    counts, starts = (torch.tensor(x, device="cpu") for x in (plan.counts, plan.starts))  # whatever the default is
    full = plan.full
    if not isinstance(full, Tensor):
        full = torch.full((plan.counts[0],), bool(full), device="cpu")
    return counts, starts, full.to(torch.int8)


def _every(plan: Plan, q: Tensor, N: int) -> bool:
    """Whether the code comes to every row of q: not to those of absent tokens, or of chunks, N of them, that a grid
    leaves out at its end."""
    if plan.slots is None:
        return sum(plan.counts) == N
    tokens = q.shape[0] * q.shape[1]
    return int((plan.slots < tokens).sum()) == tokens


def _room(plan: Plan, k: Tensor) -> tuple[int, int]:
    """Memory heads, and what stands in an empty slot."""
    return (1, 0) if plan.slots is None else (k.shape[2], k.shape[0] * k.shape[1])


def _blank_tape(plan: Plan, theta: Tensor, W: list[Tensor], ln: bool, momentum: bool) -> tuple[dict, int]:
    """Room for what the forward leaves to the backward, and how many steps lie between two kept states."""
    widths, steps, (N, C) = [w.shape[2] for w in W], len(plan.counts), theta.shape
    stride = 1 if keeps_all(W, C, momentum) else math.isqrt(steps - 1) + 1
    slots = -(-steps // stride)

    def kept(wanted: bool) -> list[Tensor | None]:
        return [theta.new_empty(plan.counts[0], slots, *w.shape[1:]) if wanted else None for w in W]

    def rows(n: int, top: bool) -> list[Tensor | None]:
        blank = [theta.new_empty(N, n, width) for width in (widths if top else widths[:-1])]
        return blank if top else [*blank, None]

    tape = (rows(C, True), rows(C * plan.groups, ln), rows(C, False), kept(True), kept(momentum))
    return dict(zip(TAPE, tape)), stride


def _plain(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """As C reads them: one number after the other, none of them negated by a bit beside it."""
    return [None if x is None else x.resolve_neg().contiguous() for x in tensors]


def _zeros(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros_like(x)


def _split(x, n: int) -> list[list]:
    """A flat list as lists of n."""
    return [list(x[i : i + n]) for i in range(0, len(x), n)]
