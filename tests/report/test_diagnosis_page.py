"""The page of a diagnosis: what its sentences say, from which numbers, and that it draws."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from synthetic_diagnosis import make, study

from farfield.report import diagnosis, diagnosis_figures, diagnosis_words
from farfield.report.diagnosis_rows import averaged, left_over_lags, nearest, read

ROPE: dict[str, Any] = {}
ALIBI: dict[str, Any] = {
    "mass": 0.1, "ratio": 0.97, "masked": 0.98, "ell": 0.05, "slope": 0.1, "error": 0.01,
}  # fmt: skip
LEARNED: dict[str, Any] = {
    "rho": 0.98, "ratio": 2.0, "ell": -0.5, "dropped": 1.9, "moved": 1.01,
}  # fmt: skip


def told(tmp_path: Path, model: str, changes: dict[str, Any]) -> str:
    return "\n".join(diagnosis.summary(make(tmp_path / "d", model, **changes)))


def test_a_reader_of_the_summary_learns_why_rope_failed(tmp_path: Path) -> None:
    text = told(tmp_path, "rope", ROPE)
    assert "rope fails: its perplexity is 5.00 at 128 tokens" in text
    assert "45.0 at 2,048, 9.00 times as much" in text
    # ln 1.1/ln 9 = 4.3 % of the rise is left without far keys.
    assert "far keys do 96 % of the harm" in text
    assert "With their weight kept and only their values dropped, 92 % of it goes away" in text
    assert "With all far logits of a row set to their mean, 96 % of the harm goes away" in text
    assert "far keys that stand out do it" in text
    assert "with ALiBi's slopes added at evaluation, 50 % does" in text
    assert "nothing mixes: after 128 tokens 100 % of a transport is left" in text
    assert f"{math.exp(2):.2f} times" in text
    assert "distances it never saw" in text
    assert (
        "One more random map on all far keys changes its perplexity at 2,048 tokens by 50 %" in text
    )
    assert "how they are turned still matters" in text
    # At 2,048: three heads at .8 and one at .88.
    assert "on average 82 % of their weight to keys further than 128 tokens" in text
    assert "layer 1 head 1 gives 88 %" in text
    assert "The prediction failed here" in text
    assert "4,321 rows" in text


def test_and_why_alibi_did_not(tmp_path: Path) -> None:
    text = told(tmp_path, "alibi", ALIBI)
    assert "alibi holds" in text
    assert "far keys hardly matter to it" in text
    assert "a bias that grows with distance weighs all of the past as much as 10.0 to 20.0" in text
    assert "only their number grows" in text
    assert "mean error of 0.01" in text
    assert "failed" not in text


def test_harm_below_the_line_of_failure_is_named(tmp_path: Path) -> None:
    text = told(tmp_path, "learned", LEARNED | {"ratio": 1.09, "masked": 1.0})
    assert "takes away 8.3 % of its perplexity at 2,048 tokens: far keys do it harm already" in text


def test_where_weights_starve_near_keys_it_says_so(tmp_path: Path) -> None:
    text = told(tmp_path, "learned", LEARNED)
    assert "their weight alone starves the near keys" in text
    assert "One far key weighs less at that length than in training, 0.607 times" in text
    assert "4 of 4 planes are seen to mix, half of those within 45 tokens" in text
    assert "by 1.0 %: they are met as if at random already" in text
    assert "7.5 % of a transport's mean is left" in text


def test_without_perplexities_or_longer_contexts_nothing_is_made_up(tmp_path: Path) -> None:
    folder = make(tmp_path / "d")
    for name in ("interventions", "prediction", "assumptions", "steps", "lags", "layers"):
        (folder / f"{name}.jsonl").unlink()
    sentences = diagnosis.summary(folder)
    assert len(sentences) == 2
    assert sentences[0].startswith("In a context of 2,048 tokens")
    page = diagnosis.write(folder).read_text(encoding="utf-8")
    assert "Nothing was measured beyond the training length" in page
    assert "Not run: interventions" in page


def test_cures_are_shares_of_the_rise(tmp_path: Path) -> None:
    found = read(make(tmp_path / "d"))
    shares = diagnosis_words.cures(found)
    assert shares["far_masked"] == pytest.approx(1 - math.log(1.1) / math.log(9))
    assert diagnosis_words.cures(read(make(tmp_path / "held", **ALIBI))) == {}


def test_rows_are_read_from_parquet_as_well(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = make(tmp_path / "d")
    expected = read(folder).tables["attention"]
    lines = folder / "attention.jsonl"
    pq.write_table(pa.Table.from_pylist(expected), folder / "attention.parquet")
    lines.unlink()
    assert read(folder).tables["attention"] == expected


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no diagnosis\.json"):
        read(tmp_path)
    folder = make(tmp_path / "d")
    (folder / "lags.jsonl").write_text("{}\n{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"lags\.jsonl, line 2: not JSON"):
        read(folder)
    (folder / "diagnosis.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="has no 'model'"):
        read(folder)


def test_lag_curves_weigh_blocks_by_their_energy(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", rho=0.9)
    rows = read(folder).tables
    for step in rows["steps"]:
        step["energy"] = 0.25 + 0.5 * step["block"]
    for lag in rows["lags"]:
        lag["left"] = float(lag["block"])
    found = read(folder)
    changed = type(found)(folder, found.facts, rows)
    (curve, _) = left_over_lags(changed, "rotation").values()
    assert curve[0] == (1, pytest.approx(0.75))
    assert averaged([[(1, 0.0), (2, 1.0)], [(1, 1.0)]]) == [(1, 0.5), (2, 1.0)]
    assert nearest([(1, 0.0), (10, 1.0)], 4) == (10, 1.0)


def test_figures_hold_the_rows_numbers(tmp_path: Path) -> None:
    found = read(make(tmp_path / "d"))
    maps = diagnosis_figures.heat_maps(found)
    assert maps[0]["title"] == "context 192"
    assert maps[-1]["title"] == "context 2,048"
    assert maps[-1]["data"][0]["z"] == [[0.8, 0.8], [0.8, pytest.approx(0.88)]]
    assert maps[-1]["data"][0]["text"] == [["80", "80"], ["80", "88"]]
    figure = diagnosis_figures.prediction_figure(found)
    assert figure is not None
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert traces["predicted"]["y"] == [pytest.approx(0.8)] * 5
    assert traces["measured"]["x"][-1] == 2048
    assert traces["lower bound (T4′)"]["y"][-1] < traces["measured"]["y"][-1]
    scatter = diagnosis_figures.scatter_figure(found)
    assert scatter is not None
    assert len(scatter["data"][0]["x"]) == 4
    lags = diagnosis_figures.lag_figure([found], heads=True)
    assert lags is not None
    assert lags["data"][-2]["y"] == [1.0] * 6


def test_the_page_and_the_section_hold_their_tables(tmp_path: Path) -> None:
    folder = study(tmp_path / "s", [("rope", ROPE), ("alibi", ALIBI), ("learned", LEARNED)])
    page = diagnosis.write(folder / "diagnosis" / "rope-s0").read_text(encoding="utf-8")
    assert page.count("data-figure=") == 4 + 1 + 2
    assert "Far keys hidden" in page
    assert "&lt;1" not in page.split("<table")[0]
    part = diagnosis.section(folder)
    assert part is not None
    assert 'href="diagnosis/rope-s0/report.html"' in part
    assert part.count("<details>") == 3
    held = part.split('id="diagnosis-figures">')[1].split("</script>")[0]
    assert set(json.loads(held)["figures"]) == {"far_mass", "lags"}
    assert diagnosis.section(tmp_path) is None


def test_one_model_of_each_mechanism_stands_in_the_section(tmp_path: Path) -> None:
    folder = study(tmp_path / "s", [("rope", ROPE), ("alibi", ALIBI)])
    make(folder / "diagnosis" / "rope-s1", "rope", ratio=3.0)
    part = diagnosis.section(folder)
    assert part is not None
    assert "rope-s1" not in part
    assert part.count("<details>") == 2


def test_markup_in_a_name_stays_text(tmp_path: Path) -> None:
    page = diagnosis.write(make(tmp_path / "d", "<script>bad</script>"))
    assert "<script>bad" not in page.read_text(encoding="utf-8")
