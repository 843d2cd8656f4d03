"""Kinds of attention beside sdpa and eager: which keys they see where there is padding between valid tokens."""

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from tnt_hf import TNTCache
from tnt_hf.cache_name_tnt import CACHE_NAME


WINDOW = 8


def unpadded_rows(module, query, key, value, attention_mask, scaling, sliding_window=None, **kwargs):
    """What flash attention computes, row by row: absent keys and queries are left out, the others are counted from the
    right. As in `_upad_input` of the library, a single query is present whatever the mask says."""
    T, S = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    rows = torch.ones(len(query), S, dtype=torch.bool) if attention_mask is None else attention_mask
    assert rows.shape == (len(query), S)
    output = torch.zeros_like(query)
    for o, q, k, v, here in zip(output, query, key, value, rows):
        asked = here[S - T :] if T > 1 else torch.ones(1, dtype=torch.bool)
        last = int(here.sum()) - 1 + torch.arange(int(asked.sum()))[:, None] - int(asked.sum()) + 1
        distance = last - torch.arange(int(here.sum()))
        seen = (distance >= 0) & (distance < (sliding_window or S))
        o[:, asked] = F.scaled_dot_product_attention(q[:, asked], k[:, here], v[:, here], seen, scale=scaling)
    return output.transpose(1, 2), None


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    for registry, functions in (
        (AttentionInterface, {"unpadded_rows": unpadded_rows, "sdpa_by_columns": sdpa_attention_forward}),
        (AttentionMaskInterface, {"unpadded_rows": flash_attention_mask, "sdpa_by_columns": sdpa_mask}),
    ):
        for name, function in functions.items():
            monkeypatch.setitem(registry._global_mapping, name, function)


def gap() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and positions of two rows `[2, 24]`, the first of which has 5 tokens of padding after 10."""
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, 10:15] = 0
    return tokens(2, 24), mask, (mask.cumsum(1) - 1).clamp(min=0)


def in_pieces(model, ends: list[int], make=TNTCache) -> torch.Tensor:
    ids, mask, positions = gap()
    cache, logits, start = make(model.config), [], 0
    for end in ends:
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE_NAME: cache}
        logits.append(model(ids[:, start:end], **options).logits)
        start = end
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "changes", [{}, {"memory_layers": []}, {"layer_types": ["sliding_attention", "full_attention"]}]
)
@pytest.mark.parametrize("kind", ["unpadded_rows", "sdpa_by_columns", "sdpa", "eager"])
@pytest.mark.parametrize(
    "ends", [[15, 20, 24], [15, *range(16, 25)], [3, 12, 24]], ids=["pieces", "tokens", "in the gap"]
)
@torch.no_grad()
def test_padding_between_valid_tokens_is_no_key(ends, kind, changes):
    """A batch whose rows ended one by one and go on: cached calls see the keys that one without a cache does."""
    model = tiny_model(sliding_window=WINDOW, **changes)
    model.set_attn_implementation(kind)
    ids, mask, positions = gap()
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    seen = mask.bool()
    torch.testing.assert_close(in_pieces(model, ends)[seen], whole[seen], rtol=0, atol=1e-9)  # rounding of float64
    if kind == "sdpa_by_columns":
        library = in_pieces(model, ends, lambda config: DynamicCache(config=config))
        torch.testing.assert_close(library[seen], whole[seen], rtol=0, atol=1e-9)
    else:  # the gap takes no room in a window: each row is what it would be alone
        alone = model(ids[:1][seen[:1]][None], use_cache=False).logits
        torch.testing.assert_close(whole[0, seen[0]], alone[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kinds_of_calls", [("sdpa", "sdpa_by_columns"), ("sdpa_by_columns", "sdpa")])
@pytest.mark.parametrize("saved", [False, True], ids=["at once", "saved"])
@torch.no_grad()
def test_a_cached_window_is_read_in_the_units_it_was_filled_in(kinds_of_calls, saved, tmp_path):
    model = tiny_model(sliding_window=WINDOW)
    ids, mask, positions = gap()
    before, after = kinds_of_calls

    def call(cache, start, end, mask=mask):
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE_NAME: cache}
        return model(ids[:, start:end], **options).logits

    model.set_attn_implementation(before)
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = TNTCache(model.config)
    call(cache, 0, 18)
    if saved:
        cache.save(tmp_path / "session.safetensors")
        cache = TNTCache.load(tmp_path / "session.safetensors", model.config)
    model.set_attn_implementation(after)
    with pytest.raises(
        ValueError, match=f"attn_implementation='{after}' has windows of .* with padding between valid"
    ):
        call(cache, 18, 24)
    model.set_attn_implementation(before)  # the refused call left the cache as it was
    torch.testing.assert_close(call(cache, 18, 24), whole[:, 18:], rtol=0, atol=1e-9)

    in_front = torch.ones_like(mask)
    in_front[0, :5] = 0  # takes no room in either kind of window
    cache, positions = TNTCache(model.config), (in_front.cumsum(1) - 1).clamp(min=0)
    first = call(cache, 0, 18, in_front)
    model.set_attn_implementation(after)
    found = torch.cat([first, call(cache, 18, 24, in_front)], 1)
    whole = model(ids, attention_mask=in_front, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[in_front.bool()], whole[in_front.bool()], rtol=0, atol=1e-9)


@torch.no_grad()
def test_what_filled_a_session_of_an_earlier_release_is_not_known(tmp_path):
    model = tiny_model(sliding_window=WINDOW)
    ids, mask, positions = gap()
    model.set_attn_implementation("sdpa_by_columns")
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = TNTCache(model.config)
    model(ids[:, :18], attention_mask=mask[:, :18], position_ids=positions[:, :18], **{CACHE_NAME: cache})
    cache.windows_of_columns = None  # which is then not in the file
    cache.save(tmp_path / "session.safetensors")
    cache = TNTCache.load(tmp_path / "session.safetensors", model.config)
    options = {"attention_mask": mask, "position_ids": positions[:, 18:], CACHE_NAME: cache}
    torch.testing.assert_close(model(ids[:, 18:], **options).logits, whole[:, 18:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["unpadded_rows", "sdpa_by_columns"])
def test_a_prompt_padded_on_the_right_is_answered_as_without_a_cache(kind):
    model = tiny_model(sliding_window=WINDOW)
    model.set_attn_implementation(kind)
    ids, mask = tokens(2, 15), torch.ones(2, 15, dtype=torch.long)
    mask[0, 10:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_a_window_that_was_assigned_is_every_kinds():
    model = tiny_model(sliding_window=WINDOW)
    model.config.sliding_window = 3
    for kind in ("unpadded_rows", "sdpa"):
        model.set_attn_implementation(kind)
        narrow = tiny_model(sliding_window=3)
        narrow.set_attn_implementation(kind)
        torch.testing.assert_close(model(tokens(1, 20)).logits, narrow(tokens(1, 20)).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", ["the call", "the configuration"])
def test_a_model_that_would_read_ahead_is_refused(where):
    model = tiny_model()
    options = {"is_causal": False} if where == "the call" else {}
    if not options:
        model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False: a TNT model reads from left to right"):
        model(tokens(1, 4), **options)
    model(tokens(1, 4), is_causal=True)


@torch.no_grad()
def test_flash_attention_keeps_documents_apart_in_one_row_without_padding():
    model, positions = tiny_model(sliding_window=WINDOW), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    model.set_attn_implementation("unpadded_rows")
    mask = torch.ones(1, 7, dtype=torch.long)
    model(tokens(1, 7), position_ids=positions, attention_mask=mask)
    mask[0, 6] = 0
    with pytest.raises(ValueError, match="attention_mask: has padding beside packed documents"):
        model(tokens(1, 7), position_ids=positions, attention_mask=mask)
    with pytest.raises(ValueError, match="'unpadded_rows' keeps packed documents apart in one row at a time"):
        model(tokens(2, 7), position_ids=positions.repeat(2, 1))
