"""A family's row: every field of a source configuration is translated, known to be harmless, or refused."""

import math
import re

import pytest
from checkpoints import CASES, FUSED, LONGROPE, SIZES, source_model
from transformers import CONFIG_MAPPING

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import convert_checkpoint
from tnt_hf.conversion.families import FAMILIES, base_shapes, read_source_config, tnt_config


def source_config(case="llama", **changes):
    model_type, fields = (CASES | FUSED)[case]
    return CONFIG_MAPPING[model_type](**{**SIZES, **fields, **changes})


@pytest.mark.parametrize("case", CASES | FUSED)
def test_base_shapes_are_those_of_both_models(case):
    source = source_model(case)
    shapes = dict(base_shapes(tnt_config(source.config)))
    result = TNTForCausalLM(tnt_config(source.config))
    assert {name: tuple(x.shape) for name, x in result.state_dict().items() if ".memory." not in name} == shapes
    if case in CASES:
        assert {name: tuple(x.shape) for name, x in source.state_dict().items()} == shapes


@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_a_model_without_a_head_is_told_by_its_names(case, tmp_path):
    source_model(case).model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="unknown tensor '.*'; its names are those of a model without a head"):
        convert_checkpoint(tmp_path / "source", tmp_path / "result")


@pytest.mark.parametrize("case", CASES | FUSED)
def test_a_configuration_survives_json(case):
    config = source_config(case)
    again = read_source_config(config.to_dict())
    assert tnt_config(again).to_dict() == tnt_config(config).to_dict()


def test_what_a_conversion_starts_with():
    config = tnt_config(source_config())
    assert config.memory_depth == 1 and config.memory_gate_init == 0 and config.memory_projections == "own"
    assert config.layer_types == ["hybrid"] * 3 and config.sliding_window is None
    assert [spec.chunk_size for spec in config.memory_specs] == [512, 16]
    config = tnt_config(source_config(), window=256, memory_layers=[1], memory_gate="product", memory_depth=2)
    assert config.layer_types == ["sliding_attention", "hybrid_sliding", "sliding_attention"]
    assert config.memory_gate_init is None and config.global_chunk_size == config.sliding_window == 256
    assert tnt_config(source_config("mistral, window")).global_chunk_size == 5


@pytest.mark.parametrize("window", [1, 2, 7, 37, 512])
@pytest.mark.parametrize("sizes", [[16], [8, 12], 5, []])
def test_chunks_and_resets_fit_every_window(window, sizes):
    config = tnt_config(source_config(), window=window, local_chunk_sizes=sizes)
    for spec in config.memory_specs:
        assert spec.reset_interval is None or spec.reset_interval % math.lcm(4 * window, spec.chunk_size) == 0


def test_windows_and_kept_layers():
    qwen = source_config("qwen3, tied, biases, window in some layers")  # 5 tokens in layers 1 and 2
    types = lambda config: [kind.removeprefix("hybrid_").replace("hybrid", "full") for kind in config.layer_types]  # noqa: E731
    assert types(tnt_config(qwen)) == ["full", "sliding", "sliding"]
    narrow = tnt_config(qwen, window=3, keep_full_attention=[2])
    assert types(narrow) == ["sliding", "sliding", "full"] and narrow.sliding_window == 3
    kept = tnt_config(qwen, window=3, keep_full_attention=[0, 1, 2])
    assert types(kept) == ["full"] * 3 and kept.sliding_window is None
    for kept in (None, [0], [1, 2]):  # to keep is no way to see more than the source, either
        with pytest.raises(ValueError, match=r"window=6: layers \[1, 2\] of the source only see 5"):
            tnt_config(qwen, window=6, keep_full_attention=kept)
    assert narrow.window_narrowed and not tnt_config(qwen).window_narrowed
    assert not tnt_config(qwen, window=5).window_narrowed  # of some layers its own, and one mask serves them all
    unused = source_config("qwen3, tied, biases, window in some layers", layer_types=["full_attention"] * 3)
    assert unused.sliding_window == 5 and tnt_config(unused, window=5).window_narrowed
    with pytest.raises(ValueError, match="needs a window"):
        tnt_config(qwen, keep_full_attention=[0])
    for value in (0, -1, True, 2.0, "8"):
        with pytest.raises(ValueError, match="window="):
            tnt_config(qwen, window=value)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": 0.0625},
        {"attn_logit_softcapping": 50.0},
        {"embedding_multiplier": 12},
        {"no_rope_layers": [0, 1, 1]},
        {"is_encoder_decoder": True},
        {"per_layer_config": {0: {"intermediate_size": 64}}},
    ],
)
def test_a_field_nobody_knows_is_refused_by_name(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        tnt_config(read_source_config({"model_type": "llama", **SIZES, **changes}))


def test_descriptive_fields_are_no_obstacle():
    fields = {"model_type": "llama", **SIZES, "torch_dtype": "bfloat16", "_name_or_path": "x", "rope_scaling": None}
    fields |= {
        "rope_theta": 5e5,
        "pretraining_tp": 1,
        "transformers_version": "4.30",
        "unsloth_version": "1",
        "is_llama_config": True,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "x": None,
    }
    config = tnt_config(read_source_config(fields))
    assert str(config.dtype) == "torch.bfloat16" and config.rope_parameters["rope_theta"] == 5e5


def test_phi3_with_two_sets_of_frequencies_is_refused():
    config = source_config("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=16)
    with pytest.raises(ValueError, match="rope_parameters.rope_type='longrope'"):
        tnt_config(config)


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_partial_rotary_factor_counts_wherever_it_stands(model_type, factor):
    fields = {"model_type": model_type, **SIZES, "partial_rotary_factor": factor}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    inside = {**fields, "rope_parameters": rope | {"partial_rotary_factor": factor}}
    del inside["partial_rotary_factor"]
    later = read_source_config({"model_type": model_type, **SIZES})
    later.partial_rotary_factor = factor
    for config in (read_source_config(fields), read_source_config(fields | {"rope_parameters": rope})):
        assert config.rope_parameters["partial_rotary_factor"] == factor
    for config in (read_source_config(fields), read_source_config(inside), later):
        if factor == 1 or model_type == "phi3":
            assert tnt_config(config).rope_parameters == config.rope_parameters
            continue
        with pytest.raises(ValueError, match=f"partial_rotary_factor=0.5: {model_type} rotates all channels"):
            tnt_config(config)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", [[], ["a"], math.nan, "x", "nn", {}, 3])
def test_a_dtype_that_is_none(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}: must be the name of a torch dtype")):
        read_source_config({"model_type": "llama", **SIZES, field: value})


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("value", [3, True, "full_attention", [["full_attention"]] * 3])
def test_layer_types_that_are_none(model_type, value):
    with pytest.raises(ValueError, match=re.escape(f"layer_types={value!r}: must be a list of names")):
        read_source_config({"model_type": model_type, **SIZES, "layer_types": value})


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "rope, message",
    [
        (LINEAR | {"factor": [2.0]}, "factor=[2.0]: must be a finite number"),
        (LINEAR | {"rope_theta": [1e4]}, "rope_theta=[10000.0]: must be a finite number"),
        (LINEAR | {"rope_theta": 10**400}, "rope_theta=1000"),
        (LINEAR | {"partial_rotary_factor": [1]}, "partial_rotary_factor=[1]: must be a finite number"),
        (LINEAR | {"long_factor": 2.0}, "long_factor=2.0: must be a list of finite numbers"),
        (LONGROPE | {"short_factor": [None] * 4}, "short_factor=[None, None, None, None]: must be a list of finite"),
        (LONGROPE | {"long_factor": [1.0, 2.0, True, 4.0]}, "long_factor=[1.0, 2.0, True, 4.0]: must be a list"),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else "",
)
def test_numbers_of_which_no_frequencies_can_be_made(rope, message):
    with pytest.raises(ValueError, match=re.escape(f"rope_parameters.{message}")):
        tnt_config(source_config(rope_parameters=rope))


def test_sections_of_pictures_mean_nothing_to_a_text_model():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    assert tnt_config(source_config("qwen2", rope_parameters=rope)).rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_sliding_layers_without_a_window(model_type, window):
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    config = source_config(model_type, use_sliding_window=False, sliding_window=5, layer_types=types)
    with pytest.raises(ValueError, match=r"sliding_window=None: layers \[1, 2\] of the source"):
        tnt_config(config, window=window)


def test_unsupported_architectures_list_the_supported():
    for model_type in ("gpt2", "gemma3_text", None):
        with pytest.raises(ValueError, match=", ".join(FAMILIES)):
            read_source_config({"model_type": model_type})
    with pytest.raises(ValueError, match="already"):
        tnt_config(tnt_config(source_config()))


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "variant", "num_persistent_tokens", "sliding_window"])
def test_the_backbone_is_the_sources(name):
    with pytest.raises(ValueError, match=f"{name}=3: is taken from the source"):
        tnt_config(source_config(), **{name: 3})


@pytest.mark.parametrize("kind, advice", [("tnt", "export_injected"), ("liza", "unload")])
def test_an_injected_source_is_told_what_can_be_done(kind, advice):
    with pytest.raises(ValueError, match=f"tnt_injection: the source has an injected memory; {advice}"):
        read_source_config({"model_type": "llama", "tnt_injection": {"kind": kind}})
