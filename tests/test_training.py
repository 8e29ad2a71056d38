"""Training: exact resume, the order of the data, finiteness, interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from farfield.training import (
    Interrupted,
    NonFiniteLoss,
    Progress,
    TrainingBlocks,
    TrainingResult,
    TrainingSettings,
    last_checkpoint,
    parameter_groups,
    read_metrics,
    train,
    validation_loss,
)

VOCABULARY = 17
SMALL = TrainingSettings(
    length=8, batch=4, iterations=100, learning_rate=1e-3, log_every=5, validate_every=25,
    validation_blocks=3, checkpoint_every=50,
)  # fmt: skip


class Tokens:
    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def block(self, start: int, length: int) -> np.ndarray:
        assert start >= 0
        assert start + length <= len(self.ids)
        return self.ids[start : start + length].astype(np.int64)


@dataclass
class Text:
    train: Tokens
    validation: Tokens


def text(tokens: int = 1000) -> Text:
    draw = np.random.default_rng(0)
    ids = (np.cumsum(draw.integers(0, 3, tokens)) % VOCABULARY).astype(np.uint16)
    return Text(Tokens(ids), Tokens(ids[:100]))


def llama(**options: float) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, tie_word_embeddings=True, **options,
        )
    )  # fmt: skip


def fit(
    out: Path,
    settings: TrainingSettings = SMALL,
    model: torch.nn.Module | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> tuple[torch.nn.Module, TrainingResult]:
    model = llama() if model is None else model
    result = train(
        model, text(), settings, out, seed=0, resume=resume, progress=progress, stop=stop
    )
    return model, result


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    out = tmp_path_factory.mktemp("hundred")
    model, result = fit(out)
    assert result.iterations == 100
    assert result.tokens == 100 * 4 * 8
    return out, model


def test_the_loss_falls_and_is_written_down(hundred: tuple[Path, torch.nn.Module]) -> None:
    rows = read_metrics(hundred[0])
    losses = [row["loss"] for row in rows if "loss" in row]
    assert [row["iteration"] for row in rows if "loss" in row] == list(range(5, 101, 5))
    assert losses[-1] < losses[0] - 0.2
    assert [r["iteration"] for r in rows if "validation_loss" in r] == [25, 50, 75, 100]
    logged = next(row for row in rows if "loss" in row)
    assert set(logged) == {
        "iteration", "loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds",
    }  # fmt: skip


def test_fifty_and_resume_and_fifty_are_a_hundred(
    tmp_path: Path, hundred: tuple[Path, torch.nn.Module]
) -> None:
    def power_cut(state: Progress) -> None:
        if state.iteration == 57:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path, progress=power_cut)
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint[0] == 50
    assert (checkpoint[1] / "model.safetensors").exists()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 60, "lo')
    model, result = fit(tmp_path, resume=True)
    assert result.iterations == 100
    assert same(model, hundred[1])
    volatile = {"seconds", "tokens_per_second"}
    strip = [
        [{k: v for k, v in row.items() if k not in volatile} for row in read_metrics(folder)]
        for folder in (tmp_path, hundred[0])
    ]
    assert strip[0] == strip[1]


def test_a_stop_leaves_a_checkpoint_of_that_very_iteration(
    tmp_path: Path, hundred: tuple[Path, torch.nn.Module]
) -> None:
    seen: list[int] = []
    with pytest.raises(Interrupted, match="iteration 7") as stopped:
        fit(tmp_path, progress=lambda p: seen.append(p.iteration), stop=lambda: len(seen) == 7)
    assert stopped.value.iteration == 7
    assert last_checkpoint(tmp_path) == (7, tmp_path / "checkpoints" / "checkpoint-7")
    model, _ = fit(tmp_path, resume=True)
    assert same(model, hundred[1])


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for number, state in ((10, '{"global_step": 10}'), (20, '{"global_st')):
        folder = tmp_path / "checkpoints" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoints" / "checkpoint-30").mkdir()
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == 10


def test_a_checkpoint_of_another_schedule_is_refused(
    tmp_path: Path, hundred: tuple[Path, torch.nn.Module]
) -> None:
    other = SMALL.model_copy(update={"iterations": 200})
    with pytest.raises(ValueError, match="run of 100 iterations; expected 200"):
        fit(hundred[0], other, resume=True)


def test_a_non_finite_loss_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    model = llama()

    def poison(state: Progress) -> None:
        if state.iteration == 6:
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")

    settings = SMALL.model_copy(update={"checkpoint_every": 5, "iterations": 20})
    with pytest.raises(NonFiniteLoss, match="loss is nan at iteration 7; last good checkpoint: 5"):
        fit(tmp_path, settings, model, progress=poison)
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint[0] == 5


def test_a_non_finite_gradient_never_reaches_the_weights(tmp_path: Path) -> None:
    model = llama()
    model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NonFiniteLoss, match="gradient is not finite at iteration 1; no checkpoint"):
        fit(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_non_finite_weights_are_not_a_checkpoint(tmp_path: Path) -> None:
    model = llama()

    def poison(state: Progress) -> None:
        if state.iteration == 5:
            with torch.no_grad():
                model.model.norm.weight[0] = float("inf")

    settings = SMALL.model_copy(update={"checkpoint_every": 5})
    with pytest.raises(NonFiniteLoss, match="weights are not finite at iteration 5"):
        fit(tmp_path, settings, model, progress=poison)
    assert last_checkpoint(tmp_path) is None


def test_the_order_of_the_blocks_comes_from_the_seed_alone() -> None:
    stream = text(1000).train

    def starts(seed: int) -> list[int]:
        blocks = TrainingBlocks(stream, 8, 300, seed)
        return [blocks.start(i) for i in range(300)]

    torch.manual_seed(1)
    first = starts(5)
    torch.manual_seed(2)
    assert starts(5) == first
    assert starts(6) != first
    blocks = TrainingBlocks(stream, 8, 300, 5)
    assert [blocks.start(i) for i in reversed(range(300))] == first[::-1]  # no example needs others
    per_pass = blocks.per_pass
    assert per_pass == 124
    one_pass = sorted(first[:per_pass])
    assert set(np.diff(one_pass)) == {8}  # disjoint, each once
    assert len({start % 8 for start in first}) > 1  # another offset in another pass
    assert blocks[0].shape == (9,)
    assert TrainingBlocks(Tokens(np.arange(9)), 8, 5, 0).start(4) == 0


def test_a_text_shorter_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"8 tokens is shorter than one block; .* 9 tokens"):
        TrainingBlocks(Tokens(np.zeros(8)), 8, 1, 0)
    with pytest.raises(ValueError, match="validation text of 8 tokens"):
        validation_loss(llama(), Tokens(np.zeros(8)), SMALL)


def test_validation_is_the_mean_over_its_blocks_and_touches_no_random_state() -> None:
    model = llama(attention_dropout=0.5).train()
    stream = text().validation
    state = torch.random.get_rng_state()
    settings = SMALL.model_copy(update={"batch": 2})
    got = validation_loss(model, stream, settings)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    model.eval()
    with torch.no_grad():
        each = [
            model(input_ids=ids, labels=ids).loss.item()
            for ids in (torch.from_numpy(stream.block(s, 9))[None] for s in (0, 32, 64))
        ]
    assert got == pytest.approx(sum(each) / 3, rel=1e-6)


def test_validating_more_often_does_not_change_the_training(tmp_path: Path) -> None:
    short = SMALL.model_copy(update={"iterations": 6})
    seldom, _ = fit(tmp_path / "a", short)
    often, _ = fit(tmp_path / "b", short.model_copy(update={"validate_every": 1}))
    assert same(seldom, often)


def test_accumulation_and_recomputation_do_not_change_the_training(tmp_path: Path) -> None:
    short = SMALL.model_copy(update={"iterations": 4})
    whole, _ = fit(tmp_path / "a", short)
    parts, _ = fit(tmp_path / "b", short.model_copy(update={"accumulation": 2}))
    recomputed, _ = fit(tmp_path / "c", short.model_copy(update={"gradient_checkpointing": True}))
    for a, b, c in zip(*(m.parameters() for m in (whole, parts, recomputed)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0)
        torch.testing.assert_close(a, c, atol=1e-6, rtol=0)
    assert not recomputed.is_activation_checkpointing


def test_bfloat16_trains_and_leaves_a_float32_model(tmp_path: Path) -> None:
    settings = SMALL.model_copy(update={"iterations": 3, "dtype": "bfloat16"})
    model, result = fit(tmp_path, settings)
    assert np.isfinite(result.loss)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    ids = torch.arange(8)[None]
    exact = llama()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():  # not under autocast any more
        assert torch.equal(model(ids).logits, exact.eval()(ids).logits)
    assert model.config.use_cache


class Angled(LlamaForCausalLM):
    """Stands for a model whose angles are drawn afresh in every iteration."""

    needs_nonce = True

    def forward(self, *args: object, nonce: int = 0, **kwargs: object) -> object:
        if self.training:
            self.nonces = [*getattr(self, "nonces", []), nonce]
        else:
            assert nonce == 0
        return super().forward(*args, **kwargs)

    def angle_parameters(self) -> list[str]:
        return ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]


def test_the_nonce_is_the_number_of_the_iteration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Angled(llama().config)
    settings = SMALL.model_copy(update={"iterations": 3, "accumulation": 2, "validate_every": 1})
    fit(tmp_path, settings, model)
    assert model.nonces == [1, 1, 2, 2, 3, 3]


def test_parameter_groups() -> None:
    model = Angled(llama().config)
    settings = SMALL.model_copy(update={"angle_learning_rate": 5e-2, "weight_decay": 0.1})
    rules = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, settings)
        for parameter in group["params"]
    }
    named = {name: rules[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(named) == len(rules)
    assert named["model.embed_tokens.weight"] == (1e-3, 0.1)
    assert named["model.layers.0.input_layernorm.weight"] == (1e-3, 0.0)
    assert named["model.layers.0.self_attn.q_proj.weight"] == (5e-2, 0.1)
    assert named["model.norm.weight"] == (5e-2, 0.0)
    plain = parameter_groups(model, SMALL)
    assert {group["lr"] for group in plain} == {1e-3}


def test_the_learning_rate_warms_up_and_decays(tmp_path: Path) -> None:
    settings = SMALL.model_copy(
        update={"iterations": 20, "warmup": 0.25, "final": 0.1, "log_every": 1}
    )
    fit(tmp_path, settings)
    rates = [row["learning_rate"] for row in read_metrics(tmp_path) if "loss" in row]
    assert rates[:6] == pytest.approx([0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 1e-4 < rates[-1] < 1.3e-4


def test_tensorboard_is_written_only_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = SMALL.model_copy(update={"iterations": 2})
    fit(tmp_path / "off", settings)
    assert not (tmp_path / "off" / "tensorboard").exists()
    fit(tmp_path / "on", settings.model_copy(update={"tensorboard": True}))
    assert list((tmp_path / "on" / "tensorboard").iterdir())


def test_settings_say_what_is_wrong() -> None:
    with pytest.raises(ValidationError, match="accumulation 3 does not divide batch 4"):
        TrainingSettings(batch=4, accumulation=3)
    with pytest.raises(ValidationError, match="lerning_rate"):
        TrainingSettings(lerning_rate=1.0)


def test_metrics_survive_a_half_written_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1}) + '\n{"itera')
    assert read_metrics(tmp_path) == [{"iteration": 1}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_resuming_what_was_trained_to_the_end_changes_nothing(
    hundred: tuple[Path, torch.nn.Module],
) -> None:
    before = read_metrics(hundred[0])
    model, result = fit(hundred[0], resume=True)
    assert result.iterations == 100
    assert result.loss == before[-1]["loss"]
    assert same(model, hundred[1])
    assert read_metrics(hundred[0]) == before
