"""The decode step as one Triton kernel: `step_tnt.token`, the recurrence for one token, with the state in place.

Axis legend
    B batch   H memory heads   G query heads per memory head (BG: up to a power of two)   C tokens per chunk
    L layers (1 or 2)   K key, E hidden, V value width   BE hidden units of a tile

A program is one memory head of one batch row. A step reads and writes each weight once and is bound by that, so all
arithmetic is float32, tile by tile of the hidden units: what a tile needs of W_1 is its columns, of W_2 its rows. A
single layer is a second layer behind the identity. First pass: the error of f(W_xi, k) - v; second: write and read
out. Travels with every pushed checkpoint.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from .kernels_parts_tnt import jit, mixed, only, phi, row_norms, slope, tl, unit


ELEMENTS = 4096  # of a tile, or of its products with all query heads


@jit
def hidden(k, weight):
    """k W_1 for a tile's columns, and for a single layer the tile's part of k (`weight` is that of the identity)."""
    return tl.sum(k[:, None] * weight, 0)


@jit
def through(z, L: tl.constexpr, ACT: tl.constexpr):
    """The activation between two layers."""
    if L == 2:
        return phi(z, ACT)
    else:
        return z


@jit
def entry(state, init, at, at_init, reset, RESETS: tl.constexpr):
    """A tile of the state before the token: of `init` where the row is reset."""
    if RESETS:
        old = tl.load(state + at, mask=only(at, reset == 0), other=0.0)
        return old + tl.load(init + at_init, mask=only(at, reset), other=0.0)
    else:
        return tl.load(state + at)


@jit
def replace(state, at, value, where):
    """Writes a tile if `where`."""
    tl.store(state + at, value, mask=only(at, where))


@jit
def write(
    w, start, s, init, at, at_init, begun, step, mu, alpha, here, ends, reset, MOMENTUM: tl.constexpr,
    DECAY: tl.constexpr, TO_INIT: tl.constexpr, CHUNKED: tl.constexpr, RESETS: tl.constexpr,
):  # fmt: skip
    """Replaces a tile of w, start and s after a `step` down its gradient; `begun` is W_xi. Returns W."""
    if MOMENTUM:
        old = tl.load(s + at)
        if RESETS:
            old = tl.where(reset, 0.0, old)
        step += mu * old
        replace(s, at, step, here)
    new = begun
    if CHUNKED:
        new = entry(w, init, at, at_init, reset, RESETS)
    unwritten = new
    if DECAY:
        if TO_INIT:
            new, way = mixed(new, tl.load(init + at_init), 1 - alpha)
            step += way
        else:
            new *= 1 - alpha
    new += step
    replace(w, at, new, here)
    if CHUNKED:
        replace(start, at, tl.where(ends, tl.where(here, new, unwritten), begun), ends | reset)
    return new


@jit
def token(
    q, k, v, lr, momentum, decay, present, time, init1, init2, w1, w2, start1, start2, s1, s2, M, gain, bias, o, error,
    H, C, interval, eps, bound, K: tl.constexpr, E: tl.constexpr, V: tl.constexpr, G: tl.constexpr, BG: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr, TO_INIT: tl.constexpr, PROJECTION: tl.constexpr,
    NORMALIZE: tl.constexpr, CURRENT: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr, RESETS: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """One token: q `[B, H, G, K]`, k `[B, H, K]`, v `[B, H, V]`, scalars `[B, H]`, present and time `[B]`; o
    `[B, H, G, V]` and error `[B, H, V]` are filled, w, start (if CHUNKED), s and M `[B, H, ...]` replaced."""
    p = tl.program_id(0).to(tl.int64)
    head, row = p % H, p // H
    x, y, g = tl.arange(0, K), tl.arange(0, V), tl.arange(0, BG)
    now = tl.load(time + row)
    here, reset = now >= 0, now < 0
    if MASKED:
        here = tl.load(present + row) != 0
    if RESETS:
        reset = here & (now % interval == 0)
    ends = (now + here.to(tl.int64)) % C == 0
    key = tl.load(k + p * K + x).to(tl.float32)

    # the error at W_xi
    out = tl.zeros([V], tl.float32)
    for i in range(E // BE):
        h = i * BE + tl.arange(0, BE)
        first = (x[:, None] == h[None, :]).to(tl.float32)
        if L == 2:
            at = x[:, None] * E + h[None, :]
            first = entry(start1, init1, p * K * E + at, head * K * E + at, reset, RESETS)
        at = h[:, None] * V + y[None, :]
        second = entry(start2, init2, p * E * V + at, head * E * V + at, reset, RESETS)
        out += tl.sum(through(hidden(key, first), L, ACT)[:, None] * second, 0)
    e = -tl.load(v + p * V + y).to(tl.float32)
    if RESIDUAL:
        e += key
    if NORM:
        scale, shift = tl.load(gain + head * V + y), tl.load(bias + head * V + y)
        out -= tl.sum(out, 0) / V
        inverse = 1 / tl.sqrt(tl.sum(out * out, 0) / V + eps)
        out *= inverse
        e += scale * out + shift
        pull = scale * e
        top = inverse * (pull - tl.sum(pull, 0) / V - out * (tl.sum(pull * out, 0) / V))
    else:
        e += out
        top = e
    tl.store(error + p * V + y, tl.where(here, e, 0.0))

    theta = tl.load(lr + p).to(tl.float32)
    if BOUND:
        square = tl.sum(top * top, 0) * 0.0
        for i in range(E // BE):
            h = i * BE + tl.arange(0, BE)
            first = (x[:, None] == h[None, :]).to(tl.float32)
            if L == 2:
                at = x[:, None] * E + h[None, :]
                first = entry(start1, init1, p * K * E + at, head * K * E + at, reset, RESETS)
                at = h[:, None] * V + y[None, :]
                second = entry(start2, init2, p * E * V + at, head * E * V + at, reset, RESETS)
                delta = tl.sum(second * top[None, :], 1) * slope(hidden(key, first), ACT)
                square += tl.sum(key * key, 0) * tl.sum(delta * delta, 0)
            a = through(hidden(key, first), L, ACT)
            square += tl.sum(a * a, 0) * tl.sum(top * top, 0)
        theta *= bound / tl.maximum(tl.sqrt(square), bound)
    mu, alpha = 0.0, 0.0
    if MOMENTUM:
        mu = tl.load(momentum + p).to(tl.float32)
    if DECAY:
        alpha = tl.load(decay + p).to(tl.float32)

    # the query, projected by M of this token
    query = tl.load(q + p * G * K + g[:, None] * K + x[None, :], mask=g[:, None] < G, other=0.0).to(tl.float32)
    if PROJECTION != "none":
        grow = 1.0 - reset.to(tl.float32)
        if PROJECTION == "chunk":
            grow = tl.where(now % C == 0, 0.0, grow)
        norm = tl.maximum(tl.sqrt(tl.sum(key * key, 0)), 1e-12)
        moved = tl.zeros([BG, K], tl.float32)
        for i in range(K // BK):
            r = i * BK + tl.arange(0, BK)
            part = tl.load(k + p * K + r).to(tl.float32) / norm
            at = p * K * K + r[:, None] * K + x[None, :]
            old = tl.load(M + at)
            new = part[:, None] * (key / norm)[None, :] + tl.where(grow == 0, 0.0, old)
            replace(M, at, new, here)
            rows = tl.load(q + p * G * K + g[:, None] * K + r[None, :], mask=g[:, None] < G, other=0.0)
            moved += tl.sum(rows.to(tl.float32)[:, :, None] * new[None, :, :], 1)
        query = moved
        if NORMALIZE:
            query = unit(query, row_norms(query))

    # write and read
    answer = tl.zeros([BG, V], tl.float32)
    for i in range(E // BE):
        h = i * BE + tl.arange(0, BE)
        at = x[:, None] * E + h[None, :]
        at2 = h[:, None] * V + y[None, :]
        second = entry(start2, init2, p * E * V + at2, head * E * V + at2, reset, RESETS)
        first = (x[:, None] == h[None, :]).to(tl.float32)
        if L == 2:
            first = entry(start1, init1, p * K * E + at, head * K * E + at, reset, RESETS)
        z = hidden(key, first)
        a = through(z, L, ACT)

        step = -theta * a[:, None] * top[None, :]
        new2 = write(
            w2, start2, s2, init2, p * E * V + at2, head * E * V + at2, second, step, mu, alpha, here, ends, reset,
            MOMENTUM, DECAY, TO_INIT, CHUNKED, RESETS,
        )  # fmt: skip
        new1 = first
        if L == 2:
            delta = tl.sum(second * top[None, :], 1) * slope(z, ACT)
            step = -theta * key[:, None] * delta[None, :]
            new1 = write(
                w1, start1, s1, init1, p * K * E + at, head * K * E + at, first, step, mu, alpha, here, ends, reset,
                MOMENTUM, DECAY, TO_INIT, CHUNKED, RESETS,
            )  # fmt: skip
        if not CURRENT:
            new1, new2 = first, second
        inner = through(tl.sum(query[:, :, None] * new1[None, :, :], 1), L, ACT)
        answer += tl.sum(inner[:, :, None] * new2[None, :, :], 1)
    if NORM:
        answer -= (tl.sum(answer, 1) / V)[:, None]
        inverse = 1 / tl.sqrt(tl.sum(answer * answer, 1) / V + eps)
        answer = answer * inverse[:, None] * scale[None, :] + shift[None, :]
    if RESIDUAL:
        answer += query
    answer = tl.where(here, answer, 0.0)
    at = p * G * V + g[:, None] * V + y[None, :]
    tl.store(o + at, answer, mask=g[:, None] < G)


@torch.no_grad()
def token_step(state, init: list[Tensor], net, options: dict, q, k, v, lr, momentum, decay, present):
    """`step_tnt.token` in one kernel, without gradient: one token of every row.

    Args:
        state: a `MemoryState` of contiguous float32 tensors of its own (no expanded views), which are overwritten. Its
            `time` stays: memories share it, so whoever calls them advances it.
        init, net, options: W_init, the network and the options of `memory_chunkwise`, as `token` has them.
        q `[B, H, G, K]`, k `[B, H, 1, K]`, v `[B, H, 1, V]`, lr, momentum, decay `[B, H]`, present `[B]` bool or
            `None`.

    Returns:
        The read-out `[B, H, G, V]` and the error f(W_xi, k) - v `[B, H, 1, V]` before the write, float32, 0 where no
        token is present.

    Raises:
        ValueError: a state tensor that is not contiguous and so cannot be written in place.
    """
    B, H, G, K = q.shape
    W, start, S, M, ln = state.weights, state.chunk_weights, state.momentum, state.projection, options["layernorm"]
    time, chunked = state.time.contiguous(), options["chunk_size"] > 1
    _check_in_place([*W, *(start if chunked else ()), *(S or ()), *(() if M is None else (M,))], init)
    L, V, bound = len(W), v.shape[-1], options["grad_bound"]
    E = W[0].shape[-1] if L == 2 else K
    BG = 1 << (G - 1).bit_length()
    o, error = (lr.new_empty(B, H, n, V, dtype=torch.float32) for n in (G, 1))
    q, k, v, lr = (x.contiguous() for x in (q, k, v, lr))
    # what the kernel does not look at is any tensor
    mu, alpha = (lr if x is None else x.contiguous() for x in (momentum, decay))
    gain, bias = (lr, lr) if ln is None else (x.contiguous() for x in ln[:2])
    here = time if present is None else present.contiguous().view(torch.int8)
    init, start, S = [w.contiguous() for w in init], start if chunked else W, S or W
    tile = min(E, max(16, ELEMENTS // (BG * max(K, V))))
    with nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(q):
        token[(B * H,)](
            q, k, v, lr, mu, alpha, here, time, init[0], init[-1], W[0], W[-1], start[0], start[-1], S[0], S[-1],
            lr if M is None else M, gain, bias, o, error, H, options["chunk_size"], options["reset_interval"] or 1,
            net.eps, bound or 0.0, K, E, V, G, BG, tile, min(K, max(16, 2048 // K)), L, net.activation, net.residual,
            ln is not None, state.momentum is not None, decay is not None, options["decay_target"] == "init",
            "none" if M is None else options["query_projection"], options["normalize_projection"],
            options["read"] == "current", chunked, present is not None, options["reset_interval"] is not None,
            bound is not None, num_warps=8,
        )  # fmt: skip
    return o, error


def _check_in_place(tensors: list[Tensor], init: list[Tensor]) -> None:
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"state must hold contiguous tensors to be written in place, got strides {x.stride()}")
    if not torch.compiler.is_compiling():
        addresses = [x.data_ptr() for x in (*tensors, *init)]
        if len(set(addresses)) < len(addresses):
            raise ValueError("state must hold tensors of its own to be written in place, got some that share memory")
