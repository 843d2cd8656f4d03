"""Source architectures: one row each. Adding a family is adding a row.

A row says which fields the source's configuration has beyond Llama's, how they translate into [`TNTConfig`], and which
tensors of the source are several of ours in one. Everything else about a family follows from the configuration: the
base tensors of TNT carry Llama's names.

Axis legend
    V vocabulary   E hidden_size   F intermediate_size   Q query channels   K key/value channels   D head_dim
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.configuration_utils import PreTrainedConfig

from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.architectures import ARCHITECTURES


@dataclass(frozen=True)
class Family:
    """One source architecture.

    Attributes:
        translate: source config -> the [`TNTConfig`] fields in which it differs from Llama.
        fused: end of a source tensor's name -> our names for its consecutive row blocks.
        harmless: fields beyond Llama's that `translate` reads, or that do not change what is computed.
        tokenizer: its class where the source's files name none and cannot be loaded.
        partial_rotary: whether `partial_rotary_factor` means something to it.
    """

    translate: Callable[[PreTrainedConfig], dict[str, Any]]
    tokenizer: str
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    partial_rotary: bool = False

    def our_names(self, name: str) -> list[str]:
        """Our names for a tensor of the source, several where it is fused of consecutive rows."""
        end = next((end for end in self.fused if name.endswith(f".{end}")), None)
        return [name] if end is None else [name.removesuffix(end) + part for part in self.fused[end]]


def _llama(config: PreTrainedConfig) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "sliding_window": None}


def _mistral(config: PreTrainedConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _qwen2(config: PreTrainedConfig) -> dict[str, Any]:
    # Qwen2 has biases on q, k and v whatever its configuration says, and none on o.
    return {"attention_bias": True, "attention_output_bias": False} | _qwen_window(config)


def _qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "qk_norm": True} | _qwen_window(config)


def _qwen_window(config: PreTrainedConfig) -> dict[str, Any]:
    types = list(config.layer_types)
    if other := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"layer_types: {other[0]!r} is not a layer type that TNT has")
    return {"sliding_window": config.sliding_window, "layer_types": types}


def _phi3(config: PreTrainedConfig) -> dict[str, Any]:
    if (kind := config.rope_parameters["rope_type"]) != "default":
        raise ValueError(
            f"rope_parameters.rope_type={kind!r}: Phi3's generate starts over with other frequencies where a text"
            " outgrows original_max_position_embeddings; TNT's does not, but a memory can be injected"
        )
    return {"sliding_window": config.sliding_window}


_QWEN = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})

FAMILIES = {
    "llama": Family(_llama, "LlamaTokenizer", harmless=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"})),
    "mistral": Family(_mistral, "TokenizersBackend", harmless=frozenset({"sliding_window"})),
    "qwen2": Family(_qwen2, "Qwen2Tokenizer", harmless=_QWEN),
    "qwen3": Family(_qwen3, "Qwen2Tokenizer", harmless=_QWEN | {"attention_bias"}),
    "phi3": Family(
        _phi3,
        "TokenizersBackend",
        fused={
            "self_attn.qkv_proj.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
            "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        },
        # Dropout acts in training only; the length only matters to the RoPE types refused above.
        harmless=frozenset({"sliding_window", "resid_pdrop", "embd_pdrop", "original_max_position_embeddings"}),
        partial_rotary=True,
    ),
}  # fmt: skip

# Of the same name and meaning in every family and in TNTConfig.
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache",
    "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "attention_dropout",
)  # fmt: skip
# Sizes that are checked before a configuration is made of them, because that already takes room: an upper bound far
# beyond any model there is, and far below what exhausts a machine.
SIZES = {
    "num_hidden_layers": 10_000, "vocab_size": 2**31, "hidden_size": 2**24, "intermediate_size": 2**28,
    "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16,
}  # fmt: skip
# Describe the file, the training or the tokenizer, not the computation.
DESCRIPTIVE = frozenset({
    "head_dim", "dtype", "torch_dtype", "architectures", "model_type", "transformers_version", "auto_map",
    "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "chunk_size_feed_forward", "tokenizer_class", "tie_last_hidden_states", "name_or_path",
    "attn_implementation", "is_heterogeneous", "rope_theta", "rope_scaling", "partial_rotary_factor", "unsloth_fixed",
    "unsloth_version", "model_max_length", "max_sequence_length", "tokenizer_model_max_length", "is_llama_config",
    "transformers.js_config",
})  # fmt: skip
# Fields of TNTConfig that a conversion may set. The backbone is the source's.
SETTABLE = frozenset({
    "allow_memory_gap", "global_chunk_size", "global_read", "local_chunk_sizes", "local_reset_interval",
    "memory_layers", "omega_window", "qk_projection", "qk_projection_norm",
})  # fmt: skip
# The start with the best conversions in our study: a linear memory behind a closed gate; its rate needs no bound.
DEFAULTS = {
    "memory_depth": 1, "memory_residual": False, "memory_projections": "own", "memory_feature_map": "identity",
    "memory_value_norm": True, "memory_gate": "add", "qk_projection": "none", "local_chunk_sizes": [16],
    "memory_momentum": False, "memory_decay": False, "memory_max_lr": 0.5, "memory_lr_scaling": "train_chunk",
    "memory_conv_kernel": 0,
}  # fmt: skip
DEFAULT_CHUNK = 512  # tokens, where no window suggests a size


def family_of(model_type: Any) -> Family:
    """
    The row of a `model_type`.

    Raises:
        ValueError: there is none; lists those there are.
    """
    if model_type == "tnt":
        raise ValueError("model_type='tnt': the source, which is named first, is a TNT model already")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = isinstance(model_type, str) and model_type in ARCHITECTURES
        hint = "; tnt_hf.conversion.inject gives a loaded one a memory" if known else ""
        raise ValueError(f"model_type={model_type!r}: not supported; supported are {', '.join(FAMILIES)}{hint}")
    return FAMILIES[model_type]


def read_source_config(fields: dict[str, Any]) -> PreTrainedConfig:
    """
    The configuration of the library's own class for the fields of a `config.json`; no code of the source is run.

    Raises:
        ValueError: an unsupported architecture, a quantized model, or a value that makes no model. Sizes are checked
            before anything is built from them.
    """
    if (method := fields.get("quantization_config")) is not None:
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ValueError(f"quantization_config={method!r}: needs weights that are not quantized")
    if isinstance(injection := fields.get("tnt_injection"), dict):
        how = "export_injected(load_injected(folder), output) makes a TNT model of it"
        if injection.get("kind") != "tnt":
            how = "unload(load_injected(folder)) is the model without it, which can be saved and converted"
        raise ValueError(f"tnt_injection: the source has an injected memory; {how}")
    text = fields.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in FAMILIES:
        raise ValueError(
            f"model_type={fields.get('model_type')!r}: is a composite model, whose language model"
            f" ({text['model_type']!r}) can be converted: save tnt_hf.conversion.language_model(model)"
        )
    family_of(fields.get("model_type"))
    for name, most in SIZES.items():
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
            raise ValueError(f"{name}={value!r}: must be an integer from 1 to {most}")
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if value is not None and not (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)):
            raise ValueError(f"{name}={value!r}: must be the name of a torch dtype, such as 'bfloat16'")
    types = fields.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(kind, str) for kind in types)):
        raise ValueError(f"layer_types={types!r}: must be a list of names, one a layer")
    try:
        return CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    except Exception as error:  # strict configurations raise a handful of unrelated types for a bad value
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def tnt_config(
    source_config: PreTrainedConfig,
    /,
    *,
    window: int | None = None,
    keep_full_attention: list[int] | None = None,
    **fields: Any,
) -> TNTConfig:
    """
    The [`TNTConfig`] whose base computes exactly what the source computes, with a closed memory.

    Args:
        source_config: of one of [`FAMILIES`].
        window: keys every query sees (tokens), itself included; `None` keeps the source's attention, windows
            included. With a window W the result equals the source at every position < W.
        keep_full_attention: layers that the window does not apply to. They attend to everything.
        fields: of the memory, such as `memory_layers` or `global_chunk_size`.

    Raises:
        ValueError: an unsupported `model_type`; a source field that changes the computation in a way TNT cannot
            follow; an impossible window, layer or field. Names the field and the value.
    """
    family = family_of(getattr(source_config, "model_type", None))
    _refuse_what_is_not_understood(source_config, family)
    _check_rope(source_config, family)
    padding, vocabulary = source_config.pad_token_id, source_config.vocab_size
    if padding is not None and not -vocabulary <= padding < vocabulary:
        raise ValueError(f"pad_token_id={padding}: vocab_size={vocabulary} has no such token")
    base = {name: copy.deepcopy(getattr(source_config, name)) for name in SAME}
    base["head_dim"] = getattr(source_config, "head_dim", None)
    base |= {"dtype": source_config.dtype} | family.translate(source_config)
    base |= _attention(base, window, keep_full_attention)
    if base["rope_parameters"].get("partial_rotary_factor", ...) is None:
        del base["rope_parameters"]["partial_rotary_factor"]
    for name in fields:
        if not (name in SETTABLE or name.startswith("memory_")) or name not in TNTConfig.__dataclass_fields__:
            what = "is taken from the source"
            if name not in TNTConfig.__dataclass_fields__:
                near = get_close_matches(name, TNTConfig.__dataclass_fields__, n=1)
                what = "TNTConfig has no such field" + (f"; did you mean {near[0]!r}?" if near else "")
            raise ValueError(f"{name}={fields[name]!r}: {what}")
    return TNTConfig(**base, **memory_fields(window or base["sliding_window"], fields))


def _refuse_what_is_not_understood(config: PreTrainedConfig, family: Family) -> None:
    """Every field that differs from its class's default must be one we translate or know to change nothing."""
    defaults = type(config)().to_dict()
    known = DESCRIPTIVE | family.harmless | set(SAME)
    for name, value in config.to_dict().items():
        if name in known or name.startswith("_") or value is None or value == defaults.get(name):
            continue
        if value is False and name != "is_causal":  # what is off does nothing; the library's masks ask for this one
            continue
        raise ValueError(
            f"{name}={value!r}: unknown for model_type={config.model_type!r}; what it changes would be lost. If it"
            " changes nothing, remove it from config.json"
        )


def _check_rope(config: PreTrainedConfig, family: Family) -> None:
    """RoPE of one kind for all layers, and numbers from which frequencies can be made."""
    rope = config.rope_parameters
    if rope is None or not isinstance(rope.get("rope_type"), str):
        raise ValueError(f"rope_parameters={rope!r}: must be one flat dict with a rope_type")
    for name, value in rope.items():
        # the sections are of pictures, and a text model that was taken out of a model with them does not read them
        if name in ("rope_type", "type", "mrope_section") or value is None or isinstance(value, bool):
            continue
        many = name in ("short_factor", "long_factor")  # one for every pair of channels
        if many != isinstance(value, list) or not all(map(_is_finite, value if many else [value])):
            what = "a list of finite numbers" if many else "a finite number"
            raise ValueError(f"rope_parameters.{name}={value!r}: must be {what}")
    for name in ("rope_theta", "factor"):
        if rope.get(name) is not None and rope[name] <= 0:
            raise ValueError(f"rope_parameters.{name}={rope[name]!r}: must be positive")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(width * (rope.get("partial_rotary_factor") or 1)) // 2
    for name in ("short_factor", "long_factor"):
        value = rope.get(name)
        if rope["rope_type"] == "longrope" and value is not None and len(value) != pairs:
            raise ValueError(f"rope_parameters.{name}={value!r}: must have {pairs} numbers, one a frequency")
    # The library moves a factor at the top level into rope_parameters, but not one that a configuration got later.
    for where, holder in (("rope_parameters.", rope), ("", vars(config))):
        factor = holder.get("partial_rotary_factor")
        if factor not in (None, 1) and not family.partial_rotary:
            raise ValueError(f"{where}partial_rotary_factor={factor!r}: {config.model_type} rotates all channels")


def _is_finite(number: Any) -> bool:
    # Compared, because an integer beyond every float cannot be converted.
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= sys.float_info.max


def _attention(base: dict[str, Any], window: int | None, full_layers: list[int] | None) -> dict[str, Any]:
    """`sliding_window` and `layer_types`: the source's, or narrowed to `window` outside `full_layers`, and a note that
    they are."""
    count, own = base["num_hidden_layers"], base["sliding_window"]
    types = base.get("layer_types") or ["full_attention" if own is None else "sliding_attention"] * count
    if own is None and (sliding := [i for i, kind in enumerate(types) if kind == "sliding_attention"]):
        raise ValueError(
            f"sliding_window=None: layers {sliding} of the source are 'sliding_attention', which needs one"
        )
    if window is None:
        if full_layers is not None:
            raise ValueError(f"keep_full_attention={full_layers!r}: needs a window for the other layers")
        return {"sliding_window": own, "layer_types": types}
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window < 2**31:
        raise ValueError(f"window={window!r}: must be an integer of 1 to {2**31 - 1} (tokens) or None")
    if not isinstance(full_layers, list | tuple | None):
        raise ValueError(f"keep_full_attention={full_layers!r}: must be a list of layers")
    keep = list(full_layers or ())
    bad = [i for i in keep if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count]
    if bad or len(set(keep)) < len(keep):
        raise ValueError(f"keep_full_attention={full_layers!r}: must be distinct layer indices in [0, {count})")
    if wider := [i for i, kind in enumerate(types) if kind == "sliding_attention" and window > own]:
        raise ValueError(f"window={window}: layers {wider} of the source only see {own} tokens")
    narrowed = {} if "sliding_attention" in types and window == own else {"window_narrowed": True}
    types = ["full_attention" if i in keep else "sliding_attention" for i in range(count)]
    return {"sliding_window": window if "sliding_attention" in types else None, "layer_types": types} | narrowed


def memory_fields(window: int | None, fields: dict[str, Any]) -> dict[str, Any]:
    """
    Fields of the memory in a pretrained model whose attention sees `window` tokens (`None`: all): those given, our
    defaults for the others, and intervals that fit the chunks.
    """
    memory = DEFAULTS | fields
    if "memory_gate_init" not in fields and memory["memory_gate"] in ("add", "mix"):
        memory["memory_gate_init"] = 0.0
    size = memory.setdefault("global_chunk_size", window or DEFAULT_CHUNK)
    if "local_reset_interval" not in fields:
        sizes = memory["local_chunk_sizes"]
        sizes = sizes if isinstance(sizes, list | tuple) else [sizes]
        if all(isinstance(n, int) and n > 0 for n in [size or 1, *sizes]):  # if not, TNTConfig says what is wrong
            # A reset loses nothing where the global memory has just written, and local chunks end there.
            memory["local_reset_interval"] = math.lcm(4 * (size or DEFAULT_CHUNK), *sizes)
    return memory


def base_shapes(config: TNTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a converted model outside its memories; `lm_head.weight` also where tied."""
    V, E, F, D = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    Q, K = config.num_attention_heads * D, config.num_key_value_heads * D
    output_bias = config.attention_bias if config.attention_output_bias is None else config.attention_output_bias
    linear = {
        "self_attn.q_proj": (Q, E, config.attention_bias),
        "self_attn.k_proj": (K, E, config.attention_bias),
        "self_attn.v_proj": (K, E, config.attention_bias),
        "self_attn.o_proj": (E, Q, output_bias),
        "mlp.gate_proj": (F, E, config.mlp_bias),
        "mlp.up_proj": (F, E, config.mlp_bias),
        "mlp.down_proj": (E, F, config.mlp_bias),
    }
    yield "model.embed_tokens.weight", (V, E)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        for name, (rows, columns, bias) in linear.items():
            yield f"{layer}{name}.weight", (rows, columns)
            if bias:
                yield f"{layer}{name}.bias", (rows,)
        if config.qk_norm:
            yield f"{layer}self_attn.q_norm.weight", (D,)
            yield f"{layer}self_attn.k_norm.weight", (D,)
        yield f"{layer}input_layernorm.weight", (E,)
        yield f"{layer}post_attention_layernorm.weight", (E,)
    yield "model.norm.weight", (E,)
    yield "lm_head.weight", (V, E)
