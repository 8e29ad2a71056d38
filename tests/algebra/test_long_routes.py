"""Accumulated matrices after very many tokens: float32 against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farfield.algebra.dense import DenseFrame
from farfield.algebra.reflection import ReflectionFrame

Frames = Callable[[Tensor, Tensor | None], ReflectionFrame | DenseFrame]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(length: int, dim: int, spread: float) -> Tensor:
    """Unit vectors around one direction: the nearer they are, the less L is like the identity."""
    return torch.nn.functional.normalize(drawn(1, dim) + spread * drawn(2, length, dim), dim=-1)


def dense(size: int) -> Frames:
    """Blocks of b = size, two of them, every entry of the skew matrix of the order of 0.3."""
    generators = 0.15 * drawn(3, 2, size * (size - 1) // 2, 4)
    return lambda rows, base: DenseFrame.from_coefficients(rows, generators.to(rows.dtype), base)


CASES: dict[str, Callable[[], tuple[Frames, Tensor, int]]] = {
    "reflection, 1,048,576 tokens": lambda: (
        ReflectionFrame.from_vectors,
        correlated(2**20, 8, 1e3),
        8,
    ),
    "reflection, all alike": lambda: (
        ReflectionFrame.from_vectors,
        correlated(2**16, 16, 1e-3),
        16,
    ),
    "dense, 1,048,576 tokens": lambda: (dense(2), drawn(4, 2**20, 4), 4),
    "dense, 65,536 tokens": lambda: (dense(8), drawn(5, 2**16, 4), 16),
}


@pytest.mark.parametrize("case", CASES)
def test_routes_at_the_end_are_those_of_float64(case: str) -> None:
    """Frames are orthogonal to 1e-9 in what is handed on and to 1e-5 in what is applied, and
    transports along 1 to 4,096 tokens are float64's to 1e-5."""
    frames, rows, dim = CASES[case]()
    near = 8192
    far = frames(rows[:-near], None)
    late = frames(rows[-near:], far.last)
    exact = frames(rows[-near:].double(), None)
    blocks = late.last.unflatten(0, (-1, late.last.shape[-1]))
    one = torch.eye(blocks.shape[-1], dtype=torch.float64)
    assert (blocks.mT @ blocks - one).abs().max() < 1e-9
    key = torch.nn.functional.normalize(drawn(6, near, dim), dim=-1)
    assert (late.push(late.pull(key)) - key).abs().max() < 1e-5
    assert (late.pull(key).norm(dim=-1) - 1.0).abs().max() < 1e-5
    for route in (1, 64, 1024, 4096):
        carried, wanted = (
            frame.push(frame.pull(key.to(dtype)).roll(route, 0))[route:].double()
            for frame, dtype in ((late, torch.float32), (exact, torch.float64))
        )
        assert (carried - wanted).norm(dim=-1).max() < 1e-5


@pytest.mark.parametrize("kind", ["reflection", "dense"])
def test_long_gradients_are_summed_wide(kind: str) -> None:
    """The gradient of the first tokens is a sum over 65,536 of them."""
    length = 2**16
    frames = ReflectionFrame.from_vectors if kind == "reflection" else dense(2)
    rows, x, weight = drawn(7, length, 4), drawn(8, length, 4), drawn(9, length, 4)
    found = []
    for dtype in (torch.float32, torch.float64):
        own = rows.to(dtype).requires_grad_()
        out = frames(own, None).pull(x.to(dtype)) * weight
        (grad,) = torch.autograd.grad(out.sum(), own)
        found.append(grad.double() * own.detach().norm(dim=-1, keepdim=True))
    error = (found[0] - found[1]).norm(dim=-1).max() / found[1].norm(dim=-1).max()
    assert error < 2e-5
