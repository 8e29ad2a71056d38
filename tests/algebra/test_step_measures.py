"""Measures of steps against loops over windows, and against what independent steps must give."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from farfield.algebra import step_measures as measures
from farfield.algebra.turns import accumulate, to_turns


def walk(seed: int, *shape: int, sigma: float = 0.3) -> torch.Tensor:
    """Steps [..., T, B] of independent normal angles."""
    own = torch.Generator().manual_seed(seed)
    return sigma * torch.randn(*shape, generator=own, dtype=torch.float64)


def test_harmonics_and_lags_are_loops_over_steps() -> None:
    theta = walk(1, 2, 9, 3)
    phase = theta.cumsum(-2)
    orders, lags = (1, 2, 5), (0, 1, 4, 8)
    harmonics = measures.step_harmonics(theta, orders)
    curve = measures.lag_curve(phase, lags)
    for s in range(2):
        for b in range(3):
            angles, sums = theta[s, :, b].tolist(), phase[s, :, b].tolist()
            for k, m in enumerate(orders):
                value = sum(cmath.exp(1j * m * a) for a in angles) / 9
                assert harmonics[s, k, b].item() == pytest.approx(value, abs=1e-12)
            for k, n in enumerate(lags):
                windows = [cmath.exp(1j * (sums[t + n] - sums[t])) for t in range(9 - n)]
                value = sum(windows) / len(windows)
                assert curve[s, k, b].item() == pytest.approx(value, abs=1e-12)


def test_turns_and_radians_read_alike() -> None:
    theta = walk(2, 200, 4, sigma=2.0)
    turns = accumulate(to_turns(theta))
    lags = (1, 7, 50)
    expected = measures.lag_curve(theta.cumsum(-2), lags)
    assert torch.allclose(measures.lag_curve(turns, lags), expected, atol=1e-9)


def floor_by_loop(rho: float, n: int, tokens: int) -> float:
    windows = tokens - n
    reach = min(n, windows)
    terms = [
        (windows - abs(h)) * (rho ** (2 * abs(h)) - rho ** (2 * n)) for h in range(1 - reach, reach)
    ]
    return sum(terms) / windows**2


def test_the_floor_is_its_double_sum() -> None:
    rho = torch.tensor([0.0, 0.5, 0.9, 0.999, 1.0], dtype=torch.float64)
    lags = (0, 1, 2, 17, 40, 49)
    floor = measures.lag_floor(rho, lags, 50)
    for b, value in enumerate(rho.tolist()):
        for k, n in enumerate(lags):
            assert floor[k, b].item() == pytest.approx(floor_by_loop(value, n, 50), abs=1e-12)


def test_the_floor_has_the_closed_values() -> None:
    rho = torch.tensor([math.exp(-0.045)], dtype=torch.float64)  # sigma = 0.3
    for n, tokens, value in ((10, 4096, 0.4078083011211), (200, 4096, 0.005691463004013)):
        found = measures.lag_floor(rho, [n], tokens)[0] + rho ** (2 * n)
        assert found.item() == pytest.approx(value, rel=1e-10)


def test_the_debiased_curve_is_unbiased_over_sequences() -> None:
    phase = walk(3, 1500, 128, 1).cumsum(-2)
    lags = [1, 5, 20, 60]
    square, floor = measures.debiased_lag_curve(phase, lags)
    mean, spread = square.mean(0)[:, 0], square.std(0)[:, 0] / math.sqrt(1500)
    truth = torch.tensor([math.exp(-0.09 * n) for n in lags])
    # The floor is taken at an estimated ρ: its own bias is of second order in 1/T, allowed for.
    assert ((mean - truth).abs() <= 4 * spread + 0.03 * floor.mean(0)[:, 0]).all()
    assert ((square + floor).mean(0)[2:, 0] > truth[2:] + 4 * spread[2:]).all(), "it needed one"


def test_sequences_are_not_pooled() -> None:
    drift = torch.tensor([-0.3, 0.3]).double()[:, None, None]
    phase = (walk(4, 2, 3000, 1, sigma=0.1) + drift).cumsum(-2)
    curve = measures.lag_curve(phase, [5])
    assert curve.abs().min() > 0.95
    assert curve.mean(0).abs() < 0.15


def test_the_window_is_where_the_curve_stays_below() -> None:
    lags = [1, 2, 4, 8, 16]
    size = torch.tensor(
        [
            [0.9, 0.05, 1.0, 0.01],
            [0.5, 0.05, 1.0, 0.01],
            [0.09, 0.3, 1.0, 0.01],
            [0.05, 0.02, 1.0, 0.2],
            [0.02, 0.01, 1.0, 0.2],
        ]
    )
    window = measures.measured_window(size, lags)
    assert window.tolist() == [4, 8, math.inf, math.inf]
    floor = torch.full_like(size, 0.03**2)
    assert measures.measured_window(size, lags, 0.1, floor).tolist() == window.tolist()
    hidden = measures.measured_window(size[:, :1], lags, 0.1, torch.full((5, 1), 0.08**2))
    assert hidden.isnan().all(), "noise of 0.14 cannot show 0.1"


def test_the_window_of_independent_steps_is_the_theory_s() -> None:
    phase = walk(6, 40, 8192, 1, sigma=0.4).cumsum(-2)
    lags = list(range(1, 60))
    square, _ = measures.debiased_lag_curve(phase, lags)
    window = measures.measured_window(square.mean(0).clamp(min=0).sqrt(), lags, 0.1)
    assert window.item() == pytest.approx(29, abs=2)


def test_coupled_blocks_show_and_independent_ones_do_not() -> None:
    theta = walk(7, 4000, 4, sigma=1.0)
    theta[:, 1] = theta[:, 0]
    theta[:, 3] = -theta[:, 2]
    plus, minus = measures.block_coupling(theta)
    assert minus[0, 1] > 0.5
    assert plus[2, 3] > 0.5
    assert plus[0, 2] < 0.08
    assert minus[1, 3] < 0.08
    assert torch.equal(plus.diagonal(), torch.zeros(4, dtype=torch.float64))


def test_what_is_no_lag_and_no_step_is_refused() -> None:
    phase = walk(9, 8, 2)
    with pytest.raises(ValueError, match="lags are"):
        measures.lag_curve(phase, [8])
    with pytest.raises(ValueError, match="theta is of shape"):
        measures.step_harmonics(phase[:0])
    with pytest.raises(ValueError, match="epsilon is 1"):
        measures.measured_window(torch.ones(1, 2), [1], 1.0)
    with pytest.raises(ValueError, match="expected 1 rising"):
        measures.measured_window(torch.ones(1, 2), [2, 1])
