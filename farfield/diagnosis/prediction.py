"""What the theory says a head will do at longer lengths, from its training length alone.

A query's far keys weigh Z_D = e^ℓ Σ_{n<M} e^{−mn}: M keys that each add e^ℓ in mean, under a bias
of slope m. If ℓ and the near keys' LSE_N are at longer lengths what they are at L₀, far mass is

    A(M) = mean over queries of σ(LSE_D + ln h(M) − ln h(M₀) − LSE_N),   h(M) = Σ_{n<M} e^{−mn},

with M₀ the far keys that the query had; under log-n scaling both sums are taken at the scaled
logits. Beside it stand three guesses that need no theory: nothing changes; far mass grows like the
number of far keys; the odds of far mass do. Rows say which came closest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from farfield import theory
from farfield.diagnosis.samples import Floats, HeadSample, Samples
from farfield.diagnosis.transport import Row, Transports

LONGEST = 2.0**40
"""Far keys beyond which a predicted break is called never."""

GUESSES = ("no_change", "proportional", "proportional_odds")


@dataclass(frozen=True)
class Control:
    """What a layer's mechanism adds to one query head's logits.

    slope m, nats per token, ALiBi's or −ln of the mean gate; log_scaled: logits times s·ln(keys
    seen). A window needs no entry: far keys are counted as they are seen.
    """

    slope: float = 0.0
    log_scaled: bool = False


@dataclass(frozen=True)
class HeadFacts:
    """What of a head was measured at L₀ beside its sampled queries, for the predictor of powers.

    mean_power |μ_b|² and c_b = E e^{iθ_b} of each plane; noise_power E|ξ|²; carried: whether values
    ride along.
    """

    mean_power: Sequence[float]
    c: Sequence[complex]
    noise_power: float
    carried: bool


def far_mass(sample: HeadSample, control: Control, far_keys: float, context: float) -> float:
    """A(M): the mean over queries of σ(ln Z_D − ln Z_N) with M far keys in a context of n tokens.

    Units: tokens. Raises: ValueError for a negative M.
    """
    return float(special.expit(_log_odds(sample, control, far_keys, context)).mean())


def _log_odds(sample: HeadSample, control: Control, far_keys: float, context: float) -> Floats:
    m = control.slope
    grown = np.asarray(theory.log_geometric_sum(m, np.round(far_keys)))
    grown = grown - np.asarray(theory.log_geometric_sum(m, sample.far.count))
    if not control.log_scaled:
        return np.asarray(sample.far.lse + grown - sample.near.lse)
    # Scaled for a context of n instead of the query's own, at most fourfold: ln n grows slowly.
    beta = np.clip(np.log(context) / np.log(np.maximum(sample.context, 2.0)), 0.0, 4.0)
    return np.asarray(sample.far.scaled(beta) + grown - sample.near.scaled(beta))


def break_length(
    sample: HeadSample, control: Control, near_window: int, share: float = 0.5
) -> float:
    """The least context at which the predicted far mass reaches a share; ∞ where it never does.

    Far keys are doubled until it does, then halved in between: to a thousandth.

    Units: tokens. Raises: ValueError for a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; expected a number between 0 and 1")

    def reached(keys: float) -> bool:
        return far_mass(sample, control, keys, keys + near_window) >= share

    high = 1.0
    while not reached(high):
        if high >= LONGEST:
            return math.inf
        high *= 2
    low = high / 2
    while high - low > max(1.0, 1e-3 * low):
        middle = math.floor((low + high) / 2)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return near_window + high


def guesses(sample: HeadSample, far_keys: float) -> dict[str, float]:
    """Far mass with M far keys by the guesses: each knows the mean far mass and M at L₀."""
    share, keys = float(sample.far_mass.mean()), float(sample.far.count.mean())
    grown = far_keys / keys
    with np.errstate(divide="ignore"):
        odds = special.logit(share) + np.log(grown) if far_keys else -np.inf
    return {
        "no_change": share,
        "proportional": min(1.0, share * grown),
        "proportional_odds": float(special.expit(odds)),
    }


def far_power(
    sample: HeadSample, facts: HeadFacts, control: Control, near_window: int, far_keys: float
) -> tuple[float, float]:
    """(|far part|², SNR = |near part|²/|far part|²) as the predictor has them (T6).

    One typical row stands for all: LSE_N and ℓ such that the far mass at L₀ is the measured one,
    E2 the mean over queries. Units: |v|²; –.
    """
    m, w = control.slope, near_window
    keys = sample.far.count
    h1 = np.asarray(theory.log_geometric_sum(m, keys))
    h2 = np.asarray(theory.log_geometric_sum(2 * m, keys))
    share = float(np.clip(sample.far_mass.mean(), 1e-12, 1 - 1e-12))
    ell = float(special.logit(share) - h1.mean() + m * w)
    e2 = max(0.0, float((sample.far.lse2 - h2 - 2 * (sample.far.lse - h1)).mean()))
    told = theory.predict(
        near_window + round(far_keys), w, 0.0, ell, 2 * ell + e2, facts.mean_power,
        np.asarray(facts.c), facts.noise_power, float(sample.near_power.mean()), facts.carried,
        slope=m,
    )  # fmt: skip
    return float(told.far_power), float(told.snr)


def predicted_rows(
    samples: Samples,
    measured: Sequence[Mapping[str, Any]],
    *,
    near_window: int,
    train_length: int,
    controls: Mapping[tuple[int, int], Control] | None = None,
    facts: Mapping[tuple[int, int], HeadFacts] | None = None,
) -> list[Row]:
    """A row for each head and stratum of contexts beyond L₀: prediction, guesses, measurement.

    `measured` are rows of a diagnosis (`rows`) at the same near window; a head's break length,
    which is one number, is in each of its rows.
    """
    found = []
    for (layer, head), sample in samples.items():
        control = (controls or {}).get((layer, head), Control())
        own = sorted(
            (
                row for row in measured
                if (row["layer"], row["head"], row["near_window"]) == (layer, head, near_window)
            ),
            key=lambda row: row["low"],
        )  # fmt: skip
        known = {
            "layer": layer,
            "head": head,
            "near_window": near_window,
            "train_length": train_length,
            "queries_at_train_length": len(sample.context),
            "far_mass_at_train_length": float(sample.far_mass.mean()),
            "slope": control.slope,
            "break_predicted": _finite(break_length(sample, control, near_window)),
            "break_measured": measured_break(own),
            "break_seen_to": max((row["high"] - 1 for row in own), default=None),
        }
        fact = (facts or {}).get((layer, head))
        for row in own:
            if row["low"] > train_length and row["far_mass"] is not None:
                found.append(known | _compared(sample, control, fact, near_window, row))
    return found


def _compared(
    sample: HeadSample,
    control: Control,
    facts: HeadFacts | None,
    near_window: int,
    row: Mapping[str, Any],
) -> Row:
    context = 0.5 * (row["low"] + row["high"] - 1)
    told = {
        "predicted": far_mass(sample, control, row["far_keys"], context),
        **guesses(sample, row["far_keys"]),
    }
    errors = {name: abs(value - row["far_mass"]) for name, value in told.items()}
    best = min(GUESSES, key=lambda name: errors[name])
    power, snr = (None, None)
    if facts is not None:
        power, snr = map(_finite, far_power(sample, facts, control, near_window, row["far_keys"]))
    near = row["near_norm"] ** 2 if row["near_norm"] is not None else None
    return {
        "low": row["low"],
        "high": row["high"],
        "context": context,
        "far_keys": row["far_keys"],
        "measured": row["far_mass"],
        **told,
        "error": errors["predicted"],
        **{f"error_{name}": errors[name] for name in GUESSES},
        "best_guess": best,
        "beats_guesses": errors["predicted"] < errors[best],
        "far_power_predicted": power,
        "far_power_measured": row["far_power"],
        "snr_predicted": snr,
        "snr_measured": near / row["far_power"] if near is not None and row["far_power"] else None,
    }


def measured_break(rows: Sequence[Mapping[str, Any]], share: float = 0.5) -> float | None:
    """The context at which a head's measured far mass comes to a share and stays; None where it
    does not. Between strata the log odds are taken as straight in the log of the context."""
    there = [row for row in rows if row["far_mass"] is not None]
    crossing = None
    for before, after in itertools.pairwise(there):
        if before["far_mass"] < share <= after["far_mass"]:
            crossing = (before, after)
        elif after["far_mass"] < share:
            crossing = None
    if not there or there[-1]["far_mass"] < share:
        return None
    if crossing is None:
        return float(there[0]["low"])
    (x0, y0), (x1, y1) = (
        (math.log(0.5 * (r["low"] + r["high"] - 1)), special.logit(np.clip(r["far_mass"], 1e-9, 1)))
        for r in crossing
    )
    goal = float(special.logit(share))
    at = 1.0 if not np.isfinite(y1) or y1 == y0 else (goal - y0) / (y1 - y0)
    return float(math.exp(x0 + at * (x1 - x0)))


def controls_of(transports: Transports, heads: int) -> dict[tuple[int, int], Control]:
    """The controls of every query head, from the gates and scales that were measured."""
    scaled = {row["layer"] for row in transports.layers if row["log_scaled"]}
    slopes = {(row["layer"], row["head"]): row for row in transports.gates}
    found = {}
    for layer in (row["layer"] for row in transports.layers):
        of_gates = [row for (at, _), row in slopes.items() if at == layer]
        for head in range(heads):
            slope = 0.0
            if of_gates:
                own = head * of_gates[0]["heads"] // heads
                slope = slopes[layer, own]["slope"]
            found[layer, head] = Control(slope, layer in scaled)
    return found


def facts_of(transports: Transports, heads: int) -> dict[tuple[int, int], HeadFacts]:
    """What the predictor of powers needs of every query head, where it was measured."""
    carried = {row["layer"]: row["carried"] for row in transports.layers}
    steps: dict[tuple[int, int | None], dict[int, complex]] = {}
    for row in transports.steps:
        if row["kind"] == "rotation":
            blocks = steps.setdefault((row["layer"], row["head"]), {})
            turn = complex(math.cos(row["drift"]), math.sin(row["drift"]))
            blocks[row["block"]] = 1.0 if row["rho"] >= 1 else row["rho"] * turn
    groups: dict[int, int] = {}
    for row in transports.values:
        groups[row["layer"]] = max(groups.get(row["layer"], 0), row["head"] + 1)
    found = {}
    for row in transports.values:
        layer, planes = row["layer"], len(row["mean_power"])
        blocks = steps.get((layer, row["head"]), steps.get((layer, None), {}))
        if carried[layer] and len(blocks) != planes:
            continue  # values ride along maps that are no rotations: no exact form
        c = [blocks.get(block, 1.0) for block in range(planes)]
        of_group = heads // groups[layer]
        for head in range(row["head"] * of_group, (row["head"] + 1) * of_group):
            found[layer, head] = HeadFacts(row["mean_power"], c, row["noise_power"], carried[layer])
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
