"""Texts as tokens: what is put around a text, where a long one may be cut, and which tokenizers are the same."""

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from tnt_hf.recipes import encoding
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.encoding import TextEncoder, pieces_of, tokenizer_digest


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["bytes"], 257)


def test_bos_and_eos_are_put_around_a_text_once(tokenizer):
    """Also by a tokenizer that puts them around whatever it is given."""
    (plain,) = TextEncoder(tokenizer).encode(["abc"])
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    assert len(tokenizer("abc")["input_ids"]) == 5
    (again,) = TextEncoder(tokenizer).encode(["abc"])
    assert again.ids.tolist() == plain.ids.tolist() and tokenizer.decode(plain.ids) == f"{eos}abc{eos}"


@pytest.mark.parametrize(
    "text, size, pieces",
    [
        ("a\nb" + "x" * 97, 100, ["a\nb" + "x" * 97]),  # just fits
        ("ab\ncdef", 5, ["ab\n", "cdef"]),
        ("ab\n \ncd" + "x" * 9, 10, ["ab\n \ncdxxx", "xxxxxx"]),  # not inside white space
    ],
)
def test_long_texts_are_cut_behind_a_line(text, size, pieces):
    assert pieces_of(text, size) == pieces


def test_other_pieces_are_other_tokens(tokenizer, monkeypatch):
    before = TextEncoder(tokenizer).settings()
    monkeypatch.setattr(encoding, "PIECE", 10)
    assert TextEncoder(tokenizer).settings() != before


def test_another_bos_is_another_tokenizer(tokenizer):
    before = tokenizer_digest(tokenizer)
    tokenizer.bos_token = "b"
    assert tokenizer_digest(tokenizer) != before


class Written:
    """A tokenizer in Python alone."""

    bos_token_id, eos_token_id = None, 0

    def __init__(self, **vocabulary: int):
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


class WrittenOtherwise(Written):
    pass


def test_tokenizers_without_a_backend_are_told_apart():
    digest = tokenizer_digest(Written(a=1, b=2))
    assert digest == tokenizer_digest(Written(b=2, a=1))
    assert len({digest, tokenizer_digest(Written(a=2, b=1)), tokenizer_digest(WrittenOtherwise(a=1, b=2))}) == 3
