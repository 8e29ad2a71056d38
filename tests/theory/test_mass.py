"""Far mass and break lengths: the vectors, softmax itself, and Monte Carlo."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from farfield import theory

X = np.full(32, 0.25)
LSE = np.log(4) + 6
ELL, E2 = theory.ell_blocks(X), theory.e2_blocks(X)
logits = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


def test_vectors_of_the_mean_weight():
    assert theory.ell_haar(8, 64) == pytest.approx(0.4962844529728, rel=1e-11)
    assert pytest.approx(0.4980603300281, rel=1e-11) == ELL
    assert pytest.approx(2.647114963385, rel=1e-11) == E2


def test_vectors_of_far_mass_and_break_length():
    got = theory.typical_far_mass([512, 8192, 65536], ELL, LSE)
    assert got[1] == pytest.approx(0.8930880250265, rel=1e-12)
    assert got == pytest.approx([0.34301, 0.89309, 0.98526], abs=6e-6)
    assert theory.typical_break_length(LSE, ELL) == pytest.approx(980.6680578398, rel=1e-12)
    early, late = theory.break_length_interval(LSE, ELL, E2, 0.05)
    assert (early, late) == pytest.approx((816.6488769463, 1177.629538001), rel=1e-12)
    assert theory.global_break_length(4, 8) == pytest.approx(3.55e7, rel=2e-3)
    assert theory.decohered_break_length(LSE) == pytest.approx(1614, abs=0.5)


def test_the_union_safe_length():
    def sharp(M):
        return theory.block_threshold(M, 0.05, np.full(32, 2.0), 64, "uniform")

    safe = theory.union_break_length(LSE, sharp)
    assert safe == 35  # the bound passes ½ between 35 and 36 far keys
    assert theory.far_mass_upper(safe, sharp(safe), LSE) <= 0.5
    assert theory.far_mass_upper(safe + 1, sharp(safe + 1), LSE) > 0.5
    assert theory.union_break_length(-20.0, sharp) == 0
    assert theory.union_break_length([LSE, LSE], sharp, 0.5).shape == (2,)


def test_vectors_of_the_lower_bound():
    got = theory.far_mass_lower([65536, 50], [4, 3], [8, 2])
    assert got == pytest.approx([0.001840383047949, 0.2338694946326], rel=1e-12)


@pytest.mark.parametrize("x", [1e-6, 0.25, 3.0, 200.0])
def test_mean_weights_are_integrals(x):
    block = integrate.quad(lambda t: np.exp(x * (np.cos(t) - 1)) / np.pi, 0, np.pi, limit=500)[0]
    assert theory.ell_blocks([x]) == pytest.approx(x + np.log(block), rel=1e-7, abs=1e-9)
    assert theory.ell_haar(x, 2) == pytest.approx(theory.ell_blocks([x]), rel=1e-14)
    area = special.beta(0.5, 3.5)
    haar = integrate.quad(lambda t: (1 - t * t) ** 2.5 * np.exp(x * (t - 1)), -1, 1, limit=500)[0]
    assert theory.ell_haar(x, 8) == pytest.approx(x + np.log(haar / area), rel=1e-7, abs=1e-9)
    assert theory.ell_normal(x) == x / 2


def test_small_and_large_weights():
    assert theory.ell_blocks([1e-8]) == pytest.approx(0.25e-16, rel=1e-12)
    assert theory.e2_blocks([1e-9]) == 1
    assert theory.ell_blocks([0.0, 0.0]) == 0
    assert theory.e2_normal(0.5) == np.exp(0.5)
    assert theory.e2_haar(8, 64) == pytest.approx(
        np.exp(theory.ell_haar(16, 64) - 2 * theory.ell_haar(8, 64))
    )
    wide = theory.ell_haar(30, 10**6)  # nearly normal, of variance S²/d
    assert wide == pytest.approx(theory.ell_normal(900 / 1e6), rel=1e-5)


@given(logits, logits)
def test_far_mass_is_the_softmax(far, near):
    weights = special.softmax(far + near)
    got = theory.far_mass(special.logsumexp(far), special.logsumexp(near))
    assert got == pytest.approx(weights[: len(far)].sum(), rel=1e-11)


@given(logits, logits)
def test_lower_and_upper_bounds_enclose_the_softmax(far, near):
    mass = theory.far_mass(special.logsumexp(far), special.logsumexp(near))
    bound = max(map(abs, far + near))
    rows = theory.far_mass_lower_rows(far, near)
    assert theory.far_mass_lower(len(far), len(near), bound) <= rows * (1 + 1e-12)
    assert rows <= mass * (1 + 1e-12)
    floor = np.log(len(near)) + min(near)
    assert mass <= theory.far_mass_upper(len(far), max(far), floor) * (1 + 1e-12)
    ratio = np.exp(max(far) - min(near))
    assert theory.weight_ratio_bound(min(near), max(far)) == pytest.approx(ratio)


@given(st.integers(1, 30), st.integers(1, 9), st.floats(0, 20))
def test_the_lower_bound_is_attained(M, K, lam):
    rows = theory.far_mass_lower_rows(np.full(M, -lam), np.full(K, lam))
    assert rows == pytest.approx(theory.far_mass_lower(M, K, lam), rel=1e-10)


def test_far_mass_limits():
    assert theory.far_mass(-np.inf, 1.0) == 0
    assert theory.far_mass(1.0, -np.inf) == 1
    assert theory.typical_far_mass([0, 10**9, np.inf], 0.5, 3.0) == pytest.approx([0, 1, 1])
    assert 1 - theory.far_mass(0.0, 30.0) == pytest.approx(1, abs=1e-12)
    assert theory.far_mass_lower(0, 4, 1) == 0
    assert theory.far_mass_lower(10**9, 4, 0) == pytest.approx(1, abs=5e-9)
    assert theory.typical_break_length(1e4, 0.0) == np.inf


@given(
    st.floats(0, 30), st.floats(-1, 3), st.floats(1, 20), st.floats(0.01, 0.9), st.floats(0.05, 0.9)
)
def test_chebyshev_break_lengths_solve_their_equation(lse, ell, e2, delta, share):
    typical = theory.typical_break_length(lse, ell, share)
    early, late = theory.break_length_interval(lse, ell, e2, delta, share)
    for M, sign in ((early, 1), (late, -1)):
        assert M + sign * np.sqrt((e2 - 1) * M / delta) == pytest.approx(typical, rel=1e-9)
    assert theory.typical_far_mass(1, np.log(typical) + ell, lse) == pytest.approx(share, rel=1e-9)
    wider = theory.break_length_interval(lse, ell, e2, delta, share, correlation_sum=4.0)
    assert wider[0] <= early
    assert wider[1] >= late


def test_far_mass_and_its_break_are_what_samples_give():
    generator = np.random.default_rng(16)
    M, R = 980, 300
    phase = generator.uniform(0, 2 * np.pi, size=(R, M, 8)).astype(np.float32)
    x = np.full(8, 0.5)
    far = special.logsumexp((x * np.cos(phase)).sum(axis=-1), axis=-1)
    ell, e2 = theory.ell_blocks(x), theory.e2_blocks(x)
    error = np.sqrt((e2 - 1) / M / R)  # of the mean of Z_D/E Z_D
    assert abs(np.exp(far - np.log(M) - ell).mean() - 1) < 4 * error
    lse = np.log(M) + ell
    assert theory.far_mass(far, lse).mean() == pytest.approx(0.5, abs=4 * error + (e2 - 1) / M)


def test_the_mean_far_score_of_a_shared_key():
    generator = np.random.default_rng(17)
    M, R, x = 64, 4000, np.array([1.0, 0.5])
    sigma, drift = np.array([0.4, 0.8]), np.array([0.3, 0.0])
    start = generator.uniform(0, 2 * np.pi, size=(R, 1, 2))
    phase = start + np.cumsum(generator.normal(drift, sigma, size=(R, M, 2)), axis=1)
    mean = (x * np.cos(phase)).sum(axis=-1).mean(axis=-1)
    exact = theory.mean_far_score_square(x, theory.normal_harmonic(1, sigma, drift), M)
    assert abs((mean**2).mean() - exact) < 4 * (mean**2).std() / np.sqrt(R)
    assert exact <= theory.mean_far_score_bound(1.5, np.exp(-0.08), M)
    c = np.full(32, np.exp(-0.08))
    assert theory.mean_far_score_square(X, c, 2048) == pytest.approx(0.01214, abs=5e-6)
    assert theory.mean_far_score_bound(8, np.exp(-0.08), 2048) == pytest.approx(0.78, abs=0.005)
    assert theory.mean_far_score_bound(2, 1.0, 10) == 4
    coupled = theory.mean_far_score_bound(1, 0.5, 100, shared_token=True)
    assert coupled == pytest.approx((1 + 2 / 0.5) / 100)


@given(st.floats(-5, 20), st.floats(0.05, 0.95), st.floats(0, 10), st.floats(0, 0.99))
def test_the_decohered_break_is_where_its_bound_is_the_share(lse, share, scale, rho):
    M = theory.decohered_break_length(lse, share, scale, rho, 0.1)
    epsilon = scale * np.sqrt((1 + rho) / ((1 - rho) * M * 0.1))
    assert np.log(M) - lse - epsilon == pytest.approx(special.logit(share), rel=1e-8, abs=1e-8)
    assert theory.decohered_break_length(lse, share) <= M


def test_decohered_bounds():
    got = theory.far_mass_lower_decohered(10**6, LSE, 8, 0.9, 0.05)
    epsilon = 8 * np.sqrt(1.9 / 0.1 / 1e6 / 0.05)
    assert got == pytest.approx(1e6 / (1e6 + np.exp(LSE + epsilon)), rel=1e-12)
    assert theory.far_mass_lower_decohered(10**6, LSE, 8, 1.0, 0.05) == 0
    assert theory.far_mass_lower_decohered(10**6, LSE, 0, 1.0, 0.05) > 0.99
    assert theory.decohered_break_length(LSE, 0.5, 8, 1.0) == np.inf
    assert theory.far_mass_lower(10**6, 4, 8) < 0.03 < got  # against T4
