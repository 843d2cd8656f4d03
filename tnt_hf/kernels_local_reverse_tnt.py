"""Triton: the outer backward of `kernels_local_tnt.forward_kernel`, a program per (grid row, head), last block first.

Axis legend
    ROWS tokens of a block, BC of its tile   R blocks that share one W_xi: a chunk   G query heads per memory head
    DK key width   DV value width   DA width of the top layer's input   P programs
    B batch   T tokens   S tokens between resets   H memory heads
    state: W (hidden layer, then top layer), with momentum followed by S, flattened, float32

A block is recomputed from the state before it, which the forward kept or a second run of it wrote down, and d_name is
the gradient of name. Travels with every pushed checkpoint.
"""

from __future__ import annotations

from .kernels_local_tnt import (
    activate,
    block_tokens,
    bound_scale,
    inner_gradient,
    load_layers,
    load_rows,
    matrix,
    pair_weights,
    read_layer,
    store_layers,
    store_rows,
    top_input,
)
from .kernels_parts_tnt import PLACES, dot, exceeds, jit, place, standardise, through_standardise, tl, turned


@jit
def reverse_write(
    d_W, d_S, d_T, W, S, target, A_end, D_end, m_end, end, end_S, a, delta, M: tl.constexpr, N: tl.constexpr,
    MOMENTUM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Through `write_layer`: d_W, d_S, d_T before the block, d_a, d_delta, the gradients of its scalars A_end, D_end
    and m_end, and what those of end and end_S are the sums of."""
    moved = dot(a, d_W, DT)
    d_a = -end[:, None] * dot(delta, turned(d_W, DT), DT)
    d_delta = -end[:, None] * moved
    d_end = -delta * moved
    d_A, d_D, d_m, d_end_S = 0.0, 0.0, 0.0, 0.0
    if MOMENTUM:
        moved = dot(a, d_S, DT)
        d_a -= end_S[:, None] * dot(delta, turned(d_S, DT), DT)
        d_delta -= end_S[:, None] * moved
        d_end_S = -delta * moved
        d_D = tl.sum(d_W * S)
        d_m = tl.sum(d_S * S)
        d_S = m_end * d_S + D_end * d_W
    if A_end is not None:
        if target is not None:
            W -= tl.load(matrix(target, M, N))
            d_T += (1.0 - A_end) * d_W
        d_A = tl.sum(d_W * W)
        d_W = A_end * d_W
    return d_W, d_S, d_T, d_a, d_delta, d_A, d_D, d_m, d_end, d_end_S


@jit
def row_sums(x, y, M: tl.constexpr, N: tl.constexpr):
    """Of x `[BC, M]` and y `[BC, N]` together; with N 0 of x alone."""
    if N == 0:
        return tl.sum(x, 1)
    elif M == N:  # one sum makes the threads wait for one another once
        return tl.sum(x + y, 1)
    else:
        return tl.sum(x, 1) + tl.sum(y, 1)


@jit
def reverse_read(
    x, d_y, d_W, d_S, d_T, d_a, d_delta, d_pairs, d_A, d_D, W, S, target, A, D, pairs, a, delta, M: tl.constexpr,
    N: tl.constexpr, MOMENTUM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Through `read_layer`: adds to every sum and returns d_x first."""
    scores, back = dot(x, turned(a, DT), DT), dot(d_y, turned(delta, DT), DT)
    d_pairs -= scores * back
    d_delta -= dot(turned(pairs * scores, DT), d_y, DT)
    d_scores = pairs * back
    d_a -= dot(turned(d_scores, DT), x, DT)
    x_T = turned(x, DT)
    if A is not None:
        if target is not None:
            goal = tl.load(matrix(target, M, N))
            W -= goal
            d_T += dot(x_T, (1.0 - A)[:, None] * d_y, DT)
        d_x = dot(d_y, turned(W, DT), DT)
        d_A += tl.sum(d_x * x, 1)
        d_x *= A[:, None]
        if target is not None:
            d_x += dot(d_y, turned(goal, DT), DT)
        d_W += dot(x_T, A[:, None] * d_y, DT)
    else:
        d_x = dot(d_y, turned(W, DT), DT)
        d_W += dot(x_T, d_y, DT)
    if MOMENTUM:
        pull = dot(d_y, turned(S, DT), DT)
        d_D += tl.sum(pull * x, 1)
        d_x += D[:, None] * pull
        d_S += dot(x_T, D[:, None] * d_y, DT)
    return d_x - dot(d_scores, a, DT), d_W, d_S, d_T, d_a, d_delta, d_pairs, d_A, d_D


@jit(do_not_specialize=[*PLACES, "last"])
def reverse_kernel(
    q, k, v, theta, c, A, D, s_end, m_end, gain, bias, x, target, starts, lengths, kept, d_o, d_x_end, d_q, d_k, d_v,
    d_theta, d_c, d_A, d_D, d_s_end, d_m_end, d_gain, d_bias, d_state, d_x, d_target, B, T, S, H,
    kept_stride, first, last, bound, eps, ROWS: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    DK: tl.constexpr, DA: tl.constexpr, DV: tl.constexpr, DEPTH: tl.constexpr, NAME: tl.constexpr,
    RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, BOUND: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) of every program, `first` the beginning of a chunk; `kept` has the state before each.

    Arguments as in `forward_kernel`. In and out, summed over launches: d_state `[P, ...]` (at first the gradient of
    the final state), d_target `[P, ...]`, d_gain, d_bias `[P, DV]`. d_x_end is the gradient of the last W_xi, d_x
    that of `x`. With `c` `None` d_theta is written, without it d_c.
    """
    H1: tl.constexpr = DK * DA if DEPTH == 2 else 0
    NW: tl.constexpr = H1 + DA * DV
    NS: tl.constexpr = 2 * NW if MOMENTUM else NW
    SPLIT: tl.constexpr = R > 1 or x is not None
    NORM: tl.constexpr = gain is not None
    AGAIN: tl.constexpr = MOMENTUM or A is not None
    p = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BC)
    used = i < ROWS
    wide = tl.arange(0, DV)
    total = tl.load(lengths + p)
    stop = tl.minimum(last, total)
    begin, step, tokens = place(p, B, T, S, H)
    none = tl.zeros((1,), tl.float32)
    d_S1, d_S2, d_T1, d_T2, d_X1, d_X2 = none, none, none, none, none, none
    g_gain, g_bias, scale, shift = none, none, None, None
    d_W1, d_W2 = load_layers(d_state + p * NS, DEPTH, DK, DA, DV, "")
    if MOMENTUM:
        d_S1, d_S2 = load_layers(d_state + p * NS + NW, DEPTH, DK, DA, DV, "")
    T1, T2 = None, None
    if target is not None:
        T1, T2 = target + p * NW, target + p * NW + H1
        d_T1, d_T2 = load_layers(d_target + p * NW, DEPTH, DK, DA, DV, "")
    if SPLIT:
        d_X1, d_X2 = tl.zeros_like(d_W1), tl.zeros_like(d_W2)
        if d_x_end is not None:
            if total <= last:
                d_X1, d_X2 = load_layers(d_x_end + p * NW, DEPTH, DK, DA, DV, "")
    if NORM:
        scale, shift = tl.load(gain + p * DV + wide), tl.load(bias + p * DV + wide)
        g_gain, g_bias = tl.load(d_gain + p * DV + wide), tl.load(d_bias + p * DV + wide)
    for back in range(first, stop):
        j = stop - 1 - (back - first)
        block = (tl.load(starts + j // R) + p) * R + j % R
        token, live = block_tokens(block, j, begin, step, tokens, H, ROWS, BC)
        key = load_rows(k, token, live, DK)
        value = load_rows(v, token, live, DV).to(tl.float32)
        S1, S2 = none, none
        here = kept + p * kept_stride + (j - first) * NS
        W1, W2 = load_layers(here, DEPTH, DK, DA, DV, "")
        if MOMENTUM:
            S1, S2 = load_layers(here + NW, DEPTH, DK, DA, DV, "")
        X1, X2 = W1, W2
        if SPLIT:
            start = here - j % R * NS
            if x is not None:
                if j < R:  # the chunk that began before this call
                    start = x + p * NW
            X1, X2 = load_layers(start, DEPTH, DK, DA, DV, "")
        a, slope, curve = top_input(X1, key, DEPTH, NAME, DT)
        delta, below, behind, error, h, inverse = inner_gradient(
            X2, key, value, a, slope, scale, shift, eps, DEPTH, DV, RESIDUAL, NORM, DT
        )
        pairs, end_W = pair_weights(theta, c, block, used, ROWS, BC)
        A_end, A_rows, D_end, D_rows, m_last, end_S = None, None, None, None, None, None
        if MOMENTUM:
            end_S = tl.load(s_end + block * ROWS + i, mask=used, other=0.0)
            m_last = tl.load(m_end + block)
            D_end = tl.load(D + block * ROWS + ROWS - 1)
            D_rows = tl.load(D + block * ROWS + i, mask=used, other=0.0)
        if A is not None:
            A_end = tl.load(A + block * ROWS + ROWS - 1)
            A_rows = tl.load(A + block * ROWS + i, mask=used, other=0.0)
        shrink, square = 1.0, 0.0
        raw_pairs, raw_end, raw_end_S = pairs, end_W, end_S
        if BOUND:
            shrink, square, squares = bound_scale(key, below, a, delta, bound, DEPTH, DK == DA and DA == DV)
            pairs, end_W = pairs * shrink[None, :], end_W * shrink
            if MOMENTUM:
                end_S *= shrink

        # the writes
        d_W2, d_S2, d_T2, g_a, g_delta, g_A, g_D, g_m, g_end, g_end_S = reverse_write(
            d_W2, d_S2, d_T2, W2, S2, T2, A_end, D_end, m_last, end_W, end_S, a, delta, DA, DV, MOMENTUM, DT
        )
        g_key, g_below = g_a, g_a  # depth 1: the top layer's input is the key
        h_end, h_end_S = g_end, g_end_S
        if DEPTH == 2:
            d_W1, d_S1, d_T1, g_key, g_below, h_A, h_D, h_m, h_end, h_end_S = reverse_write(
                d_W1, d_S1, d_T1, W1, S1, T1, A_end, D_end, m_last, end_W, end_S, key, below, DK, DA, MOMENTUM, DT,
            )  # fmt: skip
            g_A, g_D, g_m = g_A + h_A, g_D + h_D, g_m + h_m
        g_end = row_sums(g_end, h_end, DV, DA if DEPTH == 2 else 0)
        if MOMENTUM:
            g_end_S = row_sums(g_end_S, h_end_S, DV, DA if DEPTH == 2 else 0)

        # the reads. A state of more than W is loaded again where it is used again (".ca": from the L1 cache; without
        # it the compiler would keep the first), so that it takes no registers meanwhile: less than half of the spills
        if AGAIN:
            W1, W2 = load_layers(here, DEPTH, DK, DA, DV, ".ca")
            if MOMENTUM:
                S1, S2 = load_layers(here + NW, DEPTH, DK, DA, DV, ".ca")
        g_pairs = tl.zeros((BC, BC), tl.float32)
        g_A_rows, g_D_rows = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
        for g in range(G):
            row = token * G + g
            query = load_rows(q, row, live, DK)
            d_y = load_rows(d_o, row, live, DV).to(tl.float32)
            g_query = d_y
            hidden, read_slope = query, 0.0
            if DEPTH == 2:
                z = read_layer(query, W1, S1, T1, A_rows, D_rows, pairs, key, below, DK, DA, MOMENTUM, DT)
                hidden, read_slope, read_curve = activate(z, NAME)
            if NORM:
                y = read_layer(hidden, W2, S2, T2, A_rows, D_rows, pairs, a, delta, DA, DV, MOMENTUM, DT)
                y, y_inverse = standardise(y, None, eps, DV)
                g_gain += tl.sum(d_y * y, 0)
                g_bias += tl.sum(d_y, 0)
                d_y = through_standardise(scale[None, :] * d_y, y, y_inverse, DV)
            d_hidden, d_W2, d_S2, d_T2, g_a, g_delta, g_pairs, g_A_rows, g_D_rows = reverse_read(
                hidden, d_y, d_W2, d_S2, d_T2, g_a, g_delta, g_pairs, g_A_rows, g_D_rows, W2, S2, T2, A_rows, D_rows,
                pairs, a, delta, DA, DV, MOMENTUM, DT,
            )  # fmt: skip
            if DEPTH == 2:
                d_hidden, d_W1, d_S1, d_T1, g_key, g_below, g_pairs, g_A_rows, g_D_rows = reverse_read(
                    query, d_hidden * read_slope, d_W1, d_S1, d_T1, g_key, g_below, g_pairs, g_A_rows, g_D_rows, W1,
                    S1, T1, A_rows, D_rows, pairs, key, below, DK, DA, MOMENTUM, DT,
                )  # fmt: skip
            if RESIDUAL:
                d_hidden += g_query
            store_rows(d_q, row, d_hidden, live, DK)

        # the scalars
        if c is None:
            g_theta = g_end + tl.sum(tl.where(i[:, None] >= i[None, :], g_pairs, 0.0), 0)
        if BOUND:
            if c is None:  # every weight of a write is its theta
                g_shrink = g_theta * raw_end
                g_theta *= shrink
            else:
                g_shrink = tl.sum(g_pairs * raw_pairs, 0) + g_end * raw_end
                g_pairs, g_end = g_pairs * shrink[None, :], g_end * shrink
            if MOMENTUM:
                g_shrink += g_end_S * raw_end_S
                g_end_S *= shrink
            over = exceeds(square, bound)
            g_square = tl.where(over, -shrink / tl.where(over, square, 1.0) * g_shrink, 0.0)[:, None]
            g_a += g_square * squares[1][:, None] * a.to(tl.float32)
            g_delta += g_square * squares[0][:, None] * delta
            if DEPTH == 2:
                g_key += g_square * squares[3][:, None] * key.to(tl.float32)
                g_below += g_square * squares[2][:, None] * below
        if c is None:
            tl.store(d_theta + block * ROWS + i, g_theta, mask=used)
        else:
            g_pairs += tl.where(i[:, None] == ROWS - 1, g_end[None, :], 0.0)
            there = d_c + block * ROWS * ROWS + i[:, None] * ROWS + i[None, :]
            tl.store(there, g_pairs, mask=used[:, None] & used[None, :])
        if A is not None:
            tl.store(d_A + block * ROWS + i, g_A_rows + tl.where(i == ROWS - 1, g_A, 0.0), mask=used)
        if MOMENTUM:
            tl.store(d_D + block * ROWS + i, g_D_rows + tl.where(i == ROWS - 1, g_D, 0.0), mask=used)
            tl.store(d_s_end + block * ROWS + i, g_end_S, mask=used)
            tl.store(d_m_end + block, g_m)

        # the inner gradient, a function of k, v and W_xi
        if AGAIN and not SPLIT:
            X1, X2 = load_layers(here, DEPTH, DK, DA, DV, ".ca")
        if SPLIT:
            h_X1, h_X2 = d_X1, d_X2
        else:
            h_X1, h_X2 = d_W1, d_W2
        d_z = 0.0
        if DEPTH == 2:
            g_behind = g_below * slope
            d_z = g_below * behind * curve
            g_delta += dot(g_behind, X2, DT)
            h_X2 += dot(turned(g_behind, DT), delta, DT)
        g_error, d_y = g_delta, g_delta
        if NORM:
            u = scale[None, :] * error
            d_u = through_standardise(g_delta, h, inverse, DV)
            g_error = scale[None, :] * d_u
            g_gain += tl.sum(d_u * error + g_error * h, 0)
            g_bias += tl.sum(g_error, 0)
            d_h = scale[None, :] * g_error - g_delta * (tl.sum(u * h, 1) / DV)[:, None] * inverse[:, None]
            d_h -= u * (tl.sum(g_delta * h, 1) / DV)[:, None] * inverse[:, None]
            along = (tl.sum(g_delta * delta, 1) / DV)[:, None] * inverse[:, None]
            d_y = through_standardise(d_h, h, inverse, DV) - h * along
        g_a += dot(d_y, turned(X2, DT), DT)
        h_X2 += dot(turned(a, DT), d_y, DT)
        if DEPTH == 2:
            d_z += g_a * slope
            g_key += dot(d_z, turned(X1, DT), DT)
            h_X1 += dot(turned(key, DT), d_z, DT)
        else:
            g_key = g_a
        if RESIDUAL:
            g_key += g_error
        store_rows(d_k, token, g_key, live, DK)
        store_rows(d_v, token, -g_error, live, DV)
        if SPLIT:
            begins = j % R == 0
            if x is not None:
                begins = begins & (j > 0)
            first_one = begins.to(tl.float32)  # a factor: Triton 3.9 cannot choose between sums on sm_100
            d_W1, d_W2 = d_W1 + first_one * h_X1, d_W2 + first_one * h_X2
            d_X1, d_X2 = (1.0 - first_one) * h_X1, (1.0 - first_one) * h_X2
        else:
            d_W1, d_W2 = h_X1, h_X2
            if d_x_end is not None:
                if j == total - 1:
                    more_1, more_2 = load_layers(d_x_end + p * NW, DEPTH, DK, DA, DV, "")
                    d_W1, d_W2 = d_W1 + more_1, d_W2 + more_2
    store_layers(d_state + p * NS, d_W1, d_W2, DEPTH, DK, DA, DV)
    if MOMENTUM:
        store_layers(d_state + p * NS + NW, d_S1, d_S2, DEPTH, DK, DA, DV)
    if target is not None:
        store_layers(d_target + p * NW, d_T1, d_T2, DEPTH, DK, DA, DV)
    if x is not None:
        store_layers(d_x + p * NW, d_X1, d_X2, DEPTH, DK, DA, DV)
    if NORM:
        tl.store(d_gain + p * DV + wide, g_gain)
        tl.store(d_bias + p * DV + wide, g_bias)
