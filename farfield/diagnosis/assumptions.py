"""Which of the theory's assumptions hold in a trained model: each a number beside its limit.

| assumption           | measured                                                | holds         |
|----------------------|---------------------------------------------------------|---------------|
| `blocks_independent` | largest |mean e^{i(θ_b±θ_c)} − product of means|        | ≤ .1, noise   |
| `steps_independent`  | median over blocks of the window, measured / predicted  | ⅔ to 1.5      |
| `steps_stationary`   | largest change of ρ_b from the first L₀ tokens to later | ≤ .05         |
| `energy_spread`      | effective blocks (Σr)²/Σr² as a share of all            | ≥ ½           |
| `gates_independent`  | kept after ln 10/m tokens, measured / φ^n               | ½ to 2        |
| `far_keys_many`      | far keys that count, (Σe^s)²/Σe^{2s}, median at L₀      | ≥ 10          |
| `ell_stationary`     | change of ℓ, bias aside, from L₀ to the longest context | ≤ ¼ nat, 2 se |
| `near_stationary`    | the same of LSE_N                                       | ≤ ¼ nat, 2 se |

The limits are conventions, so that a reader sees at once what to look at; each row has its number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from farfield import theory
from farfield.diagnosis.prediction import Control
from farfield.diagnosis.samples import Samples
from farfield.diagnosis.transport import Row, Transports

COUPLING = 0.1
WINDOW = 1.5
RATE = 0.05
SPREAD = 0.5
KEPT = 2.0
NATS = 0.25
KEYS = 10.0


def of_transports(found: Transports) -> list[Row]:
    """The assumptions on steps, blocks and gates, one row for each head they are measured in."""
    rows = []
    for row in found.couplings:
        if row["largest"] is not None:
            limit = max(COUPLING, row["noise"])
            rows.append(_row("blocks_independent", row, row["largest"], limit, "at most"))
    for row, steps in _heads(found.steps):
        both = [
            step["window"] / step["window_independent"]
            for step in steps
            if step["window"] is not None and step["window_independent"] is not None
        ]
        if both:
            rows.append(_row("steps_independent", row, median(both), WINDOW, "within a factor"))
        moved = [
            abs(step["rho_first"] - step["rho_beyond"])
            for step in steps
            if step.get("rho_first") is not None and step.get("rho_beyond") is not None
        ]
        if moved:
            rows.append(_row("steps_stationary", row, max(moved), RATE, "at most"))
    for row in found.values:
        share = row["effective_blocks"] / len(row["energy"])
        rows.append(_row("energy_spread", row, share, SPREAD, "at least"))
    return rows + _of_gates(found)


def _of_gates(found: Transports) -> list[Row]:
    rows = []
    for gate in found.gates:
        if gate["constant"] or not gate["slope"] > 0:
            continue
        here = [
            lag
            for lag in found.lags
            if lag["kind"] == "gate" and (lag["layer"], lag["head"]) == _of(gate)
        ]
        goal = math.log(10) / gate["slope"]
        lag = min(here, key=lambda one: abs(math.log(one["lag"] / goal)))
        ratio = lag["left"] / lag["independent"] if lag["independent"] > 0 else math.inf
        if math.isfinite(ratio):
            rows.append(_row("gates_independent", gate, ratio, KEPT, "within a factor"))
    return rows


def of_logits(
    samples: Samples,
    measured: Sequence[Mapping[str, Any]],
    near_window: int,
    train_length: int,
    controls: Mapping[tuple[int, int], Control],
) -> list[Row]:
    """The assumptions on logits: far keys that are many and alike, and that nothing moves with the
    context. `measured` are rows of a diagnosis at the same near window."""
    rows = []
    for (layer, head), sample in samples.items():
        known = {"layer": layer, "head": head}
        m = controls.get((layer, head), Control()).slope
        h1 = np.asarray(theory.log_geometric_sum(m, sample.far.count))
        many = float(np.exp(np.median(2 * sample.far.lse - sample.far.lse2)))
        rows.append(_row("far_keys_many", known, many, KEYS, "at least"))
        own = sorted(
            (
                row
                for row in measured
                if (row["layer"], row["head"], row["near_window"]) == (layer, head, near_window)
                and row["low"] > train_length
                and row["lse_far"] is not None
            ),
            key=lambda row: row["low"],
        )
        if not own:
            continue
        last, count = own[-1], len(sample.context)
        moved = {
            "ell_stationary": (
                last["lse_far"] - float(theory.log_geometric_sum(m, round(last["far_keys"]))),
                sample.far.lse - h1,
                last["ell_sd"],
            ),
            "near_stationary": (last["lse_near"], sample.near.lse, last["lse_near_sd"]),
        }
        for name, (later, at_base, spread) in moved.items():
            error = math.sqrt(at_base.var() / count + (spread or 0.0) ** 2 / last["queries"])
            value = later - float(at_base.mean())
            row = _row(name, known, value, max(NATS, 2 * error), "at most")
            rows.append(row | {"standard_error": error, "context": last["high"] - 1})
    return rows


def _row(name: str, of: Mapping[str, Any], value: float, limit: float, sense: str) -> Row:
    holds = {
        "at most": abs(value) <= limit,
        "at least": value >= limit,
        "within a factor": 1 / limit <= value <= limit,
    }[sense]
    return {
        "assumption": name,
        "layer": of["layer"],
        "head": of["head"],
        "value": float(value),
        "limit": float(limit),
        "sense": sense,
        "holds": bool(holds),
    }


def _of(row: Mapping[str, Any]) -> tuple[int, int | None]:
    return row["layer"], row["head"]


def _heads(steps: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """The rows of each head together, the first of them standing for it."""
    groups: dict[tuple[int, int | None], list[Row]] = {}
    for step in steps:
        groups.setdefault(_of(step), []).append(step)
    return [(own[0], own) for own in groups.values()]
