"""`reflection` and `dense` as modules: steps by definition, state, special cases."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.algebra import reference
from farfield.attention.mechanism import Carry, Geometry, Tokens, Transport
from farfield.attention.mechanisms import dense, learned, reflection, rope

GEOMETRY = Geometry(
    hidden_size=10, heads=4, kv_heads=2, head_dim=6, vocab_size=11, mixing_window=32
)
CLOSE: Any = {"rtol": 0.0, "atol": 1e-11}
HOLES = torch.tensor([[1] * 7, [0, 1, 1, 0, 1, 1, 0]]).bool()

REFLECTIONS = [
    reflection.Options(),
    reflection.Options(rank=3),
    reflection.Options(conv=3),
    reflection.Options(rank=2, conv=2, source="token"),
]
DENSE = [
    dense.Options(),
    dense.Options(block=3, c=0.5),
    dense.Options(block=2, frequencies="rotary"),
]
ALL = [*REFLECTIONS, *DENSE]


def built(options: Any, dtype: torch.dtype = torch.float64, **changes: Any) -> Transport:
    """The transport of these options, all its parameters large enough to matter."""
    torch.manual_seed(1)
    kind = reflection.Reflection if options in REFLECTIONS else dense.Dense
    transport = kind(replace(GEOMETRY, **changes), options).double()
    for parameter in transport.parameters():
        nn.init.normal_(parameter, std=0.5)
    return transport.to(dtype)


def sequence(valid: Tensor | None = HOLES, dtype: torch.dtype = torch.float64) -> Tokens:
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 7, 10, generator=draw, dtype=torch.float64).to(dtype)
    ids = torch.randint(11, (2, 7), generator=draw)
    position = torch.arange(7)[None] if valid is None else (valid.cumsum(-1) - 1).clamp(min=0)
    return Tokens(hidden, position, ids, valid)


def part(tokens: Tokens, start: int, stop: int) -> Tokens:
    cut = {
        name: value[:, start:stop]
        for name in ("hidden", "position", "ids", "valid")
        if (value := getattr(tokens, name)) is not None
    }
    return replace(tokens, **cut)


def reflection_vectors(transport: Transport, options: Any, tokens: Tokens) -> Tensor:
    """w [B, Hk, T, d] by its definition: projections, then each row's own valid inputs."""
    named = dict(transport.named_parameters())
    assert tokens.ids is not None
    data = tokens.hidden
    if options.source == "token":
        data = named["weight.weight"][tokens.ids]
    else:
        data = data @ named["weight.weight"].T
    if options.rank:
        data = data @ named["spread.weight"].T
    valid = torch.ones(2, 7).bool() if tokens.valid is None else tokens.valid
    rows = []
    for row, mask in zip(data, valid, strict=True):
        seen: list[Tensor] = []
        for token, real in zip(row, mask.tolist(), strict=True):
            if not real:
                rows.append(torch.zeros_like(token))
                continue
            seen.append(token)
            if options.conv:
                taps = named["taps"].unbind(1)[::-1]
                token = F.silu(sum(w * x for w, x in zip(taps, seen[::-1], strict=False)))
            rows.append(token)
    return torch.stack(rows).reshape(2, 7, 2, 6).transpose(1, 2)


def dense_angles(transport: Transport, options: Any, tokens: Tokens) -> Tensor:
    """Entries of S [B, Hk, T, N, b(b-1)/2] by their definition."""
    size = options.block or 6
    blocks, planes = 6 // size, size // 2
    count = blocks * planes
    if options.frequencies == "rotary":
        omega = [10000.0 ** (-b / count) for b in range(count)]
    else:
        smallest = math.sqrt(2 * math.log(10) / 32)
        omega = [smallest ** (b / max(count - 1, 1)) for b in range(count)]
    (weight,) = transport.parameters()
    data = (tokens.hidden @ weight.T).reshape(2, 7, 2, blocks, -1).transpose(1, 2)
    entries = []
    for n in range(blocks):
        own = [omega[n * planes + min(i // 2, planes - 1)] for i in range(size)]
        pairs = [(i, j) for i in range(size) for j in range(i + 1, size)]
        for index, (i, j) in enumerate(pairs):
            constant = options.c if i % 2 == 0 and j == i + 1 else 0.0
            turn = constant + data[..., n, index] / math.sqrt(size - 1)
            entries.append(math.sqrt(own[i] * own[j]) * turn)
    angle = torch.stack(entries, -1).unflatten(-1, (blocks, -1))
    return angle if tokens.valid is None else angle * tokens.valid[:, None, :, None, None]


def steps(transport: Transport, options: Any, tokens: Tokens) -> Tensor:
    if options in REFLECTIONS:
        return reference.reflection_steps(reflection_vectors(transport, options, tokens))
    return reference.dense_steps(dense_angles(transport, options, tokens))


def moved(carry: Carry, x: Tensor) -> Tensor:
    assert carry.frame is not None
    return torch.stack((carry.frame.pull(x), carry.frame.push(x)))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("valid", [None, HOLES], ids=["full", "padded"])
def test_values_and_gradients_are_those_of_the_definition(options: Any, valid: Any) -> None:
    transport, tokens = built(options), sequence(valid)
    tokens = replace(tokens, hidden=tokens.hidden.requires_grad_())
    x, weigh = drawn(3, 2, 2, 7, 6), drawn(4, 2, 2, 2, 7, 6)
    got = moved(transport(tokens, {}), x)
    frames = torch.stack(
        [reference.frames(s) for s in steps(transport, options, tokens).flatten(0, 1)]
    )
    frames = frames.unflatten(0, (2, 2))
    column = x[..., None]
    want = torch.stack(((frames.mT @ column).squeeze(-1), (frames @ column).squeeze(-1)))
    torch.testing.assert_close(got, want, **CLOSE)
    inputs = [*transport.parameters(), tokens.hidden]
    found = torch.autograd.grad((got * weigh).sum(), inputs, materialize_grads=True)
    wanted = torch.autograd.grad((want * weigh).sum(), inputs, materialize_grads=True)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert all(bool((grad != 0).any()) for grad in found[:-1])


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("valid", [None, HOLES], ids=["full", "padded"])
def test_trails_continue_fold_and_crop(options: Any, valid: Any) -> None:
    transport, tokens, x = built(options), sequence(valid), drawn(5, 2, 2, 7, 6)
    with torch.no_grad():
        whole = moved(transport(tokens, {}), x)
        for cuts in ([3, 7], [1, 2, 3, 4, 5, 6, 7]):
            state: dict[str, Any] = {}
            start, out = 0, []
            for stop in cuts:
                carry = transport(part(tokens, start, stop), state)
                out.append(moved(carry, x[:, :, start:stop]))
                joined = {k: state[k].joined(v) if state else v for k, v in carry.state.items()}
                state, start = joined, stop
            torch.testing.assert_close(torch.cat(out, -2), whole, **CLOSE)
            cropped = {name: trail.cropped(3) for name, trail in state.items()}
            ends = {name: trail.last() for name, trail in cropped.items()}
            for before in (cropped, ends):
                again = moved(transport(part(tokens, 4, 7), before), x[:, :, 4:])
                torch.testing.assert_close(again, whole[..., 4:, :], **CLOSE)


def test_dense_blocks_of_two_are_learned_rotations() -> None:
    ours = built(dense.Options(block=2))
    theirs = learned.Learned(GEOMETRY, learned.Options()).double()
    theirs.weight.weight = ours.get_parameter("weight.weight")
    x = drawn(6, 2, 2, 7, 6)
    torch.testing.assert_close(
        moved(ours(sequence(), {}), x), moved(theirs(sequence(), {}), x), **CLOSE
    )


def test_dense_without_data_is_rope() -> None:
    ours = dense.Dense(GEOMETRY, dense.Options(block=2, frequencies="rotary")).double()
    nn.init.zeros_(ours.get_parameter("weight.weight"))
    scores = []
    for transport in (ours, rope.Rope(GEOMETRY, rope.Options())):
        frame = transport(sequence(None), {}).frame
        assert frame is not None
        scores.append(frame.pull(drawn(7, 2, 2, 7, 6)) @ frame.pull(drawn(10, 2, 2, 7, 6)).mT)
    torch.testing.assert_close(scores[0], scores[1], **CLOSE)


@pytest.mark.parametrize(
    "options", [reflection.Options(), reflection.Options(conv=3), dense.Options(c=0.0)], ids=str
)
def test_a_projection_of_zero_is_no_step(options: Any) -> None:
    kind = dense.Dense if isinstance(options, dense.Options) else reflection.Reflection
    transport, x = kind(GEOMETRY, options).double(), drawn(8, 2, 2, 7, 6)
    nn.init.zeros_(transport.get_parameter("weight.weight"))
    assert torch.equal(moved(transport(sequence(), {}), x), torch.stack((x, x)))


def test_low_rank_leaves_the_other_dimensions_alone() -> None:
    """Vectors of a head lie in the span of its rows of the spread: what is orthogonal stays."""
    transport = built(REFLECTIONS[1])
    spread = transport.get_parameter("spread.weight").detach().unflatten(0, (2, 6))
    _, _, basis = torch.linalg.svd(spread.mT)
    still = basis[:, 3:].unsqueeze(0).expand(2, -1, -1, -1)  # [B, Hk, 3 directions, d]
    for direction in still.unbind(2):
        x = direction.unsqueeze(2).expand(-1, -1, 7, -1)
        with torch.no_grad():
            out = moved(transport(sequence(), {}), x)
        torch.testing.assert_close(out, torch.stack((x, x)), **CLOSE)


def test_the_convolution_starts_as_the_identity() -> None:
    transport = reflection.Reflection(GEOMETRY, reflection.Options(conv=3))
    given = torch.tensor(transport.initial_values["taps"])
    assert torch.equal(given, transport.taps.detach())
    assert torch.equal(given, torch.tensor([0.0, 0.0, 1.0]).expand(12, 3))


@pytest.mark.parametrize(("dim", "rank"), [(16, 0), (16, 4)])
def test_random_vectors_keep_near_tokens_near(dim: int, rank: int) -> None:
    """E P = (1 - 2/d)^n at the start, d the dimensions that vectors reach: within 5 standard
    errors of 500 routes, and 0.02 for a W that is not quite isotropic."""
    torch.manual_seed(3)
    options = reflection.Options(rank=rank)
    transport = reflection.Reflection(
        replace(GEOMETRY, hidden_size=1024, heads=1, kv_heads=1, head_dim=dim), options
    )
    for parameter in transport.parameters():
        nn.init.normal_(parameter, std=0.02)
    if rank:  # directions are uniform in the span only where the spread is orthogonal
        nn.init.orthogonal_(transport.get_parameter("spread.weight"))
    draw = torch.Generator().manual_seed(4)
    tokens = Tokens(torch.randn(500, 8, 1024, generator=draw), torch.arange(8)[None])
    key = torch.randn(500, 1, 1, dim, generator=draw)
    if rank:
        key = key[..., :rank] @ transport.get_parameter("spread.weight").detach().T
    key = F.normalize(key, dim=-1)
    with torch.no_grad():
        frame = transport(tokens, {}).frame
        assert frame is not None
        carried = (frame.push(key.expand(-1, -1, 8, -1)) * key).sum(-1)[:, 0]
    for n in (1, 4, 8):
        found = carried[:, n - 1]
        error = found.std() / math.sqrt(500)
        assert abs(found.mean() - (1 - 2 / (rank or dim)) ** n) < 5 * error + 0.02


@pytest.mark.parametrize("options", ALL, ids=str)
def test_what_fixes_a_step_is_computed_wide(options: Any) -> None:
    """Under autocast, and with bfloat16 weights and states: steps are those of float32."""
    transport, tokens = built(options, torch.bfloat16), sequence(dtype=torch.bfloat16)
    wide = built(options, torch.float32)
    for mine, theirs in zip(wide.parameters(), transport.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    x = drawn(9, 2, 2, 7, 6).float()
    with torch.no_grad():
        want = moved(wide(replace(tokens, hidden=tokens.hidden.float()), {}), x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = moved(transport(tokens, {}), x)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_every_parameter_fixes_a_step(options: Any) -> None:
    transport = built(options)
    assert set(transport.angle_parameters) == {name for name, _ in transport.named_parameters()}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: reflection.Reflection(GEOMETRY, reflection.Options(rank=-1)), "'rank' .* -1"),
        (lambda: reflection.Reflection(GEOMETRY, reflection.Options(conv=-2)), "'conv' .* -2"),
        (lambda: dense.Dense(GEOMETRY, dense.Options(block=4)), "'block' .* 4; .*head_dim 6"),
        (lambda: dense.Dense(GEOMETRY, dense.Options(block=1)), "'block' .* 1; .*at least 2"),
        (lambda: dense.Dense(GEOMETRY, dense.Options(std=-1.0)), "'std' .* -1"),
        (lambda: dense.Dense(replace(GEOMETRY, head_dim=11), dense.Options()), "head_dim 11"),
    ],
)
def test_options_that_mean_nothing_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_default_block_is_the_largest_divisor_up_to_eight() -> None:
    for dim, block in ((2, 2), (6, 6), (10, 5), (12, 6), (16, 8), (64, 8)):
        assert dense.Dense(replace(GEOMETRY, head_dim=dim), dense.Options()).block == block


def test_token_ids_are_needed_where_they_choose_the_vector() -> None:
    transport = built(REFLECTIONS[3])
    with pytest.raises(ValueError, match="pass input_ids, not inputs_embeds"):
        transport(replace(sequence(), ids=None), {})
    with pytest.raises(ValueError, match="vocabulary is fixed"):
        transport.resize_vocabulary(12)
    built(REFLECTIONS[0]).resize_vocabulary(12)
