"""Taking turns: order, rounds, repeats; and the interval of a median."""

from itertools import pairwise

import numpy as np
import pytest

from farfield.benchmark import pairing
from farfield.benchmark.pairing import groups, median_interval, paired
from farfield.evaluation import intervals


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12, 41])
def test_the_estimate_is_the_median(size: int) -> None:
    values = np.random.default_rng(size).lognormal(size=size)
    found = median_interval(values)
    assert found.estimate == pytest.approx(np.median(values), rel=1e-15)
    if size == 1:
        assert found.low is None
        assert found.high is None
    else:
        assert min(values) <= found.low <= found.estimate <= found.high <= max(values)


@pytest.mark.parametrize("size", [5, 8, 15])
def test_the_interval_is_that_of_medians_of_resamples(size: int) -> None:
    values = np.random.default_rng(size).lognormal(size=size)
    found = median_interval(values)
    draws = np.random.default_rng(1).integers(0, size, (200_000, size))
    medians = np.sort(np.median(values[draws], axis=1))
    # Two bootstraps agree in the share of resamples below a bound, to the error of the 2,000.
    for bound, share in ((found.low, 0.025), (found.high, 0.975)):
        below, upto = np.searchsorted(medians, [bound - 1e-12, bound + 1e-12]) / len(medians)
        error = 5 * np.sqrt(share * (1 - share) / intervals.RESAMPLES)
        assert below - error <= share <= upto + error


def test_ties_and_values_that_are_not_finite() -> None:
    same = median_interval([2.0, 2.0, 2.0, 2.0])
    assert (same.low, same.estimate, same.high) == (2.0, 2.0, 2.0)
    assert median_interval([1.0, np.inf]).estimate is None
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def recorded(names: str) -> tuple[dict, list[str]]:
    calls: list[str] = []
    return {name: lambda name=name: calls.append(name) for name in names}, calls


def test_cases_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "_SHORTEST", 0.0)
    cases, calls = recorded("abc")
    samples = paired(cases, 0.0, fewest=4)
    assert samples.rounds == 4
    assert "".join(calls).endswith("abccbaabccba")
    assert set(samples.seconds) == set("abc")
    assert all((taken > 0).all() for taken in samples.seconds.values())


def test_rounds_follow_the_allowance() -> None:
    cases, _ = recorded("ab")
    assert paired(cases, 0.0).rounds == pairing.FEWEST
    assert paired(cases, 60.0, most=5).rounds == 5


def test_a_quick_case_is_called_again_and_again() -> None:
    cases, calls = recorded("a")
    samples = paired(cases, 0.0)
    assert len(calls) > 100 * samples.rounds


def test_report_rises_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "_SHORTEST", 0.0)
    cases, _ = recorded("ab")
    told: list[float] = []
    paired(cases, 0.0, report=told.append)
    assert told == [1.0] * pairing.FEWEST
    told.clear()
    paired(cases, 60.0, most=4, report=told.append)
    assert told[-1] == 1.0
    assert all(a <= b for a, b in pairwise(told))


def test_ratio_of_a_case_that_does_twice_the_work() -> None:
    samples = pairing.Samples({"a": np.array([1.0, 2.0, 9.0]), "b": np.array([0.5, 1.0, 3.0])})
    assert samples.over("a", "b").estimate == 2.0
    assert samples.over("a", "a").estimate == 1.0
    assert samples.median("a") == 2.0


def test_bounds_that_leave_nothing_are_refused() -> None:
    cases, _ = recorded("a")
    for given, fewest, most in (({}, 3, 5), (cases, 0, 5), (cases, 6, 5)):
        with pytest.raises(ValueError, match="rounds"):
            paired(given, 1.0, fewest=fewest, most=most)


def test_groups_keep_order_and_size() -> None:
    assert groups(list("abcdefg")) == [list("abc"), list("def"), ["g"]]
    assert groups([]) == []
