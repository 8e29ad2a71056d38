"""The page's section on costs, from the file alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farfield.benchmark import LeftOut, Results, Row, rows
from farfield.report import costs, page
from farfield.report.folder import read

ROW = Row(
    "layer", "learned", "forward", 2048, 1.05, 1.02, 1.08, "rope", 0.0123, 0.0117, "s", 7,
    sizes="width 8", target=1.1, verdict="met",
)  # fmt: skip


def write(folder: Path, *given: Row) -> None:
    out = (LeftOut("peers", "x-transformers", "not <installed>"),)
    Results(rows.machine(2, ["layer"], 60.0, False), given, out).write(folder / costs.FILE)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text('name = "some"\nmechanisms = ["rope"]\n')
    return tmp_path


def test_lines_are_what_the_rows_say(study: Path) -> None:
    assert costs.read(study) is None
    memory = replace(ROW, section="memory", unit="B", median=2.0**31, verdict="not met", ratio=2.0)
    error = replace(ROW, ratio=3e-6, low=None, high=None, median=None, target=1e-5)
    free = replace(ROW, target=None, verdict="", ratio=None, note="by head: 0.9")
    write(study, ROW, memory, error, free)
    found = costs.read(study)
    assert found is not None
    assert (found.met, found.targets) == (2, 3)
    assert [group.title for group in found.groups] == ["An attention layer", "Peak memory"]
    one, small, last = found.groups[0].lines
    assert (one.ratio, one.interval, one.median) == ("1.050", "[1.020, 1.080]", "12.3 ms")
    assert (one.target, one.badge, one.tokens) == ("≤ 1.100", ("holds", "✓"), "2,048")
    assert (small.ratio, small.target, small.interval, small.median) == (
        "3.0e-06", "≤ 1.0e-05", "", "–",
    )  # fmt: skip
    assert (last.ratio, last.target, last.note) == ("not finite", "", "by head: 0.9")
    assert found.groups[1].lines[0].median == "2.00 GiB"
    assert "2 of" in found.machine


def test_the_page_has_the_section_only_where_there_is_a_file(study: Path) -> None:
    assert "What it costs" not in page.render(read(study))
    write(study, ROW, replace(ROW, case="random", verdict="straddles"))
    shown = page.render(read(study))
    for text in ("What it costs", "1 of 2 rows", "straddles", "not &lt;installed&gt;", "12.3 ms"):
        assert text in shown


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"version": 1}', '{"version": 1, "rows": [{}], "machine": {}}']
)
def test_another_file_of_that_name_is_an_error_that_names_it(study: Path, text: str) -> None:
    (study / costs.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"bench\.json: "):
        costs.read(study)


def test_the_file_is_read_without_what_measured_it() -> None:
    assert costs.VERSION == rows.VERSION
    assert set(costs.BADGES) == {rows.MET, rows.MISSED, rows.STRADDLES}
    assert json.dumps(costs.TITLES)
