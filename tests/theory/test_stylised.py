"""The stylised model against loops, and against what the theory says of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from farfield import theory
from farfield.algebra import measures
from farfield.theory import laws, stylised
from farfield.theory.stylised import Control, Model, simulate

FREQUENCIES = np.array([0.9, 0.11])
AMPLITUDES = np.array([0.6, 0.3])


def by_loop(control: Control, length: int, near_window: int, near: float) -> tuple[float, ...]:
    """(far mass, ℓ, |carried far mean|²) of shared keys under constant angles, values without
    noise."""
    seen = range(length if control.window is None else min(length, control.window))
    scale = 1.0 if control.log_n is None else control.log_n * math.log(len(seen))
    weights, content, values = [], [], []
    for n in seen:
        s = sum(x * math.cos(w * n) for x, w in zip(AMPLITUDES, FREQUENCIES, strict=True))
        s = near if n < near_window else s
        gates = 0.0 if control.gates is None else n * math.log(0.9)
        weights.append(math.exp(scale * s - control.slope * n + gates))
        content.append(s)
        values.append(np.exp(1j * FREQUENCIES * n))
    far = slice(near_window, None)
    z = sum(weights[far])
    mean = sum(a * v for a, v in zip(weights[far], values[far], strict=True)) / z
    ell = math.log(sum(map(math.exp, content[far])) / len(content[far]))
    return z / sum(weights), ell, float((np.abs(mean) ** 2).sum())


CONTROLS = [
    Control(),
    Control(slope=0.05),
    Control(window=40),
    Control(log_n=0.4),
    Control(gates=(9e9, 1e9)),  # all but fixed, at 0.9
    Control(slope=0.01, gates=(9e9, 1e9), window=60, log_n=0.3),
]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_a_row_is_its_loop(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stylised, "_CHUNK", 64)  # many chunks, cut anywhere
    model = Model(
        laws.Constant(FREQUENCIES), AMPLITUDES, 7, 1.5, "shared", control, [1.0, 1.0], 0.0
    )
    for found in simulate(model, [20, 100], routes=2):
        mass, ell, power = by_loop(control, found.length, 7, 1.5)
        assert found.far_mass[0].item() == pytest.approx(mass, rel=1e-4)
        assert measures.log_mean_exp(found.content)[0].item() == pytest.approx(ell, rel=1e-4)
        assert found.far_power(carried=True)[0] == pytest.approx(power, rel=1e-3, abs=1e-6)
        assert found.far_power(carried=False)[0] == pytest.approx(2.0)
        parts = found.split(carried=False)
        assert parts.near[0].norm().item() == pytest.approx(1 - mass, rel=1e-4)
        assert parts.far[0].norm().item() == pytest.approx(mass * math.sqrt(2), rel=1e-4)


def test_shorter_lengths_are_the_start_of_longer_ones() -> None:
    model = Model(laws.Normal(0.4), np.full(4, 0.5), 8, 2.0, mean_power=1.0)
    both, alone = simulate(model, [64, 256], 5, seed=3), simulate(model, [64], 5, seed=3)
    assert torch.equal(both[0].far_mass, alone[0].far_mass)
    assert [found.length for found in both] == [64, 256]
    assert not torch.equal(both[0].far_mass, simulate(model, [64], 5, seed=4)[0].far_mass)


@pytest.mark.parametrize("slope", [0.0, 0.001])
def test_far_mass_and_powers_are_the_predicted_ones(slope: float) -> None:
    x, w, near = np.full(32, 0.25), 32, 4.0
    model = Model(laws.Normal(0.4), x, w, near, control=Control(slope), mean_power=1.0)
    lse_near = near + theory.log_geometric_sum(slope, w)
    ell, ell2 = theory.ell_blocks(x), theory.ell_blocks(2 * x)
    c = np.full(32, theory.normal_harmonic(1, 0.4).real)
    for found in simulate(model, [512, 4096], 60, seed=1):
        told = {
            carried: theory.predict(
                found.length, w, lse_near, ell, ell2, np.full(32, 1 / 32), c, 1.0, 1.0,
                carried, slope,
            )
            for carried in (False, True)
        }  # fmt: skip
        mass, error = stylised.mean_and_error(found.far_mass)
        assert mass == pytest.approx(told[True].far_mass, abs=4 * error + 1e-4)
        for carried, prediction in told.items():
            snr, error = found.snr(carried)
            # A ratio of means stands for a mean of ratios: off by about E2/M.
            slack = 4 * error + 4 * math.exp(ell2 - 2 * ell) / found.length * prediction.snr
            assert snr == pytest.approx(prediction.snr, abs=slack)


def test_shared_keys_tilt_the_phases_they_share_with_values() -> None:
    x = np.full(4, 1.0)
    model = Model(laws.Normal(0.6), x, 40, 4.0, "shared", mean_power=1.0, noise_power=0.0)
    found = simulate(model, [8192], 40, seed=2)[0]
    moments = theory.normal_harmonic(np.arange(1, 30), 0.6)[:, None] * np.ones(4)
    predicted = theory.coupled_power(8192 - 40, x, moments).mean()
    power, error = found.far_power(carried=True)
    assert power == pytest.approx(predicted, abs=4 * error)
    assert power > 0.5 * theory.coupling_floor(1.0)
    independent = Model(laws.Normal(0.6), x, 40, 4.0, mean_power=1.0, noise_power=0.0)
    assert simulate(independent, [8192], 40, seed=2)[0].far_power(True)[0] < 0.1 * power


def test_near_keys_may_share_the_key_too() -> None:
    x = np.full(8, 0.4)
    model = Model(laws.Normal(0.5), x, 16, None, "shared")
    found = simulate(model, [2048], 200, seed=5)[0]
    moments = theory.normal_harmonic(np.arange(1, 30), 0.5)[:, None] * np.ones(8)
    predicted = theory.shared_key_far_mass(2048, 16, x, moments)
    odds = (found.far.lse.exp().mean() / found.near.lse.exp().mean()).log()
    assert torch.sigmoid(odds).item() == pytest.approx(predicted, abs=0.01)
    assert found.near.largest.min().item() == pytest.approx(x.sum(), rel=1e-5)


@pytest.mark.parametrize("law", [laws.Householder(8), laws.Haar(8), laws.Cayley(8, 0.6)])
def test_whole_head_maps_forget_as_well(law: laws.Maps) -> None:
    model = Model(law, [0.8], 10, 2.0, mean_power=1.0, noise_power=0.5)
    found = simulate(model, [400], 60, seed=1)[0]
    ell = measures.log_mean_exp(found.content)
    mean, error = stylised.mean_and_error(ell)
    assert mean == pytest.approx(theory.ell_haar(0.8, 8), abs=4 * error + 2e-3)
    still, carried = found.far_power(False)[0], found.far_power(True)[0]
    assert still == pytest.approx(1.0, rel=0.05)
    assert carried < 0.2


def test_a_shared_key_seen_through_reflections_has_ell_of_the_sphere() -> None:
    model = Model(laws.Householder(6), [1.5], 60, 2.0, "shared", mean_power=1.0)
    found = simulate(model, [1060], 60, seed=3)[0]
    value, error = stylised.mean_and_error(found.content.lse.exp() / 1000)
    assert value == pytest.approx(math.exp(theory.ell_haar(1.5, 6)), abs=4 * error)


def test_noise_is_drawn_at_the_power_asked_for() -> None:
    model = Model(laws.Normal(0.4), np.full(4, 0.5), 8, 2.0, noise_power=2.0)
    found = simulate(model, [300], 400, seed=6)[0]
    expected = (2.0 / measures.inverse_participation(found.far)).mean()
    for carried in (False, True):
        power, error = found.far_power(carried)
        assert power == pytest.approx(expected.item(), abs=4 * error)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: simulate(Model(laws.Normal(1), [0.5], 8, 1.0), [8]), "more than near_window"),
        (lambda: simulate(Model(laws.Normal(1), [0.5], 8, 1.0), [9], routes=1), "routes"),
        (lambda: simulate(Model(laws.Normal(1), [0.5], 8, 1.0), []), "lengths"),
        (lambda: Model(laws.Haar(4), [0.5, 0.5], 8, 1.0), "one number for a law"),
        (lambda: Model(laws.Normal(1), [0.5], 8, None), "unless keys are shared"),
        (lambda: Model(laws.Normal(1), [0.5], 8, 1.0, "same"), "independent or shared"),  # type: ignore[arg-type]
        (lambda: Model(laws.Normal(1), [0.5], 8, 1.0, mean_power=[1, 2]), "mean_power"),
        (lambda: Control(slope=-1.0), "slope"),
        (lambda: Control(gates=(1.0, 0.0)), "gates"),
        (lambda: Control(window=0), "window"),
        (lambda: Control(log_n=0.0), "log_n"),
    ],
)
def test_models_that_are_none_are_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()
