"""Scaled frequencies against transformers' own, and against what their rules say by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from farfield.algebra.rotation import mixing_scales, rotary_frequencies
from farfield.algebra.scaling import Scaling, ntk, scaled, temperature, yarn

RULES: tuple[Scaling, ...] = ("linear", "ntk", "yarn")
shapes = st.tuples(
    st.sampled_from([4, 6, 8, 32, 64, 96, 128]),  # head dimension
    st.sampled_from([100.0, 1e4, 5e5]),  # base
    st.sampled_from([16, 32, 128, 512, 2048, 8192]),  # L₀
    st.floats(1.0, 256.0),  # factor
)


def theirs(
    kind: Scaling, head_dim: int, base: float, length: int, factor: float
) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and what it multiplies cosines and sines by.

    Its `dynamic` sets the base for a length of `seq_len`: with a factor of 1 that is NTK at
    s = seq_len / L₀, so s goes in as lengths.
    """
    rope: dict[str, float | str] = {"rope_theta": base, "factor": factor}
    rope["rope_type"] = {"linear": "linear", "ntk": "dynamic", "yarn": "yarn"}[kind]
    seq_len = None
    if kind == "ntk":
        rope["factor"], seq_len = 1.0, length * factor
    if kind == "yarn":
        rope["original_max_position_embeddings"] = length
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=length,
        rope_parameters=rope,
    )
    found = ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config, "cpu", seq_len=seq_len)
    return found[0], float(found[1])


@pytest.mark.parametrize("kind", RULES)
@given(shapes)
def test_frequencies_are_those_of_transformers(
    kind: Scaling, shape: tuple[int, float, int, float]
) -> None:
    head_dim, base, length, factor = shape
    ours = scaled(kind, rotary_frequencies(head_dim, base), factor, length)
    expected, attention = theirs(kind, head_dim, base, length, factor)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.float(), expected, rtol=3e-6, atol=0)
    assert temperature(kind, factor) == pytest.approx(attention, rel=1e-12)


@pytest.mark.parametrize("kind", [*RULES, "none"])
@given(shapes)
def test_a_factor_of_one_changes_nothing_to_the_bit(
    kind: Scaling, shape: tuple[int, float, int, float]
) -> None:
    head_dim, base, length, _ = shape
    for omega in (rotary_frequencies(head_dim, base), mixing_scales(head_dim, 512)):
        assert torch.equal(scaled(kind, omega, 1.0, length), omega)
    assert temperature(kind, 1.0) == 1.0


@pytest.mark.parametrize("kind", RULES)
@given(shapes)
def test_every_frequency_falls_by_at_most_the_factor(
    kind: Scaling, shape: tuple[int, float, int, float]
) -> None:
    head_dim, base, length, factor = shape
    omega = rotary_frequencies(head_dim, base)
    share = omega / scaled(kind, omega, factor, length)
    assert share.min() >= 1 - 1e-12
    assert share.max() <= factor * (1 + 1e-12)
    assert (share.diff() >= -1e-9 * factor).all()  # slower blocks are lowered more


def test_first_and_last_frequency_by_hand() -> None:
    omega = rotary_frequencies(64)
    assert scaled("linear", omega, 8.0)[[0, -1]].tolist() == (omega[[0, -1]] / 8).tolist()
    first, last = ntk(omega, 8.0)[[0, -1]].tolist()
    assert first == 1.0
    assert last == pytest.approx(float(omega[-1]) / 8, rel=1e-14)
    first, last = yarn(omega, 8.0, 512)[[0, -1]].tolist()
    assert first == 1.0
    assert last == pytest.approx(float(omega[-1]) / 8, rel=1e-14)


def test_ntk_is_a_change_of_base() -> None:
    for head_dim, base, factor in ((6, 1e4, 3.0), (64, 5e5, 16.0)):
        changed = rotary_frequencies(head_dim, base * factor ** (head_dim / (head_dim - 2)))
        torch.testing.assert_close(ntk(rotary_frequencies(head_dim, base), factor), changed,
                                   rtol=1e-13, atol=0)  # fmt: skip


def test_yarn_by_parts_by_hand() -> None:
    """d = 8, base 10⁴, L₀ = 2048: ω_b = 10^-b turns 326, 32.6, 3.26 and 0.326 times within L₀.

    32 turns lie at block log10(2048 / 2π·32) = 1.008, rounded down to 1; one turn at
    log10(2048 / 2π) = 2.513, rounded up to 3. So γ = 0, 0, ½, 1.
    """
    assert math.log10(2048 / (2 * math.pi * 32)) == pytest.approx(1.008, abs=5e-4)
    assert math.log10(2048 / (2 * math.pi)) == pytest.approx(2.513, abs=5e-4)
    expected = [1.0, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4]
    assert yarn(rotary_frequencies(8), 4.0, 2048).tolist() == pytest.approx(expected, rel=1e-12)


def test_yarn_where_no_block_turns_once_interpolates_all_but_the_first() -> None:
    omega = rotary_frequencies(16)
    found = yarn(omega, 4.0, 4)
    assert found[0] == omega[0]
    torch.testing.assert_close(found[1:], omega[1:] / 4, rtol=1e-14, atol=0)


def test_yarn_of_the_mixing_scales_leaves_what_turns_often() -> None:
    """They turn at least √(2 ln 10 / w) · L₀ / 2π times: 43 of them at w = 64 and L₀ = 1024."""
    omega = mixing_scales(32, 64)
    assert float(omega[-1]) * 1024 / (2 * math.pi) > 32
    assert torch.equal(yarn(omega, 8.0, 1024), omega)


def test_temperature_is_the_papers() -> None:
    assert temperature("yarn", math.e) == pytest.approx(1.1, rel=1e-15)
    assert temperature("yarn", 32.0) == pytest.approx(0.1 * math.log(32) + 1, rel=1e-15)
    assert temperature("linear", 32.0) == temperature("ntk", 32.0) == 1.0


def test_a_single_block_keeps_its_frequency_where_a_base_is_all_that_changes() -> None:
    omega = rotary_frequencies(2)
    assert scaled("ntk", omega, 4.0).tolist() == [1.0]
    assert scaled("yarn", omega, 4.0, 512).tolist() == [1.0]
    assert scaled("linear", omega, 4.0).tolist() == [0.25]


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, math.inf, math.nan])
def test_factors_that_are_none_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"factor is .*; expected a finite number of at least 1"):
        scaled("linear", rotary_frequencies(8), factor)


def test_what_yarn_needs_is_said() -> None:
    with pytest.raises(ValueError, match="yarn needs the training length"):
        scaled("yarn", rotary_frequencies(8), 2.0)
    with pytest.raises(ValueError, match="yarn needs frequencies that fall"):
        yarn(rotary_frequencies(8, 1.0), 2.0, 512)
