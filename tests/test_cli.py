"""The command line: help, versions, mistakes in one line, and each command's work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import farfield
from farfield.cli import app
from farfield.evaluation import rows

runner = CliRunner()
SMALL = """
mechanisms = ["rope"]
data = {{ source = '{text}' }}
model = {{ layers = 2, width = 32, heads = 2 }}
training = {{ length = 16, batch = 4, iterations = 8, validation_blocks = 4 }}
ladder = {{ multiples = [1, 2, 4], tokens = 256, blocks = 4 }}
"""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARFIELD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(text, run folder) of `farfield train`."""
    base = tmp_path_factory.mktemp("trained")
    text = base / "text.txt"
    text.write_text("the far field and the near field turn in step " * 200)
    recipe = base / "small.toml"
    recipe.write_text(SMALL.format(text=text))
    done = runner.invoke(
        app,
        ["train", "random+v", "--recipe", str(recipe), "--out", str(base / "run"), "--seed", "1"],
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(base / "run")
    return text, base / "run"


def mistake(*arguments: str) -> str:
    """The one line of a call that is the caller's mistake."""
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("farfield: ")
    return lines[0]


COMMANDS = ["study", "train", "ladder", "generate", "report", "mechanisms", "recipes"]


def test_help_names_every_command_and_shows_examples() -> None:
    told = runner.invoke(app, ["--help"])
    assert told.exit_code == 0
    assert all(command in told.output for command in COMMANDS)
    for command in COMMANDS:
        page = runner.invoke(app, [command, "--help"])
        assert page.exit_code == 0
    assert "farfield study smoke" in runner.invoke(app, ["study", "--help"]).output


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"farfield {farfield.__version__}"


def test_mechanisms() -> None:
    told = json.loads(runner.invoke(app, ["mechanisms", "--json"]).output)
    by_name = {row["name"]: row for row in told}
    assert by_name["learned"]["kind"] == "transport"
    assert by_name["alibi"]["kind"] == "control"
    assert by_name["learned"]["options"]["c"] == 1.0
    table = runner.invoke(app, ["mechanisms"]).output
    assert all(name in table for name in by_name)


def test_recipes() -> None:
    told = json.loads(runner.invoke(app, ["recipes", "--json"]).output)
    assert [recipe["name"] for recipe in told] == ["smoke", "laptop", "transports", "paper"]
    one = runner.invoke(app, ["recipes", "laptop", "--json", "--set", "training.iterations=7"])
    assert json.loads(one.output)["training"]["iterations"] == 7
    assert "[training]" in runner.invoke(app, ["recipes", "laptop"]).output
    assert "OpenWebText" in runner.invoke(app, ["recipes"]).output


def test_mistakes_are_one_line_and_status_two(tmp_path: Path) -> None:
    assert "did you mean learning_rate?" in mistake(
        "study", "smoke", "--set", "training.lerning_rate=1", "--out", str(tmp_path / "o")
    )
    assert "did you mean smoke?" in mistake("study", "smok")
    assert "expected whole numbers such as 0,1,2" in mistake("study", "smoke", "--seeds", "a")
    assert "learned" in mistake("train", "lerned", "--out", str(tmp_path / "o"))
    assert "no such folder" in mistake("report", str(tmp_path / "nowhere"))
    assert "config.json" in mistake("generate", str(tmp_path / "nowhere"), "--prompt", "a")
    assert "nowhere" in mistake("ladder", str(tmp_path / "nowhere"), "--out", "a.jsonl")
    assert "no recipe" in mistake("recipes", "zzz")
    assert not (tmp_path / "o").exists()


def test_study_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farfield.study import launch
    from farfield.study.launch import Outcome
    from farfield.study.run import Run

    asked: dict[str, object] = {}
    failed = Run("rope", 0, tmp_path / "rope-s0")
    failed.prepare(resume=False)
    record = {**failed.record, "status": "failed", "error": "loss is nan at iteration 7"}
    (failed.folder / "run.json").write_text(json.dumps(record))
    outcome = Outcome([failed], tmp_path / "report.html", ["report not written: X: no ink"])

    def study(recipe: object, out: Path, **options: object) -> Outcome:
        asked.update(options, seeds=recipe.seeds, out=out)  # type: ignore[attr-defined]
        return outcome

    monkeypatch.setattr(launch, "study", study)
    done = runner.invoke(app, ["study", "smoke", "--seeds", "4,5", "--jobs", "3", "--resume"])
    assert done.exit_code == 1
    assert done.stdout.strip() == str(tmp_path / "report.html")
    assert "failed: rope-s0: loss is nan at iteration 7" in done.stderr
    assert "report not written: X: no ink" in done.stderr
    assert (asked["seeds"], asked["jobs"], asked["resume"]) == ((4, 5), 3, True)
    assert asked["out"] == Path("studies/smoke")
    outcome.interrupted = True
    done = runner.invoke(app, ["study", "smoke", "--out", "my study"])
    assert done.exit_code == 130
    assert "farfield study 'my study/recipe.toml' --out 'my study' --resume" in done.stderr


def test_a_trained_run_is_not_trained_again(trained: tuple[Path, Path]) -> None:
    run = trained[1]
    record = json.loads((run / "run.json").read_text())
    assert (record["mechanism"], record["seed"], record["status"]) == ("random+v", 1, "finished")
    arguments = ["train", "random+v", "--recipe", str(run / "recipe.toml"), "--out", str(run)]
    assert "finished" in mistake(*arguments, "--seed", "1")
    assert "seeds is [1] there and [0] here" in mistake(*arguments)


def test_a_run_that_fails_ends_with_status_one(trained: tuple[Path, Path], tmp_path: Path) -> None:
    done = runner.invoke(
        app,
        ["train", "learned", "--recipe", str(trained[1] / "recipe.toml"), "--out",
         str(tmp_path / "run"), "--set", "training.angle_learning_rate=1e36"],
    )  # fmt: skip
    assert done.exit_code == 1
    assert "at iteration" in done.stderr.splitlines()[-1]


def test_ladder(trained: tuple[Path, Path], tmp_path: Path) -> None:
    text, run = trained
    out = tmp_path / "rows.jsonl"
    arguments = ["ladder", str(run / "model"), "--data", str(text), "--lengths", "16,64,100000"]
    done = runner.invoke(app, [*arguments, "--out", str(out), "--json", "--tokens", "256"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {row["length"] for row in told["rows"]} == {16, 64}
    assert {left["length"] for left in told["left_out"]} == {100000}
    found = rows.read_rows(out)
    assert {row["mechanism"] for row in found} == {"random+v"}
    assert [row["ppl"] for row in found] == [row["ppl"] for row in told["rows"]]
    assert (tmp_path / "rows.positions.jsonl").exists()
    shown = runner.invoke(app, [*arguments, "--out", str(out), "--protocols", "windows"])
    assert "windows" in shown.stdout
    assert "fixed" not in shown.stdout


def test_ladder_of_a_model_that_is_not_ours(tmp_path: Path, trained: tuple[Path, Path]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from farfield.data import load_tokenizer

    tokenizer = load_tokenizer("bytes")
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save(tmp_path / "llama")
    done = runner.invoke(
        app,
        ["ladder", str(tmp_path / "llama"), "--data", str(trained[0]), "--lengths", "16,32",
         "--train-length", "16", "--out", str(tmp_path / "rows.jsonl")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {row["mechanism"] for row in rows.read_rows(tmp_path / "rows.jsonl")} == {"llama"}


def test_ladder_of_scaled_baselines(tmp_path: Path, trained: tuple[Path, Path]) -> None:
    from farfield import FarfieldConfig, FarfieldForCausalLM
    from farfield.data import load_tokenizer

    text, run = trained
    tokenizer, folder, out = load_tokenizer("bytes"), tmp_path / "rope", tmp_path / "rows.jsonl"
    config = FarfieldConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, train_length=16,
    )  # fmt: skip
    FarfieldForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    asked = ["--data", str(text), "--lengths", "16,64", "--tokens", "256", "--out", str(out)]
    done = runner.invoke(app, ["ladder", str(folder), *asked, "--scaling", "linear,yarn"])
    assert done.exit_code == 0, done.output
    for name in ("rope", "rope:scaling=linear", "rope:scaling=yarn"):
        assert f"\n {name} " in done.stdout
        assert name in {row["mechanism"] for row in rows.read_rows(out)}
    told = mistake("ladder", str(run / "model"), *asked, "--scaling", "ntk")
    assert "mechanism 'random+v' can't be scaled by ntk" in told
    assert "did you mean 'yarn'" in mistake("ladder", str(folder), *asked, "--scaling", "yarm")


def test_generate(trained: tuple[Path, Path]) -> None:
    model = str(trained[1] / "model")
    arguments = ["generate", model, "--prompt", "the far ", "--tokens", "6"]

    def text(*more: str) -> str:
        done = runner.invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        return done.output

    assert text().startswith("the far ")
    assert text() == text()
    sampled = text("--temperature", "1.5", "--seed", "1")
    assert sampled == text("--temperature", "1.5", "--seed", "1")
    assert sampled != text("--temperature", "1.5", "--seed", "2")
    told = json.loads(text("--json"))
    assert told["prompt"] + told["continuation"] == text().removesuffix("\n")
    assert "no tokens" in mistake("generate", model, "--prompt", "")


def test_a_command_without_a_terminal_is_quiet() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "farfield.cli", "recipes", "zzz"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_report_tells_programs_its_verdicts_and_draws_a_picture(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    study = tmp_path / "study"
    study.mkdir()
    (study / "results.jsonl").write_text((trained[1] / "results.jsonl").read_text())
    done = runner.invoke(app, ["report", str(study), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert Path(told["out"]).read_text().startswith("<!")
    assert [one["claim"] for one in told["verdicts"]] == ["C1", "C2", "C3", "C4", "C5", "C6"]
    assert {one["status"] for one in told["verdicts"]} == {"not tested"}
    picture = tmp_path / "curves.png"
    done = runner.invoke(app, ["report", str(study), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ".png or .svg" in mistake(
        "report", str(study), "--picture", str(tmp_path / "curves.txt")
    )
