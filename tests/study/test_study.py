"""A whole study: jobs in other processes, failures, Ctrl-C, what is written and not repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farfield.evaluation import rows
from farfield.study import folder, job, launch
from farfield.study import recipe as recipes
from farfield.study.job import Stop
from farfield.study.launch import Display, Outcome, study
from farfield.study.recipe import Recipe
from farfield.study.run import Run, grid

# Jobs are processes that import all of torch: on a busy machine that alone takes a minute.
pytestmark = pytest.mark.timeout(900)


class Heard(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shares: list[float] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, running: Sequence[Run], share: float, seconds_left: float | None) -> None:
        self.shares.append(share)


Ended = namedtuple("Ended", "recipe out outcome heard")


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory: pytest.TempPathFactory, small_table: dict[str, Any]) -> Ended:
    """A study of two runs, one of which meets a non-finite loss."""
    training = {**small_table["training"], "angle_learning_rate": 1e36}
    recipe = recipes.recipe_from({**small_table, "training": training}, "small")
    out = tmp_path_factory.mktemp("study") / "out"
    heard = Heard()
    return Ended(recipe, out, study(recipe, out, jobs=2, display=heard), heard)


def test_a_failed_run_does_not_stop_the_others(half_failed: Ended) -> None:
    outcome: Outcome = half_failed.outcome
    assert {run.name: run.status for run in outcome.runs} == {
        "rope-s0": "finished",
        "learned+v-s0": "failed",
    }
    assert outcome.exit_status == 1
    assert [run.name for run in outcome.failed] == ["learned+v-s0"]
    assert any("learned+v-s0 failed: " in line for line in half_failed.heard.lines)
    assert any(line.startswith("rope-s0 finished in") for line in half_failed.heard.lines)
    assert half_failed.heard.shares[-1] <= 1.0
    log = (half_failed.out / "runs" / "learned+v-s0" / "log.txt").read_text()
    assert "NonFiniteLoss" in log


def test_the_folder_holds_recipe_environment_rows_and_page(half_failed: Ended) -> None:
    out: Path = half_failed.out
    assert recipes.load(str(out / "recipe.toml")) == half_failed.recipe
    environment = json.loads((out / "environment.json").read_text())
    assert environment["jobs"] == 2
    assert environment["cores"] >= 1
    assert environment["packages"]["torch"]
    for name in ("results.jsonl", "positions.jsonl"):
        gathered = (out / name).read_text()
        assert gathered == (out / "runs" / "rope-s0" / name).read_text() != ""
    assert half_failed.outcome.problems == []
    assert half_failed.outcome.report == out / "report.html"
    assert "learned+v" in (out / "report.html").read_text()


def test_a_finished_run_is_not_repeated(
    half_failed: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Refuses:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(Path(command[3]).name)
            self.returncode: int | None = None

        def poll(self) -> int:
            self.returncode = -9
            return -9

    monkeypatch.setattr(subprocess, "Popen", Refuses)
    monkeypatch.setattr(folder, "environment", lambda jobs: {"jobs": jobs})
    heard = Heard()
    outcome = study(half_failed.recipe, half_failed.out, jobs=2, display=heard, resume=True)
    assert started == ["learned+v-s0"]
    assert "1 of 2 runs are finished already and are not repeated" in heard.lines
    failed = outcome.failed[0].record
    assert failed["error"] == "job ended early: killed by SIGKILL; see log.txt"
    assert len(rows.read_rows(half_failed.out / "results.jsonl")) > 0


def test_a_folder_of_another_study_is_refused(half_failed: Ended, tmp_path: Path) -> None:
    table = half_failed.recipe.as_toml()
    other = recipes.recipe_from({**table, "model": {**table["model"], "layers": 3}}, "small")
    with pytest.raises(ValueError, match=r"another study .*model\.layers is 2 there and 3 here"):
        study(other, half_failed.out)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ValueError, match="is not empty and holds no study"):
        study(half_failed.recipe, tmp_path)
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        study(half_failed.recipe, tmp_path / "holiday.jpg")


def test_two_studies_do_not_write_to_one_folder(half_failed: Ended) -> None:
    with folder.held(half_failed.out), pytest.raises(ValueError, match="another farfield process"):
        study(half_failed.recipe, half_failed.out, resume=True)


def test_a_page_that_fails_is_told_and_kills_nothing(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farfield import report

    def broken(out: Path) -> Path:
        raise RuntimeError("no\nink")

    monkeypatch.setattr(report, "write", broken)
    monkeypatch.setattr(launch, "_carry_out", lambda *_: None)
    outcome = study(small, tmp_path / "out")
    assert outcome.problems == ["report not written: RuntimeError: no ink"]
    assert outcome.exit_status == 1


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("training", {"length": 3000}, "training.length + 1 = 3,001"),
        ("data", {"source": "nowhere.txt"}, "nowhere.txt"),
        ("ladder", {"tokens": 8}, "no length can be evaluated; 16"),
    ],
)
def test_what_cannot_work_is_told_before_anything_runs(
    small: Recipe, tmp_path: Path, section: str, changes: dict[str, object], told: str
) -> None:
    table = small.as_toml()
    recipe = recipes.recipe_from({**table, section: {**table[section], **changes}}, "small")
    with pytest.raises((ValueError, OSError)) as error:
        study(recipe, tmp_path / "out")
    assert told in str(error.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--jobs 0: expected 1 or more"):
        study(small, tmp_path / "out", jobs=0)


def test_lengths_left_out_are_told(small: Recipe) -> None:
    table = small.as_toml()
    ladder = {**table["ladder"], "multiples": [1, 2, 1000]}
    heard = Heard()
    launch.check(recipes.recipe_from({**table, "ladder": ladder}, "small"), heard)
    assert len(heard.lines) == 1
    assert heard.lines[0].startswith("left out of the ladder: 16000 (windows), 16000 (fixed)")


def test_a_disk_too_small_is_told_before_anything_runs(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(OSError, match=r"no space for the study in .* 0\.0 MiB free, expected"):
        study(small, tmp_path / "out")


class CtrlC(Heard):
    """Presses Ctrl-C once the first job has trained a little."""

    def show(self, running: Sequence[Run], share: float, seconds_left: float | None) -> None:
        if running and running[0].record["iteration"] >= 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the signal interrupts this


def test_ctrl_c_stops_a_study_and_resume_finishes_it(
    small_table: dict[str, Any], tmp_path: Path
) -> None:
    training = {**small_table["training"], "iterations": 300, "validate_every": 100}
    table = {**small_table, "mechanisms": ["learned", "rope"], "training": training}
    recipe, out = recipes.recipe_from(table, "long"), tmp_path / "out"
    # The processes that pytest-xdist starts ignore Ctrl-C; here it is to mean what it does.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stopped = study(recipe, out, jobs=1, display=CtrlC())
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.interrupted
    assert stopped.exit_status == 130
    run, untouched = stopped.runs
    assert (run.status, untouched.status) == ("interrupted", "pending")
    assert 4 <= int(str(run.begun).split()[-1]) < 300
    with pytest.raises(ValueError, match=r"holds unfinished runs \(learned-s0 at iteration"):
        study(recipe, out)
    untouched.folder.joinpath("run.json").write_text('{"status": "finished", "iteration": 300}')
    for name in ("results.jsonl", "positions.jsonl"):
        untouched.folder.joinpath(name).touch()
    heard = Heard()
    outcome = study(recipe, out, resume=True, display=heard)
    assert [run.status for run in outcome.runs] == ["finished", "finished"]
    assert any(line.startswith("continuing learned-s0 at iteration") for line in heard.lines)
    whole = grid(recipe, tmp_path / "whole")[0]
    whole.prepare(resume=False)
    assert job.execute(whole, recipe, Stop()) == "finished"
    weights = [one.folder / "model" / "model.safetensors" for one in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_each_job_has_one_thread_and_a_gpu_of_its_own(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    def started(command: list[str], env: dict[str, str], **_: object) -> None:
        given.append(env)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(launch, "_gpus", lambda: ["4", "7"])
    run = grid(small, tmp_path)[0]
    run.prepare(resume=False)
    for slot in range(3):
        launch._start(tmp_path, run, slot)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in given] == ["4", "7", "4"]
    assert {env["OMP_NUM_THREADS"] for env in given} == {"1"}
    assert launch.default_jobs() == 2
    monkeypatch.setattr(launch, "_gpus", list)
    assert launch.default_jobs() == folder.cores()


def test_time_left_follows_the_pace(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = grid(small, tmp_path)
    now = [100.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])

    def stands(run: Run, **facts: object) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "run.json").write_text(json.dumps({**run.record, **facts}))

    clock = launch._Clock(runs)
    assert clock.read() == (0.0, None)
    now[0] += 30
    stands(runs[0], status="finished", train_seconds=20.0, ladder_seconds=5.0)
    assert clock.read() == (0.5, pytest.approx(30))
    now[0] += 10
    stands(runs[1], status="running", iteration=4, iterations=8)
    share, left = clock.read()
    assert share == pytest.approx(0.5 + 0.5 * 0.8 * 0.5)  # a run's ladder is a fifth of its work
    assert left == pytest.approx(40 * 0.3 / 0.7)


def test_one_run_and_a_study_keep_out_of_each_others_folders(small: Recipe, tmp_path: Path) -> None:
    from farfield.study.single import train_one

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text('{"status": "finished"}')
    with pytest.raises(ValueError, match="holds a single run"):
        study(small, tmp_path / "one")
    (tmp_path / "study" / "runs").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a whole study"):
        train_one(small, "rope", 0, tmp_path / "study")


def test_a_finished_run_whose_rows_are_gone_is_due_again(tmp_path: Path) -> None:
    run = Run("rope", 0, tmp_path / "rope-s0")
    run.prepare(resume=False)
    (run.folder / "run.json").write_text('{"status": "finished"}')
    (run.folder / "model").mkdir()
    run.doubt()
    assert (run.status, run.begun) == ("interrupted", "trained")
    assert run.record["iterations"] is None  # a record that lacks keys is completed
