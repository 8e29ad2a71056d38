"""A stream answers for its ranges exactly, and refuses what it doesn't hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield.data import TokenStream

WHOLE = np.array([0, 2])


@given(st.lists(st.integers(0, 9), max_size=30), st.data())
def test_byte_count_is_the_sum_of_its_tokens(sizes: list[int], data: st.DataObject) -> None:
    stream = TokenStream(np.zeros(len(sizes), np.uint16), np.cumsum(sizes, dtype=np.int64))
    start = data.draw(st.integers(0, len(sizes)))
    stop = data.draw(st.integers(start, len(sizes)))
    assert stream.byte_count(start, stop) == sum(sizes[start:stop])


def test_without_ends_each_token_is_a_byte() -> None:
    stream = TokenStream(np.arange(5, dtype=np.uint16))
    assert stream.byte_count(1, 4) == 3
    assert stream.documents.tolist() == [0, 5]
    assert repr(stream) == "TokenStream(tokens: 5 tokens, 1 documents)"


def test_nothing_at_all_is_a_stream_without_documents() -> None:
    stream = TokenStream(np.empty(0, np.uint16))
    assert (len(stream), stream.document_count, stream.byte_count(0, 0)) == (0, 0, 0)


def test_block_is_a_copy_in_int64() -> None:
    ids = np.arange(10, dtype=np.uint16)
    block = TokenStream(ids).block(3, 4)
    assert block.dtype == np.int64
    assert block.tolist() == [3, 4, 5, 6]
    block[0] = 99
    assert ids[3] == 3


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 6), (6, 0), (3, -1)])
def test_ranges_outside_are_refused(start: int, length: int) -> None:
    stream = TokenStream(np.arange(5, dtype=np.uint16), name="test")
    with pytest.raises(ValueError, match=r"test: tokens \[.*expected a range within \[0, 5\)"):
        stream.block(start, length)
    with pytest.raises(ValueError, match="expected a range"):
        stream.byte_count(start, start + length)


@pytest.mark.parametrize(
    ("ids", "ends", "documents", "message"),
    [
        (np.zeros((2, 2), np.uint16), None, WHOLE, r"shape \(2, 2\), expected integers"),
        (np.zeros(2, np.float32), None, WHOLE, "ids are float32"),
        (np.zeros(2, np.uint16), np.zeros(3, np.int64), WHOLE, r"byte_ends has shape \(3,\)"),
        (np.zeros(2, np.uint16), None, np.array([0, 3]), "documents must run from 0 to 2"),
        (np.zeros(2, np.uint16), None, np.array([1, 2]), "documents must run from 0 to 2"),
    ],
)
def test_contradictions_are_refused(
    ids: np.ndarray, ends: np.ndarray | None, documents: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenStream(ids, ends, documents)
