"""The sums against loops, and against mpmath where float loops would themselves be wrong."""

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield.theory import geometric_sum, harmonic_count, lag_sum, log_geometric_sum, log_hyp0f1

sizes = st.floats(0, 1)
turns = st.floats(-np.pi, np.pi)


def loop(c, count, slope=0.0):
    n = np.arange(count)
    weight = np.exp(-slope * n)
    apart = np.abs(n[:, None] - n)
    return float(
        (np.outer(weight, weight) * np.where(apart == 0, 1, complex(c) ** apart)).real.sum()
    )


@given(sizes, turns, st.integers(0, 40), st.floats(0, 2))
def test_lag_sum_is_the_double_loop(rho, turn, count, slope):
    c = rho * np.exp(1j * turn)
    assert lag_sum(c, count, slope) == pytest.approx(loop(c, count, slope), rel=1e-11, abs=1e-11)
    assert lag_sum(rho, count, slope) == pytest.approx(loop(rho, count, slope), rel=1e-12)


@given(sizes, turns, st.integers(0, 60))
def test_geometric_sum_is_the_loop(rho, turn, count):
    c = rho * np.exp(1j * turn)
    expected = sum(c**k for k in range(count))
    assert geometric_sum(c, count) == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert geometric_sum(rho, count) == pytest.approx(sum(rho**k for k in range(count)), rel=1e-12)
    assert geometric_sum(-rho, count) == pytest.approx(
        sum((-rho) ** k for k in range(count)), rel=1e-10, abs=1e-12
    )


@pytest.mark.parametrize("gap", [0.5, 1e-3, 1e-6, 1e-10, 1e-14, 0.0])
@pytest.mark.parametrize("count", [1, 2, 1000, 10**9])
def test_lag_sum_near_one_has_all_digits(gap, count):
    rho = 1 - gap
    with mpmath.workdps(80):
        c = mpmath.mpf(rho)
        exact = mpmath.mpf(count) ** 2
        if rho < 1:
            exact = count + 2 * (count * c / (1 - c) - c * (1 - c**count) / (1 - c) ** 2)
        assert lag_sum(rho, count) == pytest.approx(float(exact), rel=2e-14)


@pytest.mark.parametrize(
    ("rho", "slope"), [(0.9, 0.01), (0.9, -np.log(0.9)), (0.5, np.log(2)), (0.999, 1e-9)]
)
@pytest.mark.parametrize("count", [7, 50, 10**6])
def test_lag_sum_at_the_removable_pole(rho, slope, count):
    with mpmath.workdps(80):
        X, y = mpmath.exp(-2 * mpmath.mpf(slope)), mpmath.mpf(rho) * mpmath.exp(-mpmath.mpf(slope))
        form = (1 + 2 * y / (1 - y)) * (1 - X**count) / (1 - X)
        pole = count * y ** (count - 1)
        second = pole if y == X else (X**count - y**count) / (X - y)
        form -= 2 / (1 - y) * y * second
        assert lag_sum(rho, count, slope) == pytest.approx(float(form), rel=1e-12)


def test_the_vector_of_weighted_lags():
    assert np.exp(-2 * 0.01 * 5) * lag_sum(0.9, 50, 0.01) == pytest.approx(
        440.7878809020, rel=1e-11
    )


def test_sums_broadcast():
    got = lag_sum(np.array([[0.5], [1.0]]), np.array([1, 3, 8]), 0.1)
    assert got.shape == (2, 3)
    assert got[0, 2] == pytest.approx(loop(0.5, 8, 0.1), rel=1e-13)
    assert lag_sum(0.3, 0) == 0
    assert geometric_sum(0.0, [0, 1, 5]).tolist() == [0, 1, 1]


@given(st.floats(1e-12, 5), st.integers(0, 50))
def test_log_geometric_sum(slope, count):
    expected = np.exp(-slope * np.arange(count)).sum()
    assert np.exp(log_geometric_sum(slope, count)) == pytest.approx(expected, rel=1e-12)


def test_log_geometric_sum_limits():
    assert log_geometric_sum(0.0, 10**9) == np.log(1e9)
    assert log_geometric_sum(0.0, np.inf) == np.inf
    assert log_geometric_sum(0.5, np.inf) == pytest.approx(-np.log(1 - np.exp(-0.5)), rel=1e-15)
    assert log_geometric_sum(0.5, 0) == -np.inf
    assert log_geometric_sum(1e-300, 10**9) == pytest.approx(np.log(1e9), rel=1e-15)


@pytest.mark.parametrize("b", [1, 8, 32, 512])
@pytest.mark.parametrize("z", [0, 1e-20, 1e-6, 0.3, 16, 1e3, 39_000, 41_000, 1e7])
def test_log_hyp0f1(b, z):
    with mpmath.workdps(40):
        exact = float(mpmath.log(mpmath.hyp0f1(b, mpmath.mpf(z)))) if z else 0.0
    assert log_hyp0f1(b, z) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("x", [0.0, 1e-9, 0.25, 3.0, 60.0, 2000.0])
def test_harmonic_count_is_the_least(x):
    H = harmonic_count(x)
    with mpmath.workdps(30):
        ratio = [mpmath.besseli(m, x) / mpmath.besseli(0, x) for m in (H, H + 1)]
    assert ratio[1] <= 1.000001e-16
    assert H == 1 or ratio[0] > 0.999999e-16
