"""The cache of TNT models: window keys and values, and the memory's state, in the library's own hybrid cache layers.

Axis legend
    B batch   H memory heads   D memory head width   C tokens per chunk   S tokens between resets

The slots of the state are described in state_tnt. The library's `DynamicCache(config=...)` and
`StaticCache(config=...)` hold the same slots and work as well; `TNTCache` adds correct batch operations, sessions on
disk, and a check of the chunk sizes it was filled with.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from .cache_layers_tnt import TNTFullLayer, TNTSlidingLayer, TNTWindowLayer
from .configuration_tnt import TNTConfig
from .costs_tnt import memory_state_shapes
from .session_tnt import check_digest, read_session, write_session
from .state_tnt import store


SESSION_FORMAT = "tnt-session-1"
# What a stored state means. `local_chunk_sizes` may change at a chunk boundary, everything else must agree.
FINGERPRINT = (
    "variant", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "layer_types", "sliding_window", "num_persistent_tokens", "global_chunk_size", "local_chunk_sizes",
    "local_reset_interval", "global_read", "qk_projection", "qk_projection_norm", "memory_num_heads",
    "memory_head_dim", "memory_projections", "memory_conv_kernel", "memory_value_norm", "memory_feature_map",
    "memory_depth", "memory_expansion", "memory_activation", "memory_residual", "memory_layernorm", "memory_momentum",
    "memory_decay", "memory_decay_target", "qk_norm", "rope_parameters",
)  # fmt: skip
# Why a cache cannot be gone on from, as its attribute `unusable`: layers are written to one after the other.
INTERRUPTED = "was left behind by a call that broke off, and its layers hold different tokens"
HEADER = "format", "config", "cumulative_lengths"
# What a cache knows about its tokens that its tensors do not say.
NOTES = {"own_positions": bool, "counts_padding": bool, "windows_of_columns": bool, "tokens_noted": list}


class TNTCache(DynamicCache):
    """
    Cache of a TNT model, created by `generate()` and `forward(use_cache=True)` when none is given.

    Layers hold keys and values `[B, num_key_value_heads, tokens, head_dim]` in the model's dtype, with a window of W
    at most the last W - 1. Layers with memory also hold its state, which has the same size at any context length.

    Args:
        config ([`TNTConfig`]): configuration of the model the cache is for.

    Raises:
        ValueError: another kind of configuration; outputs of `nn.DataParallel` that hold a cache.

    ```python
    out = model.generate(input_ids, past_key_values=(cache := TNTCache(model.config)))
    cache.save("session.safetensors")
    cache = TNTCache.load("session.safetensors", model.config)
    ```
    """

    unusable: str | None = None  # why it cannot be gone on from
    own_positions = False  # whether its tokens were placed otherwise than without `position_ids`
    counts_padding = False  # whether padding in front of some of them is known to be counted in their positions
    holds_beams = False  # of a search that goes on
    tokens_noted: list | None = None  # how many tokens `generate` left in it, and a digest of those of each row
    windows_of_columns: bool | None = None  # whether the last call's windows counted padding, too, if that is known

    def __init__(self, config: TNTConfig):
        if hasattr(config, "__next__"):  # what is in the caches of several copies of a model
            raise ValueError("nn.DataParallel cannot join caches: call the model with use_cache=False.")
        if not hasattr(config, "number_of_conv_states"):
            raise ValueError(f"config={type(config).__name__}: must be the TNTConfig of the model the cache is for.")
        makers = {
            "full_attention": DynamicLayer,
            "sliding_attention": lambda: TNTWindowLayer(config.sliding_window),
            "hybrid": lambda: TNTFullLayer(config.number_of_conv_states),
            "hybrid_sliding": lambda: TNTSlidingLayer(config.sliding_window, config.number_of_conv_states),
        }
        Cache.__init__(self, layers=[makers[kind]() for kind in config.layer_types])
        self.fingerprint, self.holds_padding = _fingerprint(config), False
        self.unplaced: set[int] = set()  # layers of a loaded session that have not met their model yet

    def place(self, layer_idx: int, hidden_states: Tensor) -> None:
        """Move a layer of a loaded session to the device and precision of the model's layer that gets this input."""
        layer, device, dtype = self.layers[layer_idx], hidden_states.device, hidden_states.dtype
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
        if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.has_previous_state[0]:
            if layer.conv_states[0] is not None:
                layer.conv_states[0] = layer.conv_states[0].to(device, dtype)
            *states, time = layer.recurrent_states.values()
            states = [x.to(device, torch.promote_types(dtype, torch.float32)) for x in states]
            layer.recurrent_states.update(enumerate([*states, time.to(device)]))
        layer.device = device
        self.unplaced.remove(layer_idx)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """As in the library; a session stored in another precision continues in that of the new tokens."""
        layer = self.layers[layer_idx]
        if layer.is_initialized and layer.keys.dtype != key_states.dtype:
            layer.keys, layer.values = layer.keys.to(key_states.dtype), layer.values.to(key_states.dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def _all_layers(self) -> Iterator[None]:
        before, self.unusable = self.unusable, INTERRUPTED
        yield
        self.unusable = before  # not after an error: some layers have changed and others have not

    def reset(self) -> None:
        """Start over."""
        self.unusable = INTERRUPTED
        for layer in self._memory_layers():
            layer._map_states(torch.zeros_like)  # the library's zeros in place are refused after inference mode
        super().reset()
        self.unusable = self.placed = self.agreed = self.windows_of_columns = self.tokens_noted = None
        self.holds_padding = self.own_positions = self.counts_padding = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        with self._all_layers():
            super().reorder_cache(beam_idx)
        self.tokens_noted = None
        if not self.holds_beams:  # which are moved within rows of one mask
            self.placed = self.agreed = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self._all_layers():
            super().batch_repeat_interleave(repeats)
        self.tokens_noted = None

    def batch_select_indices(self, indices: Tensor) -> None:
        with self._all_layers():
            super().batch_select_indices(indices)
        self.placed = self.agreed = self.tokens_noted = None  # the mask of the last call is that of other rows

    def detach(self) -> None:
        """
        Go on from values alone: the next call's gradients end here, as in truncated backpropagation through time over
        a text in segments. What earlier calls computed keeps its own graph, before or after its `backward()`.
        """
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        for layer in self._memory_layers():
            layer._map_states(Tensor.detach)  # no graph has saved it: with one, states are read and written as copies

    def nbytes(self) -> int:
        """Bytes of all tensors held, keys and values included."""
        return sum(x.nbytes for x in self._tensors().values())

    def state_bytes(self) -> int:
        """Bytes of the memory state alone: `memory_state_bytes(config)` times the batch size at any context length."""
        return sum(x.nbytes for name, x in self._tensors().items() if name.split(".")[2] in ("conv", "state"))

    def crop(self, tokens_to_remove: int) -> None:
        """
        As in the library, if there is no memory.

        Raises:
            ValueError: there is a memory, which cannot forget tokens; in that case nothing is removed.
        """
        for layer in self._memory_layers() or self.layers:
            layer.crop(tokens_to_remove)
        self.tokens_noted = None

    def cached_window(self, layer_idx: int) -> int:
        """Number of keys a layer holds before this call's are added."""
        layer = self.layers[layer_idx]
        return layer.keys.shape[2] if layer.is_initialized else 0

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for i, layer in enumerate(self.layers):
            if layer.is_initialized:
                tensors |= {f"layers.{i}.keys": layer.keys, f"layers.{i}.values": layer.values}
            if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.has_previous_state[0]:
                tensors |= {f"layers.{i}.conv.{j}": x for j, x in layer.conv_states.items() if x is not None}
                tensors |= {f"layers.{i}.state.{j}": x for j, x in layer.recurrent_states.items() if x is not None}
        return tensors

    def adapt(self, config: TNTConfig) -> None:
        """
        Follow a change of `local_chunk_sizes` (stage 1 to 2). At a chunk boundary W_xi is W_t, so nothing is lost.

        Raises:
            ValueError: a row is inside a chunk of the old or of the new size, or another field or the number of sizes
                differs; any change after the first token with `qk_projection="chunk"`.
        """
        new = _fingerprint(config)
        if new == self.fingerprint:
            return
        _compare(self.fingerprint, new)
        old_sizes, sizes = self.fingerprint["local_chunk_sizes"], new["local_chunk_sizes"]
        different = f"local_chunk_sizes: the cache was filled with {old_sizes}, the model has {sizes}"
        if len(old_sizes) != len(sizes):
            raise ValueError(f"{different}.")
        if config.qk_projection == "chunk" and any(layer.has_previous_state[0] for layer in self._memory_layers()):
            raise ValueError(f"{different}, and qk_projection='chunk' depends on it.")
        old_config = _with_chunk_sizes(config, old_sizes)
        names = [name for name, _ in memory_state_shapes(old_config) if name != "conv"]
        wanted = [name for name, _ in memory_state_shapes(config) if name != "conv"]
        resized = []
        for layer in self._memory_layers():
            states = dict.fromkeys(wanted)
            if layer.has_previous_state[0]:
                states |= dict(zip(names, layer.recurrent_states.values()))
                _require_boundary(states["time"], old_config, config)
                for i, (was, now) in enumerate(zip(old_config.memory_specs, config.memory_specs)):
                    for n in range(config.memory_depth if was.chunk_size != now.chunk_size else 0):
                        states[f"{i}.chunk_weights.{n}"] = states[f"{i}.weights.{n}"].clone()
            resized.append((layer, [states[name] for name in wanted]))
        with self._all_layers():
            for layer, states in resized:
                _resize(layer, states)
        self.fingerprint = new

    def _memory_layers(self) -> list[LinearAttentionCacheLayerMixin]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def save(self, path: str | PathLike) -> None:
        """
        Write the session to a safetensors file: a conversation's memory, resumable in another process.

        The file is there as a whole or not at all. One that it replaces passes on its mode (a new one can be read by
        its owner alone), and a link still leads to it.

        Raises:
            ValueError: the cache cannot be continued from. Nothing is written.
            OSError: the file cannot be written, or `path` is a folder, a device or a pipe; an older session remains.
        """
        if self.unusable is not None:
            raise ValueError(f"cache: {self.unusable}.")
        tensors = {name: x.detach().cpu().contiguous().clone() for name, x in self._tensors().items()}
        metadata = {
            "format": SESSION_FORMAT,
            "config": json.dumps(self.fingerprint),
            "cumulative_lengths": json.dumps([getattr(layer, "cumulative_length", None) for layer in self.layers]),
            **{name: json.dumps(note) for name in NOTES if (note := getattr(self, name)) is not None},
        }
        write_session(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | PathLike, config: TNTConfig, device: str | torch.device = "cpu") -> "TNTCache":
        """
        Read a session written by [`TNTCache.save`] for a model with `config`. The model later moves it to the device
        of its layers and to the precision in which it continues.

        Raises:
            ValueError: not a session, one of another architecture (the differing field is named), or a damaged one,
                whose content is not what was saved (earlier releases noted no digest to tell that by).
            OSError: the file cannot be read, or it is no regular one.
        """
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device={device!r}: is not a torch device.") from None
        tensors, metadata = read_session(path)
        if metadata.get("format") != SESSION_FORMAT:
            raise ValueError(
                f"path={str(path)!r} is not a TNT session: format {metadata.get('format')!r}, not {SESSION_FORMAT!r}."
            )
        check_digest(tensors, metadata, {*HEADER, *NOTES})
        tensors = {name: x.to(device) for name, x in tensors.items()}
        stored = _said(metadata, "config", dict)
        _compare(stored, cls(config).fingerprint)
        filled_with = _with_chunk_sizes(config, _said(stored, "local_chunk_sizes", list))
        cache = cls(filled_with)
        cache._fill(tensors, _said(metadata, "cumulative_lengths", list), filled_with)
        cache.adapt(config)
        for name in metadata.keys() & set(NOTES):  # not in old ones
            setattr(cache, name, _said(metadata, name, NOTES[name]))
        if (noted := cache.tokens_noted) is not None:
            tokens, digests = noted if len(noted) == 2 else (None, None)
            if type(tokens) is not int or not isinstance(digests, list) or {*map(type, digests)} != {str}:
                raise ValueError(f"session: tokens_noted={str(noted)[:60]} must be a number and a digest of each row.")
        cache.unplaced = set(range(len(cache.layers)))
        return cache

    def _fill(self, tensors: dict[str, Tensor], lengths: list[int | None], config: TNTConfig) -> None:
        windows = [hasattr(layer, "cumulative_length") for layer in self.layers]
        if [type(n) for n in lengths] != [int if window else type(None) for window in windows]:
            raise ValueError(
                f"session: cumulative_lengths={lengths} must have a number for every layer with a window."
            )
        shapes = dict(memory_state_shapes(config))
        conv, slots, seen, times = shapes.pop("conv", None), list(shapes.values()), [], []

        def take(name: str, *shape: int | None) -> Tensor:
            _require(name, tensors.get(name), shape)
            return tensors.pop(name)

        for i, layer in enumerate(self.layers):
            name, has_memory = f"layers.{i}", isinstance(layer, LinearAttentionCacheLayerMixin)
            if lengths[i] or tensors.keys() & {f"{name}.keys", f"{name}.values"}:
                counted = config.variant == "lmm" and has_memory  # without attention: keys of no width
                heads, width = (1, 0) if counted else (config.num_key_value_heads, config.head_dim)
                held = None if lengths[i] is None else min(lengths[i], config.sliding_window - 1)
                keys = take(f"{name}.keys", None, heads, held, width)
                values = take(f"{name}.values", *keys.shape)
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
            if windows[i]:
                layer.cumulative_length = lengths[i]
            rows, count = len(layer.keys) if layer.is_initialized else 0, layer.get_seq_length()
            if has_memory and count:
                states = [take(f"{name}.state.{j}", rows, *shape) for j, shape in enumerate(slots)]
                store(layer, take(f"{name}.conv.0", rows, *conv) if conv else None, states)
                times.append(states[-1].tolist())
                self.holds_padding |= times[-1] != rows * [count]
            seen.append((rows, count))
            if seen[-1] != seen[0] or times[-1:] != times[:1] or not all(0 <= n <= count for n in sum(times[-1:], [])):
                raise ValueError(f"session: layer {i} has read other tokens than those before it.")
        if tensors:
            raise ValueError(f"session: unknown tensor {min(tensors)!r}.")


def _said(header: dict[str, Any], name: str, kind: type) -> Any:
    """Entry `name` of a session's header, which is JSON in its file."""
    value = header.get(name)
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, kind):
        raise ValueError(f"session: {name}={str(value)[:60]!r} must be a {kind.__name__}.")
    return value


def _require(name: str, x: Tensor | None, shape: tuple[int | None, ...]) -> None:
    """A tensor of that shape, where `None` stands for any size: memory times `[B]` are int64, all else is floating."""
    found = None if x is None else tuple(x.shape)
    if found is None or len(found) != len(shape) or any(n not in (None, m) for n, m in zip(shape, found)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"session: {name} must have shape ({wanted}), the file has {found}.")
    if not (x.is_floating_point() if x.dim() > 1 else x.dtype == torch.int64):
        raise ValueError(f"session: {name} must not be {x.dtype}.")


def _resize(layer: LinearAttentionCacheLayerMixin, states: list[Tensor | None]) -> None:
    """Give the layer `len(states)` slots and, unless it is still empty, these states."""
    conv, device = layer.conv_states[0], layer.device
    LinearAttentionCacheLayerMixin.__init__(layer, number_of_states=len(states))
    layer.device = device
    if states[-1] is not None:
        store(layer, conv, states)


def _with_chunk_sizes(config: TNTConfig, sizes: list[int]) -> TNTConfig:
    fields = {**config.to_dict(), "local_chunk_sizes": list(sizes)}
    return type(config)(
        **{name: value for name, value in fields.items() if name not in ("model_type", "transformers_version")}
    )


def _require_boundary(time: Tensor, old: TNTConfig, new: TNTConfig) -> None:
    for was, now in zip(old.memory_specs, new.memory_specs):
        if was.chunk_size != now.chunk_size and bool(((time % was.chunk_size) + (time % now.chunk_size)).any()):
            raise ValueError(
                f"local_chunk_sizes: the cache is at memory time {time.tolist()}, inside a chunk of {was.chunk_size}"
                f" or {now.chunk_size} tokens; change from {old.local_chunk_sizes} to {new.local_chunk_sizes} at a"
                " chunk boundary."
            )


def _fingerprint(config: TNTConfig) -> dict[str, Any]:
    return {name: _as_json(getattr(config, name)) for name in FINGERPRINT}


def _as_json(value: Any) -> Any:
    """As it is read back from disk."""
    if isinstance(value, dict):
        return {str(name): _as_json(x) for name, x in value.items()}
    return [_as_json(x) for x in value] if isinstance(value, (list, tuple)) else value


def _compare(stored: dict[str, Any], current: dict[str, Any]) -> None:
    for name in FINGERPRINT:
        if name in stored and name != "local_chunk_sizes" and stored[name] != current[name]:  # old sessions say less
            raise ValueError(f"{name}: the cache was filled with {stored[name]!r}, the model has {current[name]!r}.")
