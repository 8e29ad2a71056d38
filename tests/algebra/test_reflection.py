"""Householder frames: values, gradients and laws against products of step matrices."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from farfield.algebra import reference, wy
from farfield.algebra.reflection import ReflectionFrame, folded

ACTS = ["pull", "push"]
CLOSE: Any = {"rtol": 0.0, "atol": 1e-11}
ONE = torch.eye(6, dtype=torch.float64)


@pytest.fixture(autouse=True, params=[4, 64], ids=["chunks of 4", "chunks of 64"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Short sequences in many chunks, groups and blocks as well as in one."""
    if request.param == 4:
        monkeypatch.setattr(wy, "CHUNK", 4)
        monkeypatch.setattr(wy, "_GROUP", 3)
        monkeypatch.setattr(wy, "_BLOCK_ELEMENTS", 1)
    return request.param


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(seed: int, *shape: int) -> Tensor:
    return torch.linalg.qr(drawn(seed, *shape))[0]


def by_frames(act: str, base: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: getattr(ReflectionFrame.from_vectors(w, base), act)(x)


def by_reference(act: str, base: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """F_t x_t or F_t^T x_t with F_t the product of step matrices and the base, row by row."""

    def apply(w: Tensor, x: Tensor) -> Tensor:
        start = torch.eye(w.shape[-1], dtype=torch.float64) if base is None else base
        lead = torch.broadcast_shapes(w.shape[:-2], x.shape[:-2], start.shape[:-2])
        rows = zip(
            w.expand(*lead, *w.shape[-2:]).reshape(-1, *w.shape[-2:]),
            x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]),
            start.expand(*lead, -1, -1).reshape(-1, *start.shape[-2:]),
            strict=True,
        )
        out = []
        for vectors, row, first in rows:
            found = reference.frames(reference.reflection_steps(vectors)) @ first
            found = found if act == "push" else found.mT
            out.append(torch.stack([f @ v for f, v in zip(found, row, strict=True)]))
        return torch.stack(out).reshape(*lead, *x.shape[-2:])

    return apply


def gradients(function: Callable[[Tensor, Tensor], Tensor], w: Tensor, x: Tensor) -> list[Tensor]:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    out = function(w, x)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [
        out.detach(),
        *torch.autograd.grad((out * weight).sum(), (w, x), materialize_grads=True),
    ]


def with_padding(seed: int, w: Tensor) -> Tensor:
    return w * (drawn(seed, *w.shape[:-1], 1) > -0.5)


@pytest.mark.parametrize("act", ACTS)
@given(st.integers(0, 2**31), st.integers(1, 19), st.integers(1, 6), st.booleans())
def test_values_and_gradients_equal_the_reference(act: str, seed: int, T: int, d: int, pad: bool):
    w, x = drawn(seed, 1, T, d), drawn(seed + 1, 1, T, d)
    w = with_padding(seed + 2, w) if pad else w
    base = orthogonal(seed + 3, 1, d, d) if seed % 2 else None
    got = gradients(by_frames(act, base), w, x)
    want = gradients(by_reference(act, base), w, x)
    scale = 1.0 / w.norm(dim=-1).clamp_min(1e-3).min()  # a short vector has a large gradient
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11 * float(1 + scale))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    ("w_lead", "x_lead"),
    [((2, 3), (2, 3)), ((1, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (2, 3)), ((2, 3), (1, 1))],
)
def test_broadcasting(act: str, w_lead: tuple[int, int], x_lead: tuple[int, int]) -> None:
    w, x = drawn(1, *w_lead, 9, 3), drawn(2, *x_lead, 9, 3)
    got, want = gradients(by_frames(act), w, x), gradients(by_reference(act), w, x)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("act", ACTS)
def test_grouped_query_heads_share_a_frame_and_add_up_its_gradient(act: str) -> None:
    w, q = drawn(3, 2, 3, 9, 4), drawn(4, 2, 3, 2, 9, 4)
    act_grouped = lambda w, x: getattr(ReflectionFrame.from_vectors(w).grouped(), act)(x)  # noqa: E731
    got = gradients(act_grouped, w, q)
    want = gradients(lambda w, x: by_reference(act)(w.unsqueeze(2), x), w, q)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("length", [0, 1, 6])
def test_gradcheck(length: int) -> None:
    w, x = drawn(5, 1, 2, length, 3).requires_grad_(), drawn(6, 2, 2, length, 3).requires_grad_()
    for act in ACTS:
        assert torch.autograd.gradcheck(by_frames(act, orthogonal(7, 2, 2, 3, 3)), (w, x))


def test_everything_at_once_as_a_layer_does_it() -> None:
    """Queries, keys and values pulled, the output pushed: one frame, one gradient."""

    def layer(pull: Callable, push: Callable) -> Callable[[Tensor, Tensor], Tensor]:
        def run(w: Tensor, x: Tensor) -> Tensor:
            scores = (pull(w, x) @ pull(w, 2 * x.flip(-1)).mT).tril()
            return push(w, scores @ pull(w, x.square()))

        return run

    w, x = drawn(8, 1, 2, 9, 4), drawn(9, 1, 2, 9, 4) * 0.3
    got = gradients(layer(by_frames("pull"), by_frames("push")), w, x)
    want = gradients(layer(by_reference("pull"), by_reference("push")), w, x)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_transports_are_orthogonal_and_compose() -> None:
    w = with_padding(10, drawn(11, 2, 13, 6))
    frame = ReflectionFrame.from_vectors(w, orthogonal(12, 2, 6, 6))
    steps = reference.reflection_steps(w)

    def transport(source: int, query: int) -> Tensor:
        one = frame.between(source, query)
        return torch.stack([one.push(row.expand(2, 1, 6)).squeeze(-2) for row in ONE], -1)

    for j, i, k in ((0, 5, 12), (2, 3, 3), (4, 4, 9), (0, 0, 12)):
        p = transport(j, k)
        want = torch.stack([reference.transport(row, j, k) for row in steps])
        torch.testing.assert_close(p, want, **CLOSE)
        torch.testing.assert_close(p, transport(i, k) @ transport(j, i), **CLOSE)
        torch.testing.assert_close(p @ p.mT, ONE.expand(2, 6, 6), **CLOSE)
        q, key = drawn(13, 2, 13, 6), drawn(14, 2, 13, 6)
        score = (frame.pull(q)[:, k] * frame.pull(key)[:, j]).sum(-1)
        carried = (p @ key[:, j, :, None]).squeeze(-1)
        torch.testing.assert_close(score, (q[:, k] * carried).sum(-1), **CLOSE)
    with pytest.raises(ValueError, match="source 3 after query 2"):
        frame.between(3, 2)


def test_push_undoes_pull_and_length_is_kept() -> None:
    w, x = drawn(15, 3, 11, 6), drawn(16, 3, 11, 6)
    frame = ReflectionFrame.from_vectors(w, orthogonal(17, 3, 6, 6))
    assert frame.length == 11
    torch.testing.assert_close(frame.push(frame.pull(x)), x, **CLOSE)
    torch.testing.assert_close(frame.pull(x).norm(dim=-1), x.norm(dim=-1), **CLOSE)


@pytest.mark.parametrize("cuts", [[0, 13], [0, 1, 13], [0, 4, 9, 13], list(range(14)), [0, 0, 13]])
def test_chunks_and_single_tokens_are_the_whole(cuts: list[int]) -> None:
    w, x = with_padding(18, drawn(19, 2, 13, 5)), drawn(20, 2, 13, 5)
    whole = ReflectionFrame.from_vectors(w)
    base, pulled, pushed = None, [], []
    for start, stop in pairwise(cuts):
        frame = ReflectionFrame.from_vectors(w[:, start:stop], base)
        pulled.append(frame.pull(x[:, start:stop]))
        pushed.append(frame.push(x[:, start:stop]))
        base = frame.last
    torch.testing.assert_close(torch.cat(pulled, 1), whole.pull(x), **CLOSE)
    torch.testing.assert_close(torch.cat(pushed, 1), whole.push(x), **CLOSE)
    assert base is not None
    torch.testing.assert_close(base, whole.last, **CLOSE)


def test_the_trail_folds_joins_and_crops_to_the_frame_of_any_token() -> None:
    w = with_padding(21, drawn(22, 2, 3, 13, 5))
    whole = ReflectionFrame.from_vectors(w)
    head = ReflectionFrame.from_vectors(w[..., :6, :])
    tail = ReflectionFrame.from_vectors(w[..., 6:, :], head.last)
    trail = head.trail.joined(tail.trail)
    for kept in range(14):
        want = ReflectionFrame.from_vectors(w[..., :kept, :]).last
        torch.testing.assert_close(whole.trail.cropped(13 - kept).folded, want, **CLOSE)
        torch.testing.assert_close(trail.cropped(13 - kept).folded, want, **CLOSE)
    assert torch.equal(trail.last().folded, trail.folded)


def test_a_base_shared_by_all_rows() -> None:
    w, x, base = drawn(23, 3, 2, 7, 4), drawn(24, 3, 2, 7, 4), orthogonal(25, 1, 2, 4, 4)
    shared = ReflectionFrame.from_vectors(w, base)
    own = ReflectionFrame.from_vectors(w, base.expand(3, -1, -1, -1))
    assert torch.equal(shared.pull(x), own.pull(x))
    assert torch.equal(shared.last, own.last)


def test_no_vector_is_no_step() -> None:
    x = drawn(26, 2, 9, 4)
    still = ReflectionFrame.from_vectors(torch.zeros(2, 9, 4, dtype=torch.float64))
    assert torch.equal(still.pull(x), x)
    assert torch.equal(still.push(x), x)
    w = torch.full((2, 9, 4), 1e-9, dtype=torch.float64).requires_grad_()
    frame = ReflectionFrame.from_vectors(w)
    assert torch.equal(frame.pull(x), x)
    (grad,) = torch.autograd.grad(frame.pull(x).sum(), w)
    assert bool((grad == 0).all())


def test_only_the_direction_of_a_vector_counts() -> None:
    w, x = drawn(27, 2, 9, 4), drawn(28, 2, 9, 4)
    scaled = ReflectionFrame.from_vectors(-w * torch.tensor([1e-4, 1e4]).view(2, 1, 1))
    torch.testing.assert_close(scaled.pull(x), ReflectionFrame.from_vectors(w).pull(x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_vectors_keep_their_type_and_are_moved_wide(dtype: torch.dtype) -> None:
    frame = ReflectionFrame.from_vectors(drawn(29, 2, 9, 6).float())
    assert frame.turned.dtype == torch.float32
    assert frame.last.dtype == torch.float64
    x = drawn(30, 2, 9, 6).to(dtype)
    wide = frame.pull(x.to(torch.promote_types(dtype, torch.float32)))
    assert frame.pull(x).dtype == dtype
    torch.testing.assert_close(frame.pull(x), wide.to(dtype), rtol=0, atol=1e-6)


def test_autocast_changes_nothing() -> None:
    w, x = drawn(31, 2, 9, 6).float(), drawn(32, 2, 9, 6).float()
    plain = gradients(by_frames("pull"), w, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gradients(by_frames("pull"), w, x)
    for mine, theirs in zip(cast, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    w, x = drawn(33, 2, 9, 3), drawn(34, 2, 9, 3)
    for act in ACTS:
        want = gradients(by_frames(act), w, x)
        weight = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape)
        for position in (0, 1):
            inputs = [w.clone(), x.clone()]
            inputs[position].requires_grad_()
            out = (by_frames(act)(*inputs) * weight).sum()
            assert torch.equal(torch.autograd.grad(out, inputs[position])[0], want[1 + position])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_vector_that_is_not_finite_is_noticed_and_kept_to_its_row(bad: float) -> None:
    w, x = drawn(35, 2, 9, 4), drawn(36, 2, 9, 4)
    sound = ReflectionFrame.from_vectors(w).pull(x)
    w[1, 6, 2] = bad
    broken = ReflectionFrame.from_vectors(w)
    assert bool(broken.pull(x)[1, 6:].isnan().all())
    assert bool(broken.last[1].isnan().any())
    torch.testing.assert_close(broken.pull(x)[0], sound[0], **CLOSE)


def test_what_does_not_fit_is_refused() -> None:
    frame = ReflectionFrame.from_vectors(drawn(37, 5, 4))
    for shape in ((5, 3), (4, 4), (1, 4), (5, 8)):
        with pytest.raises(ValueError, match=r"5 tokens, 4 dimensions"):
            frame.pull(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"base has shape \[3, 3\]"):
        ReflectionFrame.from_vectors(drawn(37, 5, 4), torch.eye(3))
    with pytest.raises(TypeError, match="int64"):
        ReflectionFrame.from_vectors(torch.zeros(3, 2, dtype=torch.int64))


def test_folding_a_token_at_a_time_stays_orthogonal() -> None:
    w = torch.nn.functional.normalize(drawn(40, 2000, 1, 6), dim=-1).float()
    base = torch.eye(6, dtype=torch.float64)
    for token in w:
        base = folded(base, token)
    assert (base.mT @ base - ONE).abs().max() < 1e-13
