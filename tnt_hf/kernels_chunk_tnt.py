"""The Triton kernels of one chunk of a memory that reads at its chunk's start; `kernels_global_tnt` has the scan.

Axis legend
    P programs: grid rows x memory heads   N chunks of all programs   C tokens per chunk   R = C G query rows
    B batch   T tokens   S tokens between resets   H memory heads: with them q, k, v and o are `[B, T, H (G), D]`
    L layers (1 or 2)   K key, E hidden, V value width (a single layer has E = V)
    a program of the kernels: one chunk and one of its splits, which runs through `tiles` tiles of BR rows

`advance` and `retreat` go from one chunk's state to the next one's, and back, for one layer of `size` weights.

Operands are in DT (bf16 or fp32), sums and all else in float32. The gradient bound multiplies c_i and s_i by
r_i = min(1, bound / |g_i|), |g_i|^2 = sum_l |a_{l-1,i}|^2 |delta_{l,i}|^2. Travels with every pushed checkpoint.
"""

from __future__ import annotations

from .kernels_parts_tnt import (
    PLACES,
    chunk_place,
    curve,
    dot,
    dot_exact,
    exceeds,
    jit,
    load,
    only,
    phi,
    slope,
    standardise,
    store,
    through_standardise,
    tile_rows,
    tl,
)


@jit(do_not_specialize=PLACES)
def read(
    q, w1, w2, gain, bias, o, eps, P, B, T, S, H, C, tiles, G: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """o `[N, R, V]` = f(W, q `[N, R, K]`) with each chunk's weights, and gain and bias `[N, V]` of a LayerNorm."""
    chunk, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * tiles
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    W1 = load(w1, chunk * K + x, x < K, h, E).to(DT)
    if L == 2:
        W2 = load(w2, chunk * E + h, h < E, y, V).to(DT)
    for i in range(tiles):
        row, inside, _ = tile_rows(first + i, begin, step, tokens, G, BR)
        X = load(q, row, inside, x, K)
        out = dot(X, W1, DT)
        if L == 2:
            out = dot(phi(out, ACT), W2, DT)
        if NORM:
            out, _ = standardise(out, inside, eps, V)
            out = out * tl.load(gain + chunk * V + y) + tl.load(bias + chunk * V + y)
        if RESIDUAL:
            out += X.to(tl.float32)
        store(o, row, inside, y, out, V)


@jit(do_not_specialize=PLACES)
def read_reverse(
    q, w1, w2, gain, d_o, d_q, d_w1, d_w2, d_gain, d_bias, eps, P, B, T, S, H, C, tiles, G: tl.constexpr,
    K: tl.constexpr, E: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr,
    RESIDUAL: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradients of `read`: d_q, and each split's share of the weights' and the LayerNorm's `[N, splits, ...]`."""
    chunk, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = chunk * tl.num_programs(1) + split
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    W1 = load(w1, chunk * K + x, x < K, h, E).to(DT)
    d_W1 = tl.zeros([K, E], tl.float32)
    if L == 2:
        W2 = load(w2, chunk * E + h, h < E, y, V).to(DT)
        d_W2 = tl.zeros([E, V], tl.float32)
    if NORM:
        d_G, d_B = tl.zeros([V], tl.float32), tl.zeros([V], tl.float32)
    for i in range(tiles):
        row, inside, _ = tile_rows(split * tiles + i, begin, step, tokens, G, BR)
        X, d_out = load(q, row, inside, x, K), load(d_o, row, inside, y, V)
        d_z = d_out.to(tl.float32)
        if L == 2 or NORM:
            z = dot(X, W1, DT)
        if NORM:
            out = z
            if L == 2:
                out = dot(phi(z, ACT), W2, DT)
            unit, inverse = standardise(out, inside, eps, V)
            d_G += tl.sum(d_z * unit, 0)
            d_B += tl.sum(d_z, 0)
            d_z = through_standardise(d_z * tl.load(gain + chunk * V + y), unit, inverse, V)
        if L == 2:
            d_W2 += dot(tl.trans(phi(z, ACT)), d_z, DT)
            d_z = dot(d_z, tl.trans(W2), DT) * slope(z, ACT)
        d_W1 += dot(tl.trans(X), d_z, DT)
        d_X = dot(d_z, tl.trans(W1), DT)
        if RESIDUAL:
            d_X += d_out.to(tl.float32)
        store(d_q, row, inside, x, d_X, K)
    store(d_w1, part * K + x, x < K, h, d_W1, E)
    if L == 2:
        store(d_w2, part * E + h, h < E, y, d_W2, V)
    if NORM:
        tl.store(d_gain + part * V + y, d_G)
        tl.store(d_bias + part * V + y, d_B)


@jit(do_not_specialize=PLACES)
def write_sums(
    k, v, w1, w2, gain, bias, c, s, loss, sum1, sum2, sum1_S, sum2_S, eps, bound, first, P, B, T, S, H, C, tiles,
    K: tl.constexpr, E: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr,
    RESIDUAL: tl.constexpr, NORM: tl.constexpr, MOMENTUM: tl.constexpr, BOUND: tl.constexpr, LOSS: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Each split's share of sum_i c_i g_i and, with momentum, of sum_i s_i g_i: `[P, splits, d_in, d_out]` per layer;
    `loss` `[P, C]` before the write. k and v are of all chunks, from `first` on; all else is of these."""
    p, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = p * tl.num_programs(1) + split
    begin, step, tokens = chunk_place(first + p, C, P, B, T, S, H)
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    W1 = load(w1, p * K + x, x < K, h, E).to(DT)
    G1 = tl.zeros([K, E], tl.float32)
    if L == 2:
        W2 = load(w2, p * E + h, h < E, y, V).to(DT)
        G2 = tl.zeros([E, V], tl.float32)
    if MOMENTUM:
        G1_S = tl.zeros([K, E], tl.float32)
        if L == 2:
            G2_S = tl.zeros([E, V], tl.float32)
    for i in range(tiles):
        row, inside, at = tile_rows(split * tiles + i, begin, step, tokens, 1, BR)
        token = p * C + at
        X = load(k, row, inside, x, K)
        e = -load(v, row, inside, y, V).to(tl.float32)
        if RESIDUAL:
            e += X.to(tl.float32)
        z = dot(X, W1, DT)
        if L == 2:
            a = phi(z, ACT)
            out = dot(a, W2, DT)
        else:
            out = z
        if NORM:
            out, inverse = standardise(out, inside, eps, V)
            e += tl.load(gain + p * V + y) * out + tl.load(bias + p * V + y)
            top = through_standardise(tl.load(gain + p * V + y) * e, out, inverse, V)
        else:
            e += out
            top = e
        if L == 2:
            delta = dot(top, tl.trans(W2), DT) * slope(z, ACT)
        else:
            delta = top
        if LOSS:
            tl.store(loss + token, 0.5 * tl.sum(e * e, 1), mask=inside)
        scale = tl.load(c + token, mask=inside, other=0.0)
        if BOUND:
            square = tl.sum(X.to(tl.float32) * X.to(tl.float32), 1) * tl.sum(delta * delta, 1)
            if L == 2:
                square += tl.sum(a * a, 1) * tl.sum(top * top, 1)
            limit = bound / tl.maximum(tl.sqrt(square), bound)
            scale *= limit
        G1 += dot(tl.trans(X), scale[:, None] * delta, DT)
        if L == 2:
            G2 += dot(tl.trans(a), scale[:, None] * top, DT)
        if MOMENTUM:
            scale = tl.load(s + token, mask=inside, other=0.0)
            if BOUND:
                scale *= limit
            G1_S += dot(tl.trans(X), scale[:, None] * delta, DT)
            if L == 2:
                G2_S += dot(tl.trans(a), scale[:, None] * top, DT)
    store(sum1, part * K + x, x < K, h, G1, E)
    if L == 2:
        store(sum2, part * E + h, h < E, y, G2, V)
    if MOMENTUM:
        store(sum1_S, part * K + x, x < K, h, G1_S, E)
        if L == 2:
            store(sum2_S, part * E + h, h < E, y, G2_S, V)


@jit(do_not_specialize=PLACES)
def write_reverse(
    k, v, w1, w2, gain, bias, c, s, g1, g2, g1_S, g2_S, d_k, d_v, d_c, d_s, d_w1, d_w2, d_gain, d_bias, eps, bound,
    first, P, B, T, S, H, C, tiles, K: tl.constexpr, E: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BR: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, MOMENTUM: tl.constexpr,
    BOUND: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's update with respect to what it was computed from, given those of the weights (g) and
    the momentum (g_S) behind it, `[P, d_in, d_out]`; `[P, splits, ...]` is each split's share of those of W_xi (d_w)
    and of the LayerNorm."""
    p, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = p * tl.num_programs(1) + split
    begin, step, tokens = chunk_place(first + p, C, P, B, T, S, H)
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    W1, behind1 = load(w1, p * K + x, x < K, h, E).to(DT), load(g1, p * K + x, x < K, h, E).to(DT)
    d_W1 = tl.zeros([K, E], tl.float32)
    if L == 2:
        W2, behind2 = load(w2, p * E + h, h < E, y, V).to(DT), load(g2, p * E + h, h < E, y, V).to(DT)
        d_W2 = tl.zeros([E, V], tl.float32)
    if MOMENTUM:
        behind1_S = load(g1_S, p * K + x, x < K, h, E).to(DT)
        if L == 2:
            behind2_S = load(g2_S, p * E + h, h < E, y, V).to(DT)
    if NORM:
        d_G, d_B = tl.zeros([V], tl.float32), tl.zeros([V], tl.float32)
    for i in range(tiles):
        row, inside, at = tile_rows(split * tiles + i, begin, step, tokens, 1, BR)
        token = p * C + at
        X = load(k, row, inside, x, K)
        e = -load(v, row, inside, y, V).to(tl.float32)
        if RESIDUAL:
            e += X.to(tl.float32)
        z = dot_exact(X, W1, DT)
        if L == 2:
            a, bend = phi(z, ACT), slope(z, ACT)
            out = dot_exact(a, W2, DT)
        else:
            out = z
        if NORM:
            unit, inverse = standardise(out, inside, eps, V)
            G = tl.load(gain + p * V + y)[None, :]
            e += G * unit + tl.load(bias + p * V + y)[None, :]
            pull = G * e
            top = through_standardise(pull, unit, inverse, V)
        else:
            e += out
            top = e
        if L == 2:
            below = dot_exact(top, tl.trans(W2), DT)  # dl/da
            delta = below * bend
        else:
            delta = top
        # the sums are subtracted from the state: -c_i (a_i . G) is delta_i's gradient, and so on
        scale = -tl.load(c + token, mask=inside, other=0.0)
        if BOUND:
            key2, delta2 = tl.sum(X.to(tl.float32) * X.to(tl.float32), 1), tl.sum(delta * delta, 1)
            square = key2 * delta2
            if L == 2:
                a2, top2 = tl.sum(a * a, 1), tl.sum(top * top, 1)
                square += a2 * top2
            limit = bound / tl.maximum(tl.sqrt(square), bound)
            raw = scale
            scale *= limit
        d_delta = dot_exact(X, behind1, DT)
        d_scale = tl.sum(d_delta * delta, 1)
        d_delta *= scale[:, None]
        d_X = scale[:, None] * dot_exact(delta, tl.trans(behind1), DT)
        if L == 2:
            d_top = dot_exact(a, behind2, DT)
            d_scale += tl.sum(d_top * top, 1)
            d_top *= scale[:, None]
            d_a = scale[:, None] * dot_exact(top, tl.trans(behind2), DT)
        if BOUND:
            d_limit = d_scale * raw
            d_scale *= limit
        tl.store(d_c + token, -d_scale, mask=inside)
        if MOMENTUM:
            scale = -tl.load(s + token, mask=inside, other=0.0)
            if BOUND:
                raw = scale
                scale *= limit
            push = dot_exact(X, behind1_S, DT)
            d_scale = tl.sum(push * delta, 1)
            d_delta += scale[:, None] * push
            d_X += scale[:, None] * dot_exact(delta, tl.trans(behind1_S), DT)
            if L == 2:
                push = dot_exact(a, behind2_S, DT)
                d_scale += tl.sum(push * top, 1)
                d_top += scale[:, None] * push
                d_a += scale[:, None] * dot_exact(top, tl.trans(behind2_S), DT)
            if BOUND:
                d_limit += d_scale * raw
                d_scale *= limit
            tl.store(d_s + token, -d_scale, mask=inside)
        if BOUND:  # d limit / d square = -limit / (2 square) where the bound holds
            over = exceeds(square, bound)
            d_square = tl.where(over, -d_limit * limit / tl.where(over, square, 1.0), 0.0)
            d_X += (d_square * delta2)[:, None] * X.to(tl.float32)
            d_delta += (d_square * key2)[:, None] * delta
            if L == 2:
                d_a += (d_square * top2)[:, None] * a
                d_top += (d_square * a2)[:, None] * top
        if L == 2:
            d_below = d_delta * bend
            d_top += dot_exact(d_below, W2, DT)
            d_W2 += dot_exact(tl.trans(d_below), top, DT)
        else:
            d_top = d_delta
        if NORM:  # back through top = J(unit) (gain * e), e = gain * unit + ...
            d_pull = through_standardise(d_top, unit, inverse, V)
            d_e = G * d_pull
            along_unit, along_top = tl.sum(d_top * unit, 1) * inverse / V, tl.sum(d_top * top, 1) * inverse / V
            mean = tl.sum(pull * unit, 1) * inverse / V
            d_unit = G * d_e - d_top * mean[:, None] - pull * along_unit[:, None]
            d_top = through_standardise(d_unit, unit, inverse, V) - unit * along_top[:, None]
            d_G += tl.sum(d_pull * e + d_e * unit, 0)
            d_B += tl.sum(d_e, 0)
        else:
            d_e = d_top
        if L == 2:
            d_W2 += dot_exact(tl.trans(a), d_top, DT)
            d_a += dot_exact(d_top, tl.trans(W2), DT)
            d_z = d_delta * below * curve(z, ACT) + d_a * bend
        else:
            d_z = d_top
        d_W1 += dot_exact(tl.trans(X), d_z, DT)
        d_X += dot_exact(d_z, tl.trans(W1), DT)
        if RESIDUAL:
            d_X += d_e
        store(d_k, row, inside, x, d_X, K)
        store(d_v, row, inside, y, -d_e, V)
    store(d_w1, part * K + x, x < K, h, d_W1, E)
    if L == 2:
        store(d_w2, part * E + h, h < E, y, d_W2, V)
    if NORM:
        tl.store(d_gain + part * V + y, d_G)
        tl.store(d_bias + part * V + y, d_B)


@jit
def shares_of(shares, p, at, splits, size: tl.constexpr):
    """The sum of a program's shares, always in the same order."""
    total = tl.load(shares + p * splits * size + at)
    for i in range(1, splits):
        total += tl.load(shares + (p * splits + i) * size + at)
    return total


@jit
def advance(
    w, s, target, sums, sums_S, A, D, m, next_w, next_s, splits, rest, size: tl.constexpr, BLOCK: tl.constexpr,
    FORGET: tl.constexpr, MOMENTUM: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The state behind a chunk, in place and, for the first `rest` programs, where the next chunk keeps it (next_s: if
    KEPT). A, D, m `[P]`."""
    p, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    W = tl.load(w + p * size + at)
    if FORGET != "none":
        keep = tl.load(A + p)
        W *= keep
        if FORGET == "init":
            W += (1 - keep) * tl.load(target + p * size + at)
    if MOMENTUM:
        S = tl.load(s + p * size + at)
        W += tl.load(D + p) * S
        S = tl.load(m + p) * S - shares_of(sums_S, p, at, splits, size)
        tl.store(s + p * size + at, S)
        if KEPT:
            tl.store(next_s + p * size + at, S, mask=only(at, p < rest))
    W -= shares_of(sums, p, at, splits, size)
    tl.store(w + p * size + at, W)
    tl.store(next_w + p * size + at, W, mask=only(at, p < rest))


@jit
def retreat(
    d_w, d_s, d_start, d_target, w, s, target, reads, writes, A, D, m, d_A, d_D, d_m, read_splits, write_splits,
    written, size: tl.constexpr, BLOCK: tl.constexpr, FORGET: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """The gradients d_w, d_s of the state before a chunk from those behind it, in place: through the update (the first
    `written` programs'), and the shares of its reads and writes in d_start, which may be d_w. Adds to d_target, d_A,
    d_D and d_m."""
    p = tl.program_id(0).to(tl.int64)
    A_dots, D_dots, m_dots = (
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
    )
    for i in range(size // BLOCK):
        at = i * BLOCK + tl.arange(0, BLOCK)
        here = p * size + at
        dw = tl.load(d_w + here)
        if MOMENTUM:
            S, ds = tl.load(s + here), tl.load(d_s + here)
            D_dots += dw * S
            m_dots += ds * S
            tl.store(d_s + here, tl.load(m + p) * ds + tl.load(D + p) * dw)
        if FORGET != "none":
            keep, moved = tl.load(A + p), tl.load(w + here)
            if FORGET == "init":
                moved -= tl.load(target + here)
                tl.store(d_target + here, tl.load(d_target + here) + (1 - keep) * dw)
            A_dots += dw * moved
            dw *= keep
            tl.store(d_w + here, dw)
        pull = shares_of(reads, p, at, read_splits, size)
        if p < written:
            pull += shares_of(writes, p, at, write_splits, size)
        tl.store(d_start + here, tl.load(d_start + here) + pull)
    if MOMENTUM:
        tl.store(d_D + p, tl.load(d_D + p) + tl.sum(D_dots, 0))
        tl.store(d_m + p, tl.load(d_m + p) + tl.sum(m_dots, 0))
    if FORGET != "none":
        tl.store(d_A + p, tl.load(d_A + p) + tl.sum(A_dots, 0))
