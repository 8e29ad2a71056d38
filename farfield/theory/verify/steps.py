"""T1 and its relatives: what independent and dependent steps make of a mean."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from farfield import theory
from farfield.theory import counterexamples, laws
from farfield.theory.stylised import walked_phases
from farfield.theory.verify.outcome import (
    ROUNDING,
    Outcome,
    above,
    below,
    identity,
    mean_along,
    mean_and_error,
)

SAMPLES = 200_000
LAWS: tuple[tuple[str, laws.Rotations, int], ...] = (
    ("normal, σ = .4", laws.Normal(0.4), 10),
    ("normal with drift .5", laws.Normal(0.4, 0.5), 10),
    ("uniform on ±1", laws.Uniform(1.0), 10),
    ("2 rad at a tenth of tokens", laws.Sometimes(0.1, 2.0), 15),
    ("von Mises, κ = 2", laws.VonMises(2.0), 6),
    ("±1 rad", laws.TwoPoint(1.0), 4),
)


def _seed(rng: np.random.Generator) -> laws.Draws:
    return laws.Draws(int(rng.integers(2**31)))


def _phase(
    law: laws.Rotations, steps: int, rng: np.random.Generator, blocks: int = 1
) -> np.ndarray:
    walk = walked_phases(law, SAMPLES // blocks, blocks, _seed(rng), steps)
    return walk(1)[:, 0].double().numpy()


def means(rng: np.random.Generator) -> Iterator[Outcome]:
    """T1: E e^{iΦ_n} = c^n for each law, E P_n = ρ^n I for reflections, and the windows."""
    for name, law, n in LAWS:
        told = complex(law.harmonic(1)) ** n
        what = f"E e^iΦ after {n} steps, {name}"
        yield identity("T1", what, *mean_along(_phase(law, n, rng)[:, 0], told), ROUNDING)
    reflection, draws = laws.Householder(16), _seed(rng)
    product = torch.eye(16).expand(20_000, 16, 16)
    for _ in range(8):
        product = reflection.extend(product, draws)
    kept = product.diagonal(dim1=1, dim2=2).mean(1).numpy()
    rate = theory.householder_rate(16) ** 8
    yield identity("T1", "xᵀPx after 8 reflections, d = 16", rate, *mean_and_error(kept))
    for n, side in ((29, below), (28, above)):
        measured = mean_and_error(np.cos(_phase(laws.Normal(0.4), n, rng)))
        yield side("T1", f"w(.1) = 29 at σ = .4: ρ^{n} against .1", 0.1, *measured)
    sigma = 1 / np.arange(1, 9)
    n = int(theory.head_window(np.ones(8), np.exp(-(sigma**2) / 2), 0.5))
    head = np.cos(_phase(laws.Normal(sigma), n, rng, blocks=8)).mean(axis=1)
    yield below("T1", f"a head's mean score at its window w(.5) = {n}", 0.5, *mean_and_error(head))
    yield _believed("T1", counterexamples.shared_token(10, 0.4, SAMPLES, rng))


def _believed(statement: str, found: counterexamples.Counterexample) -> Outcome:
    what = f"false that {found.belief} (it would be {found.believed:.2g})"
    return identity(
        statement, what, found.true, found.measured, found.standard_error, rounding=1e-9
    )


def near(rng: np.random.Generator) -> Iterator[Outcome]:
    """T1b: how far near routes move, and the pathwise bound."""
    phase = _phase(laws.Normal(0.3), 6, rng)[:, 0]
    told = theory.near_displacement([1.0], [np.exp(-0.045)], 6)
    moved = np.abs(np.exp(1j * phase) - 1) ** 2
    yield identity("T1b", "E|P x − x|² after 6 steps, σ = .3", told, *mean_and_error(moved))
    angles = laws.Normal(0.3).walk(20_000, 1, _seed(rng))(6)[..., 0].double().numpy()
    change = np.abs(np.cos(angles.sum(axis=1)) - 1)
    bound = theory.near_change_bound(1.0, 2 * np.abs(np.sin(angles / 2)))
    worst = float((change - bound).max())
    yield below("T1b", "|qPk − qk| less its bound, worst of 20,000 paths", 0.0, worst)


def law_not_mean(rng: np.random.Generator) -> Iterator[Outcome]:
    """T1c: the law of the phase, the second moment of a score, and where a mean says nothing."""
    phase = np.mod(_phase(laws.Normal(0.5), 8, rng)[:, 0], 2 * np.pi)
    bins = 32
    counts = np.histogram(phase, bins=bins, range=(0, 2 * np.pi))[0]
    distance = 0.5 * np.abs(counts / SAMPLES - 1 / bins).sum()
    noise = float(np.sqrt(bins / (2 * np.pi * SAMPLES)))  # E of the distance when there is none
    lower, upper = theory.total_variation_bounds(theory_moduli(0.5), 8)
    yield above("T1c", "TV(Φ_8, uniform), σ = .5, in 32 bins", lower, distance, noise / 4)
    yield below("T1c", "TV(Φ_8, uniform), σ = .5, in 32 bins", upper, distance, noise / 4)
    z = np.array([1.0, 0.5j, 0.7 * np.exp(0.3j)])
    phases = _phase(laws.Normal(0.6), 4, rng, blocks=3)
    score = (z * np.exp(1j * phases)).real.sum(axis=1) / np.sqrt(6)
    c1, c2 = (np.full(3, theory.normal_harmonic(m, 0.6)) for m in (1, 2))
    first, second = theory.score_moments(z, c1, c2, 4, 6)
    yield identity("T1c", "E s of three blocks after 4 steps", first, *mean_and_error(score))
    yield identity("T1c", "E s² of three blocks: needs c_2", second, *mean_and_error(score**2))
    yield _believed("T1c", counterexamples.sign_flips(20, 10_000, rng))
    yield _believed("T1c", counterexamples.right_angle_turns(10, 10_000, rng))
    frequencies = 10_000.0 ** (-np.arange(32) / 32)
    phase = walked_phases(laws.Constant(frequencies), 1, 32, laws.Draws(0), 512)(1)
    told = theory.rope_mean_cosine(512, 64)
    measured = phase.double().cos().mean().item()
    yield identity("T1c", "RoPE's mean cosine at 512: no decay", told, measured, 0.0, 1e-4)


def theory_moduli(sigma: float, count: int = 60) -> np.ndarray:
    """|c_m| of a normal law, m = 1 … count."""
    return np.abs(theory.normal_harmonic(np.arange(1, count + 1), sigma))


def dependence(rng: np.random.Generator) -> Iterator[Outcome]:
    """T1d: chains, perturbed steps, and why a marginal gap is not enough."""
    kernel, angles = [[0.1, 0.9], [0.9, 0.1]], [1.0, -1.0]
    phase = _phase(laws.Markov(kernel, angles), 20, rng)[:, 0]
    told = complex(theory.markov_mean(kernel, angles, 20))
    yield identity("T1d", "E e^iΦ of 20 alternating steps", *mean_along(phase, told))
    chain = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
    turns = np.array([-1.2, 0.1, 1.0])
    phase = _phase(laws.Markov(chain, turns), 4, rng)[:, 0]
    told = complex(theory.markov_mean(chain, turns, 4))
    yield identity("T1d", "E e^iΦ of 4 steps of three states", *mean_along(phase, told))
    bound = theory.two_sided_bound(theory.two_sided_rate(chain, turns), 4)
    size = abs(np.exp(1j * phase).mean())
    yield below("T1d", "the same, by both neighbours", bound, size, 1 / np.sqrt(SAMPLES))
    yield below("T1d", "steps nudged by their past, 12", *_nudged(12, rng))
    for found in (
        counterexamples.alternating_chain(20, 0.9, 1.0, SAMPLES, rng),
        counterexamples.undoing_history(50, 0.5, SAMPLES, rng),
        counterexamples.telescoping_steps(50, 0.5, 20_000, rng),
    ):
        yield _believed("T1d", found)


def _nudged(steps: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """θ_t = ε sign(sin Φ_{t−1}) + N(0, σ²): E[M | past] = ρ cos ε I + Δ, ‖Δ‖ = ρ sin ε."""
    sigma, nudge = 0.7, 0.1
    phase = np.zeros(SAMPLES)
    for _ in range(steps):
        phase += nudge * np.sign(np.sin(phase)) + rng.normal(0.0, sigma, SAMPLES)
    rho = np.exp(-(sigma**2) / 2)
    bound = theory.perturbed_bound(rho * np.cos(nudge), rho * np.sin(nudge), steps)
    return float(bound), float(abs(np.exp(1j * phase).mean())), 1 / np.sqrt(SAMPLES)


CHECKS = (means, near, law_not_mean, dependence)
