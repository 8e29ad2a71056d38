"""What it costs, on the page: the rows of a `bench.json` in the study's folder, if it holds one.

The file is read as it stands: nothing of what measured it is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farfield.report.wording import MISSING, duration, integer, interval, memory, number, ratio

FILE = "bench.json"
VERSION = 1

TITLES = {
    "layer": "An attention layer",
    "model": "A training iteration of the recipe's model",
    "decode": "One token after a long context",
    "scaling": "As length grows, and against T×T definitions",
    "pruned": "Stopping where a potential has left nothing",
    "peers": "Beside other models of the same shape",
    "memory": "Peak memory",
    "diagnosis": "Diagnosing a model, beside evaluating it",
}
BADGES = {"met": ("holds", "✓"), "not met": ("fails", "✕"), "straddles": ("undecided", "~")}
"""How each verdict is marked: the style of the claims' badges, and their sign."""


@dataclass(frozen=True)
class Line:
    """One row as it is written."""

    case: str
    over: str
    measure: str
    tokens: str
    ratio: str
    interval: str
    median: str
    target: str
    verdict: str
    note: str

    @property
    def badge(self) -> tuple[str, str]:
        """The style and the sign of the verdict."""
        return BADGES[self.verdict]


@dataclass(frozen=True)
class Group:
    """The rows of one section under its title."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Costs:
    """All that the section says: where it was measured, the groups, what was left out."""

    machine: str
    groups: tuple[Group, ...]
    left_out: tuple[str, ...]
    met: int
    targets: int


def read(folder: Path) -> Costs | None:
    """The costs in a study's folder; None where it holds no `bench.json`.

    Raises: ValueError naming the file for one that `farfield bench --json` didn't write.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ValueError(f"{path}: expected what `farfield bench --json` writes, version {VERSION}")
    try:
        return _costs(value)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a benchmark's results ({error})") from None


def _costs(value: Mapping[str, Any]) -> Costs:
    rows = value["rows"]
    names = dict.fromkeys(str(row["section"]) for row in rows)
    groups = tuple(
        Group(TITLES.get(name, name), tuple(_line(r) for r in rows if r["section"] == name))
        for name in names
    )
    held = [row for row in rows if row["target"] is not None]
    out = tuple(f"{one['section']}, {one['case']}: {one['reason']}" for one in value["left_out"])
    met = sum(row["verdict"] == "met" for row in held)
    return Costs(_machine(value["machine"]), groups, out, met, len(held))


def _machine(told: Mapping[str, Any]) -> str:
    load = MISSING if told["load"] is None else number(told["load"])
    return (
        f"{told['processor']}, {told['threads']} of {told['cores']} cores, {told['dtype']} on "
        f"{told['device']}, torch {told['torch']}, {told['date']}, load before: {load}"
    )


def _line(row: Mapping[str, Any]) -> Line:
    return Line(
        case=str(row["case"]),
        over=str(row["baseline"]),
        measure=str(row["measure"]),
        tokens=integer(row["tokens"]),
        ratio="not finite" if row["ratio"] is None else _ratio(float(row["ratio"])),
        interval=interval(row["low"], row["high"]),
        median=_median(row),
        target="" if row["target"] is None else f"≤ {_ratio(float(row['target']))}",
        verdict=str(row["verdict"]),
        note=str(row["note"]),
    )


def _ratio(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 1e-3 else ratio(value)


def _median(row: Mapping[str, Any]) -> str:
    value = row["median"]
    if value is None:
        return MISSING
    if row["unit"] == "B":
        return memory(value)
    return f"{number(1000 * value)} ms" if value < 1 else duration(value)
