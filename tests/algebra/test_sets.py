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
    near, far, sink = sets.partition(query, key, window, sinks)
    for row, i in enumerate(query.tolist()):
        for column, j in enumerate(key.tolist()):
            causal, close = j <= i, i - j < window
            told = (near[row, column], far[row, column], sink[row, column])
            assert told == (
                causal and close,
                causal and not close and j >= sinks,
                causal and not close and j < sinks,
            )


@given(length=st.integers(1, 20), window=SIZES, sinks=SIZES)
def test_counts_are_the_masks_summed(length: int, window: int, sinks: int) -> None:
    position = torch.arange(length)
    near, far, sink = sets.partition(position, position, window, sinks)
    assert torch.equal(near.sum(-1), sets.near_count(position, window))
    assert torch.equal(far.sum(-1), sets.far_count(position, window, sinks))
    assert torch.equal(sink.sum(-1), sets.sink_count(position, window, sinks))
    assert torch.equal((near | far | sink).sum(-1), position + 1)


def test_buckets_hold_the_near_sets_of_a_ladder_of_windows() -> None:
    query, key = torch.arange(5, 30), torch.arange(30)
    windows = torch.tensor([1, 4, 16])
    bucket = sets.distance_bucket(query, key, windows)
    for index, window in enumerate(windows.tolist()):
        near = (bucket >= 0) & (bucket <= index)
        assert torch.equal(near, sets.near_mask(query, key, window))
        assert torch.equal(bucket > index, sets.far_mask(query, key, window))
    assert torch.equal(bucket < 0, sets.route_length(query, key) < 0)


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
        (lambda p: sets.far_count(p, -2), "near_window is -2"),
        (lambda p: sets.partition(p, p, 1, -3), "sinks is -3"),
        (lambda p: sets.distance_bucket(p, p, torch.tensor([4, 2])), "edges are [4, 2]"),
    ],
)
def test_what_is_no_set_is_refused(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(words)):
        call(torch.arange(3))
