"""T6: far mass, far power and signal-to-noise ratio over length, put together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from farfield import theory
from farfield.theory import laws
from farfield.theory.stylised import Control, Model, simulate, walked_phases
from farfield.theory.verify.outcome import Outcome, identity, mean_and_error, shrinking

X, W, NEAR, SIGMA = np.full(32, 0.25), 32, 4.0, 0.4
LENGTHS = (48, 1024, 16384)


def ratios(rng: np.random.Generator) -> Iterator[Outcome]:
    """A and SNR with values left and carried, free and under ALiBi."""
    ell, ell2 = theory.ell_blocks(X), theory.ell_blocks(2 * X)
    c = np.full(32, np.exp(-(SIGMA**2) / 2))
    for slope in (0.0, 0.001):
        name = "free" if slope == 0 else "under ALiBi"
        model = Model(laws.Normal(SIGMA), X, W, NEAR, control=Control(slope), mean_power=1.0)
        runs = simulate(model, LENGTHS, 150, int(rng.integers(2**31)))
        lse_near = NEAR + theory.log_geometric_sum(slope, W)
        told = {
            carried: theory.predict(
                LENGTHS, W, lse_near, ell, ell2, np.full(32, 1 / 32), c, 1.0, 1.0, carried, slope
            )
            for carried in (False, True)
        }
        mass = [mean_and_error(run.far_mass.numpy()) for run in runs]
        yield shrinking(
            "T6", f"far mass, {name}", LENGTHS, told[True].far_mass, *zip(*mass, strict=True)
        )
        for carried, prediction in told.items():
            found = [run.snr(carried) for run in runs]
            what = f"SNR, values {'carried' if carried else 'left'}, {name}"
            yield shrinking("T6", what, LENGTHS, prediction.snr, *zip(*found, strict=True))


def shared(rng: np.random.Generator) -> Iterator[Outcome]:
    """One key shared by every position: no edge between near and far."""
    moments = np.outer(theory.normal_harmonic(np.arange(1, 30), SIGMA), np.ones(32))
    draws = laws.Draws(int(rng.integers(2**31)))
    walk = walked_phases(laws.Normal(SIGMA), 50_000, 32, draws, 20)
    content = walk(1)[:, 0].cos().double().numpy() @ X
    told = np.exp(theory.log_shared_key_kernel(20, X, moments))
    yield identity(
        "T6", "E e^s of a shared key, 20 tokens back", told, *mean_and_error(np.exp(content))
    )
    model = Model(laws.Normal(SIGMA), X, W, None, "shared")
    runs = simulate(model, LENGTHS, 300, int(rng.integers(2**31)))
    found = []
    for run in runs:
        far, near = run.far.lse.exp().numpy(), run.near.lse.exp().numpy()
        share = far.mean() / (far.mean() + near.mean())
        error = mean_and_error((far - share * (far + near)) / (far + near).mean())[1]
        found.append((float(share), error))
    told = np.asarray(theory.shared_key_far_mass(LENGTHS, W, X, moments))
    for n, prediction, (share, error) in zip(LENGTHS, told, found, strict=True):
        yield identity(
            "T6", f"far over all weight, shared key, L = {n:,}", prediction, share, error, 1e-3
        )


def laws_of_length(rng: np.random.Generator) -> Iterator[Outcome]:
    """Where SNR reaches 1: the laws M* ≈ z/|μ| and z²/N_c against the exact prediction."""
    ell, ell2 = theory.ell_blocks(X), theory.ell_blocks(2 * X)
    e2 = theory.e2_blocks(X)
    power, c = np.full(32, 1 / 32), np.full(32, np.exp(-(SIGMA**2) / 2))
    near = (1.0, 5.0)
    for carried in (False, True):
        told, exact = [], []
        for score in near:
            lse = score + np.log(W)
            told.append(theory.break_laws(lse, ell, e2, power, c, 1.0, 1.0)[int(carried)])
            exact.append(
                float(theory.snr_break_length(lse, ell, ell2, power, c, 1.0, 1.0, carried))
            )
        what = f"M* of SNR = 1, values {'carried: z²/N_c' if carried else 'left: z/|μ|'}"
        yield shrinking("T6", what, exact, told, exact)


CHECKS = (ratios, shared, laws_of_length)
