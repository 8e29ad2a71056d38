"""The oracle itself, against numbers worked out by hand: an oracle nobody checks is an opinion."""

import math

import pytest
import torch

from farfield.algebra import reference


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_step_by_hand() -> None:
    step = reference.rotation_step(tensor(math.pi / 2, 0.0))
    expected = torch.tensor(
        [[0, 0, 1, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float64
    )
    torch.testing.assert_close(step, expected)


def test_a_transport_leaves_out_its_source_and_includes_its_query() -> None:
    angle = tensor(0.1, 0.2, 0.4)[:, None]
    steps = reference.rotation_steps(angle)
    torch.testing.assert_close(
        reference.transport(steps, 0, 2), reference.rotation_step(tensor(0.6))
    )
    torch.testing.assert_close(
        reference.transport(steps, 1, 2), reference.rotation_step(tensor(0.4))
    )
    assert torch.equal(reference.transport(steps, 2, 2), torch.eye(2, dtype=torch.float64))
    frames = reference.frames(steps)
    torch.testing.assert_close(frames[2], reference.rotation_step(tensor(0.7)))
    torch.testing.assert_close(frames[2] @ frames[0].T, reference.transport(steps, 0, 2))


def test_order_of_steps_matters_for_general_matrices() -> None:
    steps = torch.randn(3, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(reference.transport(steps, 0, 2), steps[2] @ steps[1])
    torch.testing.assert_close(reference.frames(steps)[2], steps[2] @ steps[1] @ steps[0])


def test_a_logit_by_hand() -> None:
    """d = 2, token 1 turned by -pi/2: P takes (1, 0) to (0, -1)."""
    q, k = tensor(5, 6, 0, -3).reshape(1, 1, 2, 2), tensor(1, 0, 7, 8).reshape(1, 1, 2, 2)
    steps = reference.rotation_steps(tensor(0.3, math.pi / 2).reshape(1, 1, 2, 1))
    found = reference.logits(
        q,
        k,
        steps=steps,
        potential=tensor(0.0, 0.5).reshape(1, 1, 2),
        logit_scale=tensor(1.0, 2.0).reshape(1, 1, 2),
    )[0, 0]
    assert found[0, 1] == -math.inf
    assert found[0, 0].item() == pytest.approx(5 / math.sqrt(2))
    assert found[1, 0].item() == pytest.approx(2 * 3 / math.sqrt(2) - 0.5)
    assert found[1, 1].item() == pytest.approx(2 * -24 / math.sqrt(2))


def test_values_left_alone_and_carried_by_hand() -> None:
    """Equal logits: the mean of the values, each as it is or turned along its route."""
    zero, v = torch.zeros(1, 1, 2, 2), tensor(1, 0, 4, 2).reshape(1, 1, 2, 2)
    steps = reference.rotation_steps(tensor(0.3, math.pi / 2).reshape(1, 1, 2, 1))
    alone = reference.attention(zero, zero, v, steps=steps)[0, 0, 1]
    carried = reference.attention(zero, zero, v, steps=steps, carry_values=True)[0, 0, 1]
    torch.testing.assert_close(alone, tensor(2.5, 1.0))
    torch.testing.assert_close(carried, tensor(2.0, 0.5))


def test_without_transport_it_is_scaled_dot_product_attention() -> None:
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.float64) for h in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(reference.attention(q, k, v), expected)


def test_rows_that_see_nothing_are_zero_and_have_finite_gradients() -> None:
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    valid = torch.tensor([[False, False, True]])
    out = reference.attention(q, k, v, valid=valid)
    assert torch.equal(out[0, 0, :2], torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(out[0, 0, 2], v[0, 0, 2])
    out.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_narrow_inputs_are_widened_before_any_product() -> None:
    q, k, v = (torch.randn(1, 1, 4, 2).to(torch.bfloat16) for _ in range(3))
    narrow = reference.attention(q, k, v)
    assert narrow.dtype == torch.float64
    assert torch.equal(narrow, reference.attention(q.double(), k.double(), v.double()))


def test_no_tokens() -> None:
    empty = torch.zeros(1, 2, 0, 4)
    assert reference.attention(empty, empty, empty).shape == (1, 2, 0, 4)
    assert reference.rotation_steps(torch.zeros(2, 0, 3)).shape == (2, 0, 6, 6)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes_by_hand(heads: int, exponents: list[float]) -> None:
    torch.testing.assert_close(reference.alibi_slopes(heads), 2.0 ** -tensor(*exponents))


def test_alibi_slopes_of_40_heads() -> None:
    slopes = reference.alibi_slopes(40)
    torch.testing.assert_close(slopes[:32], 2.0 ** -(torch.arange(1, 33).double() / 4))
    torch.testing.assert_close(slopes[32:], 2.0 ** -((2 * torch.arange(8).double() + 1) / 8))


@pytest.mark.parametrize("heads", [0, -1])
def test_alibi_without_heads_is_refused(heads: int) -> None:
    with pytest.raises(ValueError, match=str(heads)):
        reference.alibi_slopes(heads)


def test_alibi_takes_slope_times_distance_from_a_score() -> None:
    potential = reference.alibi_potential(3, 6)
    found = reference.logits(torch.zeros(1, 3, 6, 2), torch.zeros(1, 1, 6, 2), potential=potential)
    assert found[0, 2, 5, 1].item() == pytest.approx(-0.25 * 4)
    assert found[0, 0, 3, 3].item() == 0.0
