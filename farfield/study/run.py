"""One run of a study as its files say: where it lies, what state it is in."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farfield.evaluation.rows import read_positions, read_rows
from farfield.study import files
from farfield.study.recipe import Recipe
from farfield.training import CHECKPOINTS, METRICS, last_checkpoint, read_metrics

SCHEMA = 1
RECORD = "run.json"
MODEL = "model"
LOG = "log.txt"
RESULTS = "results.jsonl"
POSITIONS = "positions.jsonl"


@dataclass(frozen=True)
class Run:
    """One mechanism trained from one seed, in a folder of its own."""

    mechanism: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def record(self) -> dict[str, Any]:
        """What `run.json` says; a run without one is pending."""
        found = files.read_json(self.folder / RECORD)
        return found if found and "status" in found else new_record(self.mechanism, self.seed)

    @property
    def status(self) -> str:
        return str(self.record["status"])

    @property
    def trained(self) -> bool:
        """Whether the trained model is there, whole."""
        return (self.folder / MODEL).is_dir()

    @property
    def begun(self) -> str | None:
        """What an unfinished run has that can be continued; None where there is nothing."""
        if self.status == "finished":
            return None
        if self.trained:
            return "trained"
        checkpoint = last_checkpoint(self.folder)
        return None if checkpoint is None else f"at iteration {checkpoint[0]}"

    @property
    def measured(self) -> set[str]:
        """The names of the rows that are there: the mechanism's own, and those of scaled readings.

        Empty where the rows can't be read back; they are then measured anew.
        """
        try:
            read_positions(self.folder / POSITIONS)
            return {row["mechanism"] for row in read_rows(self.folder / RESULTS)}
        except (OSError, ValueError):
            return set()

    def lacking(self, recipe: Recipe) -> list[str]:
        """Scaled rows that the recipe asks for and a finished run hasn't.

        Raises: ValueError when the model they would be measured with is gone.
        """
        from farfield.evaluation.scaled import row_names

        if self.status != "finished":
            return []
        names = row_names(self.mechanism, recipe.ladder.scaling)
        there = self.measured | {self.mechanism}
        lacking = [name for name in names if name not in there]
        if lacking and not self.trained:
            raise ValueError(
                f"{self.folder} is finished without the rows of {', '.join(lacking)}, and its "
                "model is gone; expected ladder.scaling as it was, or another --out"
            )
        return lacking

    def doubt(self) -> None:
        """A finished run whose rows can't be read back is only trained: its ladder is due again."""
        if self.status != "finished":
            return
        try:
            read_rows(self.folder / RESULTS)
            read_positions(self.folder / POSITIONS)
        except (OSError, ValueError):
            record = {**new_record(self.mechanism, self.seed), **self.record}
            files.write_json(self.folder / RECORD, {**record, "status": "interrupted"})

    def prepare(self, resume: bool) -> None:
        """Make the folder ready: what earlier attempts left is continued, or cleared away.

        A finished run that is continued keeps its model and rows, and gets the rows it lacks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume and (self.begun or self.trained):
            record = {**self.record, "status": "pending", "error": None}
        else:
            self.clear()
            record = new_record(self.mechanism, self.seed)
        files.write_json(self.folder / RECORD, record)

    def clear(self) -> None:
        """Remove what an earlier attempt left."""
        for name in (MODEL, CHECKPOINTS, "tensorboard"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (METRICS, RESULTS, POSITIONS, LOG):
            (self.folder / name).unlink(missing_ok=True)

    def last_metrics(self) -> dict[str, Any]:
        """The newest training row, with its loss and tokens per second; {} before the first."""
        rows = (row for row in reversed(read_metrics(self.folder)) if "loss" in row)
        return next(rows, {})


class Record:
    """Writes a run's `run.json` as it goes; moments of progress at most twice a second."""

    def __init__(self, run: Run) -> None:
        self.path = run.folder / RECORD
        self.facts = run.record
        self._written = 0.0

    def update(self, **facts: Any) -> None:
        self.facts |= facts
        files.write_json(self.path, self.facts)
        self._written = time.monotonic()

    def progress(self, **facts: Any) -> None:
        self.facts |= facts
        if time.monotonic() - self._written > 0.5:
            self.update()


def new_record(mechanism: str, seed: int) -> dict[str, Any]:
    """A run that has not begun."""
    return {
        "schema": SCHEMA,
        "mechanism": mechanism,
        "seed": seed,
        "status": "pending",
        "phase": None,
        "iteration": 0,
        "iterations": None,
        "error": None,
        "parameters": None,
        "parameters_transport": None,
        "flops_per_token": None,
        "train_seconds": None,
        "ladder_seconds": None,
        "scaled_seconds": None,
        "ladder_share": 0.0,
        "tokens_per_second": None,
        "train_tokens": None,
        "peak_memory_bytes": None,
        "left_out": [],
        "started": None,
        "finished": None,
    }


def grid(recipe: Recipe, out: Path) -> list[Run]:
    """Every run of a study, in the recipe's order, seed by seed."""
    from farfield.attention import mechanisms

    return [
        Run(name, seed, out / "runs" / f"{mechanisms.slug(name)}-s{seed}")
        for seed in recipe.seeds
        for name in recipe.mechanisms
    ]


def order_of_start(runs: Iterable[Run], first: int) -> list[Run]:
    """Seed by seed: `first` runs as the recipe has them, so that the page soon has a comparison;
    then the most composed mechanisms, which take longest, so that none of them is left to last."""
    by_seed: dict[int, list[Run]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    ordered: list[Run] = []
    for group in by_seed.values():
        head, rest = (group[:first], group[first:]) if not ordered else ([], group)
        ordered += head + sorted(rest, key=lambda run: -run.mechanism.count("+"))
    return ordered
