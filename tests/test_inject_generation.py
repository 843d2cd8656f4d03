"""Injected models with a cache: decoding is the full forward pass, however tokens come, and `generate` works."""

import copy

import pytest
import torch
from tiny import left_padded, tokens
from tiny_hosts import CLOSED, HOSTS, MODES, OPEN_LIZA, OPEN_TNT, OPENED, decode, hosts, layouts, positions, tiny_host
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from tnt_hf import TNTCache, TNTConfig
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import inject, unload
from tnt_hf.conversion.injection_config import LiZAConfig


# float64 models, but the hosts' norms, RoPE and softmax round to float32 on the way.
CLOSE = {"rtol": 0, "atol": 1e-5}
opened = pytest.mark.parametrize("config", OPENED.values(), ids=OPENED.keys())
modes = pytest.mark.parametrize("config", MODES.values(), ids=MODES.keys())
PIECES = [9, 1, 2, 1, 15, 1, 1, 3]  # prompts that end inside a chunk, single tokens, several at once


@torch.no_grad()
def logits(model, input_ids, **kwargs):
    return model(input_ids, **kwargs).logits


def double(kind="llama", **changes):
    return tiny_host(kind, torch.float64, **changes)


def greedy(model, ids, mask, count):
    """`[B, count]` next tokens by full forward passes without a cache."""
    for _ in range(count):
        last = logits(model, ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)[:, -1]
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return ids[:, -count:]


# --- decoding is the full forward pass ------------------------------------------------------------------------------


@hosts
@opened
def test_cached_decoding_is_the_full_forward_pass(kind, config):
    model, ids = inject(double(kind, attn="eager"), config), tokens(2, 33)
    found, cache = decode(model, ids, PIECES)
    torch.testing.assert_close(found, logits(model, ids), **CLOSE)
    assert cache.get_seq_length() == 33


@opened
def test_layers_without_keys_of_their_own_get_no_memory(config):
    """They look at those of an earlier layer, which are longer than this call's tokens."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = double("gemma4_text", attn="eager", num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2)
    with pytest.raises(ValueError, match=r"layers=\[2\].*2 has no attention.*layers \[0, 1\]"):
        inject(model, type(config)(layers=[2]))
    inject(model, config)
    assert [hasattr(layer.self_attn, "memory") for layer in model.model.layers] == [True, True, False, False]
    ids = tokens(2, 33)
    torch.testing.assert_close(decode(model, ids, PIECES)[0], logits(model, ids), **CLOSE)


@layouts
@modes
def test_cached_decoding_in_every_mode(kind, config):
    model, ids = inject(double(kind), config), tokens(2, 33)
    torch.testing.assert_close(decode(model, ids, PIECES)[0], logits(model, ids), **CLOSE)


@layouts
@opened
def test_rows_at_different_memory_times(kind, config):
    """Left padding in the prompt, right padding in a later turn: every row is what it is alone."""
    model = inject(double(kind), config)
    rows, length = [tokens(21), tokens(16, seed=2)], [9, 4]
    ids, mask = left_padded([row[:n] for row, n in zip(rows, length)])
    turn, turn_mask = left_padded([row[n : n + 7].flip(0) for row, n in zip(rows, length)])
    ids, mask = torch.cat([ids, turn.flip(1)], 1), torch.cat([mask, turn_mask.flip(1)], 1)
    ids, mask = torch.cat([ids, ids.new_zeros(2, 3)], 1), torch.cat([mask, mask.new_zeros(2, 3)], 1)
    last = torch.stack([row[n + 7 : n + 12] for row, n in zip(rows, length)])
    ids, mask = torch.cat([ids, last], 1), torch.cat([mask, mask.new_ones(2, 5)], 1)
    # a sliding window counts the padding between two turns, as it does in the source
    if "sliding_window" in HOSTS[kind]:
        ids, mask = (torch.cat([x[:, :16], x[:, 19:]], 1) for x in (ids, mask))
    found, _ = decode(model, ids, [9, ids.shape[1] - 14, 1, 1, 3], mask)
    for row, n, logit, valid in zip(rows, length, found, mask.bool()):
        torch.testing.assert_close(logit[valid], logits(model, row[None, : n + 12])[0], **CLOSE)


@opened
def test_a_batch_operation_takes_the_memory_along(config):
    model, ids = inject(double(), config), tokens(3, 20)
    expected = logits(model, ids)[:, 13:]
    _, cache = decode(model, ids[:, :13], [13])

    def go_on(cache, order):
        return logits(model, ids[order, 13:], past_key_values=cache, use_cache=True)

    for operation, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed = copy.deepcopy(cache)
        operation(changed)
        torch.testing.assert_close(go_on(changed, order), expected[order], **CLOSE)
    cache.reset()
    torch.testing.assert_close(decode(model, ids, [5, 15], cache=cache)[0][:, 13:], expected, **CLOSE)


@opened
def test_gradients_flow_through_the_cache(config):
    model, ids = inject(double(), config), tokens(2, 12)

    def gradient(pieces):
        model.zero_grad()
        cache, total, end = None, 0.0, 0
        for length in pieces:
            out = model(ids[:, end : end + length], past_key_values=cache, use_cache=True)
            cache, end, total = out.past_key_values, end + length, total + out.logits.square().sum()
        total.backward()
        return model.model.layers[0].self_attn.v_proj.weight.grad.clone()

    torch.testing.assert_close(gradient([5, 1, 6]), gradient([12]), rtol=1e-5, atol=1e-5)


@opened
def test_where_checkpointed_training_keeps_a_cache_the_memory_is_in_it(config):
    """Without gradients nothing is checkpointed since transformers 5.24, so there the model makes a cache."""
    source, model, ids = double().train(), inject(double(), config).train(), tokens(2, 14)
    expected = logits(model, ids)
    for x in (source, model):
        x.activation_checkpointing_enable()
    with torch.no_grad():
        kept, first = (getattr(x(ids[:, :9]), CACHE_NAME) for x in (source, model))
    assert (first is None) == (kept is None)
    if first is not None:
        found = logits(model, ids[:, 9:], **{CACHE_NAME: first})
        torch.testing.assert_close(found, expected[:, 9:], **CLOSE)


@pytest.mark.slow
@opened
def test_compiled_and_plain_calls_share_a_cache(config):
    model, ids = inject(double(), config), tokens(2, 12)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        cache = compiled(ids[:, :9], use_cache=True).past_key_values
    torch.testing.assert_close(decode(model, ids[:, 9:], [2, 1], cache=cache)[0], logits(model, ids)[:, 9:], **CLOSE)


# --- generate -------------------------------------------------------------------------------------------------------


@hosts
def test_a_closed_memory_generates_what_the_source_does(kind):
    ids, mask = left_padded([tokens(9), tokens(5, seed=2)])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "output_scores": True, "return_dict_in_generate": True}
    for dtype, beams in ((torch.float32, 1), (torch.bfloat16, 3)):
        model = tiny_host(kind, dtype)
        wanted = model.generate(ids, **settings, num_beams=beams, do_sample=False)
        for config in CLOSED.values():
            found = inject(model, config).generate(ids, **settings, num_beams=beams, do_sample=False)
            assert torch.equal(found.sequences, wanted.sequences)
            assert all(map(torch.equal, found.scores, wanted.scores))
            unload(model)


@hosts
@opened
def test_greedy_generation_from_padded_prompts(kind, config):
    model = inject(double(kind), config)
    ids, mask = left_padded([tokens(9), tokens(5, seed=2)])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(found[:, 9:], greedy(model, ids, mask, 6))


@layouts
@opened
def test_beams_are_the_same_without_a_cache(kind, config):
    model, ids = inject(double(kind), config), tokens(2, 9)
    settings = {"max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 3, "do_sample": False}
    settings["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **settings, use_cache=False)
    assert torch.equal(model.generate(ids, **settings), expected) and len(expected) == 6


@opened
def test_sampled_sequences_of_one_prompt_have_their_own_memory(config):
    model, ids = inject(double(), config), tokens(1, 9)
    out = model.generate(
        ids, max_new_tokens=6, do_sample=True, num_return_sequences=3, attention_mask=torch.ones_like(ids)
    )
    assert len({tuple(row) for row in out.tolist()}) > 1
    out = model.generate(ids, max_new_tokens=9, output_logits=True, return_dict_in_generate=True, do_sample=True)
    full = logits(model, out.sequences)[:, 8:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full, rtol=0, atol=1e-5)


@opened
def test_several_turns_on_one_cache(config):
    model, ids = inject(double(), config), tokens(1, 9)
    settings = {"max_new_tokens": 5, "do_sample": False}
    cache = DynamicCache(config=model.config)
    first = model.generate(ids, **settings, past_key_values=cache)
    second = torch.cat([first, tokens(1, 4, seed=3)], 1)
    found = model.generate(second, **settings, past_key_values=cache)
    assert torch.equal(found, model.generate(second, **settings))
    assert torch.equal(found, model.generate(second, **settings, prefill_chunk_size=5))
    assert torch.equal(found, model.generate(second, **settings, past_key_values=DynamicCache()))


# --- what cannot be right is refused --------------------------------------------------------------------------------


@opened
def test_padding_that_ended_rows_were_fed_is_not_taken_back(config):
    """The host's own `generate` calls it valid, so the memory has read it."""
    model, ids = inject(double(), config), tokens(2, 9)
    settings = {"do_sample": False, "pad_token_id": 0}
    free = model.generate(ids, max_new_tokens=8, **settings)[:, 9:].tolist()
    eos, cache = next(x for i, x in enumerate(free[0]) if x not in free[1][: i + 4]), DynamicCache(config=model.config)
    out = model.generate(ids, max_new_tokens=8, eos_token_id=eos, past_key_values=cache, **settings)
    valid = torch.ones_like(out)
    valid[0, 10 + out[0, 9:].tolist().index(eos) :] = 0
    ids, more = torch.cat([out, tokens(2, 4, seed=8)], 1), torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="attention_mask calls .* of the .* cached tokens .* cannot forget"):
        model.generate(ids, past_key_values=cache, attention_mask=torch.cat([valid, more], 1), **settings)
    settings |= {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    settings["attention_mask"] = torch.ones_like(ids)
    anew = model.generate(ids, **settings, use_cache=False)
    found = model.generate(ids, **settings, past_key_values=cache)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(anew.logits), **CLOSE)


def filled_by_the_source(model):
    source = unload(copy.deepcopy(model))
    return source(tokens(1, 5), use_cache=True).past_key_values


def filled_by_another_injection(model):
    other = inject(unload(copy.deepcopy(model)), LiZAConfig(weight=0.25))
    return other(tokens(1, 5), use_cache=True).past_key_values


def cropped_behind_our_back(model):
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
    return cache


def grown_behind_our_back(model):
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = (torch.cat([x, x[:, :, -1:]], 2) for x in (layer.keys, layer.values))
    return cache


def offloading(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # asked for when it is made, it wants a GPU
    return cache


BAD_CACHES = {
    "no Cache": (lambda model: [(torch.zeros(1), torch.zeros(1))], "list is not a transformers Cache"),
    "static": (lambda model: StaticCache(model.config, max_cache_len=16), "StaticCache keeps no memory state"),
    "two": (lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache keeps no"),
    "offloaded": (offloading, "offloading=True"),
    "TNT": (lambda model: TNTCache(TNTConfig(num_hidden_layers=2, sliding_window=None)), "layer 0 is a TNTFullLayer"),
    "layers": (lambda model: DynamicCache(config=tiny_host("llama", num_hidden_layers=3).config), "has 3 layers"),
    "layer": (lambda model: DynamicCache(config=tiny_host("llama", num_hidden_layers=1).config), "has 1 layers"),
    "source": (filled_by_the_source, "holds 5 tokens, but no memory of them"),
    "other": (filled_by_another_injection, "another model or injection: weight=0.25, the model has 0.5"),
    "cropped": (cropped_behind_our_back, "holds 4 tokens, its memory has seen 5"),
    "grown": (grown_behind_our_back, "holds 6 tokens, its memory has seen 5"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BAD_CACHES)
def test_a_cache_that_cannot_hold_the_memory_is_refused(kind):
    model = inject(tiny_host("llama"), OPEN_LIZA)
    make, message = BAD_CACHES[kind]
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 1), past_key_values=make(model), use_cache=True)


def test_a_bare_cache_that_the_source_has_used_and_reset_gets_its_room():
    model, cache, ids = tiny_host("llama"), DynamicCache(), tokens(1, 5)
    logits(model, ids, past_key_values=cache)
    cache.reset()
    inject(model, OPEN_LIZA)
    assert torch.equal(logits(model, ids, past_key_values=cache), logits(model, ids))


def test_a_static_cache_is_refused_by_generate():
    with pytest.raises(ValueError, match="StaticCache keeps no memory state"):
        inject(tiny_host("gemma3_text"), OPEN_LIZA).generate(tokens(1, 5), cache_implementation="static")


@opened
def test_cropping_and_speculation_are_refused(config):
    model, ids = inject(tiny_host("llama"), config), tokens(1, 9)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="tokens_to_remove=-1: a memory cannot forget"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, max_new_tokens=3, prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="a memory cannot forget"):  # as the assistant of another model
        tiny_host("llama").generate(ids, max_new_tokens=6, assistant_model=model, do_sample=False)


def test_going_on_needs_the_mask_of_all_tokens():
    model = inject(tiny_host("llama"), OPEN_TNT)
    ids, mask = left_padded([tokens(5), tokens(3, seed=2)])
    cache = model(ids, attention_mask=torch.ones_like(mask), use_cache=True).past_key_values
    model(ids[:, :1], past_key_values=cache, use_cache=True)  # nothing was padding
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask is None or all ones, but some of the 5 tokens"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="attention_mask has 1 columns"):
        model(ids[:, :1], attention_mask=mask[:, -1:], past_key_values=cache, use_cache=True)


@opened
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@pytest.mark.parametrize("past", [0, 9])
def test_what_an_interrupted_call_leaves_is_not_gone_on_from(kind, config, past):
    """A hybrid's first layer has read tokens of which neither keys nor a memory tell."""
    model = inject(double(kind), config)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        if past:
            model(tokens(1, past), past_key_values=cache)
    with pytest.raises(ValueError, match="exactly one of"):
        model(tokens(1, 1), inputs_embeds=torch.zeros(1, 1, 32), past_key_values=cache)
    assert getattr(cache, "unusable", None) is None

    def ctrl_c(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 2), past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match=f"{CACHE_NAME} was left behind by a call that broke off"):
        model(tokens(1, 1), past_key_values=cache)
    unload(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_cache_beside_use_cache_false_is_refused():
    """Its memory would read all tokens again with every new one."""
    model, ids = inject(tiny_host("llama"), OPEN_LIZA), tokens(1, 6)
    cache = model(ids, use_cache=True)[CACHE_NAME]
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids[:, :1], use_cache=False, **{CACHE_NAME: cache})


@opened
def test_a_cache_of_inference_mode_goes_on_in_training(config):
    model, ids = inject(tiny_host("llama", torch.float64), config), tokens(2, 12)
    caches = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            caches.append(model(ids[:, :9], use_cache=True).past_key_values)
    gradients = []
    for cache in caches:
        model.zero_grad()
        model(ids[:, 9:], past_key_values=cache).logits.square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.v_proj.weight.grad.clone())
    assert torch.equal(*gradients)
