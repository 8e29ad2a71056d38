"""Sampled queries: how many, from where, and that a stratum is sampled without bias."""

import pytest
import torch

from farfield.diagnosis import Sampling
from farfield.evaluation.plan import position_buckets


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (7, 3), (100, 100), (1000, 64), (16384, 512)]
)
def test_as_many_different_queries_as_asked(length: int, count: int) -> None:
    rows = Sampling(count=count).rows(length)
    assert len(rows) == min(count, length)
    assert bool((rows.diff() > 0).all())
    assert int(rows[0]) >= 0
    assert int(rows[-1]) < length


def test_strata_share_the_queries_evenly() -> None:
    rows = Sampling(count=512).rows(16384) + 1
    counts = [int(((rows >= low) & (rows < high)).sum()) for low, high in position_buckets(16384)]
    sizes = [high - low for low, high in position_buckets(16384)]
    full = [count for count, size in zip(counts, sizes, strict=True) if count < size]
    assert max(full) - min(full) <= 1
    assert all(
        c == s or c == max(full) or c == min(full) for c, s in zip(counts, sizes, strict=True)
    )


def test_everything_is_everything() -> None:
    assert Sampling.everything().rows(5).tolist() == [0, 1, 2, 3, 4]
    assert Sampling(count=9).rows(5).tolist() == [0, 1, 2, 3, 4]


def test_a_seed_names_the_sample_and_its_mean_is_unbiased() -> None:
    assert torch.equal(Sampling(count=50, seed=3).rows(4096), Sampling(count=50, seed=3).rows(4096))
    means = []
    for seed in range(60):
        rows = Sampling(count=40, seed=1000 * seed).rows(4096) + 1
        means.append(float(rows[(rows > 3072)].double().mean()))
    # The mean of evenly spaced points with a uniform offset: sd = spacing/√12 for each draw.
    found, spacing = torch.tensor(means), 1024 / 2
    assert abs(float(found.mean()) - (3072 + 4097) / 2) < 4 * spacing / 12**0.5 / 60**0.5


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="rule is 'some'; expected one of all, stratified"):
        Sampling("some")
    with pytest.raises(ValueError, match="count is 0; expected at least 1 query"):
        Sampling(count=0)
    with pytest.raises(ValueError, match="length is 0; expected at least 1 token"):
        Sampling().rows(0)
