"""Counter-based randomness: a pure function of its keys that looks like independent normals."""

import functools
import math
from statistics import NormalDist

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from farfield.algebra.hashing import hash64, normal, uniform

COUNT = 200_000
WORD = 2**64
int64s = st.integers(-(2**63), 2**63 - 1)
keys = st.lists(int64s, min_size=1, max_size=6)


def mixed(word: int) -> int:
    """SplitMix64's output function on Python integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def by_definition(*values: int) -> int:
    """h <- mix(h + gamma + mix(key + gamma)), as a signed word."""
    gamma, word = 0x9E3779B97F4A7C15, 0
    for value in values:
        word = mixed((word + gamma + mixed((value + gamma) % WORD)) % WORD)
    return word - WORD if word >= WORD // 2 else word


def test_the_mixer_is_the_published_one() -> None:
    """The first three outputs of SplitMix64 from seed 0."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [mixed(gamma * count % WORD) for count in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(keys)
def test_hash_is_its_definition(values: list[int]) -> None:
    assert hash64(*values).item() == by_definition(*values)


def test_known_values_never_change() -> None:
    """Trained models store no angles: another hash would be another model."""
    assert hash64(0).item() == -6411193824288604561
    assert hash64(1, 2, 3).item() == -6350172114877365746
    assert normal(7, 1, 2, 3, 42).item() == pytest.approx(0.5358534833077693, abs=1e-12)


@given(keys)
def test_normal_is_the_quantile_of_the_upper_bits(values: list[int]) -> None:
    u = ((by_definition(*values) % WORD >> 12) + 0.5) / 2**52
    assert uniform(*values).item() == u
    assert normal(*values).item() == pytest.approx(NormalDist().inv_cdf(u), rel=1e-9, abs=1e-12)


@given(keys, st.data())
def test_changing_any_key_changes_the_value(values: list[int], data: st.DataObject) -> None:
    assert torch.equal(hash64(*values), hash64(*values))
    place = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(int64s)
    assume(other != values[place])
    changed = [*values[:place], other, *values[place + 1 :]]
    assert hash64(*values).item() != hash64(*changed).item()


def test_order_and_number_of_keys_count() -> None:
    variants = [(1, 2), (2, 1), (1,), (2,), (1, 2, 0), (0, 1, 2), (3,), (0, 0), (0,)]
    assert len({hash64(*variant).item() for variant in variants}) == len(variants)


def test_integers_and_tensors_are_the_same_keys() -> None:
    for value in (0, 5, -1, 2**63 - 1, -(2**63)):
        assert torch.equal(hash64(3, value), hash64(3, torch.tensor(value)))


def test_keys_broadcast() -> None:
    head, block, token = torch.arange(3)[:, None, None], torch.arange(4), torch.arange(5)[:, None]
    found = hash64(9, head, token, block)
    assert found.shape == (3, 5, 4)
    assert found.dtype == torch.int64
    assert found[2, 4, 1].item() == by_definition(9, 2, 4, 1)


@pytest.mark.parametrize("split", [1, 7, 63])
def test_rows_and_chunks_see_the_values_of_the_whole(split: int) -> None:
    ids = torch.randint(0, 50_257, (3, 64, 1))
    blocks = torch.arange(8)
    whole = normal(1, 2, ids, blocks)
    assert torch.equal(normal(1, 2, ids[1:2], blocks), whole[1:2])
    parts = [normal(1, 2, ids[:, :split], blocks), normal(1, 2, ids[:, split:], blocks)]
    assert torch.equal(torch.cat(parts, 1), whole)
    one = normal(1, 2, int(ids[2, split, 0]), blocks)
    assert torch.equal(one, whole[2, split])


def test_the_generator_state_is_neither_used_nor_moved() -> None:
    before = torch.get_rng_state()
    first = normal(1, torch.arange(10))
    torch.manual_seed(99)
    assert torch.equal(normal(1, torch.arange(10)), first)
    torch.set_rng_state(before)
    normal(1, torch.arange(10))
    assert torch.equal(torch.get_rng_state(), before)


@functools.cache
def stream(varied: str) -> Tensor:
    """Numbers along one kind of key, the others fixed."""
    line = torch.arange(COUNT)
    if varied == "last key":
        return normal(0, 1, 2, line)
    if varied == "middle key":
        return normal(0, line, 2, 0)
    if varied == "first key":
        return normal(line, 1, 2, 0)
    return normal(0, torch.arange(COUNT // 500)[:, None], torch.arange(500)).flatten()


STREAMS = ["last key", "middle key", "first key", "two keys"]


@pytest.mark.parametrize("varied", STREAMS)
def test_normals_are_standard(varied: str) -> None:
    """Mean, variance, skewness and kurtosis within five standard errors."""
    z = stream(varied)
    assert z.dtype == torch.float64, varied
    assert bool(z.isfinite().all()), varied
    root = math.sqrt(COUNT)
    assert abs(z.mean().item()) < 5 / root
    assert abs(z.square().mean().item() - 1) < 5 * math.sqrt(2) / root
    assert abs(z.pow(3).mean().item()) < 5 * math.sqrt(15) / root
    assert abs(z.pow(4).mean().item() - 3) < 5 * math.sqrt(96) / root


@pytest.mark.parametrize("varied", STREAMS)
def test_normals_follow_the_normal_law(varied: str) -> None:
    """Kolmogorov-Smirnov: sqrt(n) D stays under 2.2, which chance exceeds once in 8,000."""
    z = stream(varied)
    law = torch.special.ndtr(z.sort().values)
    steps = torch.arange(1, COUNT + 1, dtype=torch.float64) / COUNT
    distance = torch.maximum(steps - law, law - steps + 1 / COUNT).max().item()
    assert distance * math.sqrt(COUNT) < 2.2, varied


@pytest.mark.parametrize("varied", STREAMS)
@pytest.mark.parametrize("lag", [1, 2, 3, 64, 500])
def test_neighbouring_keys_are_uncorrelated(varied: str, lag: int) -> None:
    """Of the numbers, and of their squares."""
    z = stream(varied)
    root = math.sqrt(COUNT - lag)
    assert abs((z[:-lag] * z[lag:]).mean().item()) < 5 / root, varied
    square = (z.square() - 1) / math.sqrt(2)
    # The product of two such squares has unit variance.
    assert abs((square[:-lag] * square[lag:]).mean().item()) < 5 / root, varied


def test_neighbouring_seeds_layers_and_heads_are_uncorrelated() -> None:
    token = torch.arange(COUNT)
    base = normal(5, 3, 2, token)
    for other in (normal(6, 3, 2, token), normal(5, 4, 2, token), normal(5, 3, 1, token)):
        assert abs((base * other).mean().item()) < 5 / math.sqrt(COUNT)


def test_one_flipped_bit_flips_half_of_all_bits() -> None:
    values = torch.arange(2_000)
    shifts = torch.arange(64)
    for bit in range(64):
        flipped = values ^ torch.tensor(1).bitwise_left_shift(bit)
        apart = hash64(4, values) ^ hash64(4, flipped)
        changed = ((apart[:, None] >> shifts) & 1).double()
        per_output = changed.mean(0)
        # 64 x 64 comparisons, each a mean of 2,000 coin flips: six standard errors.
        assert (per_output - 0.5).abs().max().item() < 6 * 0.5 / math.sqrt(2_000), f"bit {bit}"


def test_uniforms_are_open_and_even() -> None:
    u = uniform(1, torch.arange(COUNT))
    assert u.min().item() > 0.0
    assert u.max().item() < 1.0
    assert abs(u.mean().item() - 0.5) < 5 / math.sqrt(12 * COUNT)
    counts = torch.histc(u.float(), 100, 0, 1)
    chi_squared = ((counts - COUNT / 100).square() / (COUNT / 100)).sum().item()
    assert abs(chi_squared - 99) < 5 * math.sqrt(2 * 99)
