"""Gradients of frames against the reference loops and against finite differences."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from farfield.algebra import reference
from farfield.algebra.rotation import RotationFrame
from farfield.algebra.turns import to_turns

ACTS = ["pull", "push"]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_frames(act: str, base: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda angle, x: getattr(RotationFrame.from_angles(angle, base), act)(x)


def by_reference(act: str) -> Callable[[Tensor, Tensor], Tensor]:
    """F_t x_t or F_t^T x_t with F_t the product of step matrices, row by row."""

    def apply(angle: Tensor, x: Tensor) -> Tensor:
        leading = torch.broadcast_shapes(angle.shape[:-2], x.shape[:-2])
        angle = angle.expand(*leading, *angle.shape[-2:]).flatten(0, -3)
        rows = x.expand(*leading, *x.shape[-2:]).flatten(0, -3)
        out = []
        for row_angle, row in zip(angle, rows, strict=True):
            found = reference.frames(reference.rotation_steps(row_angle))
            found = found if act == "push" else found.mT
            out.append(torch.stack([f @ v for f, v in zip(found, row, strict=True)]))
        return torch.stack(out).reshape(*leading, *x.shape[-2:])

    return apply


def gradients(function: Callable[[Tensor, Tensor], Tensor], angle: Tensor, x: Tensor) -> list:
    angle, x = angle.clone().requires_grad_(), x.clone().requires_grad_()
    out = function(angle, x)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (angle, x))]


@pytest.mark.parametrize("act", ACTS)
@given(st.integers(0, 2**31), st.integers(1, 7), st.integers(1, 3))
def test_gradients_equal_the_reference(act: str, seed: int, T: int, N: int) -> None:
    angle, x = drawn(seed, 1, T, N), drawn(seed + 1, 1, T, 2 * N)
    got, want = gradients(by_frames(act), angle, x), gradients(by_reference(act), angle, x)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    ("angle_lead", "x_lead"),
    [((2, 3), (2, 3)), ((1, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (2, 3)), ((2, 3), (1, 1))],
)
def test_gradients_with_broadcasting_equal_the_reference(
    act: str, angle_lead: tuple[int, int], x_lead: tuple[int, int]
) -> None:
    angle, x = drawn(1, *angle_lead, 4, 2), drawn(2, *x_lead, 4, 4)
    got, want = gradients(by_frames(act), angle, x), gradients(by_reference(act), angle, x)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("length", [0, 1, 4])
def test_gradcheck(act: str, length: int) -> None:
    angle = drawn(3, 1, 2, length, 2).requires_grad_()
    x = drawn(4, 2, 2, length, 4).requires_grad_()
    base = to_turns(drawn(5, 2, 2, 1, 2))
    assert torch.autograd.gradcheck(by_frames(act), (angle, x))
    assert torch.autograd.gradcheck(by_frames(act, base), (angle, x))


def test_gradcheck_of_phases_and_of_what_is_made_from_them() -> None:
    angle = drawn(6, 2, 5, 3).requires_grad_()
    for part in (torch.cos, torch.sin, torch.square):
        act = lambda a, part=part: part(RotationFrame.from_angles(a).phase)  # noqa: E731
        assert torch.autograd.gradcheck(act, (angle,))
    frame = RotationFrame.from_angles(angle)
    assert torch.equal(frame.cos, frame.phase.detach().cos())
    assert not frame.cos.requires_grad
    assert not frame.sin.requires_grad


@pytest.mark.parametrize("act", ACTS)
def test_only_what_asks_for_a_gradient_gets_one(act: str) -> None:
    angle, x = drawn(7, 2, 4, 3), drawn(8, 2, 4, 6)
    want = gradients(by_frames(act), angle, x)
    weight = torch.linspace(-1, 2, want[0].numel(), dtype=torch.float64).reshape(want[0].shape)
    for position in (0, 1):
        inputs = [angle.clone(), x.clone()]
        inputs[position].requires_grad_()
        out = (by_frames(act)(*inputs) * weight).sum()
        (found,) = torch.autograd.grad(out, inputs[position])
        assert torch.equal(found, want[1 + position])


def test_constant_frames_pass_gradients_to_vectors_alone() -> None:
    frame = RotationFrame.from_turns(to_turns(drawn(9, 4, 3)))
    x = drawn(10, 4, 6).float().requires_grad_()
    weight = drawn(11, 4, 6).float()
    (grad,) = torch.autograd.grad((frame.pull(x) * weight).sum(), x)
    torch.testing.assert_close(grad, frame.push(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ACTS)
def test_narrow_vectors_have_gradients_close_to_float64(act: str, dtype: torch.dtype) -> None:
    angle, x = drawn(12, 2, 3, 9, 4).float(), drawn(13, 2, 3, 9, 8).to(dtype)
    want = gradients(by_frames(act), angle.double(), x.double())
    wide_x = x.clone().requires_grad_()
    wide_angle = angle.clone().requires_grad_()
    out = by_frames(act)(wide_angle, wide_x)
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).to(dtype)
    grad_angle, grad_x = torch.autograd.grad((out * weight).sum(), (wide_angle, wide_x))
    assert grad_angle.dtype == torch.float32
    assert grad_x.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(grad_x.double(), want[2], rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(grad_angle.double(), want[1], rtol=tolerance, atol=10 * tolerance)


def test_long_gradients_are_summed_wide() -> None:
    """d loss / d phi_1 is a sum over 65,536 tokens; a float32 running sum would drift."""
    length = 65_536
    angle = (drawn(14, length, 1) * 1e-3).float().requires_grad_()
    x = torch.ones(length, 2)
    frame = RotationFrame.from_angles(angle)
    (found,) = torch.autograd.grad(frame.pull(x)[:, 0].sum(), angle)
    phase = frame.turns.double() * (2 * torch.pi / 2.0**64)
    per_token = -(phase.sin() + phase.cos())  # d (cos - sin)/d Phi
    exact = per_token.flip(0).cumsum(0).flip(0)
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error.item() < 1e-6


def test_chunked_gradients_reach_the_angles_of_their_own_chunk() -> None:
    """`last` is a constant: a chunk's angles get the gradient of the tokens computed with them."""
    angle, x = drawn(15, 6, 2).requires_grad_(), drawn(16, 6, 4)
    head = RotationFrame.from_angles(angle[:3])
    assert not head.last.requires_grad
    tail = RotationFrame.from_angles(angle[3:], head.last)
    (chunked,) = torch.autograd.grad(tail.pull(x[3:]).sum(), angle)
    whole = RotationFrame.from_angles(angle)
    (full,) = torch.autograd.grad(whole.pull(x)[3:].sum(), angle)
    torch.testing.assert_close(chunked[3:], full[3:])
    assert torch.equal(chunked[:3], torch.zeros(3, 2, dtype=torch.float64))
