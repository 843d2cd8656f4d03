"""`generate()` held against the plain forward pass, where the stock generation tests are too mild to notice a defect.

Axis legend: B batch, T tokens. The stock tests draw weights with std 0.02, pad by 32 tokens and generate 3: a sliding
mask that is too wide or a state that forgets its padding stays below their tolerance. Here weights have std 0.3, the
window is 4, C_G = 8, S_L = 16, C_L = 2 and 4, prompts end anywhere inside a chunk, and every number is float64.
Needs nothing of Transformers' own tests.
"""

import pytest
import torch
from tiny import TINY

from tnt_hf import TNTConfig, TNTForCausalLM


VARIANTS = {
    "default": {},
    "linear": {"memory_depth": 1, "memory_momentum": True, "memory_decay": True},
    "decay_to_zero": {"memory_momentum": True, "memory_decay": True, "memory_decay_target": "zero"},
    "published_gate": {"memory_gate": "published", "num_persistent_tokens": 3},
    "mix_gate": {"memory_gate": "mix", "qk_projection": "chunk"},
    "shared_product": {"memory_projections": "shared", "memory_gate": "product", "memory_conv_kernel": 3},
    "global_current": {"global_read": "current", "local_reset_interval": [12, None], "qk_norm": True},
    "mal": {"variant": "mal"},
    "lmm": {"variant": "lmm"},
}
NEW_TOKENS = 21  # more than a reset interval: decoding itself passes every boundary
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def build(variant: str, **changes) -> TNTForCausalLM:
    """A float64 model in eval mode whose weights all have std 0.3, norms and biases too."""
    fields = TINY | {"vocab_size": 61, "layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 1}
    generator = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # the shared, zero-gated variant warns by design
        model = TNTForCausalLM(TNTConfig(**fields | VARIANTS[variant] | changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.generation_config.eos_token_id = None
    return model


def prompt(batch: int, length: int) -> torch.Tensor:
    """Token ids [B, T] int64 without special tokens."""
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(length))


def generate(model, ids, **options):
    """Greedy by default; returns the generate output with `sequences` [B, T + new] and per-step `logits` [B, V]."""
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True}
    with torch.no_grad():
        return model.generate(ids, return_dict_in_generate=True, **defaults | options)


def assert_follows_forward(model, output, length: int):
    """Every step's logits are those of one forward pass over the finished sequence, without padding or cache."""
    with torch.no_grad():
        full = model(output.sequences, use_cache=False).logits[:, length - 1 : -1]
    torch.testing.assert_close(
        torch.stack(output.logits, dim=1), full.to(output.logits[0].dtype), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("length", [1, 3, 8, 13, 16, 33])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_is_the_forward_pass(variant, length):
    model = build(variant)
    ids = prompt(2, length)
    assert_follows_forward(model, generate(model, ids), length)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 5},
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "cache_implementation": "static"},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("variant", ["default", "linear", "published_gate", "lmm"])
def test_every_way_to_generate_agrees(variant, options):
    model = build(variant)
    ids = prompt(2, 13)
    outputs = []
    for extra in (
        options,
        {k: v for k, v in options.items() if "num_" in k or k == "do_sample"} | {"use_cache": False},
    ):
        torch.manual_seed(0)
        outputs.append(generate(model, ids, **extra).sequences)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padded_rows_generate_what_they_generate_alone(variant):
    model = build(variant)
    lengths, width = [1, 6, 13, 20, 37], 38
    rows = [prompt(1, length)[0] for length in lengths]
    ids = torch.stack([torch.cat([row.new_full((width - len(row),), 5), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    together = generate(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = generate(model, row[None])
        assert torch.equal(together.sequences[i, width:], alone.sequences[0, len(row) :])


@pytest.mark.parametrize("variant", VARIANTS)
def test_odd_padding_changes_nothing(variant):
    model = build(variant)
    ids = prompt(1, 19)
    with torch.no_grad():
        expected = model(ids).logits
        for pad in range(1, 38, 4):
            padding, absent = ids.new_full((1, pad), 7), torch.zeros(1, pad, dtype=torch.long)
            ones = torch.ones_like(ids)
            left = model(torch.cat([padding, ids], 1), attention_mask=torch.cat([absent, ones], 1)).logits[:, pad:]
            right = model(torch.cat([ids, padding], 1), attention_mask=torch.cat([ones, absent], 1)).logits[:, :19]
            torch.testing.assert_close(left, expected, **TOLERANCE)
            torch.testing.assert_close(right, expected, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_are_alone(variant):
    """The stock packing test is in bfloat16, too coarse for weights of this size."""
    model = build(variant)
    documents = [prompt(1, length) for length in (5, 1, 17, 8, 30)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(document, use_cache=False).logits for document in documents], 1)
    torch.testing.assert_close(packed, alone, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_conversation_continues_from_its_cache(variant):
    """Three turns of uneven length on one cache equal one prompt that holds them all."""
    model = build(variant)
    sequence, cache = prompt(2, 5), None
    for turn in (7, 2, 9):
        mask = torch.ones_like(sequence)  # else generate() takes a generated pad token for padding
        output = generate(model, sequence, attention_mask=mask, past_key_values=cache, max_new_tokens=turn)
        fresh = generate(model, sequence, attention_mask=mask, max_new_tokens=turn)
        assert torch.equal(output.sequences, fresh.sequences)
        cache = output.past_key_values
        sequence = torch.cat([output.sequences, prompt(2, turn + 1)], 1)


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": True}], ids=lambda o: next(iter(o))
)
def test_speculative_decoding_is_refused(options):
    """A rejected draft cannot be taken out of a memory again, so the library's support for it must not be used."""
    model = build("default")
    options = {name: model if value is True else value for name, value in options.items()}
    with pytest.raises(ValueError, match="tateful"):
        generate(model, prompt(1, 9), **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_on_the_right_of_a_prompt_is_no_new_document(variant):
    """generate() gives the tokens after such a prompt positions that do not increase; the text must still be one."""
    model = build(variant)
    ids, mask = prompt(3, 7), torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5])
    cached, full = (generate(model, ids, attention_mask=mask, use_cache=use_cache) for use_cache in (True, False))
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(full.logits), rtol=1e-5, atol=1e-5)
