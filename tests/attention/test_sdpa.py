"""The engine against softmax written out in float64: every path, every block, every remainder."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from farfield.attention.engines import blocks, kernel, sdpa
from farfield.attention.logit import Visible
from farfield.attention.mechanisms.alibi import slopes


def explicit(
    q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible
) -> tuple[Tensor, Tensor]:
    """Σ_j softmax_j(q_i · k_j / √d + u_j - u_i) v_j of the last T of K tokens, as one matrix."""
    q, k, v = q.double(), k.double(), v.double()
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    table = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    i, j = torch.arange(keys - queries, keys).unsqueeze(-1), torch.arange(keys)
    if potential is not None:
        u = potential.repeat_interleave(heads // potential.shape[1], 1)
        table = table + u[:, :, None, :] - u[:, :, keys - queries :, None]
    may = (j <= i)[None, None]
    if visible.window is not None:
        position = j[None] if visible.position is None else visible.position
        at, of = position[:, None, keys - queries :, None], position[:, None, None, :]
        may = may & ((at - of < visible.window) | (of < visible.sinks))
    if visible.valid is not None:
        may = may & visible.valid[:, None, None, :]
    table = table.masked_fill(~(may | (j == i)), -math.inf)
    return table.softmax(-1) @ v, table.logsumexp(-1)


def seen(keep: str, queries: int, keys: int) -> Visible:
    """Two rows: what each case lets them see."""
    valid = torch.rand(2, keys) < 0.6
    valid[1] = False
    jumps = torch.randint(1, 3, (1, keys)).cumsum(-1) - 1
    counted = valid.long().cumsum(-1) - valid.long()
    return {
        "full": Visible(queries, keys),
        "padded": Visible(queries, keys, valid),
        "window": Visible(queries, keys, window=4),
        "sinks": Visible(queries, keys, window=3, sinks=2),
        "evicted": Visible(queries, keys, position=jumps, window=5, sinks=1),
        "both": Visible(queries, keys, valid, counted, window=2, sinks=1),
    }[keep]


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
    return torch.rand(batch, heads, keys, dtype=torch.float64).cumsum(-1).requires_grad_()


# Limits in queries and elements: what stands in the file; blocks of a few rows; few queries with a
# bias; and the path of devices whose kernel gives no log-sum-exp.
LIMITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "blocks": {"_MASKED_QUERIES": 5, "_FEW_QUERIES": 0, "_WINDOW_QUERIES": (2, 4)},
    "elements": {"_MASK_ELEMENTS": 40, "_FEW_QUERIES": 0},
    "elsewhere": {"_MASKED_QUERIES": 5, "_FEW_QUERIES": 0},
}


KEEP = ["full", "padded", "window", "sinks", "evicted", "both"]


def limit(monkeypatch: pytest.MonkeyPatch, limits: str) -> None:
    for name, value in LIMITS[limits].items():
        monkeypatch.setattr(blocks, name, value)
    if limits == "elsewhere":
        monkeypatch.setattr(kernel, "gives_lse", lambda device: False)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("lengths", [(13, 13), (5, 13), (1, 13), (1, 1)], ids=str)
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("with_potential", [None, "query", "group", "shared"])
def test_values_and_gradients_equal_softmax_written_out(
    monkeypatch: pytest.MonkeyPatch,
    limits: str,
    lengths: tuple[int, int],
    keep: str,
    with_potential: str | None,
) -> None:
    limit(monkeypatch, limits)
    # Head dimensions go round, so that each of them meets each of the rest.
    turn = KEEP.index(keep) + list(LIMITS).index(limits) + (with_potential is None)
    q, k, v = draw(2, (4, 2), lengths, [(6, 6), (4, 10), (8, 3)][turn % 3])
    shapes = {"query": (2, 4), "group": (2, 2), "shared": (1, 4)}
    u = random_walk(*shapes[with_potential], lengths[1]) if with_potential else None
    visible = seen(keep, *lengths)

    ours = sdpa.attend(q, k, v, potential=u, visible=visible)
    want, lse = explicit(q, k, v, u, visible)

    torch.testing.assert_close(ours, want, rtol=0.0, atol=1e-12)
    weigh = torch.randn_like(want)
    inputs = [q, k, v] if u is None else [q, k, v, u]
    grads = torch.autograd.grad((ours * weigh).sum(), inputs)
    wanted = torch.autograd.grad((want * weigh).sum(), inputs)
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-12)
    if limits != "elsewhere":
        again, sums = sdpa.with_lse(q, k, v, potential=u, visible=visible)
        torch.testing.assert_close(again, want, rtol=0.0, atol=1e-12)
        torch.testing.assert_close(sums, lse, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("limits", ["whole", "blocks", "elsewhere"])
@pytest.mark.parametrize("queries", [300, 9, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_half_precision_never_rounds_the_potential(
    monkeypatch: pytest.MonkeyPatch,
    limits: str,
    queries: int,
    dtype: torch.dtype,
    autocast: bool,
) -> None:
    """Rounded to bfloat16, u = 200 would be off by half a nat between neighbours."""
    limit(monkeypatch, limits)
    q, k, v = (x.detach().to(dtype) for x in draw(1, (4, 4), (queries, 300), (8, 8)))
    potential = torch.arange(300, dtype=torch.float64) * slopes(12)[None, 8:, None]
    visible = Visible(queries, 300)
    with torch.autocast("cpu", dtype, enabled=autocast):
        ours = sdpa.attend(q, k, v, potential=potential, visible=visible)
    assert ours.dtype == dtype
    bound = 0.02 if dtype == torch.bfloat16 else 0.003
    want, _ = explicit(q, k, v, potential, visible)
    torch.testing.assert_close(ours.double(), want, rtol=0.0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("keep", ["full", "padded", "sinks"])
@pytest.mark.parametrize("with_potential", [False, True], ids=["", "potential"])
def test_gradients_in_narrow_types_are_within_their_rounding(
    dtype: torch.dtype, keep: str, with_potential: bool
) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in draw(2, (4, 2), (90, 90), (8, 8)))
    u = random_walk(1, 4, 90) if with_potential else None
    visible = seen(keep, 90, 90)
    inputs = [q, k, v] if u is None else [q, k, v, u]
    weigh = torch.randn(2, 4, 90, 8, dtype=torch.float64)
    out = sdpa.attend(q, k, v, potential=u, visible=visible)
    want, _ = explicit(q, k, v, u, visible)
    grads = torch.autograd.grad((out * weigh).sum(), inputs)
    wanted = torch.autograd.grad((want * weigh).sum(), inputs)
    bound = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 3e-6}[dtype]
    for got, expected in zip(grads, wanted, strict=True):
        assert (got - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("queries", [1, 24])
def test_near_differences_stay_exact_60000_tokens_from_the_start(queries: int) -> None:
    keys = 60_000 + queries
    q, k, v = (x.detach().float() for x in draw(1, (4, 4), (queries, keys), (8, 8)))
    potential = torch.arange(keys, dtype=torch.float64) * slopes(12)[None, 7:11, None]
    visible = Visible(queries, keys)
    ours = sdpa.attend(q, k, v, potential=potential, visible=visible)
    want, _ = explicit(q, k, v, potential, visible)
    torch.testing.assert_close(ours.double(), want, rtol=0.0, atol=3e-6)


def test_near_differences_stay_close_inside_a_long_block() -> None:
    """A centre 32 nats away costs their float32 rounding, 2e-6 a logit."""
    q, k, v = (x.detach().float() for x in draw(1, (4, 4), (700, 700), (8, 8)))
    potential = torch.arange(700, dtype=torch.float64) * slopes(12)[None, 8:, None]
    ours = sdpa.attend(q, k, v, potential=potential, visible=Visible(700, 700))
    want, _ = explicit(q, k, v, potential, Visible(700, 700))
    torch.testing.assert_close(ours.double(), want, rtol=0.0, atol=5e-6)


def test_a_constant_added_to_the_potential_changes_nothing() -> None:
    q, k, v = (x.detach().float() for x in draw(1, (2, 2), (19, 19), (4, 4)))
    potential, visible = random_walk(1, 2, 19).detach(), Visible(19, 19)
    near = sdpa.attend(q, k, v, potential=potential, visible=visible)
    far = sdpa.attend(q, k, v, potential=potential + 2.0**19, visible=visible)
    torch.testing.assert_close(far, near, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("keys", [0, 5])
def test_no_query(keys: int) -> None:
    q, k, v = draw(2, (4, 2), (0, keys), (6, 3))
    u, visible = random_walk(1, 4, keys), Visible(0, keys)
    assert sdpa.attend(q, k, v, visible=visible).shape == (2, 4, 0, 3)
    assert sdpa.attend(q, k, v, potential=u, visible=visible).shape == (2, 4, 0, 3)
    out, lse = sdpa.with_lse(q, k, v, visible=visible)
    assert (out.shape, lse.shape) == ((2, 4, 0, 3), (2, 4, 0))


def test_a_window_costs_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys given to the kernel: no more than the window, the sinks and a block for each query."""
    given: list[tuple[int, int]] = []
    attend = kernel.attend

    def counting(q: Tensor, k: Tensor, *rest: Any) -> Any:
        given.append((q.shape[-2], k.shape[-2]))
        return attend(q, k, *rest)

    monkeypatch.setattr(kernel, "attend", counting)
    q, k, v = (x.detach().float() for x in draw(1, (2, 1), (3000, 3000), (4, 4)))
    sdpa.attend(q, k, v, visible=Visible(3000, 3000, window=128, sinks=4))
    assert sum(rows for rows, _ in given) == 3000
    assert max(keys for _, keys in given) <= 128 + 64 + 4


def test_opcheck() -> None:
    """Schema, fake tensors and the registered gradient agree with what the operators do."""
    q, k, v = draw(2, (4, 2), (13, 13), (6, 4))
    u, visible = random_walk(1, 4, 13), seen("both", 13, 13)
    given = (q, k, v, u, visible.valid, visible.position, 2, 1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(blocks.blocks, given, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", ["plain", "potential", "padded", "window"])
def test_compiled_whole_and_not_for_each_length(kind: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, valid: Tensor | None) -> Tensor:
        window = 7 if kind == "window" else None
        visible = Visible(q.shape[-2], k.shape[-2], valid, window=window)
        return sdpa.attend(q, k, v, potential=u, visible=visible) * 2.0

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for queries in (*range(1, 30, 3), 40):
        keys = queries + 5 * (queries % 2)
        q, k, v = draw(2, (4, 2), (queries, keys), (4, 4))
        u = random_walk(1, 4, keys) if kind == "potential" else None
        valid = torch.ones(2, keys, dtype=torch.bool) if kind == "padded" else None
        out = compiled(q, k, v, u, valid)
        out.sum().backward()
        torch.testing.assert_close(out, run(q, k, v, u, valid))
        assert q.grad is not None
    assert counter.frame_count <= 4
