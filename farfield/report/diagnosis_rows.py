"""What a diagnosis left in its folder, and the numbers the page makes of it: averages over heads.

Rows are read as they are; nothing here knows a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

FACTS = "diagnosis.json"
TABLES = (
    "attention", "steps", "lags", "couplings", "gates", "values", "layers", "prediction",
    "assumptions", "interventions",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """One diagnosis: the facts of its run, and its tables (an absent one is empty)."""

    folder: Path
    facts: Row
    tables: dict[str, list[Row]]

    @property
    def model(self) -> str:
        """What it was called."""
        return str(self.facts["model"])

    @property
    def base(self) -> int:
        """L₀ in tokens."""
        return int(self.facts["train_length"])

    @property
    def far_window(self) -> int:
        """The window beyond which a key is called far: L₀ where it was measured."""
        windows = self.facts["near_windows"]
        return int(self.base if self.base in windows else max(windows))

    @property
    def longest(self) -> int:
        """The longest context there is a row for."""
        return max((row["high"] - 1 for row in self.tables["attention"]), default=self.base)

    def heads(self) -> list[tuple[int, int]]:
        """The heads measured, (layer, head)."""
        return sorted({(row["layer"], row["head"]) for row in self.tables["attention"]})

    def attention(self, window: int, head: tuple[int, int] | None = None) -> list[Row]:
        """The rows of a near window, of one head or all, by context."""
        return sorted(
            (
                row
                for row in self.tables["attention"]
                if row["near_window"] == window
                and (head is None or (row["layer"], row["head"]) == head)
            ),
            key=lambda row: (row["low"], row["layer"], row["head"]),
        )


def read(folder: Path) -> Found:
    """A diagnosis from its folder.

    Raises: FileNotFoundError without a diagnosis; ValueError naming file and line of what is not
    understood.
    """
    path = folder / FACTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no {FACTS} there; expected the folder of a diagnosis")
    facts = _json(path.read_text(encoding="utf-8"), str(path))
    for key in ("model", "train_length", "near_windows", "lengths"):
        if key not in facts:
            raise ValueError(f"{path}: has no {key!r}; expected the facts of a diagnosis")
    return Found(folder, facts, {table: _table(folder, table) for table in TABLES})


def _table(folder: Path, table: str) -> list[Row]:
    lines = folder / f"{table}.jsonl"
    if lines.exists():
        text = lines.read_text(encoding="utf-8").splitlines()
        return [_json(line, f"{lines}, line {n}") for n, line in enumerate(text, 1) if line]
    columns = folder / f"{table}.parquet"
    if not columns.exists():
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found: list[Row] = pq.read_table(columns).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{columns}: not parquet: {' '.join(str(error).split())}") from None
    return found


def _json(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: holds a {type(value).__name__}; expected an object")
    return value


def by_context(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """(last context of a stratum, mean over heads) where any head has a number."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row[key] is not None:
            groups.setdefault(row["high"] - 1, []).append(row[key])
    return sorted((at, fmean(values)) for at, values in groups.items())


def nearest(curve: Sequence[tuple[int, float]], at: float) -> tuple[int, float] | None:
    """The point of a curve whose context is nearest in ratio; None without one."""
    return min(curve, key=lambda point: abs(math.log(point[0] / at)), default=None)


def strongest(rows: Iterable[Row], key: str) -> Row | None:
    """The row with the largest number."""
    return max((row for row in rows if row[key] is not None), key=lambda r: r[key], default=None)


def left_over_lags(found: Found, kind: str, key: str = "left") -> dict[tuple[int, Any], Any]:
    """What is left of a head's transport at each lag: blocks weighted by their energy.

    (layer, head) -> [(lag, left)]; of gates and operators, the head's own number.
    """
    energy = {
        (s["layer"], s["head"], s["block"]): s.get("energy") or 1.0 for s in found.tables["steps"]
    }
    sums: dict[tuple[int, Any], dict[int, list[float]]] = {}
    for row in found.tables["lags"]:
        if row["kind"] != kind:
            continue
        weight = energy.get((row["layer"], row["head"], row["block"]), 1.0)
        total = sums.setdefault((row["layer"], row["head"]), {}).setdefault(row["lag"], [0.0, 0.0])
        total[0] += weight * row[key]
        total[1] += weight
    return {
        head: [(lag, total / weight) for lag, (total, weight) in sorted(lags.items())]
        for head, lags in sums.items()
    }


def averaged(curves: Iterable[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The mean of several curves at each place."""
    groups: dict[int, list[float]] = {}
    for curve in curves:
        for at, value in curve:
            groups.setdefault(at, []).append(value)
    return sorted((at, fmean(values)) for at, values in groups.items())


def perplexities(found: Found) -> dict[str, dict[int, float]]:
    """Intervention -> length -> perplexity, where it is finite."""
    table: dict[str, dict[int, float]] = {}
    for row in found.tables["interventions"]:
        if row["ppl"] is not None:
            table.setdefault(row["intervention"], {})[row["length"]] = row["ppl"]
    return table


def mean_of(rows: Iterable[Row], key: str, where: Callable[[Row], bool]) -> float | None:
    """The mean of a column over the rows that are meant; None without one."""
    values = [row[key] for row in rows if where(row) and row[key] is not None]
    return fmean(values) if values else None
