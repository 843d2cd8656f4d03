"""A cache is `past_key_values` or `cache`, as the installed release of transformers says it; ours take both names."""

import inspect
import warnings

import pytest
import torch
from tiny import tiny_model, tokens
from tiny_hosts import OPEN_TNT, tiny_host
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tnt_hf import TNTCache
from tnt_hf.cache_name_tnt import CACHE_NAME, CACHE_NAMES
from tnt_hf.conversion import inject


def parts(model, name, cache):
    """Logits of two calls, the second with `cache`, which the first filled, both under `name`."""
    ids = tokens(2, 9)
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True, **{name: cache})
        second = model(ids[:, 5:], use_cache=True, **{name: cache})
    return first, torch.cat([first[0], second[0]], 1), model(ids, use_cache=False)[0]


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_both_names_are_taken(name):
    model = tiny_model().double().eval()
    cache = TNTCache(model.config)
    out, found, whole = parts(model, name, cache)
    assert getattr(out, CACHE_NAME) is cache
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=0)  # float64, but other products
    parts(model.model, name, TNTCache(model.config))


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_an_injected_backbone_takes_both_names(kind, name):
    model = tiny_host(kind, torch.float64)
    inject(model, OPEN_TNT)
    _, found, whole = parts(model.base_model, name, DynamicCache(config=model.config))
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=0)


def test_the_old_name_is_warned_of_where_the_library_warns():
    model = tiny_model()
    for part in (model, model.model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            part(tokens(1, 3), cache=TNTCache(model.config))
            assert not any("is deprecated" in str(x.message) for x in caught)
            part(tokens(1, 3), past_key_values=TNTCache(model.config))
        expected = f"`past_key_values` is deprecated for `{type(part).__name__}.forward`. Use `cache` instead."
        found = [str(x.message) for x in caught if x.category is FutureWarning]
        assert found == ([expected] if CACHE_NAME == "cache" else [])


def test_two_names_at_once_are_refused():
    model = tiny_model()
    cache = TNTCache(model.config)
    for each in (model, inject(tiny_host("llama"), OPEN_TNT).model):
        with pytest.raises(ValueError, match="past_key_values and cache are two names of one argument"):
            each(tokens(1, 3), past_key_values=cache, cache=cache)
    assert getattr(model(tokens(1, 3), past_key_values=cache, cache=None), CACHE_NAME) is cache
    assert getattr(model(tokens(1, 3), past_key_values=None, cache=cache), CACHE_NAME) is cache


def test_the_library_finds_the_name_that_it_uses():
    """In signatures, outputs and what is kept on its device."""
    model = tiny_model()
    layer = model.model.layers[0]
    for part in (model, model.model, layer, layer.self_attn, layer.memory):
        assert CACHE_NAME in inspect.signature(part.forward).parameters
    assert CACHE_NAME in inspect.signature(model.create_masks_for_generate).parameters
    assert list(inspect.signature(model.forward).parameters)[3] == CACHE_NAME
    assert CACHE_NAME in BaseModelOutputWithPast.__dataclass_fields__
    assert CACHE_NAME in model._skip_keys_device_placement
    assert CACHE_NAME in model.config.keys_to_ignore_at_inference


def test_a_checkpointed_model_makes_no_cache():
    """A layer is run twice, and would read its tokens twice."""
    model, ids = tiny_model().train(), tokens(1, 6)
    model.activation_checkpointing_enable()
    out = model(ids, labels=ids, use_cache=True)
    out.loss.backward()
    assert CACHE_NAME not in out


def test_a_callers_cache_is_refused_with_checkpointing():
    """It would stay empty, and the next segment begin with nothing."""
    model = tiny_model().train()
    model.activation_checkpointing_enable()
    ids = tokens(1, 6)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(ids, **{CACHE_NAME: TNTCache(model.config)})
    if CACHE_NAME == "past_key_values":  # renamed by the release that checkpoints nothing without gradients
        with pytest.raises(ValueError, match="gradient checkpointing"):
            model.generate(ids, max_new_tokens=2)
    else:
        assert model.generate(ids, max_new_tokens=2).equal(model.eval().generate(ids, max_new_tokens=2))
    model.eval()
    assert model(ids, **{CACHE_NAME: TNTCache(model.config)})[CACHE_NAME].get_seq_length() == 6
    host = inject(tiny_host("llama"), OPEN_TNT).train()
    host.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        host(ids, **{CACHE_NAME: DynamicCache(config=host.config)})
