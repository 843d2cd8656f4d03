"""The Triton route of a memory: `scan_tnt.scan` with its backward as kernels.

Axis legend
    C tokens per chunk   ROWS tokens per block, R blocks per chunk   G query heads per memory head   K key width
    V value width   P programs: grid rows x heads   N chunks of all rows x heads, ordered by step and then by row

Reads "current" run here, by `kernels_local_tnt` and its backward, reads at the chunk's start in `kernels_global_tnt`.
Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .coefficients_tnt import Coef, chunk_coefficients
from .derivative_tnt import once_differentiable, saved
from .kernels_global_tnt import global_scan
from .kernels_local_reverse_tnt import reverse_kernel
from .kernels_local_tnt import forward_kernel
from .kernels_parts_tnt import (
    NOWHERE,
    REGISTERS,
    SM_90,
    generation,
    operand,
    packed,
    rows_of_tile,
    shared_memory,
    tables,
    unpacked,
)
from .plan_tnt import Plan


BLOCK_TOKENS = 32  # of a tile: a longer chunk runs as several blocks with one W_xi. 64 spills ten times as much


class Shape(NamedTuple):
    """What the kernels are compiled for and called with, besides tensors."""

    rows: int  # tokens per block
    blocks: int  # per chunk
    groups: int
    widths: tuple[int, int, int]  # K, the top layer's input, V
    depth: int
    net: tuple  # activation, residual, eps
    momentum: bool
    gates: bool  # momentum or forgetting
    bound: float | None
    operands: torch.dtype

    @staticmethod
    def split(chunk_size: int) -> tuple[int, int]:
        """(rows, blocks) of a chunk: a block has the largest divisor of it that a tile holds."""
        rows = next(n for n in range(min(chunk_size, BLOCK_TOKENS), 0, -1) if chunk_size % n == 0)
        return rows, chunk_size // rows

    @property
    def floats(self) -> int:
        """Of one head's state."""
        K, A, V = self.widths
        return (A * V + (K * A if self.depth == 2 else 0)) * (2 if self.momentum else 1)

    @property
    def states(self) -> torch.dtype:
        """As which the backward finds them: gates' gradients are sums with states, all else only multiplies them."""
        return torch.float32 if self.gates else self.operands

    def stretch(self, steps: int) -> int:
        """Blocks between two states that the forward keeps for a backward of that many chunks: all states of a stretch
        take as much memory as its q, k, v and o, or one block does where they take at most a quarter of it."""
        K, _, V = self.widths
        tokens = self.rows * (self.groups + 1) * (K + V) * self.operands.itemsize
        of_block = self.floats * self.states.itemsize
        return 1 if 4 * of_block <= tokens else self.blocks * -(-steps // min(steps, -(-of_block // tokens)))

    @property
    def constants(self) -> dict:
        """The compile-time arguments of both kernels."""
        K, A, V = self.widths
        return {
            "ROWS": self.rows,
            "BC": rows_of_tile(self.rows),
            "R": self.blocks,
            "G": self.groups,
            "DK": K,
            "DA": A,
            "DV": V,
            "DEPTH": self.depth,
            "NAME": self.net.activation,
            "RESIDUAL": self.net.residual,
            "MOMENTUM": self.momentum,
            "BOUND": self.bound is not None,
            "DT": operand(self.operands),
        }

    @property
    def numbers(self) -> dict:
        """The last run-time arguments of both kernels."""
        return {"bound": self.bound or 0.0, "eps": float(self.net.eps)}

    def launch(self, reverse: bool, device: torch.device) -> dict:
        """The compiler's options: as many threads as keep the state, and backward its gradient, in registers."""
        half = self.operands == torch.bfloat16
        wgmma = generation(device) == 9  # its operands take no registers
        light = half and self.floats <= 2 * 64 * 64 and self.rows <= 16 and (not reverse or wgmma and not self.gates)
        small = max(self.widths) <= 32  # no product has work for more
        # loads ahead of their use take shared memory, which large states need all of
        stages = 2 if self.floats <= 4 * 64 * 64 and shared_memory(device) >= SM_90 else 1
        options = {"num_warps": 2 if small else 4 if light else 8, "num_stages": stages}
        if half and wgmma and not small:
            return options
        if reverse and self.momentum and not half and not wgmma:
            options |= {"ptx_options": "-O1"}  # ptxas took 5 to 11 minutes, now one, for a sixth more spills
        return options | {"maxnreg": REGISTERS}


def triton_scan(plan: Plan, q, k, v, scalars, ln, target, xi, W, S):
    """`scan_tnt.scan` and its backward in Triton: the same arguments and results, but `scalars` are (theta, mu, keep,
    present), each `[N, C]` or `None`, and q, k and v may be bfloat16 (they are then the type of all matrix operands;
    o has it too). With `plan.dense` q, k, v and o are `[B, T, heads, D]`. Gradients flow through states."""
    C, depth = scalars[0].shape[1], len(W)
    if not plan.current:
        with torch.cuda.device_of(q):
            return global_scan(plan, q, k, v, chunk_coefficients(*scalars, False), ln, target, xi, W, S)
    rows, blocks = Shape.split(C)
    coef = chunk_coefficients(*(None if x is None else x.reshape(-1, rows) for x in scalars), True)
    widths = W[0].shape[1], W[-1].shape[1], W[-1].shape[2]
    momentum = coef.s_end is not None
    gates = coef.c is not None
    shape = Shape(rows, blocks, plan.groups, widths, depth, plan.net, momentum, gates, plan.bound, k.dtype)
    if momentum:
        S = S or [torch.zeros_like(w) for w in W]
    state, x, goal = packed([*W, *(S or ())]), packed(xi), packed(target)
    gain, bias = (None, None) if ln is None else (y.flatten(1) for y in ln)
    o, loss, end, x_end = TritonScan.apply(plan, shape, q, k, v, *coef, gain, bias, state, x, goal)
    loss = loss if loss is None else loss.view(-1, C)
    if not plan.keep_state:
        return o, loss, None, None, None
    shapes = [w.shape[1:] for w in W] * (2 if momentum else 1)
    last = unpacked(end, shapes)
    start = last[:depth] if x_end is None else unpacked(x_end, shapes[:depth])
    if isinstance(plan.full, Tensor):  # a complete chunk is over: the next one starts at W
        start = [torch.where(plan.full[:, None, None], w, y) for w, y in zip(last, start)]
    return o, loss, last[:depth], start, last[depth:] or None


class TritonScan(torch.autograd.Function):
    """The kernels as one differentiable function. The forward keeps the state before every stretch (`Shape.stretch`),
    from which the backward runs it again."""

    @staticmethod
    def forward(ctx, plan, shape, q, k, v, theta, c, A, D, s_end, m_end, gain, bias, state, x, target):
        inputs = [
            None if y is None else y.contiguous()
            for y in (q, k, v, theta, c, A, D, s_end, m_end, gain, bias, state, x, target)
        ]
        q, k, v, theta = inputs[:4]
        steps, P, V = len(plan.counts), len(state), shape.widths[2]
        total = steps * shape.blocks
        ctx.every = shape.stretch(steps) if plan.graded and any(ctx.needs_input_grad) else 0
        slots = -(-total // ctx.every) if ctx.every else 0
        blank = q.new_empty if plan.dense or sum(plan.counts) == len(q) else q.new_zeros
        o = blank(*q.shape[:-1], V)
        loss = blank(theta.shape, dtype=torch.float32) if plan.keep_loss else None
        end = torch.empty_like(state) if plan.keep_state else None
        partial = plan.keep_state and plan.full is not True
        x_end = state.new_empty(P, shape.floats // (2 if shape.momentum else 1)) if partial else None
        kept = None
        if slots:
            kept = state.new_empty(P, slots, shape.floats, dtype=shape.states if ctx.every == 1 else None)
        launch_forward(plan, shape, inputs, 0, total, (o, loss, end, x_end, kept), ctx.every)
        ctx.plan, ctx.shape = plan, shape
        ctx.save_for_backward(*inputs, kept)
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        return o, loss, end, x_end

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _, d_end, d_x_end):
        plan, shape, (*inputs, kept) = ctx.plan, ctx.shape, saved(ctx)
        q, k, v, theta, c, A, D, s_end, m_end, gain, bias, state, x, target = inputs
        every = sum(plan.counts) == len(theta)  # else chunks at a grid's end have no program, whose tokens have slots
        blank, blank_of_slots = (torch.empty_like if x else torch.zeros_like for x in (plan.dense or every, every))
        coef = Coef(None if c is not None else theta, c, A, D, s_end, m_end)  # theta reaches c through torch
        d_tokens = [None if y is None else blank(y) for y in (q, k, v)]
        d_tokens += [None if y is None else blank_of_slots(y) for y in coef]
        d_state = torch.zeros_like(state) if d_end is None else d_end.clone(memory_format=torch.contiguous_format)
        d_x = None if x is None else torch.empty_like(x)
        d_sums = [None if y is None else torch.zeros_like(y) for y in (gain, bias, target)]
        d_o, d_x_end = d_o.contiguous(), None if d_x_end is None else d_x_end.contiguous()
        start = None if x is None else x.to(shape.states)
        total = len(plan.counts) * shape.blocks
        stride, room = total, kept
        if ctx.every > 1:
            stride = ctx.every
            room = state.new_empty(len(state), min(stride, total), shape.floats, dtype=shape.states)
        for first in reversed(range(0, total, stride)):
            last = min(first + stride, total)
            if ctx.every > 1:
                again = [*inputs[:11], kept[:, first // stride], *inputs[12:]]
                launch_forward(plan, shape, again, first, last, (*[None] * 4, room), 1)
            starts, lengths = tables(tuple(plan.counts), tuple(plan.starts), q.device, shape.blocks)
            with torch.cuda.device_of(q):
                reverse_kernel[(plan.counts[first // shape.blocks],)](
                    *inputs[:11], start, target, starts, lengths, room, d_o, d_x_end, *d_tokens, *d_sums[:2], d_state,
                    d_x, d_sums[2], *(plan.dense or NOWHERE), room.stride(0), first, last, **shape.numbers,
                    **shape.constants, **shape.launch(True, q.device),
                )  # fmt: skip
        return None, None, *d_tokens, *d_sums[:2], d_state, d_x, d_sums[2]


def launch_forward(plan: Plan, shape: Shape, inputs: list, first: int, last: int, outputs, every: int) -> None:
    """Blocks [first, last) from the states in `inputs`; `outputs` are filled where they are not `None`."""
    starts, lengths = tables(tuple(plan.counts), tuple(plan.starts), inputs[0].device, shape.blocks)
    kept = outputs[4]
    with torch.cuda.device_of(inputs[0]):
        forward_kernel[(plan.counts[first // shape.blocks],)](
            *inputs, starts, lengths, *outputs, *(plan.dense or NOWHERE), inputs[11].stride(0),
            0 if kept is None else kept.stride(0), first, last, every, **shape.numbers, **shape.constants,
            **shape.launch(False, inputs[0].device),
        )  # fmt: skip
