"""One mechanism trained by itself, in this process: a study of one run."""

from __future__ import annotations

import shlex
from pathlib import Path

from farfield.study import folder, job
from farfield.study import recipe as recipes
from farfield.study.job import Stop, Watcher
from farfield.study.launch import Display, check
from farfield.study.modules import import_options
from farfield.study.recipe import Recipe
from farfield.study.run import Run, grid


def train_one(
    recipe: Recipe,
    mechanism: str,
    seed: int,
    out: Path | None,
    *,
    resume: bool = False,
    watch: Watcher | None = None,
) -> Run:
    """Train and evaluate one mechanism; `out` (default `runs/MECHANISM-sSEED`) is its run folder.

    The folder holds what a study's run folder does, and the resolved `recipe.toml` beside.

    Raises: ValueError or OSError with one line, before training, for what a caller can mend.
    """
    table = {**recipe.as_toml(), "mechanisms": [mechanism], "seeds": [seed]}
    recipe = recipes.recipe_from(table, recipe.name).canonical()
    planned = grid(recipe, Path())[0]
    run = Run(planned.mechanism, seed, out or Path("runs") / planned.name)
    if (run.folder / "runs").is_dir():
        raise ValueError(f"{run.folder} holds a whole study; expected another --out for one run")
    folder.refuse_another(run.folder, recipe)
    corpus, _ = check(recipe, Display())
    folder.refuse_other_text(run.folder, corpus)
    with folder.held(run.folder):
        lacking = run.lacking(recipe)
        if run.status == "finished" and not lacking:
            raise ValueError(f"{run.folder} holds this run, finished; choose another --out")
        begun = f"finished without the rows of {', '.join(lacking)}" if lacking else run.begun
        if begun and not resume:
            raise ValueError(
                f"{run.folder} holds this run, {begun}; add --resume to continue it, "
                "or choose another --out"
            )
        folder.describe(run.folder, recipe, 1, corpus)
        run.prepare(resume)
        job.quiet_libraries()
        stop = Stop()
        with stop.on_signals():
            status = job.execute(run, recipe, stop, watch)
        if status != run.status:
            raise OSError(
                f"{run.folder}: {status}, and that could not be written down: is the disk full? "
                "make room, then go on with --resume"
            )
    return run


def run_to_resume(run: Run) -> str:
    """The command that continues an interrupted run, whatever options it was started with."""
    words = ["farfield", *import_options(), "train", run.mechanism, "--seed", str(run.seed)]
    words += ["--recipe", str(run.folder / folder.RECIPE), "--out", str(run.folder), "--resume"]
    return shlex.join(words)
