"""Reading documents out of .txt, .jsonl and .parquet files, plain or .gz, a piece at a time.

Every reader yields pieces `(first, data)`: `data` is valid UTF-8 once the pieces of a document are
joined, and `first` marks the piece that opens a document. A .txt file is one document; a line of
.jsonl or a row of .parquet is one document. Memory holds one piece, one line or one parquet row
group, never a file.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from farfield.data.messages import nearest, one_line

Piece = tuple[bool, bytes]

SUFFIXES = (".txt", ".jsonl", ".parquet")
READ_BYTES = 1 << 20
PARQUET_ROWS = 256


def text_format(path: Path) -> str | None:
    """The format a file's name claims: one of `SUFFIXES`, or None for any other name."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def is_compressed(path: Path) -> bool:
    """Whether the file's name claims gzip."""
    return path.name.lower().endswith(".gz")


def read_file(path: Path, column: str) -> Iterator[Piece]:
    """The documents of one file, in its own order, as pieces.

    `column` names the text of a .jsonl object or a .parquet row; a .txt file ignores it.

    Raises: ValueError naming the file, and the byte offset, line or row, for text that is not
    UTF-8, a broken gzip or parquet file, a line that is not a JSON object, a missing column and a
    text that is not a string.
    """
    readers = {".txt": _read_text, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
    kind = text_format(path)
    if kind is None:
        raise unknown_suffix(path)
    try:
        yield from readers[kind](path, column)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a whole gzip file ({one_line(error)})") from error


def unknown_suffix(path: Path) -> ValueError:
    """The error for a file whose name claims no format that is read here."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return ValueError(
        f"{path}: unknown suffix {suffix!r}; expected {', '.join(SUFFIXES)}, plain or .gz"
        f"{nearest(suffix, SUFFIXES)}"
    )


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's uncompressed bytes."""
    with path.open("rb") as raw:
        if not is_compressed(path):
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unpacked:
            yield unpacked  # type: ignore[misc]  # a GzipFile reads like any binary file


def _read_text(path: Path, column: str) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset = 0
    with _opened(path) as file:
        first = True
        while True:
            data = file.read(READ_BYTES)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - held + error.start) from error
            offset += len(data)
            if first or data:
                yield first, data
            if not data:
                return
            first = False


def _read_json_lines(path: Path, column: str) -> Iterator[Piece]:
    offset = 0
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                record = json.loads(line.decode()) if line.strip() else None
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset + error.start) from error
            except json.JSONDecodeError as error:
                what = f"not JSON ({error.msg}, column {error.colno})"
                raise ValueError(f"{where}: {what}") from error
            offset += len(line)
            if line.strip():
                yield True, document_bytes(record, column, where)


def _read_parquet(path: Path, column: str) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(path) as file, tempfile.TemporaryFile() as unpacked:
        seekable: Any = file
        if is_compressed(path):  # parquet is read from its end: gzip has to be undone first
            shutil.copyfileobj(file, unpacked, READ_BYTES)
            unpacked.seek(0)
            seekable = unpacked
        try:
            table = pq.ParquetFile(seekable)
            if column not in table.schema_arrow.names:
                raise missing_column(str(path), column, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(PARQUET_ROWS, columns=[column]):
                for value in batch.column(0):
                    record = {column: _value(path, row, value)}
                    yield True, document_bytes(record, column, f"{path}, row {row}")
                    row += 1
        except pa.ArrowException as error:
            raise ValueError(f"{path}: not a readable parquet file ({one_line(error)})") from error


def _value(path: Path, row: int, value: Any) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, row {row}: not UTF-8 at byte {error.start} of its text; expected UTF-8"
        ) from error


def document_bytes(record: object, column: str, where: str) -> bytes:
    """The text of one record as UTF-8.

    Raises: ValueError, beginning with `where`, for a record that is no object, lacks the column, or
    holds something else than text that UTF-8 can express.
    """
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"{where}: got {kind}, expected an object with {column!r}")
    if column not in record:
        raise missing_column(where, column, list(record))
    text = record[column]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {column!r} holds {type(text).__name__}, expected text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {column!r} holds a lone surrogate at character {error.start}, "
            "expected text that UTF-8 can express"
        ) from error


def missing_column(where: str, column: str, columns: list[str]) -> ValueError:
    """The error for a text column that is not there: it names those that are."""
    names = ", ".join(map(repr, columns)) or "none"
    return ValueError(f"{where}: no column {column!r}; it has {names}{nearest(column, columns)}")


def _not_utf8(path: Path, offset: int) -> ValueError:
    unpacked = " of its uncompressed text" if is_compressed(path) else ""
    return ValueError(f"{path}: not UTF-8 at byte {offset}{unpacked}; expected UTF-8")


def content_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.digest()
