"""Measured transports against definitions written out, and laws whose numbers are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.algebra.contraction import Contraction
from farfield.algebra.reflection import ReflectionFrame
from farfield.attention import Attention
from farfield.diagnosis.gates import Gates
from farfield.diagnosis.operators import contraction_operators, frame_operators, sources
from farfield.diagnosis.transport import lag_ladder, measure_transports


def build(mechanism: str, **changes: Any) -> Any:
    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "train_length": 64,
    }
    model = FarfieldForCausalLM(FarfieldConfig(mechanism=mechanism, **(settings | changes)))
    model.initialise(3)
    return model.eval()


def texts(count: int = 2, tokens: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (count, tokens), generator=torch.Generator().manual_seed(seed))


def carries(model: Any, text: torch.Tensor) -> list[Any]:
    found: list[Any] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [
        layer.mechanism.register_forward_hook(lambda _m, _a, out: found.append(out))
        for layer in layers
    ]
    with torch.no_grad():
        model.model(text[None])
    for handle in handles:
        handle.remove()
    return found


def test_rates_and_lag_curves_equal_their_definitions() -> None:
    model, ids = build("learned:c=0,std=0.5"), texts()
    lags = [1, 3, 10]
    found = measure_transports(model, ids, train_length=64, lags=lags)
    layer, head, block = 1, 1, 2
    squares, rates = [], []
    for text in ids:
        phase = carries(model, text)[layer].frame.turns[0, head, :, block].double() * (
            2 * math.pi / 2**64
        )
        z = np.exp(1j * phase.numpy())
        step = z[1:] * z[:-1].conj()
        n = len(step)
        rates.append((n * abs(step.mean()) ** 2 - 1) / (n - 1))
        squares.append([abs(np.mean(z[lag:] * z[: len(z) - lag].conj())) ** 2 for lag in lags])
    (row,) = [r for r in found.steps if (r["layer"], r["head"], r["block"]) == (1, 1, 2)]
    assert row["rho"] == pytest.approx(math.sqrt(max(0.0, np.mean(rates))), abs=1e-9)
    mine = [r for r in found.lags if (r["layer"], r["head"], r["block"]) == (1, 1, 2)]
    assert [r["lag"] for r in mine] == lags
    # Less the floor of noise, which is below what one window in three explains.
    for r, square in zip(mine, np.mean(squares, axis=0), strict=True):
        assert -0.3 < square - r["squared"] < 0.3
        assert r["independent"] == pytest.approx(row["rho"] ** r["lag"])
    exact = step_noise(rates, lags, 256)
    assert [r["squared"] for r in mine] == pytest.approx(
        (np.mean(squares, axis=0) - exact).tolist(), abs=1e-9
    )


def step_noise(rho_squares: list[float], lags: list[int], tokens: int) -> np.ndarray:
    """The mean over texts of E|R_n|² − ρ^{2n}, summed term by term."""
    rows = []
    for square in rho_squares:
        x = min(1.0, max(0.0, square))
        row = []
        for n in lags:
            windows = tokens - n
            terms = [
                (windows - abs(h)) * (x ** abs(h) - x**n)
                for h in range(-min(n, windows) + 1, min(n, windows))
            ]
            row.append(sum(terms) / windows**2)
        rows.append(row)
    return np.mean(rows, axis=0)


def test_position_indexed_rotations_never_mix() -> None:
    found = measure_transports(build("rope"), texts(), train_length=64)
    assert {row["head"] for row in found.steps} == {None}
    assert all(row["rho"] == pytest.approx(1.0, abs=1e-12) for row in found.steps)
    assert all(row["window"] is None and not row["mixes"] for row in found.steps)
    assert all(row["left"] == pytest.approx(1.0, abs=1e-9) for row in found.lags)
    assert not found.gates


def test_fresh_normal_angles_have_their_law() -> None:
    """|E e^{iθ}| = e^{−σ²/2}, drift 0, blocks independent, windows those of the scales."""
    model = build("random_iid", num_hidden_layers=1)
    found = measure_transports(model, texts(1, 8192), train_length=64, lags=lag_ladder(1024))
    scales = model.mechanisms[0].transport.scales
    for row in found.steps:
        rho = math.exp(-(scales[row["block"]] ** 2) / 2)
        sd = math.sqrt((1 - rho**2) / 8192)
        assert row["rho"] == pytest.approx(rho, abs=4 * sd)
        if row["mixes"]:
            assert 0.5 < row["window"] / row["window_independent"] < 2.1
    fast = [row for row in found.steps if row["block"] < 3]  # the slowest drown in their noise
    assert all(row["mixes"] and row["window_known"] for row in fast)
    assert all(row["largest"] < 2 * row["noise"] for row in found.couplings)
    energy = [row["energy"] for row in found.steps if row["head"] == 0]
    assert sum(energy) == pytest.approx(1.0)


def test_one_angle_for_all_blocks_is_seen() -> None:
    """With W of rank one the blocks turn together, and the coupling says so."""
    model = build("learned:c=0,std=0.5", num_hidden_layers=1)
    weight = model.mechanisms[0].transport.weight.weight
    with torch.no_grad():
        weight.copy_(weight[:1].expand_as(weight))
    found = measure_transports(model, texts(2, 1024), train_length=64)
    assert all(row["largest"] > 5 * row["noise"] for row in found.couplings)


def test_values_and_energy() -> None:
    model, ids = build("learned+v"), texts()
    found = measure_transports(model, ids, train_length=64)
    caught = []
    layer = next(m for m in model.modules() if isinstance(m, Attention))
    names = ("q_proj", "k_proj", "v_proj")
    hooks = [
        getattr(layer, n).register_forward_hook(lambda _m, _a, out: caught.append(out[0]))
        for n in names
    ]
    with torch.no_grad():
        for text in ids:
            model.model(text[None])
    for hook in hooks:
        hook.remove()
    q, k, v = (torch.cat(caught[at::3]).double() for at in range(3))
    own = v[:, 8:16]  # the second key/value head
    mean = own.mean(0)
    row = next(r for r in found.values if (r["layer"], r["head"]) == (0, 1))
    planes = [float(mean[b] ** 2 + mean[b + 4] ** 2) for b in range(4)]
    assert row["mean_power"] == pytest.approx(planes, rel=1e-6)
    assert row["noise_power"] == pytest.approx(float((own - mean).square().sum(1).mean()), rel=1e-6)
    queries = [torch.hypot(q[:, h * 8 + 1], q[:, h * 8 + 5]).mean() for h in (2, 3)]
    key = torch.hypot(k[:, 8 + 1], k[:, 8 + 5]).mean()
    assert row["energy"][1] == pytest.approx(float(sum(queries) / 2 * key), rel=1e-6)
    assert 1 <= row["effective_blocks"] <= 4
    assert all(one["carried"] for one in found.layers)


@pytest.mark.parametrize("mechanism", ["alibi", "learned+forget"])
def test_gates(mechanism: str) -> None:
    model, ids = build(mechanism), texts()
    found = measure_transports(model, ids, train_length=64, lags=[1, 5])
    potentials = [carries(model, text)[1].potential[0] for text in ids]
    heads = potentials[0].shape[0]
    for head in range(heads):
        row = next(r for r in found.gates if (r["layer"], r["head"]) == (1, head))
        logs = torch.cat([-p[head].diff() for p in potentials])
        assert row["gate"] == pytest.approx(float(logs.exp().mean()))
        assert row["memory"] == pytest.approx(1 / (1 - float(logs.exp().mean())), rel=1e-6)
        assert row["slope"] == pytest.approx(-math.log(float(logs.exp().mean())), rel=1e-6)
        assert row["constant"] == (mechanism == "alibi")
        kept = [r for r in found.lags if (r["layer"], r["head"], r["kind"]) == (1, head, "gate")]
        five = torch.cat([(p[head][:-5] - p[head][5:]).exp() for p in potentials]).mean()
        assert kept[1]["left"] == pytest.approx(float(five))
        if mechanism == "alibi":
            assert kept[1]["left"] == pytest.approx(kept[1]["independent"])


def test_gates_near_one_keep_their_memory() -> None:
    gates = Gates([1])
    gates.add(1e-9 * torch.arange(100, dtype=torch.float64)[None])
    assert gates.rows()[0]["memory"] == pytest.approx(1e9, rel=1e-6)


def test_operators_equal_products_of_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 1, 200, 4, generator=generator, dtype=torch.float64)
    frame = ReflectionFrame.from_vectors(vectors)
    lags = [1, 2, 5]
    (found,) = frame_operators(frame, lags, routes=50)
    starts = sources(200, 5, 50)
    unit = vectors[0, 0] / vectors[0, 0].norm(dim=-1, keepdim=True)
    for at, lag in enumerate(lags):
        maps = []
        for start in starts.tolist():
            P = torch.eye(4, dtype=torch.float64)
            for w in unit[start + 1 : start + lag + 1]:
                P = P - 2 * torch.outer(w, w @ P)
            maps.append(P)
        P = torch.stack(maps)
        assert found.norm[at] == pytest.approx(float(np.linalg.norm(P.mean(0), 2)), abs=1e-5)
        squares = P.diagonal(dim1=-2, dim2=-1).square().mean()
        assert found.aligned[at] == pytest.approx(float(squares), abs=1e-5)
        assert found.kept[at] == pytest.approx(1.0, abs=1e-5)
    whole = Contraction(unit[None, None], torch.full((1, 1, 200), 2.0, dtype=torch.float64))
    (same,) = contraction_operators(whole, lags, routes=50)
    assert same.norm.tolist() == pytest.approx(found.norm.tolist(), abs=1e-5)
    assert same.gamma2 == pytest.approx(found.gamma2, abs=1e-5)


def test_uniform_reflections_have_their_rate() -> None:
    """‖E M‖ = 1 − 2/d and γ₂ = (d − 2)/(d + 2); at long lags only the floor is left."""
    generator = torch.Generator().manual_seed(1)
    d = 8
    frame = ReflectionFrame.from_vectors(torch.randn(1, 1, 8192, d, generator=generator))
    (found,) = frame_operators(frame, [1, 4, 64])
    assert found.held_out[0] == pytest.approx(1 - 2 / d, abs=0.06)
    assert found.gamma2 == pytest.approx((d - 2) / (d + 2), abs=2.5 / math.sqrt(512))
    assert found.norm[2] < 1.5 * found.floor[2]
    assert found.aligned[2] == pytest.approx(1 / d, abs=0.02)


def test_contractions_shrink() -> None:
    generator = torch.Generator().manual_seed(2)
    w = torch.nn.functional.normalize(torch.randn(1, 1, 600, 8, generator=generator), dim=-1)
    (found,) = contraction_operators(Contraction(w, torch.full((1, 1, 600), 0.5)), [1, 2])
    assert found.kept[0] == pytest.approx(1 - 0.5 * 1.5 / 8, abs=1e-5)
    assert math.isnan(found.gamma2)


@pytest.mark.parametrize("mechanism", ["reflection", "path"])
def test_models_without_planes_have_operator_rows(mechanism: str) -> None:
    found = measure_transports(build(mechanism), texts(), train_length=64)
    assert {row["kind"] for row in found.steps} == {"operator"}
    assert {(row["layer"], row["head"]) for row in found.steps} == {
        (layer, head) for layer in range(2) for head in range(2)
    }
    assert not found.couplings
    assert all(row["kept"] <= 1 + 1e-4 for row in found.lags)


def test_the_model_comes_back_as_it_was() -> None:
    model = build("learned+v+alibi").train()
    before = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    measure_transports(model, texts(1), train_length=64, layers=[1])
    after = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    assert before == after
    assert model.training


def test_mistakes_are_named() -> None:
    model = build("rope")
    with pytest.raises(ValueError, match="layer 5: the model has layers 0 to 1"):
        measure_transports(model, texts(), train_length=64, layers=[5])
    with pytest.raises(ValueError, match="at least 4 tokens"):
        measure_transports(model, texts(1, 3), train_length=64)
    with pytest.raises(ValueError, match="fewer than 2 routes"):
        sources(10, 9)
    assert lag_ladder(64) == [1, 2, 3, 4, 6, 8, 12, 16]
