"""Constant angles omega_b are Llama's rotary embedding: in sign, in pairing, far out."""

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from farfield.algebra.rotation import RotationFrame, rotary_frequencies
from farfield.algebra.turns import to_turns


def llama(head_dim: int, base: float) -> LlamaRotaryEmbedding:
    rope = {"rope_type": "default", "rope_theta": base}
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=head_dim, num_attention_heads=1, rope_parameters=rope)
    )


def frame_at(head_dim: int, positions: int, before: int = 0, base: float = 1e4) -> RotationFrame:
    """Frames of tokens at positions before + 1 ... before + positions, of float32 angles."""
    omega = rotary_frequencies(head_dim, base)
    start = to_turns(omega)[None] * before  # int64 multiplication wraps as repeated addition does
    turns = start + to_turns(omega).expand(positions, -1).cumsum(0)
    return RotationFrame.from_turns(turns)


def exact_phase(omega: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """cos and sin of omega * position, each omega taken as the float64 it is."""
    with mpmath.workdps(40):
        phases = [mpmath.mpf(w) * position for w in omega.tolist()]
        cos = [float(mpmath.cos(phase)) for phase in phases]
        sin = [float(mpmath.sin(phase)) for phase in phases]
    return torch.tensor(cos, dtype=torch.float64), torch.tensor(sin, dtype=torch.float64)


@pytest.mark.parametrize(("head_dim", "base"), [(2, 1e4), (8, 1e4), (64, 1e4), (64, 5e5)])
def test_frequencies_are_llamas(head_dim: int, base: float) -> None:
    ours = rotary_frequencies(head_dim, base)
    assert ours.dtype == torch.float64
    assert ours.shape == (head_dim // 2,)
    torch.testing.assert_close(ours.float(), llama(head_dim, base).inv_freq, rtol=3e-7, atol=0)


@pytest.mark.parametrize("head_dim", [2, 8, 64])
@pytest.mark.parametrize("base", [1e4, 5e5])
def test_pull_is_llamas_rotation(head_dim: int, base: float) -> None:
    length = 8
    q, k = torch.rand(2, 3, length, head_dim) - 0.5, torch.rand(2, 1, length, head_dim) - 0.5
    omega = rotary_frequencies(head_dim, base).float()
    frame = RotationFrame.from_angles(omega.expand(length, -1))
    positions = torch.arange(1, length + 1)[None]  # the step of the first token is included
    want_q, want_k = apply_rotary_pos_emb(q, k, *llama(head_dim, base)(q, positions))
    torch.testing.assert_close(frame.pull(q), want_q, rtol=0, atol=1e-6)
    torch.testing.assert_close(frame.pull(k), want_k, rtol=0, atol=1e-6)


def test_scores_are_llamas_whatever_position_comes_first() -> None:
    length, head_dim = 64, 32
    q, k = torch.randn(1, 2, length, head_dim), torch.randn(1, 2, length, head_dim)
    frame = RotationFrame.from_angles(rotary_frequencies(head_dim).float().expand(length, -1))
    theirs = apply_rotary_pos_emb(q, k, *llama(head_dim, 1e4)(q, torch.arange(length)[None]))
    ours = frame.pull(q) @ frame.pull(k).mT
    torch.testing.assert_close(ours, theirs[0] @ theirs[1].mT, rtol=0, atol=2e-4)


@pytest.mark.parametrize("position", [65_535, 1_048_575])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_far_positions_against_exact_angles(position: int, head_dim: int) -> None:
    frame = frame_at(head_dim, 1, before=position - 1)
    cos, sin = exact_phase(rotary_frequencies(head_dim), position)
    torch.testing.assert_close(frame.cos[0].double(), cos, rtol=0, atol=4e-7)
    torch.testing.assert_close(frame.sin[0].double(), sin, rtol=0, atol=4e-7)
    x = torch.randn(1, head_dim, dtype=torch.float64)
    first, second = x.chunk(2, -1)
    exact = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(frame.pull(x), exact, rtol=0, atol=4e-6)


def test_a_whole_context_of_65_536_tokens_ends_exactly() -> None:
    """Through `from_angles`, with float32 angles taken as the numbers they are."""
    omega = rotary_frequencies(16).float()
    frame = RotationFrame.from_angles(omega.expand(65_536, -1))
    for position in (1, 4_096, 65_536):
        cos, sin = exact_phase(omega.double(), position)
        torch.testing.assert_close(frame.cos[position - 1].double(), cos, rtol=0, atol=4e-7)
        torch.testing.assert_close(frame.sin[position - 1].double(), sin, rtol=0, atol=4e-7)


def test_a_float32_table_errs_a_thousand_times_more() -> None:
    """What the fixed-point turns are for: the usual table at position 65,535."""
    exact = torch.cat(exact_phase(rotary_frequencies(64), 65_535))
    cos, sin = llama(64, 1e4)(torch.zeros(1, 1, 64), torch.tensor([[65_535]]))
    theirs = torch.cat([cos[0, 0, :32], sin[0, 0, :32]]).double()
    frame = frame_at(64, 1, before=65_534)
    ours = torch.cat([frame.cos[0], frame.sin[0]]).double()
    assert (theirs - exact).abs().max().item() > 1000 * (ours - exact).abs().max().item()


def test_casting_a_model_to_bfloat16_leaves_angles_alone() -> None:
    """bfloat16 vectors at position 65,535: the only rounding is that of the result."""
    x = torch.randn(1, 64).to(torch.bfloat16)
    frame = frame_at(64, 1, before=65_534)
    cos, sin = exact_phase(rotary_frequencies(64), 65_535)
    first, second = x.double().chunk(2, -1)
    exact = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(frame.pull(x).double(), exact, rtol=2**-8, atol=1e-5)
