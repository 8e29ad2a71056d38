"""Estimates of ρ and lag curves: exact expectations, coverage, and what pooling would fake."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield import theory


def lag_loop(rho, n, N):
    pairs = np.minimum(np.abs(np.arange(N)[:, None] - np.arange(N)), n)
    return (rho ** (2.0 * pairs)).sum() / N**2


def test_vectors_of_the_lag_curve():
    rho = np.exp(-0.045)
    got = theory.expected_lag_square(rho, [10, 200, 50], [4086, 3896, 4046])
    assert got[:2] == pytest.approx([0.4078083011211, 0.005691463004013], rel=1e-12)
    assert got[2] == pytest.approx(0.016257, abs=5e-7)
    assert 1 / theory.effective_windows(rho, 3896) == pytest.approx(got[1], rel=0.01)


@given(st.floats(0, 1), st.integers(0, 40), st.integers(1, 40))
def test_the_lag_expectation_is_the_sum_over_pairs_of_windows(rho, n, N):
    exact = lag_loop(rho, n, N)
    assert theory.expected_lag_square(rho, n, N) == pytest.approx(exact, rel=1e-11)


def test_lag_noise_limits():
    assert theory.lag_noise([0, 1], 5, 100) == pytest.approx([0.01, 0])
    assert theory.lag_noise(0.5, 0, 100) == 0
    assert theory.lag_noise(1 - 1e-9, 5, 1000) == pytest.approx(24960 * 2e-9 / 1e6, rel=1e-5)
    assert theory.lag_noise(0.9, 10**6, 10**9) == pytest.approx(1.81 / 0.19 / 1e9, rel=1e-5)


def test_a_lag_curve_meets_its_expectation():
    generator = np.random.default_rng(6)
    phase = np.cumsum(generator.normal([0.0, 0.4], 0.5, size=(400, 200, 2)), axis=1)
    curve = theory.lag_curve(phase, [1, 4, 40])
    squares = np.abs(curve.values) ** 2
    expected = theory.expected_lag_square(np.exp(-0.125), curve.lags, curve.windows)[:, None]
    error = squares.std(axis=0) / np.sqrt(len(squares))
    assert (np.abs(squares.mean(axis=0) - expected) < 4 * error).all()
    true = np.exp(-0.25 * curve.lags)[:, None]
    assert (np.abs(curve.square - true) < 4.5 * error).all()  # noise at the measured rate
    assert curve.rho == pytest.approx(np.exp(-0.125), abs=0.01)
    above = np.abs(curve.values) > curve.threshold
    assert above[:, 0].all()
    assert above[:, 2].mean() < 0.1
    assert curve.threshold[2] == pytest.approx(
        1.7308 / np.sqrt(theory.effective_windows(np.exp(-0.125), 160)), rel=0.05
    )


def test_a_lag_curve_by_definition():
    phase = np.random.default_rng(7).normal(size=(9, 2))
    curve = theory.lag_curve(phase, [0, 3])
    direct = np.mean([np.exp(1j * (phase[t + 3] - phase[t])) for t in range(6)], axis=0)
    assert curve.values[1] == pytest.approx(direct)
    assert curve.values[0] == pytest.approx([1, 1])
    assert curve.windows.tolist() == [9, 6]


def test_constant_steps_are_all_reported():
    curve = theory.lag_curve(np.arange(50)[:, None] * [[0.3, 2.0]], [1, 20])
    assert np.abs(curve.values) == pytest.approx(np.ones((2, 2)))
    assert curve.rho == pytest.approx([1, 1])
    assert (np.abs(curve.values) > curve.threshold).all()


def test_sequences_are_averaged_after_the_modulus():
    generator = np.random.default_rng(8)
    drift = np.where(np.arange(40) % 2, 0.3, -0.3)[:, None, None]
    phase = np.cumsum(generator.normal(0, 0.1, size=(40, 300, 1)) + drift, axis=1)
    curve = theory.lag_curve(phase, [5])
    assert np.sqrt(curve.square[0, 0]) == pytest.approx(0.975, abs=0.01)
    assert abs(curve.values.mean(axis=0)[0, 0]) == pytest.approx(0.069, abs=0.02)


@given(st.floats(0, 1), st.integers(2, 1000))
def test_debiasing_inverts_the_bias(rho, tokens):
    biased = theory.expected_rho_square(rho, tokens)
    back = theory.debiased_rho_square(min(biased, 1), tokens)
    assert back == pytest.approx(rho**2, abs=1e-12)


def test_interval_error_and_floor():
    generator = np.random.default_rng(9)
    theta = generator.normal(0.3, 0.6, size=(500, 2000))  # 2000 repetitions of T = 500
    told = theory.estimate_rho(theta)
    rho = np.exp(-0.18)
    assert np.mean(np.abs(told.rho - rho) < 1.96 * told.standard_error) == pytest.approx(
        0.95, abs=4 * np.sqrt(0.95 * 0.05 / 2000)
    )
    assert ((told.lower <= rho) & (rho <= told.upper)).all()
    assert (told.rho_debiased**2).mean() == pytest.approx(rho**2, abs=4 * 0.03 / np.sqrt(2000))
    assert np.angle(told.c).mean() == pytest.approx(0.3, abs=0.01)
    square = (told.rho**2).mean()
    assert square == pytest.approx(theory.expected_rho_square(rho, 500), abs=4 * 0.03 / 44)


def test_a_null_rate_stays_under_its_floor():
    generator = np.random.default_rng(10)
    told = theory.estimate_rho(generator.uniform(0, 2 * np.pi, size=(400, 4000)))
    assert np.mean(told.rho > told.floor) == pytest.approx(
        0.05, abs=4 * np.sqrt(0.05 * 0.95 / 4000)
    )
    assert told.rho.mean() == pytest.approx(theory.null_mean(400), rel=0.03)
    assert theory.null_quantile(2000) * np.sqrt(2000) == pytest.approx(1.731, abs=5e-4)
    assert theory.null_mean(1) == pytest.approx(0.886, abs=5e-4)
    assert theory.mcdiarmid_radius(100, 0.05) == pytest.approx((1 + np.sqrt(2 * np.log(20))) / 10)
    scalar = theory.estimate_rho(np.zeros(3))
    assert (scalar.rho, scalar.rho_debiased, scalar.upper) == (1, 1, 1)


def test_bernstein_bounds_a_measured_norm():
    generator = np.random.default_rng(11)
    d, T = 8, 300
    w = generator.normal(size=(20, T, d))
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    mean = np.eye(d) - 2 * np.einsum("rti,rtj->rij", w, w) / T
    off = np.linalg.norm(mean - (1 - 2 / d) * np.eye(d), ord=2, axis=(-2, -1))
    assert off.max() <= theory.matrix_bernstein_radius(T, d, 0.05)
    log = np.log(2 * d / 0.05)
    t = theory.matrix_bernstein_radius(T, d, 0.05) * T  # where the tail 2d e^{−t²/2/(v+Lt/3)} is δ
    assert t**2 / 2 / (T + 2 * t / 3) == pytest.approx(log, rel=1e-12)
    assert theory.haar_norm_floor(2000) == pytest.approx(0.0447, abs=5e-5)
    haar = np.linalg.qr(generator.normal(size=(500, 16, 16)))[0]
    haar = haar * np.sign(generator.normal(size=(500, 1, 16)))
    assert np.linalg.norm(haar.mean(axis=0), ord=2) == pytest.approx(2 / np.sqrt(500), rel=0.2)
