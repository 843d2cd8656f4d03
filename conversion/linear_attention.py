"""LiZA's linear operators: delta rule, gated delta rule, delta product and plain linear attention, token by token and
in chunks.

Axis legend
    B batch   T tokens   Hq query heads   H key/value heads   G = Hq / H queries of a head   K key width
    V value width   n writes per token (1, but for the delta product)   N chunks   C tokens per chunk
    M = C n writes per chunk

Row vectors, state S `[K, V]`. A token first forgets, then writes n times, then is read:

    S <- alpha_t S                                               (gated rules)
    S <- S + beta_j k_j^T (v_j - k_j S),  j = 1..n               (delta rules: the old value of k_j is replaced)
    S <- S + beta_t k_t^T v_t                                    ("linear": it is added to)
    o_t = scale q_t S

An absent token is one with q = k = v = beta = 0 and alpha = 1: it passes the state on bit for bit. The result does not
depend on where chunks begin, so padding, packing and splits need no bookkeeping of positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tnt_hf.grid_tnt import document_starts
from tnt_hf.network_tnt import smooth_unit_vectors
from tnt_hf.precision_tnt import full_precision


# rule -> does a write first erase what its key reads, and is `decay` required, possible or impossible
RULES = {
    "delta_rule": (True, "impossible"),
    "gated_delta_rule": (True, "required"),
    "delta_product": (True, "possible"),
    "linear": (False, "possible"),
}
IMPLEMENTATIONS = ("chunk", "recurrent", "fla")
FEATURE_MAPS = {
    "silu-l2": lambda x: smooth_unit_vectors(F.silu(x), 1e-6),  # next to 0, too, a gradient stays in range
    "elu+1": lambda x: F.elu(x) + 1,
    "softmax": lambda x: x.softmax(-1),
    "identity": lambda x: x,
}


def feature_map(x: Tensor, name: str) -> Tensor:
    """
    Map keys or queries before they enter a linear operator.

    Args:
        x: `[..., K]`; computed in float32 at least, returned in the dtype of `x`.
        name: `"silu-l2"` (SiLU, then unit length), `"elu+1"`, `"softmax"` (over the K features) or `"identity"`.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(name, str) or name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r}: must be one of {sorted(FEATURE_MAPS)}")
    return FEATURE_MAPS[name](x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: str = "delta_rule",
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    chunk_size: int = 64,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    implementation: str = "chunk",
    check_decay: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """
    One linear operator over a batch of sequences. `"chunk"` and `"recurrent"` are the same function up to rounding,
    with all gradients, including those through the states.

    Args:
        q: `[B, T, Hq, K]`; Hq is a multiple of H, query heads of one key head are adjacent. Nothing is normalised
            here; see [`feature_map`].
        k, v: `[B, T, H, K]` and `[B, T, H, V]`; `"delta_product"`: `[B, T, H, n, K]` and `[B, T, H, n, V]`.
        rule: `"delta_rule"` (S += beta k^T (v - k S)), `"gated_delta_rule"` (Gated DeltaNet: S is multiplied by decay
            first), `"delta_product"` (arXiv 2502.10297: n delta steps per token; gated if given a `decay`) or
            `"linear"` (S = decay S + beta k^T v).
        beta: `[B, T, H]`, `"delta_product"`: `[B, T, H, n]`, the final writing strengths (0..2 with unit keys is a
            contraction; not checked). Required except for `"linear"`, where `None` is 1.
        decay: `[B, T, H]`, the final alpha in (0, 1]. Required by `"gated_delta_rule"`, not allowed with
            `"delta_rule"`; elsewhere `None` is 1.
        chunk_size: tokens per chunk of `"chunk"`; affects cost, not results. A single token takes the recurrence.
        mask: `[B, T]` bool, `False` = absent: the token changes nothing, its output is 0 and its inputs, even NaN,
            are ignored.
        segment_ids: `[B, T]` int; a change between present tokens restarts the state at 0.
        initial_state: `[B, H, K, V]`, from an earlier call: a sequence split anywhere gives the same as the whole.
        scale: factor on the output.
        implementation: `"chunk"`; `"recurrent"`, the published recurrence token by token; or `"fla"`, the CUDA
            kernels of flash-linear-attention (see `conversion/linear_kernels.py`).
        check_decay: whether to check the values of `decay`, which means waiting for a GPU.

    Returns:
        o `[B, T, Hq, V]` in q's dtype and, with `output_final_state`, the state `[B, H, K, V]`, else `None`.
        Arithmetic and state are float32 at least, float64 for float64 inputs.

    Raises:
        ValueError: a shape, dtype, name, value or combination that does not fit; names the argument. The values of
            `decay` are not checked under `torch.compile`, where that would break the graph.
        ImportError: `implementation="fla"` without that package.
    """
    _check(q, k, v, rule, beta, decay, chunk_size, mask, segment_ids, initial_state, scale, implementation)
    dtype = torch.float32
    for x in (q, k, v, beta, decay, initial_state):
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    if implementation == "fla":
        from .linear_kernels import check_kernels

        check_kernels(q, chunk_size)

    def prepare(x, absent=0.0):
        if x is None or mask is None:
            return x if x is None else x.to(dtype)
        return x.to(dtype).masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), absent)

    erases = RULES[rule][0]
    if rule != "delta_product":  # one write per token
        k, v, beta = k.unsqueeze(3), v.unsqueeze(3), None if beta is None else beta.unsqueeze(3)
    alpha = prepare(decay, absent=1.0)
    look = check_decay and alpha is not None and not torch.compiler.is_compiling()
    if look and not ((alpha > 0) & (alpha <= 1)).all():
        raise ValueError(f"decay={_outside(alpha)!r}: every value must be in (0, 1]")
    out_dtype, restart = q.dtype, None if segment_ids is None else document_starts(segment_ids, mask)
    state = None if initial_state is None else initial_state.to(dtype)
    with full_precision(q.device):
        q, k, v, beta = prepare(q) * scale, prepare(k), prepare(v), prepare(beta)
        if implementation == "fla":
            from .linear_kernels import run_kernels

            o, state = run_kernels(erases, q, k, v, beta, alpha, restart, state, out_dtype)
        elif implementation == "recurrent" or q.shape[1] == 1:
            o, state = _recurrent(erases, q, k, v, beta, alpha, restart, state)
        else:
            o, state = _chunked(erases, q, k, v, beta, alpha, restart, state, chunk_size)
    return o.to(out_dtype), state if output_final_state else None


# ------------------------------------------------------------------------------------ token by token, as it is printed


def _recurrent(erases, q, k, v, beta, alpha, restart, S):
    """q `[B, T, Hq, K]`, k `[B, T, H, n, K]`, v `[B, T, H, n, V]`, beta `[B, T, H, n]` -> o `[B, T, Hq, V]`, S."""
    B, T, H, n, K = k.shape
    S = k.new_zeros(B, H, K, v.shape[-1]) if S is None else S
    q = q.unflatten(2, (H, -1))
    outputs = []
    for t in range(T):
        if restart is not None:
            S = torch.where(restart[:, t, None, None, None], 0.0, S)
        if alpha is not None:
            S = alpha[:, t, :, None, None] * S
        for j in range(n):
            key, new = k[:, t, :, j, None, :], v[:, t, :, j, None, :]
            if erases:
                new = new - key @ S
            if beta is not None:
                new = beta[:, t, :, j, None, None] * new
            S = S + key.mT @ new
        outputs.append(q[:, t] @ S)
    return torch.stack(outputs, 1).flatten(2, 3), S


# -------------------------------------------------------------------------------------------------- in chunks, exactly


def decay_products(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """alpha `[..., C]` -> its products from the chunk's start through t `[..., C]`, and over s < m <= t
    `[..., C, C]`, 0 for s > t. Plain products: no quotient or logarithm, which tiny alphas would ruin."""
    t = torch.arange(alpha.shape[-1], device=alpha.device)
    chain = torch.where(t[:, None] >= t, alpha[..., :, None], 1.0).cumprod(-2)  # (t, s): over s <= m <= t
    return chain[..., 0], F.pad(chain[..., 1:], (0, 1), value=1.0).tril()


def _chunked(erases, q, k, v, beta, alpha, restart, S, chunk_size):
    """With D_{t,s} the decay from s to t, d_t that from the chunk's start, and the state S_0 there, the writes
    u_i = beta_i (v_i - k_i S) of a chunk solve a triangular system (the UT transform):

        (I + tril(beta K K^T . D, -1)) U = beta V - (beta d K) S_0
        O = d Q S_0 + tril(Q K^T . D) U        S_C = d_C S_0 + (D_C K)^T U

    All but the products with S_0 is done for all chunks at once. Arguments and results of `_recurrent`."""
    B, T, H, n, K = k.shape
    C = min(chunk_size, T)
    S = k.new_zeros(B, H, K, v.shape[-1]) if S is None else S

    def chunks(x, fill=0.0):  # [B, T, H, ...] -> [B, H, N, C, ...]
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -T % C), value=fill)
        return x.unflatten(1, (-1, C)).movedim(3, 1)

    q, k, v = chunks(q.unflatten(2, (H, -1))), chunks(k).flatten(3, 4), chunks(v).flatten(3, 4)
    d, D = None, k.new_ones(C, C).tril()
    if alpha is not None:
        d, D = decay_products(chunks(alpha, fill=1.0))
    if restart is not None:
        document = chunks(restart[:, :, None]).cumsum(-1)  # within the chunk; 0: that of S_0
        D = D * (document[..., :, None] == document[..., None, :])
        d = (document == 0).to(k.dtype) * (1.0 if d is None else d)

    def over_writes(x):  # [..., C] -> [..., M]
        return x if n == 1 else x.repeat_interleave(n, -1)

    def decayed(scores, rows):  # [..., C rows, C n] * D
        scores = scores.unflatten(-1, (C, n)).unflatten(-3, (C, rows))
        return (scores * D[..., :, None, :, None]).flatten(-2).flatten(-3, -2)

    G = q.shape[-2]
    reads = decayed(q.flatten(3, 4) @ k.mT, G)
    queries = (q if d is None else q * d[..., None, None]).flatten(3, 4)
    k_end = k if d is None else k * over_writes(D[..., -1, :])[..., None]
    keep = None if d is None else d[..., -1, None, None]
    b = None if beta is None else chunks(beta).flatten(3, 4)[..., None]
    U = v if b is None else b * v
    if erases:
        W = b * k if d is None else (b * over_writes(d)[..., None]) * k
        system = b * decayed(k @ k.mT, n)  # its diagonal and what is above are not read
        both = torch.linalg.solve_triangular(system, torch.cat([U, W], -1), upper=False, unitriangular=True)
        U, W = both.split_with_sizes([v.shape[-1], K], -1)

    # unbind, because the backward of an index per chunk would fill a whole tensor of zeros per chunk
    U, k_end = U.unbind(2), k_end.mT.unbind(2)
    W, keep = (None if x is None else x.unbind(2) for x in (W if erases else None, keep))
    starts, writes = [], []
    for j, u in enumerate(U):
        starts.append(S)
        writes.append(u if W is None else u - W[j] @ S)
        S = (S if keep is None else keep[j] * S) + k_end[j] @ writes[j]
    o = queries @ torch.stack(starts, 2) + reads @ torch.stack(writes, 2)
    return o.flatten(2, 3).unflatten(2, (-1, G)).movedim(1, 2)[:, :T].flatten(2, 3), S


# ---------------------------------------------------------------------------------------------------------- validation


def _outside(alpha: Tensor) -> float:
    return alpha[~((alpha > 0) & (alpha <= 1))][0].item()


def _check_tensor(name: str, x, shape: tuple) -> None:
    want = ["*" if size is None else size for size in shape]
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else x
        raise ValueError(f"{name}={got!r}: must be a floating point tensor of shape {want}")
    if x.dim() != len(shape) or any(a not in (None, b) for a, b in zip(shape, x.shape)):
        raise ValueError(f"{name}={list(x.shape)}: must have shape {want}")
    if 0 in x.shape:
        raise ValueError(f"{name}={list(x.shape)}: must not be empty")


def _check(q, k, v, rule, beta, decay, chunk_size, mask, segment_ids, initial_state, scale, implementation) -> None:
    for name, value, allowed in (("rule", rule, tuple(RULES)), ("implementation", implementation, IMPLEMENTATIONS)):
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {allowed}")
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r}: must be a positive number of tokens")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale={scale!r}: must be a finite number")
    writes = (None,) if rule == "delta_product" else ()
    _check_tensor("q", q, (None, None, None, None))
    B, T, Hq, K = q.shape
    _check_tensor("k", k, (B, T, None, *writes, K))
    H, writes = k.shape[2], tuple(k.shape[3:-1])
    _check_tensor("v", v, (B, T, H, *writes, None))
    if Hq % H:
        raise ValueError(f"q={list(q.shape)}: must have a multiple of k's {H} heads, not {Hq}")
    if beta is not None or rule != "linear":
        _check_tensor("beta", beta, (B, T, H, *writes))
    decays = RULES[rule][1]
    if decay is not None or decays == "required":
        _check_tensor("decay", decay, (B, T, H))
    if decay is not None and decays == "impossible":
        raise ValueError(f"decay={list(decay.shape)}: rule={rule!r} does not forget, 'gated_delta_rule' does")
    if initial_state is not None:
        _check_tensor("initial_state", initial_state, (B, H, K, v.shape[-1]))
    for name, x in (("mask", mask), ("segment_ids", segment_ids)):
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != (B, T)):
            got = list(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(f"{name}={got!r}: must be a tensor of shape {[B, T]}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask={mask.dtype}: must be bool, False = absent")
    if segment_ids is not None and (segment_ids.is_floating_point() or segment_ids.dtype == torch.bool):
        raise ValueError(f"segment_ids={segment_ids.dtype}: must be integers")
