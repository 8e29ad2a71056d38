"""Predictions against their definitions, on queries whose law is known, and on models that run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from farfield.diagnosis.prediction import (
    Control,
    HeadFacts,
    break_length,
    far_mass,
    far_power,
    guesses,
    measured_break,
    predicted_rows,
)
from farfield.diagnosis.samples import HeadSample, Keys, sample
from farfield.theory import predict


def keys_of(logits: np.ndarray) -> Keys:
    """The sums of logits [n, K], written out."""
    weight = np.exp(logits)
    return Keys(
        np.full(len(logits), float(logits.shape[1])),
        np.log(weight.sum(1)),
        np.log((weight**2).sum(1)),
        (logits * weight).sum(1) / weight.sum(1),
    )


def drawn(near: int, far: int, rows: int = 200, seed: int = 0, slope: float = 0.0) -> HeadSample:
    """Queries with normal logits, near ones larger; far ones under a bias −slope · distance."""
    generator = np.random.default_rng(seed)
    near_logits = generator.normal(2.0, 0.5, (rows, near))
    far_logits = generator.normal(0.0, 0.7, (rows, far)) - slope * (near + np.arange(far))
    return HeadSample(
        np.full(rows, float(near + far)),
        keys_of(near_logits),
        keys_of(far_logits),
        np.ones(rows),
        np.ones(rows),
    )


def test_far_mass_is_the_mean_of_logistic_functions() -> None:
    one = drawn(4, 60)
    expected = np.mean(
        [
            math.exp(d) * 500 / 60 / (math.exp(d) * 500 / 60 + math.exp(n))
            for d, n in zip(one.far.lse, one.near.lse, strict=True)
        ]
    )
    assert far_mass(one, Control(), 500, 504) == pytest.approx(expected, rel=1e-12)
    assert far_mass(one, Control(), 60, 64) == pytest.approx(float(one.far_mass.mean()), rel=1e-12)


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3])
def test_it_predicts_longer_rows_of_the_same_law(slope: float) -> None:
    """What was measured with 60 far keys tells what there is with 2,000, biased or not."""
    short, long = drawn(4, 60, 4000, 0, slope), drawn(4, 2000, 4000, 1, slope)
    told = far_mass(short, Control(slope), 2000, 2004)
    spread = long.far_mass.std() / math.sqrt(4000) + short.far_mass.std() / math.sqrt(4000)
    # The log-sum-exp of 60 keys is a little less than its share of a large sum (Jensen).
    assert told == pytest.approx(float(long.far_mass.mean()), abs=4 * spread + 0.01)


def test_log_scaling_is_followed() -> None:
    """Logits times ln n/ln n₀: the sums at another scale, by the cubic through what is known."""
    generator = np.random.default_rng(2)
    near, far = generator.normal(2, 0.5, (300, 4)), generator.normal(0, 0.7, (300, 60))
    one = HeadSample(np.full(300, 64.0), keys_of(near), keys_of(far), np.ones(300), np.ones(300))
    beta = math.log(4096) / math.log(64)  # 2
    exact = np.mean(1 / (1 + np.exp(beta * near).sum(1) / (np.exp(beta * far).sum(1) * 4092 / 60)))
    assert far_mass(one, Control(log_scaled=True), 4092, 4096) == pytest.approx(exact, rel=1e-9)
    between = keys_of(far).scaled(1.5)
    assert between == pytest.approx(np.log(np.exp(1.5 * far).sum(1)), abs=0.02)


def test_break_lengths_solve_their_equation() -> None:
    one = drawn(4, 60)
    odds = one.far.lse - np.log(60) - one.near.lse

    def excess(log_keys: float) -> float:
        return float((1 / (1 + np.exp(-(odds + log_keys)))).mean() - 0.5)

    expected = 4 + math.exp(optimize.brentq(excess, 0, 30))
    assert break_length(one, Control(), 4) == pytest.approx(expected, rel=2e-3, abs=1.0)
    assert break_length(drawn(4, 60, slope=0.3), Control(slope=0.3), 4) == math.inf
    with pytest.raises(ValueError, match="between 0 and 1"):
        break_length(one, Control(), 4, share=1.0)


def test_guesses() -> None:
    one = drawn(4, 60)
    share = float(one.far_mass.mean())
    told = guesses(one, 240)
    assert told["no_change"] == pytest.approx(share)
    assert told["proportional"] == pytest.approx(min(1, 4 * share))
    assert told["proportional_odds"] == pytest.approx(4 * share / (1 + 3 * share))
    assert guesses(one, 10**9)["proportional"] == 1.0


def test_powers_are_the_predictors_at_a_row_that_is_typical() -> None:
    """With every query alike, far power and SNR are those of `theory.predict`."""
    rows, lse_near, ell, e2, M = 3, 5.0, 0.3, 0.4, 100.0
    ones = np.ones(rows)
    far = Keys(M * ones, (ell + np.log(M)) * ones, (e2 + 2 * ell + np.log(M)) * ones, 0.5 * ones)
    near = Keys(8 * ones, lse_near * ones, 9 * ones, ones)
    one = HeadSample(108 * ones, near, far, 2.5 * ones, ones)
    facts = HeadFacts((1.0, 0.5), (0.9, 0.5j), 0.7, carried=True)
    power, snr = far_power(one, facts, Control(), 8, 5000)
    expected = predict(
        5008, 8, lse_near, ell, e2 + 2 * ell, (1.0, 0.5), (0.9, 0.5j), 0.7, 2.5, True
    )
    assert (power, snr) == pytest.approx((expected.far_power, expected.snr), rel=1e-9)


def row(low: int, high: int, share: float | None, keys: float = 1.0) -> dict[str, Any]:
    return {
        "layer": 0, "head": 0, "near_window": 4, "low": low, "high": high, "far_mass": share,
        "far_keys": keys, "near_norm": 0.5, "far_power": 0.25,
    }  # fmt: skip


def test_measured_breaks() -> None:
    curve = [row(4, 5, 0.1), row(8, 9, 0.3), row(16, 17, 0.7)]
    assert measured_break(curve[:2]) is None
    # Log odds are ∓ln(7/3) at 8 and 16: halfway in the logarithm.
    assert measured_break(curve) == pytest.approx(math.sqrt(8 * 16))
    assert measured_break([row(4, 5, 0.9), *curve]) == pytest.approx(math.sqrt(8 * 16))
    assert measured_break([row(4, 5, 0.6), row(8, 9, 0.7)]) == 4.0
    assert measured_break([*curve, row(32, 33, 0.4)]) is None


def test_rows_say_what_came_closest() -> None:
    one = drawn(4, 60, 2000)
    longer = drawn(4, 1000, 2000, 5)
    rows = predicted_rows(
        {(0, 0): one},
        [row(32, 33, 0.5, 28.0), row(1004, 1005, float(longer.far_mass.mean()), 1000.0)],
        near_window=4,
        train_length=64,
    )
    (only,) = rows
    assert only["low"] == 1004
    assert only["error"] == pytest.approx(abs(only["predicted"] - only["measured"]))
    assert only["error"] < 0.03
    assert only["error_no_change"] > 0.2
    assert only["beats_guesses"] == (only["error"] < only[f"error_{only['best_guess']}"])
    assert only["snr_measured"] == pytest.approx(1.0)
    assert only["far_power_predicted"] is None
    # A head whose far mass does not change: the theory fails there, and the row says so.
    (still,) = predicted_rows(
        {(0, 0): one}, [row(1004, 1005, float(one.far_mass.mean()), 1000.0)],
        near_window=4, train_length=64,
    )  # fmt: skip
    assert not still["beats_guesses"]
    assert still["best_guess"] == "no_change"


def test_samples_of_a_model_are_its_own_attention() -> None:
    """Near and far sums of a tiny Llama against its eager weights, head by head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (2, 32))
    found = sample(model, ids, 8, queries=32)
    assert set(found) == {(layer, head) for layer in range(2) for head in range(4)}
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    one = found[1, 3]
    assert (one.context > 16).all()
    assert len(one.context) == 2 * 16
    shares = []
    for text in range(2):
        for query in one.context[:16].astype(int) - 1:
            shares.append(float(attentions[1][text, 3, query, : query - 7].sum()))
    assert sorted(one.far_mass) == pytest.approx(sorted(shares), abs=1e-5)
    assert (one.far.count == one.context - 8).all()
    with pytest.raises(ValueError, match="near_window is 16"):
        sample(model, ids, 16)
