"""What a control guarantees whatever the content: ALiBi, forget gate, window and log-n (T4).

A bias that falls with distance bounds the far mass at every length, by a factor e^{±2λ} from the
logits' half-range λ. Everything is computed on log weights, so that lengths of 10⁹
and slopes of 0 are safe.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from farfield.theory import checks
from farfield.theory.checks import Floats, Reals, plain
from farfield.theory.series import log_geometric_sum


def alibi_far_log_odds(slope: Reals, near_window: Reals, far_keys: Reals = np.inf) -> Any:
    """ln(h_D/h_N) = ln[e^{−mw}(1 − e^{−mM})/(1 − e^{−mw})], far over near for equal contents.

    ln(M/w) at m = 0; the near window is full (K = w).

    Shapes: slope m, near_window w ≥ 1, far_keys M (∞ allowed) broadcast. Units: m in nats per
    token. Raises: ValueError for m < 0, w < 1, M < 0. Source: docs/theory.md, T4 (ALiBi).
    """
    m = checks.nonnegative("slope", slope)
    w = checks.counts("near_window", near_window, least=1)
    far = log_geometric_sum(m, checks.counts("far_keys", far_keys, infinite=True))
    return plain(far - m * w - log_geometric_sum(m, w))


def alibi_bounds(
    logit_bound: Reals, slope: Reals, near_window: Reals, far_keys: Reals = np.inf
) -> tuple[Any, Any]:
    """e^{∓2λ}h_D/(e^{∓2λ}h_D + h_N): lower and upper bound on ρ_D, content logits in [−λ, λ].

    Uniform in length at m > 0; both extremes are attained. Far mass is kept small only when
    m w ≳ 2λ.

    Shapes: broadcast -> (lower, upper). Units: λ in nats (content alone), m in nats per token.
    Raises: ValueError for λ < 0, m < 0, w < 1, M < 0. Source: docs/theory.md, T4 (ALiBi).
    """
    bound = checks.nonnegative("logit_bound", logit_bound)
    odds = alibi_far_log_odds(slope, near_window, far_keys)
    return plain(special.expit(odds - 2 * bound)), plain(special.expit(odds + 2 * bound))


def alibi_self_key_upper(logit_bound: Reals, slope: Reals, near_window: Reals) -> Floats | float:
    """ρ_D ≤ x/(1 + x), x = e^{2λ−mw}/(1 − e^{−m}): only the query's own key is sure to be near.

    1 at m = 0.

    Shapes: broadcast. Units: λ in nats, m in nats per token. Raises: ValueError for λ < 0, m < 0,
    w < 0. Source: docs/theory.md, T4 (ALiBi).
    """
    bound, m = checks.nonnegative("logit_bound", logit_bound), checks.nonnegative("slope", slope)
    w = checks.counts("near_window", near_window)
    return plain(special.expit(2 * bound - m * w + log_geometric_sum(m, np.inf)))


def gate_upper(logit_bound: Reals, mean_gate: Reals, near_window: Reals) -> Floats | float:
    """E ρ_D ≤ x/(1 + x), x = e^{2λ} φ^w/(1 − φ), φ = E f: independent, equally distributed gates.

    Jensen on a concave x/(1 + x). The mean *gate* φ, not e^{E log f}, which is smaller. Scores with
    |s| ≤ λ may depend on the gates. 1 at φ = 1. Fails for dependent gates, whose products need not
    shrink like φ^n.

    Shapes: broadcast. Units: λ in nats, φ per token.
    Raises: ValueError for φ outside [0, 1], λ < 0, w < 0. Source: docs/theory.md, T4 (forget gate).
    """
    bound, phi = (
        checks.nonnegative("logit_bound", logit_bound),
        checks.rates("mean_gate", mean_gate),
    )
    w = checks.counts("near_window", near_window)
    with np.errstate(divide="ignore"):
        log_x = 2 * bound + special.xlogy(w, phi) - np.log1p(-phi)
    return plain(special.expit(log_x))


def gate_upper_sure(
    logit_bound: Reals,
    mean_log_decay: Reals,
    most_log_decay: Reals,
    near_window: Reals,
    slack: Reals,
) -> tuple[Any, Any]:
    """(bound on ρ_D, probability that it fails), for g = −log f independent in [0, G].

    With m = E g − ε the bound is `alibi_self_key_upper`'s; it fails with probability at most
    e^{−2wε²/G²}/(1 − e^{−2ε²/G²}): Hoeffding, then a union over distances n ≥ w. 1 where ε ≥ E g.

    Shapes: broadcast -> (bound, failure). Units: g, G, ε in nats per token, λ in nats.
    Raises: ValueError for negative arguments, ε = 0, E g > G. Source: docs/theory.md, T4.
    """
    bound = checks.nonnegative("logit_bound", logit_bound)
    mean = checks.nonnegative("mean_log_decay", mean_log_decay)
    most, w = (
        checks.positive("most_log_decay", most_log_decay),
        checks.counts("near_window", near_window),
    )
    epsilon = checks.positive("slack", slack)
    if (mean > most).any():
        checks.refuse("mean_log_decay", mean, "at most most_log_decay")
    rate = 2 * (epsilon / most) ** 2
    failure = np.exp(np.minimum(log_geometric_sum(rate, np.inf) - rate * w, 0.0))
    upper = alibi_self_key_upper(bound, np.maximum(mean - epsilon, 0.0), w)
    return plain(upper + 0 * failure), plain(failure + 0 * upper)


def window_upper(
    logit_bound: Reals, window: Reals, near_window: Reals, near_keys: Reals
) -> Floats | float:
    """ρ_D ≤ (W − w)/(W − w + K e^{−2λ}) under a sliding window of W keys; 0 at W ≤ w.

    Shapes: broadcast. Units: tokens; λ in nats. Raises: ValueError for λ < 0, W < 1, K < 1, w < 0.
    Source: docs/theory.md, T4 (sliding window).
    """
    bound = checks.nonnegative("logit_bound", logit_bound)
    W, w = checks.counts("window", window, least=1), checks.counts("near_window", near_window)
    K = checks.counts("near_keys", near_keys, least=1)
    with np.errstate(divide="ignore"):
        return plain(special.expit(np.log(np.maximum(W - w, 0.0)) - np.log(K) + 2 * bound))


def log_n_far_mass_lower(length: Reals, near_keys: Reals, rate: Reals) -> Floats | float:
    """ρ_D ≥ M/(M + K L^{2c}), M = L − K: T4 when log-n scaling makes λ = c ln L.

    Dilution is no longer forced once 2c ≥ 1.

    Shapes: length L, near_keys K, rate c ≥ 0 broadcast. Units: tokens.
    Raises: ValueError for L < 1, K < 1, c < 0. Source: docs/theory.md, T4 (log-n scaling).
    """
    L, K = checks.counts("length", length, least=1), checks.counts("near_keys", near_keys, least=1)
    c = checks.nonnegative("rate", rate)
    with np.errstate(divide="ignore"):
        return plain(special.expit(np.log(np.maximum(L - K, 0)) - np.log(K) - 2 * c * np.log(L)))


def log_ratio(far_keys: Reals, near_keys: Reals, far_share: Reals) -> Floats | float:
    """ln R = ln[(M/K)(1 − f)/f], what the near logits must overcome for a far mass of f.

    Shapes: broadcast. Units: nats. Raises: ValueError for M < 1, K < 1, f outside (0, 1).
    Source: docs/theory.md, T4 (log-n scaling).
    """
    M = checks.counts("far_keys", far_keys, least=1)
    K = checks.counts("near_keys", near_keys, least=1)
    return plain(np.log(M) - np.log(K) - special.logit(checks.fractions("far_share", far_share)))


def beta_required(near_score: Reals, variance: Reals, log_ratio: Reals) -> Floats | float:
    """β = (a − √(a² − 2v ln R))/v: the scale at which M far scores N(0, v) weigh what is asked.

    From the annealed ln R + β²v/2 = βa. Sufficient, not necessary (log E Z ≥ E log Z): where R >
    e^{a²/2v} it has no solution and the result is ∞, though the true far mass may go on falling
    down to `hard_limit`. 0 where none is needed; ln R/a at v = 0.

    Shapes: near_score a > 0, variance v ≥ 0, log_ratio broadcast. Units: nats.
    Raises: ValueError for a ≤ 0 or v < 0. Source: docs/theory.md, T4 (log-n scaling).
    """
    a, v = checks.positive("near_score", near_score), checks.nonnegative("variance", variance)
    needed = np.maximum(checks.reals("log_ratio", log_ratio), 0.0)
    inside = a**2 - 2 * v * needed
    beta = 2 * needed / (a + np.sqrt(np.maximum(inside, 0.0)))
    return plain(np.where(inside < 0, np.inf, beta))


def hard_limit(far_keys: Reals, near_score: Reals, variance: Reals) -> Floats | float:
    """P(the largest far score beats the near one) = 1 − (1 − Q(a/√v))^M: the far mass as β → ∞.

    Q is the normal tail; even odds where M·Q(a/√v) ≈ ln 2.

    Shapes: broadcast. Units: nats. Raises: ValueError for M < 0, v < 0.
    Source: docs/theory.md, T4 (log-n scaling).
    """
    M, v = checks.counts("far_keys", far_keys), checks.positive("variance", variance)
    log_kept = special.log_ndtr(checks.reals("near_score", near_score) / np.sqrt(v))
    return plain(-np.expm1(M * log_kept))
