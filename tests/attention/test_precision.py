"""What length and half precision must not touch: angles, potentials, and what follows from them."""

import decimal
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FULLEST, NAMES, VOCABULARY, angles, geometry, layer_of, mixing, part, sequence
from torch import Tensor

from farfield.algebra.rotation import RotationFrame
from farfield.algebra.turns import to_radians, to_turns
from farfield.attention import Attention, DecodingState, Tokens, mechanisms
from farfield.attention.mechanisms.alibi import slopes

HALF = [torch.bfloat16, torch.float16]
ROTATIONS = ("rope", "random", "random_iid", "learned")
TRANSPORTS = [
    name
    for name in NAMES
    if "+" not in name and mechanisms.parse(name).transport.row.name in ROTATIONS
]
TURN = 2**64
FAR = 1_048_575


def frame_of(layer: Attention, tokens: Tokens) -> RotationFrame:
    frame = layer.mechanism(tokens, {}).frame
    assert isinstance(frame, RotationFrame)
    return frame


def apart(turns: Tensor, other: Tensor) -> float:
    """The largest angle between two sets of turns, in radians."""
    return float(to_radians(turns - other).abs().max())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_half_precision_modules_keep_their_angles(name: str, dtype: torch.dtype) -> None:
    """Hashed and constant turns bit for bit; learned ones as the rounded weights name them."""
    layer, tokens = layer_of(name), sequence(2, 300)
    before = frame_of(layer, tokens).turns
    half, rounded = layer.to(dtype), replace(tokens, hidden=tokens.hidden.to(dtype))
    after = frame_of(half, rounded)
    assert after.cos.dtype == torch.float32
    if mechanisms.parse(name).transport.row.name == "learned":
        angle = angles(half, name, geometry(), rounded)
        assert angle is not None
        # Float32 products of half-precision inputs, and 300 of them added up.
        assert apart(after.turns, to_turns(angle.cumsum(-2))) < 300 * 1e-6
    else:
        assert torch.equal(after.turns, before)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_autocast_does_not_reach_the_angles(name: str) -> None:
    layer, tokens = layer_of(name, dtype=torch.float32), sequence(2, 50, dtype=torch.float32)
    plain = frame_of(layer, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        inside = frame_of(layer, tokens)
    assert torch.equal(inside.turns, plain.turns)
    assert torch.equal(inside.cos, plain.cos)
    assert inside.cos.dtype == torch.float32


@pytest.mark.parametrize("way", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("name", FULLEST)
def test_half_precision_outputs_are_within_their_rounding(name: str, way: str) -> None:
    """Against float64 with the same rounded weights, relative to the largest output.

    The error of a bfloat16 layer is some 2^-8 per rounded product; 0.03 leaves room for six. Where
    logits are scaled their errors are as well, by up to log n / log L₀ times the drawn scale.
    """
    dtype = torch.float16 if way == "float16" else torch.bfloat16
    wide = layer_of(name).to(dtype).double()
    tokens = sequence(2, 200, dtype=dtype)
    want = wide(replace(tokens, hidden=tokens.hidden.double()))
    if way == "autocast":
        narrow = layer_of(name).to(dtype).float()
        with torch.autocast("cpu", dtype):
            out = narrow(replace(tokens, hidden=tokens.hidden.float()))
    else:
        narrow = layer_of(name).to(dtype)
        out = narrow(tokens)
    assert out.dtype == dtype
    error = (out.double() - want).abs().max() / want.abs().max()
    scaled = 5.0 if "logn" in name else 1.0
    assert error < scaled * (0.004 if dtype == torch.float16 else 0.03)


def test_rope_at_a_million_tokens_names_its_angle() -> None:
    """Against 50-digit arithmetic, from a bfloat16 module."""
    layer = layer_of("rope", dtype=torch.bfloat16, head_dim=10)
    tokens = replace(sequence(1, 1, dtype=torch.bfloat16), position=torch.tensor([[FAR]]))
    turns = frame_of(layer, tokens).turns.flatten().tolist()
    pi = decimal.Decimal("3.14159265358979323846264338327950288419716939937511")
    with decimal.localcontext(decimal.Context(prec=50)):
        for block, found in enumerate(turns):
            omega = decimal.Decimal(10_000) ** (decimal.Decimal(-2 * block) / 10)
            exact = (omega * FAR / (2 * pi)) % 1
            error = (decimal.Decimal(found) / TURN - exact) % 1
            assert min(error, 1 - error) * 2 * pi < 1e-9


def test_random_over_a_million_tokens_is_an_integer_sum() -> None:
    shape: dict[str, Any] = {"head_dim": 2, "heads": 1, "kv_heads": 1}
    layer = layer_of("random", dtype=torch.bfloat16, **shape)
    ids = torch.randint(VOCABULARY, (1, FAR + 1))
    tokens = Tokens(
        torch.zeros(1, FAR + 1, 1, dtype=torch.bfloat16), torch.arange(FAR + 1).unsqueeze(0), ids
    )
    each = frame_of(layer, replace(tokens, ids=torch.arange(VOCABULARY)[:, None])).turns.flatten()
    counts = torch.bincount(ids.flatten(), minlength=VOCABULARY).tolist()
    exact = sum(n * t for n, t in zip(counts, each.tolist(), strict=True)) % TURN
    assert int(frame_of(layer, tokens).turns[0, 0, -1, 0]) % TURN == exact


def test_learned_angles_over_ten_thousand_tokens() -> None:
    """A running sum in bfloat16 would stand still; what is left is ω_b in float32, 3e-8 a token."""
    layer = layer_of("learned", dtype=torch.bfloat16)
    tokens = sequence(1, 10_000, dtype=torch.bfloat16)
    angle = angles(layer, "learned", geometry(), tokens)
    assert angle is not None
    exact = to_turns(torch.remainder(angle.cumsum(-2), 2 * math.pi))
    assert apart(frame_of(layer, tokens).turns, exact) < 3e-4


def test_potentials_are_exact_at_a_million_tokens() -> None:
    layer = layer_of("alibi", dtype=torch.bfloat16)
    tokens = sequence(1, 3, dtype=torch.bfloat16)
    tokens = replace(tokens, position=torch.arange(FAR - 2, FAR + 1).unsqueeze(0))
    found = layer.mechanism(tokens, {}).potential
    assert found is not None
    assert found.dtype == torch.float64
    want = [[m * t for t in range(FAR - 2, FAR + 1)] for m in (1 / 4, 1 / 16, 1 / 64, 1 / 256)]
    assert found.tolist() == [want]


def test_what_is_forgotten_over_a_million_tokens_is_an_exact_sum() -> None:
    """From a bfloat16 module, against a float64 sum of the same gates; in chunks, to the bit."""
    layer = layer_of("forget", dtype=torch.bfloat16, heads=2, kv_heads=2)
    (gate,) = layer.mechanism.controls
    hidden = sequence(1, 1024, dtype=torch.bfloat16).hidden.repeat(1, 1024, 1)
    tokens = Tokens(hidden, torch.arange(FAR + 1).unsqueeze(0))
    whole = layer.mechanism(tokens, {})
    assert whole.potential is not None
    exact = -gate.log_gate(tokens).double().cumsum(-1)
    assert exact[..., -1].abs().min() > 1e4
    assert (whole.potential - exact).abs().max() < 1e-5
    state, parts = DecodingState(), []
    for start in range(0, FAR + 1, 300_000):
        carry = layer.mechanism(part(tokens, start, start + 300_000), state.mechanism)
        empty = hidden.new_zeros(1, 2, carry.potential.shape[-1], 0)
        state.extend(empty, empty, carry)
        parts.append(carry.potential)
    assert torch.equal(torch.cat(parts, -1), whole.potential)


def test_alibi_decodes_a_million_tokens_from_the_start_as_at_the_start() -> None:
    layer, tokens = layer_of("alibi", dtype=torch.float32), sequence(1, 8, dtype=torch.float32)
    near, state = layer(tokens), DecodingState()
    far = replace(tokens, position=tokens.position + FAR)
    out = torch.cat([layer(part(far, t, t + 1), state) for t in range(8)], 1)
    torch.testing.assert_close(out, near, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("kind", ["rotary", "mixing"])
def test_learned_with_zero_weights_is_rope(kind: str) -> None:
    rope, learned = layer_of(f"rope:{kind}"), layer_of(f"learned:{kind}")
    learned.load_state_dict(rope.state_dict(), strict=False)
    for weight in learned.mechanism.parameters():
        weight.zero_()
    tokens = sequence(2, 40)
    # One sum is ω_b added up, the other ω_b times the position: equal in integers, but for the
    # step of the first token, which no route contains.
    accumulated = frame_of(learned, tokens).turns
    accumulated = accumulated - accumulated[..., :1, :]
    assert torch.equal(accumulated, frame_of(rope, tokens).turns.expand_as(accumulated))
    torch.testing.assert_close(learned(tokens), rope(tokens), rtol=0.0, atol=1e-12)
    rope, learned = rope.float(), learned.float()
    tokens = replace(tokens, hidden=tokens.hidden.float())
    again = frame_of(learned, tokens).turns
    assert torch.equal(again - again[..., :1, :], accumulated)  # no float32 rounds the constant
    torch.testing.assert_close(learned(tokens), rope(tokens), rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("values", ["", "+v"])
def test_an_identity_step_is_no_transport(values: str) -> None:
    nope, still = layer_of("nope"), layer_of("random" + values)
    nope.load_state_dict(still.state_dict())
    still.mechanism.transport.scales = (0.0, 0.0, 0.0)  # type: ignore[union-attr]
    tokens = sequence(2, 12)
    torch.testing.assert_close(still(tokens), nope(tokens), rtol=0.0, atol=1e-14)
    still = layer_of("learned:c=0" + values)
    nope.load_state_dict(still.state_dict(), strict=False)
    for weight in still.mechanism.parameters():
        weight.zero_()
    torch.testing.assert_close(still(tokens), nope(tokens), rtol=0.0, atol=1e-14)


def test_the_first_angles_of_random_are_spread_as_its_scales() -> None:
    """10,000 ids: each block's standard deviation is its σ_b within 5 %."""
    layer = layer_of("random", vocab_size=10_000, heads=1, kv_heads=1)
    tokens = replace(sequence(10_000, 1), ids=torch.arange(10_000)[:, None])
    drawn = to_radians(frame_of(layer, tokens).turns)[:, 0, 0]
    ratio = drawn.std(0) / mixing(geometry())
    assert ((ratio - 1).abs() < 0.05)[1:].all()  # (σ_0 = 1 wraps now and then)
    assert (drawn.mean(0).abs() < 0.05).all()


def test_a_table_of_angles_is_only_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sequence(2, 20)
    kept = frame_of(layer_of("random"), tokens).turns
    monkeypatch.setattr("farfield.attention.mechanisms.random._TABLE_ELEMENTS", 0)
    assert torch.equal(frame_of(layer_of("random"), tokens).turns, kept)


def test_angles_first_drawn_in_inference_mode_serve_training() -> None:
    layer, tokens = layer_of("random+v").requires_grad_(), sequence(2, 5)
    with torch.inference_mode():
        seen = layer(tokens)
    out = layer(tokens)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), seen.clone(), rtol=0.0, atol=1e-12)
    assert layer.q_proj.weight.grad is not None


def test_layers_heads_and_seeds_draw_different_angles() -> None:
    tokens = sequence(1, 6)
    changes: list[tuple[dict[str, Any], int]]
    changes = [({}, 0), ({"layer": 2}, 0), ({}, 1), ({"seed": 4}, 0)]
    drawn = [
        frame_of(layer_of(name, **named), replace(tokens, nonce=nonce)).turns[0, head]
        for name in ("random", "random_iid")
        for named, head in changes
        for nonce in (0, 1)
    ]
    by_id, by_position = drawn[::2][:4], drawn[8:]
    for found in (by_id, by_position):
        for index, turns in enumerate(found):
            assert not any(torch.equal(turns, other) for other in found[:index])
    assert torch.equal(drawn[0], drawn[1])  # the nonce is nothing to angles of token ids


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (40, [h / 4 for h in range(1, 33)] + [h / 8 for h in range(1, 16, 2)]),
    ],
)
def test_alibi_slopes_follow_the_published_rule(heads: int, exponents: list[float]) -> None:
    assert slopes(heads).tolist() == pytest.approx([2.0**-e for e in exponents], rel=1e-15)
    layer = layer_of("alibi", heads=heads, kv_heads=heads, head_dim=2)
    found = layer.mechanism(replace(sequence(1, 1), position=torch.tensor([[3]])), {}).potential
    assert found is not None
    assert found.flatten().tolist() == pytest.approx([3 * 2.0**-e for e in exponents], rel=1e-15)


@pytest.mark.parametrize("name", ["random", "learned:source=token"])
def test_token_ids_are_asked_for(name: str) -> None:
    layer = layer_of(name)
    with pytest.raises(ValueError, match="pass input_ids, not inputs_embeds"):
        layer(replace(sequence(1, 3), ids=None))


def test_the_geometry_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key/value heads evenly"):
        geometry(kv_heads=3)
    with pytest.raises(ValueError, match="head_dim is 0; expected at least 1"):
        geometry(head_dim=0)
    with pytest.raises(ValueError, match="rope_base is -1"):
        geometry(rope_base=-1.0)
    with pytest.raises(ValueError, match="head_dim is 5; rotations need an even number"):
        layer_of("rope", head_dim=5)
    with pytest.raises(ValueError, match="mixing_window is 4 tokens"):
        layer_of("random", mixing_window=4)
    with pytest.raises(ValueError, match="option 'std' of 'learned' is -1; expected at least 0"):
        layer_of("learned:std=-1")
