"""Where near signal survives: SNR over length × one of λ, σ, ALiBi's slope; three ways at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from farfield.theory import checks, controls, laws, steps
from farfield.theory.answers import Head, Row
from farfield.theory.checks import Floats

Over = Literal["lambda", "sigma", "slope"]
RANGES = {"lambda": (2.0, 16.0), "sigma": (0.02, 1.5), "slope": (1e-5, 1.0)}
LONGEST = 1 << 20
_NEVER = -300.0  # log10 of an SNR that underflows


@dataclass(frozen=True)
class Panel:
    """log10 SNR of one way, and the length at which it falls to 0 for each value.

    Shapes: log_snr [V, L]; break_length [V] in tokens, ∞ where it stays above 0.
    """

    title: str
    log_snr: Floats
    break_length: Floats


@dataclass(frozen=True)
class Diagram:
    """Panels over the same lengths [L] and values [V] of `over`.

    mixing: w(.1) of each value [V], or None where it does not vary; below it nothing is far yet.
    """

    over: Over
    values: Floats
    lengths: Floats
    panels: tuple[Panel, ...]
    mixing: Floats | None

    def rows(self) -> list[Row]:
        """The break length of every panel at every value."""
        name = self.over
        return [
            {name: float(value)}
            | {panel.title: float(panel.break_length[i]) for panel in self.panels}
            for i, value in enumerate(self.values)
        ]


def diagram(
    over: Over,
    head: Head,
    slope: float = 0.001,
    values: int = 61,
    lengths: int = 97,
    longest: int = LONGEST,
) -> Diagram:
    """SNR of near signal with Q/K rotated, Q/K/V rotated, and under ALiBi.

    lambda: the amplitudes grow, and near_score with them in proportion. sigma: steps are N(0, σ²).
    slope: ALiBi in all panels; the third is what it guarantees for any content in ±λ.
    Raises: ValueError for an unknown `over`, too few points, or lengths within near_window.
    """
    if over not in get_args(Over):
        checks.refuse("over", over, f"one of {', '.join(get_args(Over))}")
    checks.counts("values", values, least=2)
    checks.counts("lengths", lengths, least=2)
    if longest <= 2 * head.near_window:
        checks.refuse("longest", longest, f"more than twice near_window = {2 * head.near_window}")
    low, high = RANGES[over]
    axis = np.linspace(low, high, values) if over == "lambda" else np.geomspace(low, high, values)
    points = np.unique(np.round(np.geomspace(2 * head.near_window, longest, lengths)))
    heads = [_head(head, over, value) for value in axis]
    slopes = axis if over == "slope" else np.zeros(values)
    third = _guaranteed if over == "slope" else _carried_under(slope)
    title = (
        "ALiBi's guarantee, any content"
        if over == "slope"
        else f"Q/K/V rotated, ALiBi m = {slope:g}"
    )
    panels = tuple(
        _panel(name, way, heads, slopes, points)
        for name, way in (
            ("Q/K rotated", _rotated(False)), ("Q/K/V rotated", _rotated(True)), (title, third),
        )
    )  # fmt: skip
    mixing = steps.mixing_window(np.exp(-(axis**2) / 2)) if over == "sigma" else None
    return Diagram(over, axis, points, panels, None if mixing is None else np.asarray(mixing))


def _head(head: Head, over: Over, value: float) -> Head:
    if over == "lambda":
        scale = value / head.half_range
        return replace(head, amplitude=head.amplitude * scale, near_score=head.near_score * scale)
    return replace(head, law=laws.Normal(value)) if over == "sigma" else head


Curve = Callable[[Floats], Floats]
Way = Callable[[Head, float], Curve]
"""(head, slope) -> SNR as a function of lengths."""


def _rotated(carried: bool) -> Way:
    return lambda head, slope: (
        lambda lengths: np.asarray(head.predicted(lengths, carried, slope).snr)
    )


def _carried_under(slope: float) -> Way:
    return lambda head, _: _rotated(True)(head, slope)


def _guaranteed(head: Head, slope: float) -> Curve:
    """SNR when far content is as large as it may be, near as small, and far values all agree."""

    def snr(lengths: Floats) -> Floats:
        far = lengths - head.near_window
        odds = controls.alibi_far_log_odds(slope, head.near_window, far) + 2 * head.half_range
        agreed = head.mean_power + head.noise_power
        return np.asarray(np.exp(-2 * odds) * head.near_power / agreed)

    return snr


def _panel(title: str, way: Way, heads: list[Head], slopes: Floats, lengths: Floats) -> Panel:
    curves = [way(head, float(slope)) for head, slope in zip(heads, slopes, strict=True)]
    snr = np.array([curve(lengths) for curve in curves])
    first = heads[0].near_window + 1.0
    breaks = [_break(curve, row, lengths, first) for curve, row in zip(curves, snr, strict=True)]
    with np.errstate(divide="ignore"):
        return Panel(title, np.maximum(np.log10(snr), _NEVER), np.array(breaks))


def _break(snr: Curve, row: Floats, lengths: Floats, first: float) -> float:
    """The least length with SNR ≤ 1, narrowed down to one token between two points of the axis."""
    if not (row <= 1).any():
        return np.inf
    at = int(np.argmax(row <= 1))
    low, high = (lengths[at - 1] if at else first), lengths[at]
    while high - low > 1:
        points = np.unique(np.round(np.geomspace(low, high, 34))).astype(np.float64)
        lost = int(np.argmax(snr(points) <= 1))
        if lost == 0:
            return float(points[0])
        low, high = points[lost - 1], points[lost]
    return float(high)
