"""`farfield bench`: its table, its file, and one line for every mistake."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farfield import benchmark
from farfield.benchmark import Results, Setting, pairing
from farfield.cli import app

runner = CliRunner()

QUICKLY = ("bench", "--quick", "--budget", "0.01")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    """`--quick` is quicker still."""
    monkeypatch.setattr(pairing, "_SHORTEST", 0.0)
    monkeypatch.setattr(benchmark, "QUICK", setting.sizes)
    monkeypatch.setenv("COLUMNS", "150")


def mistake(*arguments: str) -> str:
    done = runner.invoke(app, ["bench", *arguments])
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_rows_are_shown_and_written(small_recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = runner.invoke(
        app,
        [
            *QUICKLY,
            str(small_recipe),
            "--only",
            "model",
            "--threads",
            "1",
            "--json",
            str(file),
        ],
    )
    assert done.exit_code == 0, done.output
    for word in ("model", "random_iid+v", "rope", "training iteration", "torch"):
        assert word in done.stdout
    assert "model: small: alibi, random_iid+v;" in done.stderr
    assert "left" in done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert [row["case"] for row in results["rows"]] == ["alibi", "random_iid+v"]
    assert results["machine"]["threads"] == 1


def test_a_recipes_settings_can_be_changed(small_recipe: Path) -> None:
    done = runner.invoke(
        app,
        [*QUICKLY, str(small_recipe), "--only", "model", "--set", 'mechanisms=["alibi"]'],
    )
    assert done.exit_code == 0, done.output
    assert "random_iid" not in done.stdout


def test_notes_are_said(small_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.pruned, "TRAINED", ("alibi",))
    done = runner.invoke(app, [*QUICKLY, str(small_recipe), "--only", "pruned"])
    assert done.exit_code == 0, done.output
    assert "by head:" in done.stdout
    assert "training alibi by the recipe small" in done.stderr


def test_mistakes_are_one_line(small_recipe: Path, tmp_path: Path) -> None:
    assert "did you mean 'decode'" in mistake("--only", "decod")
    assert "budget" in mistake(str(small_recipe), "--only", "model", "--budget", "0")
    assert "threads" in mistake(str(small_recipe), "--only", "model", "--threads", "0")
    assert "no folder" in mistake("--only", "layer", "--json", str(tmp_path / "none" / "b.json"))
    assert "expected a file" in mistake("--only", "layer", "--json", str(tmp_path))
    assert "no recipe" in mistake("labtop", "--only", "model")
    missing = str(tmp_path / "none")
    assert missing in mistake(str(small_recipe), "--only", "pruned", "--model", missing)


def test_targets_are_shown_with_their_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    from farfield.benchmark.targets import Target
    from farfield.cli import bench

    row = benchmark.Row("layer", "learned", "forward", 8, 1.2, 1.15, 1.25, "rope")
    held = row.judged(Target("layer", "forward", 8, "rope", 1.1))
    machine = benchmark.rows.machine(1, ["layer"], 1.0, False)
    left_out = (benchmark.LeftOut("peers", "x-transformers", "not installed"),)
    bench._show(
        Results(machine, (held, replace(row, ratio=None, unit="B", median=2.0**21)), left_out)
    )
    shown = capsys.readouterr().out
    for word in ("≤ 1.1", "not met", "1.150 to 1.250", "not finite", "2 MiB", "left out: peers"):
        assert word in shown
