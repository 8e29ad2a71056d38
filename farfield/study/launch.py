"""A study from its recipe to its page: which runs are due, who carries them, what is written.

Runs are independent jobs, each a process of one thread; their files are the only channel.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from farfield.data import Corpus
from farfield.study import files, folder
from farfield.study.modules import import_options
from farfield.study.recipe import Recipe
from farfield.study.run import LOG, RECORD, Run, grid, order_of_start

GRACE = 60.0
"""Seconds that a job has to finish its iteration and write a checkpoint, once asked to stop."""
POLL = 0.5


class Display:
    """What a study tells while it runs; this one tells nothing."""

    def say(self, line: str) -> None:
        """One line for the record."""

    def show(self, running: Sequence[Run], share: float, seconds_left: float | None) -> None:
        """Where the running jobs stand, and how much of the whole study is done."""


@dataclass
class Outcome:
    """How a study ended: every run with its status, what went wrong beside, and the page."""

    runs: list[Run]
    report: Path | None
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.status == "failed"]

    @property
    def exit_status(self) -> int:
        if self.interrupted:
            return 130
        return 1 if self.failed or self.problems else 0


def study(
    recipe: Recipe,
    out: Path,
    *,
    jobs: int | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> Outcome:
    """Train and measure every run of a recipe that `out` doesn't hold finished.

    The page is written anew after every run. A failed run doesn't stop the others. On Ctrl-C the
    jobs write a checkpoint and stop; `resume` continues them.

    Raises: ValueError or OSError with one line, before anything is trained, for what a caller can
    mend: names, shapes, texts too short, a folder of another study, unfinished runs without
    `resume`, a disk too small.
    """
    from farfield.study import job

    display = display or Display()
    recipe = recipe.canonical()
    jobs = default_jobs() if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: expected 1 or more")
    runs = grid(recipe, out)
    if (out / RECORD).exists():
        raise ValueError(f"{out} holds a single run of `farfield train`; expected another --out")
    folder.refuse_another(out, recipe)
    corpus, weights = check(recipe, display)
    folder.refuse_other_text(out, corpus)
    with folder.held(out):
        due = _due(runs, recipe, resume, display, out)
        _room(out, [weights[run.mechanism] for run in due])
        folder.describe(out, recipe, jobs, corpus)
        for run in due:
            run.prepare(resume)
        outcome = Outcome(runs, None)
        _publish(out, outcome, display)
        try:
            with _interruptible():
                _carry_out(out, order_of_start(due, jobs), jobs, outcome, display)
        except KeyboardInterrupt:
            outcome.interrupted = True
        except OSError as error:
            raise OSError(job.one_line(error, out)) from error
        _publish(out, outcome, display)
    return outcome


def check(recipe: Recipe, display: Display) -> tuple[Corpus, dict[str, int]]:
    """All that is cheap to know before training; tokenises the text once for all jobs.

    Returns the text, and the number of parameters of each mechanism's model.
    Raises: ValueError or OSError for a model, text or ladder that can't work.
    """
    from farfield.data import load_corpus
    from farfield.evaluation.plan import left_out_lines, make_plan
    from farfield.evaluation.scaled import scalable
    from farfield.study import job

    data, length = recipe.data, recipe.training.length
    corpus = load_corpus(data.source, data.tokenizer, max_tokens=data.max_tokens)
    for name, stream in (("training", corpus.train), ("validation", corpus.validation)):
        if len(stream) < length + 1:
            raise ValueError(
                f"{name} text of {data.source} holds {len(stream):,} tokens, fewer than one block; "
                f"expected at least training.length + 1 = {length + 1:,}"
            )
    parameters = {name: job.parameters(recipe, corpus, name) for name in recipe.mechanisms}
    plan = make_plan(job.ladder_settings(recipe), len(corpus.test), length, None)
    for line in left_out_lines([asdict(left) for left in plan.left_out]):
        display.say(line)
    unscaled = [name for name in recipe.mechanisms if not scalable(name)]
    if recipe.ladder.scaling and unscaled:
        display.say(
            f"no scaled rows ({', '.join(recipe.ladder.scaling)}) for {', '.join(unscaled)}: "
            "no frequencies by position"
        )
    return corpus, parameters


def default_jobs() -> int:
    """One process per core; where there are GPUs, one per GPU."""
    return len(_gpus()) or folder.cores()


def _gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _due(runs: list[Run], recipe: Recipe, resume: bool, display: Display, out: Path) -> list[Run]:
    """Runs still to be done, finished ones that lack scaled rows among them.

    Raises: ValueError when that would throw work away, or add to a finished run, unasked.
    """
    for run in runs:
        run.doubt()
    lacking = {run.name: run.lacking(recipe) for run in runs}
    due = [run for run in runs if run.status != "finished" or lacking[run.name]]
    done = len(runs) - len(due)
    if done:
        display.say(f"{done} of {len(runs)} runs are finished already and are not repeated")
    begun = [f"{run.name} {run.begun}" for run in due if run.begun]
    begun += [
        f"{name} trained, without the rows of {', '.join(rows)}"
        for name, rows in lacking.items()
        if rows
    ]
    if begun and not resume:
        raise ValueError(
            f"{out} holds unfinished runs ({'; '.join(begun)}); "
            "add --resume to continue them, or choose another --out"
        )
    for line in begun:
        display.say(f"continuing {line}")
    return due


def _room(out: Path, parameters: Sequence[int]) -> None:
    """Raises: OSError when the disk hasn't room for the models and checkpoints of the runs due."""
    weights = [4 * count for count in parameters]
    # A model each; while one trains, two checkpoints of weights and two moments; and the rows.
    need = sum(weights) + 6 * max(weights, default=0) + 2**20 * len(weights)
    free = shutil.disk_usage(out).free
    if free < need:
        raise OSError(
            f"no space for the study in {out}: {free / 2**20:,.1f} MiB free, "
            f"expected at least {need / 2**20:,.1f} MiB for {len(weights)} runs"
        )


@dataclass
class _Job:
    run: Run
    process: subprocess.Popen[bytes]
    slot: int


def _carry_out(out: Path, due: list[Run], jobs: int, outcome: Outcome, display: Display) -> None:
    """Keep up to `jobs` processes busy until every run is done; stop them all on the way out."""
    waiting, running, clock = list(due), [], _Clock(due)  # type: ignore[var-annotated]
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                slot = min(set(range(jobs)) - {one.slot for one in running})
                running.append(_start(out, waiting.pop(0), slot))
            time.sleep(POLL)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _ended(one, outcome, display)
                _publish(out, outcome, display)
            share, left = clock.read()
            display.show([one.run for one in running], share, left)
    finally:
        _stop(running)


def _start(out: Path, run: Run, slot: int) -> _Job:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    gpus = _gpus()
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    command = [sys.executable, "-m", "farfield.study.job", str(run.folder)]
    with (run.folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [*command, "--recipe", str(out / folder.RECIPE)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the study alone, which asks its jobs to stop
        )
    return _Job(run, process, slot)


def _ended(one: _Job, outcome: Outcome, display: Display) -> None:
    """Say how a job ended; one that died without a word is written down as failed."""
    run, code = one.run, one.process.returncode
    record = run.record
    if record["status"] not in ("finished", "failed", "interrupted"):
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        record = {**record, "status": "failed", "error": f"job ended early: {cause}; see {LOG}"}
        files.write_json(run.folder / RECORD, record)
    done = sum(run.status == "finished" for run in outcome.runs)
    if record["status"] == "finished":
        spans = ("train_seconds", "ladder_seconds", "scaled_seconds")
        took = sum(record.get(span) or 0 for span in spans)
        display.say(f"{run.name} finished in {took:.0f} s ({done} of {len(outcome.runs)} runs)")
    else:
        display.say(f"{run.name} {record['status']}: {record['error'] or 'asked to stop'}")


def _stop(running: Sequence[_Job]) -> None:
    """Ask every job to stop, and wait for its checkpoint."""
    with _deaf():
        for one in running:
            one.process.terminate()
        deadline = time.monotonic() + GRACE
        for one in running:
            try:
                one.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            record = one.run.record
            if record["status"] in ("running", "pending"):
                with suppress(OSError):  # a disk that is full now is told by whoever filled it
                    files.write_json(one.run.folder / RECORD, {**record, "status": "interrupted"})


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within, SIGTERM and a closed terminal are what Ctrl-C is."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    watched = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    before = {number: signal.signal(number, interrupt) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _deaf() -> Iterator[None]:
    """Within, a second Ctrl-C doesn't cut short what the first one asked for."""
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _publish(out: Path, outcome: Outcome, display: Display) -> None:
    """Gather the rows and write the page; a page that can't be written is said at the end."""
    outcome.problems = []
    try:
        from farfield import report

        folder.gather(out, outcome.runs)
        outcome.report = report.write(out)
    except Exception as error:
        text = " ".join(str(error).split())
        outcome.problems = [f"report not written: {type(error).__name__}: {text}"]


class _Clock:
    """How much of the due work is done, and the time the rest will take at the pace so far."""

    LADDER = 0.3  # of a run's work, until one has finished

    def __init__(self, due: Sequence[Run]) -> None:
        self.due = due
        self.started = time.monotonic()
        self.at_start = self._share()

    def _share(self) -> float:
        records = [run.record for run in self.due]
        ladder = self._ladder_part(records)
        return sum(_done(record, ladder) for record in records) / max(1, len(records))

    def _ladder_part(self, records: Sequence[dict[str, Any]]) -> float:
        times = [
            (r["train_seconds"], r["ladder_seconds"])
            for r in records
            if r["status"] == "finished" and r["train_seconds"] and r["ladder_seconds"]
        ]
        if not times:
            return self.LADDER
        train, ladder = (sum(column) for column in zip(*times, strict=True))
        return float(ladder / (train + ladder))

    def read(self) -> tuple[float, float | None]:
        """(share of the work done, seconds left or None while nothing is known)."""
        share = self._share()
        gained = share - self.at_start
        if gained <= 0:
            return share, None
        left = (time.monotonic() - self.started) * (1 - share) / gained
        return share, left if math.isfinite(left) else None


def _done(record: dict[str, Any], ladder: float) -> float:
    """The part of a run's work that is behind it, 0–1; a failed run has none left."""
    if record["status"] in ("finished", "failed"):
        return 1.0
    trained = (record["iteration"] or 0) / (record["iterations"] or math.inf)
    return (1 - ladder) * trained + ladder * float(record.get("ladder_share") or 0.0)


def command_to_resume(out: Path) -> str:
    """The command that continues an interrupted study, whatever options it was started with."""
    recipe = str(out / folder.RECIPE)
    words = ["farfield", *import_options(), "study", recipe, "--out", str(out), "--resume"]
    return shlex.join(words)
