"""Data of a run: documents of any source as rows of tokens for `Trainer`.

`build_datasets` tokenises once, keeps the tokens in the cache of `datasets` and gives rows by their number, which
`Trainer` shuffles anew in every epoch (and on several processes repeats a few of in the last step of an epoch, so that
all have as many); or, with `streaming`, it tokenises while the run reads. A row holds
`input_ids`, `labels` and `position_ids` (see packing.py).
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset
from tqdm.auto import tqdm

from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.chat import ChatEncoder
from tnt_hf.recipes.encoding import TextEncoder, tokenizer_digest, vocabulary_size
from tnt_hf.recipes.packing import RowCollator, RowFormat
from tnt_hf.recipes.row_datasets import HELD_OUT_WHOLE, RowStream, stored_rows
from tnt_hf.recipes.sources import as_text, open_source, part
from tnt_hf.recipes.token_store import FORMAT, StoreWriter, TokenStore, cached_store, encoded


@dataclass
class Datasets:
    """
    What `Trainer` needs of the data.

    Attributes:
        train: rows by number, or an endless stream of them. eval: rows by number, `None` if nothing is held out.
        collator: makes batches `[B, T]`. facts: what was read, for the record of the run.
        state: everything that decides which row comes when; a run resumes only with an equal one.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None
    collator: RowCollator
    facts: dict[str, Any]
    state: dict[str, Any]


def build_datasets(
    data: DataArguments, tokenizer, *, seed: int, mode: str, rows_per_step: int | None = None
) -> Datasets:
    """
    Reads, tokenises and packs the data of a run.

    Args:
        tokenizer: needs an eos; it ends every document, and bos begins it where the tokenizer has one.
        seed: of the order of a stream (rows by number are ordered by `Trainer`, from its own seed).
        mode: of the run; "sft" needs conversations.
        rows_per_step: rows of an optimizer step, all ranks together: fewer rows in the data are an error.

    Raises:
        ValueError: a field cannot be honoured, or the data cannot be read; the message names the field or the place.
    """
    check(data)
    prepare = _Preparation(data, tokenizer)
    source = open_source(data.dataset_name, data.dataset_config, data.dataset_split, data, mode)
    encoder, rows = prepare.encoder(source), prepare.rows(source)
    state = {
        "data": source.identity() if data.streaming else source.digest(),
        "tokenizer": prepare.tokenizer_digest,
        "encoding": encoder.settings(),
        "eval_share": data.eval_share,
        "sequence_length": data.sequence_length,
        "packing": data.packing,
        "streaming": data.streaming,
        "seed": seed,
    }
    facts = {
        "name": data.dataset_name,
        "config": data.dataset_config,
        "split": data.dataset_split,
        "columns": [source.columns.kind, *source.columns.names],
        "digest": state["data"],
        **{name: state[name] for name in ("streaming", "sequence_length", "packing", "encoding", "eval_share")},
    }
    if data.streaming:
        field = f"dataset_name={data.dataset_name!r}"
        train = RowStream(source, encoder, rows, data.eval_share, seed=seed, field=field)
        next(iter(RowStream(source, encoder, rows, data.eval_share, field=field)))  # there is a row, or this raises
        facts |= {"rows": None, "tokens": None, "documents": None}  # unknown before all was read
    else:
        store = prepare.store(source, held_out=False)
        train = stored_rows(store, rows)
        facts |= {"rows": len(train), "tokens": len(store.tokens), **store.counts}
        _require(train, rows_per_step, data, facts)
    held_out = prepare.evaluation(source, mode)
    facts["eval"] = held_out and {"name": data.eval_dataset_name or data.dataset_name, "rows": len(held_out)}
    collator = RowCollator(rows.filler, data.packing, data.sequence_length if data.streaming else None)
    return Datasets(train, held_out, collator, facts, state)


def _require(train: Dataset, rows_per_step: int | None, data: DataArguments, facts: dict) -> None:
    if not len(train):
        why = HELD_OUT_WHOLE if data.eval_share else ""
        raise ValueError(
            f"dataset_name={data.dataset_name!r}: has no row of sequence_length={data.sequence_length} tokens (with"
            f" eval_share={data.eval_share}; documents dropped: {facts['documents_dropped'] or 0}){why}"
        )
    if rows_per_step is not None and len(train) < rows_per_step:
        raise ValueError(
            f"dataset_name={data.dataset_name!r}: has {len(train)} rows of {data.sequence_length} tokens, fewer than"
            f" the {rows_per_step} of one step; lower sequence_length or the batch"
        )


def training_texts(data: DataArguments, mode: str = "pretrain") -> Iterator[str]:
    """The texts of the documents that a run of `mode` trains on, in their order; conversations as plain text."""
    check(data)
    source = open_source(data.dataset_name, data.dataset_config, data.dataset_split, data, mode)
    return (as_text(document.content) for document in part(source, data.eval_share, False) if document.content)


def check(data: DataArguments) -> None:
    """Raises ValueError for values that contradict each other or make no sense."""
    if data.sequence_length < 2:
        raise ValueError(f"sequence_length={data.sequence_length!r}: must be at least 2 tokens")
    if not 0 <= data.eval_share < 1:
        raise ValueError(f"eval_share={data.eval_share!r}: must be in [0, 1)")
    if data.eval_rows < 1:
        raise ValueError(f"eval_rows={data.eval_rows!r}: must be at least 1")
    if data.eval_share and (data.eval_dataset_name or data.eval_split):
        raise ValueError(f"eval_share={data.eval_share!r}: excludes eval_dataset_name and eval_split")


class _Preparation:
    """Tokens and rows of the sources of one run."""

    def __init__(self, data: DataArguments, tokenizer):
        self.data, self.tokenizer, self.tokenizer_digest = data, tokenizer, tokenizer_digest(tokenizer)
        self.filler = TextEncoder(tokenizer).after[0]

    def encoder(self, source) -> TextEncoder | ChatEncoder:
        if source.columns.kind == "text":
            return TextEncoder(self.tokenizer)
        return ChatEncoder(self.tokenizer, self.data.assistant_only_loss, self.data.sequence_length)

    def rows(self, source) -> RowFormat:
        return RowFormat(self.data.sequence_length, self.data.packing, source.columns.kind != "text", self.filler)

    def store(self, source, held_out: bool) -> TokenStore:
        """The tokens of the documents that are trained on or held out, from the cache if they are there."""
        encoder, share = self.encoder(source), self.data.eval_share
        columns = [source.columns.kind, source.columns.names]
        key = [FORMAT, source.digest(), columns, self.tokenizer_digest, encoder.settings(), share]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

        def write(folder: Path) -> None:
            folder.mkdir()
            with_mask = source.columns.kind != "text" and self.data.assistant_only_loss
            parts = {False: StoreWriter(folder / "train", vocabulary_size(self.tokenizer), with_mask)}
            if share:
                parts[True] = StoreWriter(folder / "held_out", vocabulary_size(self.tokenizer), with_mask)
            with tqdm(desc="Tokenising", unit=" tokens", unit_scale=True, disable=None) as progress:
                for is_out, writer in parts.items():
                    for _, document in encoded(part(source, share, is_out), encoder, writer.counts):
                        writer.add(document)
                        progress.update(len(document.ids))
                    writer.close()
            source.check_unchanged()

        return cached_store(digest, "held_out" if held_out else "train", write)

    def evaluation(self, train_source, mode: str) -> Dataset | list | None:
        """At most `eval_rows` rows: the first of a stream, otherwise ones that are spread over the held-out part."""
        data = self.data
        if not (data.eval_share or data.eval_dataset_name or data.eval_split):
            return None
        source, share, field = train_source, data.eval_share, f"eval_share={data.eval_share!r}"
        if not share:
            name, split = data.eval_dataset_name or data.dataset_name, data.eval_split or data.dataset_split
            config = None if data.eval_dataset_name else data.dataset_config
            field = f"eval_dataset_name={name!r}, eval_split={split!r}"
            try:
                source = open_source(name, config, split, data, mode)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from error
        encoder, rows = self.encoder(source), self.rows(source)
        if data.streaming:
            found = RowStream(source, encoder, rows, share, share > 0, passes=1, field=field)
            return list(islice(found, data.eval_rows))
        found = stored_rows(self.store(source, held_out=share > 0), rows)
        if not len(found):
            cause = HELD_OUT_WHOLE if share else ""
            raise ValueError(f"{field}: has no row of sequence_length={data.sequence_length} tokens{cause}")
        if len(found) <= data.eval_rows:
            return found
        return Subset(found, np.linspace(0, len(found) - 1, data.eval_rows).astype(int).tolist())
