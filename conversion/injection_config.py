"""What `inject` puts into a model: `LiZAConfig`, a linear operator mixed in by a weight, or `TNTInjectionConfig`,
TNT's hierarchical memory. Both survive JSON unchanged, as `model.config.tnt_injection`."""

import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from tnt_hf.configuration_tnt import TNTConfig

from .architectures import Heads, attention_layers
from .families import DEFAULTS, memory_fields
from .linear_attention import FEATURE_MAPS, IMPLEMENTATIONS, RULES


SIZED = ("global_chunk_size", "local_reset_interval")  # "auto" follows the window
UNBOUNDED = ("elu+1", "identity")  # keys may be longer than 1
CHOICES = {
    "operator": tuple(RULES),
    "feature_map": tuple(FEATURE_MAPS),
    "gate": ("pooled", "learned"),
    "implementation": IMPLEMENTATIONS,
}


class _Injection:
    """What both kinds share."""

    kind: ClassVar[str]

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, (tuple, range)):
                setattr(self, name, list(value))  # as JSON gives them back
        layers = self.layers
        if layers is not None and (
            not isinstance(layers, list) or not layers or not all(_is_count(i, 0) for i in layers)
        ):
            self._fail("layers", "must be None (all) or a list of layer indices, at least one")
        if layers is not None and len(set(layers)) < len(layers):
            self._fail("layers", "names a layer twice")
        self.layers = layers and sorted(layers)
        if self.max_self_attn_length is not None and not _is_count(self.max_self_attn_length, 1):
            self._fail("max_self_attn_length", "must be None (all) or at least 1 token")

    def _fail(self, field: str, reason: str) -> None:
        raise ValueError(f"{type(self).__name__}.{field}={getattr(self, field)!r}: {reason}.")

    def layer_indices(self, host: Any) -> list[int]:
        """
        The layers that get a memory in a model with config `host`, ascending.

        Raises:
            ValueError: one of them is out of range, or has no attention of its own.
        """
        there, count = attention_layers(host), host.num_hidden_layers
        if self.layers is None:
            return there
        if outside := [i for i in self.layers if i >= count]:
            self._fail("layers", f"{outside[0]} is out of range, the model has {count} layers")
        if without := [i for i in self.layers if i not in there]:
            self._fail("layers", f"{without[0]} has no attention of its own, layers {there} of the model have")
        return sorted(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """All fields and `"kind"`, ready for JSON."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]):
        """
        Inverse of `to_dict`.

        Raises:
            ValueError: another kind, an unknown field, or an invalid value.
        """
        if not isinstance(settings, dict):
            raise ValueError(f"settings={settings!r}: must be a dict of {cls.__name__}'s fields.")
        settings = dict(settings)
        if (kind := settings.pop("kind", cls.kind)) != cls.kind:
            raise ValueError(f"kind={kind!r}: {cls.__name__} needs {cls.kind!r}.")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            raise ValueError(
                f"{cls.__name__}.{unknown[0]}={settings[unknown[0]]!r}: is not a field; those are {', '.join(known)}."
            )
        return cls(**settings)


@dataclass
class LiZAConfig(_Injection):
    """
    A linear operator beside attention, mixed in by Memory-as-Gate: O = w O_lin + (1 - w) O_attn.

    It shares q, k and v with attention, as they reach the attention interface: keys and queries after RoPE.

    Args:
        operator: `"delta_rule"`, `"gated_delta_rule"`, `"delta_product"` or `"linear"`, see
            [`~conversion.linear_attention.linear_attention`].
        feature_map: applied to q and k: `"silu-l2"`, `"elu+1"`, `"softmax"` or `"identity"`. Delta rules diverge where
            beta |k|^2 > 2, which `"elu+1"` and `"identity"` do not rule out: a warning says so.
        weight: initial w, in [0, 1]; 0 is the source model, bit for bit. Saved with the model, see `LiZACallback`.
        gate: takes the writing strength beta (and alpha of `"gated_delta_rule"`) from the mean of the token's key
            (`"pooled"`, no parameters: beta = sigmoid(mean k), alpha = sigmoid(mean k)^(1/16)), or from a projection
            of the layer's input (`"learned"`, starting at beta = 1/2 and alpha = 0.999).
        num_writes: writes per token of `"delta_product"`. Write i uses the token's key and value rotated by i pi / n
            in pairs of channels.
        chunk_size: tokens per chunk; affects cost, not results.
        max_self_attn_length: attention sees this many tokens, the query's own included; `None` means all. Padding
            between two turns counts, as in the library's sliding windows; the cache keeps all keys.
        layers: layers that get the operator; `None` means all.
        implementation: `"chunk"`, `"recurrent"`, or `"fla"` (the CUDA kernels of flash-linear-attention).

    Raises:
        ValueError: an invalid value, naming the field.
    """

    kind: ClassVar[str] = "liza"

    operator: str = "delta_rule"
    feature_map: str = "silu-l2"
    weight: float = 0.5
    gate: str = "pooled"
    num_writes: int = 2
    chunk_size: int = 64
    max_self_attn_length: int | None = None
    layers: list[int] | None = None
    implementation: str = "chunk"

    def __post_init__(self):
        super().__post_init__()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                self._fail(name, f"must be one of {', '.join(map(repr, choices))}")
        for name in ("num_writes", "chunk_size"):
            if not _is_count(getattr(self, name), 1):
                self._fail(name, "must be an integer of at least 1")
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not 0 <= self.weight <= 1:
            self._fail("weight", "must be a number in [0, 1]")
        if self.operator != "linear" and self.feature_map in UNBOUNDED:
            warnings.warn(
                f"LiZAConfig.feature_map={self.feature_map!r}: its keys can be long, and operator={self.operator!r}"
                " diverges where beta |k|^2 > 2, to nan within a hundred tokens; 'silu-l2' and 'softmax' cannot.",
                stacklevel=3,
            )


@dataclass
class TNTInjectionConfig(_Injection):
    """
    TNT's memory beside attention: the fields of [`TNTConfig`] for the memory, with the defaults of a conversion.

    At the default gate (`"add"`, starting at 0) the injected model is the source, bit for bit.

    Args:
        layers: layers that get a memory; `None` means all.
        max_self_attn_length: attention sees this many tokens, the query's own included; `None` is what the model has.
        global_chunk_size: tokens; `"auto"` is `max_self_attn_length`, or the model's sliding window, or 512.
        local_reset_interval: tokens; `"auto"` is four times the global chunk, or the next multiple of it that all
            local chunks divide.
        memory_projections: `"own"`, starting as copies of the layer's q, k and v weights, or at random where
            `memory_num_heads` or `memory_head_dim` give the memory different heads; or `"shared"`: the q, k and v of
            the attention interface, keys and queries after RoPE. Only `"own"` can be exported as a TNT model, whose
            shared projections are those before RoPE.
        memory_gate_init: `None` is 0 for the gates `"add"` and `"mix"`.

    Raises:
        ValueError: an invalid value, naming the field; `TNTConfig`'s own errors once the model is known.
    """

    kind: ClassVar[str] = "tnt"

    layers: list[int] | None = None
    max_self_attn_length: int | None = None
    global_chunk_size: int | str | None = "auto"
    local_chunk_sizes: list[int] | int | None = 16
    local_reset_interval: int | list[int | None] | str | None = "auto"
    allow_memory_gap: bool = False
    global_read: str = "chunk_start"
    qk_projection: str = DEFAULTS["qk_projection"]
    qk_projection_norm: bool = True
    memory_num_heads: int | None = None
    memory_head_dim: int | None = None
    memory_projections: str = DEFAULTS["memory_projections"]
    memory_conv_kernel: int = DEFAULTS["memory_conv_kernel"]
    memory_feature_map: str = DEFAULTS["memory_feature_map"]
    memory_value_norm: bool = DEFAULTS["memory_value_norm"]
    memory_depth: int = DEFAULTS["memory_depth"]
    memory_expansion: float | int = 1
    memory_activation: str = "silu"
    memory_residual: bool = DEFAULTS["memory_residual"]
    memory_layernorm: bool = False
    memory_gate: str = DEFAULTS["memory_gate"]
    memory_gate_init: float | int | None = None
    memory_max_lr: float | int | None = DEFAULTS["memory_max_lr"]
    memory_lr_scaling: str = DEFAULTS["memory_lr_scaling"]
    memory_train_chunk_sizes: list[int] | None = None
    memory_momentum: bool = DEFAULTS["memory_momentum"]
    memory_decay: bool = DEFAULTS["memory_decay"]
    memory_decay_target: str = "init"
    memory_grad_bound: float | int | None = None
    memory_implementation: str = "auto"

    def memory_config(self, host: Any, layer: int) -> TNTConfig:
        """
        The [`TNTConfig`] of the memory in a layer of a model with config `host`, with sizes taken from it.

        Raises:
            ValueError: a value or combination that `TNTConfig` refuses, or layers out of range.
        """
        window = self.max_self_attn_length or getattr(host, "sliding_window", None)
        given = {name: value for name, value in asdict(self).items() if name not in SIZED or value != "auto"}
        del given["layers"], given["max_self_attn_length"]
        if given["memory_gate_init"] is None:
            del given["memory_gate_init"]
        heads = Heads.of(host, layer)
        return TNTConfig(
            vocab_size=host.vocab_size,
            hidden_size=heads.hidden,
            num_hidden_layers=host.num_hidden_layers,
            num_attention_heads=heads.query,
            num_key_value_heads=heads.key_value,
            head_dim=heads.head_dim,
            rms_norm_eps=getattr(host, "rms_norm_eps", None) or 1e-6,
            initializer_range=getattr(host, "initializer_range", 0.02),
            sliding_window=self.max_self_attn_length,
            memory_layers=self.layer_indices(host),
            **memory_fields(window, given),
        )


INJECTIONS = {cls.kind: cls for cls in (LiZAConfig, TNTInjectionConfig)}


def injection_from_dict(settings: dict[str, Any]) -> LiZAConfig | TNTInjectionConfig:
    """
    The config that `to_dict` wrote, of whichever kind: `injection_from_dict(model.config.tnt_injection)`.

    Raises:
        ValueError: a missing or unknown `"kind"`, or what the kind's `from_dict` refuses.
    """
    kind = settings.get("kind") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(kind, str) or kind not in INJECTIONS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(map(repr, INJECTIONS))}.")
    return INJECTIONS[kind].from_dict(settings)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
