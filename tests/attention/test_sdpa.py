"""The engine against softmax written out in float64: every path, every block, every remainder."""

import math

import pytest
import torch
from torch import Tensor

from farfield.attention.engines import sdpa
from farfield.attention.logit import visible
from farfield.attention.mechanisms.alibi import slopes


def explicit(
    q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """Σ_j softmax_j(q_i · k_j / √d + u_j - u_i) v_j of the last T of K tokens, as one matrix."""
    q, k, v = q.double(), k.double(), v.double()
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    table = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    i, j = torch.arange(keys - queries, keys).unsqueeze(-1), torch.arange(keys)
    if potential is not None:
        u = potential.repeat_interleave(heads // potential.shape[1], 1)
        table = table + u[:, :, None, :] - u[:, :, keys - queries :, None]
    seen = j <= i
    if valid is not None:
        seen = (seen & valid[:, None, None, :]) | (j == i)
    return table.masked_fill(~seen, -math.inf).softmax(-1) @ v


def draw(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of [batch, (H, Hk), (T, K), (d, d_v)] in float64, with gradients."""
    q = torch.randn(batch, heads[0], lengths[0], dims[0], dtype=torch.float64)
    k = torch.randn(batch, heads[1], lengths[1], dims[0], dtype=torch.float64)
    v = torch.randn(batch, heads[1], lengths[1], dims[1], dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def random_walk(batch: int, heads: int, keys: int) -> Tensor:
    """A potential of uneven increments, as a forget gate makes it."""
    return torch.rand(batch, heads, keys, dtype=torch.float64).cumsum(-1)


# Mask and bias limits in elements: what stands in the file, blocks of a few rows with a bias, and
# blocks of a few rows with the potential riding.
LIMITS = {"whole": (2**22, 2**18, 256), "bias": (40, 2**18, 256), "riding": (40, 0, 3)}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("dims", [(6, 6), (4, 10), (8, 3)], ids=["d=dv", "d<dv", "d>dv"])
@pytest.mark.parametrize("lengths", [(13, 13), (5, 13), (1, 13), (1, 1)], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("with_potential", [None, "query", "group", "shared"])
def test_values_and_gradients_equal_softmax_written_out(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int, int],
    dims: tuple[int, int],
    lengths: tuple[int, int],
    padded: bool,
    with_potential: str | None,
) -> None:
    monkeypatch.setattr(sdpa, "_MASK_ELEMENTS", limits[0])
    monkeypatch.setattr(sdpa, "_BIAS_ELEMENTS", limits[1])
    monkeypatch.setattr(sdpa, "_RIDING_QUERIES", limits[2])
    q, k, v = draw(2, (4, 2), lengths, dims)
    keys = lengths[1]
    shapes = {"query": (2, 4), "group": (2, 2), "shared": (1, 4)}
    potential = random_walk(*shapes[with_potential], keys) if with_potential else None
    valid = None
    if padded:
        valid = torch.rand(2, keys) < 0.6
        valid[1] = False

    ours = sdpa.attend(q, k, v, potential=potential, valid=valid)
    want = explicit(q, k, v, potential, valid)

    torch.testing.assert_close(ours, want, rtol=0.0, atol=1e-12)
    weigh = torch.randn_like(want)
    grads = torch.autograd.grad((ours * weigh).sum(), (q, k, v))
    wanted = torch.autograd.grad((want * weigh).sum(), (q, k, v))
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("limits", [(2**22, 2**18, 256), (2**22, 0, 256), (2**22, 0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_half_precision_never_rounds_the_potential(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int, int],
    dtype: torch.dtype,
    autocast: bool,
) -> None:
    """Rounded to bfloat16, u = 200 would be off by half a nat between neighbours."""
    monkeypatch.setattr(sdpa, "_MASK_ELEMENTS", limits[0])
    monkeypatch.setattr(sdpa, "_BIAS_ELEMENTS", limits[1])
    monkeypatch.setattr(sdpa, "_RIDING_QUERIES", limits[2])
    q, k, v = (x.detach().to(dtype) for x in draw(1, (4, 4), (300, 300), (8, 8)))
    potential = torch.arange(300, dtype=torch.float64) * slopes(12)[None, 8:, None]
    with torch.autocast("cpu", dtype, enabled=autocast):
        ours = sdpa.attend(q, k, v, potential=potential)
    assert ours.dtype == dtype
    bound = 0.02 if dtype == torch.bfloat16 else 0.003
    torch.testing.assert_close(ours.double(), explicit(q, k, v, potential), rtol=0.0, atol=bound)


@pytest.mark.parametrize("queries", [1, 24])
def test_near_differences_stay_exact_60000_tokens_from_the_start(queries: int) -> None:
    keys = 60_000 + queries
    q, k, v = (x.detach().float() for x in draw(1, (4, 4), (queries, keys), (8, 8)))
    potential = torch.arange(keys, dtype=torch.float64) * slopes(12)[None, 7:11, None]
    ours = sdpa.attend(q, k, v, potential=potential)
    torch.testing.assert_close(ours.double(), explicit(q, k, v, potential), rtol=0.0, atol=3e-6)


def test_near_differences_stay_close_inside_a_long_block() -> None:
    """A centre 256 queries away costs a float32 rounding of a few hundred nats, 3e-5."""
    q, k, v = (x.detach().float() for x in draw(1, (4, 4), (700, 700), (8, 8)))
    potential = torch.arange(700, dtype=torch.float64) * slopes(12)[None, 8:, None]
    ours = sdpa.attend(q, k, v, potential=potential)
    torch.testing.assert_close(ours.double(), explicit(q, k, v, potential), rtol=0.0, atol=3e-5)


def test_a_constant_added_to_the_potential_changes_nothing() -> None:
    q, k, v = (x.detach().float() for x in draw(1, (2, 2), (9, 9), (4, 4)))
    potential = random_walk(1, 2, 9)
    near = sdpa.attend(q, k, v, potential=potential)
    far = sdpa.attend(q, k, v, potential=potential + 2.0**19)
    torch.testing.assert_close(far, near, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("keys", [0, 5])
def test_no_query(keys: int) -> None:
    q, k, v = draw(2, (4, 2), (0, keys), (6, 3))
    assert sdpa.attend(q, k, v).shape == (2, 4, 0, 3)
    assert sdpa.attend(q, k, v, potential=random_walk(1, 4, keys)).shape == (2, 4, 0, 3)


def test_visibility_is_causal_valid_and_self() -> None:
    device = torch.device("cpu")
    causal = visible(1, 3, 3, None, device)
    assert causal.tolist() == [[True, True, False], [True, True, True]]
    valid = torch.tensor([[False, True, False, True]])
    seen = visible(1, 3, 3, valid, device)
    assert seen.tolist() == [[[[False, True, False], [False, True, True]]]]
