"""Near, far and sink sets against the definition, one pair at a time."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farfield.algebra import sets

SIZES = st.integers(0, 12)


@given(first=SIZES, queries=st.integers(1, 6), keys=st.integers(1, 12), window=SIZES, sinks=SIZES)
def test_a_tile_says_of_each_pair_what_the_definition_says(
    first: int, queries: int, keys: int, window: int, sinks: int
) -> None:
    query, key = torch.arange(first, first + queries), torch.arange(keys)
    near, far = sets.near_mask(query, key, window), sets.far_mask(query, key, window)
    for row, i in enumerate(query.tolist()):
        for column, j in enumerate(key.tolist()):
            causal, close = j <= i, i - j < window
            assert (near[row, column], far[row, column]) == (
                causal and close,
                causal and not close,
            )
    assert sets.sink_mask(key, sinks).tolist() == [j < sinks for j in range(keys)]


def test_the_query_is_near_itself_and_batches_have_positions_of_their_own() -> None:
    assert sets.near_mask(torch.tensor([7]), torch.tensor([6, 7, 8]), 1).tolist() == [
        [False, True, False]
    ]
    query, key = torch.tensor([[3], [9]]), torch.arange(10).expand(2, 10)
    assert sets.near_mask(query, key, 4).sum(-1).tolist() == [[4], [4]]
    assert sets.near_mask(query, key, 4)[1, 0].nonzero().flatten().tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: sets.near_mask(p, p, -1), "near_window is -1"),
        (lambda p: sets.far_mask(p, p, -2), "near_window is -2"),
        (lambda p: sets.sink_mask(p, -3), "sinks is -3"),
    ],
)
def test_what_is_no_set_is_refused(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(words)):
        call(torch.arange(3))
