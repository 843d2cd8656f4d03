"""What a TNT configuration costs: the shapes and bytes of its memory state, and FLOPs per token. Pure arithmetic.

Axis legend
    H memory heads   D memory head width   K key width, D or wider by the feature map   n memory query rows per token
    P weights of one head's memory network
This file travels with every pushed checkpoint.
"""

import math

from .configuration_tnt import TNTConfig


BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def memory_state_shapes(config: TNTConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape, without the batch axis, of one memory layer's state tensors in the order of the cache's slots.

    First, in a place of its own, the convolution's last inputs. Then per memory W_t, W_xi unless its chunk size is 1
    (they are one), and momentum S_t; one M per distinct reset interval; the memory time.
    """
    H, D, K = config.memory_num_heads, config.memory_head_dim, config.memory_key_width
    shapes: list[tuple[str, tuple[int, ...]]] = []
    if config.memory_conv_kernel > 1:
        channels = config.num_attention_heads * config.head_dim + 2 * H * D
        shapes.append(("conv", (channels, config.memory_conv_kernel - 1)))
    for i, spec in enumerate(config.memory_specs):
        kinds = ["weights", *["chunk_weights"] * (spec.chunk_size > 1), *["momentum"] * config.memory_momentum]
        shapes += [
            (f"{i}.{kind}.{n}", (H, *shape)) for kind in kinds for n, shape in enumerate(config.memory_weight_shapes)
        ]
    shapes += [(f"projection.{interval}", (H, K, K)) for interval in config.memory_projection_intervals]
    return [*shapes, ("time", ())]


def memory_state_bytes(config: TNTConfig, dtype: str = "float32") -> int:
    """Bytes of memory state per sequence, all layers, at any context length; without the window's keys and values.

    Fast weights, momentum and M are float32 (float64 for `dtype="float64"`), the memory time is int64, and the
    convolution's inputs have the model's `dtype`.

    Raises:
        ValueError: a dtype that models do not have.
    """
    itemsize, total = _itemsize(dtype), 0
    for name, shape in memory_state_shapes(config):
        total += math.prod(shape) * (8 if name == "time" else itemsize if name == "conv" else max(itemsize, 4))
    return total * len(config.memory_layer_indices)


def key_value_bytes(config: TNTConfig, context: int, dtype: str = "float32") -> list[int]:
    """Bytes of keys and values per sequence, of each layer, at a context of `context` tokens. Of a window the cache
    keeps one token less: the one being decoded brings its own.

    Raises:
        ValueError: a dtype that models do not have.
    """
    per_token = 2 * config.num_key_value_heads * config.head_dim * _itemsize(dtype)
    tokens = [min(context, config.sliding_window - 1) if "sliding" in kind else context for kind in config.layer_types]
    without = config.memory_layer_indices if config.variant == "lmm" else []
    return [0 if index in without else per_token * kept for index, kept in enumerate(tokens)]


def _itemsize(dtype: str) -> int:
    if (name := str(dtype).removeprefix("torch.")) not in BYTES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(BYTES)}")
    return BYTES[name]


def flops_per_token(config: TNTConfig, context: int) -> dict[str, int]:
    """FLOPs (two per multiply-add) of one decoded token at a context of `context` tokens.

    base: 2 per weight of every projection, MLP and the LM head. attention: 4 Hq head_dim per visible key. memory, per
    layer: 2 per weight of its projections, gates and convolution taps; per memory, with P_1 the first layer's weights

        write  H (2 P forward + 2 (P - P_1) backward + 2 P update), and 2 H P more with momentum
        read   2 n P
        Q-K    2 H K^2 to add k^T k / |k|^2 to M and 2 n K^2 to apply it, once per M

    Returns:
        `{"base", "attention", "memory", "total"}`.

    Raises:
        ValueError: `context` is not a number of tokens.
    """
    if isinstance(context, bool) or not isinstance(context, int) or context < 0:
        raise ValueError(f"context={context!r}: must be a number of tokens")
    h, H, D, K = config.hidden_size, config.memory_num_heads, config.memory_head_dim, config.memory_key_width
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    memory_layers, n = set(config.memory_layer_indices), q // config.memory_head_dim
    base, attention, memory = 2 * h * config.vocab_size, 0, 0
    for i, kind in enumerate(config.layer_types):
        base += 6 * h * config.intermediate_size
        if not (config.variant == "lmm" and i in memory_layers):
            base += 2 * (h * (q + 2 * kv) + q * h + config.attention_output_gate * h * q)
            keys = min(context, config.sliding_window) if "sliding" in kind else context
            attention += 4 * q * (keys + config.num_persistent_tokens)
    if memory_layers:
        sizes = [a * b for a, b in config.memory_weight_shapes]
        P = sum(sizes)
        one = H * (6 * P - 2 * sizes[0] + 2 * P * config.memory_momentum) + 2 * n * P
        one += 2 * h * H * (1 + config.memory_momentum + config.memory_decay)
        memory = one * len(config.memory_specs)
        memory += len(config.memory_projection_intervals) * 2 * (H + n) * K * K
        memory += 2 * h * (q + 2 * H * D) if config.memory_projections == "own" else 0
        memory += 2 * config.memory_conv_kernel * (q + 2 * H * D) if config.memory_conv_kernel > 1 else 0
        memory += {"add": 2 * h * config.num_attention_heads, "product": 2 * q * q}.get(config.memory_gate, 0)
        memory += 2 * q * h if config.variant != "mag" else 0
        memory *= len(memory_layers)
    return {"base": base, "attention": attention, "memory": memory, "total": base + attention + memory}


__all__ = ["flops_per_token", "memory_state_bytes", "memory_state_shapes"]
