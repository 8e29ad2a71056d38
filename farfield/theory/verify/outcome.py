"""What one check found, and the three kinds of check: identity, bound, approximation.

An identity holds exactly in expectation: the measured mean must lie within 4 standard errors. A
bound must not be crossed by more than 4 standard errors, on its side. An approximation must come
closer as the size it is asymptotic in grows, and end within 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Kind = Literal["identity", "bound", "approximation"]
Z = 4.0
CLOSE = 0.05
ROUNDING = 2e-6  # relative: the simulated angles and weights are float32


@dataclass(frozen=True)
class Outcome:
    """One statement's check.

    statement  T1 … T6; what is checked, in a few words; kind
    predicted, measured, standard_error  of the quantity (of the largest size, for approximations)
    passed, note  the verdict and its reason: z, slack, or how the error shrank
    """

    statement: str
    what: str
    kind: Kind
    predicted: float
    measured: float
    standard_error: float
    passed: bool
    note: str


def mean_and_error(sample: Any) -> tuple[float, float]:
    """(mean, its standard error) of independent numbers. Shapes: [N], N ≥ 2."""
    values = np.asarray(sample, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size))


def mean_along(angles: Any, predicted: complex) -> tuple[float, float, float]:
    """(|predicted|, mean and error of cos(Φ − arg predicted)): a complex mean as one real one."""
    turned = np.cos(np.asarray(angles, dtype=np.float64) - np.angle(predicted))
    return (abs(predicted), *mean_and_error(turned))


def identity(
    statement: str, what: str, predicted: Any, measured: Any, error: float, rounding: float = 0.0
) -> Outcome:
    """Passes within 4 standard errors (plus `rounding`, relative to the prediction)."""
    expected, measured = float(predicted), float(measured)
    off = max(abs(measured - expected) - rounding * abs(expected), 0.0)
    z = off / error if error > 0 else (0.0 if off == 0 else np.inf)
    sign = "" if z == 0 else "+" if measured > expected else "−"
    note = f"z = {sign}{z:.1f}" if error > 0 else "equal" if off == 0 else f"off by {off:.2g}"
    return Outcome(statement, what, "identity", expected, measured, error, bool(z <= Z), note)


def below(statement: str, what: str, bound: Any, measured: Any, error: float = 0.0) -> Outcome:
    """An upper bound: passes while measured − 4 standard errors stays at or below it."""
    limit, measured = float(bound), float(measured)
    passed = measured <= limit + Z * error + ROUNDING * abs(limit)
    note = f"slack {limit - measured:.2g}"
    return Outcome(statement, what, "bound", limit, measured, error, bool(passed), f"≤, {note}")


def above(statement: str, what: str, bound: Any, measured: Any, error: float = 0.0) -> Outcome:
    """A lower bound: passes while measured + 4 standard errors stays at or above it."""
    limit, measured = float(bound), float(measured)
    passed = measured >= limit - Z * error - ROUNDING * abs(limit)
    note = f"slack {measured - limit:.2g}"
    return Outcome(statement, what, "bound", limit, measured, error, bool(passed), f"≥, {note}")


def shrinking(
    statement: str,
    what: str,
    sizes: Sequence[float],
    predicted: Any,
    measured: Sequence[float],
    errors: Sequence[float] = (0.0,),
) -> Outcome:
    """An approximation: the relative error halves at least from the first size to the last, or is
    lost in noise, and ends within 5 %."""
    told = [float(each) for each in predicted]
    off = [abs(m - p) / abs(p) for m, p in zip(measured, told, strict=True)]
    noise = Z * errors[-1] / abs(told[-1])
    passed = off[-1] <= 0.5 * off[0] + noise and off[-1] <= CLOSE + noise
    told_sizes = " → ".join(f"{size:,g}" for size in (sizes[0], sizes[-1]))
    note = f"error {off[0]:.1%} → {off[-1]:.1%} at {told_sizes}"
    return Outcome(
        statement, what, "approximation", told[-1], measured[-1], errors[-1], bool(passed), note
    )
