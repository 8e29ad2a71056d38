"""Tails and thresholds against quadrature, samples, and each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from farfield import theory

R = np.full(32, 2.0)


def test_vectors_of_the_haar_tail():
    assert theory.haar_tail(0.3, 64) == pytest.approx(0.0151841316105, rel=1e-11)
    assert theory.haar_tail(0.3, 64, "closed") == pytest.approx(0.05126298109671, rel=1e-12)
    assert theory.haar_tail(0.3, 64, "levy") == pytest.approx(0.1122695256683, rel=1e-12)
    assert theory.haar_tail([0.1, 0.45], 64) == pytest.approx([0.42803, 1.6928e-4], rel=5e-5)
    assert theory.haar_tail([0.1, 0.45], 64, "closed") == pytest.approx(
        [0.72863, 8.03e-4], rel=1e-3
    )
    assert theory.haar_tail([0.1, 0.45], 64, "levy") == pytest.approx([1.4523, 3.07e-3], rel=1e-3)
    assert theory.haar_tail(0.6, 16) == pytest.approx(0.010890, abs=5e-7)


def test_vectors_of_the_thresholds():
    known = {"exact": 4.551356676609, "closed": 4.803795284373, "levy": 5.436770060077}
    for bound, expected in known.items():
        assert theory.haar_threshold(65536, 0.05, 64, 8, bound) == pytest.approx(
            expected, rel=1e-12
        )
    assert theory.block_threshold(65536, 0.05, R, 64) == pytest.approx(7.688753954464, rel=1e-12)
    sharp = theory.block_threshold(65536, 0.05, R, 64, "uniform")
    assert sharp == pytest.approx(5.436770060077, rel=1e-12)
    biased = theory.block_threshold(65536, 0.05, R, 64, rho=np.exp(-0.08), near_window=29)
    assert biased == pytest.approx(8.474942639299, rel=1e-12)
    assert theory.effective_blocks([10.0] + [1.0] * 31) == pytest.approx(12.83206106870, rel=1e-12)


@pytest.mark.parametrize("d", [2, 3, 5, 64])
@pytest.mark.parametrize("t", [0.0, 0.05, 0.5, 0.9, 1.0])
def test_the_haar_tail_is_an_integral(d, t):
    if d == 2:
        expected = 2 / np.pi * np.arccos(t)
    else:
        area = special.beta(0.5, (d - 1) / 2)
        expected = 2 * integrate.quad(lambda x: (1 - x * x) ** ((d - 3) / 2), t, 1)[0] / area
    assert theory.haar_tail(t, d) == pytest.approx(expected, rel=1e-7, abs=1e-14)
    assert theory.haar_tail(1.5, d) == 0


@given(st.integers(2, 500), st.floats(0, 1))
def test_each_haar_bound_is_above_the_one_before(d, t):
    exact, closed, levy = (theory.haar_tail(t, d, kind) for kind in ("exact", "closed", "levy"))
    assert exact <= closed * (1 + 1e-12)
    assert closed <= levy


@given(st.integers(1, 10**9), st.floats(1e-6, 0.5), st.integers(2, 256))
def test_thresholds_invert_their_tails(M, delta, d):
    for kind in ("exact", "closed", "levy"):
        share = theory.haar_threshold(M, delta, d, 1.0, kind)
        # Bracketed, not compared: near share 1 the tail has no digits left to compare.
        below, above = theory.haar_tail([share * (1 - 1e-9), share * (1 + 1e-9)], d, kind)
        assert below >= delta / M * (1 - 1e-9)
        assert above <= delta / M * (1 + 1e-9) or (kind == "levy" and share == 1)
    r = np.linspace(0.5, 2, 7)
    for kind in ("hoeffding", "uniform"):
        t = theory.block_threshold(M, delta, r, 4, kind) * 2
        assert theory.block_tail(t, r, kind) == pytest.approx(delta / M, rel=1e-9)


def test_no_key_has_no_threshold():
    assert theory.haar_threshold(0, 0.1, 8, 1) == -np.inf
    assert theory.block_threshold(0, 0.1, R, 64) == -np.inf
    assert theory.haar_threshold([1, 10**9], 0.1, 8, 0.0).tolist() == [0, 0]


def test_the_haar_law_is_that_of_a_coordinate():
    x = np.random.default_rng(12).normal(size=(40_000, 8))
    x = np.abs(x[:, 0]) / np.linalg.norm(x, axis=1)
    for t in (0.1, 0.4, 0.7):
        p = theory.haar_tail(t, 8)
        assert abs((x >= t).mean() - p) < 4 * np.sqrt(p * (1 - p) / 40_000)


@pytest.mark.parametrize("n", [1, 3, 30])
def test_block_tails_hold_at_any_distance(n):
    generator = np.random.default_rng(n)
    r = generator.uniform(0.5, 2, 6)
    sigma = np.linspace(0.1, 1.5, 6)
    phase = generator.normal(0, sigma * np.sqrt(n), size=(40_000, 6))
    score = np.cos(phase) @ r
    mean = (r * np.exp(-n * sigma**2 / 2)).sum()
    for t in (0.5, 2.0, 4.0):
        measured = np.mean(np.abs(score - mean) >= t)
        assert measured <= theory.block_tail(t, r) + 4 * np.sqrt(0.25 / 40_000)
    uniform = np.cos(generator.uniform(0, 2 * np.pi, size=(40_000, 6))) @ r
    for t in (0.5, 2.0, 4.0):
        measured = np.mean(np.abs(uniform) >= t)
        assert measured <= theory.block_tail(t, r, "uniform") + 4 * np.sqrt(0.25 / 40_000)


def test_blocks_that_turn_together_do_not_concentrate():
    assert theory.single_block_tail(0.4) == pytest.approx(0.738, abs=5e-4)
    assert theory.block_tail(0.4 * 16, np.ones(16), "uniform") == pytest.approx(0.155, abs=5e-4)
    assert theory.single_block_tail([0, 1]) == pytest.approx([1, 0])
    generator = np.random.default_rng(13)
    angle = generator.normal(size=(2000, 1))
    theta = np.hstack([angle, angle, -angle, generator.normal(size=(2000, 1))])
    coherence = theory.cross_block_coherence(theta)
    assert coherence[:3, :3] == pytest.approx(np.ones((3, 3)))
    assert coherence[3, 0] == pytest.approx(np.exp(-1), abs=0.06)  # ρ_b ρ_c: they are independent


def test_householder_second_moment():
    generator = np.random.default_rng(14)
    d, n, R_ = 6, 4, 40_000
    x = np.tile(np.eye(d)[0], (R_, 1))
    steps = np.empty((0, d, d))
    for _ in range(n):
        w = generator.normal(size=(R_, d))
        w /= np.linalg.norm(w, axis=1, keepdims=True)
        x = x - 2 * w * (w * x).sum(axis=1, keepdims=True)
        steps = np.eye(d) - 2 * w[:, :, None] * w[:, None, :]
    square = x[:, 0] ** 2
    gamma2 = theory.householder_gamma2(d)
    expected = theory.score_square_bound(n, d, gamma2)
    assert abs(square.mean() - expected) < 4 * square.std() / np.sqrt(R_)
    assert theory.empirical_gamma2(steps) == pytest.approx(gamma2, abs=0.02)
    assert np.mean(np.abs(x[:, 0]) >= 0.8) <= theory.chebyshev_tail(0.8, n, d, gamma2)
    assert theory.score_square_bound(8, 16, 14 / 18) == pytest.approx(0.18805, abs=5e-6)


def test_gamma2_by_definition():
    generator = np.random.default_rng(15)
    M = np.linalg.qr(generator.normal(size=(7, 4, 4)))[0]
    K = generator.normal(size=(2000, 4, 4))
    K = K + K.transpose(0, 2, 1)
    K -= np.trace(K, axis1=1, axis2=2)[:, None, None] * np.eye(4) / 4
    image = np.einsum("tij,rjk,tlk->ril", M, K, M) / 7
    ratio = np.linalg.norm(image, axis=(1, 2)) / np.linalg.norm(K, axis=(1, 2))
    gamma2 = theory.empirical_gamma2(M)
    assert ratio.max() <= gamma2 + 1e-12
    assert ratio.max() > 0.8 * gamma2
    assert theory.empirical_gamma2(np.eye(4)[None]) == pytest.approx(1)
    assert theory.chebyshev_tail(0.0, 1, 4, 0.5) == 1
