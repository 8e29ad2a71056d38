"""Carried values: the vectors, double loops, and simulated routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield import theory

ORDERS = np.arange(1, 13)[:, None]


def double_loop(a, c):
    lag = np.abs(np.arange(len(a))[:, None] - np.arange(len(a)))
    return float((np.outer(a, a) * np.where(lag == 0, 1, complex(c) ** lag)).real.sum())


def test_vectors_of_the_uniform_form():
    c = np.exp(-0.08)
    assert theory.uniform_form(c, 1024) == pytest.approx(0.02412921761565, rel=1e-12)
    drifting = theory.uniform_form(c * np.exp(0.5j), 1024)
    assert drifting == pytest.approx(0.0006298116136086, rel=1e-11)
    assert theory.uniform_form(7 / 8, 128) == pytest.approx(0.1103515627581, rel=1e-12)
    assert theory.quadratic_form([0.5, 0.3, 0.2], 0.8) == pytest.approx(0.844, rel=1e-14)
    assert theory.coupling_floor([0.5, 0.25]) == pytest.approx(
        [0.05880606210184, 0.01538430959802], rel=1e-12
    )


def test_vectors_of_the_table():
    a = np.full(1024, 1 / 1024)
    told = theory.value_power(a, [1.0], [np.exp(-0.08)], 0.5)
    assert told.carried == pytest.approx(0.024617, abs=5e-7)
    assert told.left == pytest.approx(1.00049, abs=5e-6)
    drifting = theory.value_power(a, [1.0], [np.exp(-0.08 + 0.5j)], 0.5)
    assert drifting.carried == pytest.approx(0.0011181, abs=5e-8)
    householder = theory.value_power_dense(np.full(128, 1 / 128), np.eye(16) * 7 / 8, np.eye(16)[0])
    assert householder == pytest.approx(0.110352, abs=5e-7)
    x, moments = np.full(8, 0.5), theory.normal_harmonic(ORDERS, np.full(8, 0.6))
    assert theory.coupled_power(32768, x, moments)[0] == pytest.approx(0.05936, abs=5e-6)
    assert theory.coupled_power(256, x, moments)[0] == pytest.approx(0.128, abs=5e-4)
    assert theory.uniform_form(np.exp(-0.18), 32768) == pytest.approx(0.00034, abs=5e-6)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=30), st.floats(0, 1), st.floats(-3, 3))
def test_the_form_is_the_double_loop(a, rho, turn):
    c = rho * np.exp(1j * turn)
    exact = double_loop(a, c)
    assert theory.quadratic_form(a, c) == pytest.approx(exact, rel=1e-9, abs=1e-9)
    assert theory.quadratic_form(a, rho) == pytest.approx(
        double_loop(a, rho), rel=1e-11, abs=1e-300
    )
    assert theory.value_power_bound(a, 1.0, rho) >= double_loop(a, rho) * (1 - 1e-11)


def test_the_uniform_form_at_its_limits():
    got = theory.uniform_form([0.0, 1.0, 1 - 1e-10], 1000)
    assert got[:2].tolist() == [1e-3, 1]
    assert got[2] == pytest.approx(1 - 1e-10 * (1000**2 - 1) / 3 / 1000, rel=1e-12)
    assert theory.uniform_form(0.5, 1) == 1
    assert theory.uniform_form(0.5, 10**9) == pytest.approx(3e-9, rel=1e-8)
    assert theory.uniform_gain(0.9, 10**6) == pytest.approx(
        theory.asymptotic_gain(0.9, 10**6), rel=1e-4
    )
    turning = 0.9 * np.exp(1j)
    assert theory.uniform_gain(turning, 10**6) == pytest.approx(
        theory.asymptotic_gain(turning, 10**6), rel=1e-4
    )
    assert theory.uniform_gain(turning, 10**6) > theory.uniform_gain(0.9, 10**6)
    assert theory.asymptotic_gain(1.0, 10) == 1


def test_slow_blocks_cap_the_gain_of_a_head():
    fast = theory.head_gain([1, 1], [0.5, 0.5], [10**3, 10**6])
    slow = theory.head_gain([1, 1], [0.5, 1.0], [10**3, 10**6])
    assert fast == pytest.approx([333, 333_333], rel=0.01)
    assert slow == pytest.approx([2, 2], rel=0.01)


def test_shapes_and_parts_of_value_power():
    a = np.random.default_rng(22).random((3, 17))
    told = theory.value_power(a, [1.0, 2.0], [0.5, 0.9j], 0.7)
    own = (a**2).sum(axis=1)
    for k in range(3):
        apart = double_loop(a[k], 0.5) + 2 * double_loop(a[k], 0.9j)
        assert told.carried[k] == pytest.approx(apart + 0.7 * own[k], rel=1e-12)
        assert told.left[k] == pytest.approx(3 * a[k].sum() ** 2 + 0.7 * own[k], rel=1e-12)
        assert told.gain[k] == pytest.approx(3 * a[k].sum() ** 2 / apart, rel=1e-12)
        assert told.bound[k] >= told.carried[k]
    still = theory.value_power(a, [1.0], [1.0])
    assert still.carried == pytest.approx(still.left, rel=1e-12)
    assert still.bound == pytest.approx(still.left, rel=1e-12)
    assert theory.value_power([0.0, 0.0], [1.0], [0.5]).gain == 1


def routes(generator, R, M, sigma, drift):
    """e^{i(Φ_j)} accumulated over the M steps between the far keys."""
    return np.exp(1j * np.cumsum(generator.normal(drift, sigma, size=(R, M)), axis=1))


def within(values, expected):
    return abs(values.mean() - expected) < 4 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_power_is_what_routes_give(drift):
    generator = np.random.default_rng(23)
    R, M = 3000, 100
    a = generator.random(M)
    a /= a.sum()
    xi = np.sqrt(0.25) * (generator.normal(size=(R, M)) + 1j * generator.normal(size=(R, M)))
    turned = routes(generator, R, M, 0.3, drift)
    F = np.abs((a * turned.conj() * (1 + xi)).sum(axis=1)) ** 2
    told = theory.value_power(a, [1.0], [theory.normal_harmonic(1, 0.3, drift)], 0.5)
    assert within(F, told.carried)
    assert within(np.abs((a * (1 + xi)).sum(axis=1)) ** 2, told.left)


def test_power_of_steps_that_do_not_commute():
    generator = np.random.default_rng(24)
    R, M, d = 1500, 24, 4
    mu = np.array([1.0, 0.5, 0, 0])
    base = generator.normal(size=(d, d)) * 0.2

    def steps(count):
        S = base + 0.3 * generator.normal(size=(count, d, d))
        S = S - S.transpose(0, 2, 1)
        return np.linalg.solve(np.eye(d) + S, np.eye(d) - S)  # Cayley

    mean = steps(400_000).mean(axis=0)
    a = np.linspace(1, 2, M) / 36
    F = np.zeros((R, d))
    for weight in a:  # push what is there by the next step, then add the next key
        F = np.einsum("rij,rj->ri", steps(R), F) + weight * mu
    squares = (F**2).sum(axis=1)
    assert within(squares, theory.value_power_dense(a, mean, mu))
    norm, _ = theory.step_norms(mean)
    assert squares.mean() < theory.value_power_bound(a, mu @ mu, norm)
    scalar = theory.value_power_dense(a, 0.7 * np.eye(d), mu, 0.3)
    assert scalar == pytest.approx(theory.value_power(a, [mu @ mu], [0.7], 0.3).carried, rel=1e-12)


def test_values_made_from_the_token_of_their_step():
    generator = np.random.default_rng(25)
    R, M = 6000, 30
    a = np.linspace(1, 3, M) / 60
    theta = generator.normal(0, 0.8, size=(R, M))
    v = 1 + 0.5 * np.exp(1j * theta)  # a value that knows its own step
    phase = np.cumsum(theta, axis=1)
    F = np.abs((a * np.exp(-1j * phase) * v).sum(axis=1)) ** 2
    c = theory.normal_harmonic(1, 0.8)
    mu, kappa = 1 + 0.5 * c, c + 0.5  # E v, E e^{iθ} v̄
    square = 1.25 + c.real
    exact = theory.content_coupled_power(a, [c], [mu], [kappa], square)
    assert within(F, exact)
    assert exact <= theory.content_coupled_bound(a, abs(c), abs(mu), abs(kappa), square) * (
        1 + 1e-12
    )
    plain = theory.value_power(a, [1.0], [c], 0.5).carried
    assert theory.content_coupled_power(a, [c], [1.0], [c], 1.5) == pytest.approx(plain, rel=1e-12)


def test_covariance_and_mean_are_bounded():
    generator = np.random.default_rng(26)
    R, M, w, mu = 4000, 80, 5, 2.0
    a = generator.random(M) / M
    steps = generator.normal(0, 0.5, size=(R, M + w))
    suffix = np.cumsum(steps[:, ::-1], axis=1)[:, w - 1 : w - 1 + M]  # steps from key to query
    xi = np.sqrt(0.5) * (generator.normal(size=(R, M)) + 1j * generator.normal(size=(R, M)))
    F = (a * np.exp(1j * suffix) * (mu + xi)).sum(axis=1)
    plane = np.cov(np.stack([F.real, F.imag]))
    rho = np.exp(-0.125)
    bound = theory.covariance_bound(a, [mu**2], [rho], [1.0])
    assert np.linalg.norm(plane, ord=2) < bound
    assert abs(F.mean()) < theory.mean_output_bound(a.max(), mu, rho, w)
    n = np.arange(w, 10_000)
    assert theory.mean_output_bound(0.1, 2.0, rho, w) == pytest.approx(0.2 * (rho**n).sum())
    assert theory.mean_output_bound(0.0, 2.0, 1.0, w) == 0
    assert theory.covariance_bound(a, [0.0], [1.0], [1.0]) == pytest.approx((a**2).sum())
    assert theory.covariance_bound(a, [1.0], [1.0], [1.0]) == np.inf


def test_the_coupled_kernel_is_what_tilted_phases_give():
    generator = np.random.default_rng(27)
    R, x, sigma = 200_000, np.array([0.5, 1.0]), np.array([0.4, 0.7])
    moments = theory.normal_harmonic(ORDERS, sigma, np.array([0.3, 0.0]))
    got = theory.coupling_kernel([0, 3, 500], x, moments)
    start = generator.uniform(0, 2 * np.pi, size=(R, 2))
    turn = generator.normal(np.array([0.3, 0.0]), sigma, size=(3, R, 2)).sum(axis=0)
    tilt = np.exp((x * (np.cos(start) + np.cos(start + turn))).sum(axis=1))
    tilt /= np.exp(2 * theory.ell_blocks(x))
    for b in range(2):
        assert within(tilt * np.cos(turn[:, b]), got[1, b])
    assert got[2] == pytest.approx(theory.coupling_floor(x), rel=1e-12)
    zeroth = theory.e2_blocks(x)  # at lag 0 the kernel is E e^{2s}/(E e^s)²
    assert got[0] == pytest.approx([zeroth, zeroth], rel=1e-12)


def test_coupled_power_sums_its_kernel():
    x = np.array([0.5, 1.0, 0.2])
    moments = theory.normal_harmonic(ORDERS, np.array([0.9, 0.6, 1.2]))
    h = np.arange(300)
    kernel = theory.coupling_kernel(h, x, moments)
    weight = np.where(h == 0, 300.0, 2.0 * (300 - h))
    direct = (weight[:, None] * kernel).sum(axis=0) / 300**2
    assert theory.coupled_power(300, x, moments) == pytest.approx(direct, rel=1e-12)
    assert theory.coupled_power(10**9, x, moments) == pytest.approx(
        theory.coupling_floor(x), rel=1e-5
    )
    free = theory.coupled_power(
        200, np.zeros(1), theory.normal_harmonic(ORDERS[:1], np.array([0.6]))
    )
    assert free[0] == pytest.approx(theory.uniform_form(np.exp(-0.18), 200), rel=1e-12)
    still = theory.coupled_power(40, x, np.ones((12, 3)))
    assert still == pytest.approx(np.full(3, theory.e2_blocks(x)), rel=1e-10)


def test_the_coupled_approximation_improves_with_length():
    generator = np.random.default_rng(28)
    x, off = np.full(4, 0.5), []
    moments = theory.normal_harmonic(ORDERS, np.full(4, 0.6))
    for M, R in ((64, 3000), (2048, 300)):
        start = generator.uniform(0, 2 * np.pi, size=(R, 1, 4))
        steps = np.cumsum(generator.normal(0, 0.6, size=(R, M, 4)), axis=1)
        turned = np.exp(1j * (start + steps))
        weights = np.exp((x * turned.real).sum(axis=-1))
        weights /= weights.sum(axis=1, keepdims=True)
        F = (np.abs((weights[..., None] * turned).sum(axis=1)) ** 2).mean(axis=1)
        predicted = theory.coupled_power(M, x, moments)[0]
        off.append(abs(F.mean() / predicted - 1))
    assert off[1] < off[0] < 0.2
    assert off[1] < 0.05
