"""The tokens both models are asked about: text through the source's tokenizer, and random ids."""

import calendar
import difflib
import doctest
import inspect
import random
from pathlib import Path

import torch
from torch import Tensor

from .probe import is_file, read_text
from .source import has_tokenizer
from .tokenizer import load_tokenizer


FEWEST = 16  # tokens that the checks need


def default_text() -> str:
    """Text that is wherever Python is: the source of a few modules of its standard library, prose and code mixed."""
    return "\n".join(inspect.getsource(module) for module in (difflib, doctest, random, calendar))


def probe_ids(folder: Path, text: str | None, length: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor, str]:
    """
    Args:
        folder: of the source. text: itself or the path of a file; `None` is [`default_text`]. length: tokens wanted.

    Returns:
        Text and random ids, both `[1, T]` with T at most `length`, and what the text is.

    Raises:
        ValueError: a text without tokenizer, too short, or with ids the model does not have.
        OSError: the text's file cannot be read.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: must be an integer of 0 to {2**63 - 1}")
    generator = torch.Generator().manual_seed(seed)
    random_ids = torch.randint(vocabulary, (2, length), generator=generator)
    if not has_tokenizer(folder):
        if text is not None:
            raise ValueError(f"text={text[:40]!r}: the source has no tokenizer to read it with")
        return random_ids[:1], random_ids[1:], "random ids (the source has no tokenizer)"
    label, content = "standard library of Python", default_text() if text is None else read_text(text)
    if text is not None:
        label = Path(text).name if is_file(text) else "text given"
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError:
        if text is not None:
            raise
        return random_ids[:1], random_ids[1:], "random ids (the source's tokenizer cannot be loaded)"
    ids = tokenizer(content, return_tensors="pt")["input_ids"][:, :length]
    if ids.shape[1] < FEWEST:
        raise ValueError(f"text={content[:40]!r}: has {ids.shape[1]} tokens, a probe needs {FEWEST}")
    if int(ids.max()) >= vocabulary:
        raise ValueError(f"text={label!r}: the tokenizer gives id {int(ids.max())}, the model has {vocabulary}")
    return ids, random_ids[1:, : ids.shape[1]], label
