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
