"""Which keys a query sees, against the definition's loop, and what engines slice by it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farfield.algebra import reference
from farfield.attention.logit import Visible

CPU = torch.device("cpu")


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, int | None, int]:
    """Validity of a few rows, a window or none, and sinks."""
    keys = draw(st.integers(1, 12))
    row = st.lists(st.booleans(), min_size=keys, max_size=keys)
    valid = torch.tensor(draw(st.lists(row, min_size=1, max_size=3)))
    window = draw(st.none() | st.integers(1, 14))
    return valid, window, draw(st.integers(0, 5))


def counted(valid: Tensor) -> Tensor:
    """How many real tokens precede each key."""
    return valid.long().cumsum(-1) - valid.long()


@settings(max_examples=60, deadline=None)
@given(rows())
def test_tiles_are_the_definition_and_a_query_sees_itself(
    case: tuple[Tensor, int | None, int],
) -> None:
    valid, window, sinks = case
    keys = valid.shape[-1]
    visible = Visible(keys, keys, valid, counted(valid), window, sinks)
    tile = visible.tile(0, keys, 0, keys, CPU)
    assert tile.shape == (len(valid), 1, keys, keys)
    for b, row in enumerate(valid):
        for i in range(keys):
            for j in range(keys):
                want = i == j or reference.visible(i, j, row, window=window, sinks=sinks)
                assert bool(tile[b, 0, i, j]) == want, (b, i, j)
    part = visible.tile(keys // 3, keys - keys // 4, keys // 5, keys, CPU)
    assert torch.equal(part, tile[..., keys // 3 : keys - keys // 4, keys // 5 :])


@settings(max_examples=60, deadline=None)
@given(rows(), st.booleans())
def test_what_is_sliced_away_is_seen_by_no_row(
    case: tuple[Tensor, int | None, int], positioned: bool
) -> None:
    valid, window, sinks = case
    keys = valid.shape[-1]
    visible = Visible(keys, keys, valid, counted(valid) if positioned else None, window, sinks)
    seen = visible.tile(0, keys, 0, keys, CPU).any(0).flatten(0, -3).any(0)
    stop = visible.sink_stop() if window is not None else 0
    assert stop == 0 or sinks > 0
    for start in range(keys):
        first = visible.first_key(start)
        assert 0 <= first <= start
        assert not seen[start:, stop:first].any()


@pytest.mark.parametrize("window", [1, 3, 8])
def test_visible_keys_are_the_window(window: int) -> None:
    tile = Visible(20, 20, window=window).tile(0, 20, 0, 20, CPU)
    assert tile.sum(-1).tolist() == [min(i + 1, window) for i in range(20)]
    assert [Visible(20, 20, window=window).first_key(i) for i in range(20)] == [
        int(row.int().argmax()) for row in tile
    ]
    with_sinks = Visible(20, 20, window=window, sinks=2).tile(0, 20, 0, 20, CPU)
    assert with_sinks.sum(-1).tolist() == [min(i + 1, window + 2) for i in range(20)]


def test_a_dropped_key_leaves_the_window_where_it_was() -> None:
    """Keys 2, 3, 4 of nine were dropped: positions jump, and the window counts them still."""
    position = torch.tensor([[0, 1, 5, 6, 7, 8]])
    tile = Visible(6, 6, position=position, window=3, sinks=1).tile(0, 6, 0, 6, CPU)[0, 0]
    assert tile[2].tolist() == [True, False, True, False, False, False]
    assert tile[5].tolist() == [True, False, False, True, True, True]


def test_causality_alone() -> None:
    valid = torch.ones(1, 4, dtype=torch.bool)
    assert Visible(4, 4).plain
    assert Visible(2, 4, position=torch.arange(4)[None]).plain
    assert Visible(4, 4, window=4).plain
    assert not Visible(4, 4, window=3).plain
    assert not Visible(4, 4, valid).plain
    assert not Visible(4, 4, position=torch.arange(4)[None], window=4).plain
    assert Visible(2, 4).tile(2, 4, 0, 4, CPU).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"queries": 3, "keys": 2}, "3 queries of 2 keys"),
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"sinks": -1}, "sinks is -1; expected 0 or more"),
        ({"valid": torch.ones(1, 3, dtype=torch.bool)}, "valid has 3 columns; expected one for"),
        ({"position": torch.zeros(1, 1)}, "position has 1 columns"),
        ({"valid": torch.ones(1, 2)}, "valid is torch.float32; expected bool"),
    ],
)
def test_what_does_not_fit_is_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Visible(**{"queries": 2, "keys": 2, **given_})
