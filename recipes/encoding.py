"""Documents as tokens: text between the tokenizer's bos (if it has one) and eos.

The tokenizer is identified by a digest of what it does, so that tokens made by another one are never taken for its.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np


PIECE = 1 << 20  # characters that are tokenised at once


class Encoded(NamedTuple):
    """Token ids `[n]` int32 of a document, which are scored (bool `[n]`, `None` for all), and whether it was cut."""

    ids: np.ndarray
    scored: np.ndarray | None = None
    cut: bool = False


def vocabulary_size(tokenizer) -> int:
    """Rows that an embedding of the tokenizer's ids needs: they may have holes, which `len(tokenizer)` leaves out."""
    return max([len(tokenizer) - 1, *tokenizer.get_vocab().values()]) + 1


class TextEncoder:
    """
    Tokens of texts: bos if the tokenizer has one, the text, eos.

    Texts above 2^20 characters are tokenised in pieces that are cut between lines: no token goes across such a cut.

    Raises:
        ValueError: the tokenizer has no eos.
    """

    def __init__(self, tokenizer):
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: has no eos_token, which ends every document: set tokenizer.eos_token")
        self.tokenizer = tokenizer
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.before, self.after = [] if bos is None else [bos], [eos]

    def settings(self) -> dict:
        """What decides the tokens, beside the tokenizer."""
        return {"content": "text", "before": self.before, "after": self.after, "piece": PIECE}

    def encode(self, texts: list[str]) -> list[Encoded | str]:
        """Tokens of every text, or the reason why it is dropped."""
        pieces = [pieces_of(text) for text in texts]
        flat = [piece for some in pieces for piece in some]
        ids = iter(self.tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else [])
        encoded = []
        for some in pieces:
            inner = [token for _ in some for token in next(ids)]
            encoded.append(
                Encoded(np.asarray([*self.before, *inner, *self.after], dtype=np.int32)) if inner else "no text"
            )
        return encoded


def pieces_of(text: str, limit: int = PIECE) -> list[str]:
    """`text` in pieces of at most `limit` characters, cut at the last line break between two visible characters."""
    pieces, start = [], 0
    while len(text) - start > limit:
        stop = start + limit
        place = text.rfind("\n", start, stop)
        while place > start and (text[_line_end(text, place) - 1].isspace() or text[place + 1].isspace()):
            place = text.rfind("\n", start, place)
        stop = place + 1 if place > start else stop
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]] if start < len(text) else pieces


def _line_end(text: str, place: int) -> int:
    """Where the line break begins that ends at `place`: Windows writes two characters."""
    return place - (text[place - 1] == "\r")


def tokenizer_digest(tokenizer) -> str:
    """SHA-256 of vocabulary, rules and special tokens; what a call leaves behind (padding, truncation) is left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}
    parts = [
        type(tokenizer).__name__ if backend is None else "",
        rules,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        *(["special tokens are text"] if getattr(tokenizer, "split_special_tokens", False) else []),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
