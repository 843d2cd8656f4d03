"""Which live models a memory can be injected into: one row per architecture, and why any other is refused.

Axis legend of the weights: Q = Hq * head_dim   K = Hkv * head_dim   rows are output channels, `[out, in]`
"""

import math
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tnt_hf.cache_name_tnt import CACHE_NAME


# A weight of another dtype, or of a tensor class of its own, is a library's way to keep it quantized.
PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Architecture:
    """
    What has to be known about a model's attention to put a memory beside it.

    Attributes:
        attention_class: name of the attention module's class; another one may compute something else.
        base: attribute of the base model's part that reads tokens, whose forward is called; `None`: it is that itself.
        layers, attention: attributes of the layer list in that part, and of the attention module in a layer.
        cache: the argument under which the attention's forward gets the cache.
        projections: attributes of q, k, v and o in the attention module; of the fused qkv and o where `fused` is set.
        fused: how q, k and v share a weight. `"blocks"`: all of q, then k, then v; `"per_head"`: each head's q, k
            and v together; `"gate"`: three weights, each head's q together with a gate of attention's output; `None`:
            three weights.
        conv1d: the projections are `Conv1D`, whose weights are transposed.
        separates_documents: the model's mask keeps packed documents apart, as `position_ids` that restart ask for.
        distances_only: a row computes the same with all its positions shifted. Not so where positions are embedded or
            scale queries, and where keys are normalised after RoPE.
    """

    attention_class: str
    layers: str = "layers"
    attention: str = "self_attn"
    cache: str = CACHE_NAME
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    fused: str | None = None
    conv1d: bool = False
    base: str | None = None
    separates_documents: bool = True
    distances_only: bool = True

    @property
    def lora_targets(self) -> list[str]:
        """`target_modules` for LoRA on q, k, v and o; with the attention's name, so that nothing else matches."""
        return [f"{self.attention}.{name}" for name in self.projections]

    def base_of(self, model: PreTrainedModel) -> nn.Module:
        """The module that reads tokens and runs the layers."""
        return model.base_model if self.base is None else getattr(model.base_model, self.base)

    def shiftable(self, config) -> float:
        """Up to how many tokens a row can be shifted, and nothing but the rounding of RoPE changes."""
        if not self.distances_only:
            return 0
        ropes = getattr(config, "rope_parameters", None) or {}
        limits = [math.inf]
        for rope in (ropes, *ropes.values()):  # of all layers, or by their type
            if not isinstance(rope, dict):
                continue
            # frequencies that follow the longest position, and queries that are scaled from a position on
            if rope.get("rope_type") in ("dynamic", "longrope") or rope.get("llama_4_scaling_beta"):
                trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
                limits.append(min(trained, config.max_position_embeddings))
        return min(limits)

    def attention_modules(self, base: nn.Module) -> dict[int, nn.Module]:
        """The attention modules of what [`base_of`] found, by layer: a hybrid's other layers have none."""
        layers = getattr(base, self.layers)
        return {i: getattr(layers[i], self.attention) for i in attention_layers(base.config)}

    def qkv_weights(self, attention: nn.Module, heads: "Heads", dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """
        The weights of q `[Q, hidden]`, k and v `[K, hidden]`; views where the layout allows. Of a quantized
        projection, whatever library keeps it: what it makes of the unit vectors, in `dtype`.

        Raises:
            ValueError: a projection is sharded or wrapped: it is not a matrix of that shape.
        """
        query, key = heads.query * heads.head_dim, heads.key_value * heads.head_dim
        rows = {None: (query, key, key), "gate": (2 * query, key, key)}.get(self.fused, (query + 2 * key,))
        weights = []
        for name, count in zip(self.projections, rows):
            if (projection := getattr(attention, name)) is None:  # values are the keys before their norm
                weights.append(weights[-1])
                continue
            expected = (count, heads.hidden)
            found = getattr(projection, "weight", None)
            if type(found) in (Tensor, nn.Parameter) and found.dtype in PLAIN:
                weight = found.T if self.conv1d and found.ndim == 2 else found
            else:
                weight = _product(projection, heads.hidden, dtype)
            if weight is None or tuple(weight.shape) != expected:
                raise ValueError(
                    f"{name}: memory_projections='own' starts from its weight, which must be a matrix {expected}, not"
                    f" {_describe(found)}; inject before it is changed, or use memory_projections='shared'."
                )
            weights.append(weight)
        if self.fused == "blocks":
            return weights[0].split((query, key, key))
        if self.fused == "gate":
            weights[0] = weights[0].view(heads.query, 2, heads.head_dim, heads.hidden)[:, 0].flatten(0, 1)
        if self.fused == "per_head":
            per_head = weights[0].view(heads.query, 3, heads.head_dim, heads.hidden)
            return tuple(per_head[:, i].flatten(0, 1) for i in range(3))
        return tuple(weights)


@torch.enable_grad()
def _product(projection: nn.Module, hidden: int, dtype: torch.dtype) -> Tensor | None:
    """`[out, hidden]`: the matrix that a quantized projection multiplies with, or `None` if it does not."""
    bias, held = getattr(projection, "bias", None), chain(projection.parameters(), projection.buffers())
    device = next((x.device for x in held), None)
    try:
        # for an input without gradient bitsandbytes packs the weight anew on a CPU, and then rounds differently
        columns = projection(torch.eye(hidden, dtype=dtype, device=device, requires_grad=True)).detach()
        columns = columns if bias is None else columns - bias.detach()
    except Exception:  # the kernels of each library raise what they like
        return None
    return columns.T if type(columns) is Tensor and columns.ndim == 2 and bool(columns.isfinite().all()) else None


def _describe(weight: object) -> str:
    kind = type(weight).__name__
    return f"{kind} {weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else kind


OUT_PROJ = ("q_proj", "k_proj", "v_proj", "out_proj")
ARCHITECTURES = {
    "afmoe": Architecture("AfmoeAttention", separates_documents=False),
    "apertus": Architecture("ApertusAttention"),
    "arcee": Architecture("ArceeAttention"),
    "aria_text": Architecture("AriaTextAttention"),
    "beam": Architecture("BeamAttention", distances_only=False),
    "biogpt": Architecture("BioGptAttention", projections=OUT_PROJ, separates_documents=False, distances_only=False),
    "bitnet": Architecture("BitNetAttention"),
    "cohere": Architecture("CohereAttention"),
    "cohere2": Architecture("Cohere2Attention"),
    "cohere2_moe": Architecture("Cohere2MoeAttention"),
    "cohere_compass_text": Architecture("CohereCompassAttention"),
    "cwm": Architecture("CwmAttention"),
    "dots1": Architecture("Dots1Attention"),
    "ernie4_5": Architecture("Ernie4_5Attention"),
    "ernie4_5_moe": Architecture("Ernie4_5_MoeAttention"),
    "exaone4": Architecture("Exaone4Attention"),
    "exaone_moe": Architecture("ExaoneMoeAttention"),
    "flex_olmo": Architecture("FlexOlmoAttention"),
    "flint": Architecture("FlintAttention"),
    "gemma": Architecture("GemmaAttention"),
    "gemma2": Architecture("Gemma2Attention"),
    "gemma3_text": Architecture("Gemma3Attention"),
    "gemma4_text": Architecture("Gemma4TextAttention"),
    "gemma4_unified_text": Architecture("Gemma4UnifiedTextAttention"),
    "glm": Architecture("GlmAttention"),
    "glm4": Architecture("Glm4Attention"),
    "glm4_moe": Architecture("Glm4MoeAttention"),
    "gpt2": Architecture(
        "GPT2Attention",
        "h",
        "attn",
        projections=("c_attn", "c_proj"),
        fused="blocks",
        conv1d=True,
        distances_only=False,
    ),
    "gpt_bigcode": Architecture(
        "GPTBigCodeAttention",
        "h",
        "attn",
        cache="layer_past",
        projections=("c_attn", "c_proj"),
        fused="blocks",
        distances_only=False,
    ),
    "gpt_neox": Architecture(
        "GPTNeoXAttention",
        attention="attention",
        cache="layer_past",
        projections=("query_key_value", "dense"),
        fused="per_head",
    ),
    "gpt_oss": Architecture("GptOssAttention", separates_documents=False),
    "granite": Architecture("GraniteAttention"),
    "granite_swa": Architecture("GraniteSWAAttention"),
    "granitemoe": Architecture("GraniteMoeAttention"),
    "granitemoe_swa": Architecture("GraniteMoeSWAAttention"),
    "granitemoehybrid": Architecture("GraniteMoeHybridAttention", separates_documents=False),
    "granitemoeshared": Architecture("GraniteMoeSharedAttention"),
    "helium": Architecture("HeliumAttention"),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1Attention", distances_only=False),
    "hunyuan_v1_moe": Architecture("HunYuanMoEV1Attention", distances_only=False),
    "hy_v3": Architecture("HYV3Attention"),
    "hyperclovax": Architecture("HyperCLOVAXAttention"),
    "jais2": Architecture("Jais2Attention"),
    "kolibri1": Architecture("Kolibri1Attention"),
    "laguna": Architecture("LagunaAttention"),
    "lfm2": Architecture("Lfm2Attention", projections=OUT_PROJ, separates_documents=False),
    "lfm2_moe": Architecture("Lfm2MoeAttention", projections=OUT_PROJ, separates_documents=False),
    "lfm3": Architecture("Lfm3Attention", separates_documents=False),
    "llama": Architecture("LlamaAttention"),
    "mellum": Architecture("MellumAttention"),
    "minimax_m2": Architecture("MiniMaxM2Attention"),
    "ministral": Architecture("MinistralAttention"),
    "ministral3": Architecture("Ministral3Attention"),
    "mistral": Architecture("MistralAttention"),
    "mixtral": Architecture("MixtralAttention"),
    "nanochat": Architecture("NanoChatAttention"),
    "olmo": Architecture("OlmoAttention"),
    "olmo2": Architecture("Olmo2Attention"),
    "olmo3": Architecture("Olmo3Attention"),
    "olmo_hybrid": Architecture("OlmoHybridAttention", separates_documents=False),
    "olmoe": Architecture("OlmoeAttention"),
    "opt": Architecture(
        "OPTAttention", projections=OUT_PROJ, base="decoder", separates_documents=False, distances_only=False
    ),
    "persimmon": Architecture("PersimmonAttention", projections=("query_key_value", "dense"), fused="per_head"),
    "phi": Architecture("PhiAttention", projections=("q_proj", "k_proj", "v_proj", "dense")),
    "phi3": Architecture("Phi3Attention", projections=("qkv_proj", "o_proj"), fused="blocks"),
    "phimoe": Architecture("PhimoeAttention"),
    "qwen2": Architecture("Qwen2Attention"),
    "qwen2_moe": Architecture("Qwen2MoeAttention"),
    "qwen3": Architecture("Qwen3Attention"),
    "qwen3_5_moe_text": Architecture("Qwen3_5MoeAttention", fused="gate", separates_documents=False),
    "qwen3_5_text": Architecture("Qwen3_5Attention", fused="gate", separates_documents=False),
    "qwen3_moe": Architecture("Qwen3MoeAttention"),
    "qwen3_next": Architecture("Qwen3NextAttention", fused="gate", separates_documents=False),
    "seed_oss": Architecture("SeedOssAttention"),
    "smollm3": Architecture("SmolLM3Attention"),
    "solar_open": Architecture("SolarOpenAttention"),
    "starcoder2": Architecture("Starcoder2Attention"),
    "vaultgemma": Architecture("VaultGemmaAttention"),
}


def attention_layers(config) -> list[int]:
    """
    The layers of a model that have attention with keys and values of their own, ascending: in a hybrid others have
    something else, and some models' last layers look at the keys and values of an earlier one.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    has_keys = [
        kind in ("full_attention", "sliding_attention") and mode != "reuse" for kind, mode in zip(kinds, modes)
    ]
    return [i for i, own in enumerate(has_keys) if own]


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer's attention: `hidden` channels, `query` and `key_value` heads of `head_dim` channels."""

    hidden: int
    query: int
    key_value: int
    head_dim: int

    @classmethod
    def of(cls, config, layer: int) -> "Heads":
        """From a model's config, whose layers may differ."""
        config = config.per_layer_config[layer]
        per_layer = getattr(config, "num_attention_heads_per_layer", None)
        query = per_layer[layer] if per_layer else config.num_attention_heads
        key_value = getattr(config, "num_key_value_heads", None) or query
        width = getattr(config, "head_dim", None) or config.hidden_size // query
        return cls(config.hidden_size, query, key_value, width)


def architecture_of(model: PreTrainedModel) -> Architecture:
    """
    The row of a live model.

    Raises:
        ValueError: `model` is a PEFT wrapper, of an architecture without a row, or not of Transformers; the message
            says why and lists the supported ones.
    """
    if not isinstance(model, PreTrainedModel):
        hint = ": inject into the base model, before LoRA" if hasattr(model, "peft_config") else ""
        raise ValueError(f"model: must be a transformers PreTrainedModel, not {type(model).__name__}{hint}.")
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"model_type={kind!r}: {_reason(model)}. Supported: {supported}.")
    row = ARCHITECTURES[kind]
    if reason := _own_code(model, row):
        raise ValueError(f"model_type={kind!r}: {reason}.")
    return row


def _reason(model: PreTrainedModel) -> str:
    config = model.config
    if config.model_type == "tnt":
        return "has its own memory; change its config instead"
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model, and memory needs a causal decoder"
    text = config.get_text_config(decoder=True)
    if text is not config:
        if text.model_type in ARCHITECTURES:
            return f"is a composite model; inject into language_model(model), which is {text.model_type!r}"
        return f"is a composite model, and its language model ({text.model_type!r}) is not supported"
    if getattr(config, "kv_lora_rank", None):
        return "its multi-head latent attention has no keys and values per head at the attention interface"
    if not type(model)._can_set_attn_implementation():
        return "its attention does not go through Transformers' attention interface"
    if any("attention" not in kind or "linear" in kind for kind in getattr(config, "layer_types", None) or []):
        return "some of its layers are recurrent or linear already"
    return "its attention module has not been checked"


def _own_code(model: PreTrainedModel, row: Architecture) -> str | None:
    """What a model of a known type does that the row does not describe."""
    config = model.config
    found = {type(attention).__name__ for attention in row.attention_modules(row.base_of(model)).values()}
    if not found:
        return "none of its layers has attention"
    if found != {row.attention_class}:
        return f"its attention is {', '.join(sorted(found))}, not {row.attention_class}"
    # "vision": between the tokens of an image, of which a language model has none
    both_ways = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")
    if both_ways or not getattr(config, "is_causal", True):
        return "its attention is bidirectional, and memory is causal"
    if getattr(config, "add_cross_attention", False):
        return "add_cross_attention=True: memory needs a model without cross-attention"
    if getattr(config, "multi_query", True) is False:
        return "multi_query=False: its fused weight has another order of heads, which has not been checked"
    if getattr(config, "reorder_and_upcast_attn", False) and config._attn_implementation == "eager":
        return "reorder_and_upcast_attn=True bypasses the attention interface; use attn_implementation='sdpa'"
    return None


def memory_dtype(attention: nn.Module, row: Architecture, otherwise: torch.dtype) -> tuple[torch.device, torch.dtype]:
    """
    Device and dtype of an attention module's parameters, which its memory's projections get as well; where those are
    quantized, the dtype `otherwise`.

    Raises:
        ValueError: weights on the meta device.
    """
    projection = getattr(attention, row.projections[-1])
    tensor = next(chain(projection.parameters(), projection.buffers()))
    if tensor.is_meta:
        raise ValueError("model: its weights are on the meta device (offloaded or not loaded); load it first.")
    return tensor.device, tensor.dtype if tensor.dtype in PLAIN else otherwise
