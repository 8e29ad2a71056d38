"""T2: how far one far score strays, and the largest of many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from farfield import theory
from farfield.theory import counterexamples, laws
from farfield.theory.stylised import walked_phases
from farfield.theory.verify.outcome import (
    Outcome,
    below,
    identity,
    mean_and_error,
    shrinking,
)


def _share(rng: np.random.Generator, count: int, d: int) -> np.ndarray:
    """q·Pk/(|q||k|) under a Haar transport: a coordinate of a uniform direction."""
    first = rng.standard_normal(count)
    return first / np.sqrt(first**2 + rng.chisquare(d - 1, count))


def sphere(rng: np.random.Generator) -> Iterator[Outcome]:
    """T2a: the exact law of a coordinate, its two bounds, and the threshold over M keys."""
    d, count = 64, 1_000_000
    X = np.abs(_share(rng, count, d))
    for t in (0.1, 0.3):
        beyond = mean_and_error(t <= X)
        yield identity("T2a", f"P(|X| ≥ {t}), d = 64", theory.haar_tail(t, d), *beyond)
        yield below(
            "T2a", "the same, (1 − t²)^((d−1)/2)", theory.haar_tail(t, d, "closed"), *beyond
        )
        yield below("T2a", "the same, 2e^(−dt²/2)", theory.haar_tail(t, d, "levy"), *beyond)
    keys, S = 2000, 8.0
    largest = S * X.reshape(-1, keys).max(axis=1)
    for bound in ("exact", "closed", "levy"):
        tau = theory.haar_threshold(keys, 0.05, d, S, bound)
        told = mean_and_error(largest > tau)
        yield below("T2a", f"P(one of 2,000 > τ = {tau:.2f}, {bound})", 0.05, *told)


def reflections(rng: np.random.Generator) -> Iterator[Outcome]:
    """T2a′: E X² after n reflections, Chebyshev, and the sphere's law after many."""
    d, draws = 16, laws.Draws(int(rng.integers(2**31)))
    law, routes = laws.Householder(d), torch.eye(d).expand(20_000, d, d)
    sizes, tails, errors = (4, 64), [], []
    for n in range(1, 65):
        routes = law.extend(routes, draws)
        if n == 8:
            # Every coordinate axis is a q ∥ k; routes are independent, their axes are not.
            square = routes.diagonal(dim1=1, dim2=2).square().mean(1).numpy()
            gamma = theory.householder_gamma2(d)
            told = theory.score_square_bound(8, d, gamma)
            yield identity(
                "T2a′", "E X² after 8 reflections, d = 16", told, *mean_and_error(square)
            )
            wide = routes[:, 0, 0].abs().numpy() >= 0.8
            told = theory.chebyshev_tail(0.8, 8, d, gamma)
            yield below("T2a′", "P(|X| ≥ .8), Chebyshev", told, *mean_and_error(wide))
        if n in sizes:
            beyond = (routes.diagonal(dim1=1, dim2=2).abs() >= 0.4).double().mean(1).numpy()
            mean, error = mean_and_error(beyond)
            tails.append(mean)
            errors.append(error)
    limit = [theory.haar_tail(0.4, d)] * 2
    what = "P(|X| ≥ .4) of reflections nears Haar's"
    yield shrinking("T2a′", what, sizes, limit, tails, errors)


def planes(rng: np.random.Generator) -> Iterator[Outcome]:
    """T2b: Hoeffding over blocks at any n, uniform phases, unequal blocks, one angle for all."""
    B, n, count = 32, 10, 50_000
    r = np.full(B, 2.0)
    rho = np.full(B, np.exp(-0.08))
    draws = laws.Draws(int(rng.integers(2**31)))
    phase = walked_phases(laws.Normal(0.4), count, B, draws, n)(1)[:, 0].double().numpy()
    off = np.abs((r * np.cos(phase)).sum(axis=1) - (r * rho**n).sum())
    for t in (15.0, 25.0):
        told = mean_and_error(off >= t)
        yield below(
            "T2b", f"P(|√d s − mean| ≥ {t:g}) after 10 steps", theory.block_tail(t, r), *told
        )
    uniform = np.cos(rng.uniform(0, 2 * np.pi, (count, B)))
    told = mean_and_error(np.abs(uniform @ r) >= 20.0)
    yield below("T2b", "P(|√d s| ≥ 20), uniform", theory.block_tail(20.0, r, "uniform"), *told)
    spiked = np.append(10.0, np.ones(31))
    told = mean_and_error(np.abs(uniform @ spiked) >= 0.4 * spiked.sum())
    bound = 2 * np.exp(-theory.effective_blocks(spiked) * 0.4**2)
    yield below("T2b", "P(|s| ≥ .4 s_max), one block of 10, B_eff", bound, *told)
    keys = 1000
    largest = np.abs(uniform.reshape(-1, keys, B) @ r).max(axis=1) / 8
    tau = theory.block_threshold(keys, 0.05, r, 64, "uniform")
    yield below("T2b", f"P(one of 1,000 > τ = {tau:.2f})", 0.05, *mean_and_error(largest > tau))
    found = counterexamples.one_angle_head(0.4, B, 100_000, rng)
    what = f"one angle drives all blocks (believed ≤ {found.believed:.2g})"
    yield identity("T2b", what, found.true, found.measured, found.standard_error)


CHECKS = (sphere, reflections, planes)
