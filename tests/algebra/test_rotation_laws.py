"""Laws of SO(2) frames: composition, orthogonality, relativity, and chunks that equal the whole."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from farfield.algebra import reference
from farfield.algebra.rotation import RotationFrame, mixing_scales, rotary_frequencies
from farfield.algebra.turns import to_turns

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float64])


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def matrix(frame: RotationFrame) -> Tensor:
    """The matrix that `push` of a one-token frame applies. Shapes: -> [d, d]."""
    identity = torch.eye(2 * frame.cos.shape[-1], dtype=torch.float64)
    return frame.push(identity[:, None, :])[:, 0].T


def test_step_turns_the_pair_of_halves_by_minus_the_angle() -> None:
    """Convention: d = 4, so plane 0 is (x_0, x_2) and plane 1 is (x_1, x_3)."""
    frame = RotationFrame.from_angles(torch.tensor([[math.pi / 2, 0.0]], dtype=torch.float64))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    pushed = torch.tensor([[3.0, 2.0, -1.0, 4.0]], dtype=torch.float64)
    pulled = torch.tensor([[-3.0, 2.0, 1.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(frame.push(x), pushed)
    torch.testing.assert_close(frame.pull(x), pulled)


@given(seeds, st.integers(1, 9), st.integers(1, 4))
def test_push_is_the_reference_frame_and_pull_its_transpose(seed: int, T: int, N: int) -> None:
    angle, x = drawn(seed, T, N), drawn(seed + 1, T, 2 * N)
    frame = RotationFrame.from_angles(angle)
    expected = reference.frames(reference.rotation_steps(angle))
    torch.testing.assert_close(frame.push(x), torch.einsum("tde,te->td", expected, x))
    torch.testing.assert_close(frame.pull(x), torch.einsum("tde,td->te", expected, x))


@given(seeds, st.integers(1, 9), st.integers(1, 4), st.data())
def test_transport_is_the_product_of_its_steps(
    seed: int, T: int, N: int, data: st.DataObject
) -> None:
    angle = drawn(seed, T, N)
    j = data.draw(st.integers(0, T - 1))
    i = data.draw(st.integers(j, T - 1))
    frame = RotationFrame.from_angles(angle)
    expected = reference.transport(reference.rotation_steps(angle), j, i)
    torch.testing.assert_close(matrix(frame.between(j, i)), expected)
    assert frame.between(j, i).length == 1


@given(seeds, st.integers(1, 12), st.integers(1, 4), st.data())
def test_transport_composes_exactly(seed: int, T: int, N: int, data: st.DataObject) -> None:
    """P_{j->i} = P_{l->i} P_{j->l}: to the bit in turns, to rounding in matrices."""
    j, mid, i = sorted(data.draw(st.integers(0, T - 1)) for _ in range(3))
    frame = RotationFrame.from_angles(drawn(seed, T, N))
    whole, first, second = frame.between(j, i), frame.between(j, mid), frame.between(mid, i)
    assert torch.equal(whole.turns, first.turns + second.turns)
    torch.testing.assert_close(matrix(whole), matrix(second) @ matrix(first))


@given(seeds, st.integers(1, 8), st.integers(1, 4))
def test_transport_is_orthogonal_and_the_empty_route_is_the_identity(
    seed: int, T: int, N: int
) -> None:
    frame = RotationFrame.from_angles(drawn(seed, T, N))
    identity = torch.eye(2 * N, dtype=torch.float64)
    route = matrix(frame.between(0, T - 1))
    torch.testing.assert_close(route @ route.T, identity)
    torch.testing.assert_close(torch.linalg.det(route), torch.ones((), dtype=torch.float64))
    assert torch.equal(matrix(frame.between(T - 1, T - 1)), identity)
    x = drawn(seed + 1, T, 2 * N)
    torch.testing.assert_close(frame.pull(x).norm(dim=-1), x.norm(dim=-1))


@given(seeds, st.integers(1, 8), st.integers(1, 4))
def test_between_pulls_with_the_transpose(seed: int, T: int, N: int) -> None:
    route = RotationFrame.from_angles(drawn(seed, T, N)).between(0, T - 1)
    x = drawn(seed + 1, 1, 2 * N)
    torch.testing.assert_close(route.pull(x)[0], matrix(route).T @ x[0])


@given(seeds, st.integers(1, 8), st.integers(1, 4))
def test_scores_are_relative(seed: int, T: int, N: int) -> None:
    """A base turn common to all tokens changes no score; scores are q_i^T P_{j->i} k_j."""
    angle = drawn(seed, T, N)
    q, k = drawn(seed + 1, T, 2 * N), drawn(seed + 2, T, 2 * N)
    base = to_turns(10 * drawn(seed + 3, 1, N))
    scores = []
    for frame in (RotationFrame.from_angles(angle), RotationFrame.from_angles(angle, base)):
        scores.append(frame.pull(q) @ frame.pull(k).T)
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-12)
    steps = reference.rotation_steps(angle)
    for i in range(T):
        expected = q[i] @ reference.transport(steps, 0, i) @ k[0]
        torch.testing.assert_close(scores[0][i, 0], expected)


@given(seeds, st.integers(1, 6), st.integers(1, 4), dtypes)
def test_push_undoes_pull(seed: int, T: int, N: int, dtype: torch.dtype) -> None:
    frame = RotationFrame.from_angles(drawn(seed, 2, T, N, dtype=dtype))
    v = drawn(seed + 1, 2, T, 2 * N, dtype=dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(frame.push(frame.pull(v)), v, rtol=0, atol=30 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 7, 33, 70])
def test_whole_equals_chunks_at_every_split(length: int, dtype: torch.dtype) -> None:
    angle, x = drawn(3, 2, 3, length, 5, dtype=dtype), drawn(4, 2, 3, length, 10, dtype=dtype)
    whole = RotationFrame.from_angles(angle)
    assert whole.length == length
    for split in range(1, length):
        head = RotationFrame.from_angles(angle[..., :split, :])
        tail = RotationFrame.from_angles(angle[..., split:, :], head.last)
        for name in ("turns", "cos", "sin"):
            joined = torch.cat([getattr(head, name), getattr(tail, name)], dim=-2)
            assert torch.equal(joined, getattr(whole, name)), f"{name} at split {split}"
        for act in ("pull", "push"):
            parts = [getattr(head, act)(x[..., :split, :]), getattr(tail, act)(x[..., split:, :])]
            assert torch.equal(torch.cat(parts, -2), getattr(whole, act)(x)), f"{act} at {split}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_whole_equals_one_token_at_a_time(dtype: torch.dtype) -> None:
    length = 41
    angle, x = drawn(5, 2, 2, length, 3).float(), drawn(6, 2, 2, length, 6).to(dtype)
    whole = RotationFrame.from_angles(angle)
    base, pulled = None, []
    for t in range(length):
        one = RotationFrame.from_angles(angle[..., t : t + 1, :], base)
        pulled.append(one.pull(x[..., t : t + 1, :]))
        base = one.last
    assert torch.equal(torch.cat(pulled, -2), whole.pull(x))
    assert base is not None
    assert torch.equal(base, whole.last)


@given(seeds, st.integers(2, 30), st.data())
def test_rollback_by_subtraction_is_exact(seed: int, T: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, T - 1))
    angle = drawn(seed, T, 4, dtype=torch.float32)
    whole, shorter = RotationFrame.from_angles(angle), RotationFrame.from_angles(angle[:kept])
    dropped = to_turns(angle[kept:]).sum(-2, keepdim=True)
    assert torch.equal(whole.last - dropped, shorter.last)
    redone = RotationFrame.from_angles(angle[kept:], whole.last - dropped)
    assert torch.equal(redone.turns, whole.turns[kept:])


def test_from_turns_rebuilds_a_frame_without_gradient() -> None:
    angle = drawn(7, 2, 5, 3, dtype=torch.float32).requires_grad_()
    frame = RotationFrame.from_angles(angle)
    again = RotationFrame.from_turns(frame.turns)
    assert torch.equal(again.turns, frame.turns)
    assert torch.equal(again.cos, frame.cos)
    assert torch.equal(again.sin, frame.sin)
    assert not again.cos.requires_grad
    assert not again.sin.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pulled_tensors_keep_their_type_and_are_computed_wide(dtype: torch.dtype) -> None:
    frame = RotationFrame.from_angles(drawn(8, 2, 1, 6, 4, dtype=torch.float32))
    assert frame.cos.dtype == torch.float32
    assert frame.turns.dtype == torch.int64
    x = drawn(9, 2, 3, 6, 8).to(dtype)
    wide = frame.pull(x.to(torch.promote_types(dtype, torch.float32)))
    assert frame.pull(x).dtype == dtype
    assert torch.equal(frame.pull(x), wide.to(dtype))
    assert frame.push(x).dtype == dtype


def test_float64_angles_give_float64_frames() -> None:
    frame = RotationFrame.from_angles(drawn(10, 4, 2))
    assert frame.cos.dtype == torch.float64
    assert frame.sin.dtype == torch.float64


def test_frames_broadcast_over_batch_and_heads() -> None:
    angle, x = drawn(11, 1, 3, 5, 2), drawn(12, 4, 3, 5, 4)
    shared = RotationFrame.from_angles(angle)
    own = RotationFrame.from_angles(angle.expand(4, 3, 5, 2))
    assert torch.equal(shared.pull(x), own.pull(x))
    assert torch.equal(shared.push(x), own.push(x))


def test_no_tokens_and_one_token() -> None:
    none = RotationFrame.from_angles(torch.zeros(2, 3, 0, 4))
    assert none.length == 0
    assert none.pull(torch.zeros(2, 3, 0, 8)).shape == (2, 3, 0, 8)
    one = RotationFrame.from_angles(drawn(13, 1, 4))
    assert one.length == 1
    assert torch.equal(one.last, one.turns)


def test_the_last_frame_of_no_tokens_is_the_base_or_refused() -> None:
    """An empty chunk must not hand on an empty base, which would broadcast tokens away."""
    base = to_turns(drawn(14, 2, 1, 4))
    try:
        last = RotationFrame.from_angles(torch.zeros(2, 0, 4), base).last
    except ValueError:
        return
    assert torch.equal(last, base)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_angles_without_a_direction_are_never_taken_for_one(bad: float) -> None:
    """They pass on as not-a-number; a finite frame would hide a diverged model."""
    angle = torch.zeros(4, 2)
    angle[2, 1] = bad
    frame = RotationFrame.from_angles(angle)
    assert bool(frame.cos[2:, 1].isnan().all())
    assert bool(frame.sin[2:, 1].isnan().all())


def test_a_diverged_row_leaves_the_other_rows_alone() -> None:
    angle = drawn(17, 2, 3, 4, 2, dtype=torch.float32)
    sound = RotationFrame.from_angles(angle)
    angle[1, 2, 3, 0] = math.nan
    broken = RotationFrame.from_angles(angle)
    assert torch.equal(broken.cos[0], sound.cos[0])
    assert torch.equal(broken.sin[0], sound.sin[0])
    assert torch.equal(broken.cos[1, :2], sound.cos[1, :2])


def test_large_finite_angles_have_frames() -> None:
    frame = RotationFrame.from_angles(torch.full((3, 2), 2e38))
    assert bool(frame.cos.isfinite().all() & frame.sin.isfinite().all())


@pytest.mark.parametrize("shape", [(5, 3), (5, 6), (5, 10), (1, 8), (4, 8)])
def test_vectors_that_do_not_fit_the_frame_are_refused(shape: tuple[int, int]) -> None:
    """Frames here are 5 tokens of 4 planes (d = 8); nothing may broadcast tokens or planes."""
    frame = RotationFrame.from_angles(drawn(15, 5, 4))
    with pytest.raises(ValueError, match=r"8|5"):
        frame.pull(torch.zeros(shape))


def test_vectors_of_more_planes_than_a_single_one_are_refused() -> None:
    frame = RotationFrame.from_angles(drawn(16, 5, 1))
    with pytest.raises(ValueError, match="2"):
        frame.push(torch.zeros(5, 6))


def test_one_axis_more_for_grouped_query_heads() -> None:
    """Query heads h of group g = h // R, laid out [B, G, R, T, d], share their group's frame."""
    frame = RotationFrame.from_angles(drawn(18, 2, 3, 5, 2))
    q = drawn(19, 2, 3, 4, 5, 4)
    pulled = frame.grouped().pull(q)
    for r in range(4):
        assert torch.equal(pulled[:, :, r], frame.pull(q[:, :, r]))


def test_every_row_of_the_trail_is_a_base() -> None:
    angle = drawn(20, 2, 6, 3)
    whole = RotationFrame.from_angles(angle)
    for t in range(5):
        rest = RotationFrame.from_angles(angle[:, t + 1 :], whole.trail.rows[:, t : t + 1])
        assert torch.equal(rest.turns, whole.turns[:, t + 1 :])


@pytest.mark.parametrize("head_dim", [1, 3, 63, 0, -2])
def test_odd_and_empty_heads_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"{head_dim}.*even"):
        rotary_frequencies(head_dim)
    with pytest.raises(ValueError, match=f"{head_dim}.*even"):
        mixing_scales(head_dim, 128)


def test_integer_angles_are_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="int64"):
        RotationFrame.from_angles(torch.zeros(3, 2, dtype=torch.int64))


@given(st.integers(2, 64), st.integers(5, 100_000), st.sampled_from([0.1, 0.2, 0.3]))
def test_mixing_scales(planes: int, window: int, epsilon: float) -> None:
    """Largest 1; the smallest has w(epsilon) = ceil(ln(1/epsilon) / ln(1/rho)) = the window."""
    scales = mixing_scales(2 * planes, window, epsilon)
    assert scales.shape == (planes,)
    assert scales.dtype == torch.float64
    assert scales[0].item() == pytest.approx(1.0, abs=1e-15)
    assert scales.argmin().item() == planes - 1
    log_rho = -(scales[-1].item() ** 2) / 2  # rho = E cos(step) of a step N(0, scale^2)
    assert math.ceil(math.log(1 / epsilon) / -log_rho * (1 - 1e-12)) == window
    ratios = scales[1:] / scales[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))


@pytest.mark.parametrize("window", [1, 4, 0, -3, math.nan])
def test_windows_shorter_than_the_fastest_step_needs_are_refused(window: float) -> None:
    with pytest.raises(ValueError, match="mixing_window"):
        mixing_scales(8, window)
