"""What is easily believed about decay and is false, as experiments that can be run.

Each function draws samples from a generator and returns a `Counterexample`: what the belief says,
what is true, and what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farfield.theory import checks
from farfield.theory.checks import Floats
from farfield.theory.concentration import single_block_tail
from farfield.theory.dependence import markov_mean, pooled_rate, shared_difference_mean


@dataclass(frozen=True)
class Counterexample:
    """A belief, what it says of one quantity, what is true of it, and a measurement.

    Units: those of the quantity. `standard_error` is that of `measured`; 0 where it is the same on
    every path.
    """

    belief: str
    believed: float
    true: float
    measured: float
    standard_error: float


def _size(samples: int, steps: int, name: str = "steps") -> tuple[int, int]:
    n = int(checks.counts(name, steps, least=1))
    return int(checks.counts("samples", samples, least=2)), n


def _of_mean(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _of_modulus(angles: Floats) -> tuple[float, float]:
    """|mean e^{iΦ}| with its delta-method standard error."""
    mean = np.exp(1j * angles).mean()
    spread = np.cos(angles - np.angle(mean)).std(ddof=1)
    return float(abs(mean)), float(spread / np.sqrt(len(angles)))


def sign_flips(steps: int, samples: int, generator: np.random.Generator) -> Counterexample:
    """M = ±I with even odds: E M = 0, and |q·Pk| never shrinks.

    Shapes: E|q·Pk|/|q·k| over `samples` paths. Raises: ValueError for steps < 1, samples < 2.
    Source: docs/theory.md, T1c.
    """
    count, n = _size(samples, steps)
    signs = generator.choice([-1.0, 1.0], size=(count, n)).prod(axis=1)
    measured, error = _of_mean(np.abs(signs))
    return Counterexample("E M = 0 makes scores small", 0.0, 1.0, measured, error)


def right_angle_turns(steps: int, samples: int, generator: np.random.Generator) -> Counterexample:
    """θ = ±π/2 with even odds: c_1 = 0 and |c_2| = 1, so E cos²Φ_n is 1 at even n and 0 at odd.

    Shapes: mean of cos²Φ_n over `samples` paths. Raises: ValueError for steps < 1, samples < 2.
    Source: docs/theory.md, T1c.
    """
    count, n = _size(samples, steps)
    phase = np.pi / 2 * generator.choice([-1.0, 1.0], size=(count, n)).sum(axis=1)
    measured, error = _of_mean(np.cos(phase) ** 2)
    return Counterexample("c_1 = 0 makes phases uniform", 0.5, float(n % 2 == 0), measured, error)


def shared_token(
    steps: int, sigma: float, samples: int, generator: np.random.Generator
) -> Counterexample:
    """The query undoes its own token's step: |E e^{iΦ}| = ρ^{n−1}, not ρ^n, for N(0, σ²) angles.

    Shapes: modulus of a mean over `samples` paths. Raises: ValueError for steps < 1, σ < 0.
    Source: docs/theory.md, T1 (shared token).
    """
    count, n = _size(samples, steps)
    scale = float(checks.nonnegative("sigma", sigma))
    angles = generator.normal(0.0, scale, size=(count, n))
    measured, error = _of_modulus(angles.sum(axis=1) - angles[:, -1])
    rate = np.exp(-(scale**2) / 2)
    belief = "q made from token i leaves the exponent n"
    return Counterexample(belief, float(rate**n), float(rate ** (n - 1)), measured, error)


def alternating_chain(
    steps: int, flip: float, angle: float, samples: int, generator: np.random.Generator
) -> Counterexample:
    """Two states ±a that change with probability p: a marginal gap, and a far slower true rate.

    Shapes: |E e^{iΦ_n}| over `samples` stationary paths. Raises: ValueError for p outside [0, 1].
    Source: docs/theory.md, T1d.
    """
    count, n = _size(samples, steps)
    p = float(checks.rates("flip", flip))
    start = generator.choice([-1.0, 1.0], size=(count, 1))
    flips = np.where(generator.random((count, n - 1)) < p, -1.0, 1.0)
    states = np.cumprod(np.hstack([start, flips]), axis=1)
    measured, error = _of_modulus(angle * states.sum(axis=1))
    chain = [[1 - p, p], [p, 1 - p]]
    true = abs(complex(markov_mean(chain, [angle, -angle], n, initial=[0.5, 0.5])))
    belief = "a marginal gap makes dependent steps decay as ρ^n"
    return Counterexample(belief, float(abs(np.cos(angle)) ** n), true, measured, error)


def undoing_history(
    steps: int, sigma: float, samples: int, generator: np.random.Generator
) -> Counterexample:
    """θ_n = −Φ_{n−1} + N(0, σ²): ‖E[M_n | past]‖ = ρ always, and |E e^{iΦ_n}| = ρ for every n.

    Shapes: modulus of a mean over `samples` paths. Raises: ValueError for steps < 1, σ < 0.
    Source: docs/theory.md, T1d.
    """
    count, n = _size(samples, steps)
    scale = float(checks.nonnegative("sigma", sigma))
    phase = np.zeros(count)
    for _ in range(n):
        phase = phase + (-phase + generator.normal(0.0, scale, size=count))
    measured, error = _of_modulus(phase)
    rate = float(np.exp(-(scale**2) / 2))
    return Counterexample("a gap given the past is enough", rate**n, rate, measured, error)


def telescoping_steps(
    steps: int, sigma: float, samples: int, generator: np.random.Generator
) -> Counterexample:
    """θ_n = g_n − g_{n−1}: strongly mixing, marginal rate e^{−σ²}, and |E e^{iΦ_n}| stays there.

    Shapes: modulus of a mean over `samples` paths. Raises: ValueError for steps < 1, σ < 0.
    Source: docs/theory.md, T1d.
    """
    count, n = _size(samples, steps)
    scale = float(checks.nonnegative("sigma", sigma))
    g = generator.normal(0.0, scale, size=(count, n + 1))
    measured, error = _of_modulus(np.diff(g, axis=1).sum(axis=1))
    rate = float(shared_difference_mean(np.exp(-(scale**2) / 2)))
    belief = "strong mixing and a marginal gap are enough"
    return Counterexample(belief, rate**n, rate, measured, error)


def pooled_documents(
    lag: int, sigma: float, drift: float, samples: int, generator: np.random.Generator
) -> Counterexample:
    """Documents that drift by ±μ: pooled, |R_n| seems to vanish; each alone keeps e^{−nσ²/2}.

    `believed` is the pooled rate. Shapes: modulus over `samples` windows of one document.
    Raises: ValueError for lag < 1, σ < 0. Source: docs/theory.md, T1e.
    """
    count, n = _size(samples, lag, "lag")
    scale = float(checks.nonnegative("sigma", sigma))
    angles = generator.normal(drift, scale, size=(count, n)).sum(axis=1)
    measured, error = _of_modulus(angles)
    rate = np.exp(-(scale**2) / 2)
    pooled = float(pooled_rate(rate, [drift, -drift], n))
    belief = "a small pooled |R_n| means decorrelation"
    return Counterexample(belief, pooled, float(rate**n), measured, error)


def one_angle_head(
    share: float, blocks: int, samples: int, generator: np.random.Generator
) -> Counterexample:
    """One uniform angle drives all blocks: P(|s| ≥ x s_max) = (2/π) arccos x, however many.

    `believed` is the bound 2e^{−Bx²} of independent uniform blocks.
    Shapes: a frequency over `samples` draws. Raises: ValueError for x outside [0, 1], blocks < 1.
    Source: docs/theory.md, T2b (fails).
    """
    count, B = _size(samples, blocks, "blocks")
    x = float(checks.rates("share", share))
    scores = np.cos(generator.uniform(0, 2 * np.pi, size=count))
    measured, error = _of_mean((np.abs(scores) >= x).astype(np.float64))
    believed = min(1.0, 2 * float(np.exp(-B * x**2)))
    true = float(single_block_tail(x))
    return Counterexample("many blocks concentrate", believed, true, measured, error)
