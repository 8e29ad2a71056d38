"""A mechanism of the user's own, named to the command line, is known to every job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farfield import mechanisms
from farfield.evaluation import whole
from farfield.study import folder, job
from farfield.study import recipe as recipes
from farfield.study.launch import command_to_resume
from farfield.study.modules import VARIABLE, import_modules, imported
from farfield.study.run import Run

MODULE = """
from dataclasses import dataclass

import torch

from farfield import mechanisms
from farfield.algebra.rotation import RotationFrame, rotary_frequencies
from farfield.attention.mechanism import Carry, Transport, end


@dataclass(frozen=True)
class Options:
    power: float = 0.5


class Slowing(Transport):
    def __init__(self, geometry, options):
        super().__init__()
        self.power = options.power
        self.omega = rotary_frequencies(geometry.head_dim).tolist()

    def forward(self, tokens, state):
        omega = torch.tensor(self.omega, device=tokens.hidden.device)
        step = (tokens.position + 1.0) ** -self.power
        angle = tokens.real(step[:, None, :, None] * omega)
        frame = RotationFrame.from_angles(angle, end(state, "turns"))
        return Carry(frame, state={"turns": frame.trail})


mechanisms.register(
    mechanisms.Row("slowing", "transport", "steps that shrink", "M_t", Options, Slowing)
)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "slowing_steps.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(mechanisms, "_TABLE", dict(mechanisms._TABLE))
    yield tmp_path
    sys.modules.pop("slowing_steps", None)


def test_a_job_imports_what_the_study_was_asked_to(
    here: Path, small_table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**small_table, "mechanisms": ["slowing:0.3+v"]}
    recipe = recipes.recipe_from(table, "own")
    with pytest.raises(ValueError, match="unknown mechanism 'slowing'"):
        recipe.canonical()
    monkeypatch.setenv(VARIABLE, "slowing_steps")
    whole.write_text(here / "recipe.toml", recipes.dump(recipe))
    run = Run("slowing:0.3+v", 0, here / "run")
    run.prepare(resume=False)
    assert job.main([str(run.folder), "--recipe", str(here / "recipe.toml")]) == 0
    assert run.status == "finished"
    assert "slowing" in {row.name for row in mechanisms.table()}


def test_modules_are_told_to_jobs_and_to_whoever_resumes(here: Path) -> None:
    import_modules(["slowing_steps"])
    assert imported() == ["slowing_steps"]
    assert folder.environment(1)["modules"] == ["slowing_steps"]
    assert command_to_resume(Path("my study")) == (
        "farfield --import slowing_steps study 'my study/recipe.toml' --out 'my study' --resume"
    )
    with pytest.raises(ValueError, match="--import slowing_step: No module named"):
        import_modules(["slowing_step"])


def test_another_text_under_the_same_name_is_refused(tmp_path: Path) -> None:
    from farfield.data import load_corpus

    text = tmp_path / "text.txt"
    text.write_text("the far field and the near field " * 99)
    out = tmp_path / "out"
    out.mkdir()
    recipe = recipes.recipe_from({"name": "x", "mechanisms": ["rope"]}, "x")
    before = load_corpus(str(text))
    folder.refuse_other_text(out, before)
    folder.describe(out, recipe, 1, before)
    folder.refuse_other_text(out, before)
    text.write_text("the near field and the far field " * 99)
    with pytest.raises(ValueError, match="the text has changed since"):
        folder.refuse_other_text(out, load_corpus(str(text)))
