"""The CUDA kernels of flash-linear-attention behind `linear_attention(implementation="fla")`, only by explicit choice.

Axis legend
    B batch   T tokens   Hq query heads   H key/value heads   n writes per token   K key width   V value width
    S sequences of a packed batch

They compute in bfloat16 with a float32 state and know neither masks nor query groups: absent tokens arrive as zeros,
keys and values are repeated per query head, and documents become `cu_seqlens`.
"""

import importlib.util

import torch
from torch import Tensor


CHUNK = 64  # tokens, fixed in the kernels
MAX_WIDTH = 256  # of keys, in shared memory


def check_kernels(q: Tensor, chunk_size: int) -> None:
    """
    Refuse what the kernels cannot do, all reasons at once.

    Raises:
        ImportError: flash-linear-attention is not installed.
        ValueError: tensors that are not on CUDA or not half precision, another chunk size, wide keys.
    """
    installed = importlib.util.find_spec("fla") is not None
    reasons = [] if installed else ["the package flash-linear-attention is not installed"]
    if not q.is_cuda:
        reasons.append(f"its kernels need CUDA tensors, q is on {q.device}")
    if q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"its kernels need bfloat16 or float16, q is {q.dtype}")
    if chunk_size != CHUNK:
        reasons.append(f"chunk_size={chunk_size}: is fixed at {CHUNK} tokens")
    if q.shape[-1] > MAX_WIDTH:
        reasons.append(f"keys of {q.shape[-1]} features, at most {MAX_WIDTH}")
    if reasons:
        raise (ValueError if installed else ImportError)(f"implementation='fla': {'; '.join(reasons)}")


def run_kernels(erases, q, k, v, beta, alpha, restart, state, dtype):
    """q `[B, T, Hq, K]`, k `[B, T, H, n, K]`, v `[B, T, H, n, V]`, beta `[B, T, H, n]`, alpha `[B, T, H]`, restart
    `[B, T]` bool, state `[B, H, K, V]` -> o `[B, T, Hq, V]`, state, as `linear_attention` prepares them."""
    B, T, H, n, _ = k.shape
    G = q.shape[2] // H
    if not erases:  # v is all that the strength acts on
        v, beta = v if beta is None else beta[..., None] * v, None
    k, v, beta, alpha = (x if x is None or G == 1 else x.repeat_interleave(G, 2) for x in (k, v, beta, alpha))
    state = state if state is None or G == 1 else state.repeat_interleave(G, 1)
    # [B, T, H, n, ...] -> [B, T n, H, ...]
    k, v, beta = (x if x is None else x.transpose(2, 3).flatten(1, 2).to(dtype) for x in (k, v, beta))
    gate = None if alpha is None else alpha.float().log()
    last, lengths = slice(None), None
    if restart is not None:
        begins = restart.clone()
        begins[:, 0] = True
        last = begins.sum(1).cumsum(0) - 1
        lengths = torch.cat([begins.flatten().nonzero().flatten(), last.new_full((1,), B * T)])
        q, k, v, beta, gate = (x if x is None else x.flatten(0, 1)[None] for x in (q, k, v, beta, gate))
        if state is not None:  # of each row's first document; the others start at 0
            first = torch.cat([last.new_zeros(1), last[:-1] + 1])
            state = state.new_zeros(len(lengths) - 1, *state.shape[1:]).index_copy(0, first, state)
    options = {"scale": 1.0, "initial_state": state, "output_final_state": True, "cu_seqlens": lengths}
    o, state = _kernel(erases, n, q.to(dtype), k, v, beta, gate, options)
    return o.reshape(B, T, *o.shape[2:]), state[last][:, ::G]


def _kernel(erases, n, q, k, v, beta, gate, options):
    if not erases and gate is None:
        from fla.ops.linear_attn import chunk_linear_attn

        return chunk_linear_attn(q, k, v, normalize=False, **options)
    if not erases:
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla(q, k, v, g=gate, **options)
    if n > 1:
        from fla.ops.gated_delta_product import chunk_gated_delta_product

        return chunk_gated_delta_product(q, k, v, gate, beta, num_householder=n, **options)
    if gate is None:
        from fla.ops.delta_rule import chunk_delta_rule

        return chunk_delta_rule(q, k, v, beta, **options)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, gate, beta, **options)
