"""Every intervention against its definition, written out pair by pair in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.algebra.contraction import Contraction
from farfield.attention.logit import Visible
from farfield.attention.mechanisms.alibi import slopes
from farfield.data.tokens import TokenStream
from farfield.diagnosis import engines
from farfield.diagnosis.engines import ALONG, NAMES, Far, engine, random_maps
from farfield.diagnosis.interventions import run, serving, under
from farfield.evaluation.plan import LadderSettings

W, L0 = 6, 8


def dense(
    name: str,
    far: Far,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Tensor | None,
    visible: Visible,
) -> Tensor:
    """Row by row: all logits, then what the intervention does to the far ones, then softmax."""
    q, k, v = (x.double() for x in (q, k, v))
    batch, heads, queries, dim = q.shape
    group = heads // k.shape[1]
    turns = random_maps(far.seed, k.shape[1], dim, far.planes)
    seen = visible.tile(visible.keys - queries, visible.keys, 0, visible.keys, "cpu")
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    for b, h, r in np.ndindex(batch, heads, queries):
        i = visible.keys - queries + r
        j = torch.arange(visible.keys)[seen[r]]
        g = h // group
        distant = i - j >= far.near_window
        key, value = k[b, g, j].clone(), v[b, g, j].clone()
        if name == "far_frame":
            key[distant] = key[distant] @ turns[g].T
            if far.carried:
                value[distant] = value[distant] @ turns[g].T
        s = key @ q[b, h, r] / math.sqrt(dim)
        if name == "log_n":
            s = s * max(1.0, math.log(len(j)) / math.log(far.train_length))
        if potential is not None:
            u = potential[b % potential.shape[0], h * potential.shape[1] // heads]
            s = s + u[j] - u[i]
        if name == "alibi":
            s = s - slopes(heads)[h] * (i - j)
        if name == "far_logits_mean" and distant.any():
            s = torch.where(distant, s[distant].mean(), s)
        if name == "far_masked":
            s = torch.where(distant, -math.inf, s)
        weight = s.softmax(0)
        if name == "far_values_dropped":
            weight = torch.where(distant, 0.0, weight)
        out[b, h, r] = weight @ value
    return out


def drawn(
    keys: int, queries: int, kv_heads: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Callable[..., Tensor]]:
    generator = torch.Generator().manual_seed(keys + queries)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = 2 * normal(2, 4, queries, 8), normal(2, kv_heads, keys, 8)
    return q, k, normal(2, kv_heads, keys, value_dim), normal


@pytest.mark.parametrize("name", ["none", *NAMES])
@pytest.mark.parametrize(
    ("keys", "queries", "kv_heads", "potentials", "window", "sinks"),
    [
        (40, 40, 4, None, None, 0),
        (40, 40, 2, 2, None, 0),
        (40, 40, 2, 4, None, 0),
        (40, 40, 2, 4, 15, 3),
        (40, 5, 1, 1, None, 0),
        (40, 1, 2, None, 15, 2),
        (5, 5, 2, 2, None, 0),
        (W + 1, W + 1, 2, 2, None, 0),
    ],
)
@pytest.mark.parametrize("planes", [True, False])
def test_each_equals_its_definition(
    name: str, keys: int, queries: int, kv_heads: int, potentials: int | None, window: int | None,
    sinks: int, planes: bool,
) -> None:  # fmt: skip
    q, k, v, normal = drawn(keys, queries, kv_heads, 8, torch.float64)
    u = None
    if potentials is not None:
        u = (0.3 * normal(1, potentials, keys).abs().cumsum(-1)).double()
    far = Far(W, L0, planes=planes, carried=planes, seed=5)
    visible = Visible(queries, keys, window=window, sinks=sinks)
    got = engine(name, far).function(q, k, v, potential=u, visible=visible)
    expected = dense(name, far, q, k, v, u, visible)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["none", *ALONG])
@pytest.mark.parametrize(
    ("potentials", "window", "sinks"), [(None, None, 0), (2, None, 0), (4, 15, 0), (4, 15, 3)]
)
def test_each_equals_its_definition_along_contractions(
    name: str, potentials: int | None, window: int | None, sinks: int
) -> None:
    """Keys moved step by step to every query, which then attends to them as to any others."""
    keys, far = 40, Far(W, L0)
    q, k, v, normal = drawn(keys, keys, 2, 8, torch.float64)
    u = None
    if potentials is not None:
        u = (0.3 * normal(1, potentials, keys).abs().cumsum(-1)).double()
    w = torch.nn.functional.normalize(normal(2, 2, keys, 8), dim=-1)
    beta = 2 * torch.sigmoid(normal(2, 2, keys))
    expected, moved = [], torch.zeros_like(k)
    for i in range(keys):
        along = w[:, :, i, None]
        moved = moved - beta[:, :, i, None, None] * (moved @ along.mT) * along
        moved[:, :, i] = k[:, :, i]
        one = Visible(1, i + 1, window=window, sinks=sinks)
        own = None if u is None else u[..., : i + 1]
        part = q[:, :, i : i + 1], moved[:, :, : i + 1], v[:, :, : i + 1]
        expected.append(dense(name, far, *part, own, one))
    attend = engine(name, far).along
    assert attend is not None
    visible = Visible(keys, keys, window=window, sinks=sinks)
    got = attend(q, k, v, Contraction(w, beta), potential=u, visible=visible)
    torch.testing.assert_close(got, torch.cat(expected, -2), rtol=1e-9, atol=1e-9)


def test_a_model_is_told_which_it_takes() -> None:
    assert serving(build("path")) == ALONG
    assert serving(build("reflection+v")) == NAMES
    assert ALONG == ("far_masked", "far_values_dropped", "alibi", "log_n")
    assert serving(SimpleNamespace(config=SimpleNamespace(model_type="llama"))) == ()


@pytest.mark.parametrize("mechanism", ["rope", "learned+v+forget", "path", "path+alibi"])
def test_what_an_intervention_does_not_serve_is_refused(mechanism: str) -> None:
    """Padding and gradients; along contractions, some of them, and a cache."""
    model, ids = build(mechanism), torch.zeros(2, 9, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for name in serving(model):
        using = engine(name, Far(4, L0))
        with pytest.raises(ValueError, match=f"'{name}' does not serve gradients on cpu"):
            model(ids, engine=using, use_cache=False)
        with torch.no_grad():
            with pytest.raises(ValueError, match=f"'{name}' does not serve padding"):
                model(ids, engine=using, use_cache=False, attention_mask=mask)
            assert model(ids, engine=using, use_cache=False).logits.isfinite().all()
            if mechanism.startswith("path"):
                with pytest.raises(ValueError, match=r"in a cache \(use_cache=False goes"):
                    model(ids, engine=using, use_cache=True)
    for name in set(NAMES) - set(serving(model)):
        with pytest.raises(ValueError, match=f"'{name}' does not serve steps that contract .* pat"):
            model(ids, engine=engine(name, Far(4, L0)), use_cache=False)


@pytest.mark.parametrize("mechanism", ["rope+window:8", "path+window:8"])
def test_a_near_window_as_wide_as_the_models_is_refused(mechanism: str) -> None:
    model, ids = build(mechanism), torch.zeros(2, 20, dtype=torch.int64)
    for name in serving(model):
        narrow, wide = (engine(name, Far(near, L0)) for near in (7, 8))
        with torch.no_grad():
            assert model(ids, engine=narrow, use_cache=False).logits.isfinite().all()
            if name in ("alibi", "log_n"):
                continue  # they know of no near keys
            with pytest.raises(ValueError, match="near_window is 8, and the model's window 8; exp"):
                model(ids, engine=wide, use_cache=False)


@pytest.mark.parametrize("name", NAMES)
def test_half_of_the_precision_is_enough(name: str) -> None:
    """float32, and values of another dimension than keys where nothing moves them."""
    q, k, v, _ = drawn(300, 300, 2, 12, torch.float32)
    far = Far(64, 128)
    visible = Visible(300, 300)
    got = engine(name, far).function(q, k, v, visible=visible)
    wide = engine(name, far).function(q.double(), k.double(), v.double(), visible=visible)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wide, rtol=1e-4, atol=1e-5)


def test_the_explicit_engine_serves_where_the_kernel_says_no_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v, _ = drawn(40, 40, 2, 8, torch.float64)
    run_ = engine("far_values_dropped", Far(W, L0)).function
    expected = run_(q, k, v, visible=Visible(40, 40))
    monkeypatch.setattr(engines.kernel, "gives_lse", lambda _: False)
    torch.testing.assert_close(run_(q, k, v, visible=Visible(40, 40)), expected)


@pytest.mark.parametrize("planes", [True, False])
def test_random_maps_are_orthogonal_and_named_by_their_seed(planes: bool) -> None:
    maps = random_maps(3, 5, 8, planes)
    one = torch.eye(8, dtype=torch.float64).expand(5, 8, 8)
    torch.testing.assert_close(maps @ maps.mT, one)
    assert torch.equal(maps, random_maps(3, 5, 8, planes))
    assert not torch.allclose(maps[0], maps[1])
    assert not torch.allclose(maps, random_maps(4, 5, 8, planes))


def test_mistakes_are_named() -> None:
    q, k, v, _ = drawn(40, 40, 2, 8, torch.float64)
    with pytest.raises(ValueError, match="did you mean 'far_masked'"):
        engine("far_mask", Far(W, L0))
    with pytest.raises(ValueError, match="the model's window 6; expected a smaller near window"):
        engine("far_frame", Far(W, L0)).function(q, k, v, visible=Visible(40, 40, window=6))
    with pytest.raises(ValueError, match="near_window is 0"):
        Far(0, L0)
    with pytest.raises(ValueError, match="train_length is 1"):
        Far(W, 1)


def build(mechanism: str) -> Any:
    config = FarfieldConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, train_length=16, mechanism=mechanism,
    )  # fmt: skip
    model = FarfieldForCausalLM(config)
    model.initialise(1)
    return model.eval()


def test_a_model_under_an_engine_is_itself_again_afterwards() -> None:
    model = build("learned+v+alibi")
    ids = torch.randint(0, 20, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids).logits
        with under(model, engine("none", Far(8, 16))):
            torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
        with under(model, engine("far_masked", Far(8, 16))):
            masked = model(ids).logits
        assert torch.equal(model(ids).logits, plain)
    torch.testing.assert_close(masked[:, :8], plain[:, :8], rtol=1e-4, atol=1e-5)
    assert (masked[:, -1] - plain[:, -1]).abs().max() > 1e-4


def test_a_run_is_refused_before_it_starts() -> None:
    stream = TokenStream(np.zeros(99, dtype=np.uint16))
    settings = LadderSettings(lengths=(16,), protocols=("windows",))
    asked: Any = {"mechanism": "path", "seed": 0, "progress": lambda *_: pytest.fail("it started")}
    with pytest.raises(ValueError, match="'far_frame' takes far keys apart, and this model's"):
        run(build("path"), stream, settings, Far(W, L0), names=("alibi", "far_frame"), **asked)
    with pytest.raises(ValueError, match="did you mean 'far_masked'"):
        run(build("rope"), stream, settings, Far(W, L0), names=("alibi", "farmasked"), **asked)


def test_a_run_takes_what_the_model_takes() -> None:
    generator = np.random.default_rng(0)
    stream = TokenStream(generator.integers(0, 20, 99).astype(np.uint16))
    settings = LadderSettings(lengths=(32,), protocols=("windows",))
    rows = run(build("path"), stream, settings, Far(W, L0), mechanism="path", seed=0)
    assert [row["intervention"] for row in rows] == ["none", *ALONG]


def test_rows_hold_the_ladder_under_each() -> None:
    generator = np.random.default_rng(0)
    stream = TokenStream(generator.integers(0, 20, 16 * 16 + 1).astype(np.uint16))
    settings = LadderSettings(multiples=(1, 4), protocols=("windows",))
    far = Far(16, 16)
    told: list[float] = []
    rows = run(
        build("rope"), stream, settings, far, mechanism="rope", seed=1,
        names=("far_masked", "alibi"), progress=lambda done, total: told.append(done / total),
    )  # fmt: skip
    assert [(r["intervention"], r["length"]) for r in rows] == [
        (name, length) for name in ("none", "far_masked", "alibi") for length in (16, 64)
    ]
    table = {(r["intervention"], r["length"]): r for r in rows}
    assert table["none", 64]["against"] == 1.0
    # No key is far at the training length: masking them changes nothing.
    assert table["far_masked", 16]["ppl"] == pytest.approx(table["none", 16]["ppl"], rel=1e-5)
    assert table["far_masked", 64]["ppl"] != pytest.approx(table["none", 64]["ppl"], rel=1e-5)
    assert table["alibi", 16]["against"] != pytest.approx(1.0, rel=1e-5)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
