"""One run in this process: its files, its statuses, what it can be continued from."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from farfield.data import load_corpus
from farfield.evaluation import rows
from farfield.study import files, job
from farfield.study import recipe as recipes
from farfield.study.job import Stop
from farfield.study.recipe import Recipe
from farfield.study.run import Run, grid, order_of_start
from farfield.training import TrainingBlocks, last_checkpoint, read_metrics


def planned(recipe: Recipe, out: Path, index: int = 0) -> Run:
    run = grid(recipe, out)[index]
    run.prepare(resume=False)
    return run


def finished(recipe: Recipe, out: Path, index: int = 0) -> Run:
    run = planned(recipe, out, index)
    assert job.execute(run, recipe, Stop()) == "finished"
    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, small: Recipe) -> tuple[Recipe, Run]:
    return small, finished(small, tmp_path_factory.mktemp("done"), index=1)


def test_a_run_leaves_what_the_contract_names(done: tuple[Recipe, Run]) -> None:
    run = done[1]
    assert run.name == "learned+v-s0"
    record = json.loads((run.folder / "run.json").read_text())
    assert (record["schema"], record["mechanism"], record["seed"]) == (1, "learned+v", 0)
    assert (record["status"], record["phase"], record["error"]) == ("finished", None, None)
    assert record["iteration"] == record["iterations"] == 8
    assert record["train_tokens"] == 8 * 4 * 16
    assert record["train_seconds"] > 0
    assert record["ladder_seconds"] > 0
    assert record["tokens_per_second"] == pytest.approx(512 / record["train_seconds"])
    assert record["peak_memory_bytes"] > 50e6
    assert record["started"] <= record["finished"]
    found = rows.read_rows(run.folder / "results.jsonl")
    assert {row["length"] for row in found} == {16, 32, 64}
    assert {row["protocol"] for row in found} == {"windows", "fixed", "clipped"}
    assert {(row["mechanism"], row["seed"]) for row in found} == {("learned+v", 0)}
    assert rows.read_positions(run.folder / "positions.jsonl")
    logged = read_metrics(run.folder)
    assert [row["iteration"] for row in logged if "loss" in row] == [2, 4, 6, 8]
    assert [row["iteration"] for row in logged if "validation_loss" in row] == [4, 8]
    assert not (run.folder / "checkpoints").exists()
    assert not list(run.folder.glob(".*partial"))


def test_the_model_folder_is_a_hugging_face_model(done: tuple[Recipe, Run]) -> None:
    folder = done[1].folder / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.mechanism == "learned+v"
    assert model.config.train_length == 16
    assert model.config.use_cache
    assert tokenizer("far")["input_ids"][-3:] == list(b"far")
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_counts_of_parameters_and_operations(done: tuple[Recipe, Run]) -> None:
    recipe, run = done
    data = recipe.data
    corpus = load_corpus(data.source, data.tokenizer)
    model = job.build(recipe, corpus, "learned+v", 0)
    bare = job.build(recipe, corpus, "nope", 0)
    own = {name for name, _ in model.named_parameters()}
    own -= {name for name, _ in bare.named_parameters()}
    count = sum(p.numel() for name, p in model.named_parameters() if name in own)
    assert run.record["parameters_transport"] == count > 0
    assert run.record["parameters"] == sum(p.numel() for p in model.parameters())
    assert job.parameters(recipe, corpus, "learned+v") == run.record["parameters"]
    # Two operations for each weight of a matrix (the tied embedding once, as the head), and two
    # products of length x length by head dimension for each head.
    weights = sum(p.numel() for p in bare.parameters() if p.ndim >= 2)
    attention = 2 * 2 * 16 * 32 * 2  # layers, products, length, width, multiply and add
    assert job.flops_per_token(bare, 16) == 2 * weights + attention
    assert job.flops_per_token(model, 16) >= job.flops_per_token(bare, 16) + 2 * count


def test_mechanisms_share_weights_and_the_order_of_data(small: Recipe) -> None:
    corpus = load_corpus(small.data.source, small.data.tokenizer)
    first, second = (job.build(small, corpus, name, 3) for name in small.mechanisms)
    mine, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    shared = mine.keys() & theirs.keys()
    assert len(shared) == len(mine)
    assert all(torch.equal(mine[name], theirs[name]) for name in shared)


def test_the_order_of_data_is_the_same_for_every_mechanism(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[int]] = {}

    class Recorded(TrainingBlocks):
        def __getitem__(self, example: int) -> np.ndarray:
            seen[current].append(self.start(example))
            return super().__getitem__(example)

    monkeypatch.setattr("farfield.training.loop.TrainingBlocks", Recorded)
    recipe = recipes.recipe_from({**small.as_toml(), "mechanisms": ["random_iid", "alibi"]}, "s")
    for index, current in enumerate(recipe.mechanisms):
        seen[current] = []
        finished(recipe, tmp_path, index)  # random_iid trains at all: it is given its nonce
    assert len(seen["alibi"]) == 8 * 4
    assert seen["alibi"] == seen["random_iid"]


def test_an_interrupted_run_goes_on_where_it_was(done: tuple[Recipe, Run], tmp_path: Path) -> None:
    recipe, whole = done
    run = planned(recipe, tmp_path, index=1)
    stop = Stop()

    def ask(facts: dict[str, Any]) -> None:
        if facts["iteration"] == 5:
            stop.ask()

    assert job.execute(run, recipe, stop, ask) == "interrupted"
    assert run.begun == "at iteration 5"
    run.prepare(resume=True)
    assert job.execute(run, recipe, Stop()) == "finished"
    weights = [(one.folder / "model" / "model.safetensors").read_bytes() for one in (run, whole)]
    assert weights[0] == weights[1]
    results = [rows.read_rows(one.folder / "results.jsonl") for one in (run, whole)]
    assert results[0] == results[1]


def test_a_run_interrupted_on_the_ladder_is_not_trained_again(
    done: tuple[Recipe, Run], tmp_path: Path
) -> None:
    recipe, whole = done
    run = planned(recipe, tmp_path, index=1)
    stop = Stop()

    def ask(facts: dict[str, Any]) -> None:
        if facts["phase"] == "ladder":
            stop.ask()

    assert job.execute(run, recipe, stop, ask) == "interrupted"
    assert run.begun == "trained"
    weights = run.folder / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    run.prepare(resume=True)
    assert job.execute(run, recipe, Stop()) == "finished"
    assert weights.stat().st_mtime_ns == before
    assert run.record["train_seconds"] > 0
    assert rows.read_rows(run.folder / "results.jsonl") == rows.read_rows(
        whole.folder / "results.jsonl"
    )


def test_a_non_finite_run_fails_with_its_iteration(small: Recipe, tmp_path: Path) -> None:
    training = {**small.as_toml()["training"], "angle_learning_rate": 1e36}
    recipe = recipes.recipe_from({**small.as_toml(), "training": training}, "small")
    run = planned(recipe, tmp_path, index=1)
    assert job.execute(run, recipe, Stop()) == "failed"
    assert "at iteration" in run.record["error"]
    assert "\n" not in run.record["error"]
    assert not run.trained


def test_a_full_disk_is_one_clear_line(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(small, tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("farfield.study.job.train", full)
    assert job.execute(run, small, Stop()) == "failed"
    assert run.record["error"] == (
        f"no space left on the disk of {run.folder}; free some and use --resume"
    )
    write = files.write_json
    monkeypatch.setattr(files, "write_json", full)  # not even the record can be written
    with pytest.raises(OSError, match="No space left"):
        write_and_raise(run)
    assert job.execute(run, small, Stop()) == "failed"
    monkeypatch.setattr(files, "write_json", write)
    monkeypatch.undo()
    run.prepare(resume=True)
    assert job.execute(run, small, Stop()) == "finished"


def write_and_raise(run: Run) -> None:
    files.write_json(run.folder / "run.json", {})


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    files.write_json(path, {"a": 1})

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="No space left"):
            files.write_json(path, {"a": 2})
    assert files.read_json(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    path.write_text('{"a": 1')
    assert files.read_json(path) is None
    path.write_text("[1]")
    assert files.read_json(path) is None


def test_a_broken_record_is_a_pending_run(small: Recipe, tmp_path: Path) -> None:
    run = planned(small, tmp_path)
    (run.folder / "run.json").write_text('{"status": "fin')
    assert run.status == "pending"
    run.prepare(resume=True)
    assert files.read_json(run.folder / "run.json") is not None


def test_starting_afresh_clears_and_resuming_keeps(small: Recipe, tmp_path: Path) -> None:
    run = planned(small, tmp_path)
    folder = run.folder / "checkpoints" / "checkpoint-4"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    (run.folder / "metrics.jsonl").write_text('{"iteration": 4, "loss": 1.0}\n')
    run.prepare(resume=True)
    assert last_checkpoint(run.folder) is not None
    assert run.last_metrics() == {"iteration": 4, "loss": 1.0}
    run.prepare(resume=False)
    assert last_checkpoint(run.folder) is None
    assert run.last_metrics() == {}


def test_signals_ask_training_to_stop_and_cut_all_else_short() -> None:
    stop = Stop()
    with stop.on_signals():
        with stop.patience():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        other = Stop()
    with other.on_signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    orphan = Stop()
    orphan.with_parent()
    assert not orphan()
    orphan._parent = -1
    assert orphan()


def test_order_of_start(small: Recipe, tmp_path: Path) -> None:
    recipe = recipes.recipe_from(
        {
            **small.as_toml(),
            "mechanisms": ["rope", "alibi", "random", "random+v", "learned+v+alibi"],
            "seeds": [0, 1],
        },
        "small",
    )
    names = [run.name for run in order_of_start(grid(recipe, tmp_path), first=2)]
    assert names[:5] == [
        "rope-s0", "alibi-s0", "learned+v+alibi-s0", "random+v-s0", "random-s0",
    ]  # fmt: skip
    assert names[5:7] == ["learned+v+alibi-s1", "random+v-s1"]
    assert len(names) == 10
