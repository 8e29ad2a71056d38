"""The page and the picture from the files of a study, whole, partial, empty, broken."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_study import MECHANISMS, Plan, run_record, write_jsonl

import farfield.report
from farfield import report
from farfield.report import figures, folder
from farfield.report.curves import headline
from farfield.report.folder import Run
from farfield.report.palette import inks
from farfield.report.picture import spread
from farfield.report.pooling import Estimate, Ladders
from farfield.report.wording import number

SMALL = Plan(
    mechanisms={"rope": (4.3, 5.0), "alibi": (4.6, 0.97)}, seeds=(0,), multiples=(1, 2, 4, 16)
)
Build = Callable[..., Path]


def page_of(path: Path) -> str:
    return report.write(path).read_text(encoding="utf-8")


def without_plotly(html: str) -> str:
    """The page less its largest script, so that a search meets the page's own words alone."""
    return max(re.split(r"<script>(?=/\*\*)", html), key=lambda part: "<main>" in part)


def figures_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_says_who_holds_with_the_rows_numbers(study_folder: Build) -> None:
    path = study_folder(SMALL)
    html = page_of(path)
    assert (path / "report.html").is_file()
    rows = folder.read(path).rows
    ratios = {r["mechanism"]: r["ratio"] for r in rows if r["length"] == 2048}
    said = headline(Ladders(rows)).sentence
    assert said in html
    assert re.search(r"read at 2,048, alibi holds \(0\.9\d+×", said)
    assert ratios["rope"] is not None
    assert "rope fails" in said


def test_every_section_of_a_whole_study_is_filled(study_folder: Build) -> None:
    folder = study_folder(Plan(seeds=(0, 1)))
    html = without_plotly(page_of(folder))
    assert 'class="empty"' not in html
    assert "no weight changed" not in html  # there are no scaled rows to explain
    assert html.count('class="card"') == 6
    assert html.count("<tr data-row=") == 2 * len(MECHANISMS)
    for words in ("16 of 16 finished", "16 layers × 768", "7.49", "Recipe, as resolved", "torch"):
        assert words in html
    assert f"farfield study {folder}/recipe.toml --out {folder}-again" in html


def test_figures_hold_a_line_a_band_and_the_seeds_of_each_mechanism(study_folder: Build) -> None:
    data = figures_of(page_of(study_folder(Plan(seeds=(0, 1, 2)))))
    assert list(data["ratio"]) == ["windows", "fixed", "clipped"]
    roles = [trace["meta"]["role"] for trace in data["ratio"]["windows"]["data"]]
    assert [roles.count(role) for role in ("pooled", "band", "seed", "rule")] == [8, 8, 24, 2]
    assert len(data["positions"]) == 8
    assert set(data["inks"]) == set(MECHANISMS)
    assert [len(data["training"][key]["data"]) for key in ("loss", "validation_loss")] == [24, 24]


def test_figures_are_valid_plotly(study_folder: Build) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    data = figures_of(page_of(study_folder(SMALL)))
    drawn = [*data["ratio"].values(), *data["training"].values(), *data["positions"]]
    for figure in drawn:
        go.Figure(data=figure["data"], layout=figure["layout"])


def test_a_partial_study_names_what_is_not_finished(study_folder: Build) -> None:
    states = {
        ("alibi", 0): {"status": "failed", "error": "Traceback …\nloss is nan at iteration 180\n"},
        ("random", 0): {"status": "running"},
        ("learned", 0): {"status": "pending"},
        ("learned+v", 0): {"status": "interrupted"},
    }
    plan = Plan(seeds=(0,), multiples=(1, 4, 16))
    html = without_plotly(page_of(study_folder(plan, states=states)))
    assert "4 of 8 finished" in html
    assert "alibi, seed 0: <code>loss is nan at iteration 180</code>" in html
    assert "random, seed 0, training, iteration 180 of 400" in html
    for status, who in (("pending", "learned"), ("interrupted", "learned+v")):
        assert f"<strong>{status}</strong>: {who}, seed 0" in html
    assert "--resume" in html
    assert "Provisional:</strong> 4 of 8 runs" in html
    assert "3 runs not finished yet" in html
    assert 'data-status="not tested"' in html


def test_a_study_that_has_measured_nothing_has_a_page(study_folder: Build) -> None:
    states = {(name, 0): {"status": "pending"} for name in MECHANISMS}
    html = without_plotly(page_of(study_folder(Plan(seeds=(0,)), states=states)))
    assert "Nothing is measured yet" in html
    assert "0 of 8 finished" in html
    assert html.count("not tested</span>") >= 6


def test_names_and_errors_are_text_and_never_markup(study_folder: Build) -> None:
    evil = "<script>alert(1)</script>"
    plan = Plan(
        mechanisms={"rope": (4.3, 5.0), evil: (4.6, 0.97), "x</script>": (4.5, 2.0)},
        seeds=(0,),
        multiples=(1, 2),
    )
    states = {("rope", 0): {"status": "failed", "error": f"<img src=x onerror=alert(2)> {evil}"}}
    html = without_plotly(page_of(study_folder(plan, states=states, name=evil)))
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    names = {t["name"] for t in figures_of(html)["ratio"]["windows"]["data"] if "name" in t}
    assert names == {"&lt;script&gt;alert(1)&lt;/script&gt;", "x&lt;/script&gt;"}


def test_non_finite_losses_are_shown_and_counted(study_folder: Build) -> None:
    path = study_folder(SMALL)
    rows = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    for row in rows:
        if row["mechanism"] == "rope" and row["length"] == 2048:
            row["unit_nll"][0] = None
            row.update(nll=None, ppl=None, ratio=None, ratio_low=None, ratio_high=None)
            row["policy"]["non_finite"] = 5
    write_jsonl(path / "results.jsonl", rows)
    html = without_plotly(page_of(path))
    assert "not finite<small>5 losses</small>" in html
    assert "rope fails (losses not finite)" in html


def test_what_the_ladder_left_out_is_said_with_its_reason(study_folder: Build) -> None:
    path = study_folder(SMALL)
    gap = {"length": 16384, "protocol": "windows", "reason": "the text is too short"}
    record = run_record("rope", 0, "finished", left_out=[gap])
    (path / "runs" / "r0-s0" / "run.json").write_text(json.dumps(record))
    assert "length 16,384 under windows: the text is too short" in page_of(path)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("results.jsonl", '{"schema": 1}\n', "results.jsonl, line 1: "),
        ("results.jsonl", "{broken\n", "results.jsonl, line 1: not JSON"),
        ("positions.jsonl", "[]\n", "positions.jsonl, line 1: "),
        ("recipe.toml", "name = \n", "recipe.toml: not TOML"),
        ("environment.json", "{\n\n?", "environment.json, line 3: not JSON"),
        ("runs/r0-s0/run.json", '{"mechanism": "rope", "seed": 0}', "run.json: lacks status"),
        ("runs/r0-s0/run.json", '{"mechanism": "a", "seed": 0, "status": "done"}', "'done'"),
        ("runs/r0-s0/metrics.jsonl", '{"iteration": 1}\n{nonsense}\n', "metrics.jsonl, line 2: "),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(
    study_folder: Build, file: str, text: str, said: str
) -> None:
    path = study_folder(SMALL)
    report.write(path)
    before = (path / "report.html").read_bytes()
    (path / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        report.write(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert (path / "report.html").read_bytes() == before
    assert not list(path.glob("*.partial"))


def test_a_line_that_a_run_is_still_writing_is_left_alone(study_folder: Build) -> None:
    path = study_folder(SMALL)
    metrics = path / "runs" / "r0-s0" / "metrics.jsonl"
    whole = folder.read(path).runs[0].metrics
    metrics.write_text(metrics.read_text() + '{"iteration": 410, "lo')
    assert folder.read(path).runs[0].metrics == whole


def test_contradicting_rows_are_refused(study_folder: Build) -> None:
    path = study_folder(SMALL)
    results = path / "results.jsonl"
    lines = results.read_text().splitlines()
    results.write_text("\n".join([*lines, lines[0]]) + "\n")
    with pytest.raises(ValueError, match=f"rows 1 and {len(lines) + 1} are both rope, seed 0"):
        folder.read(path)
    other = json.loads(lines[1]) | {"train_length": 64}
    results.write_text("\n".join([lines[0], json.dumps(other)]) + "\n")
    with pytest.raises(ValueError, match="train_length 64, row 1 has 128"):
        folder.read(path)


def test_folders_without_a_study_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="no such folder"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no study"):
        report.write(tmp_path)


def test_runs_follow_the_recipe_and_the_error_is_its_last_line(study_folder: Build) -> None:
    states = {("alibi", 0): {"status": "pending"}}
    runs = folder.read(study_folder(SMALL, states=states)).runs
    assert [(run.mechanism, run.status) for run in runs] == [
        ("rope", "finished"),
        ("alibi", "pending"),
    ]
    assert Run("rope", 0, "failed", {"error": "Traceback\n  at x\nboom\n\n"}).error == "boom"


@pytest.mark.parametrize(
    ("gain", "word"),
    [
        (None, "not tested"),
        (Estimate(None, None, None, (0,), 4, 3), "harmed"),
        (Estimate(0.02, None, None, (0,), 1), "unclear"),
        (Estimate(0.02, 0.01, 0.03, (0,), 8), "uses it"),
        (Estimate(0.0, -0.01, 0.01, (0,), 8), "survives"),
        (Estimate(-0.001, -0.0012, -0.0008, (0,), 8), "survives"),
        (Estimate(0.009, 0.008, 0.0095, (0,), 8), "survives"),
        (Estimate(-0.5, -0.6, -0.4, (0,), 8), "harmed by it"),
    ],
)
def test_far_context_in_a_word(gain: Estimate | None, word: str) -> None:
    assert figures.far_context(gain)[0] == word


def test_intervals_of_curves_agree_with_their_seeds(study_folder: Build) -> None:
    rows = folder.read(study_folder(Plan(seeds=(0, 1, 2)))).rows
    ladders = Ladders(rows)
    assert headline(ladders).multiple == 128
    names = [name for _, of in headline(ladders).groups for name, _ in of]
    assert sorted(names) == sorted(MECHANISMS)
    assert headline(ladders).bare == ()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn_from_the_files(study_folder: Build, suffix: str) -> None:
    path = study_folder(SMALL)
    out = report.curves_picture(path, path / f"curves.{suffix}")
    head = out.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in head
    if suffix == "svg":
        first = out.read_bytes()
        assert report.curves_picture(path, out).read_bytes() == first


@pytest.mark.parametrize(
    ("value", "said"), [(9.996, "10.0"), (9.994, "9.99"), (0.09999, "0.100"), (1234.5, "1,234")]
)
def test_numbers_are_rounded_before_they_are_sized(value: float, said: str) -> None:
    assert number(value) == said


def test_the_picture_says_what_it_can_not_draw(study_folder: Build) -> None:
    states = {(name, 0): {"status": "pending"} for name in SMALL.mechanisms}
    path = study_folder(SMALL, states=states)
    with pytest.raises(ValueError, match="nothing to draw"):
        report.curves_picture(path, path / "curves.png")
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
        report.curves_picture(path, path / "curves.jpeg")


def test_labels_are_spread_without_overlap() -> None:
    put = spread([0, 1, 2, 50, 99, 100], 10, 100)
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(put))
    assert max(put) <= 100
    assert put[3] == 50


def test_the_report_needs_no_model_and_no_torch() -> None:
    allowed = {f"farfield.evaluation.{name}" for name in ("rows", "intervals", "whole")}
    for path in Path(farfield.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith(("torch", "transformers")), path
                inside = name.startswith("farfield.") and not name.startswith("farfield.report")
                theory = name.startswith("farfield.theory")
                assert not inside or theory or name in allowed, f"{path} imports {name}"


SCALED = {"rope:scaling=linear": (4.3, 3.0), "rope:scaling=yarn": (4.3, 1.5)}


def with_scaled_rows(path: Path) -> Path:
    """The rows of a study as those of a rope model scaled at evaluation, which has no run."""
    for name in SCALED:
        for record in path.glob("runs/*/run.json"):
            if json.loads(record.read_text())["mechanism"] == name:
                for file in record.parent.iterdir():
                    file.unlink()
                record.parent.rmdir()
        recipe = path / "recipe.toml"
        recipe.write_text(recipe.read_text().replace(f', "{name}"', ""))
    return path


def test_scaled_rows_are_curves_of_their_own_beside_what_was_trained(study_folder: Build) -> None:
    plan = Plan(mechanisms={**SMALL.mechanisms, **SCALED}, seeds=(0, 1), multiples=(1, 4, 16))
    path = with_scaled_rows(study_folder(plan))
    study = folder.read(path)
    assert study.mechanisms == ["rope", *SCALED, "alibi"]
    assert {run.mechanism for run in study.runs} == {"rope", "alibi"}
    html = without_plotly(page_of(path))
    data = figures_of(html)
    pooled = [t for t in data["ratio"]["windows"]["data"] if t["meta"]["role"] == "pooled"]
    assert {t["meta"]["mechanism"]: (t["name"], t["line"]["dash"]) for t in pooled} == {
        "rope": ("rope", "solid"),
        "alibi": ("alibi", "solid"),
        "rope:scaling=linear": ("rope with linear interpolation at evaluation", "dot"),
        "rope:scaling=yarn": ("rope with YaRN at evaluation", "dash"),
    }
    assert len(data["positions"]) == 4
    assert "<strong>rope with YaRN at evaluation</strong>" in html
    assert 'data-mechanism="rope:scaling=yarn"' in html
    assert re.search(r"rope with YaRN at evaluation</th>", html)
    assert "no weight changed" in html
    costs = html.partition('id="cost"')[2]
    assert "at evaluation" not in costs.partition("</table>")[0]  # it was not trained
    assert "rope with YaRN at evaluation degrades" in headline(Ladders(study.rows)).sentence
    out = report.curves_picture(path, path / "curves.svg")
    assert out.stat().st_size > 0


def test_one_ink_per_mechanism_whatever_the_study() -> None:
    alone, among = inks(["learned+v"]), inks(["rope", "my+own", "learned+v", "other"])
    assert alone["learned+v"] == among["learned+v"]
    assert len({ink.light for ink in among.values()}) == 4
