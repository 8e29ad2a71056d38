"""`farfield diagnose`: one model, a study, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.cli.diagnose import commands
from farfield.data import load_corpus

L0 = 32
SMALL = ["--queries", "16", "--lengths", "32,128", "--interventions", "far_masked"]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARFIELD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield


def save(folder: Path, mechanism: str) -> None:
    corpus = load_corpus("kjv", "bytes", max_tokens=4000)
    config = FarfieldConfig(
        vocab_size=corpus.tokenizer.vocab_size, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=16, train_length=L0, mechanism=mechanism,
    )  # fmt: skip
    model = FarfieldForCausalLM(config)
    model.initialise(0)
    model.save_pretrained(folder)
    corpus.tokenizer.save(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("In the beginning was the word, and the word was long. " * 200)
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


def test_a_model(text: Path, tmp_path: Path) -> None:
    save(tmp_path / "model", "rope")
    out = tmp_path / "out"
    done = run(tmp_path / "model", "--data", text, "--out", out, *SMALL, "--json")
    assert done.exit_code == 0, done.output
    (told,) = json.loads(done.stdout[done.stdout.index("[") :])
    assert told["facts"]["model"] == "rope"
    assert [(r["intervention"], r["length"]) for r in told["interventions"]] == [
        ("none", 32), ("none", 128), ("far_masked", 32), ("far_masked", 128),
    ]  # fmt: skip
    assert (out / "report.html").is_file()
    assert any("nothing mixes" in sentence for sentence in told["summary"])


def test_a_study(tmp_path: Path) -> None:
    out = tmp_path / "study"
    (out / "runs").mkdir(parents=True)
    from farfield.study import recipe as recipes

    recipe = recipes.load("smoke", [f"training.length={L0}", "ladder.multiples=[1,2]"], [0])
    (out / "recipe.toml").write_text(recipes.dump(recipe))
    name = recipe.mechanisms[0]
    folder = out / "runs" / f"{name}-s0"
    save(folder / "model", name)
    record = {"schema": 1, "mechanism": name, "seed": 0, "status": "finished"}
    (folder / "run.json").write_text(json.dumps(record))
    from farfield.diagnosis.folders import Options
    from farfield.study.diagnosed import diagnose_study

    options = Options(lengths=[32, 128], queries=16, intervene=())
    begun: list[str] = []

    def stage(run_name: str) -> Any:
        begun.append(run_name)
        return lambda _: None

    (made,) = diagnose_study(out, options, stage=stage)
    assert made == out / "diagnosis" / f"{name}-s0"
    assert (made / "diagnosis.json").is_file()
    assert diagnose_study(out, options, stage=stage) == [made]
    assert begun == [f"{name}-s0"]  # what has a diagnosis keeps it
    with pytest.raises(ValueError, match="no finished run of seeds 5"):
        diagnose_study(out, options, [5])
    with pytest.raises(ValueError, match=r"no recipe\.toml"):
        diagnose_study(tmp_path, options)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"intervene": ("far_frame",)}, "path-s0.*'far_frame' takes far keys apart"),
        ({"heads": [0], "intervene": ()}, "path-s0.*heads can't be chosen"),
    ],
)
def test_what_a_later_run_refuses_is_refused_before_the_first(
    tmp_path: Path, asked: dict[str, Any], words: str
) -> None:
    from farfield.diagnosis.folders import Options
    from farfield.study import recipe as recipes
    from farfield.study.diagnosed import diagnose_study

    changes = [f"training.length={L0}", 'mechanisms=["rope","path"]']
    (tmp_path / "runs").mkdir()
    (tmp_path / "recipe.toml").write_text(recipes.dump(recipes.load("smoke", changes, [0])))
    for name in ("rope", "path"):
        folder = tmp_path / "runs" / f"{name}-s0"
        save(folder / "model", name)
        record = {"schema": 1, "mechanism": name, "seed": 0, "status": "finished"}
        (folder / "run.json").write_text(json.dumps(record))
    options = Options(lengths=[32, 128], queries=16, **asked)
    with pytest.raises(ValueError, match=words):
        diagnose_study(tmp_path, options, stage=lambda run: pytest.fail(f"{run} was begun"))


def test_mistakes_end_with_one_line_and_status_2(tmp_path: Path, text: Path) -> None:
    for arguments, words in (
        ((), "expected either a MODEL or --study"),
        ((tmp_path,), "--out is missing"),
        ((tmp_path, "--out", tmp_path / "o", "--format", "csv"), "format 'csv'"),
        ((tmp_path, "--out", tmp_path / "o", "--interventions", "alib"), "did you mean 'alibi'"),
        ((tmp_path / "none", "--out", tmp_path / "o", "--data", text), "none: no model there"),
        ((tmp_path, "--out", tmp_path / "o", "--split", "tst"), "did you mean 'test'"),
        ((tmp_path, "--out", tmp_path / "o", "--seeds", "0"), "--seeds is for --study"),
        (("--study", tmp_path, "--out", tmp_path / "o"), "--out is for a MODEL"),
        (("--study", tmp_path, "--data", "kjv"), "--data is for a MODEL"),
        (("--study", tmp_path, "--train-length", "9"), "--train-length is for a MODEL"),
        (("--study", tmp_path, "--split", "all"), "--split is for a MODEL"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert words in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("text.txt", "is a file; expected a folder to write into"),
        ("text.txt/in", "can't be written: Not a directory"),
    ],
)
def test_a_folder_that_can_not_be_made_is_refused_before_the_work(
    text: Path, tmp_path: Path, where: str, words: str
) -> None:
    save(tmp_path / "model", "rope")
    (tmp_path / "text.txt").write_text("kept")
    done = run(tmp_path / "model", "--data", text, "--out", tmp_path / where, *SMALL)
    assert done.exit_code == 2, done.output
    assert words in done.output.replace("\n", " ")
    assert "attention at" not in done.output
    assert (tmp_path / "text.txt").read_text() == "kept"
