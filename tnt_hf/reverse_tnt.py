"""The outer backward of `scan_tnt.scan`, by hand: what the forward keeps, and the way from the last chunk to the
first.

Axis legend
    C tokens per chunk   G query heads per memory head   L layers of the memory network
    P programs: grid rows x heads of a block's chunks

The weights a chunk started from are kept, undone (W_0 = W_C + sum_i c_i g_i, exact up to rounding and taken anew from
a kept state every sqrt(steps) chunks) or replayed from a kept state, whichever is cheapest. Travels with every pushed
checkpoint.
"""

import math

import torch
from torch import Tensor

from .block_tnt import Backward, BlockBackward, Running
from .coefficients_tnt import Coef
from .denormals_tnt import without_denormals
from .derivative_tnt import once_differentiable
from .plan_tnt import BLOCK_ELEMENTS, Plan, blocks, keeps_all
from .precision_tnt import full_precision
from .rebuild_tnt import rebuild
from .scan_tnt import Ends, Tape, blank_tape, cut, offsets, scan, write_chunk


class ChunkScan(torch.autograd.Function):
    """`scan` with a closed-form backward: through the reads, the chunk-end update and the inner gradient. It keeps the
    `Tape`, O(1) per token, and O(sqrt(steps)) states (all of them where they are small against the tape)."""

    @staticmethod
    def forward(ctx, plan, depth, qk, v, theta, c, A, D, s_end, m_end, gain, bias, *states):
        coef, ln = Coef(theta, c, A, D, s_end, m_end), None if gain is None else (gain, bias)
        W, xi, S, target = layers(states, depth)
        offset = offsets(plan, qk, v, ln)
        steps, C = len(plan.counts), v.shape[1]
        widths = [w.shape[2] for w in W]
        ctx.length = max(
            1, min(BLOCK_ELEMENTS // (plan.counts[0] * C * max(W[0].shape[1], *widths)), math.isqrt(steps))
        )
        ctx.stride = max(1, -(-math.isqrt(steps - 1) // ctx.length)) * ctx.length
        kept = range(0, steps, ctx.stride)
        if keeps_all(W, C, s_end is not None):
            ctx.way, ctx.stride, kept = "keep", ctx.length, range(steps)
        elif c is None and min(plan.counts) == plan.counts[0]:
            ctx.way, kept = "undo", [*kept, steps - 1]
        else:
            ctx.way = "replay"
        tape = blank_tape(plan, qk, W, coef, ln, kept) if any(ctx.needs_input_grad) else None
        o, loss, *final = scan(plan, qk, offset, coef, ln, target, xi, W, S, tape=tape)
        if tape is not None:
            ctx.steps = [(j, S is not None) for j, (_, S) in tape.states.items()]
            flat = [y for x in tape[:-1] for y in x]
            ctx.tape = [len(x) for x in tape[:-1]]
            flat += [x for W, S in tape.states.values() for x in (*W, *(S or ()))]
            ctx.save_for_backward(qk, offset, *coef, gain, bias, *states, *flat)
        ctx.plan, ctx.depth = plan, depth
        if loss is not None:
            ctx.mark_non_differentiable(loss)
        return o, loss, *(y for x in final for y in (x or [None] * depth))

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _, *d_final):
        with full_precision(d_o.device):  # unlike the forward, it may be called inside one
            return None, None, *_gradients(ctx, d_o, d_final)


@torch.compiler.disable  # of compiled autograd
@without_denormals
def _gradients(ctx, d_o, d_final):
    """Of all that `ChunkScan` was given but the plan and the depth."""
    plan, L = ctx.plan, ctx.depth
    qk, offset, *rest = ctx.saved_tensors
    coef, (gain, bias), states, flat = Coef(*rest[:6]), rest[6:8], rest[8 : 8 + 4 * L], iter(rest[8 + 4 * L :])
    ln = None if gain is None else (gain, bias)
    kept = {}
    parts = [[next(flat) for _ in range(n)] for n in ctx.tape]
    for j, momentum in ctx.steps:
        kept[j] = [next(flat) for _ in range(L)], [next(flat) for _ in range(L)] if momentum else None
    tape = Tape(*parts, kept)
    _, xi, S0, target = layers(states, L)
    # blocks may pass over unused programs
    made = torch.empty_like if sum(plan.counts) == len(qk) else torch.zeros_like
    grad = [made(x) for x in (qk, offset)]
    grad += [x if x is None else torch.zeros_like(x) for x in coef]
    d_target = None if target is None else [torch.zeros_like(x) for x in target]
    d_ln = None if ln is None else [torch.zeros_like(x) for x in ln]
    room = [torch.empty_like(x) for x in kept[min(kept)][0]]
    back = Backward(plan, ctx.way, tape, xi, target, ln, layers(d_final, L, 3), grad, d_target, d_ln, room)
    run = _through_blocks(back, ctx.length, ctx.stride, (qk, offset, ln, coef), d_o)
    none = [None] * L
    d_states = (run.d_W, run.d_xi, none if S0 is None else run.d_S)
    return (
        *back.grad,
        *(back.d_ln or (None, None)),
        *(x if x is None else x.clone() for y in d_states for x in y or none),
        *(back.d_target or none),
    )


@torch.inference_mode()  # where an operation costs less; autograd is given only what was made outside
def _through_blocks(back: Backward, length: int, stride: int, inputs, d_o) -> Running:
    """All blocks, from the last to the first. `inputs`: qk, offset, ln, coef."""
    plan, tape, replayed, L = back.plan, back.tape, back.way == "replay", len(back.tape.key)
    todo, run, room = blocks(plan, length), Running(None, None, None, None), {}
    while todo:
        begin = (todo[-1].steps[0] // stride) * stride
        group = []
        while todo and todo[-1].steps[0] >= begin:
            block = todo.pop()
            group.append((block, rebuild(plan, block, tape, L, *inputs) if replayed else None))
        entries = replay(plan, tape, group, back.target, room) if replayed else []
        for block, built in group:
            built = built or rebuild(plan, block, tape, L, *inputs)
            run = BlockBackward(back, block, built, d_o[block.here]).run(run, entries)
    return run


def layers(flat, L: int, kinds: int = 4) -> list[list[Tensor] | None]:
    """A flat tuple of `kinds` x L tensors as lists, `None` for a kind that is absent."""
    parts = (flat[i * L : (i + 1) * L] for i in range(kinds))
    return [None if x[0] is None else list(x) for x in parts]


def replay(plan: Plan, tape: Tape, group, target, room: dict) -> list:
    """(W, S) before each chunk of a group of blocks (last block first), from the kept state before the first. `room`:
    memory for states, made once for all groups."""
    entries, last = [], group[0][0].steps[-1]
    W, S = tape.states[group[-1][0].steps[0]]
    for block, built in reversed(group):
        pushed, pushed_S = (
            [None] * len(block.steps) if x is None else list(zip(*(block.cuts(pair) for pair in x)))
            for x in (built.pushed, built.pushed_S)
        )
        ends = map(Ends._make, block.cuts(Ends.of(built.coef)))
        for j, end, to_W, to_S in zip(block.steps, ends, pushed, pushed_S):
            n = plan.counts[j]
            W, S = cut(W, n), cut(S, n)
            entries.append((W, S))
            if j < last:
                if len(entries) not in room:
                    like = [w.new_empty(plan.counts[0], *w.shape[1:]) for w in W]
                    room[len(entries)] = like, to_S and [torch.empty_like(w) for w in like]
                into = tuple(cut(y, n) for y in room[len(entries)])
                W, S = write_chunk(W, S, cut(target, n), end, to_W, to_S, into)
    return entries
