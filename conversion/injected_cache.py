"""Memory state in the model's own cache: the library's `DynamicCache`, whose layers gain it beside keys and values.

Axis legend
    B batch   H key/value heads   K, V key and value width of a head

The state travels with keys and values through everything a cache does: beams, `num_return_sequences`, selecting rows,
`reset`, several turns. It cannot be cropped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tnt_hf.cache_layers_tnt import TNTFullLayer, TNTSlidingLayer
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.cache_tnt import INTERRUPTED


class _Counting:
    """Counts what a cache of the library does to its layers, one after the other: `done`, or `None` in the middle."""

    done: int | None = 0

    def _do(self, operation: Callable, *args) -> None:
        before, self.done = self.done or 0, None
        operation(*args)
        self.done = before + 1

    def reset(self) -> None:
        self._do(super().reset)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._do(super().reorder_cache, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._do(super().batch_repeat_interleave, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._do(super().batch_select_indices, indices)


class InjectedFullLayer(_Counting, TNTFullLayer):
    """Keys and values of full attention, and a memory's state."""


class InjectedSlidingLayer(_Counting, TNTSlidingLayer):
    """Keys and values of a sliding window, and a memory's state."""


class CountedLayer(_Counting, DynamicLayer):
    """Keys and values of full attention without a memory."""


class CountedSlidingLayer(_Counting, DynamicSlidingWindowLayer):
    """Keys and values of a sliding window without a memory."""


# what a layer of an empty cache may be that is to hold a memory
KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    CountedLayer,
    CountedSlidingLayer,
    InjectedFullLayer,
    InjectedSlidingLayer,
)


def make_stateful(cache: Any, slots: dict[int, int], count: int, settings: dict[str, Any]) -> None:
    """
    Give the layers of an empty cache room for memory, or check that a used one has it.

    Args:
        cache: what came as the model's cache.
        slots: number of state tensors by layer index. count: layers of the model.
        settings: of the injection and of its host; a cache remembers those it was filled with.

    Raises:
        ValueError: static, quantized, offloaded, encoder-decoder and unknown caches; one that holds tokens but no
            memory of them; one of another model or injection.
    """
    hint = "pass an empty DynamicCache(config=model.config), or none"
    if not isinstance(cache, Cache):
        raise ValueError(f"{CACHE_NAME}: {type(cache).__name__} is not a transformers Cache; {hint}.")
    settings = {**settings, "slots": slots}
    filled_with = getattr(cache, "tnt_injection", None)
    if filled_with == settings:
        return
    if filled_with is not None and cache.get_seq_length():
        names = [name for name in settings if filled_with.get(name) != settings[name]]
        raise ValueError(
            f"{CACHE_NAME} was filled by another model or injection: {names[0]}={filled_with.get(names[0])!r},"
            f" the model has {settings[names[0]]!r}."
        )
    if not isinstance(cache, DynamicCache):
        raise ValueError(f"{CACHE_NAME}: {type(cache).__name__} keeps no memory state; {hint}.")
    if cache.offloading:
        raise ValueError(f"{CACHE_NAME}: offloading=True does not move the memory's state; {hint}.")
    if cache.get_seq_length():
        raise ValueError(
            f"{CACHE_NAME} holds {cache.get_seq_length()} tokens, but no memory of them: it was filled before"
            f" inject(), or by prefix tuning; {hint}."
        )
    layers = list(cache.layers)
    if cache.layer_class_to_replicate is not None:
        layers += [cache.layer_class_to_replicate() for _ in range(count - len(layers))]
    if len(layers) != count:
        raise ValueError(f"{CACHE_NAME} has {len(layers)} layers, the model has {count}; {hint}.")
    for i, number in slots.items():
        if type(layers[i]) not in KNOWN:
            raise ValueError(f"{CACHE_NAME}: layer {i} is a {type(layers[i]).__name__}; {hint}.")
        if layers[i].is_sliding:
            layers[i] = InjectedSlidingLayer(layers[i].sliding_window, number)
        else:
            layers[i] = InjectedFullLayer(number)
    for i, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[i] = CountedLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            layers[i] = CountedSlidingLayer(layer.sliding_window)
    cache.layers, cache.memory_layers, cache.tnt_injection = layers, sorted(slots), settings


def note_tokens(cache: Cache, count: int) -> None:
    """
    Keep the books: `count` tokens are about to be added to keys, values and memory.

    Raises:
        ValueError: keys and values have gained or lost tokens of which the memory knows nothing, or layers hold
            different ones since an operation on the cache broke off.
    """
    if torch.compiler.is_compiling():
        cache.tokens_remembered = None  # compiled code does not count
        return
    past, known = cache.get_seq_length(), getattr(cache, "tokens_remembered", 0)
    if past and known is not None and past != known:
        raise ValueError(f"{CACHE_NAME} holds {past} tokens, its memory has seen {known}: it was changed elsewhere.")
    layers = [layer for layer in cache.layers if isinstance(layer, _Counting)]
    if {layer.done for layer in layers} != {layers[0].done} - {None}:
        if any(layer.get_seq_length() for layer in layers) or any(
            cache.layers[i].has_previous_state[0] for i in cache.memory_layers
        ):
            raise ValueError(f"{CACHE_NAME} {INTERRUPTED}: go on with another cache.")
        for layer in layers:
            layer.done = 0
    cache.tokens_remembered = past + count


def read_state(cache: Cache, layer_idx: int) -> Tensor | None:
    """State `[B, H, K, V]` of a layer with two slots, or `None` before its first token."""
    layer = cache.layers[layer_idx]
    if not layer.has_previous_state[0]:
        return None
    state = layer.recurrent_states[0]
    if not torch.is_grad_enabled():
        return state
    # Autograd keeps no tensor of inference mode; which is one, a graph cannot ask.
    return state.clone() if torch.compiler.is_compiling() or state.is_inference() else state


def write_state(cache: Cache, layer_idx: int, state: Tensor, count: int | Tensor) -> None:
    """Keep `state` `[B, H, K, V]` as it is, a new tensor for each call, which autograd can follow, and that `count`
    (`[B]`) more tokens were read."""
    layer = cache.layers[layer_idx]
    read = layer.recurrent_states[1] if layer.has_previous_state[0] else state.new_zeros(len(state), dtype=torch.long)
    for slot, x in enumerate((state, read + count)):
        if not layer.is_recurrent_states_initialized[slot]:
            layer.lazy_initialization(recurrent_states=x, state_idx=slot)
        layer.recurrent_states[slot] = x
        layer.has_previous_state[slot] = True
