"""A source's text on disk as one run of UTF-8, and where it is cut into splits.

The text is written once, so that a source that can only be read forward (a stream, a gzip file) can
be cut by its length and read again, in memory that doesn't grow with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from farfield.data.files import Piece

FEW_DOCUMENTS = 50
"""From this many documents on, a split is a set of whole documents."""


@dataclass(frozen=True)
class Spool:
    """Documents end to end, a newline between two of them where the first doesn't end with one.

    Shapes: text [bytes] uint8, starts [documents] int64 (the byte at which each begins).
    """

    text: np.ndarray
    starts: np.ndarray
    empty: int
    """Documents without a single byte, left out."""

    def __len__(self) -> int:
        return len(self.text)


def spool(pieces: Iterable[Piece], folder: Path, limit: int | None = None) -> Spool:
    """Write the pieces of documents to `folder` and map the result.

    `limit` stops the reading at that many bytes, at a whole character.
    """
    size = empty = document_size = 0
    open_document = False
    last = b"\n"
    with (folder / "text").open("wb") as text, (folder / "starts").open("wb") as starts:
        for first, data in pieces:
            if limit is not None and size >= limit:
                break
            if first:
                empty += open_document and not document_size
                open_document, document_size = True, 0
            if not data:
                continue
            if not document_size:
                if last != b"\n":
                    size += text.write(b"\n")
                starts.write(size.to_bytes(8, "little"))
            document_size += text.write(data)
            size += len(data)
            last = data[-1:]
        empty += open_document and not document_size
    whole = map_array(folder / "text", np.uint8)
    if limit is not None and size > limit:
        whole = whole[: character_start(whole, limit)]
    begins = map_array(folder / "starts", np.dtype("<i8"))
    return Spool(whole, begins[begins < len(whole)], int(empty))


def map_array(path: Path, dtype: np.dtype | type) -> np.ndarray:
    """A file of numbers as a read-only array on disk; an empty file is an empty array."""
    if not path.stat().st_size:  # the operating system has no mapping of nothing
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def character_start(text: np.ndarray, position: int) -> int:
    """The first byte, at or before `position`, at which a UTF-8 character begins."""
    while 0 < position < len(text) and (int(text[position]) & 0xC0) == 0x80:
        position -= 1
    return position


def cut(spooled: Spool, fractions: tuple[float, float, float]) -> tuple[list[int], str]:
    """Bytes [e_0, e_1), [e_1, e_2), [e_2, e_3) of the three splits, and what they were cut by.

    Cut by "document" (at the beginning of a document nearest to the fraction) from 50 documents on,
    provided that every split asked for gets one; else by "position" (at a whole character).

    Raises: ValueError when a split asked for would be empty.
    """
    size = len(spooled)
    wanted = [0, round(size * fractions[0]), round(size * (fractions[0] + fractions[1])), size]
    wanted[2] = size if not fractions[2] else min(wanted[2], size)
    if len(spooled.starts) >= FEW_DOCUMENTS:
        edges = [_nearest_start(spooled, edge) for edge in wanted]
        if _all_there(edges, fractions):
            return edges, "document"
    edges = [character_start(spooled.text, edge) for edge in wanted]
    if not _all_there(edges, fractions):
        raise ValueError(
            f"a text of {size} bytes is too short to split by {fractions}; "
            "expected at least a character for each of train, validation and test"
        )
    return edges, "position"


def _all_there(edges: list[int], fractions: tuple[float, float, float]) -> bool:
    sizes = np.diff(edges)
    return all((size > 0) == (part > 0) for size, part in zip(sizes, fractions, strict=True))


def _nearest_start(spooled: Spool, edge: int) -> int:
    bounds = spooled.starts
    index = int(np.searchsorted(bounds, edge))
    around = [int(bounds[i]) for i in (index - 1, index) if 0 <= i < len(bounds)]
    return min([*around, len(spooled)], key=lambda start: abs(start - edge))
