"""`farfield diagnose`: why a trained model holds, or fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from farfield.cli.console import Json, fail, mistakes, numbers, out, print_json, spelled, tell

commands = typer.Typer()


@commands.command(
    epilog="Example:  farfield diagnose studies/laptop/runs/rope-s0/model --data kjv "
    "--lengths 128,2048 --out rope-diagnosis"
)
def diagnose(
    model: Annotated[
        Path | None, typer.Argument(help="A folder of any Hugging Face causal model.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the rows and the page. [required with MODEL]"),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            help="Diagnose each finished run of a study instead, into its folder, and draw its "
            "page again; runs that have a diagnosis keep it."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="kjv; a file, folder or glob of .txt, .jsonl or "
            ".parquet; or hub:NAME[:CONFIG[:SPLIT]]. [default: kjv; of a study, its own]",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="128,256",
            help="Lengths in tokens. [default: 1 to 128 times the training length]",
            show_default=False,
        ),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries to look at in each text.")] = 512,
    layers: Annotated[
        str | None, typer.Option(metavar="0,1", help="Layers to look at. [default: all]")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="0,1", help="Query heads to look at. [default: all]")
    ] = None,
    near: Annotated[
        str | None,
        typer.Option(
            metavar="16,32,128",
            help="Near windows in tokens. [default: ⅛, ¼ and 1 of the training length]",
        ),
    ] = None,
    interventions: Annotated[
        str | None,
        typer.Option(
            metavar="far_masked,alibi",
            help="Which interventions to run, or none. [default: those the model takes]",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to score under each intervention. [default: longest length]"),
    ] = None,
    train_length: Annotated[
        int | None, typer.Option(help="Training length, where the model doesn't say it.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation, test or all. [default: test]", show_default=False),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0", help="Which seeds of a study. [default: all]")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, … [default: as saved]", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    kind: Annotated[str, typer.Option("--format", help="Of the rows: jsonl or parquet.")] = "jsonl",
    as_json: Json = False,
) -> None:
    """Measure what a model's heads do with far keys, predict it, and change one thing at a time.

    Writes rows and a page, and prints a summary in plain sentences.
    """
    if (model is None) == (study is None):
        fail("expected either a MODEL or --study FOLDER")
    if model is not None and folder is None:
        fail("--out is missing; expected a folder for the rows and the page")
    of_models = {"--out": folder, "--data": data, "--train-length": train_length, "--split": split}
    of_studies = {"--seeds": seeds}
    for option, given in (of_models if study is not None else of_studies).items():
        if given is not None:
            fail(f"{option} is for {'a MODEL' if study is not None else '--study'}; leave it out")
    with mistakes():
        from farfield.diagnosis import folders
        from farfield.study.job import quiet_libraries

        quiet_libraries()
        options = folders.Options(
            lengths=numbers(lengths, "--lengths"),
            near_windows=numbers(near, "--near"),
            queries=queries,
            layers=numbers(layers, "--layers"),
            heads=numbers(heads, "--heads"),
            intervene=_names(interventions),
            tokens=tokens,
            split=split or "test",
            dtype=dtype,
            device=device,
            kind=kind,
        )
        if model is not None and folder is not None:
            folders.of_model(
                model, data or "kjv", folder, options, train_length, stage=_telling("")
            )
            made = [folder]
        else:
            assert study is not None
            made = _of_study(study, options, numbers(seeds, "--seeds"))
        _show(made, as_json)


def _of_study(study: Path, options: Any, seeds: list[int] | None) -> list[Path]:
    from farfield import report
    from farfield.study.diagnosed import diagnose_study

    made = diagnose_study(study, options, seeds, stage=lambda run: _telling(f"{run}: "))
    report.write(study)
    return made


def _names(given: str | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return () if given == "none" else tuple(given.split(","))


def _telling(before: str) -> Callable[[str], None]:
    return lambda what: tell(f"{before}{what} …")


def _show(made: list[Path], as_json: bool) -> None:
    """The summaries, and for one model its interventions as a table."""
    from farfield.report import diagnosis
    from farfield.report.diagnosis_rows import read

    pages = [diagnosis.write(folder) for folder in made]
    if as_json:
        print_json(
            [
                {
                    "out": str(page),
                    "facts": read(folder).facts,
                    "summary": diagnosis.summary(folder),
                    "interventions": _kept(read(folder).tables["interventions"]),
                }
                for folder, page in zip(made, pages, strict=True)
            ]
        )
        return
    for folder, page in zip(made, pages, strict=True):
        for sentence in diagnosis.summary(folder):
            out.print(f"• {sentence}", highlight=False, markup=False)
        rows = _kept(read(folder).tables["interventions"])
        if rows:
            shown = Table(*rows[0], box=None)
            for row in rows:
                shown.add_row(*(spelled(value) for value in row.values()))
            out.print(shown)
        print(page)


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = ("intervention", "length", "ppl", "ratio", "against")
    return [{key: row[key] for key in keys} for row in rows]
