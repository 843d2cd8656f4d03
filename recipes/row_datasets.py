"""Datasets of rows: over a store of tokens, where every row can be had by its number, and over a stream of documents.

Axis legend: T tokens of a row   R rows   S segments of all rows
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tnt_hf.recipes.packing import RowFormat, assemble, predicts
from tnt_hf.recipes.sources import part
from tnt_hf.recipes.token_store import Counts, TokenStore, encoded


# Why the only document of a source is either trained on or held out, and what helps.
HELD_OUT_WHOLE = (
    "; documents are held out whole, and left out where no row can be made of them: give another --eval_share (0"
    " holds out none) or --sequence_length, or more documents"
)
SHUFFLED_ROWS = 512  # rows of a stream that are shuffled among each other


def stored_rows(store: TokenStore, rows: RowFormat) -> "SplitRows | PlannedRows":
    """The rows of a store by their number, each as [`~recipes.packing.assemble`] makes it."""
    return SplitRows(store, rows) if rows.packing and not rows.whole else PlannedRows(store, rows)


class SplitRows(Dataset):
    """A store's tokens cut wherever a row is full: what `split_rows` plans, without a plan that is held in memory."""

    def __init__(self, store: TokenStore, rows: RowFormat):
        self.store, self.format = store, rows
        full, rest = divmod(len(store.tokens), rows.row_length)
        self.rows = full + (rest > 1)  # one token alone has nothing to predict

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        begin = row * self.format.row_length
        end = min(begin + self.format.row_length, len(self.store.tokens))
        first, last = np.searchsorted(self.store.starts, [begin + 1, end])
        edges = [begin, *self.store.starts[first:last].tolist(), end]
        return _assembled(self.store, list(zip(edges, edges[1:])), self.format)


class PlannedRows(Dataset):
    """Rows of a store whose segments are planned when it is made."""

    def __init__(self, store: TokenStore, rows: RowFormat):
        self.store, self.format = store, rows
        plan = list(rows.plan(store.lengths.tolist()))
        segments = np.asarray([segment for row in plan for segment in row], dtype=np.int64).reshape(-1, 3)
        self.edges = store.starts[segments[:, 0]][:, None] + segments[:, 1:]  # [S, 2]
        self.offsets = np.cumsum([0, *map(len, plan)])  # [R + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return _assembled(self.store, self.edges[self.offsets[row] : self.offsets[row + 1]].tolist(), self.format)


def _assembled(store: TokenStore, edges: list, rows: RowFormat) -> dict[str, Tensor]:
    masks = [None if store.scored is None else store.scored[start:stop] for start, stop in edges]
    tokens = [store.tokens[start:stop] for start, stop in edges]
    return assemble(list(zip(tokens, masks)), rows.fill_to, rows.filler)


class RowStream(IterableDataset):
    """
    Rows that are made while they are read.

    With a seed, every pass over the documents has another order, which follows from the seed and the number of the
    pass: files (shards) are shuffled, and rows among `shuffled_rows` of them. Of n dataloader workers each makes the
    rows of every n-th document, so a pass has every document once; the order depends on n, and a worker that is
    through with its documents begins the next pass. Two streams with the same arguments give the same rows, so a run
    resumes by replay: it makes again what it skips, and a long run is better off with rows by number.

    Args:
        source: of documents. encoder: of their tokens. rows: how they become rows.
        share, held_out: which documents, see [`~recipes.sources.part`].
        seed: of the order, `None` for the order of the documents.
        passes: over the documents, `None` for no end. field: is named by the error if there is no row.
    """

    def __init__(
        self,
        source,
        encoder,
        rows: RowFormat,
        share: float = 0.0,
        held_out: bool = False,
        seed: int | None = None,
        passes: int | None = None,
        field: str = "dataset_name",
        shuffled_rows: int = SHUFFLED_ROWS,
    ):
        self.source, self.encoder, self.format = source, encoder, rows
        self.share, self.held_out = share, held_out
        self.seed, self.passes, self.field, self.shuffled_rows = seed, passes, field, shuffled_rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        workers, mine = (1, 0) if worker is None else (worker.num_workers, worker.id)
        number = 0
        while self.passes is None or number < self.passes:
            order, counts, empty = None if self.seed is None else [self.seed, number], Counts(), True
            for segments in self._shuffled(self._pass(order, counts, workers, mine), order):
                empty = False
                yield assemble(segments, self.format.fill_to, self.format.filler)
            if empty and workers > 1:  # more workers than documents
                return
            if empty:
                why = HELD_OUT_WHOLE if self.share else ""
                raise ValueError(f"{self.field}: has no row, documents dropped: {dict(counts.dropped) or 0}{why}")
            number += 1

    def _shuffled(self, rows: Iterator, order: list[int] | None) -> Iterator:
        if order is None:
            yield from rows
            return
        generator, waiting = np.random.default_rng(order), []
        for row in rows:
            if len(waiting) < self.shuffled_rows:
                waiting.append(row)
                continue
            place = int(generator.integers(len(waiting)))
            yield waiting[place]
            waiting[place] = row
        yield from (waiting[place] for place in generator.permutation(len(waiting)))

    def _pass(self, order: list[int] | None, counts: Counts, workers: int, mine: int) -> Iterator[list]:
        seed = None if order is None else int(np.random.default_rng([*order, 1]).integers(2**31))
        documents = islice(part(self.source, self.share, self.held_out, seed), mine, None, workers)
        pending = {}

        def lengths() -> Iterator[int]:
            for number, (_, document) in enumerate(encoded(documents, self.encoder, counts)):
                pending[number] = document
                yield len(document.ids)

        for row in self.format.rows(lengths()):  # all of them: a document is let go with its last token
            segments = []
            for number, start, stop in row:
                ids, scored, _ = pending[number]
                segments.append((ids[start:stop], None if scored is None else scored[start:stop]))
                if stop == len(ids):
                    del pending[number]
            if predicts(row):
                yield segments
