"""Models off the attention interface: what is shown is what their own softmax is given."""

import math

import pytest
import torch
from test_transformers_probe import weights_shown
from zoo import ADAPTED, WINDOW, build, text

from farfield.diagnosis import Sampling, Settings, measure, observe
from farfield.diagnosis.tiles import Chunk
from farfield.diagnosis.transformers_probe import eager


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("feed", [None, 7])
def test_what_is_shown_is_the_attention_of_the_model(name: str, feed: int | None) -> None:
    model, ids = build(name), text(2, 150)
    before = model.config._attn_implementation
    shown = weights_shown(model, ids, feed=feed)
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with eager(model), torch.no_grad():
        own = model(ids, output_attentions=True, use_cache=False).attentions
    for layer in range(2):
        torch.testing.assert_close(shown[layer], own[layer], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_the_bias_is_the_slope_times_the_distance(name: str) -> None:
    model = build(name)
    slopes = torch.tensor([2.0 ** (-2 * h) for h in range(1, 5)])

    def visit(chunk: Chunk) -> None:
        for tile in chunk.tiles():
            assert tile.bias is not None
            expected = -slopes[:, None, None, None] * tile.distance
            found = tile.bias.expand_as(tile.content)[0]
            there = tile.seen[0].expand_as(found)
            torch.testing.assert_close(found[there], expected[there], rtol=0.0, atol=1e-5)

    assert observe(model, text(1, 140), visit, sampling=Sampling(count=20)).layers == (0, 1)


def test_a_local_layer_sees_its_window() -> None:
    shown = weights_shown(build("gpt_neo"), text(1, 60))
    assert (shown[0][0, 0, 50] > 0).sum() == 51
    assert (shown[1][0, 0, 50] > 0).nonzero().flatten().tolist() == list(range(51 - WINDOW, 51))


def test_padding_is_left_out() -> None:
    model, ids = build("bloom"), text(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    found = measure(
        model,
        ids,
        name="x",
        settings=Settings(windows=(4,)),
        sampling=Sampling.everything(),
        attention_mask=mask,
    )
    assert sum(row["queries"] for row in found.rows if row["head"] == row["layer"] == 0) == 30 + 18
    assert all(math.isfinite(row["far_mass"]) for row in found.rows)


def test_falcon_with_alibi_is_refused_because_it_is_two_models() -> None:
    model, ids = build("falcon_alibi"), text(1, 20)
    with pytest.raises(ValueError, match="Falcon with ALiBi: its eager code adds the bias twice"):
        observe(model, ids, lambda chunk: None)
    with torch.no_grad():
        usual = model(ids).logits
        with eager(model):
            own = model(ids).logits
    assert not torch.allclose(usual, own, rtol=0.0, atol=1e-2), "then it need not be refused"


@pytest.mark.parametrize("name", ["mpt", "gpt_neo"])
def test_texts_beyond_the_positions_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"has 401 tokens, and {name} has 400 absolute positions"):
        observe(build(name), text(1, 401), lambda chunk: None)
