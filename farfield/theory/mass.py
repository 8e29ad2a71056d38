"""How much weight falls on the far set, and at which length it is a given fraction: T3 and T4.

The far mass is ρ_D = σ(LSE_D − LSE_N): a logistic of two log-sum-exps. Upper bounds put every far
logit at a ceiling; lower bounds put it at a floor, or at its mean; in between, M independent far
weights weigh M e^ℓ with ℓ = log E e^s, which is what is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from farfield.theory import checks
from farfield.theory.checks import Floats, Reals, plain
from farfield.theory.search import least_count
from farfield.theory.series import correlation_time, lag_sum, log_hyp0f1

EVEN = 0.5  # the far mass at which far and near weigh the same


def ell_blocks(x: Reals) -> Floats | float:
    """ℓ = log E e^s = Σ_b ln I_0(x_b) for independent blocks with uniform phases.

    Shapes: x = |q_b||k_b|/√d [..., B] -> [...]. Units: nats. Fails for blocks that turn together.
    Raises: ValueError for x < 0. Source: docs/theory.md, T3.
    """
    blocks = checks.nonnegative("x", x)
    checks.vector("x", blocks)
    return plain(np.sum(log_hyp0f1(1.0, blocks**2 / 4), axis=-1))


def ell_haar(score_scale: Reals, head_dim: Reals) -> Floats | float:
    """ℓ = log ₀F₁(; d/2; S²/4) for a transport uniform over rotations of the sphere.

    Shapes: S = |q||k|/√d and d broadcast. Units: nats. Raises: ValueError for S < 0, d < 2.
    Source: docs/theory.md, T3.
    """
    scale = checks.nonnegative("score_scale", score_scale)
    return log_hyp0f1(checks.counts("head_dim", head_dim, least=2) / 2, scale**2 / 4)


def ell_normal(variance: Reals) -> Floats | float:
    """ℓ = v/2 for far scores N(0, v).

    Shapes: [...] -> [...]. Units: variance in nats². Raises: ValueError for v < 0.
    Source: docs/theory.md, T3.
    """
    return plain(checks.nonnegative("variance", variance) / 2)


def _ratio(doubled: Any, once: Any) -> Any:
    # By Jensen at least 1; rounding may fall short of it where the weights hardly vary.
    return plain(np.exp(np.maximum(doubled - 2 * np.asarray(once), 0.0)))


def e2_blocks(x: Reals) -> Floats | float:
    """E2 = E e^{2s}/(E e^s)² for independent blocks with uniform phases: e^{ℓ(2x) − 2ℓ(x)}.

    Shapes: x [..., B] -> [...]. Units: –, at least 1. Raises: ValueError for x < 0.
    Source: docs/theory.md, T3.
    """
    blocks = checks.nonnegative("x", x)
    return _ratio(ell_blocks(2 * blocks), ell_blocks(blocks))


def e2_haar(score_scale: Reals, head_dim: Reals) -> Floats | float:
    """E2 = E e^{2s}/(E e^s)² for a Haar transport: e^{ℓ(2S) − 2ℓ(S)}.

    Shapes: broadcast. Units: –. Raises: ValueError for S < 0, d < 2. Source: docs/theory.md, T3.
    """
    scale = checks.nonnegative("score_scale", score_scale)
    return _ratio(ell_haar(2 * scale, head_dim), ell_haar(scale, head_dim))


def e2_normal(variance: Reals) -> Floats | float:
    """E2 = e^v for far scores N(0, v).

    Shapes: [...] -> [...]. Units: –. Raises: ValueError for v < 0. Source: docs/theory.md, T3.
    """
    return plain(np.exp(checks.nonnegative("variance", variance)))


def far_mass(lse_far: Reals, lse_near: Reals) -> Floats | float:
    """ρ_D = σ(LSE_D − LSE_N), exactly: the share of the softmax on the far set.

    A set without keys has log-sum-exp −∞; both at once have no softmax.

    Shapes: broadcast. Units: nats -> 0–1. Raises: ValueError for NaN, or both sets empty.
    Source: docs/theory.md, T3.
    """
    far, near = np.broadcast_arrays(
        checks.extended_reals("lse_far", lse_far), checks.extended_reals("lse_near", lse_near)
    )
    if ((far == near) & np.isinf(far)).any():
        checks.refuse("lse_far − lse_near", "∞ − ∞", "at least one set with keys, finite logits")
    return plain(special.expit(far - near))


def _log_count(far_keys: Reals) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(checks.counts("far_keys", far_keys, infinite=True))


def typical_far_mass(far_keys: Reals, ell: Reals, lse_near: Reals) -> Floats | float:
    """ρ_D ≈ σ(ln M + ℓ − LSE_N) for M independent far weights of mean e^ℓ.

    An approximation: exact as M ≫ E2. Fails for far keys that move together (shared key, slow
    blocks): there Z_D fluctuates whatever M is.

    Shapes: broadcast. Units: nats. Raises: ValueError for a negative M. Source: docs/theory.md, T3.
    """
    return far_mass(_log_count(far_keys) + checks.reals("ell", ell), lse_near)


def far_mass_upper(far_keys: Reals, threshold: Reals, lse_near: Reals) -> Floats | float:
    """ρ_D ≤ M e^τ/(M e^τ + Z_N) when no far logit exceeds τ; Z_N may be K e^{s_min}.

    Per far key the weight is at most e^{−(s_min − τ)} of a near one. Very loose: it puts every far
    logit at the largest one.

    Shapes: broadcast. Units: nats. Raises: ValueError for a negative M. Source: docs/theory.md, T3.
    """
    return far_mass(_log_count(far_keys) + checks.reals("threshold", threshold), lse_near)


def weight_ratio_bound(near_min: Reals, threshold: Reals) -> Floats | float:
    """e^{−(s_min − τ)}: the most one far key can weigh against one near key.

    A factor that does not fall with distance. Shapes: broadcast. Units: nats -> –.
    Raises: ValueError for NaN. Source: docs/theory.md, T3.
    """
    return plain(np.exp(checks.reals("threshold", threshold) - checks.reals("near_min", near_min)))


def far_mass_lower(far_keys: Reals, near_keys: Reals, logit_bound: Reals) -> Floats | float:
    """ρ_D ≥ M/(M + K e^{2λ}) for logits in [−λ, λ], attained at far = −λ, near = +λ.

    λ is the half-range of the logits as softmax sees them, every bias included: with λ of content
    scores alone an ALiBi slope violates it. Rotations play no role. Vacuous at practical sizes
    (λ = 8, K = 4, M = 65,536: .0018).

    Shapes: broadcast. Units: nats. Raises: ValueError for K < 1, M < 0, λ < 0.
    Source: docs/theory.md, T4.
    """
    K = checks.counts("near_keys", near_keys, least=1)
    bound = checks.nonnegative("logit_bound", logit_bound)
    return plain(special.expit(_log_count(far_keys) - np.log(K) - 2 * bound))


def far_mass_lower_rows(far_logits: Reals, near_logits: Reals) -> Floats | float:
    """ρ_D ≥ σ(ln M + mean s_D − LSE_N), for every row: the geometric mean is below the arithmetic.

    Equality when all far logits are the same.

    Shapes: far_logits [..., M], near_logits [..., K] -> [...]. Units: nats.
    Raises: ValueError for an empty set or infinite logits. Source: docs/theory.md, T4′.
    """
    far, near = checks.reals("far_logits", far_logits), checks.reals("near_logits", near_logits)
    checks.vector("far_logits", far)
    checks.vector("near_logits", near)
    lower = np.log(far.shape[-1]) + far.mean(axis=-1)
    return plain(special.expit(lower - special.logsumexp(near, axis=-1)))


def mean_far_score_bound(
    score_scale: Reals, rho: Reals, far_keys: Reals, shared_token: bool = False
) -> Floats | float:
    """E s̄_D² ≤ (S²/M)(1 + ρ)/(1 − ρ): the square of the mean far logit, one shared key.

    E[s_j s_l] ≤ S² ρ^{|j−l|}, since the step between two routes is all that separates them. Never
    above S². With `shared_token` (keys made from the token of their own step) one power of ρ less.

    Shapes: broadcast. Units: nats². Raises: ValueError for S < 0, ρ outside [0, 1], M < 1.
    Source: docs/theory.md, T4″.
    """
    scale = checks.nonnegative("score_scale", score_scale)
    M = checks.counts("far_keys", far_keys, least=1)
    return plain(scale**2 * np.minimum(correlation_time(rho, shared_token) / M, 1.0))


def mean_far_score_square(x: Reals, c: npt.ArrayLike, far_keys: Reals) -> Floats | float:
    """E s̄_D² = ½ Σ_b x_b² g_M(c_b), exact for SO(2) blocks, a shared key and far phases uniform.

    Shapes: x, c [..., B], far_keys [...] -> [...]. Units: nats².
    Raises: ValueError for x < 0, |c| > 1, M < 1, differing numbers of blocks.
    Source: docs/theory.md, T4″.
    """
    blocks, h = checks.nonnegative("x", x), checks.harmonics("c", c)
    checks.matching(x=blocks, c=h)
    M = checks.counts("far_keys", far_keys, least=1)[..., None]
    return plain(0.5 * (blocks**2 * lag_sum(h, M) / M**2).sum(axis=-1))


def _slack(score_scale: Reals, rho: Reals, delta: Reals) -> Floats:
    """S √((1 + ρ)/((1 − ρ)δ)), 0 where S is: ε of T4″ times √M."""
    scale = checks.nonnegative("score_scale", score_scale)
    time = np.asarray(correlation_time(rho)) / checks.fractions("delta", delta)
    return np.asarray(np.where(scale == 0, 0.0, np.where(scale == 0, 1.0, scale) * np.sqrt(time)))


def far_mass_lower_decohered(
    far_keys: Reals, lse_near: Reals, score_scale: Reals, rho: Reals, delta: Reals
) -> Floats | float:
    """ρ_D ≥ M/(M + Z_N e^ε) with probability 1 − δ, ε = S√((1 + ρ)/((1 − ρ)Mδ)).

    Z_N is at most K e^{s_max,near}. Against T4, e^{2λ} has become about e^λ: decoherence parks far
    logits at 0 and cannot push their mean below it. Independent steps and a shared key, or keys
    independent of the routes.

    Shapes: broadcast. Units: nats.
    Raises: ValueError for ρ outside [0, 1], δ outside (0, 1), M < 1.
    Source: docs/theory.md, T4″ (through T4′).
    """
    M = checks.counts("far_keys", far_keys, least=1)
    epsilon = _slack(score_scale, rho, delta) / np.sqrt(M)
    return plain(special.expit(np.log(M) - checks.reals("lse_near", lse_near) - epsilon))


def _log_break(lse_near: Reals, far_share: Reals) -> Floats:
    share = checks.fractions("far_share", far_share)
    return np.asarray(checks.reals("lse_near", lse_near) + special.logit(share))


def _exp(log_length: Any) -> Any:
    with np.errstate(over="ignore"):
        return plain(np.exp(log_length))


def typical_break_length(lse_near: Reals, ell: Reals, far_share: Reals = EVEN) -> Any:
    """M*(f) = e^{LSE_N − ℓ} f/(1 − f), the number of far keys at which the far mass is f.

    In sequence length, L* = near_window + M*. The typical value: see `break_length_interval`.

    Shapes: broadcast. Units: tokens. Raises: ValueError for f outside (0, 1).
    Source: docs/theory.md, T3.
    """
    return _exp(_log_break(lse_near, far_share) - checks.reals("ell", ell))


def break_length_interval(
    lse_near: Reals,
    ell: Reals,
    e2: Reals,
    delta: Reals,
    far_share: Reals = EVEN,
    correlation_sum: Reals = 1.0,
) -> tuple[Any, Any]:
    """The two M with M ± √((E2 − 1)M/δ) = M*_typ: where Chebyshev puts the break, 1 − δ sure.

    For far weights that are uncorrelated; for correlated ones (shared content) `correlation_sum` is
    the sum of their lag correlations over all lags, which multiplies E2 − 1.

    Shapes: broadcast -> (earliest, latest). Units: tokens. Raises: ValueError for E2 < 1, δ or f
    outside (0, 1), a negative correlation sum. Source: docs/theory.md, T3.
    """
    typical = typical_break_length(lse_near, ell, far_share)
    excess = checks.nonnegative("e2 − 1", checks.reals("e2", e2) - 1)
    excess = excess * checks.nonnegative("correlation_sum", correlation_sum)
    root = np.sqrt(excess / checks.fractions("delta", delta))
    late = (root + np.sqrt(root**2 + 4 * typical)) / 2
    with np.errstate(invalid="ignore"):
        early = np.where(late > 0, typical / np.where(late > 0, late, 1.0), 0.0)
    early = np.where(np.isinf(typical), np.inf, early)
    return plain(early**2), plain(late**2)


def union_break_length(
    lse_near: Reals, threshold: Callable[[Floats], Any], far_share: Reals = EVEN
) -> Any:
    """The largest M at which `far_mass_upper` with τ(M) still promises a far mass of at most f.

    `threshold` gives τ(M), as `haar_threshold` and `block_threshold` do; it holds for all keys at
    once, hence the shortest of the break lengths by far.

    Shapes: lse_near and far_share broadcast. Units: tokens; 0 where one key may already be too
    much. Raises: ValueError for f outside (0, 1). Source: docs/theory.md, T3.
    """
    limit = _log_break(lse_near, far_share)

    def over(M: Floats) -> npt.NDArray[np.bool_]:
        return np.asarray(np.log(M) + threshold(M) > limit)

    return plain(least_count(over, limit.shape) - 1)


def decohered_break_length(
    lse_near: Reals,
    far_share: Reals = EVEN,
    score_scale: Reals = 0.0,
    rho: Reals = 0.0,
    delta: Reals = 0.05,
) -> Any:
    """The M at which T4″ forces a far mass of f: ln M − ε(M) = LSE_N + logit f.

    Solved by Lambert's W: M = e^{t + 2W(½A e^{−t/2})}, t = LSE_N + logit f, ε(M) = A/√M. With S = 0
    the slack ε is left out and M = Z_N f/(1 − f). ∞ at ρ = 1.

    Shapes: broadcast. Units: tokens.
    Raises: ValueError for f or δ outside (0, 1), ρ outside [0, 1].
    Source: docs/theory.md, T4″.
    """
    target = _log_break(lse_near, far_share)
    with np.errstate(over="ignore"):
        argument = 0.5 * _slack(score_scale, rho, delta) * np.exp(-target / 2)
    known = np.isfinite(argument)
    bent = special.lambertw(np.where(known, argument, 0.0)).real
    return _exp(np.where(known, target + 2 * bent, np.inf))


def global_break_length(near_keys: Reals, logit_bound: Reals, far_share: Reals = EVEN) -> Any:
    """M = K e^{2λ} f/(1 − f): the length at which T4 forces a far mass of f, whatever the logits.

    Shapes: broadcast. Units: tokens. Raises: ValueError for K < 1, λ < 0, f outside (0, 1).
    Source: docs/theory.md, T4.
    """
    K = checks.counts("near_keys", near_keys, least=1)
    bound = checks.nonnegative("logit_bound", logit_bound)
    return _exp(_log_break(np.log(K) + 2 * bound, far_share))
