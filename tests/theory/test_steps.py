"""Harmonics, windows and near preservation against quadrature, loops and samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from farfield import theory

SIGMAS = 10000.0 ** (-np.arange(32) / 32)
HEAD = np.exp(-(SIGMAS**2) / 2)


def test_vectors_of_rates():
    assert abs(theory.normal_harmonic(1, 0.4)) == pytest.approx(0.9231163463866, rel=1e-12)
    assert theory.uniform_harmonic([1, 2], 1).real == pytest.approx(
        [0.8414709848079, 0.4546487134128], rel=1e-12
    )
    assert theory.von_mises_harmonic([1, 2], 2).real == pytest.approx(
        [0.6977746579640, 0.3022253420360], rel=1e-12
    )
    assert abs(theory.bernoulli_harmonic(1, 0.1, 2)) == pytest.approx(0.8631880266903, rel=1e-12)
    assert theory.householder_rate(64) == 62 / 64


def test_vectors_of_windows():
    assert theory.mixing_window(np.exp(-0.08), [0.1, 0.01, 0.001]).tolist() == [29, 58, 87]
    assert theory.mixing_window(62 / 64, [0.1, 0.01]).tolist() == [73, 146]
    assert theory.head_window(np.ones(32), HEAD, [0.5, 0.1]).tolist() == [8422, 14664552]


@pytest.mark.parametrize("order", [0, 1, 2, 5, -3])
def test_harmonics_are_integrals(order):
    def mean(density, low, high):
        def turned(t):
            return np.exp(1j * order * t) * density(t)

        return integrate.quad(turned, low, high, limit=200, complex_func=True)[0]

    normal = mean(lambda t: np.exp(-((t - 0.3) ** 2) / 0.5) / np.sqrt(0.5 * np.pi), -8, 8)
    assert theory.normal_harmonic(order, 0.5, 0.3) == pytest.approx(normal, abs=1e-9)
    uniform = mean(lambda t: 1 / 8, -3.5, 4.5)
    assert theory.uniform_harmonic(order, 4.0, 0.5) == pytest.approx(uniform, abs=1e-9)
    mises = mean(lambda t: np.exp(3 * np.cos(t - 1)) / (2 * np.pi * special.i0(3)), -np.pi, np.pi)
    assert theory.von_mises_harmonic(order, 3.0, 1.0) == pytest.approx(mises, abs=1e-9)
    assert theory.two_point_harmonic(order, 0.7) == pytest.approx(np.cos(order * 0.7))
    atoms = 0.7 + 0.3 * np.exp(1j * order * 2.2)
    assert theory.bernoulli_harmonic(order, 0.3, 2.2) == pytest.approx(atoms)


def test_harmonics_at_their_limits():
    assert theory.von_mises_harmonic(1, 1e8).real == pytest.approx(1 - 0.5e-8, rel=1e-12)
    assert theory.von_mises_harmonic([0, 1], 0).real.tolist() == [1, 0]
    assert theory.uniform_harmonic(1, 0).real == 1
    assert abs(theory.uniform_harmonic(1, np.pi)) < 1e-15
    assert [theory.householder_rate(d) for d in (1, 2, 4)] == [1, 0, 0.5]


def test_empirical_harmonics_are_sample_means():
    generator = np.random.default_rng(0)
    theta = generator.normal(0.2, 0.4, size=(20_000, 3))
    got = theory.empirical_harmonic(theta, [1, 2])
    assert got.shape == (2, 3)
    truth = theory.normal_harmonic(np.array([1, 2]), 0.4, 0.2)[:, None]
    assert (np.abs(got - truth) < 4 / np.sqrt(20_000)).all()
    assert np.isclose(got[1, 2], np.mean(np.exp(2j * theta[:, 2])))


@pytest.mark.parametrize("law", ["normal", "householder"])
def test_means_of_products_are_powers(law):
    generator = np.random.default_rng(1)
    R, n, d = 20_000, 6, 6
    if law == "normal":
        phase = generator.normal(0, 0.4, size=(R, n)).sum(axis=1)
        values, rho = np.cos(phase), theory.normal_harmonic(1, 0.4).real
    else:
        x = np.tile(np.eye(d)[0], (R, 1))
        for _ in range(n):
            w = generator.normal(size=(R, d))
            w /= np.linalg.norm(w, axis=1, keepdims=True)
            x = x - 2 * w * (w * x).sum(axis=1, keepdims=True)
        values, rho = x[:, 0], theory.householder_rate(d)
    error = values.std() / np.sqrt(R)
    assert abs(values.mean() - theory.mean_score_bound(1, rho, n)) < 4 * error


def test_a_shared_token_costs_one_step():
    assert theory.mean_score_bound(2, 0.5, [0, 1, 4], shared_token=True).tolist() == [2, 2, 0.25]
    assert theory.mean_score_bound(2, 0.5, [0, 1, 4]).tolist() == [2, 1, 0.125]
    assert theory.mean_score_bound(1, 0.0, [0, 1]).tolist() == [1, 0]


def test_norm_and_spectral_radius_differ():
    norm, radius = theory.step_norms([[0.5, 1.0], [0.0, 0.5]])
    assert radius == pytest.approx(0.5)
    assert norm > 1


@given(st.floats(0.001, 0.9999), st.floats(0.001, 0.999))
def test_mixing_window_is_the_least(rho, epsilon):
    n = int(theory.mixing_window(rho, epsilon))
    assert rho**n <= epsilon * (1 + 1e-12)
    assert n == 1 or rho ** (n - 1) > epsilon * (1 - 1e-12)


def test_windows_at_their_limits():
    assert theory.mixing_window([0, 1]).tolist() == [1, np.inf]
    assert theory.mixing_window(0.1, 0.01) == 2
    assert theory.mixing_window(0.5, 0.125) == 3
    assert theory.preservation_window([0, 1]).tolist() == [0, np.inf]
    assert theory.preservation_window(0.5, 0.75) == 2
    assert theory.unsettled_factor() == pytest.approx(21.9, abs=0.05)


@given(
    st.lists(st.tuples(st.floats(0.01, 3), st.floats(0, 0.999)), min_size=1, max_size=5),
    st.floats(0.01, 0.9),
)
def test_head_window_is_the_least(blocks, epsilon):
    r, rho = np.array(blocks).T
    n = int(theory.head_window(r, rho, epsilon))
    left = [(r * rho**k).sum() for k in (n - 1, n)]
    assert left[1] <= epsilon * r.sum() * (1 + 1e-12)
    assert left[0] > epsilon * r.sum() * (1 - 1e-12)
    assert n <= theory.mixing_window(rho, epsilon).max()


def test_head_window_with_blocks_that_never_turn():
    assert theory.head_window([1, 1], [1, 0.5], [0.4, 0.5, 0.75]).tolist() == [np.inf, np.inf, 1]
    assert theory.head_window([1, 1], [1, 0.0], 0.5) == 1
    assert theory.head_window([1, 0], [0.5, 1], 0.125) == 3
    assert theory.head_window([[1, 1], [1, 3]], [[0.5, 0.5], [0.0, 0.0]], 0.2).tolist() == [3, 1]


def test_near_displacement_is_what_samples_give():
    generator = np.random.default_rng(2)
    x = generator.normal(size=3) + 1j * generator.normal(size=3)
    sigma, drift = np.array([0.1, 0.4, 1.0]), np.array([0.0, 0.2, -0.5])
    phase = generator.normal(drift, sigma, size=(20_000, 5, 3)).sum(axis=1)
    moved = (np.abs(np.exp(1j * phase) * x - x) ** 2).sum(axis=1)
    got = theory.near_displacement(np.abs(x) ** 2, theory.normal_harmonic(1, sigma, drift), [0, 5])
    assert got[0] == 0
    assert abs(got[1] - moved.mean()) < 4 * moved.std() / np.sqrt(len(moved))
    tiny = theory.near_displacement([1.0], [1 - 1e-15], 1)
    assert tiny == pytest.approx(2 * (1 - (1 - 1e-15)), rel=1e-9)
    assert theory.near_displacement([1.0], [0.0], [0, 1]).tolist() == [0, 2]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.floats(-3, 3))
def test_near_change_is_bounded_on_every_path(angles, direction):
    change = abs(np.cos(direction + sum(angles)) - np.cos(direction))
    distances = 2 * np.abs(np.sin(np.array(angles) / 2))
    assert change <= theory.near_change_bound(1.0, distances) + 1e-12


def test_total_variation_lies_between_its_bounds():
    n = np.array([1, 3, 10])
    moduli = theory.normal_harmonic(np.arange(1, 60), 0.8).real
    low, high = theory.total_variation_bounds(np.broadcast_to(moduli, (3, 59)), n)
    grid = np.linspace(-np.pi, np.pi, 20_001)
    for k, steps in enumerate(n):
        density = (1 + 2 * (moduli**steps) @ np.cos(np.outer(np.arange(1, 60), grid))) / (2 * np.pi)
        variation = 0.5 * integrate.trapezoid(np.abs(density - 1 / (2 * np.pi)), grid)
        assert low[k] <= variation <= high[k]
    assert theory.total_variation_bounds([1.0], 5) == (0.5, pytest.approx(np.sqrt(2) / 2))


def test_second_moment_needs_the_second_harmonic():
    generator = np.random.default_rng(3)
    z = generator.normal(size=4) + 1j * generator.normal(size=4)
    for angles in (
        generator.normal(0.3, 0.4, size=(40_000, 3, 4)),
        np.pi / 2 * generator.choice([-1.0, 1.0], size=(40_000, 3, 4)),
    ):
        c1, c2 = np.exp(1j * angles).mean((0, 1)), np.exp(2j * angles).mean((0, 1))
        s = (z * np.exp(1j * angles.sum(axis=1))).sum(axis=1).real / np.sqrt(8)
        mean, square = theory.score_moments(z, c1, c2, 3, 8)
        assert abs(mean - s.mean()) < 4 * s.std() / 200
        assert abs(square - (s**2).mean()) < 4 * (s**2).std() / 200


def test_second_moment_of_dependent_blocks():
    generator = np.random.default_rng(4)
    z = generator.normal(size=3) + 1j * generator.normal(size=3)
    phase = generator.normal(size=(500, 1)) * np.array([1.0, 1.0, -2.0])
    turned = np.exp(1j * phase)
    s = (z * turned).sum(axis=1).real / np.sqrt(6)
    together, apart = turned.T @ turned / 500, turned.T @ turned.conj() / 500
    assert theory.score_square_mean(z, together, apart, 6) == pytest.approx(
        (s**2).mean(), rel=1e-12
    )
    c1, c2 = theory.normal_harmonic([1, 2], 0.7)
    independent = np.full((3, 3), c1**2)
    sums, differences = independent.copy(), independent.copy()
    np.fill_diagonal(sums, c2)
    np.fill_diagonal(differences, 1.0)
    _, square = theory.score_moments(z, np.full(3, c1), np.full(3, c2), 1, 6)
    assert theory.score_square_mean(z, sums, differences, 6) == pytest.approx(square, rel=1e-12)


def test_rope_has_no_window():
    got = theory.rope_mean_cosine([64, 512, 65536], 64)
    assert got == pytest.approx([0.4346, 0.1854, -0.1089], abs=5e-5)
    assert theory.rope_mean_cosine(0, 64) == 1
    omega = 10000.0 ** (-2 * np.arange(32) / 64)
    assert got[1] == pytest.approx(np.mean([np.cos(512 * w) for w in omega]), rel=1e-12)
