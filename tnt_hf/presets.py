"""Named configurations: the fields of `TNTConfig` in which TNT and the papers' baselines differ from its defaults.

A test keeps them equal to the one-liners in the README.
"""

from typing import Any


PRESETS: dict[str, dict[str, Any]] = {
    "tnt": {},
    "titans": {
        "global_chunk_size": 16,
        "global_read": "current",
        "local_chunk_sizes": [],
        "memory_momentum": True,
        "memory_decay": True,
    },
    "ttt": {
        "global_chunk_size": 16,
        "global_read": "current",
        "local_chunk_sizes": [],
        "memory_layernorm": True,
        "memory_residual": True,
    },
    "sliding-window-only": {"memory_layers": []},
    "transformer": {"memory_layers": [], "sliding_window": None},
    "gated-transformer": {"memory_layers": [], "sliding_window": None, "attention_output_gate": True},
}
