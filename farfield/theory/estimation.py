"""What T measured tokens can say about ρ, and a lag curve when nothing is left: T1e.

|ĉ| of T angles is biased upwards by noise: with no gap to see, it is about .886/√T. A lag curve
R_n = mean_t e^{i(φ_{t+n} − φ_t)} has overlapping windows, and its floor is higher still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from farfield.algebra import step_measures
from farfield.theory import checks
from farfield.theory.checks import Complexes, Floats, Reals, plain
from farfield.theory.series import geometric_sum, lag_sum, power

NULL_LEVEL = 0.95


def expected_rho_square(rho: Reals, tokens: Reals) -> Floats | float:
    """E|ĉ|² = ρ² + (1 − ρ²)/T, exact for independent angles.

    Shapes: broadcast. Units: –. Raises: ValueError for ρ outside [0, 1], T < 1.
    Source: docs/theory.md, T1e.
    """
    square, T = checks.rates("rho", rho) ** 2, checks.counts("tokens", tokens, least=1)
    return plain(square + (1 - square) / T)


def debiased_rho_square(rho_square: Reals, tokens: Reals) -> Floats | float:
    """(T|ĉ|² − 1)/(T − 1), unbiased for ρ²; negative where noise is all there is.

    Shapes: broadcast. Units: –. Raises: ValueError for |ĉ|² outside [0, 1], T < 2.
    Source: docs/theory.md, T1e.
    """
    square = checks.rates("rho_square", rho_square)
    T = checks.counts("tokens", tokens, least=2)
    return plain((T * square - 1) / (T - 1))


def mcdiarmid_radius(tokens: Reals, delta: Reals) -> Floats | float:
    """|ρ̂ − ρ| ≤ (1 + √(2 ln(1/δ)))/√T with probability 1 − δ, at any T; independent angles.

    Shapes: broadcast. Units: –. Raises: ValueError for T < 1, δ outside (0, 1).
    Source: docs/theory.md, T1e.
    """
    T = checks.counts("tokens", tokens, least=1)
    spread = np.sqrt(-2 * np.log(checks.fractions("delta", delta)))
    return plain((1 + spread) / np.sqrt(T))


def null_mean(tokens: Reals) -> Floats | float:
    """E|ĉ| ≈ √π/2/√T = .886/√T when ρ = 0 (T|ĉ|² is nearly exponential).

    Shapes: [...] -> [...]. Units: –. Raises: ValueError for T < 1. Source: docs/theory.md, T1e.
    """
    return plain(np.sqrt(np.pi) / 2 / np.sqrt(checks.counts("tokens", tokens, least=1)))


def null_quantile(tokens: Reals, level: Reals = NULL_LEVEL) -> Floats | float:
    """√(ln(1/(1 − level)))/√T: what |ĉ| stays below when ρ = 0; 1.731/√T at 95 %.

    Asymptotic in T.

    Shapes: broadcast. Units: –. Raises: ValueError for T < 1, level outside (0, 1).
    Source: docs/theory.md, T1e.
    """
    T = checks.counts("tokens", tokens, least=1)
    return plain(np.sqrt(-np.log1p(-checks.fractions("level", level)) / T))


def matrix_bernstein_radius(tokens: Reals, head_dim: Reals, delta: Reals) -> Floats | float:
    """‖Â − E M‖ ≤ (2Λ/3 + √(4Λ²/9 + 2TΛ))/T with probability 1 − δ, Λ = ln(2d/δ).

    Independent orthogonal steps.

    Shapes: broadcast. Units: –. Raises: ValueError for T < 1, d < 1, δ outside (0, 1).
    Source: docs/theory.md, T1e; Tropp (arXiv 1004.4389), Theorem 1.6.
    """
    T, d = checks.counts("tokens", tokens, least=1), checks.counts("head_dim", head_dim, least=1)
    log = np.log(2 * d / checks.fractions("delta", delta))
    return plain((2 * log / 3 + np.sqrt(4 * log**2 / 9 + 2 * T * log)) / T)


def haar_norm_floor(tokens: Reals) -> Floats | float:
    """‖mean of T Haar steps‖ ≈ 2/√T, though E M = 0: the floor of a measured operator norm.

    An approximation for 1 ≪ d ≪ T (the edge of a Ginibre matrix); a little below it at small d.

    Shapes: [...] -> [...]. Units: –. Raises: ValueError for T < 1. Source: docs/theory.md, T1e.
    """
    return plain(2 / np.sqrt(checks.counts("tokens", tokens, least=1)))


@dataclass(frozen=True)
class RateEstimate:
    """ρ of each block from T angles.

    c ĉ; rho |ĉ|; rho_debiased √max(0, (T|ĉ|² − 1)/(T − 1)); standard_error by the delta method,
    which needs ρ well above the floor; lower, upper by McDiarmid at any T; floor the 95 % quantile
    of |ĉ| when ρ = 0: report ρ only above it.

    Shapes: all [B...], the axes of the angles after the first. Units: –.
    """

    c: Any
    rho: Any
    rho_debiased: Any
    standard_error: Any
    lower: Any
    upper: Any
    floor: Any


def estimate_rho(theta: Reals, delta: float = 0.05) -> RateEstimate:
    """ĉ = mean_t e^{iθ_t} per block, with its interval at 1 − δ and its floor.

    sd(cos(θ − arg ĉ))/√T is the standard error. Independent angles: dependent ones have fewer
    effective tokens, and a marginal rate does not tell their decay (T1d).

    Shapes: theta [T, B...], T ≥ 2. Units: radians. Raises: ValueError for fewer than two tokens,
    NaN, δ outside (0, 1). Source: docs/theory.md, T1e.
    """
    angles = checks.reals("theta", theta)
    if angles.ndim < 1 or len(angles) < 2:
        checks.refuse("theta", f"an array of shape {angles.shape}", "[T, ...] with T ≥ 2")
    T = len(angles)
    c = np.exp(1j * angles).mean(axis=0)
    rho = np.minimum(np.abs(c), 1.0)
    radius = mcdiarmid_radius(T, delta)
    spread = np.cos(angles - np.angle(c)).std(axis=0, ddof=1)
    debiased = np.sqrt(np.maximum(debiased_rho_square(rho**2, T), 0.0))
    return RateEstimate(
        c=plain(c),
        rho=plain(rho),
        rho_debiased=plain(debiased),
        standard_error=plain(spread / np.sqrt(T)),
        lower=plain(np.maximum(rho - radius, 0.0)),
        upper=plain(np.minimum(rho + radius, 1.0)),
        floor=plain(np.full_like(rho, null_quantile(T))),
    )


def lag_noise(rho: Reals, lag: Reals, windows: Reals) -> Floats | float:
    """E|R_n|² − ρ^{2n} = N⁻² Σ_{|h|<min(n,N)} (N − |h|)(ρ^{2|h|} − ρ^{2n}), exact.

    For independent steps: what overlapping windows leave of |R_n|² when ρ^{2n} is taken off. At
    large n it is 1/`effective_windows`.

    Shapes: rho, lag n, windows N broadcast. Units: tokens.
    Raises: ValueError for ρ outside [0, 1], n < 0, N < 1. Source: docs/theory.md, T1e (lag).
    """
    x, n, N = np.broadcast_arrays(
        checks.rates("rho", rho) ** 2,
        checks.counts("lag", lag),
        checks.counts("windows", windows, least=1),
    )
    K = np.minimum(n, N)
    # Σ_{|h|<K} (N − |h|) x^{|h|} = Σ_{|h|<K} (K − |h|) x^{|h|} + (N − K)(2 Σ_{h<K} x^h − 1).
    inner = np.asarray(lag_sum(x, K)) + (N - K) * (2 * np.asarray(geometric_sum(x, K)) - 1)
    pairs = N * (2 * K - 1) - K * (K - 1)
    noise = (inner - power(x, n) * pairs) / N**2
    return plain(np.where(n == 0, 0.0, np.maximum(noise, 0.0)))


def expected_lag_square(rho: Reals, lag: Reals, windows: Reals) -> Floats | float:
    """E|R_n|² = ρ^{2n} + `lag_noise`, exact for independent steps and N overlapping windows.

    Shapes: broadcast. Units: tokens. Raises: ValueError for ρ outside [0, 1], n < 0, N < 1.
    Source: docs/theory.md, T1e (lag).
    """
    n = checks.counts("lag", lag)
    return plain(power(checks.rates("rho", rho) ** 2, n) + lag_noise(rho, n, windows))


def effective_windows(rho: Reals, windows: Reals) -> Floats | float:
    """T_eff = N(1 − ρ²)/(1 + ρ²): how many independent windows N overlapping ones are worth.

    For lags and N well beyond 1/(1 − ρ). 0 at ρ = 1, where the limit is never reached.

    Shapes: broadcast. Units: windows. Raises: ValueError for ρ outside [0, 1], N < 1.
    Source: docs/theory.md, T1e (lag).
    """
    square = checks.rates("rho", rho) ** 2
    return plain(checks.counts("windows", windows, least=1) * (1 - square) / (1 + square))


@dataclass(frozen=True)
class LagCurve:
    """R_n of each sequence and block, with what noise alone would give.

    values R_n; windows N = T − n; rho the debiased one-step rate, pooled over sequences as a
    square; noise E|R_n|² − ρ^{2n} at that rate (`lag_noise`).

    Shapes: lags, windows [n]; values complex [..., n, B]; rho [B]; noise [n, B]. Units: tokens.
    """

    lags: Floats
    windows: Floats
    values: Complexes
    rho: Floats
    noise: Floats

    @property
    def threshold(self) -> Floats:
        """1.73·√noise: report a lag only where |R_n| is above it; 1.73/√T_eff at large n."""
        return np.sqrt(-np.log1p(-NULL_LEVEL) * self.noise)

    @property
    def square(self) -> Floats:
        """Mean over sequences of |R_n|² less the noise: an estimate of ρ_true(n)², maybe negative.

        The modulus is taken per sequence: pooling R_n first fakes decorrelation where sequences
        drift differently.
        """
        squares = np.abs(self.values) ** 2
        return np.asarray(squares.reshape(-1, *squares.shape[-2:]).mean(axis=0) - self.noise)


def lag_curve(phase: Reals, lags: Reals) -> LagCurve:
    """R_n = mean_t e^{i(φ_{t+n} − φ_t)} of accumulated phases, per sequence.

    The curve itself assumes nothing; its noise assumes independent steps of the measured rate.

    Shapes: phase φ [..., T, B] (leading axes: sequences), lags [n]. Units: radians, tokens.
    Raises: ValueError for T < 3, a lag of T or more, NaN. Source: docs/theory.md, T1e (lag).
    """
    phi, n = checks.reals("phase", phase), checks.counts("lags", lags)
    if phi.ndim < 2 or phi.shape[-2] < 3:
        checks.refuse("phase", f"an array of shape {phi.shape}", "[..., T, B] with T ≥ 3")
    if n.ndim != 1 or (n >= phi.shape[-2]).any():
        checks.refuse("lags", n, f"a vector of lags below T = {phi.shape[-2]}")
    T = phi.shape[-2]
    asked = [1, *n.astype(int).tolist()]
    means = step_measures.lag_curve(torch.from_numpy(phi), asked).numpy()
    one = np.minimum(np.abs(means[..., 0, :]), 1.0)
    square = np.asarray(debiased_rho_square(one**2, T - 1))
    pooled = square.reshape(-1, square.shape[-1]).mean(axis=0)
    rho = np.sqrt(np.clip(pooled, 0.0, 1.0))
    windows = T - n
    noise = np.asarray(lag_noise(rho, n[:, None], windows[:, None]))
    return LagCurve(n, windows, means[..., 1:, :], rho, noise)
