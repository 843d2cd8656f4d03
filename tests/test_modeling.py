"""TNTModel and TNTForCausalLM as a specification: causal, independent of how tokens are batched, padded, packed and
split, equal to the base models it extends, and usable with every mode of generate()."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from tiny import MODES, TINY, few_modes, later, left_padded, tiny_config, tiny_model, tokens
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM, TNTModel
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import lora_config
from tnt_hf.presets import PRESETS


EXACT, SINGLE = 1e-9, 1e-4  # float64 and float32 tolerances
modes = pytest.mark.parametrize("changes", MODES.values(), ids=MODES.keys())
SOME = ("default", "window and full attention", "mal", "lmm", "momentum and forgetting")
some_modes = pytest.mark.parametrize("changes", [MODES[name] for name in SOME])


def pieces(model, ids, cuts, mask=None, **kwargs):
    """Logits of `ids` fed in pieces that end at `cuts`, through one cache; and the cache."""
    past, out = kwargs.pop("past_key_values", None), []
    for start, end in itertools.pairwise([0, *cuts, ids.shape[1]]):
        known = None if mask is None else mask[:, :end]
        step = model(ids[:, start:end], attention_mask=known, past_key_values=past, use_cache=True, **kwargs)
        past = step.past_key_values
        out.append(step.logits)
    return torch.cat(out, 1), past


def close(a, b, tolerance=EXACT):
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a, b, atol=tolerance * max(1.0, b.abs().max().item()), rtol=0)


# ----------------------------------------------------------------------------------------------- time, split and batch


@modes
@torch.no_grad()
def test_future_tokens_change_nothing(changes):
    model, ids = tiny_model(**changes), tokens(2, 37)
    logits = model(ids).logits
    for t in (1, 8, 15, 16, 17, 36):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 1) % TINY["vocab_size"]
        other = model(changed).logits
        assert torch.equal(other[:, :t], logits[:, :t])
        assert not torch.equal(other[:, t], logits[:, t])


@few_modes
@torch.no_grad()
def test_any_split_equals_the_full_forward(changes):
    model, ids = tiny_model(**changes), tokens(2, 37)
    full = model(ids, use_cache=False).logits
    for cuts in (
        [20],
        [1],
        [7, 8, 9],
        [16, 17, 33],
        [8, 11, 12, 16, 19, 20, 24, 27],
        [5, *range(6, 37)],
        list(range(1, 37)),
    ):
        close(pieces(model, ids, cuts)[0], full)


@some_modes
@torch.no_grad()
def test_any_split_equals_the_full_forward_in_float32(changes):
    model, ids = tiny_model(torch.float32, **changes), tokens(2, 37)
    full = model(ids, use_cache=False).logits
    for cuts in ([20], [3, *range(4, 37)]):
        close(pieces(model, ids, cuts)[0], full, SINGLE)


@torch.no_grad()
def test_every_prefill_length_decodes_the_same():
    model, ids = tiny_model(), tokens(1, 36)
    full = model(ids, use_cache=False).logits
    for prompt in range(1, 34):
        close(pieces(model, ids, [prompt, prompt + 1, prompt + 2])[0], full)


@modes
@torch.no_grad()
def test_padding_changes_nothing(changes):
    model, ids = tiny_model(**changes), tokens(1, 21)
    alone = model(ids, use_cache=False).logits
    for pad in (1, 2, 7, 16, 37):
        padded, mask = torch.cat([ids.new_zeros(1, pad), ids], 1), torch.ones(1, 21 + pad, dtype=torch.long)
        mask[:, :pad] = 0
        close(model(padded, attention_mask=mask, use_cache=False).logits[:, pad:], alone)
        right = torch.cat([ids, ids.new_zeros(1, pad)], 1)
        close(model(right, attention_mask=mask.flip(1), use_cache=False).logits[:, :21], alone)


@torch.no_grad()
def test_every_pad_length_from_1_to_37():
    model, ids = tiny_model(), tokens(1, 18)
    alone = model(ids, use_cache=False).logits
    padded, mask = left_padded([torch.cat([ids.new_zeros(pad), ids[0]]) for pad in range(1, 38)])
    mask = (padded != 0).long()
    close(model(padded, attention_mask=mask, use_cache=False).logits[:, -18:], alone.expand(37, -1, -1))


@few_modes
@torch.no_grad()
def test_rows_at_different_memory_times(changes):
    """Left-padded rows of unequal length, prefilled in pieces (also inside the padding) and decoded token by token."""
    model, rows = tiny_model(**changes), [tokens(n, seed=n) for n in (31, 30, 17, 6)]
    ids, mask = left_padded(rows)
    for cuts in ([12], [26, 27, 28], list(range(1, 31))):
        logits, _ = pieces(model, ids, cuts, mask)
        for row, one in zip(logits, rows):
            close(row[-len(one) :], model(one[None], use_cache=False).logits[0])


@few_modes
@torch.no_grad()
def test_padding_between_two_turns_changes_nothing(changes):
    """Turns padded on the right, on the left and in the middle of a batch that goes on from its cache."""
    model = tiny_model(**changes)
    turns = [[tokens(n, seed=n) for n in lengths] for lengths in ((9, 2, 7, 3), (4, 11, 1, 2), (12, 1, 5, 20))]
    ids, mask = [], []
    for k, rows in enumerate(zip(*turns)):
        padded, valid = left_padded(list(rows))
        flip = k % 2 == 0  # padded on the right
        ids.append(torch.stack([x.roll(-int((v == 0).sum())) for x, v in zip(padded, valid)]) if flip else padded)
        mask.append(valid.flip(1) if flip else valid)
    ids, mask = torch.cat(ids, 1), torch.cat(mask, 1)
    ends = [12, 23, 30]
    for logits in (model(ids, attention_mask=mask, use_cache=False).logits, pieces(model, ids, ends, mask)[0]):
        for row, valid, rows in zip(logits, mask, turns):
            close(row[valid.bool()], model(torch.cat(rows)[None], use_cache=False).logits[0])
    close(pieces(model, ids, list(range(1, ids.shape[1])), mask)[0][mask.bool()], logits[mask.bool()])


@modes
@torch.no_grad()
def test_packed_documents_equal_documents_alone(changes):
    model, documents = tiny_model(**changes), [tokens(n, seed=n) for n in (13, 1, 2, 20, 3)]
    ids = torch.cat(documents)[None]
    lengths = [len(x) for x in documents]
    alone = torch.cat([model(x[None], use_cache=False).logits for x in documents], 1)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    number = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None].int()
    for packing in (
        {"position_ids": position_ids},
        {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        {"seq_idx": number},
        {"seq_idx": number % 2},  # numbers come back, documents do not
    ):
        output = model(ids, **packing)
        close(output.logits, alone)
        assert output.past_key_values is None  # a cache could not go on from several documents


@torch.no_grad()
def test_packing_with_padding_and_several_rows():
    model, documents = tiny_model(), [tokens(n, seed=n) for n in (9, 8, 12, 3)]
    ids, mask = left_padded([torch.cat(documents[:2]), torch.cat(documents[2:])])
    positions, _ = left_padded(
        [torch.cat([torch.arange(len(x)) for x in pair]) for pair in (documents[:2], documents[2:])]
    )
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    for row, pair in zip(logits, (documents[:2], documents[2:])):
        alone = torch.cat([model(x[None]).logits[0] for x in pair])
        close(row[-len(alone) :], alone)


def test_packing_and_a_cache_exclude_each_other():
    model, ids = tiny_model(), tokens(1, 8)
    with pytest.raises(ValueError, match="position_ids restart"):
        model(ids, position_ids=torch.arange(4).repeat(2)[None], past_key_values=TNTCache(model.config))
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(tokens(2, 4), cu_seq_lens_q=torch.tensor([0, 2, 8]))


@torch.no_grad()
def test_the_chunked_memory_equals_the_paper_text():
    for changes in (MODES["default"], MODES["momentum and forgetting"], MODES["Eq. 7 as printed"]):
        chunk, naive = tiny_model(**changes), tiny_model(**changes, memory_implementation="naive")
        ids, mask = left_padded([tokens(31), tokens(18)])
        logits = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (chunk, naive))
        close(*logits)


# ------------------------------------------------------------------------------------------------------------ generate


def greedy_reference(model, ids, mask, count):
    for _ in range(count):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return ids


@pytest.mark.parametrize(
    "name", ["default", "lmm", *later("window and full attention", "stage 2", "persistent tokens")]
)
def test_generate(name):
    model = tiny_model(**MODES[name])
    ids, mask = left_padded([tokens(11), tokens(6)])
    with torch.no_grad():
        reference = greedy_reference(model, ids, mask, 20)
    greedy = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(ids, **greedy), reference)
    assert torch.equal(model.generate(ids, use_cache=False, **greedy), reference)
    assert torch.equal(model.generate(ids, prefill_chunk_size=3, **greedy), reference)
    assert torch.equal(model.generate(ids, cache_implementation="static", **greedy), reference)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(config=model.config), **greedy), reference)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **greedy), reference[:, 11:])

    beam = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": False,
    }
    reference = model.generate(ids, use_cache=False, **beam)
    assert torch.equal(model.generate(ids, **beam), reference)
    assert torch.equal(model.generate(ids, cache_implementation="static", **beam), reference)

    samples = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, "use_cache": use_cache}
        samples.append(model.generate(ids, attention_mask=mask, **kwargs))
    assert torch.equal(*samples)


def test_multi_turn_continuation():
    model, cache = tiny_model(), TNTCache(tiny_config())
    ids, mask = left_padded([tokens(11), tokens(6)])
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=7, do_sample=False)
    conversation = torch.cat([first, tokens(2, 5, seed=5)], 1)
    mask = torch.cat([mask, mask.new_ones(2, 12)], 1)
    with torch.no_grad():
        reference = greedy_reference(model, conversation, mask, 7)
    kwargs = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    again = copy.deepcopy(cache)
    assert torch.equal(model.generate(conversation, past_key_values=cache, **kwargs), reference)
    # only what the cache has not seen: the last generated token and the new ones
    new = conversation[:, cache_length(again) :]
    assert torch.equal(model.generate(new, past_key_values=again, **kwargs)[:, -7:], reference[:, -7:])


def cache_length(cache) -> int:
    return int(cache.get_seq_length())


def test_refused_generation():
    model, ids = tiny_model(), tokens(1, 6)
    offloading = DynamicCache(config=model.config)
    offloading.offloading = True  # asked for when it is made, it wants a GPU
    refused = [
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"assistant_model": tiny_model()}, "assisted generation"),
        ({"cache_implementation": "offloaded"}, "offloaded"),
        ({"cache_implementation": "offloaded_static"}, "offloaded_static"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"past_key_values": DynamicCache()}, "without config"),
        ({"past_key_values": offloading}, "offloading"),
        ({"past_key_values": TNTCache(tiny_config(num_hidden_layers=3))}, "filled with 3, the model has 2"),
        (
            {"past_key_values": DynamicCache(config=tiny_config(num_hidden_layers=3))},
            "has 3 layers, num_hidden_layers=2",
        ),
    ]
    for kwargs, message in refused:
        with pytest.raises(ValueError, match=message):
            model.generate(ids, max_new_tokens=3, **kwargs)


def test_continuation_needs_the_whole_mask():
    model, ids = tiny_model(), tokens(2, 9)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    past = model(ids, attention_mask=padded).past_key_values
    with pytest.raises(ValueError, match="attention_mask has 2 columns.*9 tokens"):
        model(ids[:, :2], attention_mask=torch.ones(2, 2), past_key_values=past)
    with pytest.raises(ValueError, match="attention_mask is None"):
        model(ids[:, :1], past_key_values=past)
    model(ids[:, :1], past_key_values=model(ids).past_key_values)  # nothing is padding
    with pytest.raises(ValueError, match="attention_mask has 2 columns"):
        model.generate(ids[:, :2], attention_mask=torch.ones(2, 2), past_key_values=past, max_new_tokens=2)
    with pytest.raises(ValueError, match="2-D mask"):
        model(ids, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=CACHE_NAME):
        model(ids, past_key_values="a cache")
    with pytest.raises(ValueError, match="create_masks_for_generate"):
        model(ids, attention_mask={"sliding_attention": None})
    with pytest.raises(ValueError, match="exactly one"):
        model()


# ------------------------------------------------------------------------------------------------ modes of computation


@some_modes
def test_eval_and_inference_mode_equal_training(changes):
    model, ids = tiny_model(**changes), tokens(2, 37)
    with torch.inference_mode():
        inference = model(ids).logits
    assert torch.equal(model.train()(ids).logits, inference)


@some_modes
def test_gradient_checkpointing_changes_no_gradient(changes):
    model, ids = tiny_model(**changes).train(), tokens(2, 37)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient)
        assert gradient.abs().sum() > 0, name


def test_gradients_flow_through_the_cache():
    model, ids = tiny_model().train(), tokens(2, 37)
    gradients = []
    for cuts in ([], [13, 20]):
        model.zero_grad()
        pieces(model, ids, cuts)[0].square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient)


def test_loss_respects_num_items_in_batch():
    model, ids = tiny_model(), tokens(2, 12)
    mean, logits = model(ids, labels=ids).loss, model(ids).logits.float()
    close(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), mean)
    close(model(ids, labels=ids, num_items_in_batch=torch.tensor(44)).loss, mean / 2)  # 2 * 11 shifted labels


@torch.no_grad()
def test_outputs():
    model, ids = tiny_model(attn_implementation="eager"), tokens(2, 12)
    output = model(ids, output_hidden_states=True, output_attentions=True, output_surprise=True)
    assert len(output.hidden_states) == 3 and len(output.attentions) == 2 and len(output.surprise) == 2
    assert output.attentions[0].shape == (2, 4, 12, 12) and output.surprise[0].shape == (2, 12)
    assert all((x >= 0).all() for x in output.surprise)
    assert model(ids).surprise is None
    close(model(ids, logits_to_keep=3).logits, output.logits[:, -3:])
    plain = model(ids, return_dict=False)
    assert isinstance(plain, tuple) and torch.equal(plain[0], model(ids).logits)
    assert model(ids, labels=ids, output_surprise=True).surprise is not None
    model.config.output_surprise = True
    assert torch.equal(model.model(ids).surprise[1], output.surprise[1])
    for changes, width in (({"num_persistent_tokens": 3}, 15), ({"variant": "lmm", "memory_layers": [1]}, 12)):
        found = tiny_model(attn_implementation="eager", **changes)(ids, output_attentions=True).attentions
        assert {x.shape for x in found} == {(2, 4, 12, width)} and len(found) == (2 if width == 15 else 1)


@torch.no_grad()
def test_surprise_falls_on_a_repeated_sequence():
    model = tiny_model(
        torch.float32, local_reset_interval=None, memory_depth=1, memory_max_lr=1.0, global_chunk_size=None
    )
    once = tokens(4, 48)
    for surprise in model(torch.cat([once, once], 1), output_surprise=True).surprise:
        assert (surprise[:, 48:].mean(1) < surprise[:, :48].mean(1)).all()


def test_state_and_weights_stay_float32_in_half_precision(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    model = TNTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for each in (model, AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)):
        memory = each.model.layers[0].memory
        assert {x.dtype for x in (memory.gate.scale, *memory.memories.parameters())} == {torch.float32}
        assert each.model.layers[0].self_attn.q_proj.weight.dtype == memory.gate.proj.weight.dtype == torch.bfloat16
    ids = tokens(2, 37)
    single = tiny_model(torch.float32)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        decoded, past = pieces(model, ids, [20, *range(21, 37)])
        assert past.layers[0].recurrent_states[0].dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast = single(ids, use_cache=False).logits
            assert pieces(single, ids, [20])[1].layers[0].recurrent_states[0].dtype == torch.float32
        exact = single(ids).logits
    for approximate in (full, decoded, autocast):
        assert (approximate.float() - exact).abs().max() < 0.1 * exact.abs().max()
    with torch.no_grad():
        model.bfloat16()(ids)  # everything in bfloat16, W_init included


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dynamic", "padded"))])
def test_compiled_training_step(how):
    torch._dynamo.reset()
    model, ids, mask = tiny_model(torch.float32, num_hidden_layers=1).train(), tokens(2, 24), None
    if how == "padded":
        ids, mask = left_padded([ids[0], ids[1, :17]])
    gradients = []
    for step in (model, torch.compile(model, backend="aot_eager", dynamic=how == "dynamic" or None)):
        model.zero_grad()
        step(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, SINGLE)


# ---------------------------------------------------------------------------------------- base models and checkpoints


BASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3 rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
}
BACKBONE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_base_weights_with_a_closed_gate_give_the_base_model(name, dtype, tmp_path):
    model_class, config_class, changes = BASES[name]
    fields = {field: TINY[field] for field in (*BACKBONE, "num_key_value_heads", "initializer_range")}
    model_class(config_class(**fields, **changes)).save_pretrained(tmp_path)
    base = model_class.from_pretrained(tmp_path, dtype=dtype).eval()
    names = ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "head_dim")
    own = {field: getattr(base.config, field, None) for field in names}
    config = tiny_config(
        **own,
        sliding_window=getattr(base.config, "sliding_window", None),
        attention_bias="qwen2" == name or bool(getattr(base.config, "attention_bias", False)),
        attention_output_bias=False if name == "qwen2" else None,
        mlp_bias=bool(getattr(base.config, "mlp_bias", False)),
        qk_norm=name == "qwen3",
        memory_gate_init=0.0,
        local_reset_interval=16,
    )
    model = TNTForCausalLM.from_pretrained(tmp_path, config=config, dtype=dtype).eval()
    model.model.layers[0].memory.memories[0].weights[0].fill_(torch.nan)  # closed is closed, whatever is behind it
    ids, mask = left_padded([tokens(19), tokens(12)])
    for attention_mask in (None, mask):
        expected = base(ids, attention_mask=attention_mask).logits
        assert torch.equal(model(ids, attention_mask=attention_mask).logits, expected)
    greedy = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **greedy), base.generate(ids, **greedy, eos_token_id=None))


@few_modes
@torch.no_grad()
def test_save_and_load(changes, tmp_path):
    model, ids = tiny_model(torch.float32, **changes), tokens(2, 20)
    model.save_pretrained(tmp_path)
    again, info = TNTForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    again.set_attn_implementation(model.config._attn_implementation)
    loaded, saved = again.config.to_dict(), model.config.to_dict()
    assert {name for name in loaded if loaded[name] != saved.get(name)} <= {"_name_or_path", "dtype", "architectures"}
    assert torch.equal(again(ids).logits, model(ids).logits)
    base = TNTModel.from_pretrained(tmp_path)
    assert torch.equal(base.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


@modes
def test_initialisation_is_the_same_on_every_path(changes, tmp_path):
    """Building directly, and from a checkpoint that lacks the memory (through the meta device), start alike."""
    model = tiny_model(torch.float32, **changes)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.abs().max() < 8, name
    state = {name: x for name, x in model.state_dict().items() if ".memory." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = TNTForCausalLM.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters()):
        assert torch.equal(a, b) or ".memory." in name, name
        assert abs(a.mean() - b.mean()) < 0.5 and abs(a.std(correction=0) - b.std(correction=0)) < 0.5, name
        if (a == a.flatten()[0]).all():
            assert torch.equal(a, b), name


# -------------------------------------------------------------------------------------------------------------- stages


@torch.no_grad()
def test_stage_2_equals_a_model_configured_for_it():
    model, ids = tiny_model(), tokens(2, 37)
    weights = model.state_dict()
    model.set_local_chunk_sizes([1])
    assert model.config.local_chunk_sizes == [1, 1]
    other = tiny_model(local_chunk_sizes=[1, 1])
    other.load_state_dict(weights)
    assert torch.equal(model(ids).logits, other(ids).logits)
    close(pieces(model, ids, [13, *range(14, 37)])[0], other(ids).logits)
    model.set_local_chunk_sizes([4, 8])
    with pytest.raises(ValueError, match=r"local_chunk_sizes=\[3\].*|.*3 must divide"):
        model.set_local_chunk_sizes(3)
    with pytest.raises(ValueError, match="local_chunk_sizes"):
        model.set_local_chunk_sizes([1, 2, 4])
    assert model.config.local_chunk_sizes == [4, 8]


def test_learning_rate_scaling_is_frozen_at_the_training_chunk():
    model, ids = tiny_model(memory_lr_scaling="train_chunk"), tokens(1, 20)
    assert model.config.memory_train_chunk_sizes == [8, 2, 4]
    model.set_local_chunk_sizes(1)
    assert model.config.memory_train_chunk_sizes == [8, 2, 4]
    other = tiny_model(local_chunk_sizes=[1, 1], memory_lr_scaling="train_chunk", memory_train_chunk_sizes=[8, 2, 4])
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_freeze_for_stage_2():
    model = tiny_model()
    count = model.freeze_for_stage2()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all(".memories.1." in name or ".memories.2." in name for name in trainable)
    assert (
        count == sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * 2 * (2 * 2 * 8 * 8 + 32 * 2 + 2)
    )


def test_freeze_for_stage_2_beside_an_adapter():
    """What peft trains is a copy of each memory; what it was is kept aside and no part of stage 2."""
    model = tiny_model()
    count = tiny_model().freeze_for_stage2()
    adapted = get_peft_model(model, lora_config(model))
    assert model.freeze_for_stage2() == count
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trainable and all(".modules_to_save.default.memories." in name for name in trainable)


def test_memory_layers_and_names():
    model = TNTForCausalLM(tiny_config(memory_layers=[1]))
    names = {name for name, _ in model.named_parameters()}
    memory = {name for name in names if ".memory." in name}
    assert all(name.startswith("model.layers.1.memory.") for name in memory)
    llama = LlamaForCausalLM(LlamaConfig(**{field: TINY[field] for field in (*BACKBONE, "num_key_value_heads")}))
    assert names - memory == {name for name, _ in llama.named_parameters()}


def test_the_presets_build_what_they_say():
    made = {name: TNTConfig(**fields) for name, fields in PRESETS.items()}
    titans, ttt = made["titans"].memory_specs, made["ttt"].memory_specs
    assert [(s.reset_interval, s.read, s.query_projection) for s in titans + ttt] == [(None, "current", "none")] * 2
    assert made["titans"].memory_momentum and made["titans"].memory_decay
    assert made["ttt"].memory_layernorm and made["ttt"].memory_residual and not made["ttt"].memory_decay
    assert set(made["sliding-window-only"].layer_types) == {"sliding_attention"}
    assert set(made["transformer"].layer_types) == set(made["gated-transformer"].layer_types) == {"full_attention"}
    assert made["gated-transformer"].attention_output_gate
    for config in made.values():
        small = {**config.to_dict(), **{field: TINY[field] for field in BACKBONE}}
        small |= {"num_key_value_heads": 2, "head_dim": 8, "memory_num_heads": 2, "memory_head_dim": 8}
        small.pop("layer_types")
        model = TNTForCausalLM(TNTConfig(**small)).eval()
        ids = tokens(1, 30)
        close(pieces(model, ids, [17, 18])[0], model(ids).logits, SINGLE)
