"""A byte-level BPE trained on the spot, and windows of tokens."""

import re
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch import Tensor


END_OF_TEXT = "<|endoftext|>"
_LONG = re.compile(r"(\S{1000}|\s{1000})")  # training takes the cube of a word's length; what is not a word is cut


def train_tokenizer(texts, vocab_size: int):
    """Byte-level BPE trained on `texts`, as a Transformers tokenizer. Every byte has a token, so any text works."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"vocab_size must be at least {len(alphabet) + 1} (256 bytes and {END_OF_TEXT}), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator((part for text in texts for part in _LONG.split(text) if part), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def windows(texts, tokenizer, length: int) -> "tuple[Tensor, int]":
    """Cuts every text into windows of `length` tokens that never cross from one file into another.

    A file's first window starts with `END_OF_TEXT`; its last one ends with it and overlaps the one before, so no token
    of a file of at least `length` tokens, both `END_OF_TEXT` included, is lost. Shorter files are left out.

    Returns:
        (windows `[N, length]` int64 in the order of the texts, number of tokens in the files left out).

    Raises:
        ValueError: no text is long enough.
    """
    import torch

    end, rows, lost = tokenizer.eos_token_id, [], 0
    for ids in tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]:
        ids = torch.tensor([end, *ids, end])
        if len(ids) < length:
            lost += len(ids)
            continue
        starts = [*range(0, len(ids) - length, length), len(ids) - length]
        rows += [ids[start : start + length] for start in starts]
    if not rows:
        raise ValueError(f"length={length!r}: no text has that many tokens")
    return torch.stack(rows), lost
