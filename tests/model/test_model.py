"""The native model: its forward, its loss, its weights on disk and at the start."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small import FEW, NAMES, VOCABULARY, config_of, model_of, text
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from farfield import FarfieldForCausalLM, FarfieldModel

CLOSE: Any = {"rtol": 0.0, "atol": 1e-5}


def gradients(model: FarfieldForCausalLM, ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **inputs).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def test_the_loss_is_the_mean_next_token_loss_by_hand() -> None:
    model, ids = model_of("random+v"), text(2, 5)
    labels = ids.clone()
    labels[0, 2] = -100
    with torch.no_grad():
        out = model(ids, labels=labels)
    summed, count = 0.0, 0
    for row in range(2):
        for t in range(4):
            target = int(labels[row, t + 1])
            if target != -100:
                logits = out.logits[row, t].double()
                summed += float(torch.logsumexp(logits, 0) - logits[target])
                count += 1
    assert count == 7
    assert float(out.loss) == pytest.approx(summed / count, abs=1e-5)
    # Nothing learned yet: close to a guess among all tokens, give or take the large weights.
    assert 0.5 < float(out.loss) / math.log(VOCABULARY) < 2


def test_logits_to_keep_and_hidden_states() -> None:
    model, ids = model_of("learned+v"), text(2, 6)
    full = model(ids, output_hidden_states=True)
    assert full.logits.shape == (2, 6, VOCABULARY)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, full.logits[:, -2:], **CLOSE)
    index = torch.tensor([0, 3])
    kept = model(ids, logits_to_keep=index).logits
    torch.testing.assert_close(kept, full.logits[:, index], **CLOSE)
    assert len(full.hidden_states) == 3
    assert torch.equal(full.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(full.hidden_states[-1], model.model(ids).last_hidden_state)
    assert model(ids).hidden_states is None
    asked = model_of("learned+v", output_hidden_states=True)
    assert len(asked(ids).hidden_states) == 3
    assert len(asked(ids, return_dict=False)[-1]) == 3


def test_embeddings_instead_of_ids() -> None:
    ids = text(2, 5)
    for name in ("rope", "learned+v+alibi", "random_iid"):
        model = model_of(name)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    for name in ("random", "learned:source=token"):
        model = model_of(name)
        with pytest.raises(ValueError, match="pass input_ids, not inputs_embeds"):
            model(inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@pytest.mark.parametrize("name", FEW)
def test_padding_changes_nothing(name: str) -> None:
    model, ids = model_of(name), text(3, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    out = model(ids, attention_mask=mask).logits
    for row, keep in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, keep]).logits
        torch.testing.assert_close(out[row : row + 1, keep], alone, **CLOSE)
    assert torch.equal(model(ids, attention_mask=mask.float()).logits, out)
    assert torch.equal(model(ids, attention_mask=mask.bool()).logits, out)
    full = model(ids).logits
    assert torch.equal(model(ids, attention_mask=torch.ones_like(mask)).logits, full)
    # An evaluation harness pads on the right and gives no mask: what lies before is untouched.
    longer = torch.cat((ids, torch.zeros(3, 4, dtype=torch.int64)), 1)
    torch.testing.assert_close(model(longer).logits[:, :6], full, **CLOSE)


def test_a_mask_of_another_shape_is_refused() -> None:
    model, ids = model_of(), text(2, 4)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\].* \[2, 4\]"):
        model(ids, attention_mask=torch.ones(2, 3))
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1\].* \[2, 5\]"):
        model(ids[:, :1], cache=cache, attention_mask=torch.ones(2, 1))


def test_positions_that_disagree_with_the_mask_are_refused() -> None:
    model, ids = model_of("learned"), text(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    plain = model(ids, attention_mask=mask).logits
    position = torch.tensor([[0, 1, 2, 3], [9, 9, 0, 1]])
    same = model(ids, attention_mask=mask, position_ids=position).logits
    assert torch.equal(same, plain)
    for wrong in (position.flip(0), torch.arange(4).expand(2, 4), torch.arange(1, 5)[None]):
        with pytest.raises(ValueError, match="position_ids must count the tokens"):
            model(ids, attention_mask=mask, position_ids=wrong)


@pytest.mark.parametrize("name", FEW)
def test_a_bfloat16_model_is_close(name: str) -> None:
    model, ids = model_of(name), text(1, 40)
    wide = model(ids).logits
    narrow = model.bfloat16()(ids).logits
    assert narrow.dtype == torch.bfloat16
    assert narrow.isfinite().all()
    # Learned angles turn with their rounded inputs, and 40 of those add up.
    assert (narrow.float() - wide).abs().mean() < 0.1 * wide.abs().mean()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_back_from_disk_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, ids = model_of(name, seed=3), text(2, 9)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    assert stored == {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in stored
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, FarfieldForCausalLM)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.get_output_embeddings() is loaded.lm_head
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_other_ways_back_from_disk(tmp_path: Path) -> None:
    model, ids = model_of("random+v", tie_word_embeddings=False), text(2, 5)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, FarfieldModel)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half(ids).logits, model.bfloat16()(ids).logits)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["lerning_rate"] = 1
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="unknown FarfieldConfig key 'lerning_rate'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_all_mechanisms_start_from_the_same_shared_weights() -> None:
    plain: dict[str, Tensor] = {}
    for name in ["nope", *NAMES]:
        model = FarfieldForCausalLM(config_of(name))
        torch.manual_seed(len(name))
        before = torch.get_rng_state()
        model.initialise(5)
        assert torch.equal(torch.get_rng_state(), before)
        found: dict[str, Tensor] = dict(model.named_parameters())
        plain = plain or found
        for shared, values in plain.items():
            assert torch.equal(found[shared], values)
        extra = set(found) - set(plain)
        assert all(".mechanism." in one for one in extra)
        assert set(model.angle_parameters()) <= extra


def test_what_the_first_weights_are() -> None:
    config = config_of("learned", hidden_size=64, vocab_size=400, initializer_range=0.05)
    model = FarfieldForCausalLM(config)
    model.initialise(5)
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, values in found.items():
        if "norm" in name:
            assert (values == 1).all()
        else:
            std = 0.02 if "transport" in name else 0.05
            assert values.std() == pytest.approx(std, rel=0.1)
            assert values.mean().abs() < std / 10
    torch.set_default_dtype(torch.float64)
    try:
        model.initialise(5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    model.initialise(6)
    same = {name for name, p in model.named_parameters() if torch.equal(found[name], p)}
    assert same == {name for name in found if "norm" in name}


@pytest.mark.parametrize("name", FEW)
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model, ids = model_of(name).train(), text(2, 7)
    plain = gradients(model, ids, nonce=4)
    model.activation_checkpointing_enable()
    checkpointed = gradients(model, ids, nonce=4)
    for parameter, grad in plain.items():
        torch.testing.assert_close(checkpointed[parameter], grad, rtol=0.0, atol=1e-6)
    with pytest.raises(ValueError, match="a cache can't go with gradient checkpointing"):
        model(ids, use_cache=True, nonce=4)
    with torch.no_grad():
        cache = model(ids, use_cache=True, nonce=4).cache
    with pytest.raises(ValueError, match="a cache can't go with gradient checkpointing"):
        model(ids, cache=cache, nonce=4)


def test_fresh_angles_ask_for_their_nonce_in_training() -> None:
    model, ids = model_of("random_iid+v"), text(2, 9)
    assert model.needs_nonce
    assert not model_of("random").needs_nonce
    still = model(ids, labels=ids).loss
    assert torch.equal(model(ids, labels=ids, nonce=0).loss, still)
    model.train()
    with pytest.raises(ValueError, match="pass nonce=iteration"):
        model(ids, labels=ids)
    losses = [model(ids, labels=ids, nonce=nonce).loss.item() for nonce in (1, 1, 2, 0)]
    assert losses[0] == losses[1]
    assert len({*losses[1:]}) == 3
    assert losses[3] == pytest.approx(still.item(), abs=1e-6)
    ordinary = model_of("random").train()
    assert torch.equal(ordinary(ids, nonce=3).logits, ordinary(ids).logits)


def test_a_row_sees_the_same_fresh_angles_alone() -> None:
    model, ids = model_of("random_iid").train(), text(3, 6)
    together = model(ids, nonce=8).logits
    torch.testing.assert_close(model(ids[1:2], nonce=8).logits, together[1:2], **CLOSE)


def test_a_larger_vocabulary_reaches_the_mechanisms_that_read_ids() -> None:
    model, plain = model_of("random"), model_of("random")
    old = torch.randint(0, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    before = model(old).logits
    model.resize_token_embeddings(VOCABULARY + 4)
    assert torch.equal(model(old).logits[..., :VOCABULARY], before)
    new = old.clone()
    new[0, 3] = VOCABULARY + 3
    turns = [m.mechanisms[0].transport._turns(ids) for m, ids in ((model, new), (plain, old))]
    differs = (turns[0] != turns[1]).flatten(1, 1).any(-1).any(1)[0]
    assert differs.tolist() == [index == 3 for index in range(9)]
    with pytest.raises(ValueError, match="its vocabulary is fixed"):
        model_of("learned:source=token").resize_token_embeddings(VOCABULARY + 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("vocab_size", 0),
        ("num_attention_heads", 0),
        ("rope_base", float("inf")),
        ("rms_norm_eps", float("nan")),
        ("initializer_range", -1.0),
    ],
)
def test_sizes_that_make_no_model_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{key} is {value}; expected"):
        config_of(**{key: value})


@pytest.mark.parametrize("name", ["random+v+forget", "learned+v+alibi", "random_iid+window:3+logn"])
def test_a_packed_row_is_its_documents_one_by_one(name: str) -> None:
    model, ids = model_of(name), text(1, 13)
    bounds = torch.tensor([0, 4, 4, 5, 13], dtype=torch.int32)
    segments = torch.tensor([[3] * 4 + [5] + [0] * 8])
    position = torch.cat([torch.arange(n) for n in (4, 1, 8)])[None]
    alone = [model(ids[:, a:b]).logits for a, b in ((0, 4), (4, 5), (5, 13))]
    for given in (
        {"segment_ids": segments},
        {"cu_seqlens": bounds},
        {"segment_ids": segments, "cu_seqlens": bounds, "position_ids": position},
    ):
        out = model(ids, **given)
        assert out.cache is None
        torch.testing.assert_close(out.logits, torch.cat(alone, 1), rtol=0.0, atol=1e-5)
    model.train()
    (model(ids, segment_ids=segments, nonce=1).logits ** 2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_what_packed_input_can_not_express() -> None:
    model, ids = model_of("learned"), text(2, 4)
    segments = torch.tensor([[0, 0, 1, 1]] * 2)
    with pytest.raises(ValueError, match="packed documents can't be decoded with a cache"):
        model(ids, segment_ids=segments, use_cache=True)
    with pytest.raises(ValueError, match=r"segment_ids has shape \[1, 4\]; expected \[2, 4\]"):
        model(ids, segment_ids=segments[:1])
    with pytest.raises(ValueError, match="position_ids must count the tokens"):
        model(ids, segment_ids=segments, position_ids=torch.arange(4)[None])


def test_an_attention_implementation_of_transformers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attn_implementation is 'eager'; .* pass engine=\.\.\."):
        AutoModelForCausalLM.from_config(config_of("rope"), attn_implementation="eager")


def test_what_fixes_angles_stays_float32_in_a_model_loaded_in_bfloat16(tmp_path: Path) -> None:
    model = model_of("learned+v+forget")
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    plain = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        if ".mechanism." in name:
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, plain[name])
        else:
            assert parameter.dtype == torch.bfloat16
    assert loaded(text(1, 9)).logits.dtype == torch.bfloat16
