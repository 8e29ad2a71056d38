"""The diagnoses of a study's runs: one folder of rows for each, in `diagnosis/` of the study's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from farfield.data import load_corpus
from farfield.diagnosis.diagnose import FACTS, Stage
from farfield.diagnosis.folders import Options, check_served, of_stream
from farfield.study import recipe as recipes
from farfield.study.folder import RECIPE, held, refuse_other_text
from farfield.study.run import MODEL, grid

FOLDER = "diagnosis"


def diagnose_study(
    out: Path,
    options: Options,
    seeds: Sequence[int] | None = None,
    *,
    stage: Callable[[str], Stage] | None = None,
) -> list[Path]:
    """Diagnoses each finished run that has no diagnosis yet, on the study's own text.

    `seeds` None: all. `stage` makes, of a run's name, what is told when a stage of it begins.
    Returns: the folders of all diagnoses asked for, in the study's order.
    Raises: ValueError for a folder that holds no study, a study without such a run, and as
    `diagnose`; OSError.
    """
    if not (out / RECIPE).is_file():
        raise ValueError(f"{out}: no {RECIPE} there; expected the folder of a study")
    recipe = recipes.load(str(out / RECIPE))
    runs = [
        run
        for run in grid(recipe, out)
        if run.status == "finished" and run.trained and (seeds is None or run.seed in seeds)
    ]
    if not runs:
        asked = "" if seeds is None else f" of seeds {', '.join(map(str, seeds))}"
        raise ValueError(f"{out}: no finished run{asked} with its model; nothing to diagnose")
    data = recipe.data
    corpus = load_corpus(data.source, data.tokenizer, max_tokens=data.max_tokens)
    refuse_other_text(out, corpus)
    folders = {run.name: out / FOLDER / run.name for run in runs}
    with held(out):
        waiting = [run for run in runs if not (folders[run.name] / FACTS).exists()]
        for run in waiting:
            check_served(run.folder / MODEL, options)
        for run in waiting:
            of_stream(
                run.folder / MODEL,
                corpus.test,
                folders[run.name],
                options,
                recipe.training.length,
                stage=None if stage is None else stage(run.name),
            )
    return list(folders.values())
