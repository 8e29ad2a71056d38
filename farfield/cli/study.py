"""`farfield study` and `farfield train`: mechanisms trained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farfield.cli.console import Settings, err, mistakes, numbers, tell

commands = typer.Typer()


@commands.command(
    epilog="Examples:  farfield study smoke  ·  farfield study laptop --seeds 0,1,2 "
    "--set training.iterations=600  ·  farfield study laptop --resume"
)
def study(
    recipe: Annotated[
        str,
        typer.Argument(help="A packaged recipe's name (see `farfield recipes`) or a .toml file."),
    ] = "laptop",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The study's folder. [default: studies/RECIPE]", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="0,1,2", help="Seeds to train every mechanism from, instead of the recipe's."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs at a time, each on one thread. [default: one per core, or per GPU]",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue unfinished runs from their last checkpoint.")
    ] = False,
) -> None:
    """Train several mechanisms alike, measure how far each holds, and write one page.

    Runs that are finished are not repeated. More mechanisms or seeds enlarge a study.
    """
    with mistakes():
        from farfield.study import recipe as recipes
        from farfield.study.display import for_console
        from farfield.study.launch import command_to_resume
        from farfield.study.launch import study as run_study

        resolved = recipes.load(recipe, settings or (), numbers(seeds, "--seeds"))
        where = folder or Path("studies") / resolved.name
        with for_console(err) as display:
            outcome = run_study(resolved, where, jobs=jobs, resume=resume, display=display)
    for run in outcome.failed:
        tell(f"failed: {run.name}: {run.record['error']}")
    tell(*outcome.problems)
    if outcome.interrupted:
        tell(f"interrupted; continue with: {command_to_resume(where)}")
    if outcome.report is not None:
        print(outcome.report)
    raise typer.Exit(outcome.exit_status)


@commands.command(epilog="Example:  farfield train learned+v+alibi --recipe smoke --out my-run")
def train(
    mechanism: Annotated[str, typer.Argument(help="A composed name; see `farfield mechanisms`.")],
    recipe: Annotated[str, typer.Option(help="The recipe whose settings to use.")] = "laptop",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The run's folder. [default: runs/MECHANISM-sSEED]", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="Names the weights, angles and order of data.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")
    ] = False,
) -> None:
    """Train one mechanism by a recipe's settings, and evaluate its length ladder."""
    with mistakes():
        from farfield.evaluation.plan import left_out_lines
        from farfield.study import recipe as recipes
        from farfield.study.display import Training
        from farfield.study.single import run_to_resume, train_one

        changes = [*(settings or ()), *(["training.tensorboard=true"] if tensorboard else [])]
        resolved = recipes.load(recipe, changes)
        with Training(err) as watch:
            run = train_one(resolved, mechanism, seed, folder, resume=resume, watch=watch)
    record = run.record
    if record["status"] == "interrupted":
        tell(f"interrupted; continue with: {run_to_resume(run)}")
        raise typer.Exit(130)
    if record["status"] == "failed":
        tell(f"failed: {record['error']}")
        raise typer.Exit(1)
    tell(*left_out_lines(record["left_out"] or []))
    print(run.folder)
