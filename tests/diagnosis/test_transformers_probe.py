"""A model under the probe computes what its own eager code computes, and what is shown is that."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    DynamicCache,
)
from zoo import CONFIGS, WINDOW, build, text

from farfield.diagnosis import Sampling, observe, transformers_probe
from farfield.diagnosis.session import Session, Tokens, document_positions
from farfield.diagnosis.tiles import Chunk

EVERY = Sampling.everything()
architectures = pytest.mark.parametrize("name", CONFIGS)


def session_of(model: Any, length: int, visit: Any = lambda chunk: None, **options: Any) -> Session:
    """A session on all queries of texts of this length."""
    tokens = Tokens(torch.arange(length)[None], torch.arange(length), options.pop("real", None))
    return Session(model, tokens, visit, **options)


@torch.no_grad()
def hidden(model: Any, ids: Tensor, **given: Any) -> Tensor:
    """The last hidden states."""
    given = {"use_cache": False, **given}
    state: Tensor = model.base_model(input_ids=ids, **given).last_hidden_state
    return state


def both(model: Any, ids: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """(under the probe, eager)."""
    session = session_of(model, ids.shape[1])
    with transformers_probe.attached(session):
        seen = hidden(model, ids, **given)
    assert all(session.calls[layer] == 1 for layer in range(2))
    with transformers_probe.eager(model):
        return seen, hidden(model, ids, **given)


@architectures
def test_outputs_are_those_of_eager_attention(name: str) -> None:
    seen, expected = both(build(name), text(2, 300))
    torch.testing.assert_close(seen, expected, rtol=0.0, atol=1e-5)


@architectures
def test_outputs_are_the_same_with_left_padding(name: str) -> None:
    model, ids = build(name), text(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    seen, expected = both(model, ids, attention_mask=mask)
    there = mask.bool()
    torch.testing.assert_close(seen[there], expected[there], rtol=0.0, atol=1e-5)


PACKED = torch.cat([torch.arange(25), torch.arange(35)])[None]


def test_a_model_that_mixes_packed_documents_is_refused() -> None:
    model, ids = build("gpt_oss"), text(1, 60)
    seen, expected = both(model, ids, position_ids=PACKED)  # its own attention, all the same
    torch.testing.assert_close(seen, expected, rtol=0.0, atol=1e-5)
    with pytest.raises(ValueError, match="doesn't keep packed documents apart"):
        weights_shown(model, ids, position_ids=PACKED)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "gpt_neox"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    model, ids = build(name), text(1, 60)
    shown = weights_shown(model, ids, position_ids=PACKED)
    assert float(shown[0][:, :, 25:, :25].abs().max()) == 0.0
    seen, expected = both(model, ids, position_ids=PACKED)
    torch.testing.assert_close(seen, expected, rtol=0.0, atol=1e-5)
    alone = hidden(model, ids[:, 25:])
    torch.testing.assert_close(seen[:, 25:], alone, rtol=0.0, atol=1e-5)


@architectures
def test_prefill_chunk_and_single_steps_equal_the_whole(name: str) -> None:
    model, ids = build(name), text(2, 48)
    shown: list[Chunk] = []
    session = session_of(model, 48, shown.append)
    cache, parts = DynamicCache(config=model.config), []
    with transformers_probe.attached(session):
        for start, stop in ((0, 30), (30, 45), (45, 46), (46, 47), (47, 48)):
            part = ids[:, start:stop]
            parts.append(hidden(model, part, cache=cache, use_cache=True))
    assert session.calls == {0: 5, 1: 5}
    with transformers_probe.eager(model):
        expected = hidden(model, ids)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0.0, atol=1e-5)
    rows = [chunk.rows for chunk in shown if chunk.layer == 0]
    assert torch.cat(rows).tolist() == list(range(48))
    whole = weights_shown(model, ids)
    for chunk in shown:
        table = weights_of(chunk)
        expected = whole[chunk.layer][:, :, chunk.rows][..., chunk.call.first :]
        expected = expected[..., : table.shape[-1]]
        torch.testing.assert_close(table, expected, rtol=0.0, atol=1e-5)


def weights_of(chunk: Chunk) -> Tensor:
    """The weights of a chunk's queries, put together from its tiles: [B, H, Q, K]."""
    lse = chunk.log_sum_exp()
    return torch.cat([tile.weights(lse) for tile in chunk.tiles()], -1).flatten(1, 2)


def weights_shown(model: Any, ids: Tensor, **given: Any) -> dict[int, Tensor]:
    """The weights of all queries by layer, [B, H, T, T]."""
    found: dict[int, list[Tensor]] = {}

    def visit(chunk: Chunk) -> None:
        table = weights_of(chunk)
        wide = table.new_zeros(*table.shape[:-1], ids.shape[1])
        wide[..., : table.shape[-1]] = table
        found.setdefault(chunk.layer, []).append(wide)

    observe(model, ids, visit, sampling=EVERY, **given)
    return {layer: torch.cat(parts, 2) for layer, parts in found.items()}


@architectures
def test_what_is_shown_is_the_attention_of_the_model(name: str) -> None:
    model, ids = build(name), text(2, 150)
    shown = weights_shown(model, ids)
    with transformers_probe.eager(model), torch.no_grad():
        own = model(ids, output_attentions=True, use_cache=False).attentions
    for layer in range(2):
        torch.testing.assert_close(shown[layer], own[layer][..., :150], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_the_output_of_a_chunk_is_its_weights_times_its_values(name: str) -> None:
    model, ids = build(name), text(2, 90)

    def visit(chunk: Chunk) -> None:
        values = chunk.call.values
        of_heads = values.repeat_interleave(chunk.call.scores.query.shape[2], 1)  # type: ignore[attr-defined]
        table = weights_of(chunk)
        expected = table @ of_heads[:, :, : table.shape[-1]]
        torch.testing.assert_close(chunk.output().flatten(1, 2), expected, rtol=1e-5, atol=1e-5)

    assert observe(model, ids, visit, sampling=EVERY).layers == (0, 1)


def test_near_and_far_tiles_hold_every_key_once() -> None:
    model, ids = build("llama"), text(2, 150)

    def visit(chunk: Chunk) -> None:
        lse = chunk.log_sum_exp()
        total = sum(tile.weights(lse).sum(-1) for tile in chunk.far(20))
        near = [part.near(20) for part in chunk.near_parts(20)]
        start = 0
        for tile in near:
            stop = start + tile.distance.shape[0]
            rest = tile.weights(lse[..., start:stop]).sum(-1)
            if isinstance(total, Tensor):
                rest = rest + total[..., start:stop]
            torch.testing.assert_close(rest, torch.ones_like(rest), rtol=0.0, atol=1e-5)
            assert tile.distance.tolist() == [list(range(19, -1, -1))] * (stop - start)
            start = stop

    assert observe(model, ids, visit, sampling=EVERY).rows.tolist() == list(range(150))


def test_selected_layers_and_heads_are_those_of_the_whole() -> None:
    model, ids = build("llama"), text(1, 50)
    whole = weights_shown(model, ids)
    few = weights_shown(model, ids, layers=[1], heads=[3, 0])
    assert list(few) == [1]
    torch.testing.assert_close(few[1], whole[1][:, [3, 0]], rtol=0.0, atol=1e-6)
    with pytest.raises(ValueError, match="layer 2: the model has layers 0 to 1"):
        observe(model, ids, lambda chunk: None, layers=[2])
    with pytest.raises(ValueError, match="head 4: layer 0 has heads 0 to 3"):
        observe(model, ids, lambda chunk: None, heads=[4])


def test_a_window_is_as_wide_as_the_model_says() -> None:
    shown = weights_shown(build("mistral"), text(1, 60))[1]
    row = shown[0, 0, 50]
    assert (row > 0).nonzero().flatten().tolist() == list(range(51 - WINDOW, 51))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_configuration_is_put_back(implementation: str) -> None:
    model, ids = build("gemma2"), text(1, 20)
    model.set_attn_implementation("eager")
    if implementation == "sdpa":
        model = build("llama")
    before = (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )

    def fail(chunk: Chunk) -> None:
        raise RuntimeError("from the visitor")

    observe(model, ids, lambda chunk: None)
    assert model.config._attn_implementation == implementation
    with pytest.raises(RuntimeError, match="from the visitor"):
        observe(model, ids, fail)
    assert model.config._attn_implementation == implementation
    assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_training_mode_and_random_state_are_put_back() -> None:
    model, ids = build("llama").train(), text(1, 20)
    state = torch.get_rng_state()
    observe(model, ids, lambda chunk: None)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_an_attention_that_was_not_seen_is_an_error() -> None:
    model = build("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **given: (hidden_states, None)
    with pytest.raises(ValueError, match=r"layer 1 \(LlamaAttention\) was seen 0 times in 1"):
        observe(model, text(1, 20), lambda chunk: None)
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_of_another_kind_is_an_error() -> None:
    model = build("llama")
    model.model.layers[1].self_attn.scaling = 0.5
    observe(model, text(1, 20), lambda chunk: None)  # the scale is handed over: still its own
    own = model.model.layers[1].self_attn.forward

    def twice(*args: Any, **given: Any) -> Any:
        out, weights = own(*args, **given)
        return (out * (1.0 if weights is None else 1.5)), weights

    model.model.layers[1].self_attn.forward = twice  # eager code that does more than the interface
    with pytest.raises(ValueError, match="its own attention differs from what the probe computes"):
        observe(model, text(1, 20), lambda chunk: None)


def test_linear_layers_are_named_and_models_without_attention_refused() -> None:
    found = observe(build("qwen3_next"), text(1, 20), lambda chunk: None)
    assert found.layers == (1,)
    assert found.not_measured == {0: "Qwen3NextGatedDeltaNet"}
    with pytest.raises(ValueError, match=r"mamba: no layer has softmax attention \(MambaMixer\)"):
        observe(build("mamba"), text(1, 20), lambda chunk: None)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > 0:
                self.size = max(self.size, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_nothing_of_size_queries_times_keys_is_made(name: str) -> None:
    model, length = build(name), 1536
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[:, :5] = 0
    with _Largest() as largest:
        observe(
            model,
            text(1, length),
            lambda chunk: [tile.weights(chunk.log_sum_exp()) for tile in chunk.tiles()],
            sampling=Sampling(count=8),
            attention_mask=mask,
        )
    assert largest.size < 4 * length * length / 4, "a head's table in a byte each is one like it"


def test_positions_of_documents() -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 7, 8]])
    assert document_positions(packed, None, 7).tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    real = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    assert document_positions(None, real, 5).tolist() == [[0, 0, 0, 1, 2]]
    assert document_positions(None, None, 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("length", [40, 300])
def test_an_encoder_is_no_causal_model(length: int) -> None:
    """Its mask goes through the same interface, and lets queries see later tokens."""
    sizes: Any = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    config = BertConfig(**sizes, num_attention_heads=4, intermediate_size=48)
    torch.manual_seed(0)
    model = BertLMHeadModel(config).eval()
    with pytest.raises(ValueError, match="a query sees a later token; expected causal attention"):
        observe(model, text(1, length), lambda chunk: chunk.log_sum_exp(), sampling=EVERY)
    with pytest.raises(ValueError, match="BertModel gives no logits; expected a causal language"):
        observe(BertModel(config).eval(), text(1, length), lambda chunk: None)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_padding_on_the_right_changes_nothing(name: str) -> None:
    model, ids = build(name), text(2, 60)
    mask = torch.ones_like(ids)
    mask[1, 41:] = 0
    both_texts = weights_shown(model, ids, attention_mask=mask)
    for layer, weights in weights_shown(model, ids[1:, :41]).items():
        torch.testing.assert_close(both_texts[layer][1:, :, :41, :41], weights, rtol=0.0, atol=1e-5)


def test_texts_without_tokens_are_refused() -> None:
    model, ids = build("llama"), text(2, 20)
    with pytest.raises(ValueError, match=r"shape \[0, 20\]; .* at least one text of 2 tokens"):
        observe(model, ids[:0], lambda chunk: None)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match="hides all of text 1; expected a token in each"):
        observe(model, ids, lambda chunk: None, attention_mask=mask)


def test_weights_that_are_all_zero_are_weights() -> None:
    model = build("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    shown = weights_shown(model, text(1, 10))
    torch.testing.assert_close(shown[0][0, 0, 9], torch.full((10,), 0.1))
