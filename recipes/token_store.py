"""Tokenised documents on disk, one after the other, mapped into memory: made once, used by every run that needs them.

A store is a folder named by a digest of the data, the tokenizer and the settings, below the cache of `datasets`
(HF_DATASETS_CACHE). It appears complete or not at all; of processes that want the same one, one makes it and the
others wait. Writing needs the memory of a few documents and no more.

Axis legend: N tokens   D documents
"""

import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tnt_hf.recipes.encoding import Encoded
from tnt_hf.recipes.sources import Document


BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 1 << 22
FORMAT = "tnt-tokens-1"


@dataclass
class Counts:
    """What became of the documents: how many were read, cut at the end of a row, and dropped for which reason."""

    documents: int = 0
    cut: int = 0
    dropped: Counter = field(default_factory=Counter)

    def as_dict(self) -> dict:
        """For the record of a run."""
        return {"documents": self.documents, "documents_cut": self.cut, "documents_dropped": dict(self.dropped)}


def encoded(documents: Iterator[Document], encoder, counts: Counts) -> Iterator[tuple[Document, Encoded]]:
    """Documents with their tokens, in their order; those that have none are counted and left out."""
    for batch in _batches(documents):
        contents = [document.content for document in batch if document.content]
        results = iter(encoder.encode(contents) if contents else [])
        for document in batch:
            result = next(results) if document.content else "no text"
            if isinstance(result, str):
                counts.dropped[result] += 1
            else:
                counts.documents += 1
                counts.cut += result.cut
                yield document, result


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.content) if isinstance(document.content, str) else len(document.key)
        if len(batch) == BATCH_DOCUMENTS or characters > BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class TokenStore:
    """
    Documents of a store's folder.

    Attributes:
        tokens: `[N]` unsigned integers. scored: `[N]` bool or `None` if all are. starts: `[D + 1]` int64, where each
            document begins in `tokens`; its last entry is N. counts: what [`Counts`] says.
    """

    def __init__(self, folder: Path):
        facts = json.loads((folder / "facts.json").read_text())
        self.counts, size = facts["counts"], facts["tokens"]
        self.starts = np.load(folder / "starts.npy", mmap_mode="r")
        self.tokens = _mapped(folder / "tokens.bin", facts["dtype"], size)
        self.scored = _mapped(folder / "scored.bin", "bool", size) if facts["scored"] else None
        self.folder = folder

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, `[D]` int64."""
        return np.diff(self.starts)

    def __getstate__(self):
        return self.folder

    def __setstate__(self, folder):
        self.__init__(folder)


def _mapped(path: Path, dtype: str, size: int) -> np.ndarray:
    if path.stat().st_size != size * np.dtype(dtype).itemsize:
        raise ValueError(f"{path}: has {path.stat().st_size} bytes, not those of {size} tokens: delete {path.parent}")
    return np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)


class StoreWriter:
    """Appends documents to a store's files in `folder`; `close` makes them a store."""

    def __init__(self, folder: Path, vocab_size: int, with_mask: bool):
        folder.mkdir()
        self.folder, self.dtype = folder, "uint16" if vocab_size <= 1 << 16 else "uint32"
        self.counts, self.starts = Counts(), array("q", [0])
        self.tokens = (folder / "tokens.bin").open("wb")
        self.scored = (folder / "scored.bin").open("wb") if with_mask else None

    def add(self, document: Encoded) -> None:
        """Appends one document."""
        self.tokens.write(document.ids.astype(self.dtype).tobytes())
        if self.scored:
            self.scored.write(document.scored.astype("bool").tobytes())
        self.starts.append(self.starts[-1] + len(document.ids))

    def close(self) -> None:
        """Writes everything down."""
        starts, facts = (self.folder / "starts.npy").open("wb"), (self.folder / "facts.json").open("wb")
        np.save(starts, np.asarray(self.starts, dtype=np.int64))
        described = {"format": FORMAT, "dtype": self.dtype, "tokens": self.starts[-1], "scored": bool(self.scored)}
        facts.write(json.dumps(described | {"counts": self.counts.as_dict()}).encode())
        for file in filter(None, (self.tokens, self.scored, starts, facts)):
            file.flush()
            os.fsync(file.fileno())
            file.close()


def cached_store(digest: str, write: Callable[[Path], None]) -> Path:
    """
    The folder of the store named by `digest`, made by `write(folder)` unless it is there.

    `write` gets a temporary folder that does not exist; where it fails, nothing is left behind.
    """
    import datasets
    from filelock import FileLock

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tnt-hf" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            temporary = folder.with_name(f"{digest}.incomplete")
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            try:
                write(temporary)
                os.replace(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder
