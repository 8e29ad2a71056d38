"""Measures of a model against their definitions as loops over keys, and what rows average."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import build, text

from farfield import theory
from farfield.diagnosis import BoundViolationError, Sampling, Settings, measure, observe
from farfield.diagnosis.measured import check_bounds, of_chunk
from farfield.diagnosis.rows import BOUNDS, MEANS, WHOLE, check_row
from farfield.diagnosis.tiles import Chunk, DotProducts

SETTINGS = Settings(windows=(3, 8), first_tokens=2)


def whole(chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [H, Q, K], content alike, values [H, K, v]) of the first text, not seen as NaN."""
    tiles = list(chunk.tiles())
    seen = torch.cat([t.seen.expand(t.content.shape) for t in tiles], -1)
    logits = torch.cat([t.logits for t in tiles], -1).double().masked_fill(~seen, torch.nan)
    content = torch.cat([t.content for t in tiles], -1).double().masked_fill(~seen, torch.nan)
    values = torch.cat([t.values[:, :, 0, 0] for t in tiles], 2).double()
    shared = logits.shape[2]
    return (
        logits.flatten(1, 2)[0],
        content.flatten(1, 2)[0],
        values.repeat_interleave(shared, 1)[0],
    )


def defined(
    logits: Tensor, content: Tensor, values: Tensor, query: int, window: int, sink: float | None
) -> dict[str, float]:
    """The measures of one row, by loops. Shapes: logits, content [K], values [K, v]."""
    s = {j: x for j, x in enumerate(logits.tolist()) if not math.isnan(x)}
    c, keys = dict(enumerate(content.tolist())), list(s)
    extra = 0.0 if sink is None else math.exp(sink)
    z = sum(math.exp(s[j]) for j in keys)
    p = {j: math.exp(s[j]) / z for j in keys}
    taken = z / (z + extra)
    near = [j for j in keys if query - j < window]
    far = [j for j in keys if query - j >= window]
    first = [j for j in keys if j < 2]
    size = dict(enumerate(values.norm(dim=-1).tolist()))
    parts = {
        name: taken * torch.tensor([p[j] for j in some], dtype=values.dtype) @ values[some]
        for name, some in (("near", near), ("far", far))
    }
    bias = [s[j] - c[j] for j in keys]
    found = {
        "near_keys": len(near),
        "far_keys": len(far),
        "far_mass": sum(p[j] for j in far),
        "lse_near": math.log(sum(math.exp(s[j]) for j in near)),
        "near_max": max(s[j] for j in near),
        "near_mean": sum(s[j] for j in near) / len(near),
        "near_content": sum(c[j] for j in near) / len(near),
        "half_range": (max(s.values()) - min(s.values())) / 2,
        "half_range_content": (max(c[j] for j in keys) - min(c[j] for j in keys)) / 2,
        "half_range_bias": (max(bias) - min(bias)) / 2,
        "entropy": -sum(p[j] * math.log(p[j]) for j in keys),
        "effective_keys": math.exp(-sum(p[j] * math.log(p[j]) for j in keys)),
        "participation": 1 / sum(p[j] ** 2 for j in keys),
        "first_mass": sum(p[j] for j in first),
        "first_far_mass": sum(p[j] for j in first if j in far),
        "learned_sink": 1 - taken,
        "near_norm": float(parts["near"].norm()),
        "far_norm": float(parts["far"].norm()),
        "out_norm": float((parts["near"] + parts["far"]).norm()),
    }
    if not far:
        return found
    weight, M = {j: taken * p[j] for j in far}, len(far)
    mean = sum(s[j] for j in far) / M
    lse_far = math.log(sum(math.exp(s[j]) for j in far))
    coherent = sum(weight[j] * size[j] for j in far) ** 2
    incoherent = sum((weight[j] * size[j]) ** 2 for j in far)
    power = float(parts["far"].norm()) ** 2
    return found | {
        "lse_far": lse_far,
        "ell": lse_far - math.log(M),
        "log_e2": math.log(M * sum(math.exp(2 * s[j]) for j in far)) - 2 * lse_far,
        "far_max": max(s[j] for j in far),
        "far_mean": mean,
        "far_content": sum(c[j] for j in far) / M,
        "score_gap": max(s[j] for j in near) - max(s[j] for j in far),
        "cosine": float(torch.cosine_similarity(parts["near"], parts["far"], dim=0)),
        "far_power": power,
        "far_power_coherent": coherent,
        "far_power_incoherent": incoherent,
        "far_gain": coherent / power,
        "t4": M / (M + len(near) * math.exp(2 * found["half_range"])),
        "t4_prime": M * math.exp(mean) / (M * math.exp(mean) + math.exp(found["lse_near"])),
        **({"far_coherence": (power - incoherent) / (coherent - incoherent)} if M > 1 else {}),
    }


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_every_measure_is_its_definition(name: str) -> None:
    model, length = build(name), 22
    compared = set()

    def visit(chunk: Chunk) -> None:
        columns, counted = of_chunk(chunk, SETTINGS)
        assert bool(counted.all())
        logits, content, values = whole(chunk)
        sinks = chunk.call.sink
        for w, window in enumerate(SETTINGS.windows):
            for h in range(4):
                sink = None if sinks is None else float(sinks.flatten()[h])
                for q in range(0, len(chunk.rows), 4):
                    row = int(chunk.rows[q])
                    expected = defined(logits[h, q], content[h, q], values[h], row, window, sink)
                    for key, value in expected.items():
                        got = float(columns[key][w, 0, h, q])
                        # The coherence of a few far keys is a difference of nearly equal sums.
                        rel = 5e-3 if key == "far_coherence" else 2e-4
                        assert got == pytest.approx(value, rel=rel, abs=2e-5), (key, row, window)
                        compared.add(key)
                    for key in set(columns) - set(expected):
                        if expected["far_keys"] == 0 and key not in WHOLE:
                            assert math.isnan(float(columns[key][w, 0, h, q])), key

    observe(model, text(1, length), visit, sampling=Sampling.everything())
    beyond = {"t4_decohered", "score_scale", "coupling_floor"}
    assert compared == {*MEANS, *WHOLE} - beyond


def test_a_row_is_the_mean_over_its_stratum() -> None:
    model, ids = build("llama"), text(2, 40)
    kept: list[tuple[Chunk, Any]] = []
    observe(
        model, ids, lambda c: kept.append((c, of_chunk(c, SETTINGS))), sampling=Sampling(count=30)
    )
    found = measure(model, ids, name="tiny", settings=SETTINGS, sampling=Sampling(count=30))
    assert found.checked == sum(
        int((~columns["t4_slack"].isnan()).sum()) for _, (columns, _) in kept
    )
    row = next(
        row
        for row in found.rows
        if (row["layer"], row["head"], row["near_window"], row["low"]) == (1, 2, 8, 25)
    )
    values, slack = [], []
    for chunk, (columns, _) in kept:
        there = (chunk.rows + 1 >= row["low"]) & (chunk.rows + 1 < row["high"])
        if chunk.layer == 1:
            values.append(columns["far_mass"][1, :, 2][:, there].flatten())
            slack.append(columns["t4_slack"][1, :, 2][:, there].flatten())
    mass = torch.cat(values)
    assert row["queries"] == row["far_queries"] == len(mass)
    assert row["far_mass"] == pytest.approx(float(mass.mean()), abs=1e-12)
    assert row["far_mass_sd"] == pytest.approx(float(mass.std(correction=0)), abs=1e-9)
    assert row["t4_slack"] == pytest.approx(float(torch.cat(slack).min()), abs=1e-12)
    for row in found.rows:
        check_row(row)
        assert row["model"] == "tiny"
        assert row["kind"] == "llama"
    assert sum(r["queries"] for r in found.rows if (r["layer"], r["head"]) == (0, 0)) == 2 * 60


def test_a_padded_text_is_measured_as_it_is_alone() -> None:
    model, ids = build("llama"), text(1, 30)
    alone = measure(model, ids, name="x", settings=SETTINGS, sampling=Sampling.everything()).rows
    padded = torch.cat([torch.ones(1, 9, dtype=torch.int64), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :9] = 0
    rows = measure(
        model,
        padded,
        name="x",
        settings=SETTINGS,
        sampling=Sampling.everything(),
        attention_mask=mask,
    ).rows
    assert len(rows) == len(alone)
    for row, expected in zip(rows, alone, strict=True):
        assert row["queries"] == expected["queries"]
        for key in (*MEANS, *WHOLE):
            if expected[key] is None or key == "score_scale":  # bounds the keys of padding as well
                continue
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key


def test_packed_documents_are_measured_as_they_are_alone() -> None:
    model, ids = build("llama"), text(1, 20)
    positions = torch.cat([torch.arange(20), torch.arange(20)])[None]
    options: Any = {"name": "x", "settings": SETTINGS, "sampling": Sampling.everything()}
    alone = measure(model, ids, **options).rows
    packed = measure(model, torch.cat([ids, ids], 1), position_ids=positions, **options).rows
    found = {(r["layer"], r["head"], r["near_window"], r["low"]): r for r in packed}
    for expected in alone:
        where = (expected["layer"], expected["head"], expected["near_window"], expected["low"])
        row = found[where]
        if row["high"] != expected["high"]:
            continue  # the last stratum ends where a text does
        assert row["queries"] == 2 * expected["queries"]
        assert row["far_mass"] == pytest.approx(expected["far_mass"], abs=1e-5)
        assert row["first_mass"] == pytest.approx(expected["first_mass"], abs=1e-5)


def test_feeding_a_text_in_pieces_changes_nothing() -> None:
    model, ids = build("mistral"), text(1, 50)
    options: Any = {"name": "x", "settings": SETTINGS, "sampling": Sampling.everything()}
    whole_, fed = measure(model, ids, **options), measure(model, ids, feed=16, **options)
    assert fed.checked == whole_.checked > 0
    for row, expected in zip(fed.rows, whole_.rows, strict=True):
        assert row["far_mass"] == pytest.approx(expected["far_mass"], abs=1e-5)
        assert row["out_norm"] == pytest.approx(expected["out_norm"], abs=1e-4)


def test_known_rates_give_the_decohered_bound() -> None:
    model, ids = build("llama"), text(1, 40)
    rates = {0: [0.5, 0.9, 1.0, 0.0]}
    settings = Settings(windows=(8,), rho=rates, delta=0.1)

    def visit(chunk: Chunk) -> None:
        columns, _ = of_chunk(chunk, settings)
        found = columns["t4_decohered"][0, 0]
        if chunk.layer == 1:
            assert bool(found.isnan().all())
            return
        scores = chunk.call.scores
        assert isinstance(scores, DotProducts)
        query, key = scores.query.flatten(1, 2)[0], scores.key.repeat_interleave(2, 1)[0]
        for q in range(12, len(chunk.rows), 5):
            for h in range(4):
                row = int(chunk.rows[q])
                largest = float(key[h, : row + 1].norm(dim=-1).max())
                scale = float(query[h, row].norm()) * largest / math.sqrt(8)
                lse = float(columns["lse_near"][0, 0, h, q])
                expected = theory.far_mass_lower_decohered(row - 7, lse, scale, rates[0][h], 0.1)
                assert float(found[h, q]) == pytest.approx(float(expected), rel=1e-5, abs=1e-12)

    assert observe(model, ids, visit, sampling=Sampling.everything()).layers == (0, 1)


def test_a_violated_bound_is_an_error() -> None:
    model, ids = build("llama"), text(1, 30)
    kept: list[Any] = []
    observe(model, ids, lambda c: kept.append(of_chunk(c, SETTINGS)[0]), layers=[0])
    assert check_bounds(0, kept[0]) > 0
    for name in BOUNDS:
        wrong = dict(kept[0])
        wrong[f"{name}_slack"] = wrong[f"{name}_slack"] - 100
        with pytest.raises(BoundViolationError, match=f"layer 0, head number 0.* is below {name}"):
            check_bounds(0, wrong)


def test_settings_that_make_no_sense_are_refused() -> None:
    for windows in ((), (0, 4), (8, 4), (4, 4)):
        with pytest.raises(ValueError, match="expected rising sizes from 1 on"):
            Settings(windows=windows)
    with pytest.raises(ValueError, match="first_tokens is 0"):
        Settings(first_tokens=0)
    with pytest.raises(ValueError, match="delta is 1"):
        Settings(delta=1.0)


def test_texts_that_can_not_be_read_are_refused_in_a_line() -> None:
    model = build("gpt2")
    quiet: Any = {"name": "x", "settings": SETTINGS}
    with pytest.raises(ValueError, match="has 3 tokens, and the smallest near window is 3"):
        measure(model, text(1, 3), **quiet)
    with pytest.raises(ValueError, match="has 401 tokens, and gpt2 has 400 absolute positions"):
        measure(model, text(1, 401), **quiet)
    with pytest.raises(ValueError, match="token 97, and the model knows 0 to 96; expected the mod"):
        measure(model, torch.full((1, 9), 97), **quiet)
    with pytest.raises(ValueError, match=r"ids are torch.int64 of shape \[9\]"):
        measure(model, text(1, 9)[0], **quiet)
    holes = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="padding between tokens; expected it at one end"):
        measure(model, text(1, 9), attention_mask=holes, **quiet)
    with pytest.raises(ValueError, match="feed is 0"):
        measure(model, text(1, 9), feed=0, **quiet)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"weight transformer.h.1.mlp.c_fc.weight holds NaN"):
        measure(model, text(1, 9), **quiet)
