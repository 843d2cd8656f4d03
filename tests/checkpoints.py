"""Tiny source checkpoints of every family, hard to please: weights of a standard deviation of 0.1 and more, biases and
norms that matter, lengths that fit nothing."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


logging.disable_progress_bar()

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
# Name -> (model_type, fields). Every path through a family's row, and every kind of RoPE.
CASES = {
    "llama": ("llama", {}),
    "llama, tied, custom head_dim": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama, all biases, no GQA": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, dynamic rope": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            "max_position_embeddings": 16,
        },
    ),
    "llama, longrope": ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 32}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, window in some layers": ("qwen2", {"tie_word_embeddings": True, **QWEN_WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied, biases, window in some layers": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, **QWEN_WINDOW},
    ),
}
FUSED = {
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": 5, "num_key_value_heads": 4}),
    # At the top level, where the library leaves it when it saves.
    "phi3, half of the channels rotated": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3, all of the channels rotated": ("phi3", {"partial_rotary_factor": 1.0}),
}


def source_model(case: str, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A random model of a case; no tensor is at a start value at which losing it would go unnoticed."""
    model_type, fields = (CASES | FUSED)[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SIZES, **fields, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def save_source(folder: Path, case: str = "llama", dtype: torch.dtype = torch.float32, **options) -> Path:
    """Save a case into `folder`, in shards of at most `shards` bytes; other options change the configuration.

    The reference for logits is this folder loaded again: `.to(bfloat16)` on a model in memory rounds its RoPE as well.
    """
    shards = options.pop("shards", "5GB")
    source_model(case, dtype, **options).save_pretrained(folder, max_shard_size=shards)
    return folder


def reload(folder: Path, **options) -> PreTrainedModel:
    """The model in a folder, with nothing missing and nothing too much."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(loading.values()), loading
    return model.eval()
