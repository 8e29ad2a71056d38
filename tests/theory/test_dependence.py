"""Dependent steps against enumeration of all paths."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield import theory

FLIP = np.array([[0.1, 0.9], [0.9, 0.1]])


def chain(seed, states):
    generator = np.random.default_rng(seed)
    Q = generator.random((states, states)) + 0.05
    return Q / Q.sum(axis=1, keepdims=True), generator.uniform(-2, 2, states)


def enumerated(Q, theta, n, law):
    total = 0j
    for path in itertools.product(range(len(Q)), repeat=n + 1):
        weight = law[path[0]] * np.prod([Q[a, b] for a, b in itertools.pairwise(path)])
        total += weight * np.exp(1j * sum(theta[s] for s in path[1:]))
    return total


def test_vectors_of_the_alternating_chain():
    assert theory.markov_rate(FLIP, [1, -1]) == pytest.approx(0.9500878547479, rel=1e-12)
    assert abs(theory.markov_mean(FLIP, [1, -1], 20)) == pytest.approx(0.2843666415783, rel=1e-12)
    assert np.cos(1) ** 20 == pytest.approx(4.5e-6, rel=0.01)  # what the marginal would say


@pytest.mark.parametrize("states", [2, 3])
def test_markov_mean_is_the_sum_over_paths(states):
    Q, theta = chain(states, states)
    law = theory.stationary_law(Q)
    assert law @ Q == pytest.approx(law, abs=1e-14)
    first = np.eye(states)[0]
    for n in range(5):
        assert theory.markov_mean(Q, theta, n) == pytest.approx(enumerated(Q, theta, n, law))
        given_start = theory.markov_mean(Q, theta, n, initial=first)
        assert given_start == pytest.approx(enumerated(Q, theta, n, first))


def test_markov_rate_is_how_fast_the_mean_falls():
    Q, theta = chain(7, 4)
    means = np.abs(theory.markov_mean(Q, theta, [100, 101]))
    assert means[1] / means[0] == pytest.approx(theory.markov_rate(Q, theta), rel=1e-6)
    assert theory.markov_mean(np.eye(1), [1.0], 10**9) == pytest.approx(np.exp(1e9j), abs=1e-6)


def test_independent_steps_are_a_markov_chain():
    p, theta = np.array([0.2, 0.5, 0.3]), np.array([0.3, -1.0, 2.0])
    c = (p * np.exp(1j * theta)).sum()
    Q = np.tile(p, (3, 1))
    assert theory.markov_rate(Q, theta) == pytest.approx(abs(c))
    assert theory.two_sided_rate(Q, theta) == pytest.approx(abs(c))
    assert theory.markov_mean(Q, theta, 6) == pytest.approx(c**6)


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(0, 12))
def test_the_two_sided_bound_holds(seed, states, n):
    Q, theta = chain(seed, states)
    bound = theory.two_sided_bound(theory.two_sided_rate(Q, theta), n)
    assert abs(theory.markov_mean(Q, theta, n)) <= bound + 1e-12


def test_the_two_sided_rate_by_definition():
    Q, theta = chain(3, 3)
    largest = 0.0
    for x, z in itertools.product(range(3), repeat=2):
        weights = Q[x] * Q[:, z]
        largest = max(largest, abs((weights * np.exp(1j * theta)).sum() / weights.sum()))
    assert theory.two_sided_rate(Q, theta) == pytest.approx(largest, rel=1e-12)
    cycle = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert theory.two_sided_rate(cycle, [1, 2, 3]) == pytest.approx(1)


@given(st.floats(0, 1), st.floats(0, 0.5), st.integers(0, 60))
def test_perturbed_bound_is_its_recursion(rho, delta, n):
    norm = 1.0
    for _ in range(n):
        norm = rho * norm + delta
    assert theory.perturbed_bound(rho, delta, n) == pytest.approx(norm, rel=1e-11)


def test_perturbed_bound_limits():
    assert theory.perturbed_bound(1.0, 0.01, 50) == pytest.approx(1.5)
    assert theory.perturbed_bound(0.5, 0.0, 10**9) == 0
    assert theory.perturbed_bound(0.0, 0.1, [0, 1, 2]) == pytest.approx([1, 0.1, 0.1])


def test_pooling_hides_what_documents_keep():
    rho = theory.normal_harmonic(1, 0.1).real
    assert rho**5 == pytest.approx(0.975, abs=5e-4)
    assert theory.pooled_rate(rho, [0.3, -0.3], 5) == pytest.approx(0.069, abs=5e-4)
    assert theory.shared_difference_mean(np.exp(-0.125)) == pytest.approx(0.7788, abs=5e-5)
