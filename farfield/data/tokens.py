"""A split's tokens: ids, the bytes of text they stand for, and where documents begin."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class TokenStream:
    """The tokens of a split in text order, read from disk as they are used.

    `byte_ends[i]` is the number of bytes of the split's text up to and including token i, so that
    tokens [a, b) stand for byte_ends[b−1] − byte_ends[a−1] bytes; None where every token is one
    byte. `documents` holds the token at which each document begins, and the length at the end;
    where it isn't given, the stream is one document. No token is inserted anywhere: neither BOS nor
    EOS stands between documents.

    Shapes: ids [n], byte_ends [n] or None, documents [documents + 1]. Units: tokens, bytes.
    Raises: ValueError when the arrays contradict one another.
    """

    ids: np.ndarray
    byte_ends: np.ndarray | None = None
    documents: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    name: str = "tokens"

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype.kind not in "iu":
            raise ValueError(
                f"{self.name}: ids are {self.ids.dtype} of shape {self.ids.shape}, "
                "expected integers in one dimension"
            )
        if self.byte_ends is not None and self.byte_ends.shape != self.ids.shape:
            raise ValueError(
                f"{self.name}: byte_ends has shape {self.byte_ends.shape}, "
                f"expected one number per id, {self.ids.shape}"
            )
        if not len(self.documents):
            object.__setattr__(self, "documents", np.unique([0, len(self.ids)]))
        if self.documents[0] != 0 or self.documents[-1] != len(self.ids):
            raise ValueError(f"{self.name}: documents must run from 0 to {len(self.ids)} tokens")

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"TokenStream({self.name}: {len(self)} tokens, {self.document_count} documents)"

    @property
    def document_count(self) -> int:
        """The number of documents; one cut by a split counts in both of its splits."""
        return len(self.documents) - 1

    def block(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as a new int64 array.

        Raises: ValueError when the block doesn't lie within the stream.
        """
        self._check(start, start + length)
        return np.asarray(self.ids[start : start + length], np.int64)

    def byte_count(self, start: int, stop: int) -> int:
        """Bytes of text that tokens [start, stop) stand for.

        Sums exactly: byte_count(a, c) = byte_count(a, b) + byte_count(b, c).

        Raises: ValueError when the range doesn't lie within the stream.
        """
        self._check(start, stop)
        if self.byte_ends is None:
            return stop - start
        before, through = (int(self.byte_ends[i - 1]) if i else 0 for i in (start, stop))
        return through - before

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self):
            raise ValueError(
                f"{self.name}: tokens [{start}, {stop}) asked for, expected a range within "
                f"[0, {len(self)})"
            )
