"""Contractions: products of steps, chunks of them and their trail, against loops over steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farfield.algebra import contraction as module
from farfield.algebra import reference
from farfield.algebra.contraction import Chunk, Contraction, ContractionTrail, Rows

CLOSE: Any = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of five tokens, so that short sequences have many."""
    monkeypatch.setattr(module, "CHUNK", 5)
    return 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(length: int, batch: int = 2, heads: int = 3, dim: int = 6) -> Rows:
    """Keys, unit vectors and strengths from 0 to 2, a few of them exactly 0 and 2."""
    w = torch.nn.functional.normalize(drawn(batch, heads, length, dim), dim=-1)
    beta = 2.0 * torch.rand(batch, heads, length, dtype=torch.float64)
    beta = beta.masked_fill(torch.rand(beta.shape) < 0.2, 0.0)
    beta = beta.masked_fill(torch.rand(beta.shape) < 0.2, 2.0)
    return Rows(drawn(batch, heads, length, dim), w, beta)


def steps(rows: Rows) -> Tensor:
    """I - β w wᵀ of every token, written out."""
    outer = rows.w[..., :, None] * rows.w[..., None, :]
    return torch.eye(rows.w.shape[-1], dtype=torch.float64) - rows.beta[..., None, None] * outer


def route(rows: Rows, source: int, query: int) -> Tensor:
    """The product of steps on the route, for every row and head."""
    every = steps(rows)
    found = [[reference.transport(head, source, query) for head in row] for row in every]
    return torch.stack([torch.stack(row) for row in found])


def trail_of(rows: Rows) -> ContractionTrail:
    return ContractionTrail.of(Contraction(rows.w, rows.beta), rows.keys)


def transported(trail: ContractionTrail, rows: Rows) -> Tensor:
    """Every key moved on to the last token, from what the trail holds."""
    trail = trail.settled
    far = trail.keys.unflatten(-2, (-1, module.CHUNK))
    reach = trail.reach(trail.closed)
    found = [
        far[:, :, b] @ reach[..., b, :].mT @ trail.open.product.mT for b in range(trail.closed)
    ]
    return torch.cat([*found, trail.open.transported], -2)


@pytest.mark.parametrize("length", [1, 5, 13])
def test_transport_is_the_product_of_the_steps_on_the_route(short: int, length: int) -> None:
    rows = tokens(length)
    contraction = Contraction(rows.w, rows.beta)
    for query in range(length):
        for source in range(query + 1):
            found = contraction.between(source, query)
            torch.testing.assert_close(found, route(rows, source, query), **CLOSE)
            assert torch.linalg.matrix_norm(found, 2).max() <= 1 + 1e-12
    assert contraction.length == length


def test_a_chunk_moves_its_keys_on_and_its_queries_back(short: int) -> None:
    rows = tokens(7)
    chunk, last = Chunk.solved(rows), 6
    q = drawn(2, 3, 7, 6)
    scores, moved = chunk.met(q, torch.ones(7, 7, dtype=torch.float64).tril())
    first = steps(rows)[..., 0, :, :]
    torch.testing.assert_close(chunk.product, route(rows, 0, last) @ first, **CLOSE)
    for i in range(7):
        back = (route(rows, 0, i) @ first).mT @ q[..., i, :, None]
        torch.testing.assert_close(moved[..., i, :], back.squeeze(-1), **CLOSE)
        end = route(rows, i, last) @ rows.keys[..., i, :, None]
        torch.testing.assert_close(chunk.transported[..., i, :], end.squeeze(-1), **CLOSE)
        for j in range(i + 1):
            key = (route(rows, j, i) @ rows.keys[..., j, :, None]).squeeze(-1)
            torch.testing.assert_close(scores[..., i, j], (q[..., i, :] * key).sum(-1), **CLOSE)


@pytest.mark.parametrize("known", range(8))
def test_a_chunk_grows_by_any_number_of_tokens(known: int) -> None:
    rows = tokens(8)
    whole, grown = Chunk.solved(rows), Chunk.solved(rows.cut(0, known)).extended(rows.cut(known, 8))
    torch.testing.assert_close(grown.taken, whole.taken, **CLOSE)
    torch.testing.assert_close(grown.taking, whole.taking, **CLOSE)
    cut = whole.cropped(known)
    torch.testing.assert_close(cut.taken, Chunk.solved(rows.cut(0, known)).taken, **CLOSE)
    torch.testing.assert_close(cut.product, Chunk.solved(rows.cut(0, known)).product, **CLOSE)


def test_gradients_of_a_chunk_are_those_of_the_loop() -> None:
    rows = Rows(*(x.requires_grad_() for x in tokens(6)))
    chunk = Chunk.solved(rows)
    first = steps(rows)[..., 0, :, :]
    ends = [route(rows, j, 5) @ rows.keys[..., j, :, None] for j in range(6)]
    want = [route(rows, 0, 5) @ first, torch.cat(ends, -1).mT]
    weights = [drawn(*x.shape) for x in want]
    ours = torch.autograd.grad([chunk.product, chunk.transported], rows, weights)
    for found, expected in zip(ours, torch.autograd.grad(want, rows, weights), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("length", [1, 7])
def test_gradients_written_out_are_those_of_autograd(length: int) -> None:
    rows = Rows(*(x.requires_grad_() for x in tokens(length)))
    q = drawn(2, 3, 4, 6).requires_grad_()
    own = (torch.rand(4, length) < 0.6).double()
    chunk = Chunk.solved(rows)
    results = [*chunk.met(q, own), chunk.transported, chunk.product]
    weights = [drawn(*x.shape) for x in results]
    with torch.no_grad():
        of_q, of_rows = chunk.gradients(q, own, *weights)
    for found, want in zip(
        (of_q, *of_rows), torch.autograd.grad(results, (q, *rows), weights), strict=True
    ):
        torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("parts", [[23], [1] * 23, [5, 5, 13], [3, 12, 0, 8], [22, 1]], ids=str)
def test_a_trail_doesnt_depend_on_how_its_tokens_came_in(
    short: int, parts: list[int], recording: bool
) -> None:
    rows, start, trail = tokens(23), 0, None
    for count in parts:
        new = trail_of(rows.cut(start, start + count))
        start += count
        trail = new if trail is None else trail.joined(new)
        assert (trail.length, trail.batch) == (start, 2)
        found = transported(trail, rows.cut(0, start))
        want = [(route(rows, j, start - 1) @ rows.keys[..., j, :, None]).mT for j in range(start)]
        torch.testing.assert_close(found, torch.cat(want, -2), **CLOSE)
        trail = trail if recording else trail.last()
        assert trail.spare == (start if recording else 0)
    assert trail is not None
    assert (trail.settled.closed, trail.settled.open.length) == (4, 3)


def test_a_key_is_written_once(short: int) -> None:
    rows = tokens(40)
    trail = trail_of(rows.cut(0, 12)).last()
    before = trail.keys.clone()
    for start in range(12, 40):
        trail = trail.joined(trail_of(rows.cut(start, start + 1))).last()
    assert torch.equal(trail.keys[..., :10, :], before)


@pytest.mark.parametrize("known", [0, 3, 5, 11])
def test_cropping_gives_back_the_trail_before(short: int, known: int) -> None:
    rows = tokens(24)
    for count in range(1, 24 - known + (known > 0)):
        trail = trail_of(rows.cut(known, 24))
        if known:
            trail = trail_of(rows.cut(0, known)).last().joined(trail)
        kept = 24 - count
        cut = trail.cropped(count)
        assert (cut.length, cut.spare) == (kept, kept - known)
        again = cut.joined(trail_of(rows.cut(kept, 24)))
        expected = trail_of(rows)
        for one, want in ((cut, trail_of(rows.cut(0, kept))), (again, expected)):
            torch.testing.assert_close(transported(one, rows), transported(want, rows), **CLOSE)
            assert one.closed == want.settled.closed


def test_rows_of_the_batch_move_together(short: int) -> None:
    rows = tokens(13)
    order = torch.tensor([1, 0, 1])
    moved = trail_of(rows).mapped(lambda x: x[order])
    want = trail_of(Rows(*(x[order] for x in rows)))
    assert moved.batch == 3
    torch.testing.assert_close(transported(moved, rows), transported(want, rows), **CLOSE)
    new = Rows(*(x[order] for x in tokens(4)))
    torch.testing.assert_close(
        transported(moved.joined(trail_of(new)), rows),
        transported(want.joined(trail_of(new)), rows),
        **CLOSE,
    )


def test_trails_join_trails_that_know_their_rows(short: int) -> None:
    rows = tokens(20)
    first, second = trail_of(rows.cut(0, 8)), trail_of(rows.cut(8, 20))
    joined = first.joined(second.settled)
    torch.testing.assert_close(
        transported(joined, rows), transported(trail_of(rows), rows), **CLOSE
    )
    with pytest.raises(ValueError, match="12 of the new 12 tokens are folded"):
        first.joined(second.last())


def test_errors_name_the_shapes() -> None:
    rows = tokens(4)
    with pytest.raises(ValueError, match="beta"):
        Contraction(rows.w, rows.beta[..., :3])
    with pytest.raises(TypeError, match="bfloat16"):
        Contraction(rows.w.bfloat16(), rows.beta.float())
    with pytest.raises(ValueError, match="same tokens"):
        ContractionTrail.of(Contraction(rows.w, rows.beta), rows.keys[..., :3, :])


def test_keys_keep_their_precision_over_16384_steps() -> None:
    """Reflections leave no error to die away. Keys that are rewritten with every token, in the
    type of the cache, end as noise; those that are moved once keep what one rounding left them."""
    length, dim, count = 16384, 64, 16
    w = torch.nn.functional.normalize(torch.randn(1, 1, length, dim), dim=-1)
    keys = torch.randn(1, 1, length, dim)
    exact, rewritten = keys[0, 0, :count].double(), keys[0, 0, :count].bfloat16()
    for wide, narrow in zip(w[0, 0, count:].double(), w[0, 0, count:].bfloat16(), strict=True):
        exact.addr_(exact @ wide, wide, alpha=-2.0)
        rewritten.addr_(rewritten @ narrow, narrow, alpha=-2.0)
    beta = torch.full((1, 1, length), 2.0)
    beta[..., :count] = 0.0  # the loops start after all of these keys

    def error(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    def held(kind: torch.dtype) -> Tensor:
        trail = ContractionTrail.of(Contraction(w, beta), keys.to(kind)).last()
        moved = trail.keys[0, 0, :count].float() @ trail.reach(trail.closed)[0, 0, :, 0].mT
        return moved @ trail.open.product[0, 0].mT

    assert error(held(torch.float32)) < 2e-5
    assert error(held(torch.bfloat16)) < 5e-3
    assert error(rewritten) > 0.1
