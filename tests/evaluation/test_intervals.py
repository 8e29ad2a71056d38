"""Bootstrap intervals: pairing, pooling, coverage, and what few units do to it."""

import numpy as np
import pytest

from farfield.evaluation.intervals import hierarchical, perplexity_ratio, pool

MEAN = {8: lambda total: total / 8, 30: lambda total: total / 30, 3: lambda total: total / 3}


def coverage(units: int, trials: int = 300) -> float:
    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(trials):
        interval = hierarchical(MEAN[units], generator.normal(2.0, 1.0, units), resamples=400)
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 2.0 <= interval.high
    return hits / trials


def test_coverage_is_near_nominal_with_thirty_units_and_short_with_three():
    assert 0.90 <= coverage(30) <= 0.98
    assert coverage(3) < 0.85  # why the module warns of few windows


def test_coverage_over_seeds_and_units_beats_units_alone():
    """Seeds that differ by more than units do: resampling units alone misses that."""
    generator = np.random.default_rng(6)
    hits = {"both": 0, "units": 0}
    trials, seeds, units = 150, 12, 12
    for _ in range(trials):
        x = generator.normal(0, 1, (seeds, 1)) + generator.normal(0, 1, (1, units))
        x = x + generator.normal(0, 0.5, (seeds, units))
        both = hierarchical(lambda t: t / (seeds * units), x, resamples=300)
        alone = hierarchical(lambda t: t / units, x.mean(axis=0), resamples=300)
        hits["both"] += both.low <= 0 <= both.high
        hits["units"] += alone.low <= 0 <= alone.high
    assert hits["both"] / trials >= 0.85
    assert hits["units"] < hits["both"]


def test_estimate_is_the_ratio_of_totals_not_a_mean_of_ratios():
    far, near = np.array([10.0, 40.0]), np.array([10.0, 10.0])
    interval = perplexity_ratio(far, near, unit_tokens=10)
    assert interval.estimate == pytest.approx(np.exp(50 / 20 - 20 / 20))
    assert interval.estimate != pytest.approx(np.mean(np.exp((far - near) / 10)))


def test_what_pairs_share_cancels():
    """Units differ wildly, the difference between the two arrays does not."""
    near = np.random.default_rng(0).normal(1000, 300, 20)
    paired = perplexity_ratio(near + 5.0, near, unit_tokens=100)
    assert paired.low == pytest.approx(np.exp(0.05))
    assert paired.high == pytest.approx(np.exp(0.05))
    unpaired = perplexity_ratio(near[::-1] + 5.0, near, unit_tokens=100)
    assert unpaired.high - unpaired.low > 0.1


def test_resampled_totals_equal_the_definition():
    x = np.random.default_rng(1).normal(size=(3, 5))
    y = x**2
    seen: list[np.ndarray] = []
    hierarchical(lambda a, b: seen.append(np.array([a, b])) or a, x, y, resamples=50)
    totals = seen[1]
    children = np.random.SeedSequence(20_260_624).spawn(2)
    units = np.random.default_rng(children[0]).integers(0, 5, (50, 5))
    seeds = np.random.default_rng(children[1]).integers(0, 3, (50, 3))
    for r in range(50):
        drawn = np.ix_(seeds[r], units[r])
        assert totals[0, r] == pytest.approx(x[drawn].sum())
        assert totals[1, r] == pytest.approx(y[drawn].sum())


def test_blocks_of_resamples_do_not_change_the_draws(monkeypatch):
    x = np.random.default_rng(1).normal(size=(2, 7))
    whole = hierarchical(lambda t: t, x, resamples=100)
    monkeypatch.setattr("farfield.evaluation.intervals._DRAWS_AT_ONCE", 21)
    assert hierarchical(lambda t: t, x, resamples=100) == whole


def test_same_call_same_interval_and_global_state_untouched():
    x = np.random.default_rng(1).normal(size=9)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    assert hierarchical(lambda t: t, x) == hierarchical(lambda t: t, x)
    assert hierarchical(lambda t: t, x, generator_seed=1) != hierarchical(lambda t: t, x)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


@pytest.mark.parametrize("values", [[3.0], [[3.0], [4.0]]])
def test_fewer_than_two_units_have_no_interval(values):
    interval = hierarchical(lambda t: t, values)
    assert interval.estimate == np.sum(values)
    assert interval.low is None
    assert interval.high is None


def test_non_finite_units_leave_no_number():
    interval = perplexity_ratio([1.0, None, 3.0], [1.0, 2.0, 3.0], 1)
    assert (interval.estimate, interval.low, interval.high) == (None, None, None)


def test_ratio_beyond_floats_is_null_and_below_is_zero_safe():
    assert perplexity_ratio([5000.0, 5000.0], [0.0, 0.0], 1).estimate is None


def test_pool_sums_consecutive_units():
    assert pool([[1, 2, 3, 4], [5, 6, 7, 8]], 8, 16).tolist() == [[3, 7], [11, 15]]
    assert pool([1.0, None, 3.0, 4.0], 1, 2)[1] == 7.0
    with pytest.raises(ValueError, match="not a whole multiple"):
        pool([1, 2, 3], 8, 12)
    with pytest.raises(ValueError, match="would not be whole"):
        pool([1, 2, 3], 8, 16)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (([1.0, 2.0], [1.0]), {}, r"shapes \(1, 2\), \(1, 1\)"),
        ((), {}, "no arrays"),
        (([],), {}, "none empty"),
        (([1.0, 2.0],), {"level": 1.0}, "level = 1.0"),
        (([1.0, 2.0],), {"resamples": 0}, "resamples = 0"),
    ],
)
def test_bad_calls_say_what_was_expected(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        hierarchical(lambda *totals: totals[0], *arrays, **options)


def test_a_statistic_that_reduces_is_refused():
    with pytest.raises(ValueError, match="one value per resample"):
        hierarchical(lambda total: np.mean(total), [1.0, 2.0, 3.0])
