"""FlexAttention, compiled: what it declares, at lengths beside the blocks' own, compiled once.

A compilation takes tens of seconds where there is a C++ compiler, so that one kind of call carries
most tests.
"""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from farfield.attention import engines
from farfield.attention.engines import flex
from farfield.attention.logit import Visible

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_a_compiler = pytest.mark.skipif(
    not CUDA and not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="no C++ compiler (g++, clang++ or c++) on the path",
)
needs_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device: gradients are declared there")
patient = pytest.mark.timeout(1200)

SEEN: dict[str, tuple[int, int, dict[str, int]]] = {
    "causal": (300, 300, {}),
    "chunk": (17, 301, {}),
    "one": (1, 1, {}),
    "two blocks": (256, 256, {}),
    "window of one": (77, 77, {"window": 1}),
    "decode": (1, 700, {"window": 500, "sinks": 4}),
    "window": (600, 600, {"window": 128}),
    "sinks": (600, 600, {"window": 200, "sinks": 130}),
}


def draw(
    queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v of grouped heads, and a potential far from the start."""
    q = torch.randn(2, 4, queries, 16, device=DEVICE).to(dtype)
    k, v = (torch.randn(2, 2, keys, 16, device=DEVICE).to(dtype) for _ in range(2))
    u = 3e5 + torch.rand(1, 4, keys, dtype=torch.float64, device=DEVICE).cumsum(-1)
    return q, k, v, u


def kept(padded: bool, queries: int, keys: int, named: dict[str, int]) -> Visible:
    valid, position = None, None
    if padded:
        valid = torch.rand(2, keys, device=DEVICE) < 0.7
        valid[1] = False
        position = valid.long().cumsum(-1) - valid.long()
    return Visible(queries, keys, valid, position, **named)


def agrees(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, visible: Visible) -> float:
    """The largest distance from the dense definition."""
    out = engines.attend("flex", q, k, v, potential=u, visible=visible)
    assert out.dtype == q.dtype
    wide = [x.double() for x in (q, k, v)]
    want = engines.attend("reference", *wide, potential=u, visible=visible)
    return float((out - want).abs().max())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Compilations without their C++: Dynamo's guards are what decides on another one."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex._attend, backend=counter, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    yield counter
    torch._dynamo.reset()


def test_lengths_do_not_compile_again(counted: CompileCounter) -> None:
    for queries, keys, named in SEEN.values():
        for padded in (False, True):
            q, k, v, u = draw(queries, keys)
            visible = kept(padded, queries, keys, named)
            assert agrees(q, k, v, u, visible) < 2e-6
    assert counted.frame_count == 1


@needs_a_compiler
@patient
def test_every_length_window_and_padding_of_one_kind() -> None:
    torch._dynamo.reset()
    for queries, keys, named in SEEN.values():
        for padded in (False, True):
            q, k, v, u = draw(queries, keys)
            visible = kept(padded, queries, keys, named)
            assert agrees(q, k, v, u, visible) < 2e-6, (queries, keys, named, padded)
    # Visible keys = window: with equal logits the output is their mean index.
    q, k, v, u = (torch.zeros_like(x) for x in draw(300, 300))
    v[:] = torch.arange(300, device=DEVICE)[:, None]
    out = engines.attend("flex", q, k, v, potential=u, visible=Visible(300, 300, window=7))
    i = torch.arange(300, device=DEVICE)
    torch.testing.assert_close(out[0, 0, :, 0], (i + (i - 6).clamp(min=0)) / 2)


@needs_a_compiler
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@patient
def test_half_precision_never_rounds_the_potential(dtype: torch.dtype, bound: float) -> None:
    q, k, v, u = draw(300, 300, dtype)
    assert agrees(q, k, v, u, kept(True, 300, 300, {"window": 90, "sinks": 3})) < bound


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@patient
def test_gradients_where_they_are_declared(dtype: torch.dtype) -> None:
    q, k, v, u = (x.requires_grad_() for x in draw(300, 300, dtype))
    visible = kept(True, 300, 300, {"window": 90, "sinks": 3})
    out = engines.attend("flex", q, k, v, potential=u, visible=visible)
    want = engines.attend("reference", q, k, v, potential=u, visible=visible)
    bound = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    assert (out - want).abs().max() < bound
    grads = torch.autograd.grad(out.float().sum(), [q, k, v, u])
    wanted = torch.autograd.grad(want.float().sum(), [q, k, v, u])
    for got, expected in zip(grads, wanted, strict=True):
        assert (got - expected).abs().max() < bound * (1 + expected.abs().max())


@pytest.mark.skipif(CUDA, reason="CUDA has gradients")
def test_no_gradient_on_the_cpu() -> None:
    q, k, v, u = draw(3, 3)
    with pytest.raises(ValueError, match=r"'flex' does not serve gradients on cpu"):
        engines.attend("flex", q.requires_grad_(), k, v, potential=u, visible=Visible(3, 3))


def test_no_query() -> None:
    q, k, v, u = draw(0, 5)
    assert engines.attend("flex", q, k, v, potential=u, visible=Visible(0, 5)).shape == q.shape
