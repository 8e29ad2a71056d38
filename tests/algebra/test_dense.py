"""Frames of orthogonal blocks: values, gradients and laws against products of step matrices."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from scipy.linalg import expm
from torch import Tensor

from farfield.algebra import dense, reference
from farfield.algebra.dense import DenseFrame, exponential
from farfield.algebra.rotation import RotationFrame

ACTS = ["pull", "push"]
CLOSE: Any = {"rtol": 0.0, "atol": 1e-11}


@pytest.fixture(autouse=True, params=["kept", "streamed"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Frames that are kept, in one block, and frames made again in many blocks of short chunks."""
    if request.param == "streamed":
        monkeypatch.setattr(dense, "_CHUNK", 3)
        monkeypatch.setattr(dense, "_BLOCK_ELEMENTS", 100)
        monkeypatch.setattr(dense, "_KEPT_ELEMENTS", 0)
    return request.param


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def generators_of(seed: int, *shape: int) -> Tensor:
    """Skew generators; angles of the order of one."""
    return 0.5 * drawn(seed, *shape)


def base_of(seed: int, *lead: int, blocks: int, size: int) -> Tensor:
    return torch.linalg.qr(drawn(seed, *lead, blocks, size, size))[0].flatten(-3, -2)


def whole_base(base: Tensor) -> Tensor:
    """[N b, b], block above block, as the matrix [N b, N b] it stands for."""
    dim, size = base.shape
    blocks = dim // size
    found = torch.zeros(dim, dim, dtype=torch.float64)
    for n in range(blocks):
        found[n::blocks, n::blocks] = base[n * size : (n + 1) * size]
    return found


Act = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_frames(act: str, base: Tensor | None = None) -> Act:
    return lambda a, g, x: getattr(DenseFrame.from_coefficients(a, g, base), act)(x)


def by_reference(act: str, base: Tensor | None = None) -> Act:
    """F_t x_t or F_t^T x_t with F_t the product of step matrices and the base, row by row."""

    def apply(a: Tensor, g: Tensor, x: Tensor) -> Tensor:
        angle = torch.einsum("...tr,...npr->...tnp", a, g)
        lead = torch.broadcast_shapes(angle.shape[:-3], x.shape[:-2])
        angle = angle.expand(*lead, *angle.shape[-3:]).reshape(-1, *angle.shape[-3:])
        rows = x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        start = None if base is None else base.expand(*lead, -1, -1).reshape(-1, *base.shape[-2:])
        out = []
        for i, row in enumerate(rows):
            found = reference.frames(reference.dense_steps(angle[i]))
            found = found if start is None else found @ whole_base(start[i])
            found = found if act == "push" else found.mT
            out.append(torch.stack([f @ v for f, v in zip(found, row, strict=True)]))
        return torch.stack(out).reshape(*lead, *x.shape[-2:])

    return apply


def gradients(function: Act, *inputs: Tensor) -> list[Tensor]:
    own = [x.clone().requires_grad_() for x in inputs]
    out = function(*own)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), own)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("act", ACTS)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 4), st.integers(1, 3))
def test_values_and_gradients_equal_the_reference(act: str, seed: int, T: int, b: int, N: int):
    a, g = drawn(seed, 1, T, 2), generators_of(seed + 1, N, b * (b - 1) // 2, 2)
    x = drawn(seed + 2, 1, T, N * b)
    base = base_of(seed + 3, 1, blocks=N, size=b) if seed % 2 else None
    got, want = (
        gradients(by_frames(act, base), a, g, x),
        gradients(by_reference(act, base), a, g, x),
    )
    assert_same(got, want)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    ("a_lead", "g_lead", "x_lead"),
    [((2, 1), (3,), (2, 3)), ((1, 1), (3,), (2, 3)), ((2, 3), (), (2, 3)), ((2, 1), (3,), (1, 1))],
)
def test_broadcasting(act: str, a_lead: tuple, g_lead: tuple, x_lead: tuple) -> None:
    a, g, x = drawn(1, *a_lead, 5, 3), generators_of(2, *g_lead, 2, 3, 3), drawn(3, *x_lead, 5, 6)
    assert_same(gradients(by_frames(act), a, g, x), gradients(by_reference(act), a, g, x))


@pytest.mark.parametrize("act", ACTS)
def test_grouped_query_heads_share_a_frame_and_add_up_its_gradient(act: str) -> None:
    a, g, q = drawn(4, 2, 1, 5, 3), generators_of(5, 3, 2, 3, 3), drawn(6, 2, 3, 2, 5, 6)
    grouped = lambda a, g, x: getattr(DenseFrame.from_coefficients(a, g).grouped(), act)(x)  # noqa: E731
    want = gradients(lambda a, g, x: by_reference(act)(a.unsqueeze(2), g.unsqueeze(1), x), a, g, q)
    assert_same(gradients(grouped, a, g, q), want)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_gradcheck(length: int) -> None:
    a, g = drawn(7, length, 2).requires_grad_(), generators_of(8, 1, 3, 2).requires_grad_()
    x = drawn(9, 1, length, 3).requires_grad_()
    for act in ACTS:
        run = by_frames(act, base_of(10, 1, blocks=1, size=3))
        assert torch.autograd.gradcheck(run, (a, g, x))


def test_transports_are_orthogonal_and_compose() -> None:
    a, g = drawn(11, 8, 3), generators_of(12, 2, 3, 3)
    frame = DenseFrame.from_coefficients(a, g, base_of(13, blocks=2, size=3))
    steps = reference.dense_steps(torch.einsum("tr,npr->tnp", a, g))
    one = torch.eye(6, dtype=torch.float64)

    def transport(source: int, query: int) -> Tensor:
        route = frame.between(source, query)
        return torch.stack([route.push(row[None]).squeeze(0) for row in one], -1)

    for j, i, k in ((0, 4, 7), (2, 3, 3), (4, 4, 5), (0, 0, 7)):
        p = transport(j, k)
        torch.testing.assert_close(p, reference.transport(steps, j, k), **CLOSE)
        torch.testing.assert_close(p, transport(i, k) @ transport(j, i), **CLOSE)
        torch.testing.assert_close(p @ p.mT, one, **CLOSE)
        q, key = drawn(14, 8, 6), drawn(15, 8, 6)
        score = frame.pull(q)[k] @ frame.pull(key)[j]
        torch.testing.assert_close(score, q[k] @ p @ key[j], **CLOSE)
    with pytest.raises(ValueError, match="source 3 after query 2"):
        frame.between(3, 2)


@pytest.mark.parametrize("cuts", [[0, 8], [0, 1, 8], [0, 3, 5, 8], list(range(9)), [0, 0, 8]])
def test_chunks_and_single_tokens_are_the_whole(cuts: list[int]) -> None:
    a, g, x = drawn(16, 2, 1, 8, 3), generators_of(17, 3, 2, 3, 3), drawn(18, 2, 3, 8, 6)
    whole = DenseFrame.from_coefficients(a, g)
    base, parts = None, []
    for start, stop in pairwise(cuts):
        frame = DenseFrame.from_coefficients(a[..., start:stop, :], g, base)
        part = x[..., start:stop, :]
        parts.append(torch.stack((frame.pull(part), frame.push(part))))
        base = frame.last
    want = torch.stack((whole.pull(x), whole.push(x)))
    torch.testing.assert_close(torch.cat(parts, -2), want, **CLOSE)
    assert base is not None
    torch.testing.assert_close(base, whole.last, **CLOSE)


def test_the_trail_folds_joins_and_crops_to_the_frame_of_any_token() -> None:
    a, g = drawn(19, 2, 1, 7, 3), generators_of(20, 3, 2, 3, 3)
    whole = DenseFrame.from_coefficients(a, g)
    head = DenseFrame.from_coefficients(a[..., :4, :], g)
    tail = DenseFrame.from_coefficients(a[..., 4:, :], g, head.last)
    trail = head.trail.joined(tail.trail)
    for kept in range(8):
        want = DenseFrame.from_coefficients(a[..., :kept, :], g).last
        torch.testing.assert_close(whole.trail.cropped(7 - kept).folded, want, **CLOSE)
        torch.testing.assert_close(trail.cropped(7 - kept).folded, want, **CLOSE)


def test_blocks_of_two_are_rotations() -> None:
    angle, x = drawn(21, 2, 9, 3), drawn(22, 2, 9, 6)
    turned = RotationFrame.from_angles(angle)
    frame = DenseFrame.from_coefficients(angle, torch.eye(3, dtype=torch.float64).unsqueeze(1))
    torch.testing.assert_close(frame.pull(x), turned.pull(x), **CLOSE)
    torch.testing.assert_close(frame.push(x), turned.push(x), **CLOSE)


def test_no_coefficient_is_no_step_and_half_turns_are_reached() -> None:
    g, x = torch.eye(3, dtype=torch.float64).reshape(1, 3, 3), drawn(23, 4, 3)
    still = DenseFrame.from_coefficients(torch.zeros(4, 3, dtype=torch.float64), g)
    assert torch.equal(still.pull(x), x)
    half = torch.tensor([[torch.pi, 0.0, 0.0]], dtype=torch.float64)
    flipped = DenseFrame.from_coefficients(half, g).push(x[:1])
    signs = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(flipped, x[:1] * signs, **CLOSE)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 4e-7), (torch.float64, 1e-15)])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 0.3, 2.0, 50.0])
def test_the_exponential(dtype: torch.dtype, error: float, scale: float) -> None:
    """Its error is in proportion to the angle (and to 1 for the rounding of the result)."""
    s = scale * drawn(24, 40, 6, 6).to(dtype) / 6
    s = s - s.mT
    found = exponential(s).double()
    want = torch.stack([torch.from_numpy(expm(one.double().numpy())) for one in s])
    angle = torch.linalg.matrix_norm(s.double(), 2).max()
    assert (found - want).abs().max() < error * (1.0 + 4.0 * angle)
    one = torch.eye(6, dtype=torch.float64)
    assert (found @ found.mT - one).abs().max() < 2 * error * (1.0 + 4.0 * angle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_vectors_keep_their_type_and_are_moved_wide(dtype: torch.dtype) -> None:
    frame = DenseFrame.from_coefficients(
        drawn(25, 5, 3).float(), generators_of(26, 2, 3, 3).float()
    )
    assert frame.last.dtype == torch.float64
    x = drawn(27, 5, 6).to(dtype)
    wide = frame.pull(x.to(torch.promote_types(dtype, torch.float32)))
    assert frame.pull(x).dtype == dtype
    torch.testing.assert_close(frame.pull(x), wide.to(dtype), rtol=0, atol=1e-6)


def test_autocast_changes_nothing() -> None:
    inputs = [x.float() for x in (drawn(28, 5, 3), generators_of(29, 2, 3, 3), drawn(30, 5, 6))]
    plain = gradients(by_frames("pull"), *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gradients(by_frames("pull"), *inputs)
    for mine, theirs in zip(cast, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    inputs = [drawn(31, 5, 3), generators_of(32, 2, 3, 3), drawn(33, 5, 6)]
    want = gradients(by_frames("pull"), *inputs)
    weight = torch.linspace(-1, 2, 30, dtype=torch.float64).reshape(5, 6)
    for position in range(3):
        own = [x.clone() for x in inputs]
        own[position].requires_grad_()
        out = (by_frames("pull")(*own) * weight).sum()
        assert torch.equal(torch.autograd.grad(out, own[position])[0], want[1 + position])


def test_frames_are_kept_only_where_they_are_few(memory: str) -> None:
    frame = DenseFrame.from_coefficients(drawn(34, 11, 3), generators_of(35, 2, 3, 3))
    held = sum(part.numel() for pair in frame.kept for part in pair)
    assert (held > 0) == (memory == "kept")
    assert sum(begin.numel() for begin in frame.begins) <= 18 * 4


def test_a_coefficient_that_is_not_finite_is_noticed() -> None:
    a, g, x = drawn(36, 2, 9, 3), generators_of(37, 2, 3, 3), drawn(38, 2, 9, 6)
    sound = DenseFrame.from_coefficients(a, g).pull(x)
    a[1, 6, 0] = torch.nan
    broken = DenseFrame.from_coefficients(a, g).pull(x)
    assert bool(broken[1, 6:].isnan().all())
    torch.testing.assert_close(broken[0], sound[0], **CLOSE)


def test_what_does_not_fit_is_refused() -> None:
    a, g = drawn(39, 5, 3), generators_of(40, 2, 3, 3)
    frame = DenseFrame.from_coefficients(a, g)
    for shape in ((5, 3), (4, 6), (1, 6), (5, 12)):
        with pytest.raises(ValueError, match=r"5 tokens, 6 dimensions"):
            frame.pull(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"base has shape \[3, 3\]; expected \[..., 6, 3\]"):
        DenseFrame.from_coefficients(a, g, torch.eye(3))
    with pytest.raises(ValueError, match=r"4 pairs; expected b\(b-1\)/2"):
        DenseFrame.from_coefficients(a, generators_of(41, 2, 4, 3))
    with pytest.raises(ValueError, match=r"coefficient has 3 entries.*take 2"):
        DenseFrame.from_coefficients(a, generators_of(42, 2, 3, 2))
    with pytest.raises(TypeError, match=r"coefficient is torch\.int64"):
        DenseFrame.from_coefficients(torch.zeros(3, 2, dtype=torch.int64), g)
