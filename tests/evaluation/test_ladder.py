"""The ladder end to end: rows that add up, the faults that evaluations are known for."""

import json

import numpy as np
import pytest
import torch
from oracle_model import VOCABULARY, Oracle, draw_everything, oracle_loss, seed_everything
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.data import TokenStream
from farfield.evaluation.ladder import evaluate
from farfield.evaluation.plan import LadderSettings, make_plan
from farfield.evaluation.rows import check_position, check_row

BASE = 16
SMALL = LadderSettings(multiples=(1, 2, 8), blocks=6)
NAMES = {"train_length": BASE, "mechanism": "oracle", "seed": 0}


def ids_of(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(np.uint16)


def by_key(result):
    return {(row["protocol"], row["length"]): row for row in result.rows}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def test_rows_are_sums_of_known_losses():
    ids, oracle = ids_of(2 * 8 * BASE + 7), Oracle()
    result = evaluate(oracle, TokenStream(ids), SMALL, **NAMES)
    rows = by_key(result)
    assert set(rows) == {(p, m * BASE) for p in SMALL.protocols for m in SMALL.multiples}
    assert result.left_out == []
    for row in result.rows:
        check_row(row)
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        assert row["ppl"] == pytest.approx(np.exp(row["nll"] / row["tokens"]))
        assert sum(row["unit_nll"]) == pytest.approx(row["nll"])
        base = rows[row["protocol"], BASE]
        assert row["ratio"] == pytest.approx(row["ppl"] / base["ppl"])
        assert row["ratio_low"] <= row["ratio_high"]
    long = rows["windows", 8 * BASE]
    expected = [
        oracle_loss(oracle, ids, window * 128 + offset + 1, offset + 1)
        for window in range(2)
        for offset in range(128)
    ]
    assert long["nll"] == pytest.approx(sum(expected), rel=1e-6)
    assert long["unit_nll"][1] == pytest.approx(sum(expected[128:]), rel=1e-6)
    assert (long["tokens"], long["bytes"], long["unit_tokens"]) == (256, 256, 128)
    assert long["policy"]["discarded_tail"] == 6
    assert rows["clipped", BASE]["nll"] == rows["windows", BASE]["nll"]
    assert rows["windows", BASE]["ratio"] == rows["windows", BASE]["ratio_high"] == 1.0


def test_policy_says_how_the_numbers_came_about():
    rows = by_key(evaluate(Oracle(), TokenStream(ids_of(263)), SMALL, **NAMES))
    fixed, clipped = rows["fixed", 128]["policy"], rows["clipped", 128]["policy"]
    assert fixed["context"] == "124 to 127 tokens"
    assert fixed["blocks"]["kept"] == len(rows["fixed", 128]["unit_nll"]) == 6
    assert rows["fixed", 128]["tokens"] == rows["fixed", 16]["tokens"] == 24
    assert fixed["discarded_tail"] == 263 - fixed["blocks"]["last_end"]
    assert clipped["context"] == "1 to 16 tokens, then 13 to 16"
    assert (clipped["stride"], rows["windows", 128]["policy"]["stride"]) == (4, 128)
    for row in rows.values():
        policy = row["policy"]
        assert policy["documents"] == "concatenated"
        assert (policy["bos"], policy["non_finite"]) == (False, 0)
        assert (policy["dtype"], policy["head"]) == ("float32", "chunked")
        base = policy["ratio_base"]
        again = np.exp(row["nll"] / row["tokens"] - base["nll"] / base["tokens"])
        assert row["ratio"] == pytest.approx(again)


def test_loss_by_position_adds_up_to_windows():
    ids, oracle = ids_of(263), Oracle()
    result = evaluate(oracle, TokenStream(ids), SMALL, **NAMES)
    rows = by_key(result)
    for length in (16, 32, 128):
        positions = [row for row in result.positions if row["length"] == length]
        for row in positions:
            check_position(row)
        assert sum(row["tokens"] for row in positions) == rows["windows", length]["tokens"]
        total = sum(row["nll"] for row in positions)
        assert total == pytest.approx(rows["windows", length]["nll"])
    last = positions[-1]
    assert (last["low"], last["high"]) == (97, 129)
    expected = [
        oracle_loss(oracle, ids, window * 128 + seen, seen)
        for window in range(2)
        for seen in range(97, 129)
    ]
    assert last["nll"] == pytest.approx(sum(expected), rel=1e-6)


def test_perplexity_is_not_a_mean_of_window_means():
    """Easy and hard stretches of text: the mean of perplexities is another number."""
    ids = np.concatenate([np.zeros(64, dtype=np.uint16), ids_of(65)])
    row = by_key(evaluate(Oracle(), TokenStream(ids), SMALL, **NAMES))["windows", BASE]
    trap = np.mean(np.exp(np.array(row["unit_nll"]) / BASE))
    assert row["ppl"] == pytest.approx(np.exp(sum(row["unit_nll"]) / row["tokens"]))
    assert abs(trap - row["ppl"]) > 0.5


def test_a_text_of_twice_the_length_has_twice_the_loss_and_tokens():
    """lingua#46: what is cut off must leave the count as it leaves the sum."""
    once = ids_of(128)
    settings = LadderSettings(multiples=(1, 8), protocols=("windows",))
    # One token more, so that the last target of each repetition is inside the text.
    single = TokenStream(np.concatenate([once, once[:1]]))
    double = TokenStream(np.concatenate([once, once, once[:100]]))
    short = by_key(evaluate(Oracle(), single, settings, **NAMES))
    long = by_key(evaluate(Oracle(), double, settings, **NAMES))
    for key in short:
        assert long[key]["nll"] == pytest.approx(2 * short[key]["nll"])
        assert long[key]["tokens"] == 2 * short[key]["tokens"]
        assert long[key]["ppl"] == pytest.approx(short[key]["ppl"])
        assert long[key]["policy"]["discarded_tail"] == 99


def test_results_do_not_depend_on_the_batch():
    stream = TokenStream(ids_of(4 * 8 * BASE + 5))
    results = [
        evaluate(llama(), stream, LadderSettings((1, 2, 8), forward_tokens=tokens), **NAMES)
        for tokens in (1, 100, 100_000)
    ]
    for other in results[1:]:
        for row, same in zip(results[0].rows, other.rows, strict=True):
            np.testing.assert_allclose(row["unit_nll"], same["unit_nll"], rtol=1e-5)
            assert row["nll"] == pytest.approx(same["nll"], rel=1e-6)
            assert row["ratio_low"] == pytest.approx(same["ratio_low"], rel=1e-5)


def test_training_does_not_notice_an_evaluation():
    """Dropout after an evaluation draws what it would have drawn without it."""

    def trained(evaluated):
        seed_everything(0)
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=512)
        model = GPT2LMHeadModel(config).train()
        if evaluated:
            evaluate(model, TokenStream(ids_of(263)), SMALL, **NAMES)
        ids = torch.arange(VOCABULARY)[None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        return loss.item(), grads, draw_everything()

    plain, after = trained(False), trained(True)
    assert plain[0] == after[0]
    assert plain[2] == after[2]
    assert all(torch.equal(after[1][name], grad) for name, grad in plain[1].items())


def test_non_finite_losses_are_counted_and_leave_null(monkeypatch):
    ids = ids_of(263)
    ids[ids == 7] = 6
    ids[200] = 7  # the one input that the model answers with NaN
    oracle = Oracle()
    finite = oracle.head.forward
    monkeypatch.setattr(
        oracle.head,
        "forward",
        lambda hidden: finite(hidden).masked_fill(hidden[..., 7:8].ne(0), float("nan")),
    )
    rows = by_key(evaluate(oracle, TokenStream(ids), SMALL, **NAMES))
    hit = rows["windows", 32]
    assert hit["policy"]["non_finite"] == 1
    assert (hit["nll"], hit["ppl"], hit["ratio"], hit["ratio_low"]) == (None,) * 4
    assert [value is None for value in hit["unit_nll"]] == [unit == 6 for unit in range(8)]
    for row in rows.values():
        check_row(row)
        if row["protocol"] != "fixed":
            assert row["nll"] is None
    result = evaluate(oracle, TokenStream(ids), SMALL, **NAMES)
    broken = [row for row in result.positions if row["length"] == 128 and row["nll"] is None]
    assert [(row["low"], row["high"]) for row in broken] == [(65, 97)]  # 200 − 128 + 1 = 73


def test_a_token_beyond_the_embedding_is_refused_before_any_forward():
    """evaluate#313, which crashed inside the model."""
    for place in (3, 250):
        ids = ids_of(263)
        ids[place] = VOCABULARY
        oracle = Oracle()
        with pytest.raises(ValueError, match=f"token id 11 at token {place} of the text") as caught:
            evaluate(oracle, TokenStream(ids), SMALL, **NAMES)
        assert "ids 0 to 10" in str(caught.value)
        assert oracle.calls == []


def test_learned_positions_leave_longer_lengths_out_with_the_reason():
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    stream = TokenStream(ids_of(263))
    result = evaluate(GPT2LMHeadModel(config), stream, SMALL, **NAMES)
    assert {row["length"] for row in result.rows} == {16, 32}
    assert {(left["length"], left["protocol"]) for left in result.left_out} == {
        (128, protocol) for protocol in SMALL.protocols
    }
    assert "32 learned absolute positions" in result.left_out[0]["reason"]


def test_rotary_models_are_evaluated_beyond_their_stated_length():
    model = llama()
    model.config.max_position_embeddings = 32
    result = evaluate(model, TokenStream(ids_of(263)), SMALL, **NAMES)
    assert {row["length"] for row in result.rows} == {16, 32, 128}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "ran out of memory"),
        (IndexError("index 64 is out of bounds for dimension 0"), "has no positions so far"),
    ],
)
def test_a_length_the_model_fails_at_loses_nothing_else(monkeypatch, error, reason):
    oracle, forward = Oracle(), Oracle().body.forward

    def limited(input_ids, use_cache=False):
        if input_ids.shape[1] > 64:
            raise error
        return forward(input_ids, use_cache)

    monkeypatch.setattr(oracle.body, "forward", limited)
    done = []
    result = evaluate(
        oracle, TokenStream(ids_of(263)), SMALL, **NAMES, progress=lambda *p: done.append(p)
    )
    kept = {(row["protocol"], row["length"]) for row in result.rows}
    lost = {("windows", 128), ("fixed", 128)}  # `clipped` never runs more than L₀ tokens
    assert kept == {(p, length) for p in SMALL.protocols for length in (16, 32, 128)} - lost
    assert {(left["protocol"], left["length"]) for left in result.left_out} == lost
    assert all(reason in left["reason"] for left in result.left_out)
    assert {row["length"] for row in result.positions} == {16, 32}
    assert done[-1][0] == done[-1][1]


def test_other_errors_of_a_model_are_not_swallowed(monkeypatch):
    oracle = Oracle()
    forward = oracle.body.forward

    def broken(input_ids, use_cache=False):
        if input_ids.shape[1] > 64:
            raise RuntimeError("shapes do not match")
        return forward(input_ids, use_cache)

    monkeypatch.setattr(oracle.body, "forward", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        evaluate(oracle, TokenStream(ids_of(263)), SMALL, **NAMES)


def test_training_length_not_asked_for_is_the_base_but_not_a_row():
    settings = LadderSettings(lengths=(32, 128), blocks=6)
    result = evaluate(Oracle(), TokenStream(ids_of(263)), settings, **NAMES)
    asked = by_key(evaluate(Oracle(), TokenStream(ids_of(263)), SMALL, **NAMES))
    assert {row["length"] for row in result.rows} == {32, 128}
    for key, row in by_key(result).items():
        assert row == asked[key]


def test_lengths_below_the_training_length_pair_with_it():
    settings = LadderSettings(lengths=(8, 16), protocols=("windows",))
    rows = by_key(evaluate(Oracle(), TokenStream(ids_of(263)), settings, **NAMES))
    short, base = rows["windows", 8], rows["windows", 16]
    assert short["tokens"] == base["tokens"] == 256
    assert short["ratio"] == pytest.approx(short["ppl"] / base["ppl"])
    assert short["ratio_low"] < short["ratio"] < short["ratio_high"]


def test_without_the_training_length_ratios_are_null_and_the_reason_is_given():
    settings = LadderSettings(lengths=(8, 16), protocols=("windows", "fixed"))
    result = evaluate(
        Oracle(), TokenStream(ids_of(40)), settings, train_length=64, mechanism="x", seed=0
    )
    assert {row["ratio"] for row in result.rows} == {None}
    assert all(row["nll"] > 0 for row in result.rows)
    assert (64, "windows") in {(left["length"], left["protocol"]) for left in result.left_out}


def test_one_window_has_a_ratio_and_no_interval():
    rows = by_key(evaluate(Oracle(), TokenStream(ids_of(129)), SMALL, **NAMES))
    row = rows["windows", 128]
    assert len(row["unit_nll"]) == 1
    assert row["ratio"] == pytest.approx(row["ppl"] / rows["windows", 16]["ppl"])
    assert (row["ratio_low"], row["ratio_high"]) == (None, None)


def test_only_the_protocols_asked_for_are_run():
    for protocol in SMALL.protocols:
        settings = LadderSettings(multiples=(1, 2, 8), blocks=6, protocols=(protocol,))
        everything = by_key(evaluate(Oracle(), TokenStream(ids_of(263)), SMALL, **NAMES))
        oracle = Oracle()
        result = evaluate(oracle, TokenStream(ids_of(263)), settings, **NAMES)
        assert result.rows == [row for key, row in everything.items() if key[0] == protocol]
        assert bool(result.positions) == (protocol == "windows")
        longest = max(inputs for _, inputs in oracle.calls)
        assert longest == {"windows": 128, "fixed": 127, "clipped": 16}[protocol]


def test_bytes_are_those_of_the_targets():
    ids = ids_of(263)
    stream = TokenStream(ids, byte_ends=np.cumsum(ids.astype(np.int64) + 1))
    rows = by_key(evaluate(Oracle(), stream, SMALL, **NAMES))
    sizes = ids.astype(int) + 1
    assert rows["windows", 128]["bytes"] == rows["clipped", 32]["bytes"] == sizes[1:257].sum()
    ends = make_plan(SMALL, 263, BASE, None).block_ends
    expected = sum(sizes[end - 4 : end].sum() for end in ends)
    assert rows["fixed", 128]["bytes"] == rows["fixed", 16]["bytes"] == expected


def test_progress_rises_to_its_total():
    seen = []
    evaluate(Oracle(), TokenStream(ids_of(263)), SMALL, **NAMES, progress=lambda *p: seen.append(p))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    assert done[0] > 0


@pytest.mark.parametrize("mechanism", ["rope", "random+v", "random_iid", "learned+v+alibi"])
def test_our_models_run_and_repeat_themselves(mechanism):
    config = FarfieldConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        mechanism=mechanism,
        train_length=BASE,
    )
    model = FarfieldForCausalLM(config)
    model.train()
    stream = TokenStream(ids_of(263))
    once = evaluate(model, stream, SMALL, **NAMES)
    assert once == evaluate(model, stream, SMALL, **NAMES)
    assert len(once.rows) == 9
    assert all(row["policy"]["head"] == "chunked" for row in once.rows)
    assert all(np.isfinite(row["nll"]) for row in once.rows)


def test_clipped_goes_with_the_training_length_it_starts_with(monkeypatch):
    """Lengths below L₀ fit the memory, L₀ itself does not."""
    oracle = Oracle()
    forward = oracle.body.forward

    def limited(input_ids, use_cache=False):
        if input_ids.shape[1] > 8:
            raise MemoryError
        return forward(input_ids, use_cache)

    monkeypatch.setattr("farfield.evaluation.ladder.PROBE_TOKENS", 4)
    monkeypatch.setattr(oracle.body, "forward", limited)
    settings = LadderSettings(lengths=(8, 32))
    result = evaluate(oracle, TokenStream(ids_of(263)), settings, **NAMES)
    assert {(row["protocol"], row["length"]) for row in result.rows} == {
        ("windows", 8), ("fixed", 8),
    }  # fmt: skip
    assert {row["ratio"] for row in result.rows} == {None}
    left = {(left["protocol"], left["length"]): left["reason"] for left in result.left_out}
    assert (
        left["clipped", 32] == left["windows", 32] == ("the forward ran out of memory: MemoryError")
    )
    assert left["clipped", 8] == "not a multiple of the training length 16"
