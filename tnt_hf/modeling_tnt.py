"""TNTModel and TNTForCausalLM: a Llama / Qwen / Mistral superset backbone whose layers carry test-time memories.

Axis legend
    B batch   T tokens of this call   Hq attention query heads   Hkv key/value heads   P persistent tokens
    Q = Hq * head_dim channels before o_proj

A layer of `variant="mag"` (Titans MAG), `x` its normed input, m the sum of all memories (TNT Eq. 15):

    y = o_proj(combine(attention(x), m(x)))        h = h + y        h = h + mlp(norm(h))

The memory sees only valid tokens of its own document, in their own order ("memory time"): padding, packing and the way
a prompt is split over calls do not change any number. Base tensors have Llama's names; everything that belongs to the
memory lives under `model.layers.N.memory` (branch_tnt).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .branch_tnt import Beside, TNTMemory
from .cache_name_tnt import CACHE_NAME, CACHE_NAMES, with_cache_name
from .cache_tnt import INTERRUPTED, TNTCache
from .compiler_tnt import is_exporting
from .configuration_tnt import LAYER_TYPES, TNTConfig
from .continuation_tnt import (
    UNANSWERED,
    check_batch,
    check_cache,
    check_continuation,
    check_kept,
    check_left_to_right,
    check_positions,
    check_program,
    check_whole_rows,
)
from .convolution_tnt import TNTCausalConv
from .frozen_tnt import check_made_of, made_of
from .gate_tnt import TNTGateLinear, TNTMemoryGate, TNTRMSNorm
from .generation_tnt import TNTGenerationMixin
from .masks_tnt import build_masks, counts_valid_tokens, default_positions, document_ids
from .precision_tnt import cast, rounded, wide
from .state_tnt import StateLayout
from .step_settings_tnt import StepSettings
from .unit_tnt import TNTInitialWeights, TNTMemoryUnit
from .window_tnt import Window, window_attention


@dataclass
class TNTModelOutputWithPast(BaseModelOutputWithPast):
    """`BaseModelOutputWithPast` plus, with `output_surprise=True`, `surprise`: for each memory layer the inner loss
    1/2 |f(W_xi, k_t) - v_t|^2 before the write, `[B, T]` in the memory's dtype, averaged over memories and heads."""

    surprise: tuple[Tensor, ...] | None = None


@dataclass
class TNTCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` plus, with `output_surprise=True`, `surprise` as in [`TNTModelOutputWithPast`]."""

    surprise: tuple[Tensor, ...] | None = None


# ------------------------------------------------------------------------------------------------------------ backbone


class TNTRotaryEmbedding(nn.Module):
    """cos and sin `[B, T, rotary width]` of the positions, for every RoPE type of the library."""

    def __init__(self, config: TNTConfig):
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init_fn: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init_fn(config)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: TNTConfig, **kwargs) -> tuple[Tensor, float]:
        """Inverse frequencies `[rotary width / 2]` of the original RoPE, and its attention scaling of 1."""
        width = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, width, 2, dtype=torch.float) / width
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponent), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # Relative positions must survive an offset by padding, so a float64 model needs float64 angles.
        dtype = wide(x.dtype)
        freqs = position_ids[..., None].to(dtype) * self.inv_freq.to(device=x.device, dtype=dtype)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        if self.attention_scaling != 1:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cast(cos, x.dtype), cast(sin, x.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[B, heads, T, head_dim]`; with a partial rotary factor, only its first channels."""
    cos, sin, width = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    if width == x.shape[-1]:
        return (x * cos) + (_rotate_half(x) * sin)
    rotated, rest = x[..., :width], x[..., width:]
    return torch.cat(((rotated * cos) + (_rotate_half(rotated) * sin), rest), dim=-1)


class TNTMLP(nn.Module):
    """SwiGLU feed-forward, as in Llama."""

    def __init__(self, config: TNTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        x = rounded(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """`[B, Hkv, T, head_dim]` to `[B, Hkv * n_rep, T, head_dim]`, every head next to its copies."""
    if n_rep == 1:
        return x
    B, heads, T, width = x.shape
    # Of one head this is a view, as in the library: a copy would send the products down another, less equal path.
    return x[:, :, None].expand(B, heads, n_rep, T, width).reshape(B, heads * n_rep, T, width)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, returning its weights as well. `attention_mask` is additive."""
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=wide(query.dtype)).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class TNTAttention(nn.Module):
    """Grouped-query attention over a window or all keys, plus P persistent keys; the memory joins before o_proj."""

    def __init__(self, config: TNTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.num_persistent_tokens = config.num_persistent_tokens  # attributes of a config are slow to read
        self.has_qk_norm, self.has_output_gate = config.qk_norm, config.attention_output_gate
        self.sliding_window = config.sliding_window if "sliding" in config.layer_types[layer_idx] else None

        query, key_value = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value, bias=config.attention_bias)
        output_bias = config.attention_bias if config.attention_output_bias is None else config.attention_output_bias
        self.o_proj = nn.Linear(query, config.hidden_size, bias=output_bias)
        if config.qk_norm:
            self.q_norm = TNTRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = TNTRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if config.attention_output_gate:
            self.gate_proj = nn.Linear(config.hidden_size, query, bias=False)
        if config.num_persistent_tokens:
            shape = (config.num_key_value_heads, config.num_persistent_tokens, self.head_dim)
            self.persistent_keys = nn.Parameter(torch.empty(shape))
            self.persistent_values = nn.Parameter(torch.empty(shape))

    @with_cache_name
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        memory: Beside | None = None,
        memory_inputs: dict[str, Any] | None = None,
        valid: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        x = rounded(hidden_states)  # memory and gates read the whole
        query, key, value = (proj(x).view(hidden_shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if memory is not None:
            shared = tuple(x.flatten(-2) for x in (query, key, value)) if memory.shared else None
            memory_output, _ = memory(hidden_states, shared, cache, **memory_inputs)

        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if query.shape[2] == 1:  # for one token the number of calls is what counts: query and key heads as one
            both = apply_rotary_pos_emb(torch.cat([query, key], 1), *position_embeddings)
            query, key = both.split([query.shape[1], key.shape[1]], 1)
        else:
            query, key = (apply_rotary_pos_emb(x, *position_embeddings) for x in (query, key))
        window = self.sliding_window and vars(self.config)["sliding_window"]  # which may have been assigned
        if cache is not None:
            # Our own layers use `valid` to keep a window of valid tokens, the library's ignore it.
            if valid is not None and not counts_valid_tokens(self.config._attn_implementation):
                valid = None
            key, value = cache.update(key, value, self.layer_idx, valid=valid)
            # The library's sliding layer never drops anything at a window of 1; a full one's mask is for all it keeps.
            if window == 1 and cache.layers[self.layer_idx].is_sliding:
                key, value = key[:, :, -query.shape[2] :], value[:, :, -query.shape[2] :]
        if self.num_persistent_tokens:
            key = torch.cat([self.persistent_keys.to(key.dtype).expand(key.shape[0], -1, -1, -1), key], dim=2)
            value = torch.cat(
                [self.persistent_values.to(value.dtype).expand(value.shape[0], -1, -1, -1), value], dim=2
            )

        options = {"dropout": 0.0 if not self.training else self.attention_dropout, "scaling": self.scaling}
        if isinstance(attention_mask, Window):
            attn_output = window_attention(query, key, value, attention_mask, self.num_persistent_tokens, **options)
            attn_weights = None
        else:
            attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            options |= {"sliding_window": window, **kwargs}
            attn_output, attn_weights = attention_interface(self, query, key, value, attention_mask, **options)
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        if self.has_output_gate:
            attn_output = attn_output * torch.sigmoid(self.gate_proj(x))
        if memory is not None:
            attn_output = memory.gate(attn_output, memory_output, hidden_states)
        return self.o_proj(attn_output), attn_weights


# --------------------------------------------------------------------------------------------------------------- block


class TNTDecoderLayer(GradientCheckpointingLayer):
    """One block: `"mag"` memory beside attention, `"mal"` memory before attention, `"lmm"` memory in its place."""

    def __init__(self, config: TNTConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.variant = config.variant if layer_idx in config.memory_layer_indices else None
        if self.variant != "lmm":
            self.self_attn = TNTAttention(config, layer_idx)
        if self.variant is not None:
            self.memory = TNTMemory(config, layer_idx)
        self.mlp = TNTMLP(config)
        self.input_layernorm = TNTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = TNTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @with_cache_name
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        memory_inputs: dict[str, Any] | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        if cache is not None and self.layer_idx in getattr(cache, "unplaced", ()):
            cache.place(self.layer_idx, hidden_states)
        if self.variant == "mal":
            hidden_states = hidden_states + self._memory_layer(
                self.memory.input_layernorm(hidden_states), cache, memory_inputs
            )
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        if self.variant == "lmm":
            if cache is not None:
                # Keys of no width: nothing is stored, but the cache goes on counting positions.
                empty = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 0)
                cache.update(empty, empty, self.layer_idx)
            hidden_states = self._memory_layer(hidden_states, cache, memory_inputs)
        else:
            hidden_states, _ = self.self_attn(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                cache=cache,
                memory=Beside(self.memory) if self.variant == "mag" else None,
                memory_inputs=memory_inputs,
                valid=memory_inputs["mask"],
                **kwargs,
            )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def _memory_layer(self, x: Tensor, cache: Cache | None, memory_inputs: dict[str, Any]) -> Tensor:
        memory_output, _ = self.memory(x, None, cache, **memory_inputs)
        return self.memory.o_proj(self.memory.gate(None, memory_output, x))


# -------------------------------------------------------------------------------------------------------------- models


UNQUANTIZED = r".+\.memory"  # names of modules: the memory is small, and beside LoRA trained in full


class TNTPreTrainedModel(PreTrainedModel):
    """Weight initialisation and the two-stage controls shared by all TNT models."""

    config: TNTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TNTDecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = ["memory.memories", "memory.gate.(scale|weight)"]
    _can_record_outputs = {
        "hidden_states": TNTDecoderLayer,
        "attentions": TNTAttention,
        "surprise": OutputRecorder(TNTMemory, index=1),
    }

    @property
    def _is_stateful(self) -> bool:
        """Whether tokens cannot be taken back, as `generate` does to decode speculatively: from attention to all of
        them they can."""
        return any(kind != "full_attention" for kind in self.config.layer_types)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, TNTInitialWeights):
            for i, weight in enumerate(module):
                # A linear memory starts empty; a deep one needs gradients to flow and a read-out that starts near 0.
                last = 0.1 if i == len(module) - 1 else 1.0
                init.normal_(weight, std=0.0 if len(module) == 1 else last * weight.shape[1] ** -0.5)
        elif isinstance(module, TNTGateLinear):
            if module.zero_weight:
                init.zeros_(module.weight)
            if module.bias is not None:
                init.constant_(module.bias, module.bias_start)
        elif isinstance(module, TNTCausalConv):
            identity = F.pad(torch.ones_like(module.weight[..., :1]), (module.kernel_size[0] - 1, 0))
            init.copy_(module.weight, identity + std * torch.randn_like(module.weight))
        elif isinstance(module, TNTMemoryUnit) and module.norm_weight is not None:
            init.ones_(module.norm_weight)
            init.zeros_(module.norm_bias)
        elif isinstance(module, TNTMemoryGate):
            if module.kind == "add":
                init.constant_(module.scale, module.start)
            elif module.kind == "mix":
                init.constant_(module.weight, module.start)
        elif isinstance(module, TNTAttention) and self.config.num_persistent_tokens:
            init.normal_(module.persistent_keys, std=std)
            init.normal_(module.persistent_values, std=std)

    def enable_adapters(self) -> None:
        """As in the library, and with what adapters train in full, such as the memory: `disable_adapters()` switches
        it off, too."""
        super().enable_adapters()
        for module in self.modules():
            if hasattr(module, "modules_to_save"):
                module.enable_adapters(True)

    def set_local_chunk_sizes(self, sizes: int | list[int]) -> None:
        """
        Change the chunk sizes (in tokens) of the local memories: one for all, or one each. `[1]` is stage 2. No weight
        depends on them.

        Raises:
            ValueError: the number of sizes is wrong, or a size does not divide its `local_reset_interval`.
        """
        old = self.config.local_chunk_sizes
        count = len(old) if self.config.memory_layer_indices else 0
        new = list(sizes) if isinstance(sizes, Iterable) else [sizes]
        if new and not count:
            raise ValueError(f"local_chunk_sizes={sizes!r}: the model has no local memories.")
        new = new * count if len(new) == 1 else new
        if len(new) != count or any(isinstance(C, bool) or not isinstance(C, int) or C < 1 for C in new):
            raise ValueError(
                f"local_chunk_sizes={sizes!r}: needs one positive integer, or one for each of {count} local memories."
            )
        self.config.local_chunk_sizes = new
        try:
            self.config.validate_architecture()
        except ValueError:
            self.config.local_chunk_sizes = old
            raise

    def post_init(self):
        super().post_init()
        # the library asks that each pattern names a tensor of the model
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        self._keep_in_fp32_modules_strict = {
            pattern
            for pattern in self._keep_in_fp32_modules_strict
            if any(re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) for name in names)
        }
        if getattr(self.config, "quantization_config", None) is not None:
            self._keep_in_fp32_modules.add(UNQUANTIZED)  # what the library's quantizers leave alone

    def init_parallel_plans(self):
        super().init_parallel_plans()
        # FSDP2 takes one dtype per group, and the library's own group of a gate's float32 tensor would have this in it
        if self.base_model is self and any(name.endswith("memory.gate.proj") for name, _ in self.named_modules()):
            self._fsdp_plan["layers.*.memory.gate.proj"] = "free_full_weight"

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        plan = super()._get_dtype_plan(dtype)
        plan.pop(UNQUANTIZED, None)  # in half precision it is as wide as the rest
        return plan

    def set_sliding_window(self, window: int | None, layers: int | list[int] | None = None) -> None:
        """
        Narrow attention to `window` tokens (the query's own included), or widen it to all tokens with `None`. A
        converted checkpoint starts with its source's attention, and a recipe narrows it while the memory learns.

        Args:
            layers: layers to change, by default all with attention; a model has only one window size.

        Raises:
            ValueError: an invalid window or layer, or a size that differs from the window of the other layers.
        """
        config, old = self.config, (self.config.sliding_window, list(self.config.layer_types))
        attending = [i for i in range(config.num_hidden_layers) if self._attends(i)]
        layers = attending if layers is None else list(layers) if isinstance(layers, Iterable) else [layers]
        if unknown := [i for i in layers if i not in attending]:
            raise ValueError(f"layers={layers!r}: {unknown} are not among the layers {attending} that attend.")
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"sliding_window={window!r}: must be a positive integer (tokens) or None.")
        others = [i for i in attending if i not in layers and "sliding" in old[1][i]]
        if window is not None and others and window != old[0]:
            raise ValueError(f"sliding_window={window!r}: layers {others} keep {old[0]}, and a model has one window.")
        types = list(old[1])
        for i in layers:
            wide, narrow = ("hybrid", "hybrid_sliding") if "hybrid" in types[i] else LAYER_TYPES[1::-1]
            types[i] = wide if window is None else narrow
        narrowed = any("sliding" in types[i] for i in attending)
        try:
            if window is not None:
                config.sliding_window = window
            elif not narrowed and len(attending) == config.num_hidden_layers:
                config.sliding_window = None
            config.layer_types = types
            config.validate_architecture()
        except ValueError:
            config.sliding_window, config.layer_types = old
            raise
        if window is not None and (window < (old[0] or 0) or not any("sliding" in kind for kind in old[1])):
            config.window_narrowed = True
        for module in self.modules():
            if isinstance(module, TNTAttention):
                module.sliding_window = config.sliding_window if "sliding" in types[module.layer_idx] else None

    def _attends(self, layer: int) -> bool:
        return self.config.variant != "lmm" or layer not in self.config.memory_layer_indices

    def freeze_for_stage2(self) -> int:
        """
        Leave only the local memories (W_init and gates) trainable.

        Returns:
            Number of trainable parameters.

        Raises:
            ValueError: there are no local memories.
        """
        names = [spec.name for spec in self.config.memory_specs]
        if "local" not in names or not self.config.memory_layer_indices:
            raise ValueError(f"local_chunk_sizes={self.config.local_chunk_sizes!r}: has no local memories to train.")
        self.requires_grad_(False)
        for place, module in self.named_modules():
            # peft keeps what a memory was aside, and nobody calls it
            if isinstance(module, TNTMemory) and "original_module" not in place.split("."):
                for name, unit in zip(names, module.memories):
                    unit.requires_grad_(name == "local")
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


class TNTModel(TNTPreTrainedModel):
    """The decoder stack, returning the last hidden states."""

    def __init__(self, config: TNTConfig):
        super().__init__(config)
        config.resolve()  # its fields may have changed since it was made
        self.made_of = made_of(config)
        if (pad := config.pad_token_id) is not None and not -config.vocab_size <= pad < config.vocab_size:
            raise ValueError(f"TNTConfig.pad_token_id={pad}: must be below vocab_size={config.vocab_size}.")
        self.padding_idx = pad
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([TNTDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = TNTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = TNTRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @with_cache_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_surprise: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TNTModelOutputWithPast:
        r"""
        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, hidden]`.
            attention_mask: `[B, past + T]` of all tokens so far, 0 = padding; or the dict of [`build_masks`].
            position_ids: `[B, T]`; positions that restart inside a row start a new document (packing).
            cache: [`TNTCache`], or the library's dynamic or static cache made with this config. The library's name for
                it shows in signatures and outputs: `past_key_values`, and `cache` since transformers 5.24.
            output_surprise: also return `surprise`, per memory layer `[B, T]`.

        Returns:
            `last_hidden_state` `[B, T, hidden]`, the cache unless `use_cache=False` or documents are packed, and what
            else was requested: attentions `[B, heads, T, P + T]`, P persistent tokens first, of layers with attention.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; a cache that cannot hold a memory; a mask
                that does not cover the cached tokens; `position_ids` of another shape; packing together with a cache;
                no `position_ids` after cached tokens that were given their own; a changed number of memories;
                `is_causal=False`.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            given = "none" if input_ids is None else "both"
            raise ValueError(f"You must specify exactly one of input_ids or inputs_embeds, got {given}")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        shape = list(inputs_embeds.shape[:-1])
        if len(shape) != 2 or not shape[0] * shape[1]:
            name = "inputs_embeds, without its last axis," if input_ids is None else "input_ids"
            raise ValueError(f"{name} has the shape {shape}: it must be [batch, tokens] and hold a token.")
        B, T = shape
        if isinstance(attention_mask, Tensor):
            attention_mask = attention_mask.to(inputs_embeds.device)
        elif isinstance(attention_mask, dict) and "memory" not in attention_mask:
            raise ValueError(
                f"attention_mask has the keys {list(attention_mask)}: make it with create_masks_for_generate."
            )
        check_left_to_right(kwargs)
        check_made_of(self.config, self.made_of)
        past, layout = 0, StateLayout.of(self.config)
        check_kept(self, cache)
        if cache is not None:
            check_cache(cache, self.config, layout)
            past = cache.get_seq_length()
            check_continuation(cache, attention_mask, past, T)
            check_program(cache, position_ids)
        check_batch(cache, attention_mask, past, B, T, position_ids)
        check_whole_rows(self.config)

        segment_ids = None
        if cache is None or is_exporting() or not torch.compiler.is_compiling():
            known = attention_mask.get("memory") if isinstance(attention_mask, dict) else attention_mask
            known = known[:, -T:].to(torch.bool) if known is not None and known.ndim == 2 else None
            segment_ids = document_ids(position_ids, known, B, T, kwargs)
        if segment_ids is not None and cache is not None:
            raise ValueError(
                f"position_ids restart inside a row (packed documents) while {CACHE_NAME} is given: a cache holds"
                " one document per row."
            )
        if use_cache and cache is None and segment_ids is None:
            cache = TNTCache(self.config)

        masks = attention_mask
        if not isinstance(masks, dict):
            masks = build_masks(self.config, inputs_embeds, attention_mask, cache, segment_ids)

        def default() -> Tensor:
            positions = (torch.arange(T, device=inputs_embeds.device) + past).unsqueeze(0)
            return default_positions(self.config, positions, attention_mask, segment_ids)

        if cache is not None and not isinstance(attention_mask, dict):  # whose padding `default` does not count
            check_positions(cache, past, T, position_ids, default, attention_mask)
        position_ids = default() if position_ids is None else position_ids
        output_surprise = bool(self.config.output_surprise if output_surprise is None else output_surprise)
        memory_inputs = {
            "layout": layout,
            "settings": StepSettings.of(self.config),
            "mask": masks.get("memory"),
            "segment_ids": segment_ids,
            "output_surprise": output_surprise,
        }

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        named = {CACHE_NAME: cache}  # so that gradient checkpointing finds it
        noted = cache is not None and not torch.compiler.is_compiling()
        if noted:
            cache.unusable = INTERRUPTED  # until all layers have written to it
        # as many as the configuration has: `assistant_early_exit` drafts with fewer
        for kind, layer in zip(self.config.layer_types[: self.config.num_hidden_layers], self.layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks.get("sliding_attention" if "sliding" in kind else "full_attention"),
                memory_inputs=memory_inputs,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                **named,
                **kwargs,
            )
        if noted:
            cache.unusable = None
        hidden_states = self.norm(hidden_states)
        kept = {CACHE_NAME: cache if use_cache else None}
        return TNTModelOutputWithPast(last_hidden_state=hidden_states, **kept)


class TNTForCausalLM(TNTPreTrainedModel, TNTGenerationMixin):
    """[`TNTModel`] with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: TNTConfig):
        super().__init__(config)
        self.model = TNTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @with_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TNTCausalLMOutputWithPast:
        r"""
        The arguments of [`TNTModel.forward`], plus:

        Args:
            labels: `[B, T]`, shifted internally; -100 is ignored. `num_items_in_batch` is passed to the loss.
            logits_to_keep: compute the logits of only that many last tokens, 0 = all; or a tensor of positions.

        Returns:
            `logits` `[B, kept, vocab_size]` in the model's dtype, and with `labels` the float32 `loss` in nats per
            scored token; the cache unless `use_cache=False`; `surprise`, per memory layer `[B, T]`, if requested.

        Raises:
            ValueError: as in [`TNTModel.forward`].
        """
        outputs: TNTModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        noted = getattr(outputs, CACHE_NAME) if not torch.compiler.is_compiling() else None
        if noted is not None:
            noted.unusable = UNANSWERED  # a call that is made again would read its tokens twice
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if noted is not None:
            noted.unusable = None
        return TNTCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            surprise=outputs.surprise,
        )


# The library's heads ask `AutoModel` for their backbone, which does not know it where this code came with a
# checkpoint: so their parts are made here.


class TNTForSequenceClassification(GenericForSequenceClassification, TNTPreTrainedModel):
    """[`TNTModel`] with a sequence classification head on the last token."""

    def __init__(self, config: TNTConfig):
        TNTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = TNTModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class TNTForTokenClassification(GenericForTokenClassification, TNTPreTrainedModel):
    """[`TNTModel`] with a token classification head, after a dropout of `config.classifier_dropout` or 0.1."""

    def __init__(self, config: TNTConfig):
        TNTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = TNTModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class TNTForQuestionAnswering(GenericForQuestionAnswering, TNTPreTrainedModel):
    """[`TNTModel`] with a span extraction head."""

    def __init__(self, config: TNTConfig):
        TNTPreTrainedModel.__init__(self, config)
        self.model = TNTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


# `Trainer` shifts the labels of its label smoothing for the classes of this table alone: without it every position
# would be trained to repeat its own token.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("tnt", "TNTForCausalLM")


__all__ = [
    "TNTForCausalLM",
    "TNTForQuestionAnswering",
    "TNTForSequenceClassification",
    "TNTForTokenClassification",
    "TNTModel",
    "TNTPreTrainedModel",
    "TNTModelOutputWithPast",
    "TNTCausalLMOutputWithPast",
]
