"""The predictor: vectors, its parts by loops, limits at 10⁹ keys, and simulated routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from farfield import theory

X, SIGMA = np.full(32, 0.25), 0.4
SETTING = {
    "lse_near": np.log(32) + 4,
    "ell": theory.ell_blocks(X),
    "ell2": theory.ell_blocks(2 * X),
    "mean_power": np.full(32, 1 / 32),
    "c": np.full(32, np.exp(-0.08)),
    "noise_power": 1.0,
    "signal_power": 1.0,
}
MOMENTS = theory.normal_harmonic(np.arange(1, 13)[:, None], np.full(32, SIGMA))
E2 = theory.e2_blocks(X)


def test_vectors_of_the_predictor():
    left = theory.predict(65536, 32, **SETTING, carried=False)
    carried = theory.predict(65536, 32, **SETTING, carried=True)
    assert left.far_mass == pytest.approx(0.9840495767808, rel=1e-11)
    assert left.snr == pytest.approx(2.627198659174e-4, rel=1e-11)
    assert carried.snr == pytest.approx(0.5873125181957, rel=1e-11)
    left = theory.predict(65536, 32, **SETTING, carried=False, slope=0.001)
    carried = theory.predict(65536, 32, **SETTING, carried=True, slope=0.001)
    assert left.far_mass == pytest.approx(0.4771608207957, rel=1e-11)
    assert left.snr == pytest.approx(1.199036105581, rel=1e-11)
    assert carried.snr == pytest.approx(82.80420831360, rel=1e-11)


def test_the_table():
    L = np.array([512, 8192, 65536])
    left = theory.predict(L, 32, **SETTING, carried=False)
    carried = theory.predict(L, 32, **SETTING, carried=True)
    assert left.far_mass == pytest.approx([0.3113, 0.8849, 0.98405], abs=5e-5)
    assert left.snr == pytest.approx([4.866, 0.016925, 2.6272e-4], rel=1e-4)
    assert carried.snr == pytest.approx([81.96, 4.720, 0.5873], rel=1e-4)
    assert carried.far_power[1] == pytest.approx(2.8085e-3, abs=5e-8)
    sloped = theory.predict(L, 32, **SETTING, carried=True, slope=0.001)
    assert sloped.far_mass == pytest.approx([0.2581, 0.4771, 0.4772], abs=5e-5)
    assert sloped.snr == pytest.approx([136.0, 82.80, 82.80], rel=1e-4)
    assert carried.near_power / carried.far_power == pytest.approx(carried.snr, rel=1e-12)


def test_vectors_of_the_break_lengths():
    laws = theory.break_laws(
        SETTING["lse_near"], SETTING["ell"], E2, SETTING["mean_power"], SETTING["c"], 1.0, 1.0
    )
    assert laws[1] == pytest.approx(38465, abs=0.5)
    assert laws[0] == pytest.approx(1062, abs=0.5)  # z/|μ|
    exact = [theory.snr_break_length(**SETTING, carried=kind) for kind in (False, True)]
    assert exact == [1061, 38476]
    z = np.exp(SETTING["lse_near"] - SETTING["ell"])  # M² + E2·M = z² with values left alone
    assert np.sqrt(z**2 + E2**2 / 4) - E2 / 2 == pytest.approx(1060, abs=0.5)
    for kind, least in zip((False, True), exact, strict=True):
        around = theory.predict([least + 31, least + 32], 32, **SETTING, carried=kind).snr
        assert around[1] <= 1 < around[0]
    assert theory.snr_break_length(**SETTING, carried=True, slope=0.001, near_window=32) == np.inf
    assert theory.snr_break_length(**SETTING, carried=False, level=[1.0, 0.01])[1] > 10_000


@given(
    st.integers(1, 40),
    st.integers(0, 9),
    st.floats(0, 0.5),
    st.floats(0, 1),
    st.floats(-3, 3),
    st.floats(0, 1),
)
def test_the_predictor_is_its_sums(M, w, slope, rho, turn, excess):
    lse, ell, noise, signal = 2.0, 0.3, 0.7, 1.5
    c = np.array([rho * np.exp(1j * turn), 0.5])
    m2 = np.array([0.6, 0.9])
    n = np.arange(w, w + M)
    bias = np.exp(-slope * n)
    zd, zn, e2 = np.exp(ell) * bias.sum(), np.exp(lse), 1 + excess
    lag = np.abs(n[:, None] - n)
    A = zd / (zd + zn)
    q = (bias**2).sum() / bias.sum() ** 2
    forms = [(np.outer(bias, bias) * np.where(lag == 0, 1, b**lag)).real.sum() for b in c]
    brackets = [form / bias.sum() ** 2 + excess * q for form in forms]
    brackets = [1.0 if b == 1 else bracket for b, bracket in zip(c, brackets, strict=True)]
    power = {False: m2.sum() + e2 * q * noise, True: m2 @ brackets + e2 * q * noise}
    for carried, N in power.items():
        told = theory.predict(
            w + M, w, lse, ell, 2 * ell + np.log(e2), m2, c, noise, signal, carried, slope
        )
        assert told.far_mass == pytest.approx(A, rel=1e-10)
        assert told.far_power == pytest.approx(A**2 * N, rel=1e-9)
        assert told.near_power == pytest.approx((1 - A) ** 2 * signal, rel=1e-9)
        assert told.snr == pytest.approx((zn / zd) ** 2 * signal / N, rel=1e-9)


def test_the_predictor_at_its_limits():
    empty = theory.predict(32, 32, **SETTING, carried=True)
    assert (empty.far_mass, empty.far_power, empty.snr) == (0, 0, np.inf)
    L = np.array([10**6, 10**9])
    left = theory.predict(L, 32, **SETTING, carried=False).snr
    carried = theory.predict(L, 32, **SETTING, carried=True).snr
    assert left[0] / left[1] == pytest.approx(1e6, rel=1e-3)
    assert carried[0] / carried[1] == pytest.approx(1e3, rel=1e-3)
    still = {**SETTING, "c": np.ones(32)}
    assert theory.predict(L, 32, **still, carried=True).snr == pytest.approx(left, rel=1e-12)
    far = theory.predict(10**9, 32, **SETTING, carried=True, slope=1.0)
    assert np.isfinite(far.snr)
    assert 0 < far.far_mass < 1e-14
    steep = theory.predict(10**9, 5000, **SETTING, carried=True, slope=1.0)
    assert steep.far_mass == 0
    assert steep.snr == np.inf
    flat = theory.predict(65536, 32, **SETTING, carried=True, slope=1e-14)
    assert flat.snr == pytest.approx(0.5873125181957, rel=1e-8)


def test_a_window_and_log_n_are_controls_of_the_predictor():
    windowed = theory.predict([512, 8192], 32, **SETTING, carried=True, window=512)
    assert windowed.snr[0] == windowed.snr[1]
    assert theory.predict(8192, 32, **SETTING, carried=True, window=16).far_mass == 0
    L = np.array([512, 65536])
    beta = np.log(L) / np.log(512)
    scaled = {
        **SETTING,
        "ell": theory.ell_blocks(beta[:, None] * X),
        "ell2": theory.ell_blocks(2 * beta[:, None] * X),
        "lse_near": np.log(32) + 4 * beta,
    }
    told = theory.predict(L, 32, **scaled, carried=False)
    free = theory.predict(L, 32, **SETTING, carried=False)
    assert told.snr[0] == pytest.approx(free.snr[0])
    assert told.far_mass[1] < free.far_mass[1]


def test_noise_per_key_is_the_limit_of_the_far_power():
    rho, m2 = np.array([0.3, 0.9]), np.array([1.0, 0.5])
    per_key = theory.noise_per_key(m2, rho, 2.0, 0.7)
    told = theory.predict(10**9, 0, -5.0, 0.0, np.log(2.0), m2, rho, 0.7, 1.0, True)
    assert told.far_power * 1e9 == pytest.approx(per_key, rel=1e-6)
    assert theory.noise_per_key(m2, [1.0, 0.9], 2.0, 0.7) == np.inf
    assert theory.break_laws(3.0, 0.0, 2.0, m2, [1.0, 0.9], 0.7, 1.0)[1] == 0


def test_the_predictor_meets_simulated_routes():
    generator = np.random.default_rng(29)
    R, w, M, B = 400, 8, 600, 4
    x, s_near = np.full(B, 0.5), 3.0
    noise, mu = 0.5, 1.0
    theta = generator.normal(0, 0.5, size=(R, M + w, B))
    route = np.cumsum(theta, axis=1)[:, w:]  # distance n from the query
    psi = generator.uniform(0, 2 * np.pi, size=(R, M, B))
    scores = (x * np.cos(psi)).sum(axis=-1)  # independent keys
    weights = np.exp(scores)
    zd, zn = weights.sum(axis=1), w * np.exp(s_near)
    weights /= (zd + zn)[:, None]
    xi = generator.normal(size=(2, R, M, B)) * np.sqrt(noise / 2 / B)
    v = mu / np.sqrt(B) + xi[0] + 1j * xi[1]
    for carried in (False, True):
        turned = np.exp(1j * route) if carried else 1.0
        power = (np.abs((weights[..., None] * turned * v).sum(axis=1)) ** 2).sum(axis=-1)
        told = theory.predict(
            w + M, w, np.log(zn), theory.ell_blocks(x), theory.ell_blocks(2 * x), np.full(B, 1 / B),
            np.full(B, np.exp(-0.125)), noise, 1.0, carried,
        )  # fmt: skip
        slack = theory.e2_blocks(x) / M * told.far_power  # a ratio of means
        assert abs(power.mean() - told.far_power) < 4 * power.std() / np.sqrt(R) + slack
        mass = zd / (zd + zn)
        assert mass.mean() == pytest.approx(told.far_mass, abs=4 * mass.std() / 20 + 0.002)


def test_the_shared_key_kernel():
    kernel = np.exp(theory.log_shared_key_kernel([0, 5, 20, 50], X, MOMENTS))
    known = [2980.957987042, 246.2686955076, 7.867059418383, 1.902413358086]
    assert kernel == pytest.approx(known, rel=1e-11)
    generator = np.random.default_rng(30)
    x, sigma = np.array([0.5, 1.5]), np.array([0.4, 0.9])
    moments = theory.normal_harmonic(np.arange(1, 25)[:, None], sigma, 0.2)
    phase = generator.normal(0.2, sigma, size=(3, 100_000, 2)).sum(axis=0)
    weights = np.exp((x * np.cos(phase)).sum(axis=1))
    expected = np.exp(theory.log_shared_key_kernel(3, x, moments))
    assert abs(weights.mean() - expected) < 4 * weights.std() / np.sqrt(100_000)
    far = theory.log_shared_key_kernel(10**9, x, moments)
    assert far == pytest.approx(theory.ell_blocks(x), rel=1e-12)


def test_the_far_mass_of_a_shared_key():
    got = theory.shared_key_far_mass([512, 65536, 10**9], 32, X, MOMENTS)
    assert got[:2] == pytest.approx([0.0972, 0.93514], abs=5e-5)
    assert 1 - got[2] < 1e-5
    for slope in (0.0, 0.01):
        n = np.arange(700)
        logs = theory.log_shared_key_kernel(n, X, MOMENTS) - slope * n
        direct = np.exp(special.logsumexp(logs[32:]) - special.logsumexp(logs))
        assert theory.shared_key_far_mass(700, 32, X, MOMENTS, slope) == pytest.approx(
            direct, rel=1e-11
        )
    assert theory.shared_key_far_mass([32, 100], 32, X, MOMENTS)[0] == 0
    assert theory.shared_key_far_mass(10, 0, X, MOMENTS) == 1
    still = theory.shared_key_far_mass(100, 25, X, np.ones((12, 32)))
    assert still == pytest.approx(0.75, rel=1e-12)
