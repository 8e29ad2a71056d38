"""What a person sees of a study or a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farfield.study.launch import Display
from farfield.study.run import Run

PLAIN_EVERY = 60.0
"""Seconds between plain lines about running jobs, where there is no terminal."""


class Lines(Display):
    """Plain lines: events as they come, the state of the whole once a minute."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._told = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self, running: Sequence[Run], share: float, seconds_left: float | None) -> None:
        if time.monotonic() - self._told < PLAIN_EVERY:
            return
        self._told = time.monotonic()
        states = ", ".join(f"{run.name} {state(facts_of(run))}" for run in running)
        self.say(f"{share:.0%} done, {time_left(seconds_left)}: {states}")


class LiveTable(Lines):
    """One row for each running job and one for the whole study, drawn anew in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, running: Sequence[Run], share: float, seconds_left: float | None) -> None:
        table = Table.grid(padding=(0, 2))
        for run in running:
            facts = facts_of(run)
            table.add_row(run.name, bar(phase_share(facts)), Text(state(facts)))
        whole = Table.grid(padding=(0, 2))
        whole.add_row("study", bar(share), f"{share:.0%}, {time_left(seconds_left)}")
        self._live.update(Group(table, whole))


def for_console(console: Console) -> Lines:
    """A live table where there is a terminal, plain lines where there is none."""
    return LiveTable(console) if console.is_terminal else Lines(console)


class Training:
    """The progress of one run in this process: loss, tokens/s and time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._plain = time.monotonic()
        self._phase: tuple[str, float, float] | None = None

    def __enter__(self) -> Training:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, facts: dict[str, Any]) -> None:
        text = f"{state(facts)}, {time_left(self._seconds_left(facts))}"
        if self.console.is_terminal:
            row = Table.grid(padding=(0, 2))
            row.add_row(facts["mechanism"], bar(phase_share(facts)), Text(text))
            self._live.update(row)
        elif time.monotonic() - self._plain > PLAIN_EVERY:
            self._plain = time.monotonic()
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _seconds_left(self, facts: dict[str, Any]) -> float | None:
        """At the pace since this phase began."""
        share, now = phase_share(facts), time.monotonic()
        if self._phase is None or self._phase[0] != facts["phase"]:
            self._phase = (facts["phase"], share, now)
        _, at_start, since = self._phase
        gained = share - at_start
        return None if gained <= 0 else (now - since) * (1 - share) / gained


class Work:
    """Progress of one piece of work in this process, counted in (done, total)."""

    def __init__(self, console: Console, name: str) -> None:
        self.console, self.name = console, name
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._started = time.monotonic()

    def __enter__(self) -> Work:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, done: float, total: float) -> None:
        if self.console.is_terminal and done > 0:
            left = (time.monotonic() - self._started) * (total - done) / done
            row = Table.grid(padding=(0, 2))
            row.add_row(self.name, bar(done / total), time_left(left))
            self._live.update(row)


def facts_of(run: Run) -> dict[str, Any]:
    """A run's record with its newest loss and tokens per second, read from its files."""
    known = {key: value for key, value in run.record.items() if value is not None}
    return {"phase": None, **run.last_metrics(), **known}


def phase_share(record: dict[str, Any]) -> float:
    """How much of its present phase a run has behind it, 0–1."""
    if record["phase"] == "ladder":
        return float(record.get("ladder_share") or 0.0)
    return float((record.get("iteration") or 0) / (record.get("iterations") or 1))


def state(facts: dict[str, Any]) -> str:
    """A run's state in words: `training 120/400, loss 1.73, 21,300 tokens/s`."""
    phase = facts.get("phase") or facts["status"]
    if phase == "ladder":
        return f"ladder {phase_share(facts):.0%}"
    if phase != "training":
        return str(phase)
    words = [f"training {facts['iteration']}/{facts['iterations']}"]
    if facts.get("loss") is not None:
        words.append(f"loss {facts['loss']:.3f}")
    if facts.get("tokens_per_second"):
        words.append(f"{facts['tokens_per_second']:,.0f} tokens/s")
    return ", ".join(words)


def time_left(seconds: float | None) -> str:
    """`3 min left`, `40 s left`; nothing is known at the very start."""
    if seconds is None:
        return "time left unknown"
    if seconds < 100:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 6000 else f"{seconds / 3600:.1f} h left"


def bar(share: float) -> ProgressBar:
    """A bar filled to a share, 0–1."""
    return ProgressBar(total=1.0, completed=min(1.0, share), width=28)
