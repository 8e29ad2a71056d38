"""What is skipped is what the bound allows: proved here on inputs made to break it."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from farfield.attention.engines import pruned, reference, sdpa
from farfield.attention.logit import Visible
from farfield.attention.mechanisms.alibi import slopes

T = 900
"""Some fourteen granules, and a ragged one."""


def draw(
    keys: int = T, queries: int = T, dtype: torch.dtype = torch.float64, heads: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, heads, queries, 16, dtype=torch.float64)
    k, v = (torch.randn(1, heads, keys, 16, dtype=torch.float64) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def alibi(keys: int = T) -> Tensor:
    """Slopes from 1/4 down, so that heads reach 10² to 10⁴ tokens."""
    return torch.arange(keys, dtype=torch.float64) * slopes(4)[None, :, None]


def checked(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, visible: Visible, epsilon: float
) -> Tensor:
    """Asserts the bound in every row; returns the share of pairs that was skipped, [B, H]."""
    found: list[Tensor] = []
    out = pruned.attend(q, k, v, potential=u, visible=visible, epsilon=epsilon, report=found.append)
    want = reference.attend(q, k, v, potential=u, visible=visible)
    error = torch.linalg.vector_norm(out - want, dim=-1)
    largest = (
        torch.linalg.vector_norm(v, dim=-1).amax(-1).repeat_interleave(q.shape[1] // v.shape[1], 1)
    )
    allowed = epsilon * (largest[..., None] + torch.linalg.vector_norm(out, dim=-1))
    assert (error <= allowed + 1e-12).all()
    (skipped,) = found
    assert ((skipped >= 0) & (skipped < 1)).all()
    return skipped


@pytest.mark.parametrize("epsilon", [0.1, 1e-3, 1e-7, 0.0])
def test_the_bound_holds_and_steep_heads_skip(epsilon: float) -> None:
    q, k, v = draw()
    skipped = checked(q, k, v, alibi(), Visible(T, T), epsilon)[0]
    if epsilon == 0.0:
        assert (skipped == 0).all()
    else:
        assert skipped[0] > 0.5
        assert skipped[3] < 0.5
        assert (skipped.diff() <= 0).all()


def test_a_smaller_epsilon_skips_no_more() -> None:
    q, k, v = draw()
    shares = [checked(q, k, v, alibi(), Visible(T, T), eps) for eps in (1e-1, 1e-3, 1e-6, 1e-9)]
    for more, less in itertools.pairwise(shares):
        assert (less <= more).all()
    assert shares[-1][0, 0] < shares[0][0, 0]


@pytest.mark.parametrize("u", [None, torch.zeros(1, 4, T, dtype=torch.float64)], ids=["no", "zero"])
def test_without_decay_nothing_is_skipped(u: Tensor | None) -> None:
    q, k, v = draw()
    assert (checked(q, k, v, u, Visible(T, T), 1e-6) == 0).all()


def test_a_potential_that_rises_into_the_past_skips_nothing() -> None:
    q, k, v = draw()
    assert (checked(q, k, v, -alibi(), Visible(T, T), 1e-6) == 0).all()


def test_a_large_far_key_is_not_missed() -> None:
    """One key at the start that outweighs 60 nats of decay, seen by its own direction."""
    q, k, v = draw()
    u = alibi()
    k[:, :, 3] = 0.0
    k[..., 3, 0], q[..., 0] = 1e3, q[..., 0].abs() + 0.5
    v[:, :, 3] = 1e3
    skipped = checked(q, k, v, u, Visible(T, T), 1e-6)[0]
    want = reference.attend(q, k, v, potential=u, visible=Visible(T, T))
    assert (want[0, 3, -1] > 900).all()  # the far key has nearly all weight in a slow head
    assert skipped[3] == 0


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_huge_norms_skip_less_and_stay_bounded(size: float) -> None:
    q, k, v = draw()
    few = checked(q * size, k, v, alibi(), Visible(T, T), 1e-6)
    assert (few <= checked(q, k, v, alibi(), Visible(T, T), 1e-6)).all()


def test_a_self_logit_far_below_the_others_is_no_lower_bound_too_many() -> None:
    """k_i = -5 q_i: the nearest key is the worst, and Z starts at almost nothing."""
    q, _, v = draw()
    checked(q, -5 * q, v, alibi(), Visible(T, T), 1e-4)
    assert (checked(q, 5 * q, v, alibi(), Visible(T, T), 1e-4)[0, 0] > 0).all()


@pytest.mark.parametrize("kind", ["steps", "walk", "closed"])
def test_uneven_potentials(kind: str) -> None:
    """Gates that close now and then, that wander up and down, and that close for good."""
    increments = {
        "steps": (torch.rand(1, 4, T, dtype=torch.float64) < 0.01) * 40.0,
        "walk": torch.randn(1, 4, T, dtype=torch.float64) + 0.3,
        "closed": torch.full((1, 4, T), 700.0, dtype=torch.float64),
    }
    q, k, v = draw()
    skipped = checked(q, k, v, increments[kind].cumsum(-1), Visible(T, T), 1e-6)
    assert (skipped > 0.2).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("of", ["query", "key"])
def test_grouped_heads_and_a_chunk_behind_a_cache(groups: int, of: str) -> None:
    q, k, v = draw(queries=200)
    k, v = k[:, :: 4 // groups].contiguous(), v[:, :: 4 // groups].contiguous()
    u = alibi() if of == "query" else alibi()[:, :groups]
    skipped = checked(q, k, v, u, Visible(200, T), 1e-5)
    assert skipped[0, 0] > 0.5
    one = checked(q[:, :, -1:], k, v, u, Visible(1, T), 1e-5)
    assert one[0, 0] > 0.5


@pytest.mark.parametrize("positioned", [False, True])
def test_padding_windows_and_sinks(positioned: bool) -> None:
    q, k, v = (x.expand(2, -1, -1, -1) for x in draw())
    valid = torch.rand(2, T) < 0.7
    valid[1, :400] = False
    position = valid.long().cumsum(-1) - valid.long() if positioned else None
    for window in (None, 1, 200):
        visible = Visible(T, T, valid, position, window, sinks=3)
        skipped = checked(q, k, v, alibi(), visible, 1e-5)
        assert skipped[0, 0] > 0.4


def test_sinks_are_never_skipped() -> None:
    """The sinks' values are huge, and the bound is on what is skipped: the output must be exact."""
    q, k, v = draw()
    v[:, :, :3] = 1e9
    out = pruned.attend(
        q, k, v, potential=alibi(), visible=Visible(T, T, window=64, sinks=3), epsilon=1e-3
    )
    want = reference.attend(q, k, v, potential=alibi(), visible=Visible(T, T, window=64, sinks=3))
    plain = v[:, :, 3:].norm(dim=-1).amax()
    allowed = 1e-3 * (plain + out.norm(dim=-1))
    assert ((out - want).norm(dim=-1) <= allowed).all()
    assert (want[0, 0, 100:].abs().amax() < want[0, 3, 100:].abs().amin(-1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_default_is_the_rounding_of_float32(dtype: torch.dtype) -> None:
    q, k, v = draw(dtype=dtype)
    visible, found = Visible(T, T), []
    out = pruned.attend(q, k, v, potential=alibi(), visible=visible, report=found.append)
    want = reference.attend(q.double(), k.double(), v.double(), potential=alibi(), visible=visible)
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    assert out.dtype == dtype
    assert (out - want).abs().max() < bound
    assert found[0][0, 0] > 0.5


def test_the_cost_of_a_query_does_not_grow_with_length() -> None:
    """Pairs that are computed, over the number of queries, at two lengths."""
    each = []
    for keys in (2048, 8192):
        q, k, v = draw(keys, keys, torch.float32, heads=1)
        found: list[Tensor] = []
        u = torch.arange(keys, dtype=torch.float64)[None, None] / 4
        pruned.attend(q, k, v, potential=u, visible=Visible(keys, keys), report=found.append)
        each.append(float(1 - found[0]) * keys)
    assert each[1] < 1.1 * each[0]


def test_no_query_and_one_key() -> None:
    q, k, v = draw(5, 0)
    assert pruned.attend(q, k, v, visible=Visible(0, 5)).shape == (1, 4, 0, 16)
    q, k, v = draw(1, 1)
    out = pruned.attend(q, k, v, potential=alibi(1), visible=Visible(1, 1))
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("epsilon", [-1e-9, 1.0, math.nan])
def test_epsilon_is_a_share(epsilon: float) -> None:
    q, k, v = draw(3, 3)
    with pytest.raises(ValueError, match=r"epsilon is .*; expected a share of the normaliser"):
        pruned.attend(q, k, v, visible=Visible(3, 3), epsilon=epsilon)


def test_skipping_is_seen_in_the_logits_not_assumed() -> None:
    """With ε = 0 the engine is plain attention, block by block."""
    q, k, v = draw(dtype=torch.float32)
    exact = pruned.attend(q, k, v, potential=alibi(), visible=Visible(T, T), epsilon=0.0)
    other = sdpa.attend(q, k, v, potential=alibi(), visible=Visible(T, T))
    torch.testing.assert_close(exact, other, rtol=0.0, atol=1e-5)
