"""Steps that depend on each other, where a marginal gap is not enough: T1d.

Content makes steps dependent. What still decays: a Markov chain whose twisted kernel has a gap, a
chain gapped given both neighbours, and steps whose conditional mean is nearly one matrix. What need
not: `farfield.theory.counterexamples`. Measure the lag curve (`farfield.theory.estimation`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farfield.theory import checks
from farfield.theory.checks import Complexes, Floats, Reals, plain
from farfield.theory.series import geometric_sum, power

_STOCHASTIC_SLACK = 1e-9


def _chain(transition: Reals, theta: Reals) -> tuple[Floats, Floats]:
    Q, angles = checks.rates("transition", transition), checks.reals("theta", theta)
    if Q.ndim != 2:
        checks.refuse("transition", f"an array of shape {Q.shape}", "one square matrix [S, S]")
    checks.square("transition", Q)
    checks.matching(transition=Q, theta=angles)
    if (np.abs(Q.sum(axis=1) - 1) > _STOCHASTIC_SLACK).any():
        checks.refuse("transition", Q.sum(axis=1), "rows that sum to 1")
    return Q, angles


def stationary_law(transition: Reals) -> Floats:
    """π with π Q = π, of a chain that has only one.

    Shapes: transition [S, S], rows sum to 1 -> [S]. Units: –.
    Raises: ValueError for rows that don't sum to 1, or more than one stationary law.
    Source: docs/theory.md, T1d.
    """
    Q, _ = _chain(transition, np.zeros(np.shape(transition)[-1:] or 1))
    _, sizes, right = np.linalg.svd(Q.T - np.eye(len(Q)))
    if len(Q) > 1 and sizes[-2] < 1e-12:
        checks.refuse("transition", Q, "a chain with one stationary law; pass `initial`")
    return np.asarray(right[-1] / right[-1].sum())


def markov_rate(transition: Reals, theta: Reals) -> float:
    """The spectral radius of Q D, D = diag(e^{iθ}): the true rate at which E e^{iΦ_n} decays.

    Θ is θ(y) on the state y entered at each token. The marginal |Σ π e^{iθ}| may be far smaller
    (two states ±1 rad that mostly alternate: .540 against .950) or larger.

    Shapes: transition Q [S, S], theta [S]. Units: radians -> per token.
    Raises: ValueError for rows that don't sum to 1, differing numbers of states.
    Source: docs/theory.md, T1d.
    """
    Q, angles = _chain(transition, theta)
    return float(np.abs(np.linalg.eigvals(Q * np.exp(1j * angles))).max())


def markov_mean(
    transition: Reals, theta: Reals, steps: Reals, initial: Reals | None = None
) -> Complexes | complex:
    """E e^{iΦ_n} = π (Q D)^n 1, exact, at each number of steps n.

    `initial` is the law of the state before the first step; the stationary one if left out.

    Shapes: transition [S, S], theta [S], steps [...], initial [S] -> [...]. Units: radians.
    Raises: ValueError as `markov_rate`, negative steps, `initial` that doesn't sum to 1, or a chain
    with several stationary laws and no `initial`. Source: docs/theory.md, T1d.
    """
    Q, angles = _chain(transition, theta)
    n = checks.counts("steps", steps)
    law = stationary_law(Q) if initial is None else checks.rates("initial", initial)
    checks.matching(initial=law, theta=angles)
    if abs(law.sum() - 1) > _STOCHASTIC_SLACK:
        checks.refuse("initial", law, "probabilities that sum to 1")
    twisted = Q * np.exp(1j * angles)
    means = [(law @ np.linalg.matrix_power(twisted, int(each))).sum() for each in n.ravel()]
    return plain(np.reshape(means, n.shape))


def two_sided_rate(transition: Reals, theta: Reals) -> float:
    """ρ̃ = sup_{x,z} |E[e^{iθ_t} | x_{t−1} = x, x_{t+1} = z]|, over pairs that can occur.

    Σ_y Q(x, y) e^{iθ(y)} Q(y, z)/Q²(x, z). It is 1 as soon as some pair leaves one state between.

    Shapes: transition [S, S], theta [S]. Units: radians -> per two tokens.
    Raises: ValueError as `markov_rate`. Source: docs/theory.md, T1d (two-sided).
    """
    Q, angles = _chain(transition, theta)
    two = Q @ Q
    mean = (Q * np.exp(1j * angles)) @ Q
    possible = two > 0
    return float(np.minimum(np.abs(mean[possible]) / two[possible], 1.0).max())


def two_sided_bound(rho: Reals, steps: Reals) -> Floats | float:
    """|E e^{iΦ_n}| ≤ ρ̃^{⌊n/2⌋} for Markov chains gapped given both neighbours.

    Condition on the odd sites: the even ones are then independent.

    Shapes: broadcast. Units: tokens. Fails for ρ̃ that is only a marginal rate.
    Raises: ValueError for ρ̃ outside [0, 1], negative steps.
    Source: docs/theory.md, T1d (two-sided).
    """
    half = np.floor(checks.counts("steps", steps) / 2)
    return plain(power(checks.rates("rho", rho), half))


def perturbed_bound(rho: Reals, delta: Reals, steps: Reals) -> Floats | float:
    """‖E P_n‖ ≤ ρ^n + δ(1 − ρ^n)/(1 − ρ) when E[M_t | past] = A + Δ_t, ‖A‖ ≤ ρ, E‖Δ_t‖ ≤ δ.

    1 + nδ at ρ = 1; above 1 it says nothing. The past must leave nearly one matrix: a bound
    ‖E[M_t | past]‖ ≤ ρ alone is not enough (`undoing_history`).

    Shapes: broadcast. Units: per token. Raises: ValueError for ρ outside [0, 1], δ < 0, negative
    steps. Source: docs/theory.md, T1d (perturbed).
    """
    p, n = checks.rates("rho", rho), checks.counts("steps", steps)
    drift = checks.nonnegative("delta", delta)
    return plain(power(p, n) + drift * np.asarray(geometric_sum(p, n)))


def shared_difference_mean(g_harmonic: npt.ArrayLike) -> Floats | float:
    """|E e^{iΦ_n}| = |E e^{ig}|² for every n ≥ 1, of θ_n = g_n − g_{n−1}, g independent and alike.

    1-dependent, strongly mixing, with the same marginal rate |E e^{ig}|², and yet no decay at all.

    Shapes: g_harmonic E e^{ig} [...] -> [...]. Units: –. Raises: ValueError for |c| > 1.
    Source: docs/theory.md, T1d.
    """
    return plain(np.abs(checks.harmonics("g_harmonic", g_harmonic)) ** 2)


def pooled_rate(rho: Reals, drifts: Reals, lag: Reals) -> Any:
    """ρ^n |mean_s e^{inμ_s}|: the |R_n| of sequences with drifts μ_s, pooled before the modulus.

    Fakes decorrelation: each sequence alone keeps ρ^n. Take the modulus per sequence.

    Shapes: rho [...], drifts [..., S], lag [...] -> [...]. Units: radians per token, tokens.
    Raises: ValueError for ρ outside [0, 1], a negative lag. Source: docs/theory.md, T1e.
    """
    n, mu = checks.counts("lag", lag), checks.reals("drifts", drifts)
    checks.vector("drifts", mu)
    turned = np.abs(np.exp(1j * n[..., None] * mu).mean(axis=-1))
    return plain(power(checks.rates("rho", rho), n) * turned)
