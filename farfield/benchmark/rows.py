"""What a benchmark came to: rows, and the JSON file that holds them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from farfield.benchmark.pairing import Samples
from farfield.benchmark.targets import Target
from farfield.evaluation import whole
from farfield.evaluation.intervals import Interval

VERSION = 1
MET, MISSED, STRADDLES = "met", "not met", "straddles"


@dataclass(frozen=True)
class Row:
    """One case beside its baseline.

    `ratio` is the median of the paired ratios, `low` and `high` its interval (None: one pair, or
    nothing to resample); `median` and `baseline_median` are the two in `unit`. Where `baseline` is
    empty, `ratio` is a quantity of the case alone: a share, an error, or its own growth from a
    shorter length, whose median then stands for the baseline's. `target` is the most that
    the ratio may be, and `verdict` whether it is: met, not met, or straddles where the interval
    does; None and empty where nothing is asked. `seed` names the weights and inputs.

    Units: `unit` is s (seconds per call), B (bytes) or empty; `tokens` is the length of the input.
    """

    section: str
    case: str
    measure: str
    tokens: int
    ratio: float | None
    low: float | None = None
    high: float | None = None
    baseline: str = ""
    median: float | None = None
    baseline_median: float | None = None
    unit: str = ""
    rounds: int = 1
    sizes: str = ""
    seed: int = 0
    target: float | None = None
    verdict: str = ""
    note: str = ""

    def judged(self, target: Target | None) -> Row:
        """This row with a target and its verdict."""
        if target is None:
            return self
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return Row(**{**known, "target": target.most, "verdict": self._verdict(target.most)})

    def _verdict(self, most: float) -> str:
        if self.ratio is None:
            return MISSED
        low = self.ratio if self.low is None else self.low
        high = self.ratio if self.high is None else self.high
        if high <= most:
            return MET
        return MISSED if low > most else STRADDLES


def timed(samples: Samples, own: str, other: str, **where: Any) -> Row:
    """The row of two cases timed in turns, one over the other.

    `where` are the row's other fields; the names in them are what the row calls the two.
    """
    measured = {
        "case": own,
        "baseline": other,
        "median": samples.median(own),
        "baseline_median": samples.median(other),
        "unit": "s",
        "rounds": samples.rounds,
        **_numbers(samples.over(own, other)),
    }
    return Row(**{**measured, **where})


def quantity(value: Interval | float, **where: Any) -> Row:
    """The row of a quantity that is no pair of times; `where` are the row's other fields."""
    found = value if isinstance(value, Interval) else Interval(value, None, None)
    return Row(**{**_numbers(found), **where})


def _numbers(found: Interval) -> dict[str, Any]:
    return {"ratio": found.estimate, "low": found.low, "high": found.high}


@dataclass(frozen=True)
class LeftOut:
    """What was not measured, and why."""

    section: str
    case: str
    reason: str


@dataclass(frozen=True)
class Results:
    """A whole run of the benchmark: where and when, its rows, and what it left out."""

    machine: dict[str, Any]
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...] = ()

    def write(self, path: Path) -> None:
        """Write JSON, whole or not at all. Raises: OSError."""
        value = {"version": VERSION, **asdict(self)}
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
        whole.write_text(path, text + "\n")


def machine(threads: int, sections: Sequence[str], budget: float, quick: bool) -> dict[str, Any]:
    """What the figures depend on and no row says: the machine, its software, how it was asked.

    Units: `budget` in seconds; `load` is the mean number of waiting processes over the minute
    before (None where the system doesn't say).
    """
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dtype": "float32",
        "device": "cpu",
        "sections": list(sections),
        "budget": budget,
        "quick": quick,
    }


def _processor() -> str:
    """The processor's name; Linux keeps it in a file, elsewhere Python may know it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
