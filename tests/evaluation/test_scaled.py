"""Scaled baselines: the rows of a model at a length are those of the model built for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from oracle_model import Oracle
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.algebra.scaling import Scaling
from farfield.data import TokenStream
from farfield.evaluation.ladder import LadderResult, evaluate
from farfield.evaluation.plan import LadderSettings
from farfield.evaluation.rows import check_position, check_row
from farfield.evaluation.scaled import (
    SCALINGS,
    Scaled,
    check_scalings,
    evaluate_each,
    row_names,
    scalable,
    scaled_name,
)

VOCABULARY, BASE = 23, 16
SETTINGS = LadderSettings(multiples=(1, 2, 8), blocks=6)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


def stream() -> TokenStream:
    ids = np.random.default_rng(0).integers(1, VOCABULARY, 2 * 8 * BASE + 7)
    return TokenStream(ids.astype(np.uint16))


def ours(mechanism: str = "rope") -> FarfieldForCausalLM:
    model = FarfieldForCausalLM(FarfieldConfig(**SHAPE, mechanism=mechanism, train_length=BASE))
    model.initialise(1)
    return model.eval()


def llama(**rope: Any) -> LlamaForCausalLM:
    """The same weights as `ours()`: the two are one architecture."""
    config = LlamaConfig(
        **SHAPE,
        max_position_embeddings=BASE,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(ours().state_dict())
    return model.eval()


def ladder(model: Any, reading: Scaled | None = None) -> LadderResult:
    return evaluate(model, stream(), SETTINGS, train_length=BASE, mechanism="m", seed=0,
                    scaled=reading)  # fmt: skip


def by_key(result: LadderResult) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["protocol"], row["length"]): row for row in result.rows}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("mechanism", ["rope", "rope:mixing+v+alibi"])
def test_rows_at_a_length_are_those_of_the_model_built_for_its_factor(
    mechanism: str, scaling: Scaling
) -> None:
    model = ours(mechanism)
    plain, found = by_key(ladder(model)), by_key(ladder(model, Scaled(model, scaling, BASE)))
    assert set(found) == set(plain)
    transport, _, rest = scaled_name(mechanism, scaling).partition("+")
    for multiple in (2, 8):
        name = f"{transport},factor={multiple}" + (f"+{rest}" if rest else "")
        built = ours(name)
        built.load_state_dict(model.state_dict())
        expected = by_key(ladder(built))
        for protocol in ("windows", "fixed"):
            key = protocol, multiple * BASE
            assert found[key]["unit_nll"] == expected[key]["unit_nll"]
            assert found[key]["unit_nll"] != plain[key]["unit_nll"]
            assert found[key]["policy"]["factor"] == multiple
    for protocol, length in found:
        row, same = found[protocol, length], plain[protocol, length]
        check_row(row)
        assert row["policy"]["scaling"] == scaling
        if length == BASE or protocol == "clipped":  # never looks beyond L₀: the trained model
            assert row["policy"]["factor"] == 1.0
            assert (row["unit_nll"], row["ratio"]) == (same["unit_nll"], same["ratio"])
        base = found[protocol, BASE]
        assert row["ratio"] == pytest.approx(row["ppl"] / base["ppl"])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_ours_and_llama_agree_on_one_set_of_weights(scaling: Scaling) -> None:
    """Two implementations of the rule and its temperature, one of them transformers' own."""
    first, second = ours(), llama()
    mine = by_key(ladder(first, Scaled(first, scaling, BASE)))
    theirs = by_key(ladder(second, Scaled(second, scaling, BASE)))
    for key, row in mine.items():
        assert row["unit_nll"] == pytest.approx(theirs[key]["unit_nll"], rel=2e-5)


def test_llama_is_scaled_by_its_own_rope_parameters() -> None:
    model = llama()
    said: dict[Scaling, dict[str, Any]] = {
        "linear": {"rope_type": "linear", "factor": 8.0},
        "ntk": {"rope_theta": 10000.0 * 8.0 ** (16 / 14)},
        "yarn": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": BASE,
        },
    }
    for scaling, rope in said.items():
        reading = Scaled(model, scaling, BASE)
        assert reading.mechanism == f"llama:scaling={scaling}"
        found, expected = by_key(ladder(model, reading)), by_key(ladder(llama(**rope)))
        key = "windows", 8 * BASE
        assert found[key]["unit_nll"] == expected[key]["unit_nll"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_model_that_turns_part_of_its_heads_is_scaled_in_that_part(scaling: Scaling) -> None:
    config = GPTNeoXConfig(**{**SHAPE, "hidden_size": 64}, max_position_embeddings=BASE)
    model = GPTNeoXForCausalLM(config).eval()
    assert model.gpt_neox.rotary_emb.inv_freq.shape == (4,)  # a quarter of 32 dimensions
    plain, found = ladder(model), ladder(model, Scaled(model, scaling, BASE))
    same = [a["unit_nll"] == b["unit_nll"] for a, b in zip(plain.rows, found.rows, strict=True)]
    assert same == [row["length"] == BASE or row["protocol"] == "clipped" for row in plain.rows]


def changed_and_failing(model: Any, ids: torch.Tensor, before: torch.Tensor) -> None:
    assert not torch.equal(model(ids).logits, before)
    assert all(module.training for module in model.modules())
    model(ids + VOCABULARY)


@pytest.mark.parametrize("make", [ours, llama])
def test_the_model_comes_back_as_it_was(make: Any) -> None:
    model = make().train()
    modules = dict(model.named_modules())
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        reading = Scaled(model, "yarn", BASE)
        with pytest.raises(IndexError), reading.at(8 * BASE):
            changed_and_failing(model, ids, before)
        after = model(ids).logits
    assert torch.equal(after, before)
    assert dict(model.named_modules()) == modules
    with reading.at(BASE), reading.at(3):
        assert dict(model.named_modules()) == modules  # up to L₀ nothing is touched


def test_a_longer_training_length_that_is_given_is_the_one_that_counts() -> None:
    model = ours()
    reading = Scaled(model, "yarn", 4 * BASE)
    assert [reading.factor(n) for n in (BASE, 4 * BASE, 6 * BASE)] == [1.0, 1.0, 1.5]
    with reading.at(8 * BASE):
        turned = model.mechanisms[0].transport.turns
    wider = FarfieldConfig(**SHAPE, mechanism="rope:scaling=yarn,factor=2", train_length=64)
    assert turned == FarfieldForCausalLM(wider).mechanisms[0].transport.turns


def test_each_reading_is_one_evaluation_of_the_same_weights() -> None:
    model, shares = ours(), []
    results = list(
        evaluate_each(model, stream(), SETTINGS, train_length=BASE, mechanism="rope", seed=3,
                      scaling=("linear", "yarn"), done=("rope:scaling=linear",),
                      progress=lambda done, total: shares.append(done / total))
    )  # fmt: skip
    names = [{row["mechanism"] for row in result.rows} for result in results]
    assert names == [{"rope"}, {"rope:scaling=yarn"}]
    assert {row["seed"] for result in results for row in result.rows} == {3}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for row in results[1].positions:
        check_position(row)
        assert row["mechanism"] == "rope:scaling=yarn"
    whole = results[0].joined(results[1])
    assert whole.rows == results[0].rows + results[1].rows


class OutOfMemory(Scaled):
    """Has no room for what is longer than 2 L₀."""

    @contextmanager
    def at(self, length: int) -> Iterator[None]:
        if length > 2 * BASE:
            raise MemoryError("3 TiB")
        with super().at(length):
            yield


def test_what_only_the_scaled_model_fails_at_says_so() -> None:
    model = ours()
    found = evaluate(model, stream(), SETTINGS, train_length=BASE, mechanism="rope:scaling=ntk",
                     seed=0, scaled=OutOfMemory(model, "ntk", BASE))  # fmt: skip
    left_out = ladder(model).joined(found).left_out
    assert [(left["length"], left["protocol"]) for left in left_out] == [
        (8 * BASE, "windows"), (8 * BASE, "fixed"),
    ]  # fmt: skip
    told = "rope:scaling=ntk: the forward ran out of memory: 3 TiB"
    assert {left["reason"] for left in left_out} == {told}


def test_names_of_rows() -> None:
    assert row_names("rope:mixing+v+alibi", ("ntk", "yarn")) == {
        "rope:mixing+v+alibi": "none",
        "rope:mixing,scaling=ntk+v+alibi": "ntk",
        "rope:mixing,scaling=yarn+v+alibi": "yarn",
    }
    assert row_names("learned+v", SCALINGS) == {"learned+v": "none"}
    assert scalable("rope+alibi")
    assert not scalable("alibi")
    assert not scalable("rope:scaling=linear,factor=2")
    assert check_scalings(["yarn", "linear", "yarn"]) == ("yarn", "linear")
    with pytest.raises(ValueError, match=r"scaling 'yarm'.*linear, ntk, yarn; did you mean 'yarn'"):
        check_scalings(["yarm"])


@pytest.mark.parametrize(
    ("mechanism", "told"),
    [
        ("alibi", "'alibi' can't be scaled by yarn: its transport 'nope' has no frequencies"),
        ("learned+v", "its transport 'learned' has no frequencies by position; expected .* rope"),
        ("rope:scaling=ntk,factor=2", "its transport 'rope' is scaled already, by ntk"),
    ],
)
def test_our_models_that_cannot_be_scaled_are_refused(mechanism: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        Scaled(ours(mechanism), "yarn", BASE)
    assert "\n" not in str(caught.value)


def gemma3() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, num_key_value_heads=2, head_dim=16))


def strange(change: Any) -> LlamaForCausalLM:
    """A Llama whose rotary embedding is of a class of somebody else's."""
    model = llama()
    rotary = type(model.model.rotary_emb)

    class Other(rotary):  # type: ignore[misc, valid-type]
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            change(self)

    model.model.rotary_emb = Other(model.config)
    return model


def ignores_its_type(module: nn.Module) -> None:
    module.inv_freq = module.inv_freq * 0 + module.original_inv_freq[0] * torch.tensor(0.5)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2)),
         "a gpt2 model can't be scaled by linear: it has no rotary embeddings"),
        (Oracle, "a oracle model can't be scaled by linear: it has no rotary embeddings"),
        (gemma3, "a gemma3_text model .* has frequencies for each kind of layer"),
        (lambda: llama(rope_type="linear", factor=2.0), "is of the type 'linear' already"),
        (lambda: strange(ignores_its_type), "does not turn as the rule says"),
        (lambda: strange(lambda m: setattr(m, "attention_scaling", 1.5)),
         "does not scale its attention as the rule says"),
    ],
)  # fmt: skip
def test_models_of_others_that_cannot_be_scaled_exactly_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        Scaled(make(), "linear", BASE)
    assert "\n" not in str(caught.value)


def test_a_rotary_embedding_that_was_changed_in_place_is_refused() -> None:
    model = llama()
    model.model.rotary_emb.inv_freq *= 0.5
    with pytest.raises(ValueError, match="is not what its rope_parameters say"):
        Scaled(model, "ntk", BASE)
