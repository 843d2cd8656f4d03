"""Triton: forward of one memory that reads W_t, a program per (grid row, head) that walks over its chunks.

Axis legend
    ROWS tokens of a block, BC of its tile (rows beyond ROWS are zeros)   R blocks that share one W_xi: a chunk
    G query heads per memory head   DK key width   DV value width   DA width of the top layer's input   P programs
    B batch   T tokens   S tokens between resets   H memory heads
    state: W (hidden layer, then top layer), with momentum followed by S, flattened, float32

The dual form of `scan_tnt` holds for any run of tokens with gradients at W_xi and reads from W: a chunk that is too
long for a tile is cut into blocks that keep its W_xi, and a state carried into the middle of a chunk is the same
thing. Accumulation and state are float32, matrix operands DT. Travels with every pushed checkpoint.
"""

from __future__ import annotations

from .kernels_parts_tnt import PLACES, dot, jit, mixed, nearest, place, standardise, through_standardise, tl, turned


@jit
def matrix(base, M: tl.constexpr, N: tl.constexpr):
    """Addresses of a contiguous [M, N] matrix."""
    return base + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]


@jit
def load_layers(base, DEPTH: tl.constexpr, DK: tl.constexpr, DA: tl.constexpr, DV: tl.constexpr, CACHE: tl.constexpr):
    """The matrices of the hidden layer (depth 1: a placeholder) and of the top layer, `CACHE` as `tl.load` has it."""
    hidden = tl.zeros((1,), tl.float32)
    if DEPTH == 2:
        hidden = tl.load(matrix(base, DK, DA), cache_modifier=CACHE)
        base += DK * DA
    return hidden, tl.load(matrix(base, DA, DV), cache_modifier=CACHE)


@jit
def store_layers(base, hidden, top, DEPTH: tl.constexpr, DK: tl.constexpr, DA: tl.constexpr, DV: tl.constexpr):
    """The inverse of `load_layers`."""
    if DEPTH == 2:
        tl.store(matrix(base, DK, DA), hidden)
        base += DK * DA
    tl.store(matrix(base, DA, DV), top)


@jit
def load_rows(base, rows, live, WIDTH: tl.constexpr):
    """Those rows of a matrix, zeros where not `live`."""
    where = base + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(where, mask=live[:, None], other=0.0)


@jit
def block_tokens(block, j, begin, step, tokens, H, ROWS: tl.constexpr, BC: tl.constexpr):
    """Where the tokens of a program's block j are, the `block`-th of all, and which of them there are; see `place`."""
    i = tl.arange(0, BC)
    if H is None:
        return block * ROWS + nearest(i, ROWS), i < ROWS
    else:
        return begin + nearest(j * ROWS + i, tokens) * step, i < tl.minimum(ROWS, tokens - j * ROWS)


@jit
def store_rows(base, rows, x, live, WIDTH: tl.constexpr):
    """The inverse of `load_rows`, rounded to the tensor's type."""
    where = base + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(where, x.to(base.dtype.element_ty), mask=live[:, None])


@jit
def activate(z, NAME: tl.constexpr):
    """phi(z), phi'(z), phi''(z); what is not used is not computed."""
    if NAME == "silu":
        s = tl.sigmoid(z)
        a = z * s
        return a, s + a * (1.0 - s), s * (1.0 - s) * (2.0 + z - 2.0 * a)
    else:
        below = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        bell = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return z * below, below + z * bell, bell * (2.0 - z * z)


@jit
def top_input(X1, key, DEPTH: tl.constexpr, NAME: tl.constexpr, DT: tl.constexpr):
    """The top layer's input a at X, with phi' and phi'' of what it is made of."""
    if DEPTH == 2:
        return activate(dot(key, X1, DT), NAME)
    else:
        return key, 0.0, 0.0


@jit
def inner_gradient(
    X2, key, value, a, slope, gain, bias, eps, DEPTH: tl.constexpr, DV: tl.constexpr, RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The factors of g_l = a_{l-1}^T delta_l at X, of `top_input`'s a and phi'. Returns delta of the top layer, that
    of the hidden one and dl/da behind it, and the error, h and 1 / s of the network's output."""
    y = dot(a, X2, DT)
    h, inverse = y, 0.0
    if NORM:
        h, inverse = standardise(y, None, eps, DV)
        y = gain[None, :] * h + bias[None, :]
    error = y - value
    if RESIDUAL:
        error += key.to(tl.float32)
    delta = error
    if NORM:
        delta = through_standardise(gain[None, :] * error, h, inverse, DV)
    behind, below = 0.0, 0.0
    if DEPTH == 2:
        behind = dot(delta, turned(X2, DT), DT)
        below = behind * slope
    return delta, below, behind, error, h, inverse


@jit
def _add(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@jit
def bound_scale(key, below, a, delta, bound, DEPTH: tl.constexpr, EQUAL: tl.constexpr):
    """(s, |g|^2) with s = min(1, bound / |g|) per token, |g|^2 over all layers, and the squares of the lengths of a,
    delta, and in the hidden layer key and below, all of `EQUAL` widths or not. No square of the bound: it may be
    outside of float32."""
    a, key = a.to(tl.float32), key.to(tl.float32)
    if DEPTH == 2 and EQUAL:  # each sum makes the threads wait for one another: here one for all
        squares = tl.reduce((a * a, delta * delta, key * key, below * below), 1, _add)
    elif DEPTH == 2:
        squares = tl.sum(a * a, 1), tl.sum(delta * delta, 1), tl.sum(key * key, 1), tl.sum(below * below, 1)
    else:
        squares = tl.sum(a * a, 1), tl.sum(delta * delta, 1)
    square = squares[0] * squares[1]
    if DEPTH == 2:
        square += squares[2] * squares[3]
    return bound / tl.maximum(tl.sqrt(square), bound), square, squares


@jit
def pair_weights(theta, c, block, live, ROWS: tl.constexpr, BC: tl.constexpr):
    """c_{t,i} `[BC, BC]` of a block and its last row: theta_i for i <= t where `c` is `None`."""
    i = tl.arange(0, BC)
    if c is None:
        end = tl.load(theta + block * ROWS + i, mask=live, other=0.0)
        return tl.where(i[:, None] >= i[None, :], end[None, :], 0.0), end
    else:
        where = c + block * ROWS * ROWS + i
        pairs = tl.load(where[None, :] + i[:, None] * ROWS, mask=live[:, None] & live[None, :], other=0.0)
        return pairs, tl.load(where + (ROWS - 1) * ROWS, mask=live, other=0.0)


@jit
def read_layer(
    x, W, S, target, A, D, pairs, a, delta, M: tl.constexpr, N: tl.constexpr, MOMENTUM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """x W_t for the rows of a block, as attention to its writes (a, delta)."""
    if A is not None:
        if target is not None:
            goal = tl.load(matrix(target, M, N))
            y = dot(x, goal, DT) + A[:, None] * dot(x, W - goal, DT)
        else:
            y = A[:, None] * dot(x, W, DT)
    else:
        y = dot(x, W, DT)
    if MOMENTUM:
        y += D[:, None] * dot(x, S, DT)
    return y - dot(pairs * dot(x, turned(a, DT), DT), delta, DT)


@jit
def write_layer(
    W, S, target, A_end, D_end, m_end, end, end_S, a, delta, M: tl.constexpr, N: tl.constexpr, MOMENTUM: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """W and S behind a block."""
    key = turned(a, DT)
    if A_end is not None and target is not None:
        W, way = mixed(W, tl.load(matrix(target, M, N)), A_end)
        if MOMENTUM:
            way += D_end * S
            S = m_end * S - dot(key, end_S[:, None] * delta, DT)
        return W + (way - dot(key, end[:, None] * delta, DT)), S
    if A_end is not None:
        W = A_end * W
    if MOMENTUM:
        W += D_end * S
        S = m_end * S - dot(key, end_S[:, None] * delta, DT)
    return W - dot(key, end[:, None] * delta, DT), S


@jit(do_not_specialize=[*PLACES, "last", "every"])  # one compiled kernel for every length
def forward_kernel(
    q, k, v, theta, c, A, D, s_end, m_end, gain, bias, state, x, target, starts, lengths, o, loss, end, x_end, kept,
    B, T, S, H, state_stride, kept_stride, first, last, every, bound, eps, ROWS: tl.constexpr,
    BC: tl.constexpr, R: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DA: tl.constexpr, DV: tl.constexpr,
    DEPTH: tl.constexpr, NAME: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, BOUND: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) of every program.

    q `[N, ROWS G, DK]`, k, v `[N, ROWS, D]` and the scalars `c` ... `m_end` of N blocks; block j of program p is
    (starts[j // R] + p) R + j % R, and p has lengths[p] of them. With `B`, `T`, `S` and `H`, of a dense grid, q, k and
    v are `[B, T, H (G), D]`. gain, bias `[P, DV]`. `state` `[P, ...]` before the first block, x `[P, ...]` its W_xi if
    that is not W, `target` `[P, ...]`. Written if not `None`: o as q, the inner loss `[N, ROWS]`, the state after the
    last block, the W_xi of it, and to `kept` `[P, slots, ...]` the state before every `every`-th block.
    """
    H1: tl.constexpr = DK * DA if DEPTH == 2 else 0  # where the top layer's weights begin
    NW: tl.constexpr = H1 + DA * DV
    SPLIT: tl.constexpr = R > 1 or x is not None
    NORM: tl.constexpr = gain is not None
    p = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BC)
    used = i < ROWS
    total = tl.load(lengths + p)
    begin, step, tokens = place(p, B, T, S, H)
    S1, S2 = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    W1, W2 = load_layers(state + p * state_stride, DEPTH, DK, DA, DV, "")
    if MOMENTUM:
        S1, S2 = load_layers(state + p * state_stride + NW, DEPTH, DK, DA, DV, "")
    if SPLIT:
        X1, X2 = W1, W2
        if x is not None:
            X1, X2 = load_layers(x + p * NW, DEPTH, DK, DA, DV, "")
    scale, shift = None, None
    T1 = None if target is None else target + p * NW
    T2 = None if target is None else target + p * NW + H1
    if NORM:
        scale = tl.load(gain + p * DV + tl.arange(0, DV))
        shift = tl.load(bias + p * DV + tl.arange(0, DV))
    for j in range(first, tl.minimum(last, total)):
        block = (tl.load(starts + j // R) + p) * R + j % R
        if kept is not None:
            if (j - first) % every == 0:
                there = kept + p * kept_stride + (j - first) // every * (2 * NW if MOMENTUM else NW)
                store_layers(there, W1, W2, DEPTH, DK, DA, DV)
                if MOMENTUM:
                    store_layers(there + NW, S1, S2, DEPTH, DK, DA, DV)
        if SPLIT:
            begins = j % R == 0
            if x is not None:
                begins = begins & (j > 0)
            X1, X2 = tl.where(begins, W1, X1), tl.where(begins, W2, X2)
        else:
            X1, X2 = W1, W2
        if x_end is not None:
            if j == total - 1:
                store_layers(x_end + p * NW, X1, X2, DEPTH, DK, DA, DV)
        token, live = block_tokens(block, j, begin, step, tokens, H, ROWS, BC)
        key = load_rows(k, token, live, DK)
        value = load_rows(v, token, live, DV).to(tl.float32)
        a, slope, curve = top_input(X1, key, DEPTH, NAME, DT)
        delta, below, behind, error, h, inverse = inner_gradient(
            X2, key, value, a, slope, scale, shift, eps, DEPTH, DV, RESIDUAL, NORM, DT
        )
        if loss is not None:
            tl.store(loss + block * ROWS + i, 0.5 * tl.sum(error * error, 1), mask=used)
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
        if BOUND:
            shrink, square, squares = bound_scale(key, below, a, delta, bound, DEPTH, DK == DA and DA == DV)
            pairs, end_W = pairs * shrink[None, :], end_W * shrink
            if MOMENTUM:
                end_S *= shrink
        if o is not None:
            for g in range(G):
                row = token * G + g
                query = load_rows(q, row, live, DK)
                hidden = query
                if DEPTH == 2:
                    z = read_layer(query, W1, S1, T1, A_rows, D_rows, pairs, key, below, DK, DA, MOMENTUM, DT)
                    hidden, z_slope, z_curve = activate(z, NAME)
                y = read_layer(hidden, W2, S2, T2, A_rows, D_rows, pairs, a, delta, DA, DV, MOMENTUM, DT)
                if NORM:
                    y, y_inverse = standardise(y, None, eps, DV)
                    y = scale[None, :] * y + shift[None, :]
                if RESIDUAL:
                    y += query.to(tl.float32)
                store_rows(o, row, y, live, DV)
        if DEPTH == 2:
            W1, S1 = write_layer(W1, S1, T1, A_end, D_end, m_last, end_W, end_S, key, below, DK, DA, MOMENTUM, DT)
        W2, S2 = write_layer(W2, S2, T2, A_end, D_end, m_last, end_W, end_S, a, delta, DA, DV, MOMENTUM, DT)
    if end is not None:
        there = end + p * (2 * NW if MOMENTUM else NW)
        store_layers(there, W1, W2, DEPTH, DK, DA, DV)
        if MOMENTUM:
            store_layers(there + NW, S1, S2, DEPTH, DK, DA, DV)
