"""Operations on all layers of a cache that break off in between, and caches of other hosts, are refused."""

import copy
import dataclasses

import pytest
import torch
from test_cache import filled, go_on
from tiny import tiny_model, tokens
from tiny_hosts import OPEN_LIZA, OPEN_TNT, tiny_host
from transformers import DynamicCache

from tnt_hf import TNTCache, cache_tnt
from tnt_hf.cache_layers_tnt import _Stateful
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import inject


BROKE_OFF = f"{CACHE_NAME} was left behind by a call that broke off"
OPERATIONS = {
    "reset": (),
    "reorder_cache": (torch.tensor([1, 0]),),
    "batch_select_indices": (torch.tensor([1, 0]),),
    "batch_repeat_interleave": (2,),
}


def break_off(monkeypatch, owner, name: str, calls: int) -> None:
    """No room in call number `calls` of a function, once."""
    function, count = getattr(owner, name), 0

    def with_no_room(*args, **kwargs):
        nonlocal count
        count += 1
        if count == calls:
            raise MemoryError
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, with_no_room)


@pytest.mark.parametrize("calls", [1, 2], ids=["in the first layer", "in the second"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["TNTCache", "an injected model's"])
def test_an_operation_that_broke_off_is_noted(kind, operation, calls, monkeypatch):
    """Its layers hold different rows, or some nothing at all."""
    ids, more = tokens(2, 16), tokens(2, 3, seed=1)
    if kind == "TNTCache":
        model = tiny_model()
        cache = TNTCache(model.config)
    else:
        model = inject(tiny_host("llama"), OPEN_TNT)
        cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        untouched = copy.deepcopy(cache)
        layer = cache.layers[calls - 1]
        breaks = "_map_states" if operation in ("batch_select_indices", "batch_repeat_interleave") else None
        if breaks is None:
            break_off(monkeypatch, layer, operation, 1)
        else:
            break_off(monkeypatch, _Stateful, breaks, calls)
        with pytest.raises(MemoryError):
            getattr(cache, operation)(*OPERATIONS[operation])
        monkeypatch.undo()
        rows = more.repeat_interleave(2, 0) if operation == "batch_repeat_interleave" and calls == 2 else more
        if breaks is None and calls == 1 and kind != "TNTCache":
            assert model(more, past_key_values=cache).logits.equal(model(more, past_key_values=untouched).logits)
            return  # nothing had been done
        with pytest.raises(ValueError, match=BROKE_OFF):
            model(rows, past_key_values=cache)
        cache.reset()
        assert model(ids, past_key_values=cache).logits.equal(model(ids).logits)
        model(more, past_key_values=cache)  # and on
        getattr(untouched, operation)(*OPERATIONS[operation])
        model(
            more.repeat_interleave(2, 0) if operation == "batch_repeat_interleave" else more, past_key_values=untouched
        )


@pytest.mark.parametrize("with_memory, at", [([0, 1], 2), ([2, 3], 1), ([1], 3)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layers_without_a_memory_are_noted_too(operation, with_memory, at, monkeypatch):
    config = dataclasses.replace(OPEN_TNT, layers=with_memory)
    model = inject(tiny_host("llama", num_hidden_layers=4), config)
    cache, ids, more = DynamicCache(config=model.config), tokens(2, 16), tokens(2, 3, seed=1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        break_off(monkeypatch, cache.layers[at], operation, 1)
        with pytest.raises(MemoryError):
            getattr(cache, operation)(*OPERATIONS[operation])
        monkeypatch.undo()
        rows = len(cache.layers[with_memory[0]].keys) if operation != "reset" else 2  # or they are refused as too few
        with pytest.raises(ValueError, match=BROKE_OFF):
            model(more.repeat_interleave(rows // 2, 0), past_key_values=cache)
        cache.reset()
        assert model(ids, past_key_values=cache).logits.equal(model(ids).logits)


@pytest.mark.parametrize("calls", [1, 2], ids=["in the first layer", "in the second"])
@pytest.mark.parametrize("sizes", [[4, 2], [1, 1]])
def test_chunk_sizes_that_could_not_be_followed_are_not_followed_halfway(sizes, calls, monkeypatch):
    model, ids = tiny_model(local_chunk_sizes=[4, 4], local_reset_interval=8), tokens(1, 16)
    cache = filled(model, ids)
    model.set_local_chunk_sizes(sizes)
    break_off(monkeypatch, cache_tnt, "store", calls)
    with pytest.raises(MemoryError):
        go_on(model, cache, tokens(1, 2))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=BROKE_OFF):
        go_on(model, cache, tokens(1, 2))
    cache.reset()
    assert torch.equal(go_on(model, cache, ids), go_on(model, TNTCache(model.config), ids))


def test_what_is_refused_before_it_begins_breaks_nothing():
    model, ids = tiny_model(local_chunk_sizes=[4, 4], local_reset_interval=8), tokens(1, 15)
    cache = filled(model, ids)
    model.set_local_chunk_sizes([4, 2])
    with pytest.raises(ValueError, match="at a chunk boundary"):
        go_on(model, cache, tokens(1, 2))
    model.set_local_chunk_sizes([4, 4])
    assert torch.equal(go_on(model, cache, tokens(1, 2)), go_on(model, filled(model, ids), tokens(1, 2)))


# --- injected models of other hosts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [OPEN_TNT, OPEN_LIZA], ids=["tnt", "liza"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("num_key_value_heads", 4),
        ("hidden_size", 64),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("num_attention_heads", 2),
    ],
)
def test_a_cache_of_another_host_is_refused_and_left_alone(name, value, config):
    """Its keys may have other shapes, or look alike and mean something else."""
    one = inject(tiny_host("llama"), config)
    kept = {"head_dim": one.config.head_dim} if hasattr(one.config, "head_dim") else {}
    other = inject(tiny_host("llama", **kept, **{name: value}), config)
    assert getattr(one.config, name) != getattr(other.config, name)
    cache = DynamicCache(config=one.config)
    with torch.no_grad():
        one(tokens(1, 9), past_key_values=cache)
        expected = one(tokens(1, 3), past_key_values=copy.deepcopy(cache)).logits
        with pytest.raises(ValueError, match=f"filled by another model or injection: {name}="):
            other(tokens(1, 3), past_key_values=cache)
        assert torch.equal(one(tokens(1, 3), past_key_values=cache).logits, expected)


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_model, lambda: inject(tiny_host("llama"), OPEN_TNT)], ids=["tnt", "injected"])
@pytest.mark.parametrize("padding", [-1e9, float("nan"), float("-inf")])
def test_a_mask_to_be_added_is_no_mask_of_tokens(make, padding):
    """Its zeros are the tokens: it would be taken for its opposite."""
    model, ids = make(), tokens(2, 5)
    mask = torch.zeros(2, 5)
    mask[1, :2] = padding
    with pytest.raises(ValueError, match=f"attention_mask holds {padding}: it must be 1 at tokens and 0 at padding"):
        model(ids, attention_mask=mask)
    whole = torch.ones(2, 5, dtype=torch.int64)
    whole[1, :2] = 0
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=x).logits for x in (whole.float(), whole))
    assert torch.equal(found, expected)
