"""What a study has left in its folder so far, read from the files alone.

Every file may be missing: a study that has just begun has a recipe and nothing else. A file that
is there and can't be read is an error naming the file and the line, never a gap on the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farfield.evaluation.rows import PositionRow, ResultRow, read_positions, read_rows
from farfield.report.wording import unscaled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STATUSES = ("finished", "running", "interrupted", "failed", "pending")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One mechanism trained from one seed: its `run.json` and its `metrics.jsonl`."""

    mechanism: str
    seed: int
    status: str
    facts: Row = field(default_factory=dict)
    metrics: Sequence[Row] = ()

    @property
    def name(self) -> str:
        return f"{self.mechanism}, seed {self.seed}"

    @property
    def error(self) -> str:
        """The last non-empty line of what stopped the run: the line that names the cause."""
        lines = [line.strip() for line in str(self.facts.get("error") or "").splitlines()]
        return next((line for line in reversed(lines) if line), "")


@dataclass(frozen=True)
class Study:
    """A study's folder as it stands: recipe, environment, runs, result rows, position rows."""

    folder: Path
    recipe_text: str
    recipe: Row
    environment: Row
    runs: Sequence[Run]
    rows: Sequence[ResultRow]
    positions: Sequence[PositionRow]

    @property
    def name(self) -> str:
        return str(self.recipe.get("name") or self.folder.resolve().name)

    @property
    def mechanisms(self) -> list[str]:
        """Every mechanism of the study, in the recipe's order, then in the runs' and rows'; what
        was scaled at evaluation comes right after what was trained."""
        named: list[str] = [run.mechanism for run in self.runs]
        named += [str(row["mechanism"]) for row in self.rows]
        trained = list(dict.fromkeys(unscaled(name)[0] for name in named))
        return sorted(dict.fromkeys(named), key=lambda name: trained.index(unscaled(name)[0]))

    def with_status(self, status: str) -> list[Run]:
        return [run for run in self.runs if run.status == status]


def read(folder: Path) -> Study:
    """Read a study's folder.

    Raises: NotADirectoryError when there is no such folder; FileNotFoundError when it holds no
    file of a study; ValueError naming file and line for a file that can't be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: no such folder; expected the folder of a study")
    recipe_path, results = folder / "recipe.toml", folder / "results.jsonl"
    if not (recipe_path.exists() or results.exists() or (folder / "runs").is_dir()):
        raise FileNotFoundError(
            f"{folder}: holds no study; expected recipe.toml, results.jsonl or runs/ in it"
        )
    text = _text(recipe_path)
    recipe = _toml(recipe_path, text)
    rows = read_rows(results) if results.exists() else []
    _refuse_contradictions(rows, results)
    positions = folder / "positions.jsonl"
    return Study(
        folder=folder,
        recipe_text=text,
        recipe=recipe,
        environment=_json(folder / "environment.json"),
        runs=_runs(folder, recipe),
        rows=rows,
        positions=read_positions(positions) if positions.exists() else [],
    )


def _runs(folder: Path, recipe: Row) -> list[Run]:
    """The recipe's runs in its order, whatever has started of them; then any others found."""
    found: dict[tuple[str, int], Run] = {}
    for path in sorted((folder / "runs").glob("*/run.json")):
        facts = _json(path)
        missing = [key for key in ("mechanism", "seed", "status") if key not in facts]
        if missing:
            raise ValueError(f"{path}: lacks {', '.join(missing)}")
        if facts["status"] not in STATUSES:
            raise ValueError(
                f"{path}: status is {facts['status']!r}; expected one of {', '.join(STATUSES)}"
            )
        run = Run(
            mechanism=str(facts["mechanism"]),
            seed=int(facts["seed"]),
            status=str(facts["status"]),
            facts=facts,
            metrics=_metrics(path.with_name("metrics.jsonl")),
        )
        found[run.mechanism, run.seed] = run
    planned = [
        (str(mechanism), int(seed))
        for mechanism in recipe.get("mechanisms", ())
        for seed in recipe.get("seeds", (0,))
    ]
    runs = [found.pop(key, Run(key[0], key[1], "pending")) for key in dict.fromkeys(planned)]
    return runs + list(found.values())


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8") from None


def _toml(path: Path, text: str) -> Row:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None


def _json(path: Path) -> Row:
    text = _text(path)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}; expected a JSON object")
    return value


def _metrics(path: Path) -> list[Row]:
    """The rows of a run's `metrics.jsonl`. A last line that lacks its newline is still being
    written by the run and is left for the next time."""
    rows: list[Row] = []
    for number, line in enumerate(_text(path).split("\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict) or "iteration" not in row:
            raise ValueError(f"{path}, line {number}: expected an object with an iteration")
        rows.append(row)
    return rows


def _refuse_contradictions(rows: Sequence[ResultRow], path: Path) -> None:
    """One training length per study, and one row per mechanism, seed, length and protocol."""
    seen: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows, start=1):
        if row["train_length"] != rows[0]["train_length"]:
            raise ValueError(
                f"{path}: row {number} has train_length {row['train_length']}, row 1 has "
                f"{rows[0]['train_length']}; expected one training length per study"
            )
        key = (row["mechanism"], row["seed"], row["length"], row["protocol"])
        if key in seen:
            raise ValueError(
                f"{path}: rows {seen[key]} and {number} are both {row['mechanism']}, seed "
                f"{row['seed']}, length {row['length']}, {row['protocol']}; expected one"
            )
        seen[key] = number
