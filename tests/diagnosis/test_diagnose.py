"""One diagnosis from end to end: tables that agree with one another, files, frames, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.data.tokens import TokenStream
from farfield.diagnosis.diagnose import TABLES, Diagnosis, diagnose
from farfield.diagnosis.rows import read_rows
from farfield.diagnosis.transport import measure_transports

L0 = 32


def build(mechanism: str) -> Any:
    config = FarfieldConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, train_length=L0, mechanism=mechanism,
    )  # fmt: skip
    model = FarfieldForCausalLM(config)
    model.initialise(2)
    return model.eval()


def stream(tokens: int = 600) -> TokenStream:
    return TokenStream(np.random.default_rng(0).integers(0, 40, tokens).astype(np.uint16))


@pytest.fixture(scope="module")
def whole() -> tuple[Diagnosis, list[str]]:
    stages: list[str] = []
    found = diagnose(
        build("learned+v+alibi"), stream(), [L0, 256], train_length=L0, name="learned+v+alibi",
        queries=64, intervene=("far_masked",), stage=stages.append,
    )  # fmt: skip
    return found, stages


def test_every_table_is_there_and_they_agree(whole: tuple[Diagnosis, list[str]]) -> None:
    found, stages = whole
    assert set(found.tables) == set(TABLES)
    assert all(found.tables[table] for table in TABLES)
    assert [stage.split(" at ")[0] for stage in stages] == [
        "attention", "transports", "attention", "interventions on keys beyond 32 tokens",
    ]  # fmt: skip
    facts = found.facts
    assert facts["near_windows"] == [4, 8, 32]
    assert facts["prediction_window"] == 8
    assert facts["bounds_checked"] > 0
    table = {
        (r["layer"], r["head"], r["near_window"], r["low"]): r for r in found.tables["attention"]
    }
    for row in found.tables["prediction"]:
        same = table[row["layer"], row["head"], 8, row["low"]]
        assert row["measured"] == same["far_mass"]
        assert row["low"] > L0
        # ALiBi's slope of the query head, from the gates that were measured.
        assert row["slope"] == pytest.approx(2.0 ** (-2 * (row["head"] + 1)), rel=1e-6)
        assert row["far_power_predicted"] is not None
    assert {r["intervention"] for r in found.tables["interventions"]} == {"none", "far_masked"}
    assert {r["length"] for r in found.tables["interventions"]} == {L0, 256}
    assert all(r["t4_decohered"] is not None for r in found.tables["attention"] if r["far_queries"])
    json.dumps([found.facts, found.tables], allow_nan=False)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_it_is_written_and_read_back(
    whole: tuple[Diagnosis, list[str]], kind: str, tmp_path: Path
) -> None:
    found, _ = whole
    (tmp_path / "gates.jsonl").write_text("an older one")
    (tmp_path / "gates.parquet").write_text("an older one")
    found.write(tmp_path, kind)
    assert read_rows(tmp_path / f"attention.{kind}") == found.tables["attention"]
    assert json.loads((tmp_path / "diagnosis.json").read_text()) == found.facts
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["diagnosis.json", *(f"{table}.{kind}" for table in TABLES)]
    )
    with pytest.raises(ValueError, match="format 'csv'"):
        found.write(tmp_path, "csv")


def test_frames_are_pandas_or_else_arrow(
    whole: tuple[Diagnosis, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = whole
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    table: Any = found.frame("lags")
    assert table.num_rows == len(found.tables["lags"])
    monkeypatch.undo()
    pd = pytest.importorskip("pandas")
    frame = found.frame("lags")
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == len(found.tables["lags"])
    with pytest.raises(ValueError, match="table 'lag'"):
        found.frame("lag")


def test_others_models_have_all_but_transports_and_interventions() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    found = diagnose(
        model, stream(), [128], train_length=L0, name="llama", queries=32, layers=[1], heads=[0, 2]
    )
    there = {table for table in TABLES if found.tables.get(table)}
    assert there == {"attention", "prediction", "assumptions"}
    assert {(r["layer"], r["head"]) for r in found.tables["prediction"]} == {(1, 0), (1, 2)}
    assert all(r["far_power_predicted"] is None for r in found.tables["prediction"])
    with pytest.raises(ValueError, match="only farfield's models take an engine"):
        diagnose(model, stream(), [128], train_length=L0, name="llama", intervene=("alibi",))


@pytest.mark.parametrize(
    "mechanism", ["rope", "reflection+v", "path", "alibi+window", "learned+forget"]
)
def test_every_kind_of_mechanism_is_diagnosed(mechanism: str) -> None:
    changed = ("far_masked", "log_n" if mechanism == "path" else "far_frame")
    found = diagnose(
        build(mechanism), stream(), [64], train_length=L0, name=mechanism, queries=16,
        intervene=changed,
    )  # fmt: skip
    assert found.tables["attention"]
    assert found.tables["prediction"]
    assert bool(found.tables["gates"]) == ("forget" in mechanism or "alibi" in mechanism)


def test_what_a_model_does_not_take_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match=r"'far_frame' takes far keys apart.*far_masked"):
        diagnose(
            build("path"), stream(), [64], train_length=L0, name="path", intervene=("far_frame",)
        )


def test_mistakes_are_named() -> None:
    model = build("rope")
    with pytest.raises(ValueError, match="the text has 100 tokens, and the longest length is 128"):
        diagnose(model, stream(100), [128], train_length=L0, name="rope")
    with pytest.raises(ValueError, match="the text has 20 tokens; expected more"):
        diagnose(model, stream(20), train_length=L0, name="rope")
    with pytest.raises(ValueError, match="below half of the training length"):
        diagnose(model, stream(), [64], train_length=L0, name="rope", near_windows=[20])
    with pytest.raises(ValueError, match="did you mean 'far_frame'"):
        diagnose(model, stream(), [64], train_length=L0, name="rope", intervene=("far_frames",))
    with pytest.raises(ValueError, match=r"near_windows are \[4, 64\]; expected some from 1 to 63"):
        diagnose(model, stream(), [64], train_length=L0, name="rope", near_windows=[4, 64])
    with pytest.raises(ValueError, match=r"no near window of .* 999 is below the"):
        diagnose(model, stream(), [64], train_length=999, name="rope")
    with pytest.raises(ValueError, match="layers are none at all; expected at least one"):
        diagnose(model, stream(), [64], train_length=L0, name="rope", layers=[])
    with pytest.raises(ValueError, match="heads are none at all; expected at least one"):
        diagnose(model, stream(), [64], train_length=L0, name="rope", heads=[])
    with pytest.raises(ValueError, match="layer 7"):
        diagnose(model, stream(), [64], train_length=L0, name="rope", layers=[7])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tokens": 0}, "ladder tokens = 0"),
        ({"tokens": 3}, "longer than the 3 tokens to score"),
        ({"near_windows": [0, 8]}, r"near_windows are \[0, 8\]"),
        ({"near_windows": []}, r"near_windows are \[\]"),
    ],
)
def test_what_can_be_refused_at_once_is_refused_at_once(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        diagnose(
            build("rope"), stream(), [64], train_length=L0, name="rope",
            stage=lambda what: pytest.fail(f"{what} was begun"), **asked,
        )  # fmt: skip


def test_lengths_keep_to_the_positions_that_there_are() -> None:
    from zoo import build as other

    model, begun = other("gpt2"), []  # 400 positions
    found = diagnose(model, stream(), train_length=50, name="gpt2", queries=8, stage=begun.append)
    assert found.facts["lengths"] == [50, 100, 200, 400]
    begun.clear()
    with pytest.raises(ValueError, match="longest length is 401, and the model has 400 absolute"):
        diagnose(model, stream(), [401], train_length=50, name="gpt2", stage=begun.append)
    with pytest.raises(ValueError, match="L₀ is 500, and the model has 400 absolute positions"):
        diagnose(model, stream(), train_length=500, name="gpt2", stage=begun.append)
    assert begun == []


@pytest.mark.parametrize("mechanism", ["learned+v+forget", "reflection", "path"])
def test_transports_read_with_the_attention_are_those_read_alone(mechanism: str) -> None:
    """In one run up to LAG_TOKENS; in a run of their own for longer texts."""
    model, ids = build(mechanism), torch.from_numpy(stream().block(0, 128))[None]
    found = diagnose(model, stream(), [128], train_length=L0, name="x", queries=8, intervene=())
    alone = measure_transports(model, ids, train_length=L0)
    for table in ("steps", "lags", "couplings", "gates", "values", "layers"):
        rows = getattr(alone, table)
        assert len(found.tables[table]) == len(rows)
        for got, want in zip(found.tables[table], rows, strict=True):
            assert got.keys() == want.keys()
            for key, value in want.items():
                near = isinstance(value, float)
                assert got[key] == (pytest.approx(value, rel=1e-4, abs=1e-6) if near else value)


def test_what_is_asked_for_twice_is_done_once() -> None:
    options: Any = {"train_length": L0, "name": "rope", "queries": 8}
    once = diagnose(build("rope"), stream(), [64], layers=[0], heads=[1], intervene=("alibi",),
                    **options)  # fmt: skip
    twice = diagnose(build("rope"), stream(), [64], layers=[0, 0], heads=[1, 1],
                     intervene=("alibi", "alibi"), **options)  # fmt: skip
    assert {name: len(rows) for name, rows in twice.tables.items()} == {
        name: len(rows) for name, rows in once.tables.items()
    }
