"""Times on a shared machine drift: cases take turns, and a ratio is between neighbours in time.

A round calls each case once, in an order that turns around from round to round; what a case costs
over another is the median of the rounds' ratios, with a bootstrap interval over the rounds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farfield.evaluation import intervals

FEWEST = 3
"""Rounds at least: a median of fewer is no better than one of them."""

MOST = 41
"""Rounds at most: more would narrow the interval by little."""

_SHORTEST = 0.02
"""Seconds that one measurement takes at least; a case that is quicker is called again and again."""

Call = Callable[[], object]
Report = Callable[[float], None]


@dataclass(frozen=True)
class Samples:
    """Seconds per call of each case, one for each round. Shapes: every array [rounds]."""

    seconds: Mapping[str, npt.NDArray[np.float64]]

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return len(next(iter(self.seconds.values())))

    def median(self, case: str) -> float:
        """The median seconds per call of a case."""
        return float(np.median(self.seconds[case]))

    def over(self, case: str, baseline: str) -> intervals.Interval:
        """The median of the paired ratios of two cases, with its interval."""
        return median_interval(self.seconds[case] / self.seconds[baseline])


def paired(
    cases: Mapping[str, Call],
    allowance: float,
    *,
    fewest: int = FEWEST,
    most: int = MOST,
    report: Report | None = None,
) -> Samples:
    """Let cases take turns until `allowance` seconds have passed, warm-up included.

    Every case is called once beforehand (what it allocates or compiles is not measured), and again
    for how often it must be called to make a measurement. There are `fewest` rounds whatever they
    take. `report` is told after each round which share of the allowance is used.

    Raises: ValueError for no case, or for bounds on the rounds that leave none.
    """
    if not cases or not 1 <= fewest <= most:
        raise ValueError(
            f"{len(cases)} cases, {fewest} to {most} rounds; expected at least one of each"
        )
    started = time.perf_counter()
    repeats = {name: _repeats(call) for name, call in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    warm = time.perf_counter() - started
    for done in range(most):
        passed = time.perf_counter() - started
        if done >= fewest and passed + (passed - warm) / done > allowance:
            break
        for name in _turn(list(cases), done):
            seconds[name].append(_measure(cases[name], repeats[name]))
        if report is not None:
            used = (time.perf_counter() - started) / allowance if allowance > 0 else 1.0
            report(min(1.0, max(used, (done + 1) / most)))
    return Samples({name: np.array(taken) for name, taken in seconds.items()})


def median_interval(values: npt.ArrayLike) -> intervals.Interval:
    """The median of values and its percentile interval, each resampled with replacement.

    The bootstrap of `intervals` knows totals alone, and a median can be read off totals: with the
    values in rising order x_1 ≤ … ≤ x_n and c_k = how many of a resample are ≤ x_k, it is the
    mean of the first x_k with c_k ≥ n/2 and the first with c_k > n/2.

    Raises: ValueError for no values.
    """
    rising = np.sort(np.asarray(values, dtype=np.float64).ravel())
    size = len(rising)
    if size == 0:
        raise ValueError("the median of no values; expected at least one")
    if not np.isfinite(rising).all():
        return intervals.Interval(None, None, None)

    def median(*totals: Any) -> Any:
        counts = np.stack([np.asarray(total) for total in totals])
        lower = rising[(2 * counts >= size).argmax(axis=0)]
        upper = rising[(2 * counts > size).argmax(axis=0)]
        return (lower + upper) / 2

    return intervals.hierarchical(median, *(rising[None, :] <= rising[:, None]).astype(np.float64))


def groups(names: Sequence[str], size: int = 3) -> list[list[str]]:
    """Names in groups of at most `size`, so that none is far in time from the group's baseline."""
    return [list(names[start : start + size]) for start in range(0, len(names), size)]


def _turn(names: list[str], number: int) -> list[str]:
    return names if number % 2 == 0 else names[::-1]


def _repeats(call: Call) -> int:
    """How often a call makes a measurement, from its second time: the first one allocates."""
    if _measure(call, 1) > 10 * _SHORTEST:
        return 1
    return max(1, math.ceil(_SHORTEST / max(_measure(call, 1), 1e-7)))


def _measure(call: Call, repeats: int) -> float:
    with _no_collection():
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage is not collected in the middle of a measurement."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
