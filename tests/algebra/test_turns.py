"""Fixed-point turns: what is summed exactly, how little the one rounding loses, how it wraps."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from torch import Tensor

from farfield.algebra.turns import accumulate, to_radians, to_turns

MILLION = 1_048_576
HALF_TURN = -(2**63)
int64s = st.integers(-(2**63), 2**63 - 1)


def wrapped(units: int) -> int:
    """The int64 with the same low 64 bits."""
    return (units + 2**63) % 2**64 - 2**63


def circle_error(turns: Tensor, exact: list[mpmath.mpf]) -> float:
    """Largest distance on the circle between accumulated turns and exact angles, in radians."""
    worst = 0.0
    with mpmath.workdps(60):
        for got, want in zip(to_radians(turns).tolist(), exact, strict=True):
            apart = (mpmath.mpf(got) - want) / (2 * mpmath.pi)
            worst = max(worst, abs(float((apart - mpmath.nint(apart)) * 2 * mpmath.pi)))
    return worst


def exact_sums(angle: Tensor, positions: list[int]) -> list[mpmath.mpf]:
    """phi_1 + ... + phi_t at the given 1-based positions, in exact rational arithmetic."""
    sums, total, wanted = {}, 0, set(positions)
    for position, value in enumerate(angle.tolist(), start=1):
        scaled = math.ldexp(value, 80)
        assert scaled.is_integer(), "the scale below loses bits of this angle"
        total += int(scaled)
        if position in wanted:
            sums[position] = total
    with mpmath.workdps(60):
        return [mpmath.mpf(sums[position]) / 2**80 for position in positions]


@pytest.mark.parametrize(
    ("angle", "units"),
    [
        (0.0, 0),
        (math.pi / 2, 2**62),
        (-math.pi / 2, -(2**62)),
        (math.pi, HALF_TURN),
        (-math.pi, HALF_TURN),
        (2 * math.pi, 0),
        (-4 * math.pi, 0),
        (5 * math.pi / 2, 2**62),
    ],
)
def test_known_angles(angle: float, units: int) -> None:
    turns = to_turns(torch.tensor([angle], dtype=torch.float64))
    assert turns.dtype == torch.int64
    # One float64 rounding of a turn count near 1 is 2^-53 turn, that is 2^11 units.
    assert abs(wrapped(int(turns) - units)) <= 2**11


@given(st.floats(-3.0, 3.0), st.sampled_from([torch.float32, torch.float64]))
def test_one_angle_is_nearest_to_float64_rounding(value: float, dtype: torch.dtype) -> None:
    angle = torch.tensor([value], dtype=dtype)
    with mpmath.workdps(60):
        exact = mpmath.mpf(angle.double().item())
    assert circle_error(to_turns(angle), [exact]) <= 1e-15


@given(st.floats(-1e6, 1e6))
def test_many_turns_are_reduced(value: float) -> None:
    angle = torch.tensor([value], dtype=torch.float64)
    with mpmath.workdps(60):
        exact = mpmath.mpf(value)
    assert circle_error(to_turns(angle), [exact]) <= 1e-15 + abs(value) * 2.0**-51


@pytest.mark.parametrize("value", [1e12, 3.7e15, 1e18, 2.5e19, 1e30, 1e100, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_finite_angles_keep_their_sign_and_never_saturate(
    value: float, dtype: torch.dtype
) -> None:
    value = min(value, 3e38) if dtype == torch.float32 else value
    plus = to_turns(torch.tensor([value], dtype=dtype))
    minus = to_turns(torch.tensor([-value], dtype=dtype))
    assert wrapped(int(plus) + int(minus)) == 0
    assert plus.item() not in (2**63 - 1, HALF_TURN)
    if value <= 3.7e15:  # below 2^53 the angle still names a direction
        with mpmath.workdps(60):
            exact = mpmath.mpf(torch.tensor(value, dtype=dtype).item())
        assert circle_error(plus, [exact]) <= value * 2.0**-51


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_million_random_steps_stay_exact(dtype: torch.dtype) -> None:
    angle = torch.randn(MILLION, generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = [1, 2, 65_535, 524_288, MILLION]
    turns = accumulate(to_turns(angle)[:, None])[:, 0]
    at = turns[[position - 1 for position in positions]]
    assert circle_error(at, exact_sums(angle, positions)) <= 1e-8


@pytest.mark.parametrize("step", [1.0, -1.0, 0.1, 3.1, -2.9, 1e-4, 2.0**-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_million_equal_steps_stay_exact(step: float, dtype: torch.dtype) -> None:
    """Equal steps are the worst case: their rounding errors all have one sign."""
    angle = torch.tensor(step, dtype=dtype)
    turns = accumulate(to_turns(angle).expand(MILLION, 1))
    with mpmath.workdps(60):
        exact = [mpmath.mpf(angle.item()) * MILLION]
    assert circle_error(turns[-1], exact) <= 1e-8


def test_float32_sums_would_not_do() -> None:
    """The reason for turns: the bound above is out of reach of a float32 sum."""
    angle = torch.full((MILLION,), 0.1)
    exact = angle[0].double() * torch.arange(1, MILLION + 1)
    assert (angle.cumsum(0).double() - exact).abs().max().item() > 1e-3
    turns = accumulate(to_turns(angle)[:, None])[:, 0]
    apart = to_radians(turns) - exact
    assert (apart - (apart / math.tau).round() * math.tau).abs().max().item() <= 1e-8


@given(st.lists(int64s, min_size=1, max_size=12), int64s)
def test_sums_wrap_like_integers_modulo_a_turn(units: list[int], base: int) -> None:
    turns = torch.tensor(units, dtype=torch.int64)[:, None]
    sums = accumulate(turns, torch.tensor([[base]], dtype=torch.int64))[:, 0].tolist()
    assert sums == [wrapped(base + sum(units[: t + 1])) for t in range(len(units))]


@given(st.lists(int64s, min_size=2, max_size=12), st.data())
def test_chunks_equal_the_whole_and_rollback_is_exact(
    units: list[int], data: st.DataObject
) -> None:
    turns = torch.tensor(units, dtype=torch.int64)[:, None]
    whole = accumulate(turns)
    split = data.draw(st.integers(1, len(units) - 1))
    head = accumulate(turns[:split])
    tail = accumulate(turns[split:], head[-1:])
    assert torch.equal(torch.cat([head, tail]), whole)
    undone = whole[-1] - turns[split:].sum(0)
    assert torch.equal(undone, head[-1])


def test_base_broadcasts_over_leading_dimensions() -> None:
    turns = torch.arange(12, dtype=torch.int64).reshape(1, 1, 4, 3)
    base = torch.tensor([5, -7], dtype=torch.int64).reshape(2, 1, 1, 1).expand(2, 2, 1, 3)
    sums = accumulate(turns, base)
    assert sums.shape == (2, 2, 4, 3)
    assert torch.equal(sums, turns.cumsum(-2) + base)


@given(st.lists(int64s, min_size=1, max_size=8), st.sampled_from([torch.float32, torch.float64]))
def test_radians_lie_on_one_turn(units: list[int], dtype: torch.dtype) -> None:
    turns = torch.tensor([*units, 2**63 - 1, HALF_TURN, 0], dtype=torch.int64)
    radians = to_radians(turns, dtype)
    assert radians.dtype == dtype
    half = torch.tensor(math.pi, dtype=dtype)
    assert bool((radians.abs() <= half).all())
    exact = [float(Fraction(int(u), 2**64) * Fraction(2 * math.pi)) for u in turns.tolist()]
    error = (radians.double() - torch.tensor(exact, dtype=torch.float64)).abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps


def test_no_tokens() -> None:
    assert accumulate(to_turns(torch.zeros(2, 0, 3))).shape == (2, 0, 3)
