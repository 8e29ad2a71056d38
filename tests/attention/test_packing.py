"""Where packed documents lie, and what can't be packed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farfield.attention.packing import Packing, segments_of


@given(st.data())
def test_packing_undoes_unpacking_and_wastes_less_than_half(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    begins = torch.tensor(
        [[data.draw(st.integers(0, 3)) == 0 for _ in range(length)] for _ in range(batch)]
    )
    segments = begins.cumsum(-1)
    valid = torch.tensor(
        [[data.draw(st.integers(0, 4)) > 0 for _ in range(length)] for _ in range(batch)]
    )
    x = torch.arange(1.0, batch * length + 1).view(batch, length, 1)
    packing = Packing.of(segments, valid)
    parts = packing.unpacked(x)
    if parts:
        assert torch.equal(packing.packed(parts), x * valid[..., None])
    for row in range(batch):
        for document in segments[row].unique():
            inside = (segments[row] == document) & valid[row]
            count = int(inside.sum())
            assert packing.position[row][inside].tolist() == list(range(count))
            if count:
                want = x[row, inside, 0]
                assert any(torch.equal(one[:count, 0], want) for part in parts for one in part)
    assert sum(part.shape[0] * part.shape[1] for part in parts) < 2 * max(int(valid.sum()), 1)


def test_documents_of_like_length_share_a_batch() -> None:
    segments = torch.arange(6).repeat_interleave(torch.tensor([8, 7, 5, 2, 1, 9]))[None]
    shapes = [tuple(index.shape) for index in Packing.of(segments).documents]
    assert shapes == [(1, 1), (1, 2), (3, 8), (1, 9)]


def test_empty_and_single_documents_in_cumulative_lengths() -> None:
    segments = segments_of(torch.tensor([0, 0, 1, 1, 2]), 1, 2)
    assert Packing.of(segments).position.tolist() == [[0, 0]]
    assert segments_of(torch.tensor([0, 0]), 1, 0).shape == (1, 0)


@pytest.mark.parametrize(
    ("bounds", "batch", "said"),
    [
        ([0, 2, 4], 2, "one flattened row, the input has 2"),
        ([0, 2, 3], 1, "expected bounds from 0 to 4"),
        ([1, 4], 1, "expected bounds from 0 to 4"),
        ([0], 1, "expected bounds from 0 to 4"),
        ([0, 3, 2, 4], 1, "expected bounds that don't decrease"),
    ],
)
def test_bounds_that_do_not_cover_the_row(bounds: list[int], batch: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        segments_of(torch.tensor(bounds), batch, 4)


def test_segments_and_bounds_that_disagree() -> None:
    bounds = torch.tensor([0, 2, 4])
    given_ids = torch.tensor([[5, 5, 3, 3]])
    assert segments_of(bounds, 1, 4, given_ids).tolist() == [[0, 0, 1, 1]]
    with pytest.raises(ValueError, match="disagree on where documents begin"):
        segments_of(bounds, 1, 4, torch.tensor([[5, 3, 3, 3]]))


def test_a_document_in_two_pieces() -> None:
    with pytest.raises(ValueError, match="segment id 1 comes back after another one"):
        Packing.of(torch.tensor([[1, 1, 2, 1]]))
    Packing.of(torch.tensor([[1, 2], [2, 1]]))  # rows are apart
    padded = torch.tensor([[1, 1, 1, 0, 0]]).bool()
    assert Packing.of(torch.tensor([[1, 2, 2, 1, 1]]), padded).position.tolist() == [
        [0, 0, 1, 0, 0]
    ]
