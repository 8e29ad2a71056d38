"""What every mechanism of the table must be, whatever its step: one contract for all.

A mechanism that is added to the table is tested here without another line.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FULLEST, NAMES, expected, geometry, layer_of, part, rows, sequence
from torch import Tensor

from farfield.attention import Attention, DecodingState, Tokens, mechanisms
from farfield.attention.packing import Packing

CLOSE: Any = {"rtol": 0.0, "atol": 1e-11}


def close(name: str) -> Any:
    """Against a definition in float64; gates are summed in units of 2^-36 nat, 1.5e-11."""
    return {"rtol": 0.0, "atol": 3e-10} if "forget" in name else CLOSE


every_mechanism = pytest.mark.parametrize("name", NAMES)


def decode(
    layer: Attention, tokens: Tokens, cuts: list[int], valid: Tensor | None = None
) -> Tensor:
    """The layer's output when the tokens come in chunks that end at `cuts`."""
    state, out, start = DecodingState(), [], 0
    for stop in cuts:
        mask = None if valid is None else valid[:, :stop]
        out.append(layer(part(tokens, start, stop), state, mask))
        start = stop
    return torch.cat(out, 1)


@every_mechanism
def test_values_and_gradients_are_those_of_the_definition(name: str) -> None:
    valid = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1]]).bool()
    layer, tokens = layer_of(name).requires_grad_(), sequence(2, 5, valid)
    tokens = replace(tokens, hidden=tokens.hidden.requires_grad_())
    weigh = torch.randn(2, 5, tokens.hidden.shape[-1], dtype=torch.float64) * valid[..., None]
    inputs = [tokens.hidden, *layer.parameters()]

    ours = layer(tokens, valid=valid)
    theirs = expected(layer, name, geometry(), tokens)

    torch.testing.assert_close(ours[valid], theirs[valid], **close(name))
    grads = torch.autograd.grad((ours * weigh).sum(), inputs)
    wanted = torch.autograd.grad((theirs * weigh).sum(), inputs)
    for got, want in zip(grads, wanted, strict=True):
        assert want.abs().max() > 1e-4
        torch.testing.assert_close(got, want, **close(name))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 2), (4, 2, 6), (4, 1, 10)])
@pytest.mark.parametrize("name", FULLEST)
def test_every_grouping_and_head_dimension(
    name: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    changes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    layer, tokens = layer_of(name, **changes), sequence(1, 4)
    want = expected(layer, name, geometry(**changes), tokens)
    torch.testing.assert_close(layer(tokens), want, **close(name))


@pytest.mark.parametrize("name", [name for name in NAMES if not mechanisms.parse(name).carried])
def test_values_of_another_dimension(name: str) -> None:
    layer, tokens = layer_of(name, value_dim=5), sequence(2, 5)
    want = expected(layer, name, geometry(value_dim=5), tokens)
    torch.testing.assert_close(layer(tokens), want, **close(name))
    torch.testing.assert_close(decode(layer, tokens, [2, 3, 5]), want, **close(name))


def test_carried_values_have_the_dimension_of_their_frames() -> None:
    with pytest.raises(ValueError, match="carries values of dimension 5 in frames of dimension 6"):
        layer_of("random+v", value_dim=5)


@every_mechanism
def test_a_token_changes_nothing_before_it(name: str) -> None:
    layer, tokens = layer_of(name), sequence(2, 6)
    other = sequence(2, 6, seed=9)
    assert tokens.ids is not None
    assert other.ids is not None
    plain = layer(tokens)
    for t in (1, 5):
        changed = replace(
            tokens,
            hidden=torch.cat((tokens.hidden[:, :t], other.hidden[:, t:]), 1),
            ids=torch.cat((tokens.ids[:, :t], other.ids[:, t:]), 1),
        )
        out = layer(changed)
        torch.testing.assert_close(out[:, :t], plain[:, :t], rtol=0.0, atol=1e-12)
        assert (out[:, t:] - plain[:, t:]).abs().amin(1).max() > 1e-3


@every_mechanism
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_whole_equals_chunks_equals_one_at_a_time(name: str, padded: bool) -> None:
    valid = torch.tensor([[1] * 6, [0, 0, 1, 1, 0, 1]]).bool() if padded else None
    layer, tokens = layer_of(name), sequence(2, 6, valid)
    whole = layer(tokens, valid=valid)
    ways = [[split, 6] for split in range(1, 6)] + [[1, 2, 3, 4, 5, 6], [0, 2, 2, 6]]
    for cuts in ways:
        torch.testing.assert_close(decode(layer, tokens, cuts, valid), whole, **CLOSE)


@every_mechanism
def test_the_first_padding_may_come_after_shared_tokens(name: str) -> None:
    """Tokens decoded without a mask are shared by all rows until a mask tells them apart."""
    valid = torch.tensor([[1] * 6, [1, 1, 1, 0, 1, 1]]).bool()
    layer, tokens = layer_of(name), sequence(2, 6, valid)
    whole = layer(tokens, valid=valid)
    state = DecodingState()
    state.recording = True
    plain = replace(part(tokens, 0, 2), valid=None, position=torch.arange(2).unsqueeze(0))
    out = [layer(plain, state), layer(part(tokens, 2, 4), state, valid[:, :4])]
    out.append(layer(part(tokens, 4, 6), state, valid))
    torch.testing.assert_close(torch.cat(out, 1), whole, **CLOSE)
    state.crop(3)
    again = layer(part(tokens, 3, 6), state, valid)
    torch.testing.assert_close(again, whole[:, 3:], **CLOSE)


@every_mechanism
def test_a_row_of_a_padded_batch_is_that_row_alone(name: str) -> None:
    """Left, right and holes; and a full row isn't touched by its neighbours' padding."""
    valid = torch.tensor(
        [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]]
    ).bool()
    layer, batch = layer_of(name), sequence(4, 5, valid)
    out = layer(batch, valid=valid)
    for row, keep in enumerate(valid):
        alone = rows(batch, [row])
        assert alone.ids is not None
        alone = Tokens(
            alone.hidden[:, keep],
            torch.arange(int(keep.sum())).unsqueeze(0),
            alone.ids[:, keep],
            nonce=batch.nonce,
        )
        torch.testing.assert_close(out[row : row + 1, keep], layer(alone), **CLOSE)


@every_mechanism
def test_a_row_alone_is_that_row_in_a_batch(name: str) -> None:
    layer, batch = layer_of(name), sequence(3, 4)
    out = layer(batch)
    for row in range(3):
        torch.testing.assert_close(out[row : row + 1], layer(rows(batch, [row])), **CLOSE)


@every_mechanism
def test_packed_documents_are_the_documents_alone(name: str) -> None:
    """Lengths 3, 1, 5 in one row and 2, 4 with padding in the other; and an edited neighbour."""
    segments = torch.tensor([[7, 7, 7, 2, 4, 4, 4, 4, 4], [1, 1, 9, 9, 9, 9, 9, 9, 9]])
    valid = torch.ones(2, 9).bool()
    valid[1, 4], valid[1, 6:8] = False, False
    layer, tokens = layer_of(name), sequence(2, 9, valid)
    packed = replace(tokens, packing=Packing.of(segments, valid))
    out = layer(packed)
    for row, (first, last) in ((0, (0, 3)), (0, (3, 4)), (0, (4, 9)), (1, (0, 2)), (1, (2, 9))):
        keep = [t for t in range(first, last) if valid[row, t]]
        document = rows(tokens, [row])
        assert document.ids is not None
        alone = Tokens(
            document.hidden[:, keep],
            torch.arange(len(keep)).unsqueeze(0),
            document.ids[:, keep],
            nonce=tokens.nonce,
        )
        torch.testing.assert_close(out[row, keep], layer(alone)[0], **CLOSE)
    assert (out[~valid] == 0).all()
    edited = tokens.hidden.clone()
    edited[0, :3] = sequence(1, 3, seed=9).hidden[0]
    again = layer(replace(packed, hidden=edited))
    assert torch.equal(again[0, 3:], out[0, 3:])
    assert torch.equal(again[1], out[1])
    assert not torch.equal(again[0, :3], out[0, :3])


def test_documents_have_no_state_to_continue_from() -> None:
    tokens = replace(sequence(1, 4), packing=Packing.of(torch.tensor([[0, 0, 1, 1]])))
    with pytest.raises(ValueError, match="packed documents have no one state"):
        layer_of("rope")(tokens, DecodingState())


@every_mechanism
def test_what_was_cropped_was_never_decoded(name: str) -> None:
    layer, tokens, wrong = layer_of(name), sequence(2, 7), sequence(2, 7, seed=9)
    whole = layer(tokens)
    state = DecodingState()
    layer(part(tokens, 0, 2), state)
    state.recording = True
    layer(part(tokens, 2, 3), state)
    layer(part(wrong, 3, 6), state)
    state.crop(2)
    state.crop(1)
    assert state.length == 3
    torch.testing.assert_close(layer(part(tokens, 3, 7), state), whole[:, 3:], **CLOSE)
    state.crop(7)
    assert state.length == 0
    assert state.recording
    torch.testing.assert_close(layer(tokens, state), whole, **CLOSE)


@every_mechanism
def test_cropping_beyond_what_was_kept_raises_and_loses_nothing(name: str) -> None:
    layer, tokens = layer_of(name), sequence(2, 6)
    whole = layer(tokens)
    state = DecodingState()
    layer(part(tokens, 0, 4), state)
    with pytest.raises(ValueError, match="cannot crop 5 tokens: only 4 are cached"):
        state.crop(5)
    if any(trail.spare == 0 for trail in state.trails.values()):
        with pytest.raises(ValueError, match=r"cannot crop 1 tokens: .*activate_past_recording"):
            state.crop(1)
        rest = layer(part(tokens, 4, 6), state)
        torch.testing.assert_close(rest, whole[:, 4:], **CLOSE)
    else:
        state.crop(1)
        torch.testing.assert_close(layer(part(tokens, 3, 6), state), whole[:, 3:], **CLOSE)


@every_mechanism
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_rows_may_be_reordered_repeated_and_selected(name: str, padded: bool) -> None:
    valid = torch.tensor([[1] * 5, [0, 1, 1, 1, 1], [1, 1, 0, 1, 1]]).bool() if padded else None
    layer, tokens = layer_of(name), sequence(3, 5, valid)
    changes = [
        ([2, 0, 0], lambda x: x.index_select(0, torch.tensor([2, 0, 0]))),
        ([0, 0, 1, 1, 2, 2], lambda x: x.repeat_interleave(2, 0)),
        ([1], lambda x: x[torch.tensor([1])]),
    ]
    for index, change in changes:
        state = DecodingState()
        layer(part(tokens, 0, 3), state, None if valid is None else valid[:, :3])
        state.map_batch(change)
        moved = rows(tokens, index)
        want = layer(moved, valid=moved.valid)
        torch.testing.assert_close(
            layer(part(moved, 3, 5), state, moved.valid), want[:, 3:], **CLOSE
        )


@every_mechanism
def test_one_row_may_become_many(name: str) -> None:
    layer, one = layer_of(name), sequence(1, 3)
    state = DecodingState()
    state.map_batch(lambda x: x.repeat_interleave(2, 0))
    layer(one, state)
    state.map_batch(lambda x: x.repeat_interleave(2, 0))
    more = sequence(2, 5, seed=7)
    assert one.ids is not None
    assert more.ids is not None
    both = replace(
        more,
        hidden=torch.cat((one.hidden.expand(2, -1, -1), more.hidden[:, 3:]), 1),
        ids=torch.cat((one.ids.expand(2, -1), more.ids[:, 3:]), 1),
    )
    torch.testing.assert_close(layer(part(both, 3, 5), state), layer(both)[:, 3:], **CLOSE)


@pytest.mark.parametrize("name", FULLEST)
def test_no_token_and_one_token(name: str) -> None:
    layer = layer_of(name)
    empty = layer(sequence(2, 0))
    assert empty.shape == (2, 0, 10)
    one = sequence(1, 1)
    value = one.hidden @ layer.v_proj.weight.T
    value = value.unflatten(-1, (2, 1, 6)).expand(-1, -1, -1, 2, -1).flatten(2)
    # A token that sees itself alone gets its own value back: what carried it there is undone.
    torch.testing.assert_close(layer(one), value @ layer.o_proj.weight.T, **CLOSE)


@every_mechanism
def test_finite_at_64_times_the_mixing_window(name: str) -> None:
    layer = layer_of(name, dtype=torch.float32, mixing_window=8, heads=2, kv_heads=1, head_dim=6)
    with torch.no_grad():
        out = layer(sequence(1, 64 * 8, dtype=torch.float32))
    assert out.isfinite().all()


@every_mechanism
def test_fully_masked_rows_are_finite_and_pass_no_gradient_on(name: str) -> None:
    valid = torch.tensor([[0, 0, 0], [1, 1, 1]]).bool()
    layer, tokens = layer_of(name), sequence(2, 3, valid)
    tokens = replace(tokens, hidden=tokens.hidden.requires_grad_())
    out = layer(tokens, valid=valid)
    assert out.isfinite().all()
    (grad,) = torch.autograd.grad(out[1].sum(), [tokens.hidden])
    assert grad.isfinite().all()
    assert (grad[0] == 0).all()


def test_the_list_of_cases_covers_the_table() -> None:
    compositions = [mechanisms.parse(name) for name in NAMES]
    assert {c.transport.row.name for c in compositions} == {
        row.name for row in mechanisms.table() if row.kind == "transport"
    }
    assert {"rope:mixing+v", "learned:c=0+v", "learned:source=token", "alibi"} <= set(NAMES)
    assert {"random+v+forget+window:3+logn", "alibi+window:3,sinks=1"} <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
