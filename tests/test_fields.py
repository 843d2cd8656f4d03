"""What single fields and methods of a model do where no other test would notice."""

import re

import pytest
import torch
from tiny import TINY, tiny_config, tiny_model, tokens
from tiny_hosts import tiny_host

from tnt_hf.conversion import LiZAConfig, TNTInjectionConfig, inject
from tnt_hf.modeling_tnt import TNTForTokenClassification


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_drops_in_training_only(implementation):
    model, ids = tiny_model(attention_dropout=0.5, attn_implementation=implementation), tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model(attn_implementation=implementation)(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_the_window_stays_where_layers_without_attention_name_it():
    model = tiny_model(variant="lmm", memory_layers=[0])
    model.set_sliding_window(None)
    assert model.config.layer_types[1] == "full_attention" and model.config.sliding_window == TINY["sliding_window"]


def test_a_window_where_none_was_is_narrower_whatever_its_size():
    model = tiny_model(layer_types=["full_attention"] * 2)
    model.set_sliding_window(TINY["sliding_window"])
    assert model.config.window_narrowed


def test_a_padding_token_is_below_the_vocabulary():
    with pytest.raises(ValueError, match="must be below vocab_size"):
        tiny_model(pad_token_id=TINY["vocab_size"])


def test_masks_of_ones_own_are_refused():
    with pytest.raises(ValueError, match="create_masks_for_generate"):
        tiny_model()(tokens(1, 9), attention_mask={"full_attention": None})


@pytest.mark.parametrize("shape", [(1, 0), (0, 5), (5,), (1, 2, 3)])
def test_a_call_that_holds_no_rows_of_tokens_is_named(shape):
    named = re.escape(f"input_ids has the shape {list(shape)}: it must be [batch, tokens]")
    with pytest.raises(ValueError, match=named):
        tiny_model()(torch.zeros(shape, dtype=torch.long))
    if len(shape) != 2:  # the host has no message of its own
        with pytest.raises(ValueError, match=named):
            inject(tiny_host("llama"), LiZAConfig())(torch.zeros(shape, dtype=torch.long))


def test_the_head_of_tokens_has_the_dropout_of_its_configuration():
    assert TNTForTokenClassification(tiny_config()).dropout.p == 0.1
    for p in (0.0, 0.3):
        assert TNTForTokenClassification(tiny_config(classifier_dropout=p)).dropout.p == p


CHANGED = {
    "qk_projection_norm": False, "memory_value_norm": False, "memory_activation": "gelu", "memory_residual": True,
    "memory_feature_map": "identity", "rms_norm_eps": 1e-2, "hidden_act": "gelu", "memory_decay": False,
    "memory_layernorm": True, "memory_momentum": True, "memory_depth": 1, "memory_layers": [0], "variant": "lmm",
    "memory_gate": "mix", "memory_conv_kernel": 0, "memory_rule": "omega", "num_persistent_tokens": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}, "global_chunk_size": None,
}  # fmt: skip


@pytest.mark.parametrize("name, value", CHANGED.items(), ids=CHANGED)
def test_what_a_model_was_made_of_does_not_change_in_silence(name, value):
    """It would be saved as another model."""
    model, ids = tiny_model(memory_decay=True), tokens(1, 9)
    kept, before = getattr(model.config, name), model(ids).logits
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=re.escape(f"TNTConfig.{name}={value!r}: the model was made with ")):
        model(ids)
    setattr(model.config, name, kept)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    "name, value",
    [
        ("local_reset_interval", [16]),
        ("local_reset_interval", 12),  # a gap: global chunks of 8
        ("layer_types", ["full_attention"] * 2),
        ("sliding_window", None),
    ],
)
def test_fields_in_tokens_that_no_longer_fit_are_named(name, value):
    model = tiny_model(global_chunk_size=8, sliding_window=4)
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=re.escape(f"TNTConfig.{name}={value!r}: ")):
        model(tokens(1, 20))


@pytest.mark.parametrize("name, value", [("memory_grad_bound", 0.001), ("max_self_attn_length", 4), ("seed", 5)])
def test_settings_of_an_injection_do_not_change_in_silence(name, value):
    model, ids = inject(tiny_host("llama"), TNTInjectionConfig()), tokens(1, 9)
    before = model(ids).logits
    kept = dict(model.config.tnt_injection)
    model.config.tnt_injection[name] = value
    with pytest.raises(ValueError, match=re.escape(f"tnt_injection[{name!r}]={value}: the memory was injected with ")):
        model(ids)
    model.config.tnt_injection = kept
    assert torch.equal(model(ids).logits, before)
