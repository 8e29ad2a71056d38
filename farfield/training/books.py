"""The books of a run: metrics, checkpoints, and whether all numbers are still finite."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farfield.training.blocks import Stream, validation_loss
from farfield.training.settings import TrainingSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"


class NonFiniteLoss(ArithmeticError):  # noqa: N818 (named for what it is)
    """The loss, the gradient or the weights stopped being finite numbers at `iteration`."""

    def __init__(self, iteration: int, what: str, checkpoint: int | None) -> None:
        self.iteration = iteration
        kept = "no checkpoint yet" if checkpoint is None else f"last good checkpoint: {checkpoint}"
        super().__init__(f"{what} at iteration {iteration}; {kept}")


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop; what was done is in a checkpoint of `iteration`."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        super().__init__(f"interrupted at iteration {iteration}")


@dataclass(frozen=True)
class Progress:
    """Where training stands after an iteration.

    Units: `loss` nats per token; `seconds` spent in iterations, earlier sessions included;
    `tokens_per_second` over the last logging interval.
    """

    iteration: int
    iterations: int
    loss: float
    tokens_per_second: float
    seconds: float


def last_checkpoint(out: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint of a run folder, as (iteration, folder).

    The Trainer writes `trainer_state.json` last: where it can be read, the rest is there.
    """
    complete = []
    for folder in (out / CHECKPOINTS).glob("checkpoint-*"):
        try:
            state = json.loads((folder / "trainer_state.json").read_text())
            complete.append((int(state["global_step"]), folder))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(complete, default=None)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Rows of a run's `metrics.jsonl`; what a killed process left half written is not."""
    rows = []
    try:
        lines = (out / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "iteration" in row:
            rows.append(row)
    return rows


class Books:
    """Keeps the books of a run while the Trainer drives it: metrics, validation, finiteness."""

    def __init__(
        self,
        model: PreTrainedModel,
        validation: Stream,
        settings: TrainingSettings,
        out: Path,
        checkpoint: tuple[int, Path] | None,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.model, self.validation, self.settings = model, validation, settings
        self.progress, self.stop = progress, stop
        self.log: Callable[[dict[str, float]], None] | None = None
        self.metrics = out / METRICS
        self.checkpoint = checkpoint[0] if checkpoint else None
        self.iteration = self.checkpoint or 0
        rows = [row for row in read_metrics(out) if row["iteration"] <= self.iteration]
        if self.iteration == 0:
            rows = []
        out.mkdir(parents=True, exist_ok=True)
        self.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.seconds: float = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        self.loss = next((r["loss"] for r in reversed(rows) if "loss" in r), math.nan)
        self.validation_loss: float = next(
            (r["validation_loss"] for r in reversed(rows) if "validation_loss" in r), math.nan
        )
        self.rate = 0.0
        self._logged = (self.iteration, self.seconds)
        self._started = 0.0
        self._parts: list[float] = []

    def part_done(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss, before its backward: a non-finite one goes no further."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteLoss(self.iteration + 1, f"loss is {value}", self.checkpoint)
        self._parts.append(value)

    def started(self) -> None:
        self._parts.clear()
        self._started = time.perf_counter()

    def before_update(self) -> None:
        """The last moment at which the weights are still those of a finite loss."""
        if not _finite(p.grad for p in self.model.parameters() if p.grad is not None):
            raise NonFiniteLoss(self.iteration + 1, "gradient is not finite", self.checkpoint)

    def done(self, control: Any) -> None:
        """An iteration ended: ask for what is due after it."""
        self.iteration += 1
        self.seconds += time.perf_counter() - self._started
        self.loss = sum(self._parts) / len(self._parts)
        last = self.iteration == self.settings.iterations
        if last or self.iteration % self.settings.log_every == 0:
            control.should_log = True
        done, seconds = self._logged
        tokens = (self.iteration - done) * self.settings.batch * self.settings.length
        self.rate = tokens / max(self.seconds - seconds, 1e-9)
        if last or self.iteration % self.settings.validate_every == 0:
            self.validation_loss = validation_loss(self.model, self.validation, self.settings)
            assert self.log is not None
            due = control.should_log  # logging a value of its own clears what is due
            self.log({"validation_loss": self.validation_loss})
            control.should_log = due
        if self.progress is not None:
            self.progress(
                Progress(
                    self.iteration, self.settings.iterations, self.loss, self.rate, self.seconds
                )
            )
        if self.stop is not None and not last and self.stop():
            control.should_save = control.should_training_stop = True
        if control.should_save and not _finite(self.model.parameters(), largest=True):
            raise NonFiniteLoss(self.iteration, "weights are not finite", self.checkpoint)

    def logged(self, logs: dict[str, float]) -> None:
        row: dict[str, Any] = {"iteration": self.iteration}
        if "validation_loss" in logs:
            row["validation_loss"] = logs["validation_loss"]
        elif "loss" in logs:
            row |= {key: logs[key] for key in ("loss", "learning_rate", "grad_norm")}
            row |= {"tokens_per_second": self.rate, "seconds": self.seconds}
            self._logged = (self.iteration, self.seconds)
        else:
            return  # the Trainer's own closing summary
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def saved(self) -> None:
        self.checkpoint = self.iteration


def _finite(tensors: Iterator[Any], largest: bool = False) -> bool:
    """Whether the joint norm is finite: the 2-norm that clipping divides by, or the largest."""
    import torch

    norm_type = math.inf if largest else 2.0
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(list(tensors), norm_type)))
