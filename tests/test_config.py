"""TNTConfig: what it resolves, what survives a round trip, and everything it refuses by name and value."""

import importlib.metadata
import importlib.util
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from checkpoints import LONGROPE
from tiny import MODES, TINY, tiny_config
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from tnt_hf import TNTConfig, TNTForCausalLM, configuration_tnt, flops_per_token, memory_state_bytes
from tnt_hf.costs_tnt import key_value_bytes, memory_state_shapes
from tnt_hf.step_settings_tnt import lr_factors


@pytest.mark.parametrize("found", ["4.57.1", "5.22.0"])
def test_an_older_transformers_is_named_before_what_it_lacks(monkeypatch, found):
    """Whoever loads a model from the Hub may have any; this file is the first that is run for them."""
    spec = importlib.util.spec_from_file_location("loaded_from_the_hub", configuration_tnt.__file__)
    (floor,) = re.findall(r'"transformers(>=[\d.]+),', (Path(__file__).parents[1] / "pyproject.toml").read_text())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=rf"transformers{floor} is required .* found transformers=={found}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_list_stays_its_owners():
    sizes = [8, 16]
    config = tiny_config(local_chunk_sizes=sizes)
    sizes.append(32)
    assert config.local_chunk_sizes == [8, 16]
    assert tiny_config(local_chunk_sizes=(4, 8)).local_chunk_sizes == [4, 8]


def test_memory_in_all_layers_is_no_list_of_them():
    config = tiny_config()
    assert config.memory_layers is None and TNTConfig(**config.to_dict()).memory_layers is None
    none = TNTConfig(num_hidden_layers=2, layer_types=["hybrid"] * 2, global_chunk_size=None, local_chunk_sizes=[])
    assert none.layer_types == ["full_attention"] * 2 and none.memory_layer_indices == []


def test_defaults_follow_the_design():
    config = TNTConfig()
    assert config.memory_projections == "own" and config.memory_conv_kernel == 4 and config.memory_value_norm
    assert not config.memory_residual and not config.memory_momentum and not config.memory_decay
    assert config.memory_depth == 2 and config.memory_max_lr == 0.1 and config.memory_lr_scaling == "capped"
    assert config.memory_gate == "add" and config.memory_gate_init == 1.0
    assert config.qk_projection == "shard" and config.qk_projection_norm and config.global_read == "chunk_start"
    assert (config.global_chunk_size, config.local_chunk_sizes, config.local_reset_interval) == (2048, [8, 16], 2048)
    assert config.layer_types == ["hybrid_sliding"] * config.num_hidden_layers
    assert TNTConfig(memory_depth=1).memory_max_lr == 0.5
    assert TNTConfig(memory_projections="shared").memory_conv_kernel == 0
    assert TNTConfig(memory_gate="mix").memory_gate_init == 0.5


@pytest.mark.parametrize("changes", MODES.values(), ids=MODES.keys())
def test_round_trip(changes, tmp_path):
    changes = {name: value for name, value in changes.items() if name != "attn_implementation"}
    config = tiny_config(**changes)
    config.save_pretrained(tmp_path)
    for again in (TNTConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(again) is TNTConfig and again.to_diff_dict() == config.to_diff_dict()
        assert again.memory_layer_indices == config.memory_layer_indices
    assert TNTConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_overrides_on_loading_are_resolved_and_validated(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    config = TNTConfig.from_pretrained(tmp_path, memory_layers=[0], local_chunk_sizes=4, sliding_window=8)
    assert config.layer_types == ["hybrid_sliding", "sliding_attention"] and config.local_chunk_sizes == [4]
    assert TNTConfig.from_pretrained(tmp_path, memory_gate="mix").memory_gate_init == 0.5
    assert TNTConfig.from_pretrained(tmp_path, memory_gate="product").memory_gate_init is None
    assert TNTConfig.from_pretrained(tmp_path, memory_depth=1).memory_max_lr == 0.5
    assert TNTConfig.from_pretrained(tmp_path, memory_depth=1, memory_max_lr=0.2).memory_max_lr == 0.2
    assert TNTConfig.from_pretrained(tmp_path, memory_projections="shared").memory_conv_kernel == 0
    tiny_config(memory_max_lr=0.3).save_pretrained(tmp_path / "own")
    assert TNTConfig.from_pretrained(tmp_path / "own", memory_depth=1).memory_max_lr == 0.3  # was no default
    with pytest.raises(ValueError, match=r"local_chunk_sizes=\[3\]"):
        TNTConfig.from_pretrained(tmp_path, local_chunk_sizes=[3])
    with pytest.raises(ValueError, match="memory_gate='loud'"):
        AutoConfig.from_pretrained(tmp_path, memory_gate="loud")
    config.local_chunk_sizes = [5]
    with pytest.raises(ValueError, match=r"local_chunk_sizes=\[5\]"):
        TNTForCausalLM(config)


def test_variant_on_loading_is_ours_or_the_librarys(tmp_path):
    """Our field has the name of the library's option for the names of weight files."""
    model = TNTForCausalLM(tiny_config(variant="mal"))
    model.save_pretrained(tmp_path, variant="fp16")
    assert (tmp_path / "model.fp16.safetensors").is_file()
    for auto in (AutoModelForCausalLM, TNTForCausalLM):
        loaded, report = auto.from_pretrained(tmp_path, variant="fp16", output_loading_info=True)
        assert loaded.config.variant == "mal" and not any(report.values())
        assert loaded.lm_head.weight.equal(model.lm_head.weight)
    with pytest.raises(OSError, match="model.nonsense.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path, variant="nonsense")

    assert AutoConfig.from_pretrained(tmp_path, variant="lmm").variant == "lmm"
    for load in (AutoConfig.from_pretrained, TNTConfig.from_pretrained):
        with pytest.raises(ValueError, match="TNTConfig.variant='nonsense': must be one of 'mag'"):
            load(tmp_path, variant="nonsense")


def test_layer_types_and_memory_layers():
    def types(**changes):
        return tiny_config(num_hidden_layers=3, **changes).layer_types

    assert types(memory_layers=[2]) == ["sliding_attention", "sliding_attention", "hybrid_sliding"]
    assert types(memory_layers=[]) == ["sliding_attention"] * 3
    assert types(sliding_window=None, memory_layers=[0]) == ["hybrid", "full_attention", "full_attention"]
    assert types(layer_types=["full_attention", "sliding_attention", "full_attention"])[:2] == [
        "hybrid",
        "hybrid_sliding",
    ]
    mixed = tiny_config(num_hidden_layers=2, layer_types=["hybrid", "sliding_attention"])
    assert mixed.memory_layers == [0] and mixed.layer_types == ["hybrid", "sliding_attention"]
    assert types(global_chunk_size=None, local_chunk_sizes=[]) == ["sliding_attention"] * 3
    assert types(variant="lmm", sliding_window=None) == ["hybrid_sliding"] * 3


def test_memory_specs():
    config = tiny_config(local_reset_interval=[None, 16])
    assert [(s.name, s.chunk_size, s.reset_interval, s.read, s.query_projection) for s in config.memory_specs] == [
        ("global", 8, None, "chunk_start", "none"),
        ("local", 2, None, "current", "shard"),
        ("local", 4, 16, "current", "shard"),
    ]
    assert config.memory_projection_intervals == [None, 16]
    assert tiny_config().memory_projection_intervals == [16]  # memories of one interval share one M
    assert tiny_config(qk_projection="chunk").memory_projection_intervals == [2, 4]
    assert tiny_config(qk_projection="none").memory_projection_intervals == []
    assert [
        s.name
        for s in tiny_config(global_chunk_size=None, local_chunk_sizes=3, local_reset_interval=None).memory_specs
    ]


INVALID = [
    # every field on its own
    *[{name: -1} for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")],
    *[
        {name: 0}
        for name in ("sliding_window", "intermediate_size", "memory_depth", "memory_num_heads", "memory_head_dim")
    ],
    *[{name: 0} for name in ("num_key_value_heads", "global_chunk_size", "local_reset_interval", "memory_max_lr")],
    *[{"rms_norm_eps": value} for value in (math.nan, math.inf, 0, -1e-6)],
    *[{"memory_max_lr": value} for value in (math.nan, -0.1)],
    *[
        {"initializer_range": math.nan},
        {"memory_expansion": 0},
        {"memory_grad_bound": 0.0},
        {"memory_grad_bound": math.inf},
        *[{name: 1e-39} for name in ("memory_grad_bound", "memory_max_lr", "rms_norm_eps")],  # no float32
    ],
    *[{"attention_dropout": 1.5}, {"attention_dropout": -0.1}, {"attention_dropout": math.nan}],
    *[{"num_persistent_tokens": -1}, {"memory_conv_kernel": -1}, {"hidden_act": "sillu"}],
    *[
        {"local_chunk_sizes": [0]},
        {"local_chunk_sizes": [2, -4]},
        {"local_chunk_sizes": True},
        {"num_hidden_layers": True},
    ],
    *[{"memory_layers": [2]}, {"memory_layers": [-1]}, {"memory_layers": [0, 0]}],
    *[{"rope_parameters": {"rope_type": kind}} for kind in ("spiral", ["default"])],
    *[{"rope_parameters": {"rope_type": kind, "factor": None}} for kind in ("linear", "dynamic", "llama3")],
    *[{"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}],
    *[{"rope_parameters": LONGROPE | {name: [1.0] * 7}} for name in ("short_factor", "long_factor")],
    *[{"rope_parameters": {"rope_type": kind}} for kind in ("linear", "yarn", "llama3", "longrope")],  # no factor
    # unknown and not yet available names
    *[{name: "unknown"} for name in ("variant", "qk_projection", "global_read", "memory_projections", "memory_gate")],
    *[{name: "unknown"} for name in ("memory_activation", "memory_decay_target", "memory_lr_scaling", "memory_rule")],
    *[{name: "unknown"} for name in ("memory_feature_map", "memory_implementation")],
    *[{"variant": "mac"}, {"memory_rule": "omega"}, {"memory_rule": "muon"}, {"omega_window": 2}],
    {"memory_feature_map": "polynomial"},
    {"memory_residual": True, "memory_feature_map": "quadratic"},
    # wrong types
    *[
        {"hidden_size": "32"},
        {"hidden_size": 32.0},
        {"memory_max_lr": "x"},
        {"local_chunk_sizes": ["2"]},
        {"variant": None},
    ],
    # combinations
    *[{"num_attention_heads": 3}, {"num_key_value_heads": 3}, {"num_attention_heads": 5, "head_dim": 8}],
    *[{"head_dim": 7}, {"memory_head_dim": 7}, {"memory_num_heads": 3}, {"memory_expansion": 1.3}],
    {"memory_expansion": 1e300},
    *[{"memory_num_heads": 4, "memory_projections": "shared"}, {"memory_projections": "shared", "variant": "lmm"}],
    *[{"layer_types": ["sliding_attention"]}, {"layer_types": ["hybrid", "linear_attention"]}],
    *[{"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]}],
    *[{"memory_layers": [0], "global_chunk_size": None, "local_chunk_sizes": []}],
    *[{"variant": name, "global_chunk_size": None, "local_chunk_sizes": []} for name in ("lmm", "mal")],
    *[{"local_chunk_sizes": [3]}, {"local_reset_interval": [16]}, {"local_reset_interval": 12}],
    *[{"local_reset_interval": 12, "variant": "lmm", "sliding_window": 8}],
    *[{"memory_gate": "mix", "variant": "mal"}, {"memory_gate": "published", "variant": "lmm"}],
    *[{"memory_gate_init": 0.5, "memory_gate": "product"}, {"memory_gate_init": 1.5, "memory_gate": "mix"}],
    *[{"memory_gate_init": 1e300}, {"memory_gate_init": math.nan}, {"num_persistent_tokens": 1, "variant": "lmm"}],
    *[{"memory_train_chunk_sizes": [8]}],
    # integers that torch cannot take
    *[{name: 10**30} for name in ("rms_norm_eps", "initializer_range", "memory_gate_init", "memory_grad_bound")],
    *[{name: 10**400} for name in ("memory_expansion", "memory_max_lr")],
]


@pytest.mark.parametrize("changes", INVALID, ids=str)
def test_invalid_values_name_the_field_and_the_value(changes):
    with pytest.raises(ValueError) as error:
        tiny_config(**changes)
    message = str(error.value)
    named = re.match(r"TNTConfig\.(\w+)=", message)
    assert named, message
    assert named[1] in changes or named[1] in {"num_attention_heads", "memory_head_dim", "local_reset_interval"}, (
        message
    )
    if named[1] in changes:
        value = changes[named[1]]
        assert any(repr(x) in message for x in (value, *(value if isinstance(value, list) else []))), message


@pytest.mark.parametrize(
    "name, value",
    [
        (name, value)
        for name in ("rope_theta", "factor", "attention_factor", "partial_rotary_factor")
        for value in (0, -5.0, "1e4", True, math.inf, 10**30)
    ]
    + [("rope_theta", None), ("partial_rotary_factor", None), ("full_attention", {"rope_theta": 1e4})]
    + [("partial_rotary_factor", x) for x in (1.1, 2)],
)
def test_numbers_of_rope_are_checked_before_it_is_computed(name, value):
    with pytest.raises(ValueError, match=re.escape(f"TNTConfig.rope_parameters.{name}={value!r}: must be one ")):
        tiny_config(rope_parameters={"rope_type": "linear", "factor": 2.0, name: value})
    with pytest.raises(ValueError, match="rope_theta=0"):
        tiny_config(rope_theta=0)  # as older files have it


PLACES = {x: torch.device(x) for x in ("cpu", "meta", "cuda")} | {"fake tensors": FakeTensorMode()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rope", [*({"rope_type": x} for x in ("linear", "dynamic", "yarn")), LONGROPE], ids=str)
def test_rope_is_computed_for_the_check_wherever_a_model_is_made(rope, place):
    with PLACES[place]:
        tiny_config(rope_parameters={"factor": 2.0} | rope)


def test_the_memory_gap_is_named_in_tokens():
    with pytest.raises(ValueError, match=r"local_reset_interval=12.*global_chunk_size=8.*up to 4 tokens"):
        tiny_config(local_reset_interval=12)
    for accepted in (
        {"sliding_window": 8},
        {"sliding_window": None},
        {"global_read": "current"},
        {"allow_memory_gap": True},
    ):
        tiny_config(local_reset_interval=12, **accepted)
    tiny_config(local_reset_interval=None)  # never forgets: no gap
    tiny_config(local_reset_interval=12, global_chunk_size=None)


def test_a_closed_gate_over_shared_projections_warns():
    with pytest.warns(UserWarning, match="hardly wakes"):
        tiny_config(memory_projections="shared", memory_gate_init=0.0)
    with pytest.warns(UserWarning, match="hardly wakes"):
        tiny_config(memory_projections="shared", memory_gate="product")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_config(memory_projections="shared")
        tiny_config(memory_gate_init=0.0)


def test_memory_state_bytes_match_a_hand_count():
    config = tiny_config()
    # 2 heads, two 8 x 8 layers: W_t and W_xi of 3 memories, one M per head; time; 3 inputs of 32 + 16 + 16 channels
    floats = 3 * 2 * (2 * 2 * 8 * 8) + 2 * 8 * 8
    assert memory_state_bytes(config) == 2 * (4 * floats + 8 + 4 * 3 * 64)
    assert memory_state_bytes(config, "bfloat16") == 2 * (4 * floats + 8 + 2 * 3 * 64)
    assert memory_state_bytes(config, "float64") == 2 * (8 * floats + 8 + 8 * 3 * 64)
    assert memory_state_bytes(tiny_config(memory_layers=[])) == 0
    with pytest.raises(ValueError, match="dtype='int8'"):
        memory_state_bytes(config, "int8")
    with pytest.raises(ValueError, match="context=-5"):
        flops_per_token(config, -5)
    with pytest.raises(ValueError, match="context=nan"):
        flops_per_token(config, float("nan"))
    assert [name for name, _ in memory_state_shapes(tiny_config(local_chunk_sizes=[1], memory_depth=1))] == [
        "conv", "0.weights.0", "0.chunk_weights.0", "1.weights.0", "projection.16", "time",
    ]  # fmt: skip


def test_flops_match_a_hand_count():
    config = tiny_config(memory_depth=1, local_chunk_sizes=[2], num_hidden_layers=1)
    q, kv, h = 32, 16, 32
    P, H, n = 64, 2, 4
    memory = 2 * (H * (6 * P - 2 * P) + 2 * n * P + 2 * h * H)  # write, read, lr gate of two memories
    memory += 2 * H * 64 + 2 * n * 64  # Q-K projection
    memory += 2 * h * (q + 2 * kv) + 2 * 4 * (q + 2 * kv) + 2 * h * 4  # projections, convolution, gate
    found = flops_per_token(config, 1000)
    assert found["memory"] == memory
    assert found["attention"] == 4 * q * 4
    assert found["base"] == 2 * (h * (q + 2 * kv) + q * h + 3 * h * TINY["intermediate_size"] + h * TINY["vocab_size"])
    assert found["total"] == found["base"] + found["attention"] + memory
    assert flops_per_token(tiny_config(sliding_window=None), 1000)["attention"] == 2 * 4 * q * 1000
    one_tap, none = [flops_per_token(tiny_config(memory_conv_kernel=taps), 1000) for taps in (1, 0)]
    assert one_tap == none, "a kernel of one tap is no convolution"


def test_flops_of_a_memory_in_the_place_of_attention():
    """The layer that has one has no attention; the others have."""
    sizes = {"num_hidden_layers": 3, "memory_layers": [1]}
    beside, alone = [flops_per_token(tiny_config(variant=variant, **sizes), 1000) for variant in ("mag", "lmm")]
    q, kv, h, window = 32, 16, 32, 4
    assert (beside["attention"], alone["attention"]) == (3 * 4 * q * window, 2 * 4 * q * window)
    assert beside["base"] - alone["base"] == 2 * (h * (q + 2 * kv) + q * h)


def test_training_chunk_sizes_stay_with_the_number_of_memories(tmp_path):
    """The rates of a checkpoint do not change with its chunk sizes; another number of memories is another model."""
    tiny_config().save_pretrained(tmp_path)
    assert TNTConfig.from_pretrained(tmp_path, local_chunk_sizes=[1, 1]).memory_train_chunk_sizes == [8, 2, 4]
    assert TNTConfig.from_pretrained(tmp_path, local_chunk_sizes=[4]).memory_train_chunk_sizes == [8, 4]
    assert TNTConfig.from_pretrained(tmp_path, global_chunk_size=None).memory_train_chunk_sizes == [2, 4]


@pytest.mark.parametrize(
    "scaling, factors", [("none", [1, 1, 1]), ("train_chunk", [1 / 16, 1 / 4, 1 / 8]), ("capped", [1 / 4, 1, 1])]
)
def test_rates_are_scaled_by_the_chunk_they_were_trained_with(scaling, factors):
    sizes = {"global_chunk_size": 256, "local_chunk_sizes": [16, 64], "local_reset_interval": 256}
    assert lr_factors(tiny_config(**sizes, memory_lr_scaling=scaling)) == factors
    trained = {"local_chunk_sizes": [1, 1], "memory_train_chunk_sizes": [256, 16, 64]}
    assert lr_factors(tiny_config(**sizes | trained, memory_lr_scaling=scaling)) == factors


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("local_chunk_sizes", [0, 2], "local_chunk_sizes"),
        ("memory_depth", 0, "memory_depth"),
        ("sliding_window", 0, "sliding_window"),
        ("memory_layers", [5], "memory_layers"),
        ("num_hidden_layers", 3, "layer_types"),
        ("num_persistent_tokens", -1, "num_persistent_tokens"),
        ("local_reset_interval", [16], "local_reset_interval"),
        ("layer_types", ["full_attention"] * 2, None),
        ("head_dim", None, None),
        ("memory_max_lr", None, None),
    ],
)
def test_fields_that_were_assigned_are_checked_and_filled_in_when_a_model_is_made(field, value, message):
    config = tiny_config(local_chunk_sizes=[2, 4])
    setattr(config, field, value)
    if message is None:
        model, ids = TNTForCausalLM(config).eval(), torch.arange(2, 9)[None]
        assert torch.isfinite(model(ids).logits).all() and model.generate(ids, max_new_tokens=2).shape == (1, 9)
    else:
        with pytest.raises(ValueError, match=f"TNTConfig.{message}"):
            TNTForCausalLM(config)


@pytest.mark.parametrize(
    "field, value",
    [("memory_depth", 0), ("memory_gate", "gated"), ("local_chunk_sizes", [0]), ("local_chunk_sizes", []),
     ("layer_types", ["window"]), ("num_attention_heads", 0), ("sliding_window", -1), ("rms_norm_eps", -1.0)],
)  # fmt: skip
def test_fields_that_were_assigned_are_checked_on_saving(field, value, tmp_path):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=r"^TNTConfig\."):
        config.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["fp32", "bf16", [1], 3])
def test_dtypes_are_torchs(field, value):
    with pytest.raises(ValueError, match=re.escape(f"TNTConfig.dtype={value!r}: must be the name of a torch dtype")):
        tiny_config(**{field: value})
    assert tiny_config(**{field: "bfloat16"}).dtype is torch.bfloat16


def test_a_size_beyond_64_bits_is_named():
    for field in ("num_hidden_layers", "vocab_size", "sliding_window"):
        with pytest.raises(ValueError, match=rf"TNTConfig\.{field}=1000000000000000000000:"):
            TNTConfig(**{field: 10**21})


def test_the_number_of_memories_is_that_of_the_model():
    model, ids = TNTForCausalLM(tiny_config(local_chunk_sizes=[2, 4])), torch.arange(2, 9)[None]
    for sizes in ([1], 1, [1, 1, 1], []):
        model.config.local_chunk_sizes = sizes
        with pytest.raises(ValueError, match=r"local_chunk_sizes=\[.*one entry for each of 2 local memories"):
            model(ids)
    model.config.local_chunk_sizes = [1, 1]
    assert torch.isfinite(model(ids).logits).all()


def test_another_number_of_memories_needs_other_training_sizes():
    """Whoever assigned `local_chunk_sizes` reads that name in the error, and what to assign besides."""
    config = tiny_config(local_chunk_sizes=[2, 4])
    config.local_chunk_sizes = [2]
    message = r"memory_train_chunk_sizes=\[8, 2, 4\]: needs the 2 entries of .* local_chunk_sizes=\[2\]; None takes"
    with pytest.raises(ValueError, match=message):
        TNTForCausalLM(config)
    config.memory_train_chunk_sizes = None
    assert TNTForCausalLM(config).config.memory_train_chunk_sizes == [8, 2]


def test_a_misspelt_field_is_named(tmp_path, recwarn):
    TNTConfig().save_pretrained(tmp_path)
    TNTConfig.from_pretrained(tmp_path, num_labels=3)
    assert not [w for w in recwarn if "no field" in str(w.message)]
    with pytest.warns(UserWarning, match="TNTConfig.local_chunk_size: no field.*'local_chunk_sizes'"):
        TNTConfig(local_chunk_size=[8])


def test_flops_of_an_output_gate_and_of_persistent_keys():
    changes = ({}, {"attention_output_gate": True}, {"num_persistent_tokens": 3})
    plain, gated, persistent = (flops_per_token(tiny_config(**x), 1000) for x in changes)
    assert gated["base"] - plain["base"] == 2 * (2 * 32 * 32)
    assert persistent["attention"] - plain["attention"] == 2 * (4 * 32 * 3)


def test_flops_of_a_deep_memory_have_no_gradient_of_keys():
    kind = {"num_hidden_layers": 1, "memory_feature_map": "quadratic", "qk_projection": "none"}
    deep, linear = tiny_config(**kind, memory_depth=2, memory_expansion=3), tiny_config(**kind, memory_depth=1)
    first, last = (a * b for a, b in deep.memory_weight_shapes)
    [one] = (a * b for a, b in linear.memory_weight_shapes)

    def of(weights, first):  # three memories of two heads, which four query heads read
        return 3 * (2 * (6 * weights - 2 * first) + 2 * 4 * weights)

    found = flops_per_token(deep, 1000)["memory"] - flops_per_token(linear, 1000)["memory"]
    assert first != last and found == of(first + last, first) - of(one, one)


def test_flops_of_the_projection_are_those_of_its_keys():
    sizes = {"num_hidden_layers": 1, "memory_depth": 1, "memory_feature_map": "quadratic"}
    with_M, without = (
        flops_per_token(tiny_config(**sizes, qk_projection=x), 1000)["memory"] for x in ("shard", "none")
    )
    K, H, n, count = 36, 2, 4, len(tiny_config(**sizes).memory_projection_intervals)
    assert with_M - without == count * (2 * H * K * K + 2 * n * K * K)


def test_flops_of_projections_gates_and_variants():
    def memory(**changes):
        return flops_per_token(tiny_config(**changes), 1000)["memory"]

    plain = {"memory_feature_map": "identity", "memory_conv_kernel": 0}
    own, shared = (memory(memory_projections=x, **plain) for x in ("own", "shared"))
    assert own - shared == 2 * (2 * 32 * (32 + 2 * 16))
    wide = {"head_dim": 16, "memory_num_heads": 2}  # heads are wider than the model together
    assert memory(memory_gate="product", **wide) - memory(memory_gate="mix", **wide) == 2 * (2 * 64 * 64)
    mag, mal, lmm = (memory(variant=x, **wide) for x in ("mag", "mal", "lmm"))
    assert mal - mag == lmm - mag == 2 * (2 * 64 * 32)


def test_a_layer_of_memory_alone_has_no_keys():
    config = tiny_config(variant="lmm", memory_layers=[1])
    assert key_value_bytes(config, 100) == [2 * 3 * 2 * 8 * 4, 0]  # keys and values of three tokens, in two heads of 8
