"""`farfield report`: a study's page and picture, from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farfield.cli.console import Json, mistakes, print_json

commands = typer.Typer()


@commands.command(epilog="Example:  farfield report studies/laptop")
def report(
    folder: Annotated[Path, typer.Argument(help="A study's folder.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the ratio curves into this .png or .svg file instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a study's page anew from its files, or draw one picture of its curves.

    --json prints the verdicts as well, one sentence each.
    """
    with mistakes():
        from farfield.evaluation.rows import read_rows
        from farfield.report import curves_picture, verdicts, write

        made = write(folder) if picture is None else curves_picture(folder, picture)
        rows = read_rows(folder / "results.jsonl") if as_json else []
    if as_json:
        keys = ("claim", "status", "title", "sentence")
        found = [{key: getattr(one, key) for key in keys} for one in verdicts(rows)]
        print_json({"out": str(made), "verdicts": found})
    else:
        print(made)
