"""TNTConfig: every choice of a TNT model in typed, validated fields; `presets.PRESETS` has Titans, TTT and others.

Axis legend: C tokens per chunk   S tokens between resets   L layers of the memory network   D memory head width
This file travels with every pushed checkpoint and imports no sibling.
"""

import math
import warnings
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from transformers.utils.versions import require_version


require_version("transformers>=5.23")  # first: who loads a model from the Hub may have one without what follows

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


CHOICES = {"variant": ("mag", "mal", "lmm", "mac"), "global_read": ("chunk_start", "current"),
    "memory_feature_map": ("silu", "identity", "quadratic", "polynomial"), "qk_projection": ("shard", "chunk", "none"),
    "memory_gate": ("add", "product", "published", "mix"), "memory_lr_scaling": ("capped", "none", "train_chunk"),
    "memory_implementation": ("auto", "chunk", "naive", "native", "triton"), "memory_activation": ("silu", "gelu"),
    "memory_projections": ("own", "shared"), "memory_decay_target": ("init", "zero"),
    "memory_rule": ("gradient", "omega", "muon"), "hidden_act": tuple(ACT2FN)}  # fmt: skip
NOT_AVAILABLE = {"variant": ("mac",), "memory_rule": ("omega", "muon"), "omega_window": range(2, 1 << 63),
                 "memory_feature_map": ("polynomial",)}  # so far: a choice that cannot be honoured raises  # fmt: skip
AT_LEAST_1 = ("vocab_size", "intermediate_size", "num_hidden_layers", "sliding_window", "omega_window", "head_dim",
    "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "memory_train_chunk_sizes",
    "global_chunk_size", "local_chunk_sizes", "local_reset_interval", "memory_num_heads", "memory_head_dim",
    "memory_depth")  # fmt: skip
AT_LEAST_0, MEMORIES = ("num_persistent_tokens", "memory_conv_kernel"), {"global_chunk_size", "local_chunk_sizes"}
DERIVED = {"memory_conv_kernel": ("memory_projections", {"own": 4, "shared": 0}.get),  # from which field, and how
           "memory_gate_init": ("memory_gate", {"add": 1.0, "mix": 0.5}.get),
           "memory_max_lr": ("memory_depth", lambda depth: 0.5 if depth == 1 else 0.1)}  # fmt: skip
FLOAT = torch.finfo(torch.float32)  # what these are read as, most of them
POSITIVE = ("rms_norm_eps", "initializer_range", "memory_expansion", "memory_max_lr", "memory_grad_bound")
LAYER_TYPES = ("sliding_attention", "full_attention", "hybrid_sliding", "hybrid")
ONE_ROPE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", *LAYER_TYPES,
    "original_max_position_embeddings", "partial_rotary_factor")  # numbers; of no layer type its own  # fmt: skip
AUTO_MAP = {"AutoConfig": "configuration_tnt.TNTConfig", "AutoModel": "modeling_tnt.TNTModel"}
HEADS = ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
AUTO_MAP |= {f"AutoModelFor{head}": f"modeling_tnt.TNTFor{head}" for head in HEADS}


class MemorySpec(NamedTuple):
    """One memory of a layer. All share q, k, v and the recurrence; sizes and intervals are in tokens."""

    name: str
    chunk_size: int
    reset_interval: int | None
    read: str
    query_projection: str

    @property
    def projection_interval(self) -> int | None:
        """Tokens between resets of M; Eq. 7 as printed restarts it at every chunk."""
        return self.chunk_size if self.query_projection == "chunk" else self.reset_interval


@strict
class TNTConfig(PreTrainedConfig):
    r"""
    A superset of Llama, Qwen and Mistral backbones with test-time memory: TNT (arXiv 2511.07343), Titans (2501.00663).

    | paper | field |
    |---|---|
    | C_G, {C_i}, chunk sizes; S_L, reset interval | `global_chunk_size`, `local_chunk_sizes`; `local_reset_interval` |
    | q_t M_t, Q-K projection (Eq. 7) | `qk_projection`, `qk_projection_norm` |
    | f(W, .): L_M layers and their width | `memory_depth`, `memory_expansion` |
    | theta_t, mu_t, alpha_t: inner rate, momentum, forgetting | `memory_max_lr`, `memory_momentum`, `memory_decay` |
    | N_p, persistent tokens; MAG, MAL, LMM | `num_persistent_tokens`; `variant`, `memory_gate` |

    Args:
        > Backbone: fields not listed here mean what they do in `LlamaConfig`; every RoPE type works.

        attention_bias (`bool`, defaults to `False`): bias on q, k, v and o as in Llama. attention_output_bias (`bool`,
            *optional*): on o; `None`: as above. Qwen2: `True`, `False`. qk_norm, attention_output_gate (`bool`,
            default `False`): per-head RMSNorm of q, k before RoPE (Qwen3); attention's output times sigmoid(W x).
        sliding_window (`int`, *optional*, defaults to 512): keys a query sees, its own included; `None` means all.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"`; `"hybrid..."` with memory.
        num_persistent_tokens (`int`, defaults to 0): learned keys and values that every query sees.

        > Which memories, and where. Sizes and intervals are in tokens.

        variant (`str`, defaults to `"mag"`): memory beside attention; `"mal"`: before it; `"lmm"`: in its place.
        memory_layers (`list[int]`, *optional*): indices of the layers with memory; `None` means all, `[]` none.
        global_chunk_size (`int`, *optional*, defaults to 2048): `None` means no global memory.
        local_chunk_sizes (`list` or `int`, defaults to `[8, 16]`): one local memory each; see `set_local_chunk_sizes`.
        local_reset_interval (`int`, `list` or `None`, defaults to 2048): one for all or one each; `None` means never.
        allow_memory_gap (`bool`, defaults to `False`): accept tokens before a reset that no memory sees (S_L % C_G).
        global_read (`str`, defaults to `"chunk_start"`): read f(W_xi, q), as in Eq. 5; `"current"`: f(W_t, q).
        qk_projection (`str`, defaults to `"shard"`): project local queries onto the keys since the last reset;
            `"chunk"`: onto those since the chunk start (Eq. 7 as printed); `"none"`: not at all.
        qk_projection_norm (`bool`, defaults to `True`): L2-normalise the projected query, unlike the paper.

        > The network f and its inputs

        memory_num_heads, memory_head_dim (`int`, *optional*): by default `num_key_value_heads` and `head_dim`.
        memory_projections (`str`, defaults to `"own"`): own q, k, v projections; `"shared"`: attention's, before RoPE.
        memory_conv_kernel (`int`, *optional*): taps of q, k, v's causal conv (0, 1: none); `None`: 4 if own, else 0.
        memory_feature_map (`str`, defaults to `"silu"`): applied to q and k before their L2 norm, or `"identity"`;
            `"quadratic"`: no SiLU, and after it the products of all pairs, D (D + 1) / 2 wide, scores (q . k)^2.
        memory_value_norm (`bool`, defaults to `True`): L2-normalise v.
        memory_depth (`int`, defaults to 2), memory_expansion (`float`, defaults to 1): layers, hidden over head width.
        memory_activation (default `"silu"`, or `"gelu"`), memory_residual, memory_layernorm (`bool`, default `False`).
        memory_gate (`str`, defaults to `"add"`): attn + a * 2 sigmoid(W_g x) * norm(m); `"product"`: attn *
            2 sigmoid(W_g norm(m)); `"published"`: norm(attn) * sigmoid(norm(m)); `"mix"`: (1 - w) attn + w m.
        memory_gate_init (`float`, *optional*): initial a (`"add"`; `None` is 1) or w (`"mix"`; `None` is 0.5).

        > The inner optimiser

        memory_max_lr (`float`, *optional*): theta_t = max_lr * sigmoid(.); `None` is 0.5 at depth 1, else 0.1.
        memory_lr_scaling (`str`, defaults to `"capped"`): factor on theta: min(1, 64 / C); `"none"`: 1;
            `"train_chunk"`: C^-1/2. C is frozen in `memory_train_chunk_sizes` (global first; `None`: the sizes given).
        memory_momentum, memory_decay (`bool`, default `False`); memory_decay_target (`"init"`, W_init, or `"zero"`).
        memory_grad_bound (`float`, *optional*): limit on |g_t|; 1.0, as in the recipes, keeps memories from diverging
            when keys are alike; `None` as in the papers. memory_rule, omega_window: so far only `"gradient"` and 1.
        memory_implementation (`str`, defaults to `"auto"`): `"triton"` on CUDA, `"native"` (C) on CPUs where they run;
            else `"chunk"` (torch). `"naive"`, by token; with eager attention, second derivatives and `torch.func`.

    Raises:
        ValueError: for every invalid value or combination, naming the field and the value.
    """

    model_type, output_surprise, window_narrowed = "tnt", False, False  # the last two only saved where they were set
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    attention_dropout: float | int = 0.0
    qk_norm: bool = False
    attention_output_gate: bool = False
    sliding_window: int | None = 512
    layer_types: list[str] | None = None
    num_persistent_tokens: int = 0
    variant: str = "mag"
    memory_layers: list[int] | None = None
    global_chunk_size: int | None = 2048
    local_chunk_sizes: list[int] | tuple[int, ...] | int | None = None
    local_reset_interval: int | list[int | None] | None = 2048
    allow_memory_gap: bool = False
    global_read: str = "chunk_start"
    qk_projection: str = "shard"
    qk_projection_norm: bool = True
    memory_num_heads: int | None = None
    memory_head_dim: int | None = None
    memory_projections: str = "own"
    memory_conv_kernel: int | None = None
    memory_value_norm: bool = True
    memory_depth: int = 2
    memory_expansion: float | int = 1
    memory_activation: str = "silu"
    memory_residual: bool = False
    memory_layernorm: bool = False
    memory_gate: str = "add"
    memory_gate_init: float | int | None = None
    memory_max_lr: float | int | None = None
    memory_lr_scaling: str = "capped"
    memory_train_chunk_sizes: list[int] | None = None
    memory_momentum: bool = False
    memory_decay: bool = False
    memory_decay_target: str = "init"
    memory_grad_bound: float | int | None = None
    memory_rule: str = "gradient"
    omega_window: int = 1
    memory_feature_map: str = "silu"
    memory_implementation: str = "auto"

    def __post_init__(self, **kwargs):
        for name in kwargs:
            if (near := get_close_matches(name, self.__dataclass_fields__, 1, 0.85)) and near[0] != name:
                warnings.warn(f"TNTConfig.{name}: no field of this name; {near[0]!r} is one.", stacklevel=2)
        dtype = kwargs.get("torch_dtype") if self.dtype is None else self.dtype
        if not isinstance(getattr(torch, str(dtype), dtype), torch.dtype | dict | None):
            self._fail("dtype", "must be the name of a torch dtype", dtype)
        self.resolve()
        super().__post_init__(**kwargs)
        self._check_values()  # again: only now is RoPE's complete
        try:
            self.validate_rope()
            for length in (1, 1 << 62) if (rope := self.rope_parameters["rope_type"]) != "default" else ():
                with torch.device("cpu"):
                    ROPE_INIT_FUNCTIONS[rope](self, seq_len=length)
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            self._fail("rope_parameters", f"must be flat and for a rope_type of transformers, it causes {error!r}")
        self.auto_map = dict(getattr(self, "auto_map", None) or AUTO_MAP)

    def resolve(self):
        """Checks every field and fills in those that are `None`; call it again after assigning to one."""
        self._check_values()
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            self._fail("num_attention_heads", f"must divide hidden_size={self.hidden_size} without a head_dim")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.memory_num_heads = self.memory_num_heads or self.num_key_value_heads
        self.memory_head_dim = self.memory_head_dim or self.head_dim
        for name, (other, default) in DERIVED.items():
            if getattr(self, name) is None:
                setattr(self, name, default(getattr(self, other)))
        self.local_chunk_sizes = [8, 16] if self.local_chunk_sizes is None else list(self.local_chunk_sizes)
        if self.memory_lr_scaling != "none" and self.memory_train_chunk_sizes is None:
            self.memory_train_chunk_sizes = [spec.chunk_size for spec in self.memory_specs]
        self._resolve_layer_types()
        self.validate_architecture()

    def save_pretrained(self, *args, **kwargs):
        """As in the library, after checking and resolving every field again: some may have been assigned to."""
        self.resolve()
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Overrides are applied before construction, so that they are resolved and validated with the rest."""
        if kwargs.get("return_unused_kwargs") and kwargs.get("variant", "mag") not in CHOICES["variant"]:
            config, unused = cls.from_dict(config_dict, **{n: x for n, x in kwargs.items() if n != "variant"})
            return config, unused | {"variant": kwargs["variant"]}  # the library's option, which Auto classes pass on
        given = {name: kwargs.pop(name) for name in kwargs.keys() & cls.__dataclass_fields__.keys() - {"dtype"}}
        count = lambda sizes: len(sizes) if isinstance(sizes, (list, tuple)) else int(sizes is not None)  # noqa: E731
        if any(count(given[n]) != count(config_dict.get(n)) for n in given.keys() & MEMORIES):
            given.setdefault("memory_train_chunk_sizes", None)  # another number of memories
        for name, (other, default) in DERIVED.items():
            if other in given and config_dict.get(name) == default(config_dict.get(other)):
                given.setdefault(name, None)  # follows the new value, as it did the old one
        return super().from_dict(config_dict | given, **kwargs)

    def _fail(self, field: str, reason: str, value: Any = ...) -> None:
        raise ValueError(f"TNTConfig.{field}={getattr(self, field) if value is ... else value!r}: {reason}.")

    def _check_values(self):
        """Every field on its own, before anything is derived from it."""
        if wrong := [name for name, choices in CHOICES.items() if getattr(self, name) not in choices]:
            self._fail(wrong[0], f"must be one of {', '.join(map(repr, CHOICES[wrong[0]]))}")
        if missing := [name for name, values in NOT_AVAILABLE.items() if getattr(self, name) in values]:
            self._fail(missing[0], "is not available yet")
        for name in AT_LEAST_1 + AT_LEAST_0:
            values, least = getattr(self, name), int(name in AT_LEAST_1)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if value is not None and (isinstance(value, bool) or not least <= value < 1 << 63):
                    self._fail(name, f"must be an integer of at least {least} and below 2^63")
        rope = {f"rope_parameters.{n}": x for n, x in (self.rope_parameters or {}).items() if n in ONE_ROPE}
        for name, x in ({name: getattr(self, name) for name in POSITIVE} | rope).items():
            most = 1 if "partial" in name else 2**63 - 1 if type(x) is int else FLOAT.max
            wrong = x is True or not isinstance(x, int | float) or not FLOAT.tiny <= x <= most
            if wrong and (x is not None or "theta" in name or "partial" in name):  # other None the library can find
                self._fail(name, f"must be one number from {FLOAT.tiny:.3g} to {most:.3g}", x)
        if not 0 <= self.attention_dropout < 1:
            self._fail("attention_dropout", "must be in [0, 1)")
        if len(set(at := self.memory_layers or [])) < len(at) or any(not 0 <= i < self.num_hidden_layers for i in at):
            self._fail("memory_layers", f"must be distinct layer indices in [0, {self.num_hidden_layers})")

    def _resolve_layer_types(self):
        """`layer_types` from each layer's attention and `memory_layers`; what it returns it also accepts."""
        count = self.num_hidden_layers
        types = [LAYER_TYPES[self.sliding_window is None]] * count if self.layer_types is None else self.layer_types
        if len(types) != count:
            self._fail("layer_types", f"must have num_hidden_layers={count} entries, has {len(types)}")
        if unknown := [kind for kind in types if kind not in LAYER_TYPES]:
            self._fail("layer_types", f"{unknown[0]!r} is not one of {', '.join(map(repr, LAYER_TYPES))}")
        if self.memory_layers is None and 0 < len(hybrid := [i for i, x in enumerate(types) if "hybrid" in x]) < count:
            self.memory_layers = hybrid
        with_memory, self.layer_types = set(self.memory_layer_indices), []
        for i, kind in enumerate(types):
            lmm = self.variant == "lmm" and i in with_memory  # keeps no keys, only their count: see TNTDecoderLayer
            self.sliding_window = 1 if lmm and self.sliding_window is None else self.sliding_window
            self.layer_types.append(LAYER_TYPES[(i in with_memory) * 2 + (not lmm and "sliding" not in kind)])

    def validate_architecture(self):
        """Checks combinations of fields; also run on saving and by `@strict`, whose errors are not `ValueError`."""
        if self.num_attention_heads % self.num_key_value_heads:
            self._fail("num_attention_heads", f"must be a multiple of num_key_value_heads={self.num_key_value_heads}")
        if self.head_dim % 2:
            self._fail("head_dim", "must be even, as RoPE turns pairs of channels")
        if any("sliding" in kind for kind in self.layer_types) and self.sliding_window is None:
            self._fail("sliding_window", "must be set when layer_types contains a sliding layer")
        if not self.memory_specs and (self.memory_layers or self.variant != "mag"):
            self._fail("memory_layers" if self.memory_layers else "variant", "needs a global or local chunk size")
        if self.memory_layer_indices:
            for check in (self._validate_heads, self._validate_intervals, self._validate_combination):
                check()

    def _validate_heads(self):
        query, H, D = self.num_attention_heads * self.head_dim, self.memory_num_heads, self.memory_head_dim
        if query % D:
            self._fail("memory_head_dim", f"must divide num_attention_heads * head_dim = {query}")
        if query // D % H:
            self._fail("memory_num_heads", f"must divide the {query // D} query rows of memory_head_dim={D}")
        if self.memory_projections == "shared":
            if self.variant != "mag":
                self._fail("memory_projections", f"needs variant='mag', not {self.variant!r}")
            if H * D != (expected := self.num_key_value_heads * self.head_dim):
                self._fail("memory_num_heads", f"times memory_head_dim={D} must be the {expected} shared channels")
        if self.memory_residual and self.memory_feature_map == "quadratic":
            self._fail("memory_residual", "needs keys as wide as values, unlike memory_feature_map='quadratic'")
        if not float(self.memory_expansion * D).is_integer() or self.memory_expansion * D >= 1 << 31:
            self._fail("memory_expansion", f"times memory_head_dim={D} must be a whole number, and a size")

    def _validate_combination(self):
        gate, start, trained = self.memory_gate, self.memory_gate_init, self.memory_train_chunk_sizes
        if self.variant != "mag" and gate != "add":
            self._fail("memory_gate", f"joins memory and attention, which variant={self.variant!r} does not")
        if gate in ("product", "published") and start is not None:
            self._fail("memory_gate_init", f"has no meaning for memory_gate={gate!r}")
        if start is not None and not (abs(start) < 1 << 63 and (gate == "add" or 0 <= start <= 1)):
            self._fail("memory_gate_init", "must be between -2^63 and 2^63, and in [0, 1] for 'mix'")
        if self.memory_projections == "shared" and (gate == "product" or start == 0):
            zero = f"TNTConfig.memory_projections='shared' with memory_gate={gate!r} starting at zero"
            warnings.warn(f"{zero}: trained from scratch such a memory hardly wakes, unlike with 'own'.", stacklevel=2)
        if self.variant == "lmm" and self.num_persistent_tokens:
            self._fail("num_persistent_tokens", "needs attention, which variant='lmm' has not")
        if trained is not None and len(trained) != (count := len(self.memory_specs)):
            sizes = f"global_chunk_size={self.global_chunk_size} and local_chunk_sizes={self.local_chunk_sizes}"
            self._fail("memory_train_chunk_sizes", f"needs the {count} entries of {sizes}; None takes theirs")

    def _validate_intervals(self):
        intervals, count, C_G = self.local_reset_interval, len(self.local_chunk_sizes), self.global_chunk_size
        if isinstance(intervals, list) and len(intervals) != count:
            self._fail("local_reset_interval", f"needs one entry for each of {count} local memories")
        kinds = {self.layer_types[i] for i in self.memory_layer_indices}
        window = 0 if self.variant == "lmm" else self.sliding_window if "hybrid_sliding" in kinds else math.inf
        for C, S in [(spec.chunk_size, spec.reset_interval) for spec in self.memory_specs if spec.name == "local"]:
            if S is not None and S % C:
                self._fail("local_chunk_sizes", f"{C} must divide local_reset_interval={S}")
            seen = self.global_read == "current" or window >= (C_G or 0)
            if S and C_G and S % C_G and not (seen or self.allow_memory_gap):
                gap = f"up to {C_G - math.gcd(S, C_G)} tokens before a reset are visible to no memory"
                unless = f". Accepted with sliding_window >= {C_G}, global_read='current' or allow_memory_gap=True"
                self._fail("local_reset_interval", f"must be a multiple of global_chunk_size={C_G}: {gap}{unless}", S)

    @property
    def memory_layer_indices(self) -> list[int]:
        """Layers that carry memory, ascending."""
        layers = range(self.num_hidden_layers) if self.memory_layers is None else self.memory_layers
        return sorted(layers) if self.memory_specs else []

    @property
    def memory_specs(self) -> list[MemorySpec]:
        """The memories of a layer: the global one first (if any), then one per entry of `local_chunk_sizes`."""
        C_G, sizes, intervals = self.global_chunk_size, self.local_chunk_sizes, self.local_reset_interval
        intervals = intervals if isinstance(intervals, list) else [intervals] * len(sizes)
        specs = [] if C_G is None else [MemorySpec("global", C_G, None, self.global_read, "none")]
        return specs + [MemorySpec("local", C, S, "current", self.qk_projection) for C, S in zip(sizes, intervals)]

    @property
    def memory_projection_intervals(self) -> list[int | None]:
        """Reset intervals of the Q-K projections M; memories with the same interval share one M."""
        return list(dict.fromkeys(x.projection_interval for x in self.memory_specs if x.query_projection != "none"))

    @property
    def memory_key_width(self) -> int:
        """Features of a key: the first d_in of the memory network, and the size of M."""
        D = self.memory_head_dim
        return D * (D + 1) // 2 if self.memory_feature_map == "quadratic" else D

    @property
    def memory_weight_shapes(self) -> list[tuple[int, int]]:
        """`(d_in, d_out)` of the L_M layers of one head's memory network."""
        hidden = int(self.memory_expansion * self.memory_head_dim)
        widths = [self.memory_key_width, *[hidden] * (self.memory_depth - 1), self.memory_head_dim]
        return list(zip(widths[:-1], widths[1:]))

    @property
    def number_of_conv_states(self) -> int:
        """State slots a hybrid layer's cache needs (the library's name): see `memory_state_shapes` in costs_tnt."""
        copies = sum(1 + (spec.chunk_size > 1) + self.memory_momentum for spec in self.memory_specs)
        return copies * self.memory_depth + len(self.memory_projection_intervals) + 1


def _setattr(self, name, value, strictly=TNTConfig.__setattr__):
    try:
        strictly(self, name, [value] if name == "local_chunk_sizes" and type(value) is int else value)
    except StrictDataclassFieldValidationError as error:  # is not a ValueError, which this package promises
        raise ValueError(f"TNTConfig.{name}={value!r}: {error.__cause__}") from error


TNTConfig.__setattr__ = _setattr
__all__ = ["MemorySpec", "TNTConfig"]
