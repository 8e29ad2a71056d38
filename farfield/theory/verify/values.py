"""T5: what carrying values does to the far part of the output."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from farfield import theory
from farfield.theory import laws
from farfield.theory.stylised import Model, simulate, walked_phases
from farfield.theory.verify.outcome import (
    Outcome,
    above,
    below,
    identity,
    mean_and_error,
    shrinking,
)


def _sums(
    law: laws.Rotations, weights: np.ndarray, routes: int, rng: np.random.Generator, blocks: int = 1
) -> np.ndarray:
    """Σ_n a_n e^{iΦ_n} of each route and plane, n = 1 … M. Shapes: -> complex [routes, B]."""
    walk = walked_phases(law, routes, blocks, laws.Draws(int(rng.integers(2**31))), 1)
    total = np.zeros((routes, blocks), dtype=complex)
    for part in np.array_split(weights, max(1, weights.size * routes * blocks >> 20)):
        phase = walk(part.size)
        a = torch.from_numpy(part).float()
        real, imag = (torch.einsum("n,rnb->rb", a, wave) for wave in (phase.cos(), phase.sin()))
        total += real.double().numpy() + 1j * imag.double().numpy()
    return total


def powers(rng: np.random.Generator) -> Iterator[Outcome]:
    """T5: E‖F‖² of values left alone and carried, with drift, for any weights, and its bound."""
    M, noise = 1024, 0.5
    flat = np.full(M, 1 / M)
    random = rng.dirichlet(np.ones(200))
    for name, law, a, extra in (
        ("σ = .4, M = 1,024", laws.Normal(0.4), flat, noise),
        ("the same, drift .5", laws.Normal(0.4, 0.5), flat, noise),
        ("σ = .3, random weights", laws.Normal(0.3), random, 0.0),
    ):
        told = theory.value_power(a, [1.0], [complex(law.harmonic(1))], extra)
        xi = rng.standard_normal((4000, 2)) @ np.array([1, 1j]) * np.sqrt(extra / 2)
        F = _sums(law, a, 4000, rng)[:, 0] + np.sqrt((a**2).sum()) * xi
        measured = mean_and_error(np.abs(F) ** 2)
        yield identity("T5", f"E|F|² carried, {name}", told.carried, *measured)
        yield below("T5", "the same, from ρ alone", told.bound, *measured)
    left = theory.value_power(flat, [1.0], [0.5], noise).left
    xi = rng.standard_normal((4000, 2)) @ np.array([1, 1j]) * np.sqrt(noise / 2)
    F = 1 + np.sqrt((flat**2).sum()) * xi
    yield identity("T5", "E|F|² left alone", left, *mean_and_error(np.abs(F) ** 2))
    sizes = (16, 256, 65536)
    c = np.exp(-0.08)
    linear = theory.asymptotic_gain(c, sizes)
    exact = [float(theory.uniform_gain(c, size)) for size in sizes]
    yield shrinking("T5", "gain ≈ M(1 − ρ)/(1 + ρ)", sizes, linear, exact)


def directions(rng: np.random.Generator) -> Iterator[Outcome]:
    """T5: the covariance in every direction, the mean, and values made from their step's token."""
    M, w = 256, 10
    sigma = np.array([0.3, 0.5, 0.8, 1.2])
    rho, power, noise = np.exp(-(sigma**2) / 2), np.array([1.0, 0.5, 2.0, 1.0]), np.full(4, 0.25)
    a = np.full(M, 1 / M)
    xi = rng.standard_normal((4000, 4, 2)) @ np.array([1, 1j]) * np.sqrt(noise / 2)
    F = np.sqrt(power) * _sums(laws.Normal(sigma), a, 4000, rng, 4) + xi / np.sqrt(M)
    bound = theory.covariance_bound(a, power, rho, noise)
    parts = np.concatenate([F.real, F.imag], axis=1)
    spread = (parts - parts.mean(axis=0)) ** 2
    worst = int(spread.mean(axis=0).argmax())
    yield below(
        "T5", "variance in the worst direction of 8", bound, *mean_and_error(spread[:, worst])
    )
    walk = walked_phases(laws.Normal(0.5), 100_000, 1, laws.Draws(int(rng.integers(2**31))), w)
    mean = (walk(40)[..., 0].cos().sum(1) / 40).numpy()
    limit = theory.mean_output_bound(1 / 40, 1.0, float(np.exp(-0.125)), w)
    yield below("T5", "|E F| of 40 far keys, w = 10", limit, *mean_and_error(mean))
    yield _content_coupled(rng)


def _content_coupled(rng: np.random.Generator) -> Outcome:
    """v_n = 1 + cos θ + i sin θ of the key token's own θ, which the route does not contain."""
    R, M, sigma = 20_000, 40, 0.6
    theta = rng.normal(0, sigma, (R, M + 1))
    a = np.full(M, 1 / M)
    # Key n tokens back: its route takes the n steps after it, its value is made from its own.
    route = np.exp(1j * theta[:, :M].cumsum(axis=1))
    v = 1 + np.exp(1j * theta[:, 1:])
    F = (a * route * v).sum(axis=1)
    c1 = np.exp(-(sigma**2) / 2)
    mean, square = 1 + c1, 2 + 2 * c1
    coupling = c1 + 1.0  # E[e^{iθ} v̄] = E[e^{iθ}(1 + e^{−iθ})]
    told = theory.content_coupled_power(a, [c1], [mean], [coupling], square)
    what = "E|F|², values made from the token of their step"
    return identity("T5", what, told, *mean_and_error(np.abs(F) ** 2))


def maps(rng: np.random.Generator) -> Iterator[Outcome]:
    """T5′: steps that need not commute."""
    cases: tuple[tuple[str, laws.Maps, int], ...] = (
        ("reflections, d = 16", laws.Householder(16), 128),
        ("Cayley steps, d = 16", laws.Cayley(16, 0.1), 64),
    )
    for name, law, M in cases:
        draws = laws.Draws(int(rng.integers(2**31)))
        routes = torch.eye(16).expand(2000, 16, 16)
        total = torch.zeros(2000, 16, 16)
        for _ in range(M):
            routes = law.extend(routes, draws)
            total += routes / M
        # Every axis is a μ: their powers are averaged, route by route.
        measured, error = mean_and_error(total.square().sum(dim=(1, 2)).numpy() / 16)
        told, off = _carried(law, M, draws)
        yield identity("T5′", f"E|F|², {name}", told.carried, measured, float(np.hypot(error, off)))
        yield below("T5′", "the same, from ρ alone", told.bound, measured, error)


def _carried(law: laws.Maps, M: int, draws: laws.Draws) -> tuple[theory.ValuePower, float]:
    """The power at ρ, and what the error of a measured ρ moves it by. E M = ρI: no axis is
    preferred."""
    a = np.full(M, 1 / M)
    if isinstance(law, laws.Householder):
        return theory.value_power(a, [1.0], [float(theory.householder_rate(law.head_dim))]), 0.0
    d = law.head_dim
    steps = law.extend(torch.eye(d).expand(20_000, d, d), draws)
    rho, error = mean_and_error(steps.diagonal(dim1=1, dim2=2).mean(1).numpy())
    told, moved = (theory.value_power(a, [1.0], [each]) for each in (rho, rho + error))
    return told, abs(moved.carried - told.carried)


def coupled(rng: np.random.Generator) -> Iterator[Outcome]:
    """T5″: when softmax sees the phases that values are carried by."""
    x, sigma = np.full(8, 0.5), 0.4
    model = Model(laws.Normal(sigma), x, 30, 4.0, "shared", mean_power=1.0, noise_power=0.0)
    moments = np.outer(theory.normal_harmonic(np.arange(1, 40), sigma), np.ones(8))
    sizes = (64, 1024, 16384)
    found = [
        run.far_power(True)
        for run in simulate(model, [30 + M for M in sizes], 300, int(rng.integers(2**31)))
    ]
    told = [theory.coupled_power(M, x, moments).mean() for M in sizes]
    yield shrinking(
        "T5″", "far power, keys share a direction", sizes, told, *zip(*found, strict=True)
    )
    floor = theory.coupling_floor(0.5)
    yield above("T5″", "the same against its floor κ²", floor, *found[-1])


CHECKS = (powers, directions, maps, coupled)
