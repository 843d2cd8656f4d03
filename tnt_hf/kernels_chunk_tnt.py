"""The Triton kernels of one chunk of a memory that reads at its chunk's start; `kernels_global_tnt` has the scan.

Axis legend
    P programs: grid rows x memory heads   N chunks of all programs   C tokens per chunk   R = C G query rows
    B batch   T tokens   S tokens between resets   H memory heads: with them q, k, v and o are `[B, T, H (G), D]`
    L layers (1 or 2)   K key, E hidden, V value width (a single layer has E = V)
    FLOATS of all layers' weights, which lie one behind the other: `[P, FLOATS]`, `[N, FLOATS]`
    a program of the kernels: one chunk and one of its splits, which runs through `tiles` tiles of BR rows

Programs p that are at a chunk are the first of all; what is kept of chunks they find at `first` + p. How the state
behind a chunk comes of these sums is in `kernels_state_tnt`.

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
    q, w, gain, bias, o, eps, P, B, T, S, H, C, tiles, G: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """o `[N, R, V]` = f(W, q `[N, R, K]`) with each chunk's weights, and gain and bias `[N, V]` of a LayerNorm."""
    chunk, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * tiles
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    FLOATS: tl.constexpr = K * E + (L - 1) * E * V
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    w += chunk * FLOATS
    W1 = load(w, x, x < K, h, E).to(DT)
    if L == 2:
        W2 = load(w + K * E, h, h < E, y, V).to(DT)
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
    q, w, gain, d_o, d_q, d_w, d_gain, d_bias, eps, P, B, T, S, H, C, tiles, G: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr,
    RESIDUAL: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradients of `read`: d_q, and each split's share of the weights' and the LayerNorm's, `[N, splits, ...]`."""
    chunk, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = chunk * tl.num_programs(1) + split
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    FLOATS: tl.constexpr = K * E + (L - 1) * E * V
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    w += chunk * FLOATS
    d_w += part * FLOATS
    W1 = load(w, x, x < K, h, E).to(DT)
    d_W1 = tl.zeros([K, E], tl.float32)
    if L == 2:
        W2 = load(w + K * E, h, h < E, y, V).to(DT)
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
    store(d_w, x, x < K, h, d_W1, E)
    if L == 2:
        store(d_w + K * E, h, h < E, y, d_W2, V)
    if NORM:
        tl.store(d_gain + part * V + y, d_G)
        tl.store(d_bias + part * V + y, d_B)


@jit(do_not_specialize=PLACES)
def write_sums(
    k, v, w, gain, bias, c, s, loss, sums, sums_S, eps, bound, first, P, B, T, S, H, C, tiles, K: tl.constexpr,
    E: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, MOMENTUM: tl.constexpr, BOUND: tl.constexpr, LOSS: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Each split's share of sum_i c_i g_i and, with momentum, of sum_i s_i g_i, `[P, splits, FLOATS]`; `loss` `[N, C]`
    before the write."""
    p, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = p * tl.num_programs(1) + split
    chunk = first + p
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    FLOATS: tl.constexpr = K * E + (L - 1) * E * V
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    w += chunk * FLOATS
    W1 = load(w, x, x < K, h, E).to(DT)
    G1 = tl.zeros([K, E], tl.float32)
    if L == 2:
        W2 = load(w + K * E, h, h < E, y, V).to(DT)
        G2 = tl.zeros([E, V], tl.float32)
    if MOMENTUM:
        G1_S = tl.zeros([K, E], tl.float32)
        if L == 2:
            G2_S = tl.zeros([E, V], tl.float32)
    for i in range(tiles):
        row, inside, at = tile_rows(split * tiles + i, begin, step, tokens, 1, BR)
        token = chunk * C + at
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
    store(sums + part * FLOATS, x, x < K, h, G1, E)
    if L == 2:
        store(sums + part * FLOATS + K * E, h, h < E, y, G2, V)
    if MOMENTUM:
        store(sums_S + part * FLOATS, x, x < K, h, G1_S, E)
        if L == 2:
            store(sums_S + part * FLOATS + K * E, h, h < E, y, G2_S, V)


@jit(do_not_specialize=PLACES)
def write_reverse(
    k, v, w, gain, bias, c, s, g, g_S, d_k, d_v, d_c, d_s, d_w, d_gain, d_bias, eps, bound, first, P, B, T, S, H, C,
    tiles, K: tl.constexpr, E: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BR: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, MOMENTUM: tl.constexpr,
    BOUND: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's update with respect to what it was computed from, given those of the weights (g) and
    the momentum (g_S) behind it, `[P, FLOATS]`; `[P, splits, ...]` is each split's share of those of W_xi (d_w) and of
    the LayerNorm."""
    p, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = p * tl.num_programs(1) + split
    chunk = first + p
    begin, step, tokens = chunk_place(chunk, C, P, B, T, S, H)
    FLOATS: tl.constexpr = K * E + (L - 1) * E * V
    x, y, h = tl.arange(0, K), tl.arange(0, V), tl.arange(0, E)
    w += chunk * FLOATS
    g += p * FLOATS
    d_w += part * FLOATS
    W1, behind1 = load(w, x, x < K, h, E).to(DT), load(g, x, x < K, h, E).to(DT)
    d_W1 = tl.zeros([K, E], tl.float32)
    if L == 2:
        W2, behind2 = load(w + K * E, h, h < E, y, V).to(DT), load(g + K * E, h, h < E, y, V).to(DT)
        d_W2 = tl.zeros([E, V], tl.float32)
    if MOMENTUM:
        g_S += p * FLOATS
        behind1_S = load(g_S, x, x < K, h, E).to(DT)
        if L == 2:
            behind2_S = load(g_S + K * E, h, h < E, y, V).to(DT)
    if NORM:
        d_G, d_B = tl.zeros([V], tl.float32), tl.zeros([V], tl.float32)
    for i in range(tiles):
        row, inside, at = tile_rows(split * tiles + i, begin, step, tokens, 1, BR)
        token = chunk * C + at
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
    store(d_w, x, x < K, h, d_W1, E)
    if L == 2:
        store(d_w + K * E, h, h < E, y, d_W2, V)
    if NORM:
        tl.store(d_gain + part * V + y, d_G)
        tl.store(d_bias + part * V + y, d_B)
