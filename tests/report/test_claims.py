"""The verdict on each claim in each of its statuses, from rows made to lie where they should."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from synthetic_study import L0, result_row

from farfield.report import verdicts
from farfield.report.claims import CLAIMS, Verdict

# log-ratio at each multiple; ± spread alternates over the windows of that length.
Spec = Mapping[str, Mapping[int, tuple[float, float]]]
HOLDING: dict[str, dict[int, tuple[float, float]]] = {
    "rope": {16: (math.log(4), 0.02), 128: (math.log(12), 0.02)},
    "rope:mixing": {16: (math.log(2.8), 0.02), 128: (math.log(6), 0.02)},
    "alibi": {128: (math.log(0.97), 0.01)},
    "random": {16: (math.log(1.2), 0.02), 128: (math.log(2.2), 0.02)},
    "random+v": {16: (math.log(1.1), 0.02), 128: (math.log(1.7), 0.02)},
    "learned": {4: (0.05, 0.01), 16: (math.log(1.2), 0.02), 128: (math.log(3.4), 0.02)},
    "learned+v": {4: (0.05, 0.01), 16: (math.log(1.1), 0.02), 128: (math.log(2.5), 0.02)},
    "learned+v+alibi": {16: (-0.01, 0.01), 128: (math.log(0.98), 0.01)},
}
HOMES = {"rope": 4.4, "learned+v+alibi": 4.0}


def rows_of(
    spec: Spec,
    *,
    windows: int = 8,
    seeds: Sequence[int] = (0,),
    homes: Mapping[str, float] = HOMES,
    home_spread: float = 0.01,
) -> list[dict[str, Any]]:
    rows = []
    for name, ladder in spec.items():
        for seed in seeds:
            for multiple, (mean, spread) in {1: (0.0, 0.0), **ladder}.items():
                count = windows * 128 // multiple
                units = []
                for window in range(count):
                    loss = math.log(homes.get(name, 4.5)) + mean
                    # Slow waves: they stay when short windows are summed into long ones.
                    wave = 1 if window * multiple // 128 % 2 else -1
                    loss += wave * (spread if multiple > 1 else 0.0)
                    loss += wave * home_spread * (name == "learned+v+alibi") * (multiple == 1)
                    units.append(loss * L0 * multiple)
                rows.append(result_row(name, seed, L0 * multiple, "windows", units, L0 * multiple))
    return rows


def verdict(claim: str, rows: Sequence[Any]) -> Verdict:
    return next(v for v in verdicts(rows) if v.claim == claim)


def changed(**ladders: Any) -> dict[str, Any]:
    """The holding spec with some mechanisms' ladders replaced, or left out with None."""
    names = {"learned_v": "learned+v", "random_v": "random+v", "mixing": "rope:mixing"}
    names["controlled"] = "learned+v+alibi"
    spec = dict(HOLDING)
    for key, ladder in ladders.items():
        name = names.get(key, key)
        if ladder is None:
            del spec[name]
        else:
            spec[name] = {**spec[name], **ladder}
    return spec


def test_every_claim_holds_where_everything_lies_on_its_side() -> None:
    found = verdicts(rows_of(HOLDING))
    assert [v.claim for v in found] == ["C1", "C2", "C3", "C4", "C5", "C6"]
    assert [v.status for v in found] == ["holds"] * 6
    assert all(measure.low is not None for v in found for measure in v.numbers)


def test_scaled_rows_enter_no_verdict() -> None:
    scaled = {
        "rope:scaling=linear": {16: (0.0, 0.01), 128: (0.0, 0.01)},
        "rope:scaling=yarn": {4: (0.9, 0.3), 16: (1.0, 0.3), 128: (9.0, 0.1)},
        "rope:mixing,scaling=ntk": {16: (-1.0, 0.01), 128: (-1.0, 0.01)},
    }
    for spec in (HOLDING, changed(rope=None), changed(learned_v={128: (math.log(9), 0.02)})):
        assert verdicts(rows_of({**scaled, **spec})) == verdicts(rows_of(spec))
    told = {v.status for v in verdicts(rows_of(scaled))}
    assert told == {"not tested"}  # a scaled rope stands in for none that was trained


@pytest.mark.parametrize(
    ("claim", "ladders", "status"),
    [
        ("C1", {"rope": {16: (math.log(1.8), 0.01)}}, "fails"),
        ("C1", {"rope": {128: (math.log(3.9), 0.01)}}, "fails"),
        ("C1", {"rope": {16: (math.log(2), 0.2), 128: (math.log(9), 0.2)}}, "undecided"),
        ("C1", {"rope": {128: (math.log(4), 0.2)}}, "undecided"),
        ("C2", {"random": {16: (math.log(2.4), 0.01)}}, "fails"),
        ("C2", {"random": {16: (math.log(2), 0.2)}}, "undecided"),
        ("C3", {"learned": {4: (math.log(1.2), 0.01)}}, "fails"),
        ("C3", {"learned": {4: (math.log(1.1), 0.1)}}, "undecided"),
        ("C3", {"learned": {16: (math.log(2.0), 0.01)}}, "fails"),
        ("C3", {"learned": {16: (math.log(2.8) / 2, 0.2)}}, "undecided"),
        ("C4", {"random_v": {128: (math.log(2.4), 0.01)}}, "fails"),
        ("C4", {"learned_v": {128: (math.log(3.4), 0.2)}}, "undecided"),
        ("C4", {"learned_v": {128: (math.log(3.4), 0.02)}}, "fails"),  # exactly no gain
        ("C5", {"random": {128: (math.log(1.05), 0.01)}}, "fails"),
        ("C5", {"learned": {128: (math.log(1.1), 0.2)}}, "undecided"),
        ("C5", {"alibi": {128: (math.log(1.2), 0.01)}}, "fails"),
        ("C5", {"alibi": {128: (math.log(1.05), 0.2)}}, "undecided"),
        ("C6", {"controlled": {128: (math.log(1.2), 0.01)}}, "fails"),
        ("C6", {"controlled": {128: (math.log(1.05), 0.2)}}, "undecided"),
    ],
)
def test_a_part_that_fails_or_straddles_decides(
    claim: str, ladders: dict[str, Any], status: str
) -> None:
    found = verdict(claim, rows_of(changed(**ladders)))
    assert found.status == status
    assert bool(found.needed) == (status == "undecided")


@pytest.mark.parametrize(
    ("home", "spread", "status"),
    [(4.39, 0.0, "holds"), (4.6, 0.01, "fails"), (4.4, 0.1, "undecided")],
)
def test_c6_asks_for_no_loss_at_the_training_length(
    home: float, spread: float, status: str
) -> None:
    homes = {"rope": 4.4, "learned+v+alibi": home}
    part = verdict("C6", rows_of(HOLDING, homes=homes, home_spread=spread)).parts[0]
    assert part.status == status


@pytest.mark.parametrize(
    ("claim", "ladders", "named"),
    [
        ("C1", {"rope": None}, "no result of rope"),
        ("C2", {"random": None}, "no result of random"),
        ("C4", {"random_v": None, "learned_v": None}, "no result of random+v"),
        ("C5", {"random": None, "learned": None, "alibi": None}, "no result of alibi"),
        ("C6", {"controlled": None}, "no result of learned+v+alibi"),
    ],
)
def test_a_missing_mechanism_is_not_tested_and_named(
    claim: str, ladders: dict[str, Any], named: str
) -> None:
    found = verdict(claim, rows_of(changed(**ladders)))
    # C6 keeps a part of nothing but the missing mechanism; C1–C5 lose all of theirs.
    assert found.status == "not tested"
    assert named in found.sentence
    assert "in the study" in found.needed


def test_c3_without_the_same_frequencies_never_holds() -> None:
    found = verdict("C3", rows_of(changed(mixing=None)))
    assert [part.status for part in found.parts] == ["holds", "not tested"]
    assert found.status == "undecided"
    assert "no result of rope:mixing" in found.sentence
    assert "rope:mixing in the study" in found.needed


def test_c3_without_the_same_frequencies_can_still_fail() -> None:
    found = verdict("C3", rows_of(changed(mixing=None, learned={4: (0.3, 0.01)})))
    assert found.status == "fails"


def test_a_missing_length_is_named() -> None:
    spec = {name: {m: v for m, v in of.items() if m < 128} for name, of in HOLDING.items()}
    found = verdicts(rows_of(spec))
    assert [v.status for v in found] == [
        "undecided",
        "holds",
        "holds",
        "not tested",
        "not tested",
        "undecided",
    ]
    assert "no result at 128 L₀ of rope" in found[0].sentence
    assert "a ladder that reaches 128 L₀" in found[0].needed


def test_no_rows_test_nothing() -> None:
    assert {v.status for v in verdicts([])} == {"not tested"}


def test_losses_that_are_not_finite_decide_nothing_and_are_counted() -> None:
    rows = rows_of(HOLDING)
    row = next(r for r in rows if r["mechanism"] == "rope" and r["length"] == 16 * L0)
    row["unit_nll"][3] = None
    row.update(nll=None, ppl=None, policy={**row["policy"], "non_finite": 7})
    found = verdict("C1", rows)
    assert found.status == "undecided"
    assert "7 losses were not finite" in found.sentence


def test_too_few_windows_make_no_interval_and_no_verdict() -> None:
    found = verdict("C5", rows_of(HOLDING, windows=2))
    assert found.status == "undecided"
    assert "1 seed × 2 windows: too few for an interval" in found.sentence
    assert "at least 4 windows × seeds at 128 L₀" in found.needed
    assert verdict("C5", rows_of(HOLDING, windows=2, seeds=(0, 1))).status == "holds"


def test_mechanisms_are_paired_over_the_seeds_they_share() -> None:
    rows = rows_of(HOLDING, seeds=(0, 1, 2))
    rows = [r for r in rows if not (r["mechanism"] == "random+v" and r["seed"] == 2)]
    part = verdict("C4", rows).parts[0]
    assert part.decisive is not None
    assert part.decisive.basis == "2 seeds × 8 windows"
    rows = [r for r in rows if r["mechanism"] != "random+v" or r["seed"] == 0]
    rows = [r for r in rows if r["mechanism"] != "random" or r["seed"] != 0]
    assert "no seed in common of random+v and random" in verdict("C4", rows).sentence


def test_numbers_beside_a_verdict_are_of_its_own_seeds() -> None:
    """A seed that only one of the pair has would make the two ratios contradict their quotient."""
    rows = rows_of(HOLDING, seeds=(0,))
    other = changed(learned_v={128: (math.log(9), 0.02)})
    rows += [r for r in rows_of(other, seeds=(1,)) if r["mechanism"] == "learned+v"]
    part = verdict("C4", rows).parts[1]
    plain, carried = (measure.value for measure in part.beside)
    assert part.decisive is not None
    assert plain is not None
    assert carried is not None
    assert carried / plain == pytest.approx(part.decisive.value, rel=1e-9)
    assert {measure.basis for measure in part.beside} == {part.decisive.basis}


def test_few_windows_are_flagged() -> None:
    few = verdict("C5", rows_of(HOLDING, windows=8)).parts[0].decisive
    many = verdict("C5", rows_of(HOLDING, windows=12)).parts[0].decisive
    assert few is not None
    assert many is not None
    assert (few.few, many.few) == (True, False)


def test_what_two_mechanisms_share_cancels() -> None:
    """Windows that are hard for both say nothing against a gain: the interval is the pair's."""
    noisy = changed(random={128: (math.log(2.2), 0.8)}, random_v={128: (math.log(1.7), 0.8)})
    part = verdict("C4", rows_of(noisy)).parts[0]
    assert part.status == "holds"
    assert part.decisive is not None
    assert part.decisive.value == pytest.approx(1.7 / 2.2, rel=1e-6)
    assert part.decisive.high == pytest.approx(1.7 / 2.2, rel=1e-6)


def test_c6_takes_the_first_of_a_fixed_preference() -> None:
    spec = changed(controlled=None)
    spec["random+v+alibi"] = HOLDING["learned+v+alibi"]
    homes = {"rope": 4.4, "random+v+alibi": 4.0}
    assert "random+v+alibi" in verdict("C6", rows_of(spec, homes=homes)).sentence
    spec["learned+v+alibi"] = {128: (0.5, 0.01)}
    assert verdict("C6", rows_of(spec, homes=homes)).status == "fails"


def test_the_numbers_are_those_of_the_rows() -> None:
    found = verdict("C2", rows_of(HOLDING))
    numbers = {measure.label: measure.value for measure in found.numbers}
    assert numbers["ratio of rope at 16 L₀"] == pytest.approx(4, rel=1e-6)
    assert numbers["log-ratio of random ÷ log-ratio of rope"] == pytest.approx(
        math.log(1.2) / math.log(4), rel=1e-6
    )


def test_what_would_decide_is_a_sample_size() -> None:
    found = verdict("C5", rows_of(changed(alibi={128: (math.log(1.05) - 0.02, 0.06)})))
    assert found.status == "undecided"
    assert "× as many windows" in found.needed


def test_the_thresholds_are_those_of_the_paper_page() -> None:
    bounds = {claim.name: [(test.sense, test.bound) for test in claim.tests] for claim in CLAIMS}
    assert bounds == {
        "C1": [("at least", 2.0), ("above", 1.0)],
        "C2": [("at most", 0.0)],
        "C3": [("at most", 1.10), ("at most", 0.0)],
        "C4": [("below", 1.0), ("below", 1.0)],
        "C5": [("at least", 1.10), ("at least", 1.10), ("at most", 1.05)],
        "C6": [("at most", 1.0), ("at most", 1.05)],
    }
