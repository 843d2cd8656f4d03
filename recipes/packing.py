"""Rows of a fixed number of tokens out of documents of any length.

Three ways. `split_rows`: documents one after the other, cut wherever a row is full, for text. `whole_rows`: documents
that are never cut share a row, for conversations. `single_rows`: a document, or a piece of it, per row.

Positions restart at every document and at every row, so attention and memory start afresh there, and labels are -100
at those places, so nothing is predicted across them. A packed row that documents do not fill is filled up by a
filler: tokens with positions of their own whose labels are -100. So packed rows need no attention mask. How many of
its tokens are filler, a packed row says beside them: a document may end with a token that looks the same.

Axis legend: T tokens of a row   N tokens of all documents   D documents   S segments (pieces of documents)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np


if TYPE_CHECKING:  # torch takes seconds to import, and IGNORED is wanted where nothing is computed
    from torch import Tensor

FILLER = "filler"  # entry of a packed row that is for the count of tokens, not for the model
IGNORED = -100  # label of a token that is not scored, as in transformers
OPEN_ROWS = 64  # rows that `whole_rows` keeps open for a document that fits


class Segment(NamedTuple):
    """Tokens `start` to `stop` of document number `document`."""

    document: int
    start: int
    stop: int


def split_rows(lengths: Iterable[int], row_length: int) -> Iterator[list[Segment]]:
    """Rows of exactly `row_length` tokens (the last one may have fewer) with every token of every document once."""
    row, free = [], row_length
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + free)
            row.append(Segment(document, start, stop))
            free -= stop - start
            start = stop
            if not free:
                yield row
                row, free = [], row_length
    if row:
        yield row


def whole_rows(lengths: Iterable[int], row_length: int, open_rows: int = OPEN_ROWS) -> Iterator[list[Segment]]:
    """
    Rows of at most `row_length` tokens, each document whole in one of them (its first `row_length` tokens).

    A document goes into the fullest open row it fits into, otherwise into a new one; when `open_rows` are open, the
    fullest is given out first.
    """
    rows: list[tuple[int, list[Segment]]] = []  # (free tokens, segments)
    for document, length in enumerate(lengths):
        length = min(length, row_length)
        fitting = [place for place, (free, _) in enumerate(rows) if free >= length]
        if fitting:
            place = min(fitting, key=lambda place: rows[place][0])
        else:
            if len(rows) == open_rows:
                yield rows.pop(min(range(len(rows)), key=lambda place: rows[place][0]))[1]
            rows.append((row_length, []))
            place = len(rows) - 1
        free, segments = rows[place]
        segments.append(Segment(document, 0, length))
        rows[place] = (free - length, segments)
    yield from (segments for _, segments in rows)


def single_rows(lengths: Iterable[int], row_length: int) -> Iterator[list[Segment]]:
    """One segment per row: every document, cut into pieces of at most `row_length` tokens."""
    for document, length in enumerate(lengths):
        for start in range(0, length, row_length):
            yield [Segment(document, start, min(length, start + row_length))]


@dataclass(frozen=True)
class RowFormat:
    """
    How documents become rows.

    Args:
        row_length: tokens of a row. packing: several documents in a row. whole: documents are never cut to fill a row.
        filler: token id that fills up packed rows and pads others.
    """

    row_length: int
    packing: bool
    whole: bool
    filler: int

    @property
    def fill_to(self) -> int | None:
        """Tokens that a row is filled up to."""
        return self.row_length if self.packing else None

    def rows(self, lengths: Iterable[int]) -> Iterator[list[Segment]]:
        """The rows of documents of these lengths in tokens, every token in one of them."""
        make = (whole_rows if self.whole else split_rows) if self.packing else single_rows
        return make(lengths, self.row_length)

    def plan(self, lengths: Iterable[int]) -> Iterator[list[Segment]]:
        """Those rows that have something to predict."""
        return (row for row in self.rows(lengths) if predicts(row))


def predicts(row: list[Segment]) -> bool:
    """Whether a row has something to predict: a token alone has not."""
    return any(segment.stop - segment.start > 1 for segment in row)


def assemble(
    segments: list[tuple[np.ndarray, np.ndarray | None]], fill_to: int | None = None, filler: int = 0
) -> "dict[str, Tensor]":
    """
    One row out of the tokens of its segments.

    Args:
        segments: (token ids `[n]`, bool `[n]` that is True where a token is scored, `None` for everywhere).
        fill_to: tokens of the row; `filler` tokens make up for what is missing.

    Returns:
        `input_ids`, `labels` and `position_ids`, each `[T]` int64, and with `fill_to` the 0-dim `FILLER`.
    """
    import torch

    ids = [np.asarray(x, dtype=np.int64) for x, _ in segments]
    labels = [x.copy() if scored is None else np.where(scored, x, IGNORED) for x, (_, scored) in zip(ids, segments)]
    for x in labels:
        x[0] = IGNORED
    missing = 0 if fill_to is None else fill_to - sum(map(len, ids))
    if missing:
        ids.append(np.full(missing, filler, dtype=np.int64))
        labels.append(np.full(missing, IGNORED, dtype=np.int64))
    row = {"input_ids": ids, "labels": labels, "position_ids": [np.arange(len(x)) for x in ids]}
    row = {name: torch.from_numpy(np.concatenate(x)) for name, x in row.items()}
    return row if fill_to is None else row | {FILLER: torch.tensor(missing)}


class RowCollator:
    """Stacks rows; shorter ones are padded on the right and a mask tells so, if the rows are not packed.

    Args:
        pad: token id of the padding. packed: rows are full, and there is no mask. length: tokens to pad to, by default
            those of the longest row (a stream needs equal ones, its batches are divided among ranks).
    """

    def __init__(self, pad: int, packed: bool, length: int | None = None):
        self.pad, self.packed, self.length = pad, packed, length

    def __call__(self, rows: "list[dict[str, Tensor]]") -> "dict[str, Tensor]":
        """`[B, T]` int64 each: `input_ids`, `labels`, `position_ids` and, if not packed, `attention_mask`; if packed
        and filled up, `FILLER` `[B]`."""
        import torch

        if self.packed:
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        length = self.length or max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad),
            "labels": torch.full((len(rows), length), IGNORED),
            "position_ids": torch.arange(length).repeat(len(rows), 1),
            "attention_mask": torch.zeros(len(rows), length, dtype=torch.int64),
        }
        for place, row in enumerate(rows):
            tokens = len(row["input_ids"])
            batch["input_ids"][place, :tokens] = row["input_ids"]
            batch["labels"][place, :tokens] = row["labels"]
            batch["attention_mask"][place, :tokens] = 1
        return batch
