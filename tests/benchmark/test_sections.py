"""Every section runs at tiny sizes, and says of everything what it is over."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farfield import benchmark
from farfield.benchmark import (
    SECTIONS,
    Job,
    LeftOut,
    Row,
    Setting,
    decode,
    layer,
    memory,
    pairing,
    peers,
    pruned,
    scaling,
)


@pytest.fixture(autouse=True)
def one_call_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here looks at a time."""
    monkeypatch.setattr(pairing, "_SHORTEST", 0.0)


def measured(section: str, setting: Setting) -> tuple[list[Row], list[LeftOut]]:
    rows, out = [], []
    for piece in SECTIONS[section](setting):
        if isinstance(piece, Job):
            assert piece.section == section
            assert piece.operations > 0
            rows += piece.run(0.0, lambda share: None)
        else:
            out.append(piece)
    for row in rows:
        assert row.section == section
        assert row.sizes
        assert row.ratio is not None
        assert math.isfinite(row.ratio)
        assert row.ratio >= 0
        if row.low is not None:
            assert row.low <= row.ratio <= row.high
        if row.unit:
            assert row.median > 0
            assert row.baseline_median > 0
    keys = [(r.case, r.baseline, r.measure, r.tokens) for r in rows]
    assert len(set(keys)) == len(keys)
    return rows, out


@pytest.mark.parametrize("section", ["layer", "decode"])
def test_every_mechanism_is_measured_over_rope(section: str, setting: Setting) -> None:
    rows, out = measured(section, setting)
    measures = 2 if section == "layer" else 1
    assert out == []
    assert len(rows) == measures * len(layer.names())
    assert {row.baseline for row in rows} == {"rope"}
    assert {row.case for row in rows} == set(layer.names())
    assert {row.rounds for row in rows} == {pairing.FEWEST}


def test_a_recipes_mechanisms_are_measured_over_rope(setting: Setting) -> None:
    rows, _ = measured("model", setting)
    assert [row.case for row in rows] == ["alibi", "random_iid+v"]
    assert {(row.baseline, row.measure) for row in rows} == {("rope", "training iteration")}


def test_scaling_compares_growths_and_definitions(setting: Setting) -> None:
    rows, out = measured("scaling", setting)
    pairs = {(row.case, row.baseline) for row in rows if row.measure == "forward + backward"}
    assert {("reflection", "rope"), ("reflection", scaling.TRIANGLES)} <= pairs
    assert {("path", "sdpa"), ("path", scaling.TRIANGLES)} <= pairs
    assert (scaling.naive_path() == "not installed (flash-linear-attention)") == bool(out)
    growths = {(row.case, row.baseline) for row in rows if row.measure.startswith("growth")}
    assert growths == {("rope", ""), ("reflection", ""), ("reflection", "rope")}


def test_pruned_trains_what_it_needs_and_says_so(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pruned.TRAINED == ("alibi", "forget")
    monkeypatch.setattr(pruned, "TRAINED", ("forget",))
    said: list[str] = []
    rows, out = measured("pruned", replace(setting, say=said.append))
    assert out == []
    assert [line.split()[:2] for line in said] == [["training", "forget"], ["trained", "forget"]]
    for name in pruned.TRAINED:
        own = [row for row in rows if row.case == name]
        assert [row.measure for row in own] == [
            "forward", "largest output error", "share skipped",
            "forward", "largest output error", "share skipped", "growth from 64",
        ]  # fmt: skip
        assert all(row.ratio < 1e-5 for row in own if row.measure == "largest output error")
        assert all(row.note.count(",") == 1 for row in own if row.measure == "share skipped")


def test_a_text_that_is_too_short_is_left_out(setting: Setting) -> None:
    long = replace(setting, sizes=replace(setting.sizes, pruned=(64, 10**6)))
    out = [piece for piece in pruned.jobs(long) if isinstance(piece, LeftOut)]
    assert [one.case for one in out] == ["alibi at T = 1,000,000", "forget at T = 1,000,000"]
    assert "test text holds" in out[0].reason


def test_captured_is_what_the_middle_layer_attends_with(setting: Setting) -> None:
    model = setting.needed_workload.build("learned+alibi").eval()
    ids = torch.arange(20)[None]
    seen = {}
    middle = model.model.layers[1].self_attn.k_proj
    middle.register_forward_hook(lambda module, given, out: seen.update(k=out))
    given = pruned.captured(model, ids)
    assert len(model.model.layers) == 2
    assert given.q.shape == given.k.shape == given.v.shape == (1, 2, 20, 8)
    torch.testing.assert_close(
        given.k.norm(dim=-1), seen["k"].unflatten(-1, (2, 8)).transpose(1, 2).norm(dim=-1)
    )
    assert given.potential.shape == (1, 2, 20)
    again = pruned.captured(model, ids)
    assert torch.equal(again.q, given.q)


def test_models_that_cannot_be_pruned_are_refused(setting: Setting, tmp_path: Path) -> None:
    model = setting.needed_workload.build("rope")
    model.save_pretrained(tmp_path / "rope")
    peer = peers.llama(setting)
    peer.save_pretrained(tmp_path / "llama")
    for name, said in (("rope", "no potential"), ("llama", "expected a model of farfield")):
        with pytest.raises(ValueError, match=said):
            pruned.jobs(replace(setting, models=(tmp_path / name,)))


def test_a_model_that_is_given_is_not_trained_again(setting: Setting, tmp_path: Path) -> None:
    work = setting.needed_workload
    work.build("rope+forget").save_pretrained(tmp_path / "trained")
    said: list[str] = []
    given = replace(setting, models=(tmp_path / "trained",), say=said.append)
    rows, _ = measured("pruned", given)
    assert {row.case for row in rows} == {"rope+forget"}
    assert said == []
    small = replace(work.corpus, tokenizer=type("Other", (), {"vocab_size": 7})())
    other = replace(given, workload=replace(work, corpus=small))
    with pytest.raises(ValueError, match="token ids"):
        pruned.jobs(other)


def test_a_diagnosis_is_over_an_evaluation(setting: Setting) -> None:
    rows, out = measured("diagnosis", setting)
    assert out == []
    assert [row.case for row in rows] == ["rope", "alibi", "random_iid+v"]
    assert {(row.baseline, row.tokens) for row in rows} == {("evaluation", setting.sizes.context)}
    assert "8 queries" in rows[0].sizes


def test_peers_have_our_shape(setting: Setting) -> None:
    rows, out = measured("peers", setting)
    over = {(row.measure, row.baseline) for row in rows}
    assert {(m, "Llama") for m in ("training iteration", "forward", "one token")} <= over
    assert {one.case for one in out} <= {"x-transformers"}
    ours, theirs = peers.ours(setting), peers.llama(setting)
    shapes = [sorted(tuple(p.shape) for p in model.parameters()) for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert theirs.config._attn_implementation == "sdpa"


def test_a_decoded_token_sees_the_whole_context(setting: Setting) -> None:
    model = setting.needed_workload.build("learned+v").eval()
    call = decode.one_token(model, 40)
    caches = []
    model.register_forward_hook(
        lambda module, args, kwargs, out: caches.append(kwargs["cache"]), with_kwargs=True
    )
    assert call().shape == (1, 1, 259)
    assert call().isfinite().all()
    assert caches[-1].get_seq_length() == 42
    token = peers.llama_token(peers.llama(setting).eval(), 40, 0)
    assert token().shape == (1, 1, 259)


def test_memory_is_over_plain_attention_and_over_a_shorter_length(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list = []

    def growth(work) -> int:
        asked.append(work)
        return work.tokens * (2 if work.case == "rope" else 1)

    monkeypatch.setattr(memory.peak, "growth", growth)
    rows, out = measured("memory", setting)
    assert out == []
    assert len(asked) == len(set(asked)) == 2 * (len(memory.CASES) + 1) + 2 * len(memory.BACKWARD)
    peaks = {(r.case, r.tokens): r.ratio for r in rows if r.measure == "peak memory"}
    assert peaks == {(c, t): 2.0 if c == "rope" else 1.0 for c in memory.CASES for t in (64, 128)}
    growths = [row for row in rows if row.measure.startswith("growth")]
    assert {row.ratio for row in growths} == {2.0, 4.0}
    monkeypatch.setattr(memory.peak, "growth", lambda work: 0)
    with pytest.raises(ValueError, match="no growth"):
        measured("memory", setting)


def test_a_run_says_where_it_was_measured_and_what_was_left_out(setting: Setting) -> None:
    told: list = []
    threads = torch.get_num_threads()
    found = benchmark.run(
        replace(setting, threads=2), ["peers", "model"], 1e-3, lambda *now: told.append(now)
    )
    assert torch.get_num_threads() == threads
    assert found.machine["threads"] == 2
    assert found.machine["sections"] == ["peers", "model"]
    assert len({row.measure for row in found.rows}) == 1
    assert any("--budget" in one.reason for one in found.left_out)
    assert told[0][1] == 0.0


def test_a_run_refuses_what_can_not_be(setting: Setting) -> None:
    for given, budget, said in (
        (setting, 0.0, "budget"),
        (replace(setting, threads=0), 1.0, "threads"),
        (replace(setting, workload=None), 1.0, "workload"),
    ):
        with pytest.raises(ValueError, match=said):
            benchmark.run(given, ["model"], budget)
