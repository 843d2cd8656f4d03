"""`generate` behind a filled cache: what it is given follows the cached tokens, or is refused before it is read."""

import copy

import pytest
import torch
from tiny import left_padded, tiny_model, tokens
from tiny_hosts import OPENED, tiny_host
from transformers import DynamicCache

from tnt_hf import TNTCache
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import inject


GREEDY = {"do_sample": False, "max_new_tokens": 4}
READ = 11  # tokens in the cache
SUBJECTS = {
    "tnt": lambda: tiny_model(),
    **{
        f"{host} with {kind}": lambda host=host, config=config: inject(tiny_host(host, torch.float64), config)
        for host in ("llama", "mistral")
        for kind, config in OPENED.items()
    },
}
subjects = pytest.mark.parametrize("make", SUBJECTS.values(), ids=SUBJECTS.keys())


def filled(model, ids):
    cache = TNTCache(model.config) if model.config.model_type == "tnt" else DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{CACHE_NAME: cache})
    return cache


def ones(columns):
    return torch.ones(1, columns, dtype=torch.long)


@subjects
def test_the_whole_conversation_or_its_new_tokens_go_on(make):
    model, whole = make(), tokens(1, 16)
    wanted = model.generate(whole, attention_mask=ones(16), **GREEDY)[:, 16:]
    embed = model.get_input_embeddings()
    for given, options in (
        ((whole,), {}),
        ((whole,), {"prefill_chunk_size": 2}),
        ((whole[:, READ:],), {}),
        ((), {"inputs_embeds": embed(whole)}),
    ):
        cache = filled(model, whole[:, :READ])
        found = model.generate(*given, attention_mask=ones(16), **{CACHE_NAME: cache}, **options, **GREEDY)
        assert torch.equal(found[:, -4:], wanted)


@subjects
@pytest.mark.parametrize("length", [READ, READ - 1, 6])  # `input_ids[:, -(length - READ):]` is some of it, or all
def test_an_answer_is_not_generated_twice_from_one_cache(make, length):
    model, whole = make(), tokens(1, READ)
    cache = filled(model, whole)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="holds 11 tokens already"):
        model.generate(whole[:, :length], attention_mask=ones(length), **{CACHE_NAME: cache}, **GREEDY)
    after = torch.cat([whole, tokens(1, 5, seed=3)], 1)
    options = {"attention_mask": ones(16), **GREEDY}
    wanted = model.generate(after, **options, **{CACHE_NAME: before})
    assert torch.equal(model.generate(after, **options, **{CACHE_NAME: cache}), wanted)  # nothing was read


SPOKEN = 12  # columns that `generate` has read of 9 and 4 new ones: the last token is still to be


def spoken(model):
    """A cache after `generate` of two rows, the second padded in front, and what to go on with: ids and mask."""
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 6, seed=2)[0]])
    cache = TNTCache(model.config)
    ids = model.generate(ids, attention_mask=mask, **{CACHE_NAME: cache}, **GREEDY)
    return cache, *followed(ids, mask)


def followed(ids, mask):
    """What `generate` returned and three more tokens, with the mask of all of them."""
    ids = torch.cat([ids, tokens(2, 3, seed=len(ids[0]))], 1)
    return ids, torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)


@pytest.mark.parametrize("changes", [{}, {"memory_layers": []}, {"variant": "lmm"}], ids=str)
@pytest.mark.parametrize("place", [(0, 0), (1, 3), (0, SPOKEN - 1)], ids=["first", "first of a row", "last"])
def test_a_conversation_that_begins_otherwise_is_refused_before_it_is_read(changes, place, tmp_path):
    """As templated or tokenized again: no length tells that the memory has learned something else."""
    model = tiny_model(**changes)
    cache, ids, mask = spoken(model)
    cache.save(tmp_path / "session")
    for going_on in (TNTCache.load(tmp_path / "session", model.config), copy.deepcopy(cache), cache):
        said, valid = ids, mask
        for _ in range(2):  # as after the first answer, so after the next
            options = {"attention_mask": valid, **GREEDY}
            other = said.clone()
            other[place] = (other[place] + 1) % model.config.vocab_size
            with pytest.raises(ValueError, match=rf"input_ids: row {place[0]} does not begin with the \d+ tokens"):
                model.generate(other, **options, **{CACHE_NAME: going_on})
            wanted = model.generate(said, **options)
            assert torch.equal(model.generate(said, **options, **{CACHE_NAME: going_on}), wanted)  # nothing was read
            said, valid = followed(wanted, valid)


def test_what_stands_for_padding_or_behind_the_cached_tokens_is_free():
    model = tiny_model()
    cache, ids, mask = spoken(model)
    ids[1, :3], ids[:, SPOKEN:] = 5, 6  # padding, the last token written and the new ones
    wanted = model.generate(ids, attention_mask=mask, **GREEDY)
    again = copy.deepcopy(cache)
    assert torch.equal(model.generate(ids, attention_mask=mask, **{CACHE_NAME: cache}, **GREEDY), wanted)
    new = model.generate(ids[:, SPOKEN:], attention_mask=mask, **{CACHE_NAME: again}, **GREEDY)
    assert torch.equal(new, wanted[:, SPOKEN:])


def test_a_conversation_goes_on_behind_the_padding_of_rows_that_ended():
    model = tiny_model()
    ids = tokens(2, 9)
    free = model.generate(ids, **GREEDY)
    assert free[0, 10] not in free[1]
    options = {"eos_token_id": int(free[0, 10]), "pad_token_id": 0, **GREEDY}
    cache = TNTCache(model.config)
    ids = model.generate(ids, **options, **{CACHE_NAME: cache})
    assert ids[0, 11:].tolist() == [0, 0], "the first row ends two tokens before the other"
    mask = torch.ones_like(ids)
    mask[0, 11:] = ids[0, 11:] = 0
    ids, mask = followed(ids, mask)
    other, again = ids.clone(), ids.clone()
    again[0, 11:13], other[0, 10] = 7, other[0, 10] + 1
    options |= {"attention_mask": mask}
    with pytest.raises(ValueError, match="input_ids: row 0"):
        model.generate(other, **options, **{CACHE_NAME: cache})
    assert torch.equal(
        model.generate(again, **options, **{CACHE_NAME: cache})[:, 16:], model.generate(again, **options)[:, 16:]
    )


FORGETS = {
    "other calls": lambda model, cache: model(tokens(2, 5), attention_mask=torch.ones(2, 17), **{CACHE_NAME: cache}),
    "rows change places": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "rows are selected": lambda model, cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "rows repeat": lambda model, cache: cache.batch_repeat_interleave(1),
    "tokens are taken back": lambda model, cache: (cache.crop(-2), model(tokens(2, 2), **{CACHE_NAME: cache})),
    "it starts over": lambda model, cache: (
        cache.reset(),
        model(tokens(2, SPOKEN, seed=9), **{CACHE_NAME: cache}),
    ),
    "embeddings are read": lambda model, cache: (
        cache.reset(),
        model.generate(
            tokens(2, 9, seed=9),
            inputs_embeds=model.get_input_embeddings()(tokens(2, 9)),
            **{CACHE_NAME: cache},
            **GREEDY,
        ),
    ),
}


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS.keys())
def test_nobody_is_refused_over_tokens_that_are_not_known(forget):
    model = tiny_model(memory_layers=[], sliding_window=None)
    cache = TNTCache(model.config)
    model.generate(tokens(2, 9), **{CACHE_NAME: cache}, **GREEDY)
    assert cache.get_seq_length() == SPOKEN and cache.tokens_noted is not None
    with torch.no_grad():
        forget(model, cache)
    rows, past = cache.layers[0].keys.shape[0], cache.get_seq_length()
    model.generate(tokens(rows, past + 2, seed=7), **{CACHE_NAME: cache}, **GREEDY)


@subjects
@pytest.mark.parametrize(("given", "columns"), [(16, 20), (5, 14)])
def test_a_mask_of_another_conversation_is_refused(make, given, columns):
    model = make()
    cache = filled(model, tokens(1, READ))
    with pytest.raises(ValueError, match="holds 11 tokens already"):
        model.generate(tokens(1, given), attention_mask=ones(columns), **{CACHE_NAME: cache}, **GREEDY)


def test_embeddings_are_of_the_whole_conversation():
    model = tiny_model()
    cache, embeds = filled(model, tokens(1, READ)), model.get_input_embeddings()(tokens(1, 15))
    with pytest.raises(ValueError, match=r"26 columns, the prompt 15, .* pass the whole conversation\."):
        model.generate(inputs_embeds=embeds, attention_mask=ones(26), **{CACHE_NAME: cache}, **GREEDY)


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_speculation_begins_with_an_empty_cache(how):
    """The library's first step takes all tokens for new ones."""
    model = tiny_model(memory_layers=[], sliding_window=None)
    options = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {"assistant_model": model}
    whole, cache = tokens(1, 9).repeat(1, 2), TNTCache(model.config)
    wanted = model.generate(whole, attention_mask=ones(18), **GREEDY)
    options |= {"attention_mask": ones(18), CACHE_NAME: cache, **GREEDY}
    assert torch.equal(model.generate(whole, **options), wanted)
    longer = torch.cat([wanted, whole], 1)
    options |= {"attention_mask": ones(40)}
    with pytest.raises(ValueError, match="pass only the new tokens with an attention_mask of all tokens"):
        model.generate(longer, **options)
    found = model.generate(longer[:, cache.get_seq_length() :], **options)  # each of which is then read once
    assert torch.equal(found[:, -4:], model.generate(longer, attention_mask=ones(40), **GREEDY)[:, -4:])


def test_a_refused_prompt_of_beams_leaves_the_cache():
    model, whole = tiny_model(), tokens(1, 16)
    cache = filled(model, whole[:, :READ])
    cache.batch_repeat_interleave(3)
    options = {CACHE_NAME: cache, "num_beams": 3, **GREEDY}
    with pytest.raises(ValueError, match="holds 11 tokens already"):
        model.generate(whole, attention_mask=ones(20), **options)
    model.generate(whole, attention_mask=ones(16), **options)
    with pytest.raises(ValueError, match="running beams"):
        model.generate(torch.cat([whole, whole], 1), attention_mask=ones(32), **options)


@pytest.mark.parametrize("length", [READ, 6])
def test_a_decoding_loop_of_ones_own_does_not_read_twice_either(length):
    model = tiny_model()
    cache = filled(model, tokens(1, READ))

    def loop(model, input_ids, **kwargs):
        return model(input_ids, **{CACHE_NAME: cache})

    with pytest.raises(ValueError, match="holds 11 tokens already"):
        model.generate(
            tokens(1, length), attention_mask=ones(length), custom_generate=loop, **{CACHE_NAME: cache}, **GREEDY
        )


def test_embeddings_are_not_read_in_pieces():
    """The library splits `input_ids` alone; the error would be about arguments that nobody gave."""
    model, (ids, mask) = tiny_model(), left_padded([tokens(13), tokens(9)])
    embeds = model.get_input_embeddings()(ids)
    for given in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "input_ids": ids}):
        with pytest.raises(ValueError, match="prefill_chunk_size=4: only input_ids are read in pieces, not inputs_em"):
            model.generate(**given, attention_mask=mask, prefill_chunk_size=4, **GREEDY)
    wanted = model.generate(ids, attention_mask=mask, **GREEDY)
    given = {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": mask}
    assert torch.equal(model.generate(**given, prefill_chunk_size=13, **GREEDY), wanted)
