"""Our models under the probe: what is shown is what every mechanism's layer computes."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.attention.engines import TABLE, explicit
from farfield.diagnosis import Sampling, Settings, measure, observe
from farfield.diagnosis.tiles import Chunk

MECHANISMS = [
    "nope",
    "rope",
    "random+v",
    "learned+v+alibi",
    "learned+forget",
    "reflection+v",
    "rope+window:9,sinks=2",
    "alibi+logn",
    "path",
    "path+forget",
]
EVERY = Sampling.everything()


def model_of(mechanism: str) -> FarfieldForCausalLM:
    """Two layers, four query heads on two key heads, weights large enough to matter."""
    config = FarfieldConfig(
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        mechanism=mechanism,
        train_length=16,
        initializer_range=0.3,
    )
    model = FarfieldForCausalLM(config)
    model.initialise(1)
    return model.eval()


def text(batch: int, length: int) -> Tensor:
    """Random token ids."""
    return torch.randint(1, 31, (batch, length), generator=torch.Generator().manual_seed(0))


def outputs(model: Any, ids: Tensor, **given: Any) -> dict[int, Tensor]:
    """What each layer's attention gives to its output projection: [B, H, T, v]."""
    found: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args, n=n: found.__setitem__(n, args[0].unflatten(-1, (4, -1)))
        )
        for n, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model.model(ids, use_cache=False, **given)
    for hook in hooks:
        hook.remove()
    return {n: out.transpose(1, 2) for n, out in found.items()}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_chunks_give_the_output_of_the_layer(mechanism: str) -> None:
    model, ids = model_of(mechanism), text(2, 150)
    expected = outputs(model, ids)
    seen: dict[int, int] = {}

    def visit(chunk: Chunk) -> None:
        out, own = chunk.output().flatten(1, 2), expected[chunk.layer][:, :, chunk.rows]
        assert chunk.call.carried == ("+v" in mechanism)
        if chunk.call.carried:  # in the root frame: the same up to a rotation of each row
            out, own = out.norm(dim=-1), own.norm(dim=-1)
        torch.testing.assert_close(out, own, rtol=0.0, atol=2e-5)
        seen[chunk.layer] = seen.get(chunk.layer, 0) + len(chunk.rows)

    found = observe(model, ids, visit, sampling=EVERY)
    assert seen == {0: 150, 1: 150}
    assert found.layers == (0, 1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("mechanism", ["learned+v+alibi", "rope+window:9,sinks=2", "alibi+logn"])
def test_the_logits_are_those_of_the_explicit_engine(mechanism: str) -> None:
    model, ids = model_of(mechanism), text(2, 40)
    tiles: list[explicit.Tile] = []
    engine = replace(
        TABLE["explicit"], function=partial(explicit.attend, observe=tiles.append, chunk=40)
    )
    with torch.no_grad():
        model.model(ids, use_cache=False, engine=engine)

    def visit(chunk: Chunk) -> None:
        parts = list(chunk.tiles())
        logits = torch.cat([torch.where(p.seen, p.logits, -torch.inf) for p in parts], -1)
        expected = tiles[chunk.layer].logits[:, :, chunk.rows, : logits.shape[-1]]
        torch.testing.assert_close(logits.flatten(1, 2), expected, rtol=1e-5, atol=2e-5)

    assert observe(model, ids, visit, sampling=EVERY).layers == (0, 1)
    assert len(tiles) == 2


@pytest.mark.parametrize("mechanism", ["learned+v+alibi", "rope+window:9,sinks=2", "path"])
def test_padded_texts(mechanism: str) -> None:
    model, ids = model_of(mechanism), text(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    options: Any = {"settings": Settings(windows=(4, 12)), "sampling": EVERY, "name": "x"}
    both = measure(model, ids, attention_mask=mask, **options).rows
    alone = [measure(model, ids[:1], **options).rows, measure(model, ids[1:, 13:], **options).rows]
    apart: dict[Any, list[tuple[int, float]]] = {}
    for row in (*alone[0], *alone[1]):
        where = (row["layer"], row["head"], row["near_window"], row["low"])
        apart.setdefault(where, []).append((row["queries"], row["far_mass"]))
    for row in both:
        parts = apart[row["layer"], row["head"], row["near_window"], row["low"]]
        if row["low"] <= 27 < row["high"]:
            continue  # the shorter text's last stratum ends where it does
        assert row["queries"] == sum(count for count, _ in parts)
        mean = sum(count * value for count, value in parts) / row["queries"]
        assert row["far_mass"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(
    "mechanism", ["learned+v+alibi", "rope+window:9,sinks=2", "random", "path+forget"]
)
def test_a_text_fed_in_pieces(mechanism: str) -> None:
    model, ids = model_of(mechanism), text(1, 60)
    options: Any = {"settings": Settings(windows=(4,)), "sampling": EVERY, "name": "x"}
    whole, fed = measure(model, ids, **options), measure(model, ids, feed=11, **options)
    assert whole.checked == fed.checked > 0
    for row, expected in zip(fed.rows, whole.rows, strict=True):
        assert row["far_mass"] == pytest.approx(expected["far_mass"], abs=1e-5)


@pytest.mark.parametrize("mechanism", ["learned+alibi", "learned+v+forget"])
def test_selected_heads(mechanism: str) -> None:
    model, ids = model_of(mechanism), text(1, 30)
    options: Any = {"settings": Settings(windows=(4,)), "sampling": EVERY, "name": "x"}
    whole = measure(model, ids, **options).rows
    few = measure(model, ids, heads=[3, 1], layers=[1], **options).rows
    expected = [row for head in (3, 1) for row in whole if (row["layer"], row["head"]) == (1, head)]
    assert len(few) == len(expected) > 0
    for row, other in zip(few, expected, strict=True):
        assert (row["head"], row["low"]) == (other["head"], other["low"])
        assert row["far_mass"] == pytest.approx(other["far_mass"], abs=1e-6)
        assert row["half_range_bias"] == pytest.approx(other["half_range_bias"], abs=1e-6)


def test_carried_values_lose_coherence_and_the_floor_is_there() -> None:
    ids = text(1, 120).clamp(max=2)  # two tokens alone, so that values have a direction in common
    options: Any = {"settings": Settings(windows=(8,)), "sampling": EVERY, "name": "x"}
    left = measure(model_of("random_iid"), ids, layers=[0], **options).rows
    carried = measure(model_of("random_iid+v"), ids, layers=[0], **options).rows
    late = [n for n, row in enumerate(left) if row["low"] >= 65]
    gain = [sum(rows[n]["far_gain"] for n in late) / len(late) for rows in (left, carried)]
    assert gain[0] < 2
    assert gain[1] > 2 * gain[0]
    assert all(row["coupling_floor"] is None for row in left)
    assert all(0 < row["coupling_floor"] < 1 for row in carried)


def test_heads_can_not_be_chosen_along_contractions() -> None:
    model, ids = model_of("path"), text(1, 20)
    with pytest.raises(ValueError, match="heads can't be chosen where transports contract"):
        observe(model, ids, lambda chunk: None, heads=[0])
