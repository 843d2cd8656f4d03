"""What a model is made of. Its configuration must go on saying so, or it would be saved as another model.

Chunk sizes, reset intervals, inner rates and the kind of kernels may change while a model lives, as they are read at
every call; windows by `set_sliding_window`. Travels with every pushed checkpoint.
"""

import copy
from typing import Any

import torch

from .configuration_tnt import TNTConfig


# Fields that modules and weights are made by. Not those that the library's own methods change, as when embeddings are
# resized, nor what only training reads.
FROZEN = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm",
    "attention_output_gate", "num_persistent_tokens", "variant", "memory_layers", "qk_projection_norm",
    "memory_num_heads", "memory_head_dim", "memory_projections", "memory_conv_kernel", "memory_value_norm",
    "memory_depth", "memory_expansion", "memory_activation", "memory_residual", "memory_layernorm", "memory_gate",
    "memory_momentum", "memory_decay", "memory_rule", "omega_window", "memory_feature_map",
)  # fmt: skip


def made_of(config: TNTConfig) -> list[Any]:
    """For `check_made_of`: the values of `FROZEN`, whether there is a global memory, and the number of local ones."""
    return copy.deepcopy(_now(config))


def check_made_of(config: TNTConfig, made: list[Any]) -> None:
    """
    Refuse a configuration that describes another model than the one it belongs to.

    Args:
        made: `made_of` the configuration when the model was made.

    Raises:
        ValueError: a field has changed that the model was made by.
    """
    sizes, count = vars(config)["local_chunk_sizes"], made[-1]
    if len(sizes) != count:
        raise ValueError(f"local_chunk_sizes={sizes!r}: needs one entry for each of {count} local memories.")
    if torch.compiler.is_compiling() or (now := _now(config)) == made:
        return
    has_global = made[-2]
    if now[-2] != has_global:
        size, memory = config.global_chunk_size, "a" if has_global else "no"
        raise ValueError(f"TNTConfig.global_chunk_size={size!r}: the model was made with {memory} global memory.")
    name, new, old = next(x for x in zip(FROZEN, now, made) if x[1] != x[2])
    raise ValueError(
        f"TNTConfig.{name}={new!r}: the model was made with {old!r}. Set it back; from_pretrained(folder, {name}=...)"
        " loads a saved model with another value."
    )


def _now(config: TNTConfig) -> list[Any]:
    fields = vars(config)  # its attributes are slow to read, and this is asked for with every token
    values = [fields[name] for name in FROZEN]
    return [*values, fields["global_chunk_size"] is not None, len(fields["local_chunk_sizes"])]
