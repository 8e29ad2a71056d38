"""The mechanism `path`: its steps in chunks, with padding, at strength 2, and at the start."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from farfield.attention.mechanism import Geometry, Tokens
from farfield.attention.mechanisms.path import Options, Path
from farfield.attention.mechanisms.reflection import Options as ReflectionOptions
from farfield.attention.mechanisms.reflection import Reflection

CLOSE: Any = {"rtol": 0.0, "atol": 1e-11}

GEOMETRY = Geometry(
    hidden_size=20, heads=4, kv_heads=2, head_dim=6, vocab_size=11, mixing_window=32
)


def transport(options: Options) -> Path:
    """A mechanism whose parameters all matter."""
    found = Path(GEOMETRY, options).double()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return found


def read(valid: Tensor | None = None, length: int = 12) -> Tokens:
    position = torch.arange(length)[None]
    if valid is not None:
        position = (valid.cumsum(-1) - 1).clamp(min=0)
    return Tokens(torch.randn(2, length, 20, dtype=torch.float64), position, None, valid)


def part(tokens: Tokens, start: int, stop: int) -> Tokens:
    valid = None if tokens.valid is None else tokens.valid[:, start:stop]
    return replace(
        tokens,
        hidden=tokens.hidden[:, start:stop],
        position=tokens.position[:, start:stop],
        valid=valid,
    )


@pytest.mark.parametrize("conv", [0, 1, 3])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_the_mechanism_in_chunks_is_the_whole(rank: int, conv: int, padded: bool) -> None:
    mechanism = transport(Options(rank=rank, conv=conv))
    tokens = read(torch.rand(2, 12) < 0.6 if padded else None)
    whole = mechanism(tokens, {}).contraction
    assert whole is not None
    torch.testing.assert_close(
        torch.linalg.vector_norm(whole.w, dim=-1),
        torch.ones(2, 2, 12).double()
        if tokens.valid is None
        else tokens.valid[:, None].expand(-1, 2, -1).double(),
        **CLOSE,
    )
    state: dict[str, Any] = {}
    found = []
    for start, stop in ((0, 1), (1, 6), (6, 12)):
        carry = mechanism(part(tokens, start, stop), state)
        state = {name: trail.last() for name, trail in carry.state.items()}
        found.append(carry.contraction)
    torch.testing.assert_close(torch.cat([x.w for x in found], -2), whole.w, **CLOSE)
    torch.testing.assert_close(torch.cat([x.beta for x in found], -1), whole.beta, **CLOSE)


def test_padding_takes_nothing_away() -> None:
    mechanism = transport(Options(rank=3))
    valid = torch.tensor([[False, True, True, False, True], [True] * 5])
    tokens = read(valid, 5)
    padded = mechanism(tokens, {}).contraction
    real = replace(
        tokens, hidden=tokens.hidden[:1, valid[0]], position=torch.arange(3)[None], valid=None
    )
    alone = mechanism(real, {}).contraction
    assert padded is not None
    assert alone is not None
    assert (padded.beta[0, :, ~valid[0]] == 0).all()
    torch.testing.assert_close(padded.w[:1, :, valid[0]], alone.w, **CLOSE)
    torch.testing.assert_close(padded.beta[:1, :, valid[0]], alone.beta, **CLOSE)


def test_with_strength_2_the_mechanism_is_the_reflection() -> None:
    mechanism = transport(Options(rank=3, conv=3, beta=2.0))
    other = Reflection(GEOMETRY, ReflectionOptions(rank=3, conv=3)).double()
    other.load_state_dict(mechanism.state_dict())
    tokens = read()
    contraction, frame = mechanism(tokens, {}).contraction, other(tokens, {}).frame
    assert contraction is not None
    assert frame is not None
    for source, query in ((0, 0), (3, 4), (0, 11)):
        identity = torch.eye(6, dtype=torch.float64)
        moved = frame.between(source, query).grouped().push(identity.unsqueeze(-2))
        found = contraction.between(source, query)
        torch.testing.assert_close(found, moved.squeeze(-2).mT, **CLOSE)


def test_strengths_start_at_one_and_stay_between_0_and_2() -> None:
    mechanism = Path(GEOMETRY, Options())
    torch.nn.init.normal_(mechanism.strength.weight, std=0.02)
    beta = mechanism.strengths(read())
    assert mechanism.strength.initial_values == {"bias": (0.0, 0.0)}
    assert ((beta - 1).abs() < 0.3).all()
    torch.nn.init.normal_(mechanism.strength.weight, std=100.0)
    beta = mechanism.strengths(read())
    assert ((beta >= 0) & (beta <= 2)).all()
    assert beta.max() > 1.9
    assert Path(GEOMETRY, Options(bias=3.0)).strength.bias.tolist() == [3.0, 3.0]


def test_steps_stay_in_float32_under_a_narrow_model_and_autocast() -> None:
    mechanism = transport(Options(rank=3)).bfloat16()
    tokens = replace(read(), hidden=read().hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        contraction = mechanism(tokens, {}).contraction
    assert contraction is not None
    assert contraction.w.dtype == contraction.beta.dtype == torch.float32
    wide = mechanism.double()(replace(tokens, hidden=tokens.hidden.double()), {}).contraction
    assert wide is not None
    assert (contraction.w - wide.w).abs().max() < 1e-5
    assert (contraction.beta - wide.beta).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(rank=-1), "'rank' of 'path' is -1"),
        (Options(conv=-1), "'conv' of 'path' is -1"),
        (Options(beta=2.5), "'beta' of 'path' is 2.5"),
        (Options(beta=-1.0), "'beta' of 'path' is -1"),
    ],
)
def test_options_out_of_range_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Path(GEOMETRY, options)
