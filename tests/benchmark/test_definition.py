"""The T×T definition, beside float64 loops over transports; and what it is compared with."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farfield.algebra import reference
from farfield.benchmark import definition, scaling


def matrices(w: Tensor, beta: Tensor) -> Tensor:
    """H = I - β w wᵀ. Shapes: w [..., T, d], beta [..., T] -> [..., T, d, d]."""
    return torch.eye(w.shape[-1], dtype=w.dtype) - beta[..., None, None] * (
        w[..., :, None] * w[..., None, :]
    )


def looped(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return reference.logits(q, k, steps=matrices(w, beta)).softmax(-1) @ v.double()


def given(tokens: int, strength: float | None = None) -> tuple[Tensor, ...]:
    q, k, v, w, beta = (x.double() for x in scaling.steps(tokens, 2, 6, 3, strength))
    w = w / w.norm(dim=-1, keepdim=True)
    return tuple(x.requires_grad_() for x in (q, k, v, w, beta))


@pytest.mark.parametrize("strength", [None, 0.0, 1.0, 2.0])
def test_values_and_gradients_are_those_of_the_loops(strength: float | None) -> None:
    leaves = given(7, strength)
    slope = torch.randn(1, 2, 7, 6, dtype=torch.float64)
    ours, theirs = definition.attend(*leaves), looped(*leaves)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    got = torch.autograd.grad(ours, leaves, slope)
    wanted = torch.autograd.grad(theirs, leaves, slope)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "strength"), [("contracted", None), ("reflected", 2.0)])
def test_what_is_timed_beside_it_computes_the_same(name: str, strength: float | None) -> None:
    leaves = given(150, strength)
    ours = getattr(scaling, name)(*leaves)
    torch.testing.assert_close(ours, definition.attend(*leaves), rtol=0, atol=1e-9)
    scaling.gradients(getattr(scaling, name), leaves)()


def test_steps_are_units_and_strengths_in_range() -> None:
    q, _, _, w, beta = scaling.steps(50, 3, 8, 0)
    assert q.shape == (1, 3, 50, 8)
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(1, 3, 50))
    assert bool(((beta > 0) & (beta < 2)).all())


NAIVE = """
import torch
def naive_path_attn(q, k, v, w, beta, g, scale, chunk_size=64):
    assert q.shape == (1, 9, 2, 6) and beta.shape == g.shape == (1, 9, 2) and not g.any()
    return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
"""


def peer(folder: Path, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `fla` whose import fails, with one file in it that needs nothing."""
    place = folder / "fla" / "ops" / "path_attn"
    place.mkdir(parents=True)
    (folder / "fla" / "__init__.py").write_text("raise ImportError('no Triton here')")
    if text is not None:
        (place / "naive.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "fla", raising=False)


def test_the_naive_op_is_loaded_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer(tmp_path, NAIVE, monkeypatch)
    attend = scaling.naive_path()
    assert callable(attend)
    out = attend(*given(9))
    assert out.shape == (1, 2, 9, 6)
    assert "fla" not in sys.modules


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "not installed"), ("import no_such_module", "no_such_module"), ("x = 1", "naive_path")],
)
def test_a_naive_op_that_is_not_there_is_said_so(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer(tmp_path, text, monkeypatch)
    found = scaling.naive_path()
    assert isinstance(found, str)
    assert said in found
