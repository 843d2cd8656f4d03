"""What a context costs: bytes of the cache that is really there, and tokens per second of prefill and decoding.

Axis legend
    B batch (1 here)   T tokens of the context
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.recipes.memory_statistics import few_logits


REPEATS = 3  # times a context is read, after one to warm up
DECODED = 8  # its last tokens, which are decoded one by one


def cache_bytes(cache: Any) -> tuple[int, int]:
    """
    Bytes of the recurrent state and of keys and values, from the tensors that a cache of the library holds.

    Raises:
        ValueError: a cache without the library's layers.
    """
    if cache is None:
        return 0, 0
    if not hasattr(cache, "layers"):
        raise ValueError(f"{CACHE_NAME}: a {type(cache).__name__} has no layers whose tensors could be measured")
    state = [
        tensor
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for tensor in getattr(layer, name, {}).values()
        if tensor is not None
    ]
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return _bytes(state), _bytes([tensor for tensor in kept if tensor is not None])


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def cost_at(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """
    One entry of the section `cost` of evaluation.json: all but the last tokens are read at once, the others are given
    one by one, and then the cache, which holds all of them, is measured. Speeds are the median over the repeats and
    [lowest, highest] of them; a model without cache has none of decoding.

    Args:
        ids: `[1, T]` int64 on the model's device.
    """
    last_only = few_logits(model)
    decoded = min(DECODED, ids.shape[1] - 1)
    prefix = ids[:, : ids.shape[1] - decoded]
    others = [ids[:, t : t + 1] for t in range(prefix.shape[1], ids.shape[1])]
    prefill, decode, cache = [], [], None
    for repeat in range(REPEATS + 1):
        start = _clock(ids.device)
        cache = getattr(model(input_ids=prefix, use_cache=True, **last_only), CACHE_NAME)
        read = _clock(ids.device)
        for token in others if cache is not None else ():
            cache = getattr(model(input_ids=token, use_cache=True, **{CACHE_NAME: cache}), CACHE_NAME)
        end = _clock(ids.device)
        if repeat:  # the first one warms up
            prefill.append(prefix.shape[1] / (read - start))
            decode += [decoded / (end - read)] if cache is not None and decoded else []
    state, kept = cache_bytes(cache)
    entry = {"context": ids.shape[1], "state_bytes": state, "kv_bytes": kept, **_speed("prefill", prefill)}
    return entry if cache is None or not decoded else {**entry, **_speed("decode", decode)}


def _speed(name: str, values: list[float]) -> dict[str, Any]:
    key = f"{name}_tokens_per_second"
    return {key: statistics.median(values), f"{key}_range": [min(values), max(values)]}


def cost_rows(model: nn.Module, contexts: list[int], vocab_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """The section `cost` of evaluation.json: one sequence of random tokens at every context length."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    for context in contexts:
        ids = torch.randint(vocab_size, (1, context), generator=generator)
        yield cost_at(model, ids.to(device))
