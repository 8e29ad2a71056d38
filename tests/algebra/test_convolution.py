"""The short convolution: its definition, padding that isn't there, chunks that are the whole."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from farfield.algebra.convolution import causal_convolution


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def definition(x: Tensor, weight: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Loops over rows, tokens and taps; the tail is what is left of the list of valid inputs."""
    kernel = weight.shape[1]
    outs, tails = [], []
    for row, mask in zip(x, valid, strict=True):
        seen = [torch.zeros_like(row[0])] * kernel
        for token, counts in zip(row, mask.tolist(), strict=True):
            seen = [*seen, token] if counts else seen
            taps = [weight[:, i] * seen[len(seen) - kernel + i] for i in range(kernel)]
            outs.append(torch.stack(taps).sum(0) if counts else torch.zeros_like(token))
            last = seen[len(seen) - kernel + 1 :]
            tails.append(torch.cat(last) if last else token.new_zeros(0))
    shape = (*x.shape[:2], -1)
    return torch.stack(outs).reshape(x.shape), torch.stack(tails).reshape(*shape[:2], len(tails[0]))


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_values_tails_and_gradients_are_those_of_the_definition(
    seed: int, length: int, kernel: int, padded: bool
) -> None:
    x, weight = drawn(seed, 2, length, 3).requires_grad_(), drawn(seed + 1, 3, kernel)
    weight.requires_grad_()
    valid = drawn(seed + 2, 2, length) > -0.3 if padded else None
    every = torch.ones(2, length, dtype=torch.bool) if valid is None else valid
    got, tails = causal_convolution(x, weight, None, valid)
    want, want_tails = definition(x, weight, every)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert torch.equal(tails, want_tails)
    assert not tails.requires_grad
    weigh = drawn(seed + 3, 2, length, 3)
    found = torch.autograd.grad((got * weigh).sum(), (x, weight))
    wanted = torch.autograd.grad((want * weigh).sum(), (x, weight), materialize_grads=True)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_chunks_and_single_tokens_are_the_whole_to_the_bit(kernel: int, padded: bool) -> None:
    x, weight = drawn(1, 2, 9, 3).float(), drawn(2, 3, kernel).float()
    valid = torch.tensor([[1] * 9, [0, 0, 1, 1, 0, 1, 0, 1, 0]]).bool() if padded else None
    whole, tails = causal_convolution(x, weight, None, valid)
    for cuts in ([0, 9], [0, 1, 9], [0, 4, 5, 9], list(range(10))):
        tail, parts = None, []
        for start, stop in pairwise(cuts):
            mask = None if valid is None else valid[:, start:stop]
            out, rows = causal_convolution(x[:, start:stop], weight, tail, mask)
            assert torch.equal(rows, tails[:, start:stop])
            parts.append(out)
            tail = rows[:, -1:]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_padding_is_passed_over_wherever_it_stands() -> None:
    x, weight = drawn(3, 4, 8, 2), drawn(4, 2, 3)
    valid = torch.tensor(
        [[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 0, 1, 0, 0]]
    ).bool()
    out, _ = causal_convolution(x, weight, None, valid)
    for row, keep in enumerate(valid):
        alone, _ = causal_convolution(x[row : row + 1, keep], weight)
        assert torch.equal(out[row : row + 1, keep], alone)
        assert bool((out[row, ~keep] == 0).all())


def test_every_tail_continues_from_its_token_and_is_a_view() -> None:
    x, weight = drawn(5, 1, 7, 3), drawn(6, 3, 4)
    whole, tails = causal_convolution(x, weight)
    assert tails.untyped_storage().nbytes() == (7 + 3) * 3 * 8
    for t in range(6):
        rest, _ = causal_convolution(x[:, t + 1 :], weight, tails[:, t : t + 1])
        assert torch.equal(rest, whole[:, t + 1 :])


def test_one_tail_may_be_shared_by_all_rows() -> None:
    x, weight = drawn(7, 3, 4, 2), drawn(8, 2, 3)
    tail = drawn(9, 1, 1, 4)
    shared, _ = causal_convolution(x, weight, tail)
    own, _ = causal_convolution(x, weight, tail.expand(3, -1, -1))
    assert torch.equal(shared, own)


@pytest.mark.parametrize("padded", [False, True])
def test_no_tokens(padded: bool) -> None:
    valid = torch.ones(2, 0, dtype=torch.bool) if padded else None
    out, tails = causal_convolution(torch.zeros(2, 0, 3), torch.ones(3, 4), None, valid)
    assert out.shape == (2, 0, 3)
    assert tails.shape == (2, 0, 9)


def test_a_diverged_input_reaches_only_the_tokens_that_see_it() -> None:
    x, weight = drawn(10, 2, 6, 2), drawn(11, 2, 3)
    x[0, 2] = torch.nan
    valid = torch.tensor([[1] * 6, [1, 1, 0, 1, 1, 1]]).bool()
    out, _ = causal_convolution(x, weight, None, valid)
    assert bool(out[0, :2].isfinite().all())
    assert bool(out[0, 2:5].isnan().all())
    assert bool(out[0, 5:].isfinite().all())
    assert bool(out[1].isfinite().all())


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 5, 3)
    with pytest.raises(ValueError, match=r"weight has shape \[4, 3\].*\[3, k\]"):
        causal_convolution(x, torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"weight has shape \[3, 0\]"):
        causal_convolution(x, torch.zeros(3, 0))
    for tail in ((2, 1, 3), (3, 1, 6), (2, 2, 6)):
        with pytest.raises(ValueError, match=r"tail has shape.*\[2 or 1, 1, 6\]"):
            causal_convolution(x, torch.zeros(3, 3), torch.zeros(tail))
