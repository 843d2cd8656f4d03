"""Tokenised documents on disk, one after the other, mapped into memory: made once, used by every run that needs them.

A store is a folder named by a digest of the data, the tokenizer and the settings, below the cache of `datasets`
(HF_DATASETS_CACHE). It appears complete or not at all; of processes that want the same one, one makes it and the
others wait. One that was damaged is made anew. Writing needs the memory of a few documents and no more.

Axis legend: N tokens   D documents
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tnt_hf.conversion.files import naming, write_text
from tnt_hf.recipes.encoding import Encoded
from tnt_hf.recipes.sources import Document


logger = logging.getLogger(__name__)

BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 1 << 22
FORMAT = "tnt-tokens-2"
SEAL = "sha256"  # the file that is written last: the digest of those below, see `_digest`
READ_WHOLE, SAMPLED = ("facts.json", "starts.bin"), ("tokens.bin", "scored.bin")
PIECES, PIECE = 256, 1 << 18  # of a sampled file: at least so many, of so many bytes


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

    Raises:
        ValueError: the files are not those that were written.
    """

    def __init__(self, folder: Path):
        seal = folder / SEAL
        if not seal.is_file() or seal.read_bytes() != _digest(folder).encode():
            raise ValueError(f"{folder}: is damaged, its files are not those that were written; delete it")
        self._open(folder)

    def _open(self, folder: Path) -> None:
        facts = json.loads((folder / "facts.json").read_text())
        self.counts, size = facts["counts"], facts["tokens"]
        self.starts = _mapped(folder / "starts.bin", "int64", facts["documents"] + 1)
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
        self._open(folder)  # of another process, which has looked at the seal


def _mapped(path: Path, dtype: str, size: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)


def _digest(folder: Path) -> str:
    """SHA-256 of the names and sizes of a store's files, and of their bytes or pieces of them."""
    # To read many GB of tokens at every start of every process would take minutes. So of files above 64 MiB that
    # have some bytes for every token pieces are read, at equal distances and the last: enough to find another file,
    # one cut short and any damage longer than a 256th of it. What decides where a row begins is read as a whole.
    digest = hashlib.sha256()
    for name in (*READ_WHOLE, *SAMPLED):
        path = folder / name
        if path.is_file():
            size = path.stat().st_size
            step = max(PIECE, size // PIECES) if name in SAMPLED else PIECE
            digest.update(f"{name} {size}\n".encode())
            with path.open("rb") as file:
                for start in (*range(0, size, step), max(size - PIECE, 0)):
                    file.seek(start)
                    digest.update(file.read(PIECE))
    return digest.hexdigest()


class StoreWriter:
    """Appends documents to a store's files in `folder`; `close` makes them a store."""

    def __init__(self, folder: Path, vocab_size: int, with_mask: bool):
        folder.mkdir()
        self.folder, self.dtype = folder, "uint16" if vocab_size <= 1 << 16 else "uint32"
        self.counts, self.starts = Counts(), array("q", [0])
        self.tokens = (folder / "tokens.bin").open("wb")
        self.scored = (folder / "scored.bin").open("wb") if with_mask else None

    def add(self, document: Encoded) -> None:
        """Appends one document. Raises OSError naming the folder if it cannot be written."""
        with naming(self.folder):
            self.tokens.write(document.ids.astype(self.dtype).tobytes())
            if self.scored:
                self.scored.write(document.scored.astype("bool").tobytes())
        self.starts.append(self.starts[-1] + len(document.ids))

    def close(self) -> None:
        """Writes everything down. Raises OSError naming the folder if it cannot be written."""
        starts, facts = (self.folder / "starts.bin").open("wb"), (self.folder / "facts.json").open("wb")
        described = {"format": FORMAT, "dtype": self.dtype, "tokens": self.starts[-1], "scored": bool(self.scored)}
        described |= {"documents": len(self.starts) - 1, "counts": self.counts.as_dict()}
        with naming(self.folder):
            starts.write(self.starts)
            facts.write(json.dumps(described).encode())
            for file in filter(None, (self.tokens, self.scored, starts, facts)):
                file.flush()
                os.fsync(file.fileno())
                file.close()
        write_text(self.folder / SEAL, _digest(self.folder))


def cached_store(digest: str, part: str, write: Callable[[Path], None]) -> TokenStore:
    """
    The store in the folder `part` of the one named by `digest`, made by `write(folder)` unless it is there, intact.

    `write` gets a temporary folder that does not exist; where it fails, nothing is left behind.

    Raises:
        OSError: the folder cannot be made, or not be deleted where it is damaged.
    """
    import datasets
    from filelock import FileLock

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tnt-hf" / digest
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # also while it is opened: nobody opens what another one finds damaged
            stack.enter_context(FileLock(f"{folder}.lock"))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            if (folder / part / SEAL).is_file():  # what somebody else has made can be read all the same
                return TokenStore(folder / part)
            reason = f"cannot be written ({error.strerror}); HF_DATASETS_CACHE names another cache"
            raise OSError(error.errno, reason, str(folder)) from error
        if folder.is_dir():
            try:
                return TokenStore(folder / part)
            except ValueError:
                logger.warning("%s is damaged: it is deleted, and the documents are tokenised again", folder / part)
                aside = folder.with_name(f"{digest}.damaged.{os.getpid()}")  # others may still read its other part
                os.replace(folder, aside)
                shutil.rmtree(aside, ignore_errors=True)
        temporary = folder.with_name(f"{digest}.incomplete")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            write(temporary)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return TokenStore(folder / part)
