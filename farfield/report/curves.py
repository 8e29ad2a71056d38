"""A study's ratio curves and its one-sentence result, pooled over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farfield.report.pooling import Ladders, log_ratio
from farfield.report.wording import listed, number, spoken

PROTOCOLS = ("windows", "fixed", "clipped")
Standing = Literal["holds", "degrades", "fails", "unclear"]

# The bounds of C5 and C6 (flat) and of C1 (failed), for saying in words how a mechanism stands.
HOLDS_TO = 1.05
FAILS_FROM = 2.0


@dataclass(frozen=True)
class Point:
    """One mechanism at one length: pooled over seeds, with the interval of its ratio.

    `ratio` and `ppl` are None where losses were not finite; `low`, `high` where there are too
    few windows and seeds for an interval.
    """

    length: int
    multiple: float
    ppl: float | None
    ratio: float | None
    low: float | None
    high: float | None
    seeds: int
    windows: int
    non_finite: int = 0


def curve(ladders: Ladders, mechanism: str, protocol: str = "windows") -> list[Point]:
    """The points of a mechanism at every whole multiple of L₀ measured under a protocol."""
    base = ladders.train_length
    points = []
    for length in ladders.lengths(protocol, mechanism):
        at = length // base
        if length % base or ladders.missing(log_ratio(mechanism, at), protocol):
            continue
        change = ladders.estimate(log_ratio(mechanism, at), protocol)
        row = next(iter(ladders.rows(mechanism, length, protocol).values()))
        points.append(
            Point(
                length=length,
                multiple=at,
                ppl=_exp(ladders.log_perplexity(mechanism, length, protocol)),
                ratio=_exp(change.value),
                low=_exp(change.low),
                high=_exp(change.high),
                seeds=len(change.seeds),
                windows=len(row["unit_nll"]),
                non_finite=change.non_finite,
            )
        )
    return points


def seed_ratios(
    ladders: Ladders, mechanism: str, protocol: str = "windows"
) -> dict[int, list[tuple[int, float | None]]]:
    """Length and ratio of each seed on its own."""
    lines: dict[int, list[tuple[int, float | None]]] = {}
    for length in ladders.lengths(protocol, mechanism):
        for seed, row in ladders.rows(mechanism, length, protocol).items():
            lines.setdefault(seed, []).append((length, row["ratio"]))
    return dict(sorted(lines.items()))


def standing(point: Point) -> Standing:
    """How a mechanism stands at a length, by its whole interval where it has one."""
    if point.ratio is None:
        return "fails"
    low = point.ratio if point.low is None else point.low
    high = point.ratio if point.high is None else point.high
    if high <= HOLDS_TO:
        return "holds"
    if low >= FAILS_FROM:
        return "fails"
    return "degrades" if low > HOLDS_TO else "unclear"


@dataclass(frozen=True)
class Headline:
    """Who holds and who fails at the longest length measured."""

    length: int
    multiple: int
    train_length: int
    groups: tuple[tuple[Standing, tuple[tuple[str, Point], ...]], ...]
    absent: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """One plain sentence: who holds and who fails, with the numbers."""
        if not self.groups:
            return "Nothing is measured yet: the curves appear when the first run has finished."
        reach = (
            f"Trained on {self.train_length:,} tokens and read at {self.length:,}"
            if self.multiple > 1
            else f"At the training length of {self.train_length:,} tokens"
        )
        return f"{reach}, {'; '.join(self._clause(s, of) for s, of in self.groups)}."

    @property
    def bare(self) -> tuple[str, ...]:
        """Mechanisms whose standing rests on an estimate without an interval."""
        return tuple(name for _, of in self.groups for name, p in of if p.low is None)

    @property
    def title(self) -> str:
        """The sentence in a few words, for a picture."""
        said = [
            f"{listed([spoken(name, brief=True) for name, _ in of])} {_VERBS[kind][len(of) > 1]}"
            for kind, of in self.groups
            if kind in ("holds", "fails")
        ]
        return f"At {self.multiple}× the training length, {'; '.join(said)}" if said else ""

    @staticmethod
    def _clause(kind: Standing, of: Sequence[tuple[str, Point]]) -> str:
        values = sorted(point.ratio for _, point in of if point.ratio is not None)
        if not values:
            size = "losses not finite"
        elif number(values[0]) == number(values[-1]):
            size = f"{number(values[0])}×"
        else:
            size = f"{number(values[0])}× to {number(values[-1])}×"
        names = listed([spoken(name) for name, _ in of])
        home = " the perplexity at home" if kind == "holds" else ""
        return f"{names} {_VERBS[kind][len(of) > 1]} ({size}{home})"


_VERBS: dict[Standing, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "unclear": ("is too close to call", "are too close to call"),
    "degrades": ("degrades", "degrade"),
    "fails": ("fails", "fail"),
}


def headline(ladders: Ladders) -> Headline:
    """Who holds and who fails at the longest length that any mechanism was measured at."""
    base, lengths = ladders.train_length, ladders.lengths()
    if not lengths:
        return Headline(0, 0, base, (), ())
    at: dict[str, Point] = {}
    for name in ladders.mechanisms():
        for point in curve(ladders, name):
            if point.length == lengths[-1]:
                at[name] = point
    ranked = sorted(at.items(), key=lambda item: item[1].ratio or math.inf)
    groups = []
    for kind in _VERBS:
        of = tuple((name, point) for name, point in ranked if standing(point) == kind)
        if of:
            groups.append((kind, of))
    absent = tuple(name for name in ladders.mechanisms() if name not in at)
    return Headline(lengths[-1], lengths[-1] // base, base, tuple(groups), absent)


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)
