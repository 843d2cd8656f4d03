"""Tiny TNT models that are hard to please: weights with a standard deviation of 0.1, a window of 4, chunks of 2, 4 and
8, resets every 16 tokens, so that 40 tokens cross every boundary several times."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tnt_hf import TNTConfig, TNTForCausalLM


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 4,
    "global_chunk_size": 8,
    "local_chunk_sizes": [2, 4],
    "local_reset_interval": 16,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Every variant and mode that takes another path through the code.
MODES = {
    "default": {},
    "window and full attention": {"layer_types": ["sliding_attention", "full_attention"]},
    "mal": {"variant": "mal"},
    "lmm": {"variant": "lmm"},
    "shared projections": {"memory_projections": "shared", "qk_norm": True, "memory_feature_map": "identity"},
    "quadratic keys": {"memory_feature_map": "quadratic", "memory_depth": 1},
    "product": {"memory_gate": "product"},
    "published": {"memory_gate": "published"},
    "mix": {"memory_gate": "mix"},
    "momentum and forgetting": {
        "memory_momentum": True,
        "memory_decay": True,
        "memory_layernorm": True,
        "memory_residual": True,
        "memory_depth": 1,
        "memory_grad_bound": 0.5,
    },
    "Eq. 7 as printed": {"qk_projection": "chunk", "qk_projection_norm": False},
    "two reset intervals": {"local_reset_interval": [None, 16], "memory_lr_scaling": "train_chunk"},
    "Titans": {"global_chunk_size": 4, "global_read": "current", "local_chunk_sizes": [], "memory_momentum": True},
    "stage 2": {"local_chunk_sizes": [1, 1]},
    "one memory layer": {"memory_layers": [1], "attention_output_gate": True},
    "other heads": {"memory_num_heads": 1, "memory_head_dim": 16, "memory_expansion": 2},
    "window of 1": {"sliding_window": 1},
    "no convolution": {"memory_conv_kernel": 0},
    "persistent tokens": {"num_persistent_tokens": 3},
    "eager": {"attn_implementation": "eager", "num_persistent_tokens": 1},
}
# Together they take most paths; where a test of all modes takes long, the others wait for `make test-long`.
FEW = ("default", "window and full attention", "lmm", "momentum and forgetting", "two reset intervals", "Titans")


def later(*cases) -> list:
    """Cases of a test that wait for `make test-long`, as `pytest.mark.parametrize` takes them."""
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


def at_once(cases: dict, first) -> list:
    """All cases by their names, of which those in `first` do not wait."""
    return [pytest.param(x, id=name, marks=[pytest.mark.long] * (name not in first)) for name, x in cases.items()]


few_modes = pytest.mark.parametrize("changes", at_once(MODES, FEW))


def tiny_config(**changes) -> TNTConfig:
    return TNTConfig(**{**TINY, **changes})


def tiny_model(dtype: torch.dtype = torch.float64, **changes) -> TNTForCausalLM:
    torch.manual_seed(0)
    return TNTForCausalLM(tiny_config(**changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random token ids without the padding id 0."""
    return torch.randint(1, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths `[n]`, padded on the left to the longest: (input_ids, attention_mask)."""
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_zeros(length - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(length) >= length - len(row) for row in rows]).long()
    return ids, mask


def undigested(session: Path) -> dict[str, str]:
    """What the header of a saved session says, as earlier releases wrote it: nothing to tell damage by."""
    with safe_open(session, framework="pt") as file:
        return {name: said for name, said in file.metadata().items() if name != "sha256"}
