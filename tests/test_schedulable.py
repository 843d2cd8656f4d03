"""What recipes schedule while a model trains: the attention window of its layers, and the mixing weight."""

import pytest
import torch
from tiny import tiny_config, tiny_model, tokens
from tiny_hosts import tiny_host

from tnt_hf import TNTCache, TNTForCausalLM
from tnt_hf.conversion import LiZAConfig, inject


WINDOWS = {
    "narrow all": ({"sliding_window": None}, (5, None), {"sliding_window": 5}),
    "narrow one": (
        {"sliding_window": None},
        (5, [1]),
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "widen all": ({}, (None, None), {"sliding_window": None}),
    "widen one": ({}, (None, [0]), {"layer_types": ["full_attention", "sliding_attention"]}),
    "another size": ({}, (7, None), {"sliding_window": 7}),
    "no memory": ({"memory_layers": []}, (None, [1]), {"layer_types": ["sliding_attention", "full_attention"]}),
    "layer without attention": ({"variant": "lmm", "memory_layers": [0]}, (2, None), {"sliding_window": 2}),
}


@pytest.mark.parametrize(("before", "change", "after"), WINDOWS.values(), ids=WINDOWS)
def test_a_changed_window_equals_a_model_configured_with_it(before, change, after, tmp_path):
    model, ids = tiny_model(**before), tokens(2, 23)
    model(ids)
    model.set_sliding_window(*change)
    expected = TNTForCausalLM(tiny_config(**before | after)).double().eval()
    expected.load_state_dict(model.state_dict())
    assert model.config.layer_types == expected.config.layer_types
    with torch.inference_mode():
        logits = expected(ids).logits
        assert torch.equal(model(ids).logits, logits)
        greedy = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **greedy), expected.generate(ids, **greedy))
        model.save_pretrained(tmp_path)
        reloaded = TNTForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)(ids).logits
        # Tensors at other addresses: matrix products may sum in another order.
        torch.testing.assert_close(reloaded, logits, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "sliding_window=0"),
        ((True,), "sliding_window=True"),
        ((4.0,), "sliding_window=4.0"),
        ((8, [2]), r"layers=\[2\]"),
        ((8, [1]), r"sliding_window=8: layers \[0\] keep 4"),
    ],
)
def test_an_impossible_window_is_refused_and_changes_nothing(arguments, message):
    model = tiny_model()
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        model.set_sliding_window(*arguments)
    assert model.config.to_dict() == before


def test_a_window_that_opens_a_gap_is_refused():
    model = tiny_model(sliding_window=8, local_reset_interval=4, local_chunk_sizes=[2])
    with pytest.raises(ValueError, match="local_reset_interval=4: must be a multiple of global_chunk_size=8"):
        model.set_sliding_window(4)
    assert model.config.sliding_window == 8 and model.model.layers[0].self_attn.sliding_window == 8


def test_a_cache_filled_under_another_window_is_refused():
    model, ids = tiny_model(), tokens(1, 9)
    cache = TNTCache(model.config)
    model(ids, past_key_values=cache)
    model.set_sliding_window(6)
    with pytest.raises(ValueError, match="sliding_window: the cache was filled with 4, the model has 6"):
        model(ids[:, :1], past_key_values=cache)


def test_a_scheduled_mixing_weight_is_saved_and_loaded_in_full_precision(tmp_path):
    model = tiny_model(torch.float32, memory_gate="mix", memory_gate_init=0.3)
    model.save_pretrained(tmp_path)
    weight = TNTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers[0].memory.gate.weight
    assert weight == torch.tensor(0.3)


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
@pytest.mark.parametrize("kind", ["TNT", "LiZA"])
def test_a_cast_of_the_model_does_not_round_a_mixing_weight(kind, cast):
    if kind == "TNT":
        model = tiny_model(torch.float32, memory_gate="mix", memory_gate_init=0.3)
    else:
        model = inject(tiny_host("llama", torch.float32), LiZAConfig(weight=0.3))
    getattr(model, cast)()
    layer = model.model.layers[0]
    weight = (layer.memory.gate if kind == "TNT" else layer.self_attn.memory).weight
    assert weight == torch.tensor(0.3) and weight.dtype == torch.float32
    model(tokens(1, 9))


def test_a_mixing_weight_of_zero_is_silent_whatever_the_memory_holds():
    model, ids = tiny_model(memory_gate="mix", memory_gate_init=0), tokens(2, 23)
    with torch.no_grad():
        expected = model(ids).logits
        for layer in model.model.layers:
            layer.memory.memories[0].weights[0].fill_(torch.nan)
        assert torch.equal(model(ids).logits, expected)
