"""Documents of a run: the standard library's source, local files and folders, or a dataset of the Hub.

A source yields `Document`s in a fixed order, or with the files (shards) in an order that follows from a seed. What a
document is: a text file; a row with a text column; a row with a conversation, `[{"role", "content"}, ...]`, and
perhaps its `tools`, or with Alpaca's `instruction`, `input` and `output`, which become a conversation of two messages.

What is held out follows from a hash of the document (of the name of a text file, of the content of a row), so it does
not change when other documents come or go.
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.corpus import is_held_out, read_corpus
from tnt_hf.recipes.data_files import READABLE, files_of
from tnt_hf.recipes.file_formats import TABLES, TEXTS, columns_of, kind_of, records
from tnt_hf.recipes.messages import Conversation, checked_messages, checked_template_kwargs, checked_tools


STANDARD_LIBRARY = "python-stdlib"
INSTRUCTIONS = ("instruction", "input", "output")
BESIDE = {"tools": checked_tools, "chat_template_kwargs": checked_template_kwargs}  # columns beside the messages
OPTIONAL = {"input", *BESIDE}  # columns that not every table, and not every row, has


class Document(NamedTuple):
    """One document and what its errors and its part (trained on or held out) are told by."""

    place: str  # the file and the line or row, for messages
    key: str  # decides whether it is held out
    content: str | Conversation | None  # None where the column is null, or a list without messages


@dataclass(frozen=True)
class Columns:
    """What a document is made of: `kind` is "text", "messages" or "instructions"."""

    kind: str
    names: tuple[str, ...]

    @classmethod
    def choose(cls, there: list[str] | None, data: DataArguments, mode: str, where: str) -> "Columns":
        """
        Picks the columns of a table: conversations for `mode="sft"`, else the text and only without one conversations.

        Args:
            there: the columns of the table, `None` for plain text. where: for the error.

        Raises:
            ValueError: none of the columns that would do is there.
        """
        options = {"messages": (data.messages_column, *BESIDE), "instructions": INSTRUCTIONS}
        if mode != "sft":
            options = {"text": (data.text_column,), **options}
        elif there is None:
            raise ValueError(
                f"messages_column={data.messages_column!r}: {where} is plain text, mode=sft needs messages"
            )
        if there is None:
            return cls("text", (data.text_column,))
        field = "messages_column" if mode == "sft" else "text_column"
        asked, usual = getattr(data, field), getattr(DataArguments, field)
        for kind, names in options.items() if asked in (usual, *there) else ():  # a name that was given is no other
            if set(names) - OPTIONAL <= set(there):
                return cls(kind, names)
        raise ValueError(
            f"{field}={getattr(data, field)!r}: {where} has no such column, it has {', '.join(map(repr, there))}"
        )

    def document(self, place: str, row: dict) -> Document:
        """
        The document of a table's row.

        Raises:
            ValueError: a missing column, a value of the wrong type, or one that is not Unicode text.
        """
        document = self._document(place, row)
        texts = {tuple(name for name in self.names if name not in BESIDE): document.key}
        if isinstance(document.content, Conversation):
            for name, value in zip(BESIDE, document.content[1:], strict=True):
                texts[(name,)] = json.dumps(value, ensure_ascii=False, default=str)
        for names, text in texts.items():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{place}: column {', '.join(map(repr, names))} holds half of a surrogate pair,"
                    f" {error.object[error.start]!a}, which is not text; leave it out"
                ) from error
        return document

    def _document(self, place: str, row: dict) -> Document:
        values = {name: row.get(name) for name in self.names}
        missing = [name for name in self.names if name not in row and name not in OPTIONAL]
        if missing:
            raise ValueError(f"{place}: has no column {missing[0]!r}, only {', '.join(map(repr, row))}")
        if all(values[name] is None for name in self.names if name not in BESIDE):
            return Document(place, "", None)
        if self.kind == "messages":
            messages = checked_messages(values[self.names[0]], f"{place}: column {self.names[0]!r}")
            beside = [check(values[name], f"{place}: column {name!r}") for name, check in BESIDE.items()]
            key = json.dumps(messages, sort_keys=True, ensure_ascii=False, default=str)
            return Document(place, key, Conversation(messages, *beside) if messages else None)
        for name, value in values.items():
            if not isinstance(value, str) and not (name == "input" and value is None):
                raise ValueError(f"{place}: column {name!r} must hold text, got {type(value).__name__}")
        if self.kind == "text":
            return Document(place, values[self.names[0]], values[self.names[0]])
        question = "\n\n".join(filter(None, (values["instruction"], values["input"])))
        content = [{"role": "user", "content": question}, {"role": "assistant", "content": values["output"]}]
        return Document(place, json.dumps(content, ensure_ascii=False), Conversation(content))


# --- the three sources -----------------------------------------------------------------------------------------------


class StandardLibrary:
    """The `.py` files of the running interpreter's standard library, without tests; one document per file."""

    def __init__(self, data: DataArguments, mode: str):
        self.columns = Columns.choose(None, data, mode, STANDARD_LIBRARY)
        corpus = read_corpus()
        self.texts = dict(sorted((corpus.train | corpus.held_out).items()))

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """All documents, in the order of the names or in one that follows from `seed`."""
        for name in _ordered(self.texts, seed):
            yield Document(name, name, self.texts[name])

    def digest(self) -> str:
        """SHA-256 of all names and texts."""
        return _digest(f"{name}\0{text}\0".encode() for name, text in self.texts.items())

    identity = digest

    def check_unchanged(self) -> None:
        """The texts are held in memory."""


class LocalFiles:
    """Text files (one document each) or tables (one per row) below a path."""

    def __init__(self, root: Path, files: list[Path], data: DataArguments, mode: str):
        self.root, self.files = root if root.is_dir() else root.parent, files
        unknown = [path for path in files if kind_of(path) is None]
        if unknown:
            raise ValueError(f"dataset_name={str(root)!r}: {unknown[0].name} has an unknown extension, {READABLE}")
        there, self.holds_tables = None, kind_of(files[0]) in TABLES
        if self.holds_tables:
            there = next(filter(None, map(columns_of, files)), None)
            if there is None:
                raise ValueError(f"dataset_name={str(root)!r}: has no rows")
        self.columns = Columns.choose(there, data, mode, str(root))
        self.sizes = self._sizes()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _sizes(self) -> dict[str, tuple[int, int]]:
        stats = {self._name(path): path.stat() for path in self.files}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """All documents, with the files in the order of their names or in one that follows from `seed`."""
        for path in _ordered(self.files, seed):
            for place, record in records(path, set(self.columns.names)):
                if isinstance(record, str):
                    yield Document(place, self._name(path), record)
                else:
                    yield self.columns.document(place, record)

    @cached_property
    def _content(self) -> str:
        def parts():
            for path in self.files:
                yield os.fsencode(f"{self._name(path)}\0{path.stat().st_size}\0")
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        yield block

        return _digest(parts())

    def digest(self) -> str:
        """SHA-256 of all names and bytes."""
        return self._content

    def identity(self) -> str:
        """SHA-256 of all names and sizes: what a stream of files too big to be read twice can be told by."""
        return _digest(os.fsencode(f"{name}\0{size}\0") for name, (size, _) in self.sizes.items())

    def check_unchanged(self) -> None:
        """Raises ValueError if a file was changed since this source was made."""
        changed = [name for name, now in self._sizes().items() if now != self.sizes[name]]
        if changed:
            raise ValueError(f"dataset_name={str(self.root)!r}: {changed[0]} was changed while it was read")


class HubDataset:
    """One split of a dataset of the Hub."""

    def __init__(self, name: str, config: str | None, split: str, data: DataArguments, mode: str):
        import datasets

        self.where = f"dataset_name={name!r}"
        try:
            builder = datasets.load_dataset_builder(name, config)
            if data.streaming:
                self.rows = builder.as_streaming_dataset(split=split)
                there = self.rows.column_names or list(next(iter(self.rows), {}))
            else:
                builder.download_and_prepare()
                self.rows = builder.as_dataset(split=split)
                there = self.rows.column_names
        except (datasets.exceptions.DatasetsError, OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.where}, dataset_config={config!r}, dataset_split={split!r}: {error}") from error
        self.identity_ = _digest([repr((builder.hash, builder.config_id, split)).encode()])
        self.columns = Columns.choose(there, data, mode, f"{name}, split {split!r},")
        self.rows = self.rows.select_columns([column for column in self.columns.names if column in there])
        self.streaming = data.streaming

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """All documents, with the shards of a stream in an order that follows from `seed`."""
        import datasets
        import pyarrow

        shards, number, order = [self.rows], 0, ""
        if self.streaming and seed is not None:
            count, order = self.rows.num_shards, " of the shuffled stream"
            shards = (self.rows.shard(count, index) for index in _ordered(range(count), seed))
        try:
            for rows in shards:
                # In batches, because rows that are read one by one are divided among dataloader workers.
                for batch in rows.iter(batch_size=256):
                    for values in zip(*batch.values()):
                        yield self.columns.document(f"{self.where}, row {number}{order}", dict(zip(batch, values)))
                        number += 1
        except (datasets.exceptions.DatasetsError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.where}: cannot be read after row {number}: {error}") from error

    def digest(self) -> str:
        """Of the revision, the configuration and the split."""
        return self.identity_

    identity = digest

    def check_unchanged(self) -> None:
        """Rows are read from Arrow files that nobody changes."""


def open_source(
    name: str, config: str | None, split: str, data: DataArguments, mode: str, field: str = "dataset_name"
) -> StandardLibrary | LocalFiles | HubDataset:
    """
    Opens `name`: the word python-stdlib, an existing file or folder, or else an id on the Hub.

    A folder whose README.md declares a dataset in its YAML header has the splits and files that it declares.

    Args:
        data: columns and whether to stream. mode: of the run. field: what names `name`, for errors.

    Raises:
        ValueError: there is no such file, dataset, configuration, split or column, or nothing in it can be read.
    """
    path = Path(os.path.expanduser(name))  # pathlib's refuses unknown users without their name
    if name == STANDARD_LIBRARY:
        if config is not None:
            raise ValueError(f"dataset_config={config!r}: {name} is not a dataset with configurations")
        if split != "train":
            raise ValueError(
                f"dataset_split={split!r}: {STANDARD_LIBRARY} has only 'train'; eval_share holds out files"
            )
        return StandardLibrary(data, mode)
    if path.exists():
        return LocalFiles(path, files_of(path, config, split), data, mode)
    named_like_a_path = name.startswith(".") or path.suffix in TABLES | TEXTS | {".gz"}
    if named_like_a_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ValueError(f"{field}={name!r}: no such file or folder")
    return HubDataset(name, config, split, data, mode)


def part(source, share: float, held_out: bool, seed: int | None = None) -> Iterator[Document]:
    """The documents of a source that are held out, or those that are not."""
    return (x for x in source.documents(seed) if (share > 0 and is_held_out(x.key, share)) == held_out)


def read_texts(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
    text_column: str = "text",
    share: float = 0.0,
    seed: int | None = None,
    field: str = "dataset_name",
) -> Iterator[str]:
    """
    The texts of a source, empty ones left out: all of them, or with `share` > 0 those held out; in the order of the
    source, or with its files (shards) in one that follows from `seed`.
    """
    data = DataArguments(streaming=streaming, text_column=text_column)
    source = open_source(name, config, split, data, "pretrain", field)
    return (as_text(x.content) for x in part(source, share, share > 0, seed) if x.content)


def as_text(content: str | Conversation) -> str:
    """A document as text; the contents of a conversation's messages are separated by a line break."""
    if isinstance(content, str):
        return content
    return "\n".join(message["content"] for message in content.messages if "content" in message)


def _ordered(items, seed: int | None) -> list:
    items = list(items)
    if seed is not None:
        random.Random(seed).shuffle(items)
    return items


def _digest(parts) -> str:
    digest = hashlib.sha256()
    for part_ in parts:
        digest.update(part_)
    return digest.hexdigest()
