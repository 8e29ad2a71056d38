"""The page's tables: ratios beside the published ones, costs, the protocol, what is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farfield.report.curves import Point, curve
from farfield.report.folder import Run, Study
from farfield.report.pooling import Ladders
from farfield.report.published import MULTIPLES, published
from farfield.report.wording import (
    MISSING,
    count,
    counted,
    duration,
    integer,
    interval,
    memory,
    number,
    ratio,
)

# The multiples that the claims are judged at: these carry their intervals in the table.
MAIN_MULTIPLES = (4, 16, 128)


@dataclass(frozen=True)
class Cell:
    """A cell: its text, a smaller second line, and a tint from 0 (none) to 1 (worst)."""

    text: str
    small: str = ""
    tint: float = 0.0


@dataclass(frozen=True)
class TableRow:
    """One mechanism's cells."""

    mechanism: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Column heads (text and a smaller second line) and rows."""

    heads: tuple[tuple[str, str], ...]
    rows: tuple[TableRow, ...]


def ratio_table(ladders: Ladders) -> Table:
    """Perplexity at L₀ and the ratio at each multiple, best first, beside the published ratios."""
    base = ladders.train_length
    lengths = [n for n in ladders.lengths() if n % base == 0 and n > base]
    heads = [("perplexity", f"at L₀ = {base:,}")]
    heads += [(f"{n // base}×", f"{n:,}") for n in lengths]
    heads += [("paper", f"at {multiple}×") for multiple in MULTIPLES]
    curves = {name: {p.length: p for p in curve(ladders, name)} for name in ladders.mechanisms()}
    rows = []
    for name, points in curves.items():
        cells = [Cell(number(points[base].ppl, 4) if base in points else MISSING)]
        cells += [_ratio_cell(points.get(n), n // base) for n in lengths]
        cells += [Cell(published(name, multiple) or MISSING) for multiple in MULTIPLES]
        rows.append((_rank(points), TableRow(name, tuple(cells))))
    rows.sort(key=lambda row: row[0])
    return Table(tuple(heads), tuple(row for _, row in rows))


def _rank(points: Mapping[int, Point]) -> tuple[float, float]:
    """Longest reach first, then the lowest ratio there; non-finite losses last."""
    if not points:
        return 0.0, math.inf
    last = points[max(points)]
    return -last.length, math.inf if last.ratio is None else last.ratio


def _ratio_cell(point: Point | None, multiple: int) -> Cell:
    if point is None:
        return Cell(MISSING)
    if point.ratio is None:
        return Cell("not finite", f"{point.non_finite:,} losses", 1.0)
    small = interval(point.low, point.high) if multiple in MAIN_MULTIPLES else ""
    # No tint up to 1.05, the full one from a tenfold perplexity on.
    tint = min(1.0, max(0.0, math.log(point.ratio / 1.05) / math.log(10 / 1.05)))
    return Cell(ratio(point.ratio), small, round(tint, 2))


_COSTS: tuple[tuple[str, str], ...] = (
    ("parameters", "and those it adds"),
    ("operations", "per token, forward"),
    ("training time", "per run"),
    ("training", "tokens/s"),
    ("ladder time", "per run"),
    ("peak memory", "of a run"),
    ("perplexity", "at L₀"),
)


def cost_table(study: Study, ladders: Ladders) -> Table:
    """What each mechanism costs: means over its runs, times also relative to `rope`."""
    rows = []
    own = _mean(study.runs, "rope", "train_seconds")
    for name in study.mechanisms:
        mean = {key: _mean(study.runs, name, key) for key in _KEYS}
        if all(value is None for value in mean.values()):
            continue
        seconds = mean["train_seconds"]
        against = f"{number(seconds / own)}× rope" if own and seconds and name != "rope" else ""
        home = {p.multiple: p for p in curve(ladders, name)}.get(1)
        cells = (
            Cell(integer(mean["parameters"]), _added(mean)),
            Cell(count(mean["flops_per_token"])),
            Cell(duration(seconds), against),
            Cell(integer(mean["tokens_per_second"])),
            Cell(duration(mean["ladder_seconds"])),
            Cell(memory(mean["peak_memory_bytes"])),
            Cell(number(home.ppl, 4) if home else MISSING),
        )
        rows.append(TableRow(name, cells))
    return Table(_COSTS, tuple(rows))


def _added(mean: Mapping[str, float | None]) -> str:
    """The parameters that the mechanism adds, and their share of all."""
    added, everything = mean["parameters_transport"], mean["parameters"]
    if added is None or not everything:
        return ""
    return f"+{integer(added)} ({number(100 * added / everything, 2)} %)" if added else "+0"


_KEYS = (
    "parameters",
    "parameters_transport",
    "flops_per_token",
    "train_seconds",
    "tokens_per_second",
    "ladder_seconds",
    "peak_memory_bytes",
)


def _mean(runs: Sequence[Run], mechanism: str, key: str) -> float | None:
    """Over the finished runs of a mechanism that state the value; None when none does."""
    values = [
        float(run.facts[key])
        for run in runs
        if run.mechanism == mechanism
        and run.status == "finished"
        and run.facts.get(key) is not None
    ]
    return sum(values) / len(values) if values else None


def policy_facts(ladders: Ladders) -> list[tuple[str, str]]:
    """The measuring protocol in words, as the rows state it."""
    rows = [
        row
        for protocol in ("windows", "fixed", "clipped")
        for name in ladders.mechanisms(protocol)
        for length in ladders.lengths(protocol, name)
        for row in ladders.rows(name, length, protocol).values()
    ]
    if not rows:
        return []
    policies = [row["policy"] for row in rows]
    scored = sorted({row["tokens"] for row in rows if row["protocol"] == "windows"})
    facts = [
        ("Targets", f"{_joined(scored)} tokens of the test split, the same ones at every length"),
        ("Documents", _joined(p.get("documents", MISSING) for p in policies)),
        ("Start of text", "a token of its own" if policies[0].get("bos") else "none added"),
        ("Number format", _joined(p.get("dtype", MISSING) for p in policies)),
        (
            "Tokens left unscored",
            f"{_joined(p.get('discarded_tail', 0) for p in policies)} at the end",
        ),
        ("Losses not finite", integer(sum(p.get("non_finite", 0) for p in policies))),
    ]
    strides = {
        int(row["policy"].get("stride") or 0) for row in rows if row["protocol"] == "clipped"
    } - {0}
    if strides:
        facts.append(("Stride of the clipped context", f"{_joined(strides)} tokens"))
    return facts


def _joined(values: Any) -> str:
    distinct = sorted(set(values), key=str)
    return " or ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in distinct)


def left_out(study: Study) -> list[str]:
    """What the recipe asks for and the results lack, each with its reason."""
    said: list[str] = []
    for run in study.runs:
        for gap in run.facts.get("left_out") or ():
            said.append(f"length {int(gap['length']):,} under {gap['protocol']}: {gap['reason']}")
    for run in study.with_status("failed"):
        said.append(f"{run.name}: the run failed: {run.error or 'no error line was kept'}")
    waiting = (
        len(study.runs) - len(study.with_status("finished")) - len(study.with_status("failed"))
    )
    if waiting:
        said.append(f"{counted(waiting, 'run')} not finished yet, named at the top of this page")
    return list(dict.fromkeys(said))


def flattened(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested facts as (dotted name, text) lines, in their order."""
    lines: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            lines += flattened(value, f"{name}.")
        elif isinstance(value, list):
            lines.append((name, ", ".join(map(str, value)) or MISSING))
        else:
            lines.append((name, MISSING if value is None else str(value)))
    return lines
