"""Caches that hold something else than the tokens they were given, as a call broke off between two layers, or a beam
search went through them: they are refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from test_cache import filled, go_on
from tiny import tiny_config, tiny_model, tokens, undigested
from tiny_hosts import OPEN_TNT, tiny_host
from torch.nn.parallel import scatter_gather
from transformers import DynamicCache, StaticCache

from tnt_hf import TNTCache
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import inject


def interrupted(model, cache, ids, layers, calls: int) -> None:
    """Ctrl-C before the last of `layers` begins, in its call number `calls`."""
    count = 0

    def ctrl_c(*_):
        nonlocal count
        count += 1
        if count == calls:
            raise KeyboardInterrupt

    hook = layers[-1].register_forward_pre_hook(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, prefill_chunk_size=20)
    hook.remove()


@pytest.mark.parametrize("calls", [1, 2, 6], ids=["the first piece", "a later one", "a token"])
@pytest.mark.parametrize("kind", ["TNTCache", "DynamicCache"])
def test_what_an_interrupted_call_leaves_is_not_gone_on_from(kind, calls, tmp_path):
    """Its layers have read different tokens."""
    model, ids = tiny_model(), tokens(1, 37)
    cache = TNTCache(model.config) if kind == "TNTCache" else DynamicCache(config=model.config)
    interrupted(model, cache, ids, model.model.layers, calls)
    message = f"{CACHE_NAME} was left behind by a call that broke off"
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, 50), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match=message):
        go_on(model, copy.deepcopy(cache), tokens(1, 1))
    if kind == "TNTCache":
        with pytest.raises(ValueError, match="cache: was left behind by a call that broke off"):
            cache.save(tmp_path / "session")
        assert not (tmp_path / "session").exists()
    cache.reset()
    assert torch.equal(go_on(model, cache, ids), go_on(model, TNTCache(model.config), ids))


@pytest.mark.parametrize("kind", ["TNTCache", "DynamicCache"])
def test_a_call_without_a_result_is_not_made_again(kind):
    """Its tokens have been read, and would be twice: no room for the logits, and labels that do not fit."""
    model, ids = tiny_model(), tokens(1, 37)

    def no_room(*_):
        raise torch.OutOfMemoryError

    for labels in (None, tokens(1, 3)):
        cache = TNTCache(model.config) if kind == "TNTCache" else DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        hook = None if labels is not None else model.lm_head.register_forward_pre_hook(no_room)
        with pytest.raises((torch.OutOfMemoryError, ValueError)):
            model(tokens(1, 5), past_key_values=cache, labels=labels)
        if hook is not None:
            hook.remove()
        for part in (model, model.model):
            with pytest.raises(ValueError, match="holds the tokens of a call that broke off after its last layer"):
                part(tokens(1, 5), past_key_values=cache)
        cache.reset()
        assert torch.equal(go_on(model, cache, ids), go_on(model, TNTCache(model.config), ids))


def test_an_error_before_anything_is_written_changes_nothing():
    model, ids = tiny_model(), tokens(1, 37)
    cache = filled(model, ids[:, :30])
    with pytest.raises(ValueError, match="holds 1 rows, and 2 are given"):
        model(tokens(2, 3), past_key_values=cache)
    assert torch.equal(go_on(model, cache, ids[:, 30:]), go_on(model, filled(model, ids[:, :30]), ids[:, 30:]))


def test_a_session_whose_layers_have_read_different_tokens_is_damaged(tmp_path):
    model = tiny_model()
    cache = filled(model, tokens(1, 9))
    states = cache.layers[1].recurrent_states
    states[len(states) - 1] -= 1
    cache.save(tmp_path / "session")
    with pytest.raises(ValueError, match="session: layer 1 has read other tokens than those before it"):
        TNTCache.load(tmp_path / "session", model.config)
    kept = {
        name: x for name, x in load_file(tmp_path / "session").items() if name[:10] not in ("layers.1.s", "layers.1.c")
    }
    save_file(kept, tmp_path / "half", metadata=undigested(tmp_path / "session"))
    with pytest.raises(ValueError, match="session: layers.1.state.0 must have shape"):
        TNTCache.load(tmp_path / "half", model.config)


@pytest.mark.parametrize("returned", [1, 3])
def test_what_a_beam_search_leaves_is_not_gone_on_from(returned, tmp_path):
    """Its rows are beams that were still running."""
    model = tiny_model()
    cache = TNTCache(model.config)
    options = {"num_beams": 3, "num_return_sequences": returned, "max_new_tokens": 9, "do_sample": False}
    found = model.generate(tokens(1, 20), past_key_values=cache, **options)
    with pytest.raises(ValueError, match=f"{CACHE_NAME} holds the running beams of a beam search"):
        model.generate(torch.cat([found, found[:, -3:]], 1), past_key_values=cache, max_new_tokens=2)
    cache.reset()

    def ctrl_c(ids, scores):
        if ids.shape[1] == 24:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens(1, 20), past_key_values=cache, logits_processor=[ctrl_c], **options)
    with pytest.raises(ValueError, match="cache: holds the running beams of a beam search"):
        cache.save(tmp_path / "session")
    cache.reset()
    cache.save(tmp_path / "session")


def test_the_library_s_cache_for_another_number_of_memories_is_refused():
    other = DynamicCache(config=tiny_config(local_chunk_sizes=[2]))
    with pytest.raises(ValueError, match=r"layer 0 has 10 state slots, but local_chunk_sizes=\[2, 4\] needs 14"):
        go_on(tiny_model(), other, tokens(1, 5))


@pytest.mark.parametrize("persistent", [0, 3])
@pytest.mark.parametrize("piece", [None, 2, 4], ids=lambda x: f"prefill in pieces of {x}")
@torch.no_grad()
def test_behind_padding_that_generate_read_positions_are_needed(persistent, piece, tmp_path):
    """`generate` does not count padding in front, a call without positions does, as in the base models."""
    model, ids = tiny_model(num_persistent_tokens=persistent), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = TNTCache(model.config)
    read = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False, prefill_chunk_size=piece
    )
    past = cache.get_seq_length()
    cache.save(tmp_path / "session")
    new = torch.cat([read[:, past:], tokens(2, 4)], 1)
    everything = torch.cat([read[:, :past], new], 1)
    mask = torch.cat([mask, torch.ones(2, everything.shape[1] - 9, dtype=torch.long)], 1)
    alone = model(everything[:1, 4:]).logits[:, -4:]
    for again in (cache, TNTCache.load(tmp_path / "session", model.config)):
        call = {"input_ids": new, "attention_mask": mask, "past_key_values": again}
        if not persistent:  # whose keys are not rotated: all count from a document's first token
            with pytest.raises(ValueError, match=f"position_ids is None, but the {past} tokens in {CACHE_NAME}"):
                model(**call)
            call["position_ids"] = (mask.cumsum(1) - 1)[:, past:]
        torch.testing.assert_close(model(**call).logits[:1, -4:], alone, rtol=0, atol=1e-10)
    begun = model(ids[1:, :5], position_ids=torch.arange(5)[None], use_cache=True).past_key_values
    model(ids[1:, 5:], past_key_values=begun)  # given as they are without


@pytest.mark.parametrize("T", [3, 1])
@torch.no_grad()
def test_behind_padding_that_was_counted_positions_are_counted_on(T):
    """The other way round; a cache without such padding goes on in `generate`."""
    model, ids, new = tiny_model(), tokens(2, 9), tokens(2, T, seed=7)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    everything = torch.cat([mask, torch.ones_like(new)], 1)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    call = {"attention_mask": everything, "past_key_values": cache}
    with pytest.raises(ValueError, match="position_ids do not count padding, but those of the 9 tokens"):
        model(new, position_ids=(everything.cumsum(1) - 1)[:, 9:], **call)
    with pytest.raises(ValueError, match="position_ids do not count padding, but those of the 9 tokens"):
        model.generate(new, max_new_tokens=2, **call)
    alone = model(torch.cat([ids, new], 1)[:1, 4:]).logits[:, -T:]
    torch.testing.assert_close(model(new, **call).logits[:1], alone, rtol=0, atol=1e-10)
    mask[0] = torch.tensor([1] * 5 + [0] * 4)  # behind the tokens, as of a row that ended: they are where they are
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    everything[:, :9] = mask
    call = {"attention_mask": everything, "position_ids": (everything.cumsum(1) - 1)[:, 9:], "past_key_values": cache}
    alone = model(torch.cat([ids[:1, :5], new[:1]], 1)).logits[:, -T:]
    torch.testing.assert_close(model(new, **call).logits[:1], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("piece", [1, 9])
@torch.no_grad()
def test_positions_are_counted_on_as_they_were_given(piece, tmp_path):
    """In pieces of one token, too, the first of which are padding alone; also by a session."""
    model, ids, new = tiny_model(), tokens(2, 9), tokens(2, 3, seed=7)
    mask = torch.cat([torch.ones_like(ids), torch.ones_like(new)], 1)
    mask[0, :4] = 0
    left_out, counted = (mask.cumsum(1) - 1).clamp(min=0), torch.arange(12).expand(2, 12)
    alone = model(torch.cat([ids, new], 1)[:1, 4:]).logits[:, -3:]
    for given, other in ((left_out, counted), (counted, left_out)):
        cache = TNTCache(model.config)
        for t in range(0, 9, piece):
            call = {"attention_mask": mask[:, : t + piece], "position_ids": given[:, t : t + piece]}
            model(ids[:, t : t + piece], past_key_values=cache, **call)
        cache.save(tmp_path / "session")
        if given is counted:
            for again in (TNTCache.load(tmp_path / "session", model.config), cache):
                call = {"attention_mask": mask[:, :10], "position_ids": other[:, 9:10], "past_key_values": again}
                if again is not cache or piece > 1:  # of tokens one by one only the first is looked at
                    with pytest.raises(ValueError, match="position_ids do not count padding"):
                        model(new[:, :1], **call)
        call = {"attention_mask": mask, "position_ids": given[:, 9:], "past_key_values": cache}
        torch.testing.assert_close(model(new, **call).logits[:1], alone, rtol=0, atol=1e-10)


@torch.no_grad()
def test_what_is_not_known_of_a_session_s_positions_is_not_refused(tmp_path):
    """Sessions of earlier releases do not say how their tokens were placed; nor do compiled calls."""
    model, ids, new = tiny_model(), tokens(2, 9), tokens(2, 3, seed=7)
    mask = torch.cat([torch.ones_like(ids), torch.ones_like(new)], 1)
    mask[0, :4] = 0
    cache, positions = TNTCache(model.config), (mask.cumsum(1) - 1).clamp(min=0)
    model(ids, attention_mask=mask[:, :9], position_ids=positions[:, :9], past_key_values=cache)
    cache.save(path := tmp_path / "session.safetensors")
    metadata = {name: x for name, x in undigested(path).items() if name not in ("own_positions", "counts_padding")}
    save_file(load_file(path), path, metadata=metadata)
    call = {"attention_mask": mask, "position_ids": positions[:, 9:]}
    alone = model(torch.cat([ids, new], 1)[:1, 4:]).logits[:, -3:]
    again = model(new, past_key_values=TNTCache.load(path, model.config), **call).logits[:1]
    torch.testing.assert_close(again, alone, rtol=0, atol=1e-10)


@torch.no_grad()
def test_rows_without_padding_go_on_when_those_with_it_are_gone():
    """`generate` leaves out a mask of ones, which only a cache that holds no padding may do without."""
    model, ids, new = tiny_model(), tokens(2, 9), tokens(1, 3, seed=9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = TNTCache(model.config)
    read = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    cache.batch_select_indices(torch.tensor([1]))
    talk = torch.cat([read[1:], new], 1)
    settings = {"attention_mask": torch.ones_like(talk), "max_new_tokens": 3, "do_sample": False}
    assert model.generate(talk, past_key_values=cache, **settings).equal(model.generate(talk, **settings))


def test_a_cache_filled_in_inference_mode_starts_over_outside_it():
    model, ids = tiny_model(), tokens(2, 9)
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    cache.reset()
    assert model(ids, past_key_values=cache).logits.equal(model(ids, use_cache=True).logits)


@pytest.mark.long
def test_a_compiled_call_without_a_mask_does_not_go_on_behind_padding():
    """Nothing is asked of a compiled call's cache; what it needs the mask for says so. `reset` forgets the padding."""
    model, ids = tiny_model(memory_layers=[]), tokens(2, 6)
    cache, compiled = TNTCache(model.config), torch.compile(model, backend="eager")
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask is None, but .* holds padding"):
            compiled(ids[:, :2], past_key_values=cache)
        cache.reset()
        after = compiled(ids, past_key_values=cache).logits
        torch.testing.assert_close(after, model(ids).logits, atol=1e-6, rtol=0)  # float32, sums in another order
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, window", [("TNTCache", 4), ("StaticCache", None), ("TNTCache", None), ("StaticCache", 4)]
)
def test_a_cache_that_starts_over_behind_padding_serves_compiled_calls(kind, window):
    """Also one whose positions left the padding out. The library's caches start over without word of it."""
    model, ids, mask = tiny_model(sliding_window=window), tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    cache = TNTCache(model.config) if kind == "TNTCache" else StaticCache(model.config, max_cache_len=32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
        cache.reset()
        after = compiled(ids, past_key_values=cache).logits
        torch.testing.assert_close(after, model(ids).logits, atol=1e-6, rtol=0)
        if kind == "TNTCache":  # nothing but what was read since then counts
            model(ids[:, :2], past_key_values=cache)
    torch._dynamo.reset()


def test_an_interrupted_call_without_memory_is_not_gone_on_from():
    model = tiny_model(memory_layers=[])
    cache = TNTCache(model.config)
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens(1, 5), past_key_values=cache)
    broken.remove()
    with pytest.raises(ValueError, match="broke off"):
        model(tokens(1, 5), past_key_values=cache)


@torch.no_grad()
def test_a_mask_that_contradicts_is_refused_behind_a_token_too():
    model, ids = tiny_model(), tokens(1, 13)
    cache, mask = TNTCache(model.config), torch.ones_like(ids)
    model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
    model(ids[:, 9:10], attention_mask=mask[:, :10], past_key_values=cache)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="but the memory has read"):
        model(ids[:, 10:], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_a_library_cache_starts_over_without_its_padding():
    model, ids = tiny_model(memory_layers=[]), tokens(1, 9)
    cache, mask = DynamicCache(config=model.config), torch.ones_like(ids)
    mask[0, 0] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    for part in (ids[:, :5], ids[:, 5:]):
        logits = model(part, past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 5:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("operation", ["reorder_cache", "batch_select_indices"])
@torch.no_grad()
def test_rows_that_change_places_need_their_own_mask(operation):
    """In a decoding loop only the first mask is looked at."""
    model, ids = tiny_model(), tokens(2, 9)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    cache = TNTCache(model.config)
    model(ids, attention_mask=mask[:, :9], past_key_values=cache)
    model(ids[:, :1], attention_mask=mask[:, :10], past_key_values=cache)
    getattr(cache, operation)(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"calls \[6, 10\] of the 10 cached tokens of each row valid"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    model(ids[:, :1], attention_mask=mask.flip(0), past_key_values=cache)


@torch.no_grad()
def test_a_library_cache_that_starts_over_has_agreed_with_no_mask():
    model, ids = tiny_model(), tokens(1, 11)
    cache, mask = DynamicCache(config=model.config), torch.ones_like(ids)
    model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
    model(ids[:, 9:10], attention_mask=mask[:, :10], past_key_values=cache)
    cache.reset()
    model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="but the memory has read"):
        model(ids[:, 10:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("name", ["sp_size", "cp_size"])
def test_a_part_of_a_row_is_not_read_as_a_whole_one(monkeypatch, name):
    """As processes get it that share sequences between them: a memory would begin anew in each part."""
    ids = tokens(1, 9)
    refused = [tiny_model(), tiny_model(memory_layers=[]), inject(tiny_host("llama"), OPEN_TNT)]
    plain = tiny_model(memory_layers=[], sliding_window=None)
    for sizes in (SimpleNamespace(), SimpleNamespace(sp_size=1, cp_size=1)):
        monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", sizes)
        for model in (*refused, plain):
            model(ids)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", SimpleNamespace(**{name: 2}))
    for model in refused:
        with pytest.raises(ValueError, match=f"{name}=2: gives every process a part of a sequence"):
            model(ids)
    plain(ids)


def test_copies_of_a_model_are_told_that_caches_cannot_be_joined(monkeypatch):
    """nn.DataParallel makes one output of those of its copies, by their class and from an iterator."""
    monkeypatch.setattr(scatter_gather.Gather, "apply", lambda device, dim, *parts: torch.cat(parts, dim))
    model = tiny_model()
    with pytest.raises(ValueError, match="nn.DataParallel cannot join caches: call the model with use_cache=False"):
        scatter_gather.gather([model(tokens(1, 4)) for _ in range(2)], "cpu")
    parts = [model(tokens(1, 4), use_cache=False) for _ in range(2)]
    assert scatter_gather.gather(parts, "cpu").logits.shape[0] == 2
