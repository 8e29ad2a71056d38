"""Measures of attention against float64 loops, whole and merged from tiles."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farfield.algebra import measures
from farfield.algebra.measures import LogitSums, ValueSums, logit_sums, value_sums


def drawn(
    seed: int, rows: int, keys: int, width: int = 3, scale: float = 3.0
) -> tuple[Tensor, ...]:
    """(logits [rows, keys], values [rows, keys, width], mask [rows, keys])."""
    own = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, keys, generator=own, dtype=torch.float64)
    values = torch.randn(rows, keys, width, generator=own, dtype=torch.float64)
    return logits, values, torch.rand(rows, keys, generator=own) < 0.7


def same(left: LogitSums | ValueSums, right: LogitSums | ValueSums, tolerance: float) -> bool:
    return all(
        torch.allclose(
            getattr(left, f.name), getattr(right, f.name), rtol=tolerance, atol=tolerance
        )
        for f in fields(left)
    )


def row_measures(near: list[float], far: list[float]) -> dict[str, float]:
    """Every measure of one row from its definition."""
    row = near + far
    z_near, z_far = sum(map(math.exp, near)), sum(map(math.exp, far))
    p = [math.exp(s) / (z_near + z_far) for s in row]
    e1 = z_far / len(far)
    e2 = sum(math.exp(2 * s) for s in far) / len(far)
    return {
        "far_mass": z_far / (z_near + z_far),
        "score_gap": max(near) - max(far),
        "mean_logit": sum(far) / len(far),
        "log_mean_exp": math.log(e1),
        "log_second_moment": math.log(e2 / e1**2),
        "half_range": (max(row) - min(row)) / 2,
        "entropy": -sum(x * math.log(x) for x in p),
        "effective_keys": math.exp(-sum(x * math.log(x) for x in p)),
        "inverse_participation": 1 / sum(x * x for x in p),
    }


def told(near: LogitSums, far: LogitSums) -> dict[str, Tensor]:
    whole = near.merged(far)
    return {
        "far_mass": measures.far_mass(near, far),
        "score_gap": measures.score_gap(near, far),
        "mean_logit": measures.mean_logit(far),
        "log_mean_exp": measures.log_mean_exp(far),
        "log_second_moment": measures.log_second_moment(far),
        "half_range": measures.half_range(whole),
        "entropy": measures.entropy(whole),
        "effective_keys": measures.effective_keys(whole),
        "inverse_participation": measures.inverse_participation(whole),
    }


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31), near=st.integers(1, 6), far=st.integers(1, 9), wide=st.booleans()
)
def test_measures_are_their_definitions(seed: int, near: int, far: int, wide: bool) -> None:
    logits, _, _ = drawn(seed, 2, near + far)
    logits = logits if wide else logits.float()
    is_near = torch.arange(near + far) < near
    found = told(logit_sums(logits, is_near), logit_sums(logits, ~is_near))
    for row in range(2):
        expected = row_measures(logits[row, :near].tolist(), logits[row, near:].tolist())
        for name, value in expected.items():
            tolerance = 1e-11 if wide else 2e-5
            assert found[name][row].item() == pytest.approx(value, rel=tolerance, abs=tolerance)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), keys=st.integers(1, 24), cut=st.integers(0, 24))
def test_tiles_in_any_order_merge_into_the_whole(seed: int, keys: int, cut: int) -> None:
    logits, values, mask = drawn(seed, 3, keys)
    cut = min(cut, keys)
    parts = [slice(0, cut), slice(cut, keys)]
    first, second = (logit_sums(logits[:, p], mask[:, p]) for p in parts)
    whole = logit_sums(logits, mask)
    assert same(first.merged(second), whole, 1e-12)
    assert same(second.merged(first), whole, 1e-12)
    first_v, second_v = (value_sums(logits[:, p], values[:, p], mask[:, p]) for p in parts)
    assert same(first_v.merged(second_v), value_sums(logits, values, mask), 1e-12)
    known = value_sums(logits, values, mask, norms=values.norm(dim=-1))
    assert same(known, value_sums(logits, values, mask), 1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), near=st.integers(1, 6), far=st.integers(2, 9))
def test_the_output_splits_into_what_near_and_far_keys_give(seed: int, near: int, far: int) -> None:
    logits, values, _ = drawn(seed, 2, near + far)
    is_near = torch.arange(near + far) < near
    close, distant = (value_sums(logits, values, m) for m in (is_near, ~is_near))
    split = measures.split_output(close, distant)
    for row in range(2):
        weights = [math.exp(s) for s in logits[row].tolist()]
        p = [w / sum(weights) for w in weights]
        parts = torch.stack([p[j] * values[row, j] for j in range(near + far)])
        assert torch.allclose(split.near[row], parts[:near].sum(0))
        assert torch.allclose(split.far[row], parts[near:].sum(0))
        assert torch.allclose(split.out[row], parts.sum(0))
        assert split.far_mass[row].item() == pytest.approx(sum(p[near:]))
        sums = parts[:near].sum(0), parts[near:].sum(0)
        assert torch.allclose(split.cosine[row], torch.cosine_similarity(*sums, dim=0))
        power = parts[near:].sum(0).square().sum()
        coherent = sum(float(part.norm()) for part in parts[near:]) ** 2
        incoherent = sum(float(part.square().sum()) for part in parts[near:])
        assert measures.value_coherence(distant)[row].item() == pytest.approx(
            (float(power) - incoherent) / (coherent - incoherent), rel=1e-9
        )
        assert measures.coherence_gain(distant)[row].item() == pytest.approx(
            coherent / float(power), rel=1e-9
        )


def test_coherence_is_one_for_aligned_values_and_zero_for_orthogonal_ones() -> None:
    logits, everything = torch.tensor([0.3, -1.0, 0.7]), torch.ones(3, dtype=torch.bool)
    aligned = value_sums(logits, torch.tensor([[2.0, 0, 0]]).expand(3, 3), everything)
    assert measures.value_coherence(aligned).item() == pytest.approx(1.0)
    assert measures.coherence_gain(aligned).item() == pytest.approx(1.0)
    crossed = value_sums(logits, torch.eye(3), everything)
    assert measures.value_coherence(crossed).item() == pytest.approx(0.0, abs=1e-6)
    alone = value_sums(logits, torch.eye(3), torch.tensor([True, False, False]))
    assert measures.value_coherence(alone).isnan()


def test_equal_logits_count_their_keys() -> None:
    sums = logit_sums(torch.full((5,), 700.0), torch.ones(5, dtype=torch.bool))
    assert measures.effective_keys(sums).item() == pytest.approx(5)
    assert measures.inverse_participation(sums).item() == pytest.approx(5)
    assert measures.log_mean_exp(sums).item() == pytest.approx(700)
    assert measures.half_range(sums).item() == 0


def test_a_shift_of_all_logits_changes_no_share() -> None:
    logits = drawn(5, 4, 12)[0]
    is_near = torch.arange(12) < 4
    for shift in (-2000.0, 3000.0):
        moved = told(logit_sums(logits + shift, is_near), logit_sums(logits + shift, ~is_near))
        still = told(logit_sums(logits, is_near), logit_sums(logits, ~is_near))
        for name in set(still) - {"mean_logit", "log_mean_exp"}:
            assert torch.allclose(moved[name], still[name], rtol=1e-9), name


def test_sets_without_keys_say_so() -> None:
    logits = torch.randn(2, 4)
    none, every = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    empty, full = logit_sums(logits, none), logit_sums(logits, every)
    assert (empty.lse == -torch.inf).all()
    assert (measures.far_mass(full, empty) == 0).all()
    assert (measures.far_mass(empty, full) == 1).all()
    assert measures.far_mass(empty, empty).isnan().all()
    for measure in (
        measures.mean_logit, measures.log_mean_exp, measures.log_second_moment,
        measures.half_range, measures.entropy, measures.inverse_participation,
    ):  # fmt: skip
        assert measure(empty).isnan().all(), measure
        assert measure(full).isfinite().all(), measure
    assert measures.score_gap(full, empty).isnan().all()
    assert same(empty.merged(full), full, 0.0)
    assert same(empty, logit_sums(logits[:, :0], every[:0]), 0.0)
    nothing = value_sums(logits, torch.randn(2, 4, 3), none)
    assert (nothing.mean == 0).all()
    assert nothing.merged(nothing).mean.isfinite().all()


def test_a_logit_of_minus_infinity_is_a_key_without_weight() -> None:
    every = torch.ones(3, dtype=torch.bool)
    sums = logit_sums(torch.tensor([1.0, -torch.inf, 2.0]), every)
    assert sums.lse.item() == pytest.approx(math.log(math.e + math.e**2), rel=1e-6)
    assert measures.entropy(sums).isfinite()


def test_half_precision_is_read_in_single() -> None:
    logits, values, mask = drawn(3, 4, 64)
    narrow = logits.bfloat16()
    assert same(logit_sums(narrow, mask), logit_sums(narrow.double(), mask), 1e-5)
    assert same(
        value_sums(narrow, values.float(), mask), value_sums(narrow.double(), values, mask), 1e-5
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_is_refused(bad: float) -> None:
    logits = torch.tensor([0.0, bad])
    with pytest.raises(ValueError, match="NaN or"):
        logit_sums(logits, torch.ones(2, dtype=torch.bool))
    assert logit_sums(logits, torch.tensor([True, False])).count.item() == 1
