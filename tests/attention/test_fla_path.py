"""The engine `fla_path`: what it refuses everywhere, and its agreement with `path` on CUDA."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from farfield.algebra.contraction import Contraction
from farfield.attention import engines
from farfield.attention.engines import fla_path, path
from farfield.attention.logit import Visible

CUDA = torch.cuda.is_available()


def drawn(kind: torch.dtype, device: str, dim: int = 64, length: int = 300) -> tuple[Any, ...]:
    """q, k, v, contraction, log of gates [B, H, T]."""
    shape = (2, 2, length, dim)
    q = torch.randn(2, 4, length, dim).to(device, kind)
    k, v = (torch.randn(shape).to(device, kind) for _ in range(2))
    w = torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(device)
    beta = 2.0 * torch.rand(shape[:-1]).to(device)
    gate = torch.nn.functional.logsigmoid(torch.randn(2, 4, length) + 2.0).to(device)
    return q, k, v, Contraction(w, beta), gate


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    q, k, v, contraction, _ = drawn(torch.float32, "cpu")
    with pytest.raises(ValueError, match="'fla_path' does not serve device cpu in this call; path"):
        engines.attend("fla_path", q, k, v, contraction, visible=Visible(300, 300))
    with pytest.raises(
        ValueError, match="does not serve a window and device cpu in this call; path"
    ):
        engines.attend("fla_path", q, k, v, contraction, visible=Visible(300, 300, window=9))
    with pytest.raises(ValueError, match=r"head dimension is 24; engine 'fla_path' serves \(16"):
        fla_path.attend(*drawn(torch.float32, "cpu", dim=24)[:4], visible=Visible(300, 300))
    wide = Contraction(contraction.w.double(), contraction.beta)
    with pytest.raises(ValueError, match=r"steps are .*float64; engine 'fla_path' takes"):
        fla_path.attend(q, k, v, wide, visible=Visible(300, 300))


def test_the_gate_undoes_the_kernels_scale() -> None:
    """The sum of gates over √d is the difference of potentials along the route."""
    q, *_, gate = drawn(torch.float32, "cpu", length=30)
    u = -gate.double().cumsum(-1)
    sums = fla_path.log_gate(u, q).double().cumsum(1) / math.sqrt(64)
    assert sums.shape == (2, 30, 4)
    for query, source in ((29, 0), (12, 11), (5, 5)):
        torch.testing.assert_close(
            sums[:, query] - sums[:, source], u[..., source] - u[..., query], rtol=0.0, atol=1e-5
        )


def loaded(name: str) -> Any:
    """A module of flash-linear-attention, or the test is skipped."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def close(found: Tensor, want: Tensor, share: float) -> None:
    assert (found.double() - want.double()).abs().max() <= share * want.double().abs().max()


def test_the_definition_of_its_authors_agrees_with_ours() -> None:
    naive = loaded("fla.ops.path_attn.naive").naive_path_attn
    q, k, v, contraction, gate = drawn(torch.float32, "cpu")
    given = [q, k, v, contraction.w, contraction.beta, gate]
    for x in given:
        x.requires_grad_()
    u = -gate.double().cumsum(-1)
    ours = path.attend(q, k, v, contraction, potential=u, visible=Visible(300, 300))
    parts = [x.transpose(1, 2) for x in given]
    theirs = naive(*parts[:-1], parts[-1] * math.sqrt(64), 64**-0.5).transpose(1, 2)
    weight = torch.randn_like(ours)
    close(ours, theirs, 1e-5)
    grads = (torch.autograd.grad(out, given, weight) for out in (ours, theirs))
    for found, want in zip(*grads, strict=True):
        close(found, want, 1e-4)


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernels_agree_with_ours(gated: bool) -> None:
    loaded("fla.ops.path_attn")
    q, k, v, contraction, gate = drawn(torch.bfloat16, "cuda")
    given = [q, k, v, contraction.w, contraction.beta]
    for x in given:
        x.requires_grad_()
    u = -gate.double().cumsum(-1) if gated else None
    seen = Visible(300, 300)
    ours = path.attend(q, k, v, contraction, potential=u, visible=seen)
    theirs = fla_path.attend(q, k, v, contraction, potential=u, visible=seen)
    close(theirs, ours, 0.03)
    weight = torch.randn_like(ours)
    grads = (torch.autograd.grad(out, given, weight) for out in (theirs, ours))
    for found, want in zip(*grads, strict=True):
        close(found, want, 0.06)
