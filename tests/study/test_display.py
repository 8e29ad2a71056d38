"""What a person sees: one row for each running job on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from farfield.study import display
from farfield.study.display import Lines, LiveTable, Training, Work, for_console
from farfield.study.recipe import Recipe
from farfield.study.run import Run, grid


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120), file


@pytest.fixture
def training(small: Recipe, tmp_path: Path) -> Run:
    run = grid(small, tmp_path)[0]
    run.prepare(resume=False)
    record = {**run.record, "status": "running", "phase": "training"}
    record |= {"iteration": 2, "iterations": 8}
    (run.folder / "run.json").write_text(json.dumps(record))
    row = {"iteration": 2, "loss": 1.23456, "tokens_per_second": 21300.4}
    (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return run


def test_a_terminal_shows_a_row_for_each_running_job(training: Run) -> None:
    on, file = console(terminal=True)
    with for_console(on) as live:
        assert isinstance(live, LiveTable)
        live.show([training], 0.25, 130.0)
        live.say("something happened")
    told = file.getvalue()
    assert "rope-s0" in told
    assert "training 2/8, loss 1.235, 21,300 tokens/s" in told
    assert "25%, 2 min left" in told
    assert "something happened" in told


def test_without_a_terminal_there_are_few_lines(
    training: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    off, file = console(terminal=False)
    with for_console(off) as lines:
        assert type(lines) is Lines
        for _ in range(130):
            lines.show([training], 0.25, None)
            now[0] += 1
    told = file.getvalue().splitlines()
    assert len(told) == 2
    assert told[0] == (
        "25% done, time left unknown: rope-s0 training 2/8, loss 1.235, 21,300 tokens/s"
    )


def test_one_run_shows_loss_speed_and_time_left(
    training: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    on, file = console(terminal=False)
    facts = {**training.record, "loss": 1.5, "tokens_per_second": 10.0}
    with Training(on) as watch:
        watch(facts)
        now[0] = 70
        watch({**facts, "iteration": 4})
    assert file.getvalue() == "training 4/8, loss 1.500, 10 tokens/s, 2 min left\n"


def test_work_is_quiet_without_a_terminal() -> None:
    off, file = console(terminal=False)
    with Work(off, "ladder") as progress:
        progress(1, 2)
    assert file.getvalue() == ""
    on, file = console(terminal=True)
    with Work(on, "ladder") as progress:
        progress(1, 2)
    assert "ladder" in file.getvalue()


def test_words(training: Run) -> None:
    record = training.record
    assert display.state({**record, "phase": "ladder", "ladder_share": 0.5}) == "ladder 50%"
    assert display.state({**record, "phase": None, "status": "pending"}) == "pending"
    assert display.time_left(42) == "42 s left"
    assert display.time_left(7200) == "2.0 h left"
