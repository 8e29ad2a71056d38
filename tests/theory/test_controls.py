"""Controls: extremes attained, softmax within the bounds, vectors and limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from farfield import theory


def mass(logits, w):
    return special.softmax(logits)[w:].sum()


def test_vectors():
    assert theory.alibi_bounds(1, 0.1, 40) == pytest.approx(
        (0.002518639586466, 0.1211574782247), rel=1e-12
    )
    assert theory.gate_upper(1, 0.9, 60) == pytest.approx(0.1172176884347, rel=1e-12)
    assert theory.beta_required(5, 1, np.log(2e4)) == pytest.approx(2.721179055975, rel=1e-12)
    assert theory.hard_limit(10**6, 5, 1) == pytest.approx(0.249, abs=5e-4)
    assert np.exp(25 / 2) == pytest.approx(2.7e5, rel=0.01)
    assert theory.beta_required(5, 1, np.log(1e6)) == np.inf


@given(st.floats(0, 5), st.floats(0, 1), st.integers(1, 20), st.integers(0, 60), st.integers(0, 99))
def test_alibi_bounds_enclose_and_are_attained(lam, slope, w, M, seed):
    bias = -slope * np.arange(w + M)
    sign = np.where(np.arange(w + M) < w, 1, -1)
    low, high = theory.alibi_bounds(lam, slope, w, M)
    assert mass(bias + lam * sign, w) == pytest.approx(low, rel=1e-10, abs=1e-300)
    assert mass(bias - lam * sign, w) == pytest.approx(high, rel=1e-10, abs=1e-300)
    content = np.random.default_rng(seed).uniform(-lam, lam, w + M)
    assert low * (1 - 1e-12) <= mass(bias + content, w) <= high * (1 + 1e-12)
    endless = theory.alibi_bounds(lam, slope, w)
    assert high <= endless[1] * (1 + 1e-12)
    assert endless[1] <= theory.alibi_self_key_upper(lam, slope, w) * (1 + 1e-12)


def test_alibi_limits():
    assert theory.alibi_bounds(1, 0.0, 4) == (1, 1)
    flat = theory.alibi_bounds(0, 0.0, 25, 75)
    assert flat == pytest.approx((0.75, 0.75))
    assert theory.alibi_bounds(0, 1e-14, 25, 75) == pytest.approx(flat)
    assert theory.alibi_bounds(1, 0.1, 40, 0) == (0, 0)
    assert theory.alibi_bounds(1, 0.1, 40, 10**9) == pytest.approx(theory.alibi_bounds(1, 0.1, 40))
    assert theory.alibi_self_key_upper(1, 0.0, 4) == 1
    x = np.exp(2 - 0.5 * 8) / (1 - np.exp(-0.5))
    assert theory.alibi_self_key_upper(1, 0.5, 8) == pytest.approx(x / (1 + x))
    assert theory.alibi_far_log_odds(0.5, 8) == pytest.approx(-4 - np.log1p(-np.exp(-4)))


def gated(generator, rows, length, w, lam):
    gates = generator.beta(9, 1, size=(rows, length))
    decay = np.cumsum(np.log(np.hstack([np.ones((rows, 1)), gates[:, 1:]])), axis=1)
    scores = np.where(np.arange(length) < 1, -lam, lam)  # all but the query's own key
    weights = special.softmax(decay + scores, axis=1)
    return weights[:, w:].sum(axis=1)


def test_gates_hold_on_average_and_surely():
    rho = gated(np.random.default_rng(18), 2000, 400, 60, 1.0)
    assert rho.mean() <= theory.gate_upper(1, 0.9, 60)
    mean = 1 / 9  # E[−log f] of a Beta(9, 1)
    upper, failure = theory.gate_upper_sure(1, mean, 2.0, 60, mean / 2)
    assert failure == 1  # vacuous at this window: gates are only bounded by 2
    upper, failure = theory.gate_upper_sure(1, mean, 0.5, 2000, mean / 2)
    assert failure < 1e-6
    assert upper == pytest.approx(theory.alibi_self_key_upper(1, mean / 2, 2000))


def test_the_mean_gate_is_what_counts():
    assert theory.gate_upper(1, [0.0, 1.0], 3).tolist() == [0, 1]
    x = np.exp(2) * 0.9**60 / 0.1
    assert theory.gate_upper(1, 0.9, 60) == pytest.approx(x / (1 + x))
    assert theory.gate_upper(1, np.exp(-0.1), 40) == pytest.approx(
        theory.alibi_self_key_upper(1, 0.1, 40)
    )
    assert theory.gate_upper(1, np.exp(-1 / 9), 60) < theory.gate_upper(1, 0.9, 60)


def test_the_probability_that_a_gate_fails_is_a_union():
    upper, failure = theory.gate_upper_sure(0, 0.5, 1.0, 50, 0.2)
    direct = sum(np.exp(-2 * n * 0.04) for n in range(50, 5000))
    assert failure == pytest.approx(direct, rel=1e-9)
    assert theory.gate_upper_sure(0, 0.5, 1.0, 50, 0.6)[0] == 1
    generator = np.random.default_rng(19)
    g = generator.binomial(1, 0.5, size=(4000, 400))
    below = np.cumsum(g, axis=1) / np.arange(1, 401) < 0.3
    assert below[:, 49:].any(axis=1).mean() <= failure
    assert upper < 0.01


@given(st.floats(0, 4), st.integers(1, 20), st.integers(0, 20), st.integers(1, 9))
def test_a_window_bounds_far_mass(lam, W, w, K):
    far = max(W - w, 0)
    expected = far / (far + K * np.exp(-2 * lam))
    assert theory.window_upper(lam, W, w, K) == pytest.approx(expected)


def test_log_n_scaling_stops_forcing_dilution():
    L = np.array([10**3, 10**6, 10**9])
    slow = theory.log_n_far_mass_lower(L, 4, 0.25)
    assert slow[2] > 0.999
    assert slow == pytest.approx(theory.far_mass_lower(L - 4, 4, 0.25 * np.log(L)))
    assert theory.log_n_far_mass_lower(L, 4, 0.5) == pytest.approx([0.2, 0.2, 0.2], rel=0.01)
    assert theory.log_n_far_mass_lower(L, 4, 0.75)[2] < 1e-4
    assert theory.log_n_far_mass_lower(3, 4, 1.0) == 0


@given(st.floats(0.5, 20), st.floats(0, 3), st.floats(0.01, 20))
def test_beta_required_solves_the_annealed_balance(a, v, need):
    beta = theory.beta_required(a, v, need)
    if np.isfinite(beta):
        assert need + beta**2 * v / 2 == pytest.approx(beta * a, rel=1e-9)
        assert beta <= 2 * need / a * (1 + 1e-12)
    else:
        assert need > a**2 / (2 * v)
    assert theory.beta_required(a, v, -need) == 0


def test_beta_required_gives_the_far_mass_asked_for():
    generator = np.random.default_rng(20)
    need = theory.log_ratio(20_000, 1, 0.5)
    assert need == pytest.approx(np.log(2e4))
    assert theory.log_ratio(100, 4, 0.9) == pytest.approx(np.log(25 / 9))
    beta = theory.beta_required(5, 1, need)
    far = special.logsumexp(beta * generator.normal(size=(60, 20_000)), axis=1)
    rho = special.expit(far - 5 * beta)
    assert rho.mean() == pytest.approx(0.5, abs=0.06)  # annealed: slightly above what is typical


def test_the_hard_limit():
    q = stats.norm.sf(5)
    assert theory.hard_limit(10**9, 5, 1) == pytest.approx(-np.expm1(1e9 * np.log1p(-q)))
    assert theory.hard_limit(np.log(2) // q, 5, 1) == pytest.approx(0.5, abs=1e-6)
    assert theory.hard_limit(0, 5, 1) == 0
    scores = np.random.default_rng(21).normal(0, np.sqrt(2), size=(4000, 50)).max(axis=1)
    p = theory.hard_limit(50, 3.5, 2)
    assert abs((scores > 3.5).mean() - p) < 4 * np.sqrt(p * (1 - p) / 4000)
