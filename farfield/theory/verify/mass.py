"""T3 and T4: how much weight falls on the far set, free and under a control."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import special

from farfield import theory
from farfield.algebra import measures
from farfield.theory import laws
from farfield.theory.stylised import Control, Model, simulate
from farfield.theory.verify.outcome import (
    Outcome,
    above,
    below,
    identity,
    mean_and_error,
    shrinking,
)

X = np.full(32, 0.25)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


def _mass(far: Any, near: Any) -> np.ndarray:
    """Far mass of each row. Shapes: [..., M], [..., K] -> [...]."""
    sums = (special.logsumexp(logits, axis=-1) for logits in (far, near))
    return np.asarray(theory.far_mass(*sums))


def free(rng: np.random.Generator) -> Iterator[Outcome]:
    """T3: ℓ and E2, the typical far mass, and the lengths at which it is one half."""
    scores = np.cos(rng.uniform(0, 2 * np.pi, (400_000, 8))) @ np.full(8, 0.5)
    told = np.exp(theory.ell_blocks(np.full(8, 0.5)))
    yield identity("T3", "E e^s, 8 uniform planes", told, *mean_and_error(np.exp(scores)))
    d, S = 16, 2.0
    first = rng.standard_normal(400_000)
    share = first / np.sqrt(first**2 + rng.chisquare(d - 1, 400_000))
    told = np.exp(theory.ell_haar(S, d))
    yield identity("T3", "E e^s, Haar, d = 16", told, *mean_and_error(np.exp(S * share)))
    told = np.exp(theory.ell_normal(1.0))
    yield identity("T3", "E e^s, normal scores", told, *mean_and_error(np.exp(first)))
    sizes = (2, 64, 8192)
    lse_near = [np.log(size) + 0.5 for size in sizes]
    model = [Model(laws.Normal(0.4), X, 4, lse - np.log(4)) for lse in lse_near]
    runs = [
        simulate(one, [4 + size], 200, _seed(rng))[0].far_mass.numpy()
        for one, size in zip(model, sizes, strict=True)
    ]
    ell = theory.ell_blocks(X)
    masses = theory.typical_far_mass(sizes, ell, lse_near)
    found = [mean_and_error(run) for run in runs]
    yield shrinking(
        "T3", "far mass of M independent keys", sizes, masses, *zip(*found, strict=True)
    )
    yield from _breaks(rng)


def _breaks(rng: np.random.Generator) -> Iterator[Outcome]:
    rows, K, near = 1000, 4, 6.0
    scores = np.cos(rng.uniform(0, 2 * np.pi, (rows, 2000, 32)).astype(np.float32)) @ X
    lse_near = near + np.log(K)
    weight = np.exp(scores).cumsum(axis=1)
    length = 1 + (weight < np.exp(lse_near)).sum(axis=1)
    ell, e2 = theory.ell_blocks(X), theory.e2_blocks(X)
    early, late = theory.break_length_interval(lse_near, ell, e2, 0.05)
    missed = (length < early) | (length > late)
    what = f"M*(½) outside Chebyshev's {early:.0f} to {late:.0f}"
    yield below("T3", what, 0.05, *mean_and_error(missed))
    nears = (0.0, 3.0, near)
    typical = [theory.typical_break_length(each + np.log(K), ell) for each in nears]
    crossed = [1 + (weight < K * np.exp(each)).sum(axis=1) for each in nears]
    found = [mean_and_error(each) for each in crossed]
    what = "mean M*(½), near logit 0 to 6"
    yield shrinking("T3", what, typical, typical, *zip(*found, strict=True))
    union = theory.union_break_length(
        lse_near, lambda M: theory.block_threshold(M, 0.05, 2 * np.ones(32), 64, "uniform")
    )
    what = f"rows that break before the union-safe M = {union:.0f}"
    yield below("T3", what, 0.05, *mean_and_error(length <= union))


def forced(rng: np.random.Generator) -> Iterator[Outcome]:
    """T4, T4′, T4″: what far keys weigh at least."""
    K, M, lam = 4, 60, 1.5
    near, far = rng.uniform(-lam, lam, (20_000, K)), rng.uniform(-lam, lam, (20_000, M))
    mass = _mass(far, near)
    least = theory.far_mass_lower(M, K, lam)
    yield above("T4", "least far mass of 20,000 rows, |s| ≤ 1.5", least, float(mass.min()))
    attained = theory.far_mass(-lam + np.log(M), lam + np.log(K))
    yield identity("T4", "attained: far at −λ, near at +λ", least, attained, 0.0, 1e-12)
    slack = mass - theory.far_mass_lower_rows(far, near)
    yield above("T4′", "far mass less its row's bound, least of 20,000", 0.0, float(slack.min()))
    rho = float(np.exp(-0.08))
    model = Model(laws.Normal(0.4), X, 40, 4.0, "shared")
    for found in simulate(model, [1064], 2000, _seed(rng)):
        keys = found.length - 40
        mean = measures.mean_logit(found.content).numpy()
        exact = theory.mean_far_score_square(X, np.full(32, rho), keys)
        yield identity("T4″", "E s̄² of 1,024 far scores, one key", exact, *mean_and_error(mean**2))
        bound = theory.mean_far_score_bound(float(X.sum()), rho, keys)
        yield below("T4″", "the same, from S and ρ alone", bound, *mean_and_error(mean**2))
        lse_near = 4.0 + np.log(40)
        least = theory.far_mass_lower_decohered(keys, lse_near, float(X.sum()), rho, 0.05)
        missed = found.far_mass.numpy() < least
        yield below("T4″", f"far mass below {least:.3f}", 0.05, *mean_and_error(missed))


def controls(rng: np.random.Generator) -> Iterator[Outcome]:
    """T4's controls: ALiBi, gates, a window, log-n."""
    lam, slope, w = 1.0, 0.05, 40
    lower, upper = theory.alibi_bounds(lam, slope, w)
    model = Model(laws.Normal(0.4), [lam], w, lam, "shared", Control(slope))
    rows = simulate(model, [64, 512, 4096], 200, _seed(rng))
    lowest = theory.alibi_bounds(lam, slope, w, 24)[0]
    yield above("T4", "far mass under ALiBi, L = 64", lowest, rows[0].far_mass.min().item())
    yield below("T4", "far mass under ALiBi, L = 4,096", upper, rows[-1].far_mass.max().item())
    attained = _extreme(lam, slope, w)
    yield identity("T4", "ALiBi's extremes are attained: upper", upper, attained, 0.0, 1e-9)
    yield identity(
        "T4", "ALiBi's extremes are attained: lower", lower, _extreme(-lam, slope, w), 0.0, 1e-9
    )
    model = Model(laws.Normal(0.4), [1.0], 60, 1.0, control=Control(gates=(9.0, 1.0)))
    gated = simulate(model, [1000], 500, _seed(rng))[0].far_mass.numpy()
    told = theory.gate_upper(1.0, 0.9, 60)
    yield below("T4", "E far mass under Beta(9, 1) gates", told, *mean_and_error(gated))
    yield _sure_gates(rng)
    model = Model(laws.Normal(0.4), [1.0], 20, 1.0, control=Control(window=120))
    windowed = simulate(model, [1000], 500, _seed(rng))[0].far_mass
    told = theory.window_upper(1.0, 120, 20, 20)
    yield below("T4", "far mass under a window of 120", told, windowed.max().item())
    yield from _log_n(rng)


def _extreme(lam: float, slope: float, w: int) -> float:
    """Far mass with near content at −λ, far content at +λ, over 4,000 keys."""
    n = np.arange(4000)
    logits = np.where(n < w, -lam, lam) - slope * n
    return float(_mass(logits[w:], logits[:w]))


def _sure_gates(rng: np.random.Generator) -> Outcome:
    w, most = 300, 0.4
    g = rng.uniform(0, most, (2000, 2000))
    bias = -np.concatenate([np.zeros((2000, 1)), g.cumsum(axis=1)], axis=1)
    mass = special.expit(
        special.logsumexp(1.0 + bias[:, w:], axis=1) - special.logsumexp(-1.0 + bias[:, :1], axis=1)
    )
    upper, failure = theory.gate_upper_sure(1.0, most / 2, most, w, 0.05)
    what = f"far mass above {float(upper):.1g}, gates in a range"
    return below("T4", what, failure, *mean_and_error(mass > upper))


def _log_n(rng: np.random.Generator) -> Iterator[Outcome]:
    a, v, M = 5.0, 1.0, 20_000
    far = np.sqrt(v) * rng.standard_normal((400, M)).astype(np.float32)
    beta = theory.beta_required(a, v, theory.log_ratio(M, 1, 0.5))
    mass = special.expit(special.logsumexp(beta * far, axis=1).astype(float) - beta * a)
    yield below("T4", f"E far mass at the scale β = {beta:.3f}", 0.5, *mean_and_error(mass))
    told = theory.hard_limit(M, 4.0, v)
    beaten = far.max(axis=1) > 4.0
    yield identity("T4", "P(a far key beats near 4), β → ∞", told, *mean_and_error(beaten))
    L, K, c = 4096, 16, 0.4
    s = rng.uniform(-1, 1, (200, L)) * c * np.log(L)
    mass = _mass(s[:, K:], s[:, :K])
    told = theory.log_n_far_mass_lower(L, K, c)
    yield above("T4", "far mass under log-n, λ = .4 ln L", told, float(mass.min()))


CHECKS = (free, forced, controls)
