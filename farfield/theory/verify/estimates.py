"""T1e: what a finite number of tokens can tell of ρ and of a lag curve."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from farfield import theory
from farfield.theory import counterexamples
from farfield.theory.verify.outcome import (
    Outcome,
    above,
    below,
    identity,
    mean_and_error,
    shrinking,
)


def rates(rng: np.random.Generator) -> Iterator[Outcome]:
    """|ĉ|² and its debiasing, intervals that cover, and the floor when there is no gap to see."""
    sigma, tokens, runs = 0.8, 100, 20_000
    rho = float(np.exp(-(sigma**2) / 2))
    size = np.abs(np.exp(1j * rng.normal(0, sigma, (runs, tokens))).mean(axis=1))
    told = theory.expected_rho_square(rho, tokens)
    yield identity("T1e", "E|ĉ|² of 100 tokens", told, *mean_and_error(size**2))
    fair = theory.debiased_rho_square(size**2, tokens)
    yield identity("T1e", "the same, debiased: ρ²", rho**2, *mean_and_error(fair))
    missed = np.abs(size - rho) > theory.mcdiarmid_radius(tokens, 0.05)
    yield below("T1e", "ρ outside its sure interval, δ = .05", 0.05, *mean_and_error(missed))
    estimate = theory.estimate_rho(rng.normal(0, sigma, (2000, 4000)))
    covered = np.abs(estimate.rho - rho) <= 1.96 * estimate.standard_error
    yield above(
        "T1e", "delta interval covers, T = 2000 (.95 less .01)", 0.94, *mean_and_error(covered)
    )
    sizes, means, errors, high = (4, 32, 256), [], [], []
    for T in sizes:
        none = np.abs(np.exp(1j * rng.uniform(0, 2 * np.pi, (20_000, T))).mean(axis=1))
        mean, error = mean_and_error(none * np.sqrt(T))
        means.append(mean)
        errors.append(error)
        high.append(float(np.quantile(none * np.sqrt(T), 0.95)))
    flat = [theory.null_mean(T) * np.sqrt(T) for T in sizes]
    yield shrinking("T1e", "√T E|ĉ| with no gap: .886", sizes, flat, means, errors)
    flat = [theory.null_quantile(T) * np.sqrt(T) for T in sizes]
    density = np.sqrt(0.05 * 0.95 / 20_000) / (2 * 0.05 * flat[-1])
    yield shrinking("T1e", "√T |ĉ| at 95 % with no gap: 1.731", sizes, flat, high, [density])


def operators(rng: np.random.Generator) -> Iterator[Outcome]:
    """The mean of measured maps: Bernstein's radius, and its floor when E M = 0."""
    tokens, d, runs = 400, 8, 200
    w = rng.standard_normal((runs, tokens, d))
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    mean = np.eye(d) - 2 * np.einsum("rti,rtj->rij", w, w) / tokens
    off = np.linalg.norm(mean - (1 - 2 / d) * np.eye(d), ord=2, axis=(1, 2))
    missed = off > theory.matrix_bernstein_radius(tokens, d, 0.05)
    yield below("T1e", "‖Â − E M‖ outside Bernstein's radius", 0.05, *mean_and_error(missed))
    sizes, norms, errors = (2, 8, 32), [], []
    for size in sizes:
        steps = np.linalg.qr(rng.standard_normal((4, 1000, size, size)))[0]
        steps = steps * rng.choice([-1.0, 1.0], (4, 1000, 1, size))
        norm = np.linalg.norm(steps.mean(axis=1), ord=2, axis=(1, 2)) * np.sqrt(1000)
        value, error = mean_and_error(norm)
        norms.append(value)
        errors.append(error)
    limit = [theory.haar_norm_floor(1000) * np.sqrt(1000)] * 3
    yield shrinking("T1e", "√T ‖mean of T Haar steps‖: 2, as d grows", sizes, limit, norms, errors)


def lags(rng: np.random.Generator) -> Iterator[Outcome]:
    """E|R_n|² of overlapping windows, its large-lag limit, and documents that are not pooled."""
    sigma, tokens, runs = 0.3, 2048, 2000
    rho = float(np.exp(-(sigma**2) / 2))
    turned = np.exp(1j * rng.normal(0, sigma, (runs, tokens)).cumsum(axis=1))
    for n in (10, 50, 200):
        R = (turned[:, n:] * turned[:, :-n].conj()).mean(axis=1)
        told = theory.expected_lag_square(rho, n, tokens - n)
        yield identity("T1e", f"E|R_{n}|², σ = .3", told, *mean_and_error(np.abs(R) ** 2))
    at = (8, 32, 256)
    exact = [theory.lag_noise(rho, n, tokens - n) * (tokens - n) for n in at]
    limit = [(tokens - n) / theory.effective_windows(rho, tokens - n) for n in at]
    yield shrinking("T1e", "N times the floor: N/T_eff", at, limit, [float(e) for e in exact])
    found = counterexamples.pooled_documents(5, 0.1, 0.3, 100_000, rng)
    what = f"a document alone, drift .3 (pooled: {found.believed:.2g})"
    yield identity("T1e", what, found.true, found.measured, found.standard_error)


CHECKS = (rates, operators, lags)
