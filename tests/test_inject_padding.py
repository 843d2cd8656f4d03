"""Injected models and rows of several lengths: padding changes nothing, packed documents do not meet."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import at_once, left_padded, tokens
from tiny_hosts import HOSTS, MODES, OPEN_LIZA, OPENED, attentions, hosts, padded, positions, tiny_host
from transformers import DataCollatorWithFlattening, DynamicCache

from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import inject, unload
from tnt_hf.conversion.architectures import ARCHITECTURES
from tnt_hf.conversion.injection_config import LiZAConfig, TNTInjectionConfig


# float64 models, but the hosts' norms, RoPE and softmax round to float32 on the way.
CLOSE = {"rtol": 0, "atol": 1e-5}
opened = pytest.mark.parametrize("config", OPENED.values(), ids=OPENED.keys())


@torch.no_grad()
def logits(model, input_ids, **kwargs):
    return model(input_ids, **kwargs).logits


def exact_host(kind="llama"):
    """In float64, or in float32 with eager attention: its float32 softmax has no lowest number of float64."""
    return tiny_host(kind, torch.float64 if "sdpa" in attentions(kind) else torch.float32)


@hosts
@opened
def test_padding_changes_nothing(kind, config):
    model = inject(exact_host(kind), config)
    short, long = tokens(20, seed=2), tokens(33)
    alone = logits(model, short[None])[0]
    left = logits(model, **padded([long, short]))[1, 13:]
    right_ids = torch.stack([long, torch.cat([short, short.new_zeros(13)])])
    right = logits(model, right_ids, attention_mask=(right_ids != 0).long())[1, :20]
    torch.testing.assert_close(left, alone, **CLOSE)
    torch.testing.assert_close(right, alone, **CLOSE)


@opened
def test_a_mask_is_true_or_false(config):
    """Whatever number stands for a token that is there, as the host takes it."""
    model, batch = inject(exact_host(), config), padded([tokens(33), tokens(20, seed=2)])
    mask, _ = batch.pop("attention_mask"), batch.pop("position_ids")
    want = logits(model, **batch, attention_mask=mask)[mask.bool()]
    for other in (mask * 2, mask * 0.5, mask.bool(), mask * torch.arange(1, 34)):
        torch.testing.assert_close(logits(model, **batch, attention_mask=other)[mask.bool()], want, rtol=0, atol=0)


@hosts
@opened
def test_packed_documents_do_not_meet(kind, config):
    model = inject(exact_host(kind), config)
    rows = [tokens(n, seed=n) for n in (7, 1, 12)]
    alone = torch.cat([logits(model, row[None]) for row in rows], 1)
    for flash in (False, True):
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_tensors="pt")
        batch = collate([{"input_ids": row.tolist()} for row in rows])
        del batch["labels"]
        if not ARCHITECTURES[kind].separates_documents:
            with pytest.raises(ValueError, match="position_ids restart.*one document per row"):
                model(**batch)
            continue
        torch.testing.assert_close(logits(model, **batch), alone, **CLOSE)


def test_packing_that_attention_would_mix_is_refused():
    model = inject(tiny_host("llama"), OPEN_LIZA)
    ids, positions = tokens(1, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="position_ids restart.*attention_mask"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="position_ids restart.*use_cache=True"):
        model(ids, position_ids=positions, use_cache=True)
    for elsewhere in ([[0, 1, 2, 3, 4, 5]], [[0, 1, 0, 1, 2, 3]]):
        with pytest.raises(ValueError, match="cu_seq_lens_q"):
            model(ids, position_ids=torch.tensor(elsewhere), cu_seq_lens_q=torch.tensor([0, 3, 6], dtype=torch.int32))


@opened
@pytest.mark.parametrize(("rows", "columns"), [(2, 9), (2, 5), (1, 6)])
def test_a_mask_of_another_shape_is_refused(config, rows, columns):
    """Attention takes the first columns of a mask that is too wide, and a memory would take the last."""
    model, mask = inject(tiny_host("llama"), config), torch.ones(rows, columns, dtype=torch.long)
    mask[-1, 0] = 0
    with pytest.raises(ValueError, match=r"attention_mask has the shape .* it must be \[2, 6\]"):
        model(tokens(2, 6), attention_mask=mask)
    cache = model(tokens(2, 6), use_cache=True)[CACHE_NAME]
    with pytest.raises(ValueError, match="holds 2 rows, and 1 are given"):
        model(tokens(1, 6), **{CACHE_NAME: cache})


@hosts
def test_left_padding_without_positions_changes_nothing(kind):
    """The base model would count the padding, which a linear operator sees in its keys after RoPE. Where that is more
    to the base than a shift, it keeps its positions; OPT counts as `generate` does."""
    model = inject(exact_host(kind), LiZAConfig(weight=0.5))
    short, long = tokens(20, seed=2), tokens(33)
    ids, mask = left_padded([long, short])
    counted = ARCHITECTURES[kind].distances_only or kind == "opt"
    given = positions(mask) if counted else torch.arange(33)[None]
    expected = logits(model, ids, attention_mask=mask, position_ids=given)
    found = logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)
    cache = model(ids[:, :30], attention_mask=mask[:, :30], use_cache=True).past_key_values
    later = logits(model, ids[:, 30:], attention_mask=mask, past_key_values=cache)
    torch.testing.assert_close(later, expected[:, 30:], **CLOSE)


def opened_a_little(model, ids, mask):
    """Logits of the valid tokens at w = 0 and at w = 1e-9."""
    found = []
    for weight in (0.0, 1e-9):
        inject(model, LiZAConfig(weight=weight))
        found.append(logits(model, ids, attention_mask=mask)[mask.bool()])
        unload(model)
    return found


@pytest.mark.parametrize("kind", at_once(dict(zip(HOSTS, HOSTS)), ("beam", "gpt2", "hunyuan_v1_dense", "llama")))
def test_opening_a_memory_leaves_the_base_as_it_is(kind):
    """O = w O_lin + (1 - w) O_attn: the positions that the memory sees must be no others to attention."""
    closed, opened = opened_a_little(exact_host(kind), *left_padded([tokens(33), tokens(20, seed=2)]))
    torch.testing.assert_close(opened, closed, **CLOSE)


@pytest.mark.parametrize("kind", at_once(dict(zip(HOSTS, HOSTS)), ("beam", "gpt2", "hunyuan_v1_dense", "llama")))
def test_where_distances_alone_count_is_known(kind):
    model, ids = exact_host(kind), tokens(1, 20)
    change = logits(model, ids, position_ids=torch.arange(50, 70)[None]) - logits(model, ids)
    assert (float(change.abs().max()) < 1e-5) == ARCHITECTURES[kind].distances_only


# Attention that knows distances only in rows of up to 16 tokens.
SHORT = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "scaled queries": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


def short_host(name):
    kind, changes = SHORT[name]
    return tiny_host(kind, torch.float64, max_position_embeddings=16 if name == "dynamic" else 128, **changes)


@pytest.mark.parametrize("name", SHORT)
def test_opening_a_memory_leaves_a_base_as_it_is_that_asks_for_the_length(name):
    """All rows are padded: the longest is within 16 tokens, and with its padding it is not."""
    rows = [torch.cat([tokens(n).new_zeros(8), tokens(n, seed=n)]) for n in (14, 9)]
    ids, mask = left_padded(rows)
    mask *= ids != 0
    closed, opened = opened_a_little(short_host(name), ids, mask)
    torch.testing.assert_close(opened, closed, **CLOSE)


@pytest.mark.parametrize("name", SHORT)
def test_a_row_is_padded_as_it_was_begun(name):
    """Within 16 tokens padding changes nothing, and beyond them the tokens of a cache stay at their distances."""
    model = inject(short_host(name), OPEN_LIZA)
    ids, mask = left_padded([tokens(20), tokens(13, seed=2)])
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for t, length in ((0, 15), (15, 5)):
        call = {"attention_mask": mask[:, : t + length]}
        given = {**call, "position_ids": positions(mask)[:, t : t + length]}
        part, valid = ids[:, t : t + length], mask[:, t : t + length].bool()
        found = [logits(model, part, past_key_values=x, **y)[valid] for x, y in zip(caches, (call, given))]
        torch.testing.assert_close(*found, **CLOSE)


def test_positions_of_multimodal_rope_are_counted_by_their_first():
    model, (ids, mask) = inject(exact_host("qwen3_5_text"), OPEN_LIZA), left_padded([tokens(9), tokens(5)])
    given = positions(mask)
    expected = logits(model, ids, attention_mask=mask, position_ids=given)
    assert torch.equal(logits(model, ids, attention_mask=mask, position_ids=given.expand(4, -1, -1)), expected)
    with pytest.raises(ValueError, match="position_ids restart"):
        model(ids[:1, :4], position_ids=torch.tensor([0, 1, 0, 1]).expand(4, 1, -1))


def test_documents_need_the_row_of_positions_that_attention_reads():
    model, packed = inject(exact_host("cohere_compass_text"), OPEN_LIZA), torch.tensor([[0, 1, 2, 0, 1]])
    ids, other = tokens(1, 5), torch.cat([tokens(1, 3, seed=2), tokens(1, 5)[:, 3:]], 1)
    found = [logits(model, x, position_ids=packed.expand(4, 1, -1))[:, 3:] for x in (ids, other)]
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="three rows of positions"):
        model(ids, position_ids=packed.expand(3, 1, -1))


COMPILED = [
    pytest.param(MODES["liza"], True, id="compiled liza"),
    pytest.param(MODES["tnt shared"], True, id="compiled tnt shared", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    "config, compiled", [*(pytest.param(x, False, id=name) for name, x in MODES.items()), *COMPILED]
)
def test_without_positions_padding_in_front_is_not_counted(config, compiled):
    torch._dynamo.reset()
    model, rows = inject(exact_host(), config), [tokens(21), tokens(16, seed=2)]
    ids, mask = left_padded(rows)
    call = torch.compile(model, backend="eager") if compiled else model
    found = logits(call, ids, attention_mask=mask, use_cache=False)
    for row, logit, valid in zip(rows, found, mask.bool()):
        torch.testing.assert_close(logit[valid], logits(model, row[None])[0], **CLOSE)


@torch.no_grad()
def test_a_closed_memory_leaves_positions_as_they_are():
    """The library's own would be other bits: RoPE rounds them."""
    model, (ids, mask) = exact_host(), left_padded([tokens(21), tokens(16, seed=2)])
    expected = logits(model, ids, attention_mask=mask)[mask.bool()]
    assert not torch.equal(
        logits(model, ids, attention_mask=mask, position_ids=positions(mask))[mask.bool()], expected
    )
    config = TNTInjectionConfig(memory_projections="shared", memory_gate="product", global_chunk_size=8)
    inject(model, config)
    assert torch.equal(logits(model, ids, attention_mask=mask)[mask.bool()], expected)
    memories = [layer.self_attn.memory for layer in model.model.layers]
    assert not any(memory.is_open() for memory in memories)
    get_peft_model(model, LoraConfig(r=2, target_modules=["gate.proj"]))  # which opens them as it learns
    assert all(memory.is_open() for memory in memories)


@torch.no_grad()
def test_a_window_in_blocks_scales_scores_as_the_host_does():
    """A row that is long enough for blocks: granite's scores have a factor of their own."""
    ids, config = tokens(1, 1200), LiZAConfig(weight=0.0, max_self_attn_length=64)
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    sdpa, eager = (inject(tiny_host("granite", attn=attn, **sizes), config) for attn in ("sdpa", "eager"))
    found, expected = (logits(model, ids, use_cache=False) for model in (sdpa, eager))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # float32: other orders of 64 additions


def test_documents_follow_the_first_row_of_positions():
    model, packed = inject(exact_host("cohere_compass_text"), OPEN_LIZA), torch.tensor([[0, 1, 2, 0, 1]])
    ids, other = tokens(1, 5), torch.cat([tokens(1, 3, seed=2), tokens(1, 5)[:, 3:]], 1)
    rows = torch.stack([packed, *[torch.arange(5)[None]] * 3])
    found, expected = (logits(model, x, position_ids=rows)[:, 3:] for x in (ids, other))
    assert torch.equal(found, expected)


def test_one_open_memory_is_enough_for_positions_without_padding():
    model, rows = inject(exact_host(), OPEN_LIZA), [tokens(21), tokens(16, seed=2)]
    model.model.layers[1].self_attn.memory.weight.zero_()
    ids, mask = left_padded(rows)
    found = logits(model, ids, attention_mask=mask, use_cache=False)
    for row, logit, valid in zip(rows, found, mask.bool()):
        torch.testing.assert_close(logit[valid], logits(model, row[None])[0], **CLOSE)
