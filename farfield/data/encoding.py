"""A split of the spooled text as files of tokens, written as it is encoded.

The tokens of a split are the encodings of its pieces end to end. A piece is a document; one longer
than `PIECE_BYTES` is cut after a line, at a place where byte-level tokenizers cut by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from farfield.data.spool import Spool, character_start, map_array
from farfield.data.tokenizer import Tokenizer
from farfield.data.tokens import TokenStream

PIECE_BYTES = 1 << 20
BATCH_BYTES = 1 << 21
BATCH_PIECES = 1024
# A single newline between visible ASCII is a token's end whether or not text follows.
LINE_END = re.compile(rb"[!-~]\n(?=[!-~])")


def text_pieces(
    spooled: Spool, start: int, stop: int, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[bool, str]]:
    """Text of the bytes [start, stop) as `(begins a document, text)`; the first piece always does.

    `start` and `stop` must lie between characters.
    """
    begins = spooled.starts
    low, high = np.searchsorted(begins, [start + 1, stop])
    bound = start
    for index in range(int(low), int(high) + 1):
        end = int(begins[index]) if index < high else stop
        first = True
        while bound < end:
            piece_end = _piece_end(spooled.text, bound, end, piece_bytes)
            yield first, spooled.text[bound:piece_end].tobytes().decode()
            bound, first = piece_end, False


def _piece_end(text: np.ndarray, start: int, stop: int, piece_bytes: int) -> int:
    limit = start + piece_bytes
    if limit >= stop:
        return stop
    window = text[start + piece_bytes // 2 : limit + 1].tobytes()
    ends = [match.end() for match in LINE_END.finditer(window)]
    if ends:
        return start + piece_bytes // 2 + ends[-1]
    return character_start(text, limit)


def _batches(pieces: Iterator[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    batch: list[tuple[bool, str]] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece[1])
        if held >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def id_type(vocab_size: int) -> np.dtype:
    """uint16 where it holds every id, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_split(
    spooled: Spool,
    start: int,
    stop: int,
    tokenizer: Tokenizer,
    folder: Path,
    name: str,
    limit: int | None = None,
) -> None:
    """Write the tokens of bytes [start, stop) to `folder` as the files of the split `name`.

    `limit` is the most tokens that are kept, from the front.
    """
    dtype = id_type(tokenizer.vocab_size)
    if tokenizer.is_bytes:
        assert limit is None  # for bytes the text itself was cut
        _copy_bytes(spooled, start, stop, folder, name, dtype)
        return
    count = text_bytes = 0
    opens = False
    with (
        (folder / f"{name}.ids").open("wb") as ids_file,
        (folder / f"{name}.byte_ends").open("wb") as ends_file,
        (folder / f"{name}.documents").open("wb") as documents_file,
    ):
        for batch in _batches(text_pieces(spooled, start, stop)):
            if limit is not None and count >= limit:
                break
            texts = [text for _, text in batch]
            for (first, text), (ids, ends) in zip(
                batch, tokenizer.encode_pieces(texts), strict=True
            ):
                if limit is not None:
                    ids, ends = ids[: limit - count], ends[: limit - count]
                opens |= first
                if opens and len(ids):  # a document without a token isn't counted
                    documents_file.write(count.to_bytes(8, "little"))
                    opens = False
                ids_file.write(ids.astype(dtype).tobytes())
                ends_file.write((ends + text_bytes).astype("<i8").tobytes())
                count += len(ids)
                text_bytes += len(text.encode())
        documents_file.write(count.to_bytes(8, "little"))


def _copy_bytes(
    spooled: Spool, start: int, stop: int, folder: Path, name: str, dtype: np.dtype
) -> None:
    """The same for the byte tokenizer, whose tokens are the text's own bytes."""
    with (folder / f"{name}.ids").open("wb") as ids_file:
        for low in range(start, stop, PIECE_BYTES):
            block = spooled.text[low : min(low + PIECE_BYTES, stop)]
            ids_file.write(block.astype(dtype).tobytes())
    first, beyond = np.searchsorted(spooled.starts, [start + 1, stop])
    with (folder / f"{name}.documents").open("wb") as documents_file:
        if stop > start:
            documents_file.write((0).to_bytes(8, "little"))
        for low in range(int(first), int(beyond), PIECE_BYTES):
            begins = spooled.starts[low : min(low + PIECE_BYTES, int(beyond))]
            documents_file.write((begins - start).astype("<i8").tobytes())
        documents_file.write((stop - start).to_bytes(8, "little"))


def read_split(folder: Path, name: str, vocab_size: int) -> TokenStream:
    """The split that `encode_split` wrote, mapped from disk."""
    ends = folder / f"{name}.byte_ends"
    return TokenStream(
        ids=map_array(folder / f"{name}.ids", id_type(vocab_size)),
        byte_ends=map_array(ends, np.dtype("<i8")) if ends.exists() else None,
        documents=map_array(folder / f"{name}.documents", np.dtype("<i8")),
        name=name,
    )
