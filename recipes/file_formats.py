"""Reads data files: text and source code, JSON, JSON lines and Parquet, each also gzipped (except Parquet).

A file is read as records: `(place, record)`, where `place` says where in the file it is for error messages and
`record` is the whole text of a text file (`str`) or one row of a table (`dict`). Every error is a `ValueError` that
names the file and, where there is one, the line or the byte.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path


TABLES = {".parquet", ".jsonl", ".ndjson", ".json"}
TEXTS = set(
    ".txt .text .md .rst .tex .log .html .htm .css .yaml .yml .toml .ini .cfg .sql .sh .bat .ps1 .py .pyi .c .h .cc"
    " .cpp .cxx .hpp .cu .cuh .java .kt .scala .js .jsx .ts .tsx .go .rs .rb .php .pl .lua .r .jl .swift .m .cs .fs"
    " .hs .ml .clj .ex .erl .el .lisp .scm .f90 .f .asm .s .v .sv .cmake .mk".split()
)


def kind_of(path: Path) -> str | None:
    """The suffix that says how a file is read (`.jsonl` of `x.jsonl.gz`), in lower case; `None`: nothing reads it."""
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    known = TABLES - {".parquet"} | TEXTS if path.suffix.lower() == ".gz" else TABLES | TEXTS
    return suffix.lower() if suffix.lower() in known else None


def records(path: Path, columns: set[str] | None = None) -> Iterator[tuple[str, str | dict]]:
    """All records of one file: its text, or its rows one after the other without holding them all (except `.json`).

    Args:
        columns: the only ones to read from Parquet, by default all. Those that do not exist are left out.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _parquet_rows(path, columns)
    elif kind in (".jsonl", ".ndjson"):
        yield from _json_lines(path)
    elif kind == ".json":
        yield from _json(path)
    else:
        yield str(path), _decode(path, _bytes(path), 0, "utf-8-sig")


def columns_of(path: Path) -> list[str] | None:
    """Column names of a table's first row; `None` for text and for a table without rows."""
    if kind_of(path) == ".parquet":
        return _open_parquet(path).schema_arrow.names
    if kind_of(path) in TABLES:
        return next((list(row) for _, row in records(path)), None)
    return None


# --- text and JSON ---------------------------------------------------------------------------------------------------


def _open(path: Path):
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _bytes(path: Path) -> bytes:
    with _open(path) as file:
        try:
            return file.read()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: not a complete gzip file: {error}") from error


def _decode(path: Path, raw: bytes, offset: int, encoding: str = "utf-8") -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8: byte {raw[error.start]:#04x} at offset {offset + error.start}; convert the file to"
            " UTF-8"
        ) from error


def _json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    offset = 0
    with _open(path) as file:
        lines = enumerate(file, 1)
        while True:
            try:
                number, raw = next(lines)
            except StopIteration:
                return
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path}: not a complete gzip file: {error}") from error
            line = _decode(path, raw, offset, "utf-8-sig" if number == 1 else "utf-8")
            offset += len(raw)
            if line.strip():
                place = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{place}: invalid JSON: {error.msg} (column {error.colno})") from error
                except (RecursionError, ValueError) as error:  # nested too deeply, a number of thousands of digits
                    raise ValueError(f"{place}: JSON that cannot be read: {error}") from error
                yield place, _object(place, row)


def _json(path: Path) -> Iterator[tuple[str, dict]]:
    """An array of objects, one object, or objects one per line, which many files called `.json` are."""
    text = _decode(path, _bytes(path), 0, "utf-8-sig")
    if text.lstrip()[:1] != "[":
        try:
            row = json.loads(text)
        except (RecursionError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError) and error.msg != "Extra data":
                raise _invalid(path, error) from error
            yield from _json_lines(path)
        else:
            yield str(path), _object(str(path), row)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise _invalid(path, error) from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}: JSON that cannot be read: {error}") from error
    del text
    for number, row in enumerate(rows):
        place = f"{path}, element {number}"
        yield place, _object(place, row)


def _invalid(path: Path, error: json.JSONDecodeError) -> ValueError:
    return ValueError(f"{path}, line {error.lineno}: invalid JSON: {error.msg} (column {error.colno})")


def _object(place: str, row) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: must be an object with columns, got {type(row).__name__}")
    return row


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _open_parquet(path: Path):
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {error}") from error
    names = file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: has several columns named {twice[0]!r}")
    return file


def _parquet_rows(path: Path, columns: set[str] | None) -> Iterator[tuple[str, dict]]:
    import pyarrow

    file = _open_parquet(path)
    wanted = [name for name in file.schema_arrow.names if columns is None or name in columns]
    number, batches = 0, file.iter_batches(batch_size=256, columns=wanted)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file after row {number}: {error}") from error
        for row in range(batch.num_rows):
            try:
                yield f"{path}, row {number}", batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, row {number}: not UTF-8: byte {error.object[error.start]:#04x}") from error
            number += 1
