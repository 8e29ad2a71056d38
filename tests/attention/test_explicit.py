"""Weights that can be looked at: tiles of them, an observer, and the sum that they make."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farfield.attention.engines import explicit, reference, sdpa
from farfield.attention.logit import Visible


def draw(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v and a potential for each query head."""
    q = torch.randn(2, 4, queries, 6, dtype=torch.float64).to(dtype)
    k = torch.randn(2, 2, keys, 6, dtype=torch.float64).to(dtype)
    v = torch.randn(2, 2, keys, 5, dtype=torch.float64).to(dtype)
    return q, k, v, torch.rand(1, 4, keys, dtype=torch.float64).cumsum(-1)


@pytest.mark.parametrize("lengths", [(11, 11), (4, 11), (1, 11), (1, 1)], ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_tiles_are_softmax_of_their_logits(
    lengths: tuple[int, int], chunk: int | None, window: int | None, sinks: int
) -> None:
    q, k, v, u = draw(*lengths)
    visible = Visible(*lengths, window=window, sinks=sinks)
    tiles = list(explicit.weights(q, k, potential=u, visible=visible, chunk=chunk))
    offset = lengths[1] - lengths[0]
    assert [tile.start for tile in tiles] == list(range(offset, lengths[1], chunk or lengths[1]))
    out, lse = reference.with_lse(q, k, v, potential=u, visible=visible)
    for tile in tiles:
        seen = visible.tile(tile.start, tile.stop, tile.first, tile.stop, "cpu")
        assert torch.equal(tile.logits.isfinite(), seen.expand_as(tile.logits))
        torch.testing.assert_close(tile.weights.sum(-1), torch.ones_like(tile.log_sum_exp))
        torch.testing.assert_close(tile.weights, tile.logits.softmax(-1))
        rows = slice(tile.start - offset, tile.stop - offset)
        torch.testing.assert_close(tile.log_sum_exp, lse[..., rows])
        values = v[..., tile.first : tile.stop, :].repeat_interleave(2, 1)
        torch.testing.assert_close(tile.weights @ values, out[..., rows, :])


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_observer_sees_every_query_once(chunk: int | None) -> None:
    q, k, v, u = draw(9, 13)
    seen: list[int] = []

    def observe(tile: explicit.Tile) -> None:
        seen.extend(range(tile.start, tile.stop))
        assert tile.weights.shape == (2, 4, tile.stop - tile.start, tile.stop)

    visible = Visible(9, 13)
    out = explicit.attend(q, k, v, potential=u, visible=visible, chunk=chunk, observe=observe)
    assert seen == list(range(4, 13))
    want = reference.attend(q, k, v, potential=u, visible=visible)
    torch.testing.assert_close(out, want, rtol=0.0, atol=1e-12)


def test_exact_in_float32() -> None:
    """Within 1e-6 of float64, and of sdpa but for what a riding potential costs that one."""
    q, k, v, u = draw(300, 300, torch.float32)
    visible = Visible(300, 300)
    for potential, bound in ((None, 1e-6), (u, 4e-6)):
        out = explicit.attend(q, k, v, potential=potential, visible=visible)
        want = reference.attend(
            q.double(), k.double(), v.double(), potential=potential, visible=visible
        )
        torch.testing.assert_close(out.double(), want, rtol=0.0, atol=1e-6)
        other = sdpa.attend(q, k, v, potential=potential, visible=visible)
        torch.testing.assert_close(out, other, rtol=1e-6, atol=bound)


def test_a_tile_holds_fewer_queries_where_there_are_more_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explicit, "_ELEMENTS", 2000)
    sizes: dict[int, int] = {}
    for keys in (20, 40, 80):
        q, k, _, _ = draw(keys, keys)
        tiles = explicit.weights(q, k, visible=Visible(keys, keys))
        sizes[keys] = max(tile.logits.numel() for tile in tiles)
    assert max(sizes.values()) <= 2000


def test_a_window_leaves_far_keys_out_of_the_tile() -> None:
    q, k, _, _ = draw(40, 40)
    tiles: Any = explicit.weights(q, k, visible=Visible(40, 40, window=5), chunk=8)
    assert [(tile.first, tile.stop) for tile in tiles] == [
        (max(0, start - 4), start + 8) for start in range(0, 40, 8)
    ]


def test_a_chunk_has_a_query() -> None:
    q, k, _, _ = draw(3, 3)
    with pytest.raises(ValueError, match="chunk is 0; expected at least 1 query"):
        next(explicit.weights(q, k, visible=Visible(3, 3), chunk=0))
