"""`farfield theory`: tables, JSON, pictures, mistakes in one line, and a verdict by status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farfield import theory
from farfield.cli import app

runner = CliRunner()


def answer(*arguments: str) -> Any:
    done = runner.invoke(app, ["theory", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def mistake(*arguments: str) -> str:
    done = runner.invoke(app, ["theory", *arguments])
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_help_lists_the_questions() -> None:
    told = runner.invoke(app, ["theory", "--help"])
    assert told.exit_code == 0
    for command in (
        "window",
        "break-length",
        "bounds",
        "values",
        "phase-diagram",
        "predict",
        "verify",
    ):
        assert command in told.output
        assert "Example" in runner.invoke(app, ["theory", command, "--help"]).output


def test_windows() -> None:
    rows = answer("window", "--law", "normal:0.4")
    assert [row["mixing_window"] for row in rows] == [29, 58, 87]
    rows = answer("window", "--law", "reflection:64", "--epsilon", "0.1,0.01")
    assert [row["mixing_window"] for row in rows] == [73, 146]
    rope = answer("window", "--law", "rope:64", "--epsilon", "0.1")
    assert [row["of"] for row in rope] == ["fastest plane", "slowest plane", "head"]
    assert {row["mixing_window"] for row in rope} == {None}
    assert "never" in runner.invoke(app, ["theory", "window", "--law", "rope:64"]).output


def test_break_lengths() -> None:
    rows = answer("break-length", "--near-window", "4", "--near-score", "6")
    told = {row["argument"]: row["far_keys"] for row in rows}
    assert told["typical"] == pytest.approx(980.6680578398)
    assert told["earliest"] == pytest.approx(816.6488769463)
    assert told["latest"] == pytest.approx(1177.629538001)
    assert told["forced, bounded"] == pytest.approx(3.55e7, rel=1e-2)
    rows = answer("break-length")
    told = {row["argument"]: row["far_keys"] for row in rows}
    assert told["signal lost, values left"] == pytest.approx(1060, abs=2)
    assert told["signal lost, values carried"] == pytest.approx(38465, rel=2e-3)
    assert told["signal lost, carried + ALiBi"] is None
    table = runner.invoke(app, ["theory", "break-length"]).output
    assert "typical" in table
    assert "never" in table


def test_bounds() -> None:
    rows = answer("bounds", "--near-window", "4", "--near-score", "6", "--lengths", "8196")
    assert rows[0]["typical"] == pytest.approx(0.8930880250265)
    assert rows[0]["lower"] == pytest.approx(theory.far_mass_lower(8192, 4, 8))
    assert rows[0]["lower"] < rows[0]["decohered"] < rows[0]["typical"] < rows[0]["upper"]
    held = answer("bounds", "--slope", "0.01", "--lengths", "512,65536")
    assert held[1]["typical"] == pytest.approx(held[0]["typical"], rel=0.01)
    assert held[0]["decohered"] is None
    gated = answer("bounds", "--gate", "0.5", "--lengths", "4096")
    assert gated[0]["upper"] == pytest.approx(theory.gate_upper(8, 0.5, 32))
    windowed = answer("bounds", "--window", "64", "--lengths", "128,4096")
    assert windowed[0]["typical"] == windowed[1]["typical"]


def test_values() -> None:
    rows = answer("values", "--far-keys", "1024", "--noise", "0.5")
    assert rows[0]["carried"] == pytest.approx(0.02412921761565 + 0.5 / 1024)
    assert rows[0]["left"] == pytest.approx(1 + 0.5 / 1024)
    assert rows[0]["floor"] == pytest.approx(0.01538430959802)


@pytest.mark.parametrize("over", ["lambda", "sigma", "slope"])
def test_phase_diagrams_are_where_snr_is_1(over: str, tmp_path: Path) -> None:
    picture = tmp_path / f"{over}.png"
    drawn = ["--picture", str(picture)] if over == "sigma" else []
    rows = answer("phase-diagram", "--over", over, "--points", "5", *drawn)
    assert picture.exists() == bool(drawn)
    assert len(rows) == 5
    assert set(rows[0]) >= {over, "Q/K rotated", "Q/K/V rotated"}
    if over == "sigma":
        left = {row["Q/K rotated"] for row in rows}
        assert len(left) == 1, "the size of steps does nothing for values left alone"
        carried = [row["Q/K/V rotated"] for row in rows]
        assert carried == sorted(carried)


def test_pictures(tmp_path: Path) -> None:
    small = ["--blocks", "8", "--amplitude", "0.5", "--routes", "3"]
    window = tmp_path / "window.svg"
    answer("window", "--law", "uniform:1", "--picture", str(window))
    assert window.read_text().startswith("<?xml")
    again = tmp_path / "again.svg"
    answer("window", "--law", "uniform:1", "--picture", str(again))
    assert again.read_text() == window.read_text(), "the same command draws the same file"
    answer("values", *small, "--picture", str(tmp_path / "values.png"))
    assert (tmp_path / "values.png").stat().st_size > 10_000


def test_verify_fails_by_status(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["theory", "verify", "--only", "scores.sphere", "--seed", "2"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("9 statements, 0 failed; seed 2")
    told = json.loads(runner.invoke(app, [*arguments, "--json"]).output)
    assert told["seed"] == 2
    assert {each["kind"] for each in told["outcomes"]} == {"identity", "bound"}
    true = theory.haar_tail
    monkeypatch.setattr(theory, "haar_tail", lambda t, d, *rest: 1.1 * true(t, d, *rest))
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert "FAIL" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["window", "--law", "gauss:1"], "expected one of normal:SIGMA"),
        (["window", "--law", "normal:-1"], "sigma is -1"),
        (["window", "--law", "normal:x"], "expected normal:SIGMA"),
        (["window", "--law", "normal"], "expected normal:SIGMA"),
        (["window", "--epsilon", "2"], "epsilon is 2"),
        (["window", "--epsilon", "a"], "expected numbers such as"),
        (["window", "--picture", "x.pdf"], ".png or .svg"),
        (["window", "--law", "reflection:8", "--picture", "x.png"], "a law of angles"),
        (["break-length", "--share", "1"], "far_share"),
        (["break-length", "--near-score", "9"], "at most blocks × amplitude = 8"),
        (["break-length", "--law", "rope:8"], "one for each of 32 planes"),
        (["bounds", "--lengths", "16"], "more than near_window = 32"),
        (["bounds", "--gate", "1.5"], "mean_gate"),
        (["values", "--far-keys", "0"], "far_keys"),
        (["phase-diagram", "--over", "width"], "one of lambda, sigma, slope"),
        (["verify", "--only", "nothing"], "expected one of steps.means"),
        (["verify", "--seed", "-1"], "seed"),
        (["predict", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_mistakes_are_one_line_and_status_two(arguments: list[str], words: str) -> None:
    assert words in " ".join(mistake(*arguments).split())


def test_measured_heads_are_predicted(tmp_path: Path) -> None:
    file, picture = tmp_path / "heads.jsonl", tmp_path / "heads.svg"
    heads: list[dict[str, Any]] = [
        {"head": 3, "near_window": 8, "lse_near": 3.0, "rho": [0.9, 0.9], "ell": 0.5},
        {"head": 4, "near_window": 8, "lse_near": 3.0, "rho": [0.9, 0.9], "lambda": 1.0,
         "mean_gate": 0.9, "mean_power": [1.0, 1.0], "noise_power": 1.0, "near_power": 1.0},
    ]  # fmt: skip
    file.write_text("".join(f"{json.dumps(head)}\n" for head in heads))
    rows = answer("predict", str(file), "--lengths", "64,512", "--picture", str(picture))
    assert [(row["head"], row["length"]) for row in rows] == [
        ("head 3", 64), ("head 3", 512), ("head 4", 64), ("head 4", 512),
    ]  # fmt: skip
    assert rows[1]["far_mass"] == pytest.approx(theory.typical_far_mass(504, 0.5, 3.0))
    assert rows[0]["snr"] is None
    assert rows[3]["snr"] > 0
    assert picture.read_text().startswith("<?xml")
    file.write_text('{"near_window": 3}\n')
    assert f"{file}, row 1: measurements have no 'lse_near'" in mistake("predict", str(file))
    assert "lengths are [0]" in mistake("predict", str(file), "--lengths", "0")
