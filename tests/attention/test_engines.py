"""The contract of every engine, inside its declaration and outside it.

Values and gradients against the definition's loops; `flex` is compiled, and tested on its own.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from farfield.algebra import reference as definition
from farfield.algebra.contraction import Contraction
from farfield.attention import engines
from farfield.attention.engines import TABLE, Call, Engine
from farfield.attention.engines.engine import FEATURES, FLOATS
from farfield.attention.logit import Visible

EAGER = [name for name, engine in TABLE.items() if engine.function and name != "flex"]
KEYS = 9
# What a call may ask for: query and key heads, whose potential, what is seen, d_v.
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"kv_heads": 1},
    "potential": {"potential": "query"},
    "padding": {"padded": True},
    "window": {"window": 3},
    "sinks": {"window": 2, "sinks": 2},
    "positions": {"padded": True, "positioned": True, "window": 3, "sinks": 1},
    "value dimension": {"value_dim": 7},
    "all": {
        "kv_heads": 1,
        "potential": "key",
        "padded": True,
        "positioned": True,
        "window": 3,
        "sinks": 1,
        "value_dim": 3,
    },
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 0.004, torch.bfloat16: 0.03}


def asked(
    dtype: torch.dtype,
    *,
    kv_heads: int = 2,
    potential: str | None = None,
    padded: bool = False,
    positioned: bool = False,
    window: int | None = None,
    sinks: int = 0,
    value_dim: int = 4,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs of one case: q, k, v (and the potential), and what `attend` is told by name."""
    draw = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(2, heads, KEYS, dim, generator=draw, dtype=torch.float64).to(dtype)
        for heads, dim in ((2, 4), (kv_heads, 4), (kv_heads, value_dim))
    )
    inputs, u, valid, position = [q, k, v], None, None, None
    if potential is not None:
        heads = 2 if potential == "query" else kv_heads
        steps = torch.rand(2, heads, KEYS, generator=draw, dtype=torch.float64)
        u = steps.cumsum(-1)
        inputs.append(u)
    if padded:
        valid = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]]).bool()
    if positioned:
        assert valid is not None
        position = valid.long().cumsum(-1) - valid.long()
    visible = Visible(KEYS, KEYS, valid, position, window, sinks)
    return inputs, {"potential": u, "visible": visible}


def defined(inputs: list[Tensor], visible: Visible) -> Tensor:
    """The definition's loops; a window over padding counts real tokens, as positions do."""
    u = inputs[3] if len(inputs) > 3 else None
    if u is not None:
        u = u.repeat_interleave(inputs[0].shape[1] // u.shape[1], 1)
    return definition.attention(
        *inputs[:3],
        potential=u,
        valid=visible.valid,
        window=visible.window,
        sinks=visible.sinks,
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EAGER)
def test_values_and_declared_gradients_are_the_definition(
    name: str, case: str, dtype: torch.dtype
) -> None:
    engine = TABLE[name]
    inputs, named = asked(dtype, **CASES[case])
    differentiable = "cpu" in engine.gradients
    for x in inputs:
        x.requires_grad_(differentiable)
    real = named["visible"].valid
    real = torch.ones(2, KEYS, dtype=torch.bool) if real is None else real
    weigh = real[:, None, :, None] * torch.randn(2, 2, KEYS, inputs[2].shape[-1])

    out = engines.attend(engine, *inputs[:3], **named)
    want = defined(inputs, named["visible"])

    assert out.dtype == dtype
    bound = BOUNDS[dtype]
    assert ((out - want) * weigh.sign()).abs().max() < bound
    if differentiable:
        grads = torch.autograd.grad((out * weigh).sum(), inputs)
        wanted = torch.autograd.grad((want * weigh).sum(), inputs)
        for got, expected in zip(grads, wanted, strict=True):
            assert got.dtype == expected.dtype
            assert (got - expected).abs().max() <= bound * (1 + expected.abs().max())


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 129, 257])
@pytest.mark.parametrize("queries", ["all", "few", "one"])
def test_ragged_tails_and_chunks(name: str, keys: int, queries: str) -> None:
    """Lengths beside the blocks' own, against the dense engine in float64."""
    count = {"all": keys, "few": min(keys, 7), "one": 1}[queries]
    q = torch.randn(1, 4, count, 8)
    k, v = torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)
    u = torch.rand(1, 4, keys, dtype=torch.float64).cumsum(-1)
    for visible in (Visible(count, keys), Visible(count, keys, window=50, sinks=3)):
        out = engines.attend(name, q, k, v, potential=u, visible=visible)
        want = engines.attend(
            "reference", q.double(), k.double(), v.double(), potential=u, visible=visible
        )
        torch.testing.assert_close(out.double(), want, rtol=0.0, atol=5e-6)


@pytest.mark.parametrize("name", ["sdpa", "explicit", "reference"])
def test_the_log_sum_exp(name: str) -> None:
    assert TABLE[name].log_sum_exp
    inputs, named = asked(torch.float64, **CASES["all"])
    out, lse = engines.with_lse(name, *inputs[:3], **named)
    want, sums = engines.with_lse("reference", *inputs[:3], **named)
    torch.testing.assert_close(out, want, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(lse, sums, rtol=0.0, atol=1e-12)
    half = [x.bfloat16() for x in inputs[:3]]
    assert engines.with_lse(name, *half, **named)[1].dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("window", [1, 2, 8, 20])
def test_visible_keys_are_the_window(name: str, window: int) -> None:
    """With equal logits and unit values the output is the row of weights."""
    q, k = torch.zeros(1, 1, 40, 4), torch.zeros(1, 1, 40, 4)
    v = torch.eye(40)[None, None]
    out = engines.attend(name, q, k, v, visible=Visible(40, 40, window=window))[0, 0]
    for i in range(40):
        first = max(0, i - window + 1)
        want = torch.zeros(40)
        want[first : i + 1] = 1 / (i + 1 - first)
        torch.testing.assert_close(out[i], want)
    one = engines.attend(name, q[:, :, -1:], k, v, visible=Visible(1, 40, window=window))
    torch.testing.assert_close(one[0, 0, 0], out[-1])


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("queries", [1, 4])
def test_evicted_keys_are_masked_keys(name: str, queries: int) -> None:
    """What no later query sees may be dropped: positions then jump, and nothing else changes."""
    keys, window, sinks = 30, 6, 2
    q = torch.randn(2, 2, queries, 4, dtype=torch.float64)
    k, v = (torch.randn(2, 1, keys, 4, dtype=torch.float64) for _ in range(2))
    u = torch.rand(1, 2, keys, dtype=torch.float64).cumsum(-1)
    whole = engines.attend(
        "reference", q, k, v, potential=u, visible=Visible(queries, keys, None, None, window, sinks)
    )
    kept = torch.cat((torch.arange(sinks), torch.arange(keys - queries - window + 1, keys)))
    visible = Visible(queries, len(kept), None, kept[None], window, sinks)
    out = engines.attend(
        name, q, k[:, :, kept], v[:, :, kept], potential=u[..., kept], visible=visible
    )
    torch.testing.assert_close(out, whole, rtol=0.0, atol=1e-12)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to holds NaN."""

    def poison(make: Any) -> Any:
        def made(*given: Any, **named: Any) -> Tensor:
            found = make(*given, **named)
            return found.fill_(torch.nan) if found.is_floating_point() else found

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EAGER)
@pytest.mark.usefixtures("poisoned")
def test_every_row_is_written(name: str, case: str) -> None:
    """Fully masked rows too: they are finite, and so are the gradients beside them."""
    inputs, named = asked(torch.float32, **CASES[case])
    visible: Visible = named["visible"]
    if visible.valid is not None:
        visible = replace(visible, valid=visible.valid & torch.tensor([[False], [True]]))
    differentiable = "cpu" in TABLE[name].gradients
    for x in inputs:
        x.requires_grad_(differentiable)
    out = engines.attend(name, *inputs[:3], potential=named["potential"], visible=visible)
    assert out.isfinite().all()
    if differentiable:
        for grad in torch.autograd.grad(out.sum(), inputs):
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", EAGER)
def test_autocast_rounds_products_and_no_potential(name: str) -> None:
    """u = 800 in bfloat16 would be off by two nats between neighbours."""
    q, k, v = (torch.randn(1, 2, 200, 8) for _ in range(3))
    u = 4.0 * torch.arange(200, dtype=torch.float64).expand(1, 2, -1)
    with torch.autocast("cpu", torch.bfloat16):
        out = engines.attend(name, q, k.bfloat16(), v, potential=u, visible=Visible(200, 200))
    assert out.dtype == torch.bfloat16
    want = engines.attend("reference", q, k, v, potential=u, visible=Visible(200, 200))
    torch.testing.assert_close(out.float(), want, rtol=0.0, atol=0.05)


@pytest.mark.parametrize("name", ["sdpa", "explicit", "reference", "pruned"])
def test_no_query(name: str) -> None:
    q, k = torch.zeros(2, 4, 0, 6), torch.zeros(2, 2, 5, 6)
    v, u = torch.zeros(2, 2, 5, 3), torch.zeros(1, 4, 5, dtype=torch.float64)
    out = engines.attend(name, q, k, v, potential=u, visible=Visible(0, 5))
    assert out.shape == (2, 4, 0, 3)
    none = engines.attend(name, q, k[:, :, :0], v[:, :, :0], visible=Visible(0, 0))
    assert none.shape == (2, 4, 0, 3)


# Outside the declaration.


def call(**changes: Any) -> Call:
    plain = Call("cpu", torch.float32, gradient=False, needs=frozenset(), queries=8192, keys=8192)
    return replace(plain, **changes)


ALL = frozenset(FEATURES)
POTENTIAL = frozenset({"potential"})


@pytest.mark.parametrize(
    ("asking", "expected"),
    [
        (call(), "sdpa"),
        (call(needs=frozenset({"window", "padding", "grouped"})), "sdpa"),
        (call(needs=POTENTIAL), "pruned"),
        (call(needs=ALL), "pruned"),
        (call(needs=POTENTIAL, queries=1), "sdpa"),
        (call(needs=POTENTIAL, queries=2048), "sdpa"),
        (call(needs=POTENTIAL, gradient=True), "sdpa"),
        (call(device="cuda"), "sdpa"),
        (call(device="cuda", needs=POTENTIAL, gradient=True), "flex"),
        (call(device="cuda", needs=frozenset({"window"}), dtype=torch.bfloat16), "flex"),
        (call(device="cuda", needs=POTENTIAL, queries=1), "sdpa"),
        (call(device="cuda", needs=POTENTIAL, dtype=torch.float64), "sdpa"),
        (call(way="along", needs=ALL, gradient=True), "path"),
        (call(way="along", device="cuda"), "path"),
        (call(way="trail", needs=ALL), "path"),
    ],
)
def test_auto_chooses_by_the_declarations(asking: Call, expected: str) -> None:
    assert engines.chosen("auto", asking).name == expected


@pytest.mark.parametrize("name", TABLE)
def test_what_is_not_declared_is_refused(name: str) -> None:
    """Each declaration against every device, type and gradient."""
    engine = TABLE[name]
    ways = {"frame": engine.function, "along": engine.along, "trail": engine.trail}
    refused = 0
    asked_for = product(ways, ("cpu", "cuda", "mps"), (*FLOATS, torch.float8_e4m3fn), (False, True))
    for way, device, dtype, gradient in asked_for:
        asking = call(device=device, dtype=dtype, gradient=gradient, way=way)
        served = ways[way] and device in engine.devices and dtype in engine.dtypes
        if served and (not gradient or device in engine.gradients):
            assert engines.chosen(name, asking) is engine
            continue
        refused += 1
        with pytest.raises(ValueError, match=f"engine '{name}' does not serve"):
            engines.chosen(name, asking)
    assert refused > 0


def test_a_refusal_says_what_and_who_would() -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    with pytest.raises(ValueError, match=r"'pruned' does not serve gradients on cpu .*; sdpa, exp"):
        engines.attend("pruned", q, k, v, visible=Visible(3, 3))
    with pytest.raises(ValueError, match=r"'flex' does not serve gradients on cpu .*reference"):
        engines.attend("flex", q, k, v, visible=Visible(3, 3))
    with pytest.raises(ValueError, match=r"'flex' does not serve float64 in this call"):
        engines.chosen("flex", call(dtype=torch.float64))
    with pytest.raises(ValueError, match=r"does not serve device mps in this call; no engine does"):
        engines.chosen("auto", call(device="mps"))
    with pytest.raises(ValueError, match=r"'path' does not serve device mps in this .*no engine"):
        engines.chosen("auto", call(device="mps", way="along"))
    with pytest.raises(ValueError, match=r"'path' does not serve keys in a common frame .*; sdpa,"):
        engines.attend("path", q, k, v, visible=Visible(3, 3))
    with pytest.raises(ValueError, match="no engine 'sdap'; did you mean 'sdpa'"):
        engines.attend("sdap", q, k, v, visible=Visible(3, 3))
    with pytest.raises(
        ValueError, match="engine 'pruned' gives no log-sum-exp; sdpa, explicit and"
    ):
        engines.with_lse("pruned", q.detach(), k.detach(), v.detach(), visible=Visible(3, 3))


@pytest.mark.parametrize("feature", FEATURES)
def test_an_engine_of_ones_own_serves_what_it_declares(feature: str) -> None:
    def zeros(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Tensor:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    own = Engine("own", zeros, frozenset(), FLOATS, frozenset(), ALL - {feature})
    inputs, named = asked(torch.float32, **CASES[feature])
    with pytest.raises(ValueError, match=f"engine 'own' does not serve .*{FEATURES[feature]}"):
        engines.attend(own, *inputs[:3], **named)
    able = replace(own, serves=ALL)
    assert (engines.attend(able, *inputs[:3], **named) == 0).all()


def test_the_gradient_of_a_step_is_a_gradient() -> None:
    """Nothing else of the call asks for one."""
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    w = torch.nn.functional.normalize(torch.randn(1, 2, 9, 4), dim=-1)
    beta = torch.ones(1, 2, 9, requires_grad=True)
    none = replace(TABLE["path"], name="none", gradients=frozenset())
    for steps in (Contraction(w, beta), Contraction(w.requires_grad_(), beta.detach())):
        with pytest.raises(ValueError, match=r"'none' does not serve gradients on .*; path wo"):
            engines.attend(none, q, k, v, steps, visible=Visible(9, 9))
        out = engines.attend("auto", q, k, v, steps, visible=Visible(9, 9))
        assert out.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(1, 3, 5, 4)}, r"k is \(1, 3, 5, 4\); expected \[1, a divisor of 4"),
        ({"v": torch.zeros(1, 2, 4, 4)}, r"v is \(1, 2, 4, 4\); expected \(1, 2, 5\)"),
        ({"visible": Visible(3, 5)}, "visible is for 3 queries of 5 keys, and there are 5 of 5"),
        ({"k": torch.zeros(1, 2, 5, 4).half()}, "q, k and v are torch.float32, torch.float16"),
        ({"potential": torch.zeros(1, 4, 5)}, "potential is torch.float32; it grows with length"),
        ({"potential": torch.zeros(1, 3, 5).double()}, r"expected \[1 or 1, 2 or 4, 5\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {
        "q": torch.zeros(1, 4, 5, 4),
        "k": torch.zeros(1, 2, 5, 4),
        "v": torch.zeros(1, 2, 5, 4),
        "visible": Visible(5, 5),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        engines.attend("sdpa", **given)
