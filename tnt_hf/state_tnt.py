"""The memory's state in a layer of any of the library's hybrid caches: its slots, and how they are read and written.

Axis legend
    B batch   H memory heads   D memory head width   K width of the projected keys
    C tokens per chunk   S tokens between resets

State slots of a layer with memory (`recurrent_states[j]`, in this order, see `memory_state_shapes`):

    for each memory, each per network layer [B, H, d_in, d_out]:
        W_t; W_xi, absent when C = 1 (it is W_t then); S_t, absent without momentum
    for each distinct reset interval: M [B, H, K, K]
    memory time [B] int64

and `conv_states[0]` `[B, channels of q + k + v, kernel - 1]`, the convolution's last valid inputs. Everything is per
batch row, so rows may be at different memory times, and nothing grows with the context.

Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from .configuration_tnt import MemorySpec, TNTConfig
from .step_tnt import MemoryState


LAYOUT_FIELDS = (
    "num_hidden_layers", "memory_layers", "global_chunk_size", "local_chunk_sizes", "local_reset_interval",
    "global_read", "qk_projection", "memory_depth", "memory_momentum", "sliding_window", "layer_types",
    "allow_memory_gap",
)  # fmt: skip
LAYOUTS: dict[tuple, "StateLayout"] = {}


class StateLayout(NamedTuple):
    """Which layers have a memory and which state tensors it has, in order."""

    layers: list[int]
    specs: list[MemorySpec]
    intervals: list[int | None]
    depth: int
    momentum: bool
    slots: int

    @classmethod
    def of(cls, config: TNTConfig) -> "StateLayout":
        """
        The layout of a model with `config`, whose fields in tokens may have changed since the last call.

        Raises:
            ValueError: the fields no longer fit each other.
        """
        fields = vars(config)  # its attributes are slow to read, and this is asked for with every token
        key = tuple(tuple(x) if isinstance(x, list) else x for x in [fields[name] for name in LAYOUT_FIELDS])
        if (found := LAYOUTS.get(key)) is None:
            found = cls._made(config)
            if not torch.compiler.is_compiling():
                cls._check(config)
                LAYOUTS[key] = found
        return found

    @staticmethod
    def _check(config: TNTConfig) -> None:
        config.validate_architecture()
        types, layers = config.layer_types, config.memory_layer_indices
        if [i for i, kind in enumerate(types) if "hybrid" in kind] != layers:
            raise ValueError(f"TNTConfig.layer_types={types}: must be 'hybrid...' where the memories are, {layers}.")

    @classmethod
    def _made(cls, config: TNTConfig) -> "StateLayout":
        intervals, slots = config.memory_projection_intervals, config.number_of_conv_states
        found = config.memory_layer_indices, config.memory_specs, intervals, config.memory_depth
        return cls(*found, config.memory_momentum, slots)


class LayerState:
    """What a memory layer reads from and writes to a cache.

    Attributes:
        conv: the convolution's last valid inputs `[B, channels, kernel - 1]` in the model's dtype, or `None`.
        memories: one [`MemoryState`] per memory; `projection` is `None` there, because memories share it.
        projections: `{reset interval: M [B, H, K, K]}`.
        time: `[B]` int64.
    """

    def __init__(
        self, conv: Tensor | None, memories: list[MemoryState], projections: dict[int | None, Tensor], time: Tensor
    ):
        self.conv, self.memories, self.projections, self.time = conv, memories, projections, time

    @classmethod
    def read(cls, cache: Cache, layer_idx: int, layout: StateLayout) -> "LayerState | None":
        """The state of layer `layer_idx`, or `None` before its first token."""
        layer = cache.layers[layer_idx]
        if not layer.has_previous_state[0]:
            return None
        flat, conv = [layer.recurrent_states[j] for j in range(layer.number_of_states)], layer.conv_states[0]
        if torch.is_grad_enabled():
            # The cache is written in place afterwards, which autograd must not see happen to a tensor it saved.
            flat, conv = [x.clone() for x in flat], None if conv is None else conv.clone()
        time, take = flat.pop(), iter(flat)

        def layers() -> list[Tensor]:
            return [next(take) for _ in range(layout.depth)]

        memories = []
        for spec in layout.specs:
            weights = layers()
            start = layers() if spec.chunk_size > 1 else weights
            memories.append(MemoryState(weights, start, layers() if layout.momentum else None, None, time))
        projections = {interval: next(take) for interval in layout.intervals}
        return cls(conv, memories, projections, time)

    def is_writable(self, dtype: torch.dtype) -> bool:
        """Whether the state can be overwritten outside a graph, with operands of `dtype`."""
        if self.memories[0].weights[0].dtype != dtype:
            return False
        tensors = [self.time, *self.projections.values()] + ([] if self.conv is None else [self.conv])
        for memory in self.memories:
            tensors += memory.weights
            tensors += [] if memory.chunk_weights is memory.weights else memory.chunk_weights
            tensors += memory.momentum or []
        in_inference = torch.is_inference_mode_enabled()
        for x in tensors:  # asked for with every token: a generator is slow
            if x.requires_grad or not x.is_contiguous() or (x.is_inference() and not in_inference):
                return False
        return True

    def write(self, cache: Cache, layer_idx: int, layout: StateLayout) -> None:
        """Store the state in layer `layer_idx` of the cache."""
        flat = []
        for spec, memory in zip(layout.specs, self.memories):
            flat += [*memory.weights, *(memory.chunk_weights if spec.chunk_size > 1 else []), *(memory.momentum or [])]
        flat += [self.projections[interval] for interval in layout.intervals]
        store(cache.layers[layer_idx], self.conv, [*flat, self.time])


def store(layer: LinearAttentionCacheLayerMixin, conv: Tensor | None, states: list[Tensor]) -> None:
    """Put a state into a layer's slots."""
    if conv is not None:
        if not layer.is_conv_states_initialized[0]:
            layer.lazy_initialization(conv_states=conv, state_idx=0)
        layer.conv_states[0] = _assign(layer.conv_states[0], conv)
    # Backwards: W_xi may have become what lies in the slot of W_t, which must not be overwritten before.
    for j, state in reversed(list(enumerate(states))):
        if not layer.is_recurrent_states_initialized[j]:
            layer.lazy_initialization(recurrent_states=state, state_idx=j)
        layer.recurrent_states[j] = _assign(layer.recurrent_states[j], state)
    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _assign(old: Tensor, new: Tensor) -> Tensor:
    """In place, as a compiled decoding step relies on fixed addresses, or a new tensor where autograd might notice."""
    in_place = not (torch.is_grad_enabled() or old.requires_grad) and old.shape == new.shape
    if in_place and not torch.compiler.is_compiling():
        in_place = not old.is_inference() or torch.is_inference_mode_enabled()
    # A copy, for a state that nothing was written to yet may be the model's own W_init.
    return old.copy_(new) if in_place else new.clone()
