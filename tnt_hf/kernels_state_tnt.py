"""The Triton kernels from one chunk's state to the next one's, and back, of a memory that reads at its chunk's start.

Axis legend
    P programs: grid rows x memory heads   N chunks of all programs   FLOATS of all layers' weights
    a program of the kernels: BLOCK of the FLOATS of one of P

Number by number, in float32. What a chunk adds comes in shares, `[P, splits, FLOATS]`, of `kernels_chunk_tnt`.
Programs p that are at a chunk are the first of all; what is kept of chunks they find at `first` + p. Travels with
every pushed checkpoint.
"""

from __future__ import annotations

from .kernels_parts_tnt import jit, load, mixed, only, tl


STEPS = ["first", "then", "rest", "written", "splits", "read_splits", "write_splits"]  # numbers, as PLACES


@jit
def shares_of(shares, p, at, splits, FLOATS: tl.constexpr, GROUP: tl.constexpr):
    """The sum of a program's shares, always in the same order, GROUP of them at once."""
    total = tl.zeros(at.shape, tl.float32)
    for i in range(0, splits, GROUP):
        split = i + tl.arange(0, GROUP)
        total += tl.sum(load(shares + p * splits * FLOATS, split, split < splits, at, FLOATS), 0)
    return total


@jit(do_not_specialize=STEPS)
def advance(
    w, s, target, sums, sums_S, A, D, m, starts, momenta, first, then, rest, splits, FLOATS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, FORGET: tl.constexpr, MOMENTUM: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The states w and s behind a chunk, in place and, for the first `rest` programs, where the next chunk, at `then`,
    keeps them (s: if KEPT). A, D, m `[N]`."""
    p, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chunk, here, kept = first + p, p * FLOATS + at, (then + p) * FLOATS + at
    W, step = tl.load(w + here), -shares_of(sums, p, at, splits, FLOATS, GROUP)
    if MOMENTUM:
        S = tl.load(s + here)
        step += tl.load(D + chunk) * S
        S = tl.load(m + chunk) * S - shares_of(sums_S, p, at, splits, FLOATS, GROUP)
        tl.store(s + here, S)
        if KEPT:
            tl.store(momenta + kept, S, mask=only(at, p < rest))
    if FORGET != "none":
        keep = tl.load(A + chunk)
        if FORGET == "init":
            W, way = mixed(W, tl.load(target + here), keep)
            step += way
        else:
            W *= keep
    W += step
    tl.store(w + here, W)
    tl.store(starts + kept, W, mask=only(at, p < rest))


@jit(do_not_specialize=STEPS)
def retreat(
    d_w, d_s, d_start, d_target, w, s, target, reads, writes, A, D, m, d_A, d_D, d_m, first, written, read_splits,
    write_splits, FLOATS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FORGET: tl.constexpr,
    MOMENTUM: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """The gradients d_w, d_s of the state before a chunk from those behind it, in place: through the update (the first
    `written` programs'), and the shares of its reads `[N, splits, FLOATS]` and writes in d_start, if SAME that is d_w.
    w begins with the chunk's, s `[N, FLOATS]` is all chunks'; d_A, d_D and d_m `[N, blocks]` are what each block of
    the weights adds to theirs. Adds to d_target."""
    p, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    chunk, here = first + p, p * FLOATS + at
    part = chunk * tl.num_programs(1) + block
    dw = tl.load(d_w + here)
    if MOMENTUM:
        S, ds = tl.load(s + chunk * FLOATS + at), tl.load(d_s + here)
        tl.store(d_D + part, tl.sum(dw * S, 0))
        tl.store(d_m + part, tl.sum(ds * S, 0))
        tl.store(d_s + here, tl.load(m + chunk) * ds + tl.load(D + chunk) * dw)
    if FORGET != "none":
        keep, moved = tl.load(A + chunk), tl.load(w + here)
        if FORGET == "init":
            moved -= tl.load(target + here)
            tl.store(d_target + here, tl.load(d_target + here) + (1 - keep) * dw)
        tl.store(d_A + part, tl.sum(dw * moved, 0))
        dw *= keep
    pull = shares_of(reads, chunk, at, read_splits, FLOATS, GROUP)
    if p < written:
        pull += shares_of(writes, p, at, write_splits, FLOATS, GROUP)
    if SAME:
        dw += pull
    else:
        tl.store(d_start + here, tl.load(d_start + here) + pull)
    tl.store(d_w + here, dw)
