"""Attention by pull, ordinary softmax and push equals the loops over routes, gradients included."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from farfield.algebra import reference
from farfield.algebra.rotation import RotationFrame


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_frames(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angle: Tensor,
    *,
    carry_values: bool,
    potential: Tensor | None = None,
    logit_scale: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Pull q, k (and v), softmax, push: every row must see a key."""
    heads, length, dim = q.shape[1:]
    repeat = heads // k.shape[1]
    keys = RotationFrame.from_angles(angle)
    queries = RotationFrame.from_angles(angle.repeat_interleave(repeat, dim=1))
    score = queries.pull(q) @ keys.pull(k).repeat_interleave(repeat, 1).mT / math.sqrt(dim)
    if logit_scale is not None:
        score = score * logit_scale[..., None]
    if potential is not None:
        score = score + potential[..., None, :] - potential[..., :, None]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = seen if valid is None else seen & valid[:, None, None, :]
    alpha = score.masked_fill(~seen, -math.inf).softmax(-1)
    carried = (keys.pull(v) if carry_values else v).repeat_interleave(repeat, 1)
    return queries.push(alpha @ carried) if carry_values else alpha @ carried


def compare(inputs: list[Tensor], carry_values: bool, **controls: Tensor) -> None:
    """Outputs and gradients of q, k, v and angles by both ways, to 1e-10."""
    found = []
    for way in ("frames", "reference"):
        q, k, v, angle = (x.clone().requires_grad_() for x in inputs)
        if way == "frames":
            out = by_frames(q, k, v, angle, carry_values=carry_values, **controls)
        else:
            steps = reference.rotation_steps(angle)
            out = reference.attention(q, k, v, steps=steps, carry_values=carry_values, **controls)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
        loss = (out * weight).sum()
        # One token alone has no route: its angle's gradient is zero, by frames as well.
        grads = torch.autograd.grad(loss, (q, k, v, angle), materialize_grads=True)
        found.append([out.detach(), *grads])
    for by_frame, by_loop in zip(*found, strict=True):
        torch.testing.assert_close(by_frame, by_loop, rtol=0, atol=1e-10)


@pytest.mark.parametrize("carry_values", [False, True])
@settings(max_examples=6)
@given(
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
)
def test_frames_equal_routes(
    carry_values: bool, seed: int, T: int, N: int, heads: tuple[int, int]
) -> None:
    H, G = heads
    d = 2 * N
    inputs = [drawn(seed, 2, H, T, d), drawn(seed + 1, 2, G, T, d), drawn(seed + 2, 2, G, T, d)]
    compare([*inputs, drawn(seed + 3, 2, G, T, N)], carry_values)


@pytest.mark.parametrize("carry_values", [False, True])
def test_frames_equal_routes_with_every_control(carry_values: bool) -> None:
    B, H, G, T, d = 2, 3, 1, 5, 4
    inputs = [drawn(1, B, H, T, d), drawn(2, B, G, T, d), drawn(3, B, G, T, d)]
    compare(
        [*inputs, drawn(4, B, G, T, d // 2)],
        carry_values,
        potential=reference.alibi_potential(H, T),
        logit_scale=1 + 0.1 * drawn(5, B, H, T),
        valid=torch.tensor([[True, True, False, True, True], [True, False, True, True, False]]),
    )


@pytest.mark.parametrize("carry_values", [False, True])
def test_one_visible_key_returns_its_value(carry_values: bool) -> None:
    """The first token sees itself alone: P_{i->i} = I, so its value comes back unturned."""
    q, k, v = drawn(6, 1, 1, 4, 6), drawn(7, 1, 1, 4, 6), drawn(8, 1, 1, 4, 6)
    angle = drawn(9, 1, 1, 4, 3)
    out = by_frames(q, k, v, angle, carry_values=carry_values)
    torch.testing.assert_close(out[..., 0, :], v[..., 0, :], rtol=0, atol=1e-14)


def test_one_distant_key_returns_its_value_carried() -> None:
    """Only key 0 is valid: row i is P_{0->i} v_0."""
    T = 5
    q, k, v = (drawn(seed, 1, 1, T, 4) for seed in (1, 2, 3))
    angle = drawn(4, T, 2)
    valid = torch.zeros(1, T, dtype=torch.bool)
    valid[0, 0] = True
    out = by_frames(q, k, v, angle[None, None], carry_values=True, valid=valid)
    steps = reference.rotation_steps(angle)
    for i in range(T):
        expected = reference.transport(steps, 0, i) @ v[0, 0, 0]
        torch.testing.assert_close(out[0, 0, i], expected)
