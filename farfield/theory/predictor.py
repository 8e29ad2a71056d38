"""The signal-to-noise predictor: far mass, far power and SNR over length (T6).

Softmax over near keys (LSE_N) and M = L − w independent far scores with ℓ = log E e^s and
ℓ₂ = log E e^{2s}, under a bias −mn. With h_p = Σ_{n=w}^{L−1} e^{−pmn} and E2 = e^{ℓ₂−2ℓ}:

    Z_D = e^ℓ h_1,   A = Z_D/(Z_D + Z_N),   Q = E2·h_2/h_1²
    left:    N = |μ|² + Q E|ξ|²
    carried: N = Σ_b |μ_b|²[T(c_b)/h_1² + (E2 − 1) h_2/h_1²] + Q E|ξ|²
    SNR = (Z_N/Z_D)² σ_S²/N

T is the lag sum of the weights e^{−mn}. Ratios of means: approximate, right as M ≫ E2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from farfield.theory import checks
from farfield.theory.checks import Floats, Reals, plain
from farfield.theory.search import least_count
from farfield.theory.series import (
    correlation_time,
    harmonic_count,
    lag_sum,
    log_geometric_sum,
    power,
)

_LAGS_AT_ONCE = 1 << 12
_MIXED = 1e-17


@dataclass(frozen=True)
class Prediction:
    """What a row of length L is predicted to give.

    `far_mass` A; `near_power` (1 − A)²σ_S²; `far_power` A²N; `snr` their ratio, ∞ with no far key.

    Shapes: all as the lengths. Units: powers in those of |v|²; the others –.
    """

    far_mass: Any
    near_power: Any
    far_power: Any
    snr: Any


def predict(
    lengths: Reals,
    near_window: Reals,
    lse_near: Reals,
    ell: Reals,
    ell2: Reals,
    mean_power: Reals,
    c: npt.ArrayLike,
    noise_power: Reals,
    signal_power: Reals,
    carried: bool,
    slope: Reals = 0.0,
    window: Reals = np.inf,
) -> Prediction:
    """A, near and far power and SNR at each length, with values left alone or carried.

    Controls: `slope` m is ALiBi's, or −ln of a forget gate that varies little; `window` is a
    sliding window W (M = min(L, W) − w); log-n scaling is ℓ, ℓ₂ and LSE_N given per length, at the
    scaled logits. A block with c = 1 exactly is left alone by carrying: its bracket is 1.

    Assumes far scores independent between keys and of the values' phases. Fails for keys that share
    a direction while softmax sees the same phases (`coupled_power`, `shared_key_far_mass`).

    Shapes: lengths, near_window, lse_near, ell, ell2, noise_power E|ξ|², signal_power σ_S², slope
    and window broadcast to [...]; mean_power |μ_b|², c [..., B]. Units: tokens, nats; powers
    in those of |v|². LSE_N includes the near keys' bias.
    Raises: ValueError for w > L, ℓ₂ < 2ℓ, |c| > 1, negative powers or slope, differing numbers of
    blocks. Source: docs/theory.md, T6.
    """
    L, w = checks.counts("lengths", lengths), checks.counts("near_window", near_window)
    W = checks.counts("window", window, least=1, infinite=True)
    if (w > L).any():
        checks.refuse("lengths", L, "lengths of at least near_window")
    M = np.maximum(np.minimum(L, W) - w, 0.0)
    m, first = checks.nonnegative("slope", slope), checks.reals("ell", ell)
    near = checks.reals("lse_near", lse_near)
    excess = _excess(first, ell2)
    signal = checks.nonnegative("signal_power", signal_power)
    noise = _noise(M, m, excess, mean_power, c, noise_power, carried)
    log_odds = first + log_geometric_sum(m, M) - m * w - near  # ln(Z_D/Z_N)
    A = special.expit(log_odds)
    near_power = special.expit(-log_odds) ** 2 * signal
    # Far from the break both powers may underflow where their ratio does not.
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        snr = np.where(M == 0, np.inf, np.exp(-2 * log_odds + np.log(signal) - np.log(noise)))
    return Prediction(plain(A), plain(near_power), plain(A**2 * noise), plain(snr))


def _excess(ell: Floats, ell2: Reals) -> Floats:
    """E2 − 1."""
    excess = np.expm1(checks.reals("ell2", ell2) - 2 * ell)
    if (excess < -1e-9).any():
        checks.refuse("ell2", np.asarray(ell2), "at least 2·ell: E e^{2s} ≥ (E e^s)²")
    return np.maximum(excess, 0.0)


def _noise(
    M: Floats,
    m: Floats,
    excess: Floats,
    mean_power: Reals,
    c: npt.ArrayLike,
    noise_power: Reals,
    carried: bool,
) -> Floats:
    """N, the far power per A². h_2/h_1² and T/h_1² do not depend on where the far set starts."""
    m2, h = checks.nonnegative("mean_power", mean_power), checks.harmonics("c", c)
    checks.matching(mean_power=m2, c=h)
    random = checks.nonnegative("noise_power", noise_power)
    keys = np.maximum(M, 1.0)
    log_h1 = log_geometric_sum(m, keys)
    q = np.exp(log_geometric_sum(2 * m, keys) - 2 * log_h1)
    own = (1 + excess) * q * random
    if not carried:
        return np.asarray(m2.sum(axis=-1) + own)
    shared = np.broadcast_shapes(keys.shape, m.shape)
    keys, m = np.broadcast_to(keys, shared)[..., None], np.broadcast_to(m, shared)[..., None]
    apart = lag_sum(h, keys, m) * np.exp(-2 * log_h1)[..., None] + (excess * q)[..., None]
    return np.asarray((m2 * np.where(h == 1, 1.0, apart)).sum(axis=-1) + own)


def snr_break_length(
    lse_near: Reals,
    ell: Reals,
    ell2: Reals,
    mean_power: Reals,
    c: npt.ArrayLike,
    noise_power: Reals,
    signal_power: Reals,
    carried: bool,
    slope: Reals = 0.0,
    near_window: Reals = 0,
    level: Reals = 1.0,
) -> Floats | float:
    """The least M at which `predict` has SNR ≤ level; ∞ where a control keeps it above for good.

    L* = near_window + M*.

    Shapes: broadcast as in `predict`; mean_power, c [B]. Units: tokens.
    Raises: ValueError as `predict`, level ≤ 0. Source: docs/theory.md, T6.
    """
    least = checks.positive("level", level)
    w = checks.counts("near_window", near_window)
    given = [lse_near, ell, ell2, noise_power, signal_power, slope, w, least]
    shape = np.broadcast_shapes(*(np.shape(each) for each in given))

    def below(M: Floats) -> npt.NDArray[np.bool_]:
        told = predict(
            M + w,
            w,
            lse_near,
            ell,
            ell2,
            mean_power,
            c,
            noise_power,
            signal_power,
            carried,
            slope,
        )
        return np.asarray(told.snr <= least)

    return plain(least_count(below, shape))


def noise_per_key(mean_power: Reals, rho: Reals, e2: Reals, noise_power: Reals) -> Any:
    """N_c = Σ_b |μ_b|²[(1 + ρ_b)/(1 − ρ_b) + E2 − 1] + E2·E|ξ|²: M times N with values carried.

    At m = 0, M ≫ 1/(1 − ρ). ∞ where a block with ρ = 1 has a mean: it keeps the law of values left
    alone.

    Shapes: mean_power, rho [..., B]; e2, noise_power [...] -> [...]. Units: those of |v|² × tokens.
    Raises: ValueError for ρ outside [0, 1], E2 < 1, negative powers. Source: docs/theory.md, T6.
    """
    m2, p = checks.nonnegative("mean_power", mean_power), checks.rates("rho", rho)
    checks.matching(mean_power=m2, rho=p)
    excess = checks.nonnegative("e2 − 1", checks.reals("e2", e2) - 1)
    time = np.where(m2 > 0, correlation_time(p), 1.0)
    noise = checks.nonnegative("noise_power", noise_power)
    return plain((m2 * time).sum(axis=-1) + excess * m2.sum(axis=-1) + (1 + excess) * noise)


def break_laws(
    lse_near: Reals,
    ell: Reals,
    e2: Reals,
    mean_power: Reals,
    rho: Reals,
    noise_power: Reals,
    signal_power: Reals,
) -> tuple[Any, Any]:
    """(z/|μ|, z²/N_c), z = Z_N e^{−ℓ}σ_S: where SNR reaches 1 with values left, and carried.

    The quadratic extension, at m = 0: while the near mass 1 − A falls at the same rate in both.
    Asymptotic in M; `snr_break_length` solves it exactly.

    Shapes: mean_power, rho [..., B], the rest [...] -> two [...]. Units: tokens.
    Raises: ValueError as `noise_per_key`. Source: docs/theory.md, T6 (laws).
    """
    log_z = checks.reals("lse_near", lse_near) - checks.reals("ell", ell)
    m2 = checks.nonnegative("mean_power", mean_power)
    per_key = noise_per_key(m2, rho, e2, noise_power)
    with np.errstate(divide="ignore", over="ignore"):
        log_z = log_z + 0.5 * np.log(checks.nonnegative("signal_power", signal_power))
        left = np.exp(log_z - 0.5 * np.log(m2.sum(axis=-1)))
        return plain(left), plain(np.exp(2 * log_z - np.log(per_key)))


def log_shared_key_kernel(steps: Reals, x: Reals, moments: npt.ArrayLike) -> Floats | float:
    """ln E e^{s(n)} = Σ_b ln[I_0(x_b) + 2 Σ_{m≥1} I_m(x_b) Re c_m^n], aligned at n = 0.

    One key shared by every position: e^{Σx} at n = 0, falling to e^ℓ with no edge between near and
    far.

    Shapes: steps n [...], x [B], moments c_m [H, B], m = 1 … H -> [...]. Units: nats.
    Raises: ValueError for too few harmonics (`harmonic_count`), |c| > 1, x < 0, negative steps.
    Source: docs/theory.md, T6 (shared key).
    """
    n, blocks = checks.counts("steps", steps), checks.nonnegative("x", x)
    h = checks.harmonics("moments", moments)
    checks.vector("moments", h, 2)
    checks.matching(x=blocks, moments=h)
    needed = harmonic_count(blocks)
    if len(h) < needed:
        expected = f"at least {needed} for x up to {blocks.max():g}"
        checks.refuse("moments", f"{len(h)} harmonics", expected)
    orders = np.arange(1, len(h) + 1)[:, None]
    turned = power(h, n[..., None, None]).real
    tilt = special.ive(0, blocks) + 2 * (special.ive(orders, blocks) * turned).sum(axis=-2)
    return plain((np.log(tilt) + blocks).sum(axis=-1))


def shared_key_far_mass(
    lengths: Reals,
    near_window: int,
    x: Reals,
    moments: npt.ArrayLike,
    slope: float = 0.0,
) -> Floats | float:
    """A = Σ_{n=w}^{L−1} e^{−mn} E e^{s(n)} / Σ_{n=0}^{L−1} e^{−mn} E e^{s(n)}: one shared key.

    A ratio of means: approximate while Z fluctuates. Costs the mixing window, not the length.

    Shapes: lengths [...], x [B], moments [H, B] -> [...]. Units: tokens; slope in nats per token.
    Raises: ValueError for lengths below near_window or 1, and as `log_shared_key_kernel`.
    Source: docs/theory.md, T6 (shared key).
    """
    L = checks.counts("lengths", lengths, least=1)
    w = int(checks.counts("near_window", near_window))
    m = float(checks.nonnegative("slope", slope))
    if (w > L).any():
        checks.refuse("lengths", L, "lengths of at least near_window")
    h = checks.harmonics("moments", moments)
    longest = int(L.max())
    slowest = np.abs(h).max()
    until = longest if slowest >= 1 else int(np.log(_MIXED) / np.log(max(slowest, 1e-300))) + 1
    until = min(longest, max(until, w, 1))
    steps = np.arange(until)
    chunks = [steps[start : start + _LAGS_AT_ONCE] for start in range(0, until, _LAGS_AT_ONCE)]
    logs = np.concatenate([np.atleast_1d(log_shared_key_kernel(n, x, h)) for n in chunks])
    sums = np.concatenate([[-np.inf], np.logaddexp.accumulate(logs - m * steps)])
    settled = float(np.sum(np.log(special.ive(0, x)) + np.asarray(x)))
    beyond = settled - m * until + log_geometric_sum(m, np.maximum(L - until, 0.0))
    inside = np.minimum(L, until).astype(np.int64)
    total = np.logaddexp(sums[inside], beyond)
    return plain(-np.expm1(np.minimum(sums[w] - total, 0.0)))
