"""Tiny random models of every architecture that `inject` supports, hard to please: large weights, grouped heads, head
widths that are not hidden / heads, fused and transposed projections, sliding windows of 5 tokens."""

import pytest
import torch
from tiny import left_padded
from transformers import AutoConfig, AutoModelForCausalLM

from tnt_hf.conversion.injection_config import LiZAConfig, TNTInjectionConfig


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
HOSTS = {
    "llama": {"attention_bias": True},
    "mistral": {"head_dim": 12, "sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "gemma3_text": {
        "head_dim": 12,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
    },
    "phi": {"qk_layernorm": True},
    "phi3": {"head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"use_parallel_residual": False},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "gemma2": {**WINDOWS, "head_dim": 12, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    "gpt_oss": {**WINDOWS, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
}
EAGER_ONLY = ("flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "vaultgemma")  # soft caps and sinks
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
GROUPS = {"n_group": 1, "topk_group": 1}
SHARED = {**MOE, **GROUPS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# These share the attention of one above but for norms, biases, gates, RoPE and what is around it or in other layers.
LIKE_OTHERS = {
    "afmoe": {**MOE, **WINDOWS, "num_local_experts": 4, "num_dense_layers": 1, "head_dim": 12},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "arcee": {"head_dim": 12},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 8},
    "bitnet": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **WINDOWS},
    "cohere2_moe": {**MOE, **WINDOWS, "num_local_experts": 4, "logit_scale": 1.0},
    "cwm": {**WINDOWS, "head_dim": 12, "bos_token_id": 1, "eos_token_id": -1},
    "dots1": {**SHARED, **WINDOWS, "head_dim": 12},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "exaone4": WINDOWS,
    "exaone_moe": {**MOE, **WINDOWS, **GROUPS, "num_shared_experts": 1, "head_dim": 12},
    "flex_olmo": MOE,
    "gemma": {"head_dim": 12},
    "gemma4_text": {
        **WINDOWS,
        "head_dim": 12,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "glm": {"head_dim": 12},
    "glm4": {"head_dim": 12},
    "glm4_moe": {**SHARED, "head_dim": 12},
    "granitemoe": {**LOCAL, "attention_multiplier": 0.2},
    "granitemoehybrid": {**MAMBA, **LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 20, "attention_multiplier": 0.2},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 12},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 12},
    "hy_v3": {**MOE, "head_dim": 12},
    "hyperclovax": {"attention_multiplier": 0.2},
    "jais2": {},
    "minimax_m2": {**LOCAL, "head_dim": 12},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": {"head_dim": 12, "sliding_window": 5},
    "ministral3": {"head_dim": 12, "sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "nanochat": {},
    "olmo3": WINDOWS,
    "olmo_hybrid": {**HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 16},
    "persimmon": {},
    "phimoe": {**LOCAL, "sliding_window": 5},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": {**HYBRID, **MOE, "shared_expert_intermediate_size": 24, "head_dim": 16},
    "qwen3_5_text": {**HYBRID, "head_dim": 16},
    "qwen3_moe": {**MOE, "head_dim": 12},
    "qwen3_next": {**HYBRID, **MOE, "shared_expert_intermediate_size": 24, "head_dim": 16},
    "seed_oss": {"head_dim": 12},
    "solar_open": {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 12},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": {**WINDOWS, "head_dim": 12, "query_pre_attn_scalar": 20},
    "beam": {**MOE, **WINDOWS, "head_dim": 12},
    "biogpt": {},
    "cohere_compass_text": {**WINDOWS, "logit_scale": 1.0, "rope_parameters": ROPES},
    "flint": {**MOE, **WINDOWS, "head_dim": 12, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "gemma4_unified_text": {
        **WINDOWS,
        "head_dim": 12,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gpt_bigcode": {},
    "granite_swa": {**WINDOWS, "attention_multiplier": 0.2},
    "granitemoe_swa": {**WINDOWS, **LOCAL, "attention_multiplier": 0.2, "shared_intermediate_size": 20},
    "kolibri1": {**MOE, **WINDOWS, **LOCAL, "head_dim": 12, "shared_expert_intermediate_size": 24},
    "laguna": {
        **MOE,
        **WINDOWS,
        "head_dim": 12,
        "shared_expert_intermediate_size": 24,
        "num_attention_heads_per_layer": [4, 2],
    },
    "lfm3": {"layer_types": ["conv", "full_attention"], "head_dim": 12},
    "mellum": {**MOE, **WINDOWS, **LOCAL, "head_dim": 12},
}
QUICK = ("mixtral", "qwen3_next")  # of them: the others' tests are slow ones
HOST_NAMES = [*HOSTS, *(pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in LIKE_OTHERS)]
hosts = pytest.mark.parametrize("kind", HOST_NAMES)
HOSTS |= LIKE_OTHERS
ONE_OF_EACH_LAYOUT = ("llama", "gemma3_text", "phi3", "gpt_neox", "gpt2")  # separate, windows, both kinds of fusion
layouts = pytest.mark.parametrize("kind", ONE_OF_EACH_LAYOUT)
# Chunks and resets that 33 tokens cross several times.
OPEN_TNT = TNTInjectionConfig(
    memory_gate_init=0.7, global_chunk_size=8, local_chunk_sizes=[2, 4], local_reset_interval=16, memory_conv_kernel=3
)
OPEN_LIZA = LiZAConfig(weight=0.5, chunk_size=8)
OPENED = {"liza": OPEN_LIZA, "tnt": OPEN_TNT}
# Every operator and mode that takes another path through the code.
MODES = {
    **OPENED,
    "gated": LiZAConfig(operator="gated_delta_rule", gate="learned", weight=0.4, chunk_size=5),
    "gated pooled": LiZAConfig(operator="gated_delta_rule", feature_map="softmax", weight=0.1),
    "product": LiZAConfig(operator="delta_product", gate="learned", num_writes=3),
    "linear": LiZAConfig(operator="linear", feature_map="elu+1", weight=0.5, implementation="recurrent"),
    "window": LiZAConfig(max_self_attn_length=4),
    "one layer": LiZAConfig(layers=[1], weight=1.0),
    "tnt window": TNTInjectionConfig(memory_gate="mix", memory_gate_init=0.5, max_self_attn_length=4),
    "tnt heads": TNTInjectionConfig(
        memory_num_heads=1, memory_head_dim=16, memory_gate_init=0.7, global_chunk_size=8, local_chunk_sizes=[]
    ),
    "tnt shared": TNTInjectionConfig(
        memory_projections="shared", memory_gate_init=0.7, global_chunk_size=4, qk_projection="shard", memory_depth=2
    ),
}
CLOSED = {"liza": LiZAConfig(weight=0.0), "tnt": TNTInjectionConfig(global_chunk_size=8)}


def attentions(kind: str) -> tuple[str, ...]:
    """The library's attentions that a model of type `kind` has, of those that `inject` supports."""
    return ("eager",) if kind in EAGER_ONLY else ("sdpa", "eager")


def tiny_host(kind: str, dtype: torch.dtype = torch.float32, attn: str | None = None, **changes):
    """A model of type `kind` in eval mode, the same one for the same arguments; weights of std 0.15, no zero bias."""
    fields = {**SIZES, **HOSTS[kind], **changes}
    if kind in ("biogpt", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "persimmon"):
        del fields["num_key_value_heads"]  # know no grouped heads
    config = AutoConfig.for_model(kind, **fields)
    config._experts_implementation = "eager"  # the fused ones refuse float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn or attentions(kind)[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
    return model.to(dtype).eval()


def positions(mask: torch.Tensor) -> torch.Tensor:
    """`[B, T]` positions that count valid tokens, as `generate` makes them."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arguments of a model for rows of different lengths `[n]`, padded on the left."""
    ids, mask = left_padded(rows)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}


@torch.no_grad()
def decode(model, ids: torch.Tensor, pieces: list[int], mask: torch.Tensor | None = None, cache=None):
    """Logits `[B, T, vocab]` of `ids` given in pieces of these lengths, and the cache."""
    logits, end = [], 0
    for length in pieces:
        start, end = end, end + length
        extra = {}
        if mask is not None:
            extra = {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **extra)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1), cache
