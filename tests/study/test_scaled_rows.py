"""Scaled rows in a study: which runs get them, and what adding them to a study repeats."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from farfield.evaluation import rows, scaled
from farfield.study import folder, job, launch
from farfield.study import recipe as recipes
from farfield.study.job import Stop
from farfield.study.launch import Display, study
from farfield.study.recipe import Recipe
from farfield.study.run import Run, grid
from farfield.study.single import train_one


class Heard(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def asking(recipe: Recipe, *scaling: str, **changes: Any) -> Recipe:
    """The recipe with these scaled rows asked for."""
    table = recipe.as_toml()
    ladder = {**table["ladder"], "scaling": list(scaling)}
    return recipes.recipe_from({**table, "ladder": ladder, **changes}, "small")


def names(path: Path) -> list[str]:
    """The names of the rows of a file, in their order, each once."""
    return list(dict.fromkeys(row["mechanism"] for row in rows.read_rows(path)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, small: Recipe) -> Run:
    """`rope`, finished without scaled rows; not to be changed."""
    run = grid(small, tmp_path_factory.mktemp("plain"))[0]
    run.prepare(resume=False)
    assert job.execute(run, small, Stop()) == "finished"
    return run


def copied(run: Run, out: Path) -> Run:
    shutil.copytree(run.folder, out / "runs" / run.name)
    return Run(run.mechanism, run.seed, out / "runs" / run.name)


def test_a_finished_run_gets_the_rows_it_lacks_and_keeps_the_others(
    plain: Run, small: Recipe, tmp_path: Path
) -> None:
    run = copied(plain, tmp_path)
    weights = run.folder / "model" / "model.safetensors"
    trained, before = weights.stat().st_mtime_ns, (run.folder / "results.jsonl").read_bytes()
    positions = (run.folder / "positions.jsonl").read_bytes()
    assert run.lacking(small) == []
    record = run.record
    for rules, lacked in ((("linear",), ["linear"]), (("yarn", "linear"), ["yarn"])):
        recipe = asking(small, *rules)
        assert run.lacking(recipe) == [f"rope:scaling={rule}" for rule in lacked]
        run.prepare(resume=True)
        assert job.execute(run, recipe, Stop()) == "finished"
        assert run.lacking(recipe) == []
    found = rows.read_rows(run.folder / "results.jsonl")
    assert names(run.folder / "results.jsonl") == [
        "rope", "rope:scaling=linear", "rope:scaling=yarn",
    ]  # fmt: skip
    assert (run.folder / "results.jsonl").read_bytes().startswith(before)
    assert (run.folder / "positions.jsonl").read_bytes().startswith(positions)
    assert weights.stat().st_mtime_ns == trained
    factors = {
        (row["length"], row["policy"].get("factor"))
        for row in found
        if row["protocol"] == "windows" and row["mechanism"] == "rope:scaling=yarn"
    }
    assert factors == {(16, 1.0), (32, 2.0), (64, 4.0)}
    assert run.record["ladder_seconds"] == record["ladder_seconds"]
    assert run.record["scaled_seconds"] > 0
    assert run.record["train_seconds"] == record["train_seconds"]
    # The rows are those of one go as well.
    whole = copied(plain, tmp_path / "whole")
    (whole.folder / "results.jsonl").unlink()
    whole.doubt()
    whole.prepare(resume=True)
    assert job.execute(whole, asking(small, "linear", "yarn"), Stop()) == "finished"
    for name in ("results.jsonl", "positions.jsonl"):
        assert (whole.folder / name).read_bytes() == (run.folder / name).read_bytes()


def test_a_run_interrupted_between_readings_measures_the_rest_alone(
    plain: Run, small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recipe, stop = copied(plain, tmp_path), asking(small, "linear", "ntk"), Stop()

    def ask(facts: dict[str, Any]) -> None:
        if "rope:scaling=linear" in run.measured:
            stop.ask()

    run.prepare(resume=True)
    assert job.execute(run, recipe, stop, ask) == "interrupted"
    assert run.begun == "trained"
    assert run.measured == {"rope", "rope:scaling=linear"}
    # Losses by position that lost their rows, as a crash between the two files would leave them.
    there = rows.read_positions(run.folder / "positions.jsonl")
    lost = [{**row, "mechanism": "rope:scaling=ntk"} for row in there if row["mechanism"] == "rope"]
    rows.write_positions(run.folder / "positions.jsonl", [*there, *lost])
    evaluated: list[str] = []

    def evaluate(*arguments: Any, **options: Any) -> Any:
        evaluated.append(options["mechanism"])
        return original(*arguments, **options)

    original = scaled.evaluate
    monkeypatch.setattr(scaled, "evaluate", evaluate)
    run.prepare(resume=True)
    assert job.execute(run, recipe, Stop()) == "finished"
    assert evaluated == ["rope:scaling=ntk"]
    found = [row["mechanism"] for row in rows.read_positions(run.folder / "positions.jsonl")]
    assert found.count("rope:scaling=ntk") == found.count("rope")


def test_a_mechanism_without_frequencies_by_position_gets_no_scaled_rows(
    small: Recipe, tmp_path: Path
) -> None:
    recipe = asking(small, "yarn")
    run = grid(recipe, tmp_path)[1]
    run.prepare(resume=False)
    assert job.execute(run, recipe, Stop()) == "finished"
    assert names(run.folder / "results.jsonl") == ["learned+v"]
    assert run.lacking(recipe) == []
    heard = Heard()
    launch.check(recipe, heard)
    assert "no scaled rows (yarn) for learned+v: no frequencies by position" in heard.lines


def test_a_study_asks_before_it_adds_rows_to_a_finished_run(
    plain: Run, small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = asking(small, mechanisms=["rope"])
    out, grown = tmp_path / "out", asking(one, "yarn")
    corpus, _ = launch.check(one, Heard())
    copied(plain, out)
    folder.describe(out, one, 1, corpus)
    carried: list[str] = []

    def carry_out(out: Path, due: list[Run], *_: object) -> None:
        for run in due:
            carried.append(run.name)
            assert job.execute(run, grown, Stop()) == "finished"

    monkeypatch.setattr(launch, "_carry_out", carry_out)
    told = r"unfinished runs \(rope-s0 trained, without the rows of rope:scaling=yarn\); add --res"
    with pytest.raises(ValueError, match=told):
        study(grown, out)
    assert grid(one, out)[0].status == "finished"  # nothing has been changed
    heard = Heard()
    outcome = study(grown, out, resume=True, display=heard)
    assert carried == ["rope-s0"]
    assert "continuing rope-s0 trained, without the rows of rope:scaling=yarn" in heard.lines
    assert outcome.problems == []
    assert names(out / "results.jsonl") == ["rope", "rope:scaling=yarn"]
    assert "rope with YaRN at evaluation" in (out / "report.html").read_text()
    assert study(grown, out).exit_status == 0
    assert carried == ["rope-s0"]  # and nothing is repeated
    with pytest.raises(ValueError, match=r"ladder\.scaling is \['yarn'\] there and \[\] here"):
        study(one, out)
    shutil.rmtree(out / "runs" / "rope-s0" / "model")
    with pytest.raises(ValueError, match=r"without the rows of rope:scaling=ntk, and its model is"):
        study(asking(grown, "yarn", "ntk"), out, resume=True)
    assert names(out / "results.jsonl") == ["rope", "rope:scaling=yarn"]


def test_one_run_asks_before_it_adds_rows(plain: Run, small: Recipe, tmp_path: Path) -> None:
    one = asking(small, mechanisms=["rope"])
    run = copied(plain, tmp_path)
    corpus, _ = launch.check(one, Heard())
    folder.describe(run.folder, one, 1, corpus)
    grown = asking(one, "ntk")
    with pytest.raises(ValueError, match=r"finished without the rows of rope:scaling=ntk; add --r"):
        train_one(grown, "rope", 0, run.folder)
    done = train_one(grown, "rope", 0, run.folder, resume=True)
    assert done.status == "finished"
    assert names(run.folder / "results.jsonl") == ["rope", "rope:scaling=ntk"]
    with pytest.raises(ValueError, match="holds this run, finished"):
        train_one(grown, "rope", 0, run.folder, resume=True)


@pytest.mark.parametrize(
    ("mechanisms", "scaling", "told"),
    [
        (["alibi", "learned"], ["ntk"], "ladder.scaling is ['ntk'], and alibi, learned can't be"),
        (["rope", "rope:scaling=ntk"], ["ntk"], "hold 'rope:scaling=ntk', the name of the rows"),
        (["rope"], ["ntk", "ntk"], "ladder: scaling ['ntk', 'ntk'] holds one twice"),
        (["rope"], ["yarm"], "ladder.scaling.0: got 'yarm' (string), expected 'linear', 'ntk' or"),
    ],
)
def test_recipes_that_ask_for_what_cannot_be_are_told(
    small: Recipe, mechanisms: list[str], scaling: list[str], told: str
) -> None:
    with pytest.raises(ValueError, match=r"^recipe small: ") as error:
        asking(small, *scaling, mechanisms=mechanisms).canonical()
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_scaled_rows_make_the_same_study_larger(small: Recipe) -> None:
    assert recipes.load("laptop").ladder.scaling == ()
    assert recipes.difference(small, asking(small, "yarn")) is None
    one, other = asking(small, "yarn", "linear"), asking(small, "linear", "yarn", "ntk")
    assert recipes.difference(one, other) is None
    told = "ladder.scaling is ['linear', 'yarn', 'ntk'] there and ['yarn', 'linear'] here"
    assert recipes.difference(other, one) == told
    kept = recipes.load("laptop", ["ladder.scaling=['yarn']"])
    assert recipes.recipe_from(kept.as_toml(), "again") == kept.canonical()
