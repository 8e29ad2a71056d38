"""Log-perplexities of a study, their weighted sums over mechanisms and lengths, with intervals.

Every quantity the report judges is one weighted sum of log-perplexities,

    D = Σ_k w_k · log ppl(mechanism_k, multiple_k · L₀),

a log-ratio (w = +1 at a length, −1 at L₀), a difference of two log-ratios, a difference between
two mechanisms at one length. All lengths score the same targets, so D is taken window by window
(the windows of the longest length in it; shorter ones are summed into those) and seed by seed,
and its interval comes from resampling seeds and windows of that one array: numerator and
denominator, mechanism and rival, always move together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farfield.evaluation.intervals import LEVEL, Interval, hierarchical, pool
from farfield.evaluation.rows import ResultRow
from farfield.report.wording import counted, listed, multiple

# Below this many windows × seeds the ends of a bootstrap interval are the extremes of the sample
# and cover far less than they say; such an interval decides nothing.
FEWEST_UNITS = 4
# Below this many windows the interval is too narrow to be taken at its word: its reader is told.
FEW_WINDOWS = 10
MOST_UNITS = 128


@dataclass(frozen=True)
class Term:
    """w · log ppl(mechanism, multiple · L₀)."""

    weight: float
    mechanism: str
    multiple: int


@dataclass(frozen=True)
class Estimate:
    """A weighted sum of log-perplexities (nats per token) over seeds × windows.

    `value` is None when losses in it were not finite; `low` and `high` are None when there are
    too few windows and seeds to make an interval from.
    """

    value: float | None
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    windows: int
    non_finite: int = 0

    @property
    def units(self) -> int:
        return len(self.seeds) * self.windows

    @property
    def few(self) -> bool:
        return self.windows < FEW_WINDOWS

    @property
    def basis(self) -> str:
        """What the interval was made from, in words."""
        return f"{counted(len(self.seeds), 'seed')} × {counted(self.windows, 'window')}"


def log_ratio(mechanism: str, multiple: int) -> tuple[Term, Term]:
    """log ratio = log ppl(multiple · L₀) − log ppl(L₀), as terms of a sum."""
    return Term(1.0, mechanism, multiple), Term(-1.0, mechanism, 1)


def scaled(weight: float, terms: Iterable[Term]) -> tuple[Term, ...]:
    """The same terms, each weight times a factor."""
    return tuple(Term(weight * term.weight, term.mechanism, term.multiple) for term in terms)


class Ladders:
    """A study's result rows, found by mechanism, seed, length and protocol."""

    def __init__(self, rows: Sequence[ResultRow]) -> None:
        self._rows: dict[tuple[str, str, int], dict[int, ResultRow]] = {}
        # The page asks for the same sums in its verdicts, figures and tables.
        self._estimates: dict[tuple[Any, ...], Estimate] = {}
        self.train_length = int(rows[0]["train_length"]) if rows else 0
        self.level = LEVEL
        for row in rows:
            key = (str(row["protocol"]), str(row["mechanism"]), int(row["length"]))
            self._rows.setdefault(key, {})[int(row["seed"])] = row
            self.level = row["policy"].get("level", self.level)

    def mechanisms(self, protocol: str = "windows") -> list[str]:
        return list(dict.fromkeys(m for p, m, _ in self._rows if p == protocol))

    def lengths(self, protocol: str = "windows", mechanism: str | None = None) -> list[int]:
        """Lengths measured under a protocol, by one mechanism or by any, in rising order."""
        return sorted({n for p, m, n in self._rows if p == protocol and mechanism in (None, m)})

    def rows(self, mechanism: str, length: int, protocol: str = "windows") -> dict[int, ResultRow]:
        """The row of each seed; empty when that length was not measured."""
        return self._rows.get((protocol, mechanism, length), {})

    def missing(self, terms: Iterable[Term], protocol: str = "windows") -> list[str]:
        """What a sum needs and the study lacks, in words; empty when the sum can be made."""
        terms = tuple(terms)
        unknown: dict[str, None] = {}
        unmeasured: dict[int, dict[str, None]] = {}
        for term in terms:
            if not self.lengths(protocol, term.mechanism):
                unknown[term.mechanism] = None
            elif not self.rows(term.mechanism, term.multiple * self.train_length, protocol):
                unmeasured.setdefault(term.multiple, {})[term.mechanism] = None
        absent = [f"no result of {listed(list(unknown), 'or')}"] if unknown else []
        absent += [
            f"no result at {multiple(at)} of {listed(list(of), 'or')}"
            for at, of in unmeasured.items()
        ]
        if not absent and not self._seeds(terms, protocol):
            names = list(dict.fromkeys(term.mechanism for term in terms))
            absent.append(f"no seed in common of {listed(names)}")
        return absent

    def estimate(
        self,
        terms: Iterable[Term],
        protocol: str = "windows",
        seeds: tuple[int, ...] | None = None,
    ) -> Estimate:
        """The weighted sum with its interval, over the seeds given, or all that its terms share.

        Raises: KeyError when `missing` says that something is; ValueError when the windows of
        two rows don't cover the same targets.
        """
        terms = tuple(terms)
        key = (terms, protocol, seeds)
        if key not in self._estimates:
            self._estimates[key] = self._made(
                terms, lambda totals: _weighted(terms, totals), protocol, seeds
            )
        return self._estimates[key]

    def share(
        self, part: Iterable[Term], whole: Iterable[Term], protocol: str = "windows"
    ) -> Estimate:
        """One weighted sum over another, resampled together; see `estimate`.

        Means something only where the interval of `whole` excludes zero.
        """
        part, whole = tuple(part), tuple(whole)

        def quotient(totals: Sequence[Any]) -> Any:
            of_part, of_whole = totals[: len(part)], totals[len(part) :]
            return _weighted(part, of_part) / _weighted(whole, of_whole)

        return self._made((*part, *whole), quotient, protocol)

    def log_perplexity(
        self, mechanism: str, length: int, protocol: str = "windows"
    ) -> float | None:
        """Mean log perplexity over the seeds at a length; None where losses were not finite."""
        rows = list(self.rows(mechanism, length, protocol).values())
        if not rows or any(row["nll"] is None for row in rows):
            return None
        return sum((row["nll"] or 0.0) / row["tokens"] for row in rows) / len(rows)

    def gain_over_clipped(self, mechanism: str, length: int) -> Estimate | None:
        """log ppl(clipped) − log ppl(windows) at one length: what context beyond L₀ is worth.

        Both protocols score the same tokens; above zero, seeing further than L₀ helps. None when
        either protocol was not measured there.
        """
        clipped = self.rows(mechanism, length, "clipped")
        full = self.rows(mechanism, length, "windows")
        seeds = tuple(sorted(clipped.keys() & full.keys()))
        if not seeds:
            return None
        rows = [[clipped[seed], full[seed]] for seed in seeds]
        return _bootstrapped(seeds, rows, lambda totals: totals[0] - totals[1], self.level)

    def _made(
        self,
        terms: tuple[Term, ...],
        combine: Callable[[Sequence[Any]], Any],
        protocol: str,
        seeds: tuple[int, ...] | None = None,
    ) -> Estimate:
        lacking = self.missing(terms, protocol)
        if lacking:
            raise KeyError("; ".join(lacking))
        seeds = self._seeds(terms, protocol) if seeds is None else seeds
        rows = [
            [self.rows(t.mechanism, t.multiple * self.train_length, protocol)[seed] for t in terms]
            for seed in seeds
        ]
        return _bootstrapped(seeds, rows, combine, self.level)

    def _seeds(self, terms: Sequence[Term], protocol: str) -> tuple[int, ...]:
        shared = [
            set(self.rows(t.mechanism, t.multiple * self.train_length, protocol)) for t in terms
        ]
        return tuple(sorted(set.intersection(*shared))) if shared else ()


def _bootstrapped(
    seeds: tuple[int, ...],
    rows: Sequence[Sequence[ResultRow]],
    combine: Callable[[Sequence[Any]], Any],
    level: float,
) -> Estimate:
    """`combine` of the mean losses (nats per token) of rows [seed][term], with its interval."""
    distinct = {id(row): row for of_seed in rows for row in of_seed}.values()
    span = max(row["unit_tokens"] for row in distinct)
    bad = sum(row["policy"].get("non_finite", 0) for row in distinct)
    if bad or any(row["nll"] is None for row in distinct):
        return Estimate(None, None, None, seeds, next(iter(distinct))["tokens"] // span, bad)
    windows = next(iter(distinct))["tokens"] // span
    # Thousands of short windows are resampled in runs of neighbours: the interval barely differs
    # (it can only gain from respecting what correlation neighbours have) and costs far less.
    group = 1
    while windows % (2 * group) == 0 and windows // group > MOST_UNITS:
        group *= 2
    arrays = [
        np.stack([_pooled(row, group * span) for row in of_term])
        for of_term in zip(*rows, strict=True)
    ]
    tokens = len(seeds) * windows * span
    made: Interval = hierarchical(
        lambda *totals: combine([total / tokens for total in totals]), *arrays, level=level
    )
    if arrays[0].size < FEWEST_UNITS:
        return Estimate(made.estimate, None, None, seeds, windows)
    return Estimate(made.estimate, made.low, made.high, seeds, windows)


def _pooled(row: ResultRow, span: int) -> Any:
    """The row's summed losses over runs of `span` tokens, from the windows that fill them."""
    sums = np.array(row["unit_nll"], dtype=np.float64)
    try:
        return pool(sums, row["unit_tokens"], span)
    except ValueError as error:
        raise ValueError(
            f"{row['mechanism']}, seed {row['seed']}, length {row['length']}, {row['protocol']}: "
            f"{error}"
        ) from None


def _weighted(terms: Sequence[Term], means: Sequence[Any]) -> Any:
    return sum(term.weight * mean for term, mean in zip(terms, means, strict=True))
