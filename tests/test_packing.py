"""Rows of documents: every token once, documents kept apart by positions and labels, rows by number as planned."""

import os

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import MODES, tiny_config, tiny_model, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from tnt_hf.modeling_tnt import build_masks
from tnt_hf.recipes.encoding import Encoded
from tnt_hf.recipes.packing import (
    FILLER,
    IGNORED,
    RowCollator,
    RowFormat,
    assemble,
    single_rows,
    split_rows,
    whole_rows,
)
from tnt_hf.recipes.row_datasets import stored_rows
from tnt_hf.recipes.token_store import PIECE, PIECES, StoreWriter, TokenStore, _digest


LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=60)
ROW = st.integers(3, 24)
EOS = 0


def documents(lengths: list[int]) -> list[np.ndarray]:
    """Token ids that tell their document and place: 100 * document + place."""
    return [100 * number + np.arange(length) for number, length in enumerate(lengths)]


def store_of(folder, texts: list[np.ndarray], masks=None) -> TokenStore:
    writer = StoreWriter(folder / "store", 1 << 20, masks is not None)
    for number, ids in enumerate(texts):
        writer.add(Encoded(ids, None if masks is None else masks[number]))
    writer.close()
    return TokenStore(folder / "store")


def covered(rows) -> list[tuple[int, int]]:
    return [(x.document, token) for row in rows for x in row for token in range(x.start, x.stop)]


# --- the three plans ------------------------------------------------------------------------------------------------


@given(LENGTHS, ROW)
def test_split_rows_are_full_and_have_every_token_once_in_order(lengths, row_length):
    rows = list(split_rows(lengths, row_length))
    assert covered(rows) == [(number, token) for number, n in enumerate(lengths) for token in range(n)]
    sizes = [sum(x.stop - x.start for x in row) for row in rows]
    assert set(sizes[:-1]) <= {row_length} and 0 < sizes[-1] <= row_length


@given(LENGTHS, ROW, st.integers(1, 5))
def test_whole_rows_never_cut_a_document_that_fits(lengths, row_length, open_rows):
    rows = list(whole_rows(lengths, row_length, open_rows))
    assert sorted(covered(rows)) == [(i, token) for i, n in enumerate(lengths) for token in range(min(n, row_length))]
    assert len([x for row in rows for x in row]) == len(lengths)
    assert all(sum(x.stop - x.start for x in row) <= row_length for row in rows)


def test_whole_rows_fill_gaps():
    assert [[x.document for x in row] for row in whole_rows([6, 5, 3, 4, 1], 10)] == [[0, 2, 4], [1, 3]]


def test_the_fullest_row_is_given_out_where_too_many_are_open():
    assert [[x.document for x in row] for row in whole_rows([6, 8, 9, 4], 10, open_rows=2)] == [[1], [0, 3], [2]]


@given(LENGTHS, ROW)
def test_single_rows_have_one_document_each(lengths, row_length):
    rows = list(single_rows(lengths, row_length))
    assert covered(rows) == [(number, token) for number, n in enumerate(lengths) for token in range(n)]
    assert {len(row) for row in rows} == {1}


def test_a_row_with_nothing_to_predict_is_left_out():
    """One token has no token after it: its loss would be a mean over nothing."""
    assert [len(list(RowFormat(4, packing, False, EOS).plan([9]))) for packing in (True, False)] == [2, 2]


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_keeps_its_documents_apart():
    row = assemble([(np.array([7, 8, 9]), None), (np.array([4, 5]), np.array([True, False]))], fill_to=8, filler=EOS)
    assert row["input_ids"].tolist() == [7, 8, 9, 4, 5, EOS, EOS, EOS]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row["labels"].tolist() == [IGNORED, 8, 9, IGNORED, IGNORED, IGNORED, IGNORED, IGNORED]
    assert {x.dtype for x in row.values()} == {torch.int64} and row[FILLER] == 3


def test_packed_batches_have_no_mask_and_others_are_padded_on_the_right():
    rows = [assemble([(np.array(ids), None)]) for ids in ([5, 6, 7], [8, 9])]
    with pytest.raises(RuntimeError):
        RowCollator(EOS, packed=True)(rows)  # packed rows are always full
    batch = RowCollator(EOS, packed=True)([rows[0], rows[0]])
    assert set(batch) == {"input_ids", "labels", "position_ids"} and batch["input_ids"].shape == (2, 3)

    batch = RowCollator(9, packed=False)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert RowCollator(9, packed=False, length=5)(rows)["input_ids"].shape == (2, 5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@settings(max_examples=10)
@example(lengths=[9], row_length=4)  # a last row of one token
@example(lengths=[3, 5], row_length=4)  # a document that begins with the last token of a row
@given(lengths=LENGTHS, row_length=ROW)
def test_rows_by_number_are_the_plan(tmp_path_factory, packing, whole, lengths, row_length):
    texts = documents(lengths)
    masks = [ids % 3 > 0 for ids in texts] if whole else None
    store = store_of(tmp_path_factory.mktemp("rows"), texts, masks)
    rows = RowFormat(row_length, packing, whole, EOS)
    by_number = stored_rows(store, rows)
    plan = list(rows.plan(lengths))
    assert len(by_number) == len(plan)
    for number, row in enumerate(plan):
        cut = [(texts[x.document][x.start : x.stop], masks and masks[x.document][x.start : x.stop]) for x in row]
        expected = assemble(cut, row_length if packing else None, EOS)
        assert all(torch.equal(by_number[number][name], expected[name]) for name in expected)
    for number in (len(plan), -1):
        with pytest.raises(IndexError):
            by_number[number]


@pytest.mark.parametrize("vocabulary, size", [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_a_store_has_room_for_the_last_token_of_a_vocabulary(vocabulary, size, tmp_path):
    writer = StoreWriter(tmp_path / "store", vocabulary, with_mask=False)
    writer.add(Encoded(np.asarray([0, vocabulary - 1])))
    writer.close()
    tokens = TokenStore(tmp_path / "store").tokens
    assert tokens.tolist() == [0, vocabulary - 1] and tokens.itemsize == size


@pytest.mark.parametrize("name", ["tokens.bin", "scored.bin"])
@pytest.mark.parametrize("place", [0, 3 * PIECES * PIECE // 2, -1])
def test_a_store_too_large_to_be_read_whole_is_told_from_a_damaged_one(tmp_path, name, place):
    """The sizes, the first and the last byte, and damage as long as the distance of two pieces, wherever it is."""
    (tmp_path / "store").mkdir()
    for file in ("tokens.bin", "scored.bin"):
        with (tmp_path / "store" / file).open("wb") as new:
            new.truncate(3 * PIECES * PIECE)
    before = _digest(tmp_path / "store")
    with (tmp_path / "store" / name).open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(b"1" * (3 * PIECE if place > 0 else 1))
    damaged = _digest(tmp_path / "store")
    assert damaged != before
    os.truncate(tmp_path / "store" / name, 3 * PIECES * PIECE + 1)
    assert _digest(tmp_path / "store") not in (before, damaged)


def test_a_store_cut_short_is_not_read(tmp_path):
    store = store_of(tmp_path, documents([5, 6]))
    with (store.folder / "tokens.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(ValueError, match=r"store: is damaged, its files are not those that were written; delete it"):
        TokenStore(store.folder)


# --- what a model makes of them -------------------------------------------------------------------------------------


def packed_and_alone(seed: int = 0):
    """A row of three documents and filler, 40 tokens, and the documents with their places in it."""
    generator = np.random.default_rng(seed)
    texts = [generator.integers(1, 64, n) for n in (17, 9, 11)]
    row = assemble([(ids, None) for ids in texts], fill_to=40, filler=EOS)
    starts = np.cumsum([0, 17, 9])
    return {name: x[None] for name, x in row.items()}, [
        (slice(start, start + len(ids)), assemble([(ids, None)])) for start, ids in zip(starts, texts)
    ]


@pytest.mark.parametrize("mode", ["default", "window and full attention", "momentum and forgetting", "Titans", "mal"])
def test_a_document_in_a_packed_row_is_what_it_is_alone(mode):
    """Logits in float64 agree to rounding (sums over other lengths): attention and memory start afresh."""
    model = tiny_model(**MODES[mode])
    row, alone = packed_and_alone()
    with torch.no_grad():
        together = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits[0]
        for place, document in alone:
            expected = model(document["input_ids"][None]).logits[0]
            torch.testing.assert_close(together[place], expected, rtol=0, atol=1e-10)


def test_the_same_in_a_transformer_of_the_library():
    """Teachers of a distillation are such models; they find packed rows by positions only without a cache."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).double().eval()
    row, alone = packed_and_alone()
    with torch.no_grad():
        together = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits[0]
        for place, document in alone:
            torch.testing.assert_close(
                together[place], model(document["input_ids"][None]).logits[0], rtol=0, atol=1e-10
            )


def test_the_loss_of_a_packed_row_is_that_of_its_documents():
    model = tiny_model()
    row, alone = packed_and_alone()
    scored = [int((document["labels"] != IGNORED).sum()) for _, document in alone]
    assert int((row["labels"] != IGNORED).sum()) == sum(scored) == 16 + 8 + 10
    with torch.no_grad():
        losses = [model(x["input_ids"][None], labels=x["labels"][None]).loss * n for (_, x), n in zip(alone, scored)]
        del row[FILLER]
        assert model(**row, use_cache=False).loss * sum(scored) == pytest.approx(float(sum(losses)), abs=1e-9)


def test_flash_attention_refuses_several_packed_rows_which_it_would_not_keep_apart():
    config = tiny_config()
    config._attn_implementation = "flash_attention_2"
    documents, embeds = torch.tensor([[0, 0, 1, 1]] * 2), torch.zeros(2, 4, config.hidden_size)
    with pytest.raises(ValueError, match="flash_attention_2.* one row at a time, and there are 2 rows"):
        build_masks(config, embeds, None, None, documents)
    build_masks(config, embeds[:1], None, None, documents[:1])
    build_masks(config, embeds, None, None, None)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (torch.zeros(1, 7, dtype=torch.int32), r"has the shape \[1, 7\]: it must be \[1, 20\]"),
        (torch.zeros(1, 1, dtype=torch.int32), r"has the shape \[1, 1\]: it must be \[1, 20\]"),
        (torch.arange(24)[None] // 12, r"has the shape \[1, 24\]: it must be \[1, 20\]"),
        (torch.arange(20) // 10, r"has the shape \[20\]: it must be \[1, 20\]"),
        ((torch.arange(20) // 10).repeat(2, 1), r"has the shape \[2, 20\]: it must be \[1, 20\]"),
        ((torch.arange(20) // 10)[None] / 2, "is a tensor of torch.float32: it must be a tensor of integers"),
        ((torch.arange(20) // 10)[None].bool(), "is a tensor of torch.bool: it must be a tensor of integers"),
        ([[0] * 10 + [1] * 10], "is list: it must be a tensor of integers"),
    ],
    ids=["short", "one for all", "long", "no rows", "too many rows", "fractions", "truth values", "list"],
)
def test_numbers_of_documents_are_whole_and_one_for_each_token(numbers, said):
    """Or two documents would be read as one."""
    with pytest.raises(ValueError, match=f"seq_idx {said}"):
        tiny_model()(tokens(1, 20), seq_idx=numbers)


@torch.no_grad()
def test_rows_may_share_their_numbers_of_documents():
    model, ids, number = tiny_model(), tokens(2, 20), (torch.arange(20) // 10)[None]
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(10, 1)], 1)
    for kind in (torch.uint8, torch.int64):
        for rows in (number, number.repeat(2, 1)):
            torch.testing.assert_close(model(ids, seq_idx=rows.to(kind)).logits, alone)
