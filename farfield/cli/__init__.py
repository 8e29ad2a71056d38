"""The `farfield` command: every command is one function call into the package.

One file per group of commands; each holds its `commands`, and they are put together here.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Optional

import typer

from farfield.cli import bench, diagnose, listing, models, report, study, theory
from farfield.cli.console import mistakes, tell

app = typer.Typer(
    name="farfield",
    help="Train, measure and compare attention by accumulated transformation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The order in which `--help` lists them.
for group in (study, models, diagnose, report, bench, listing):
    app.add_typer(group.commands)
app.add_typer(theory.commands, name="theory")


def main() -> None:
    """Entry point of the `farfield` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek shows ? and goes on
    arguments = sys.argv[1:]
    if "" in arguments:  # most likely a variable of the shell that isn't set
        before = arguments[: arguments.index("")]
        tell(f"farfield: what follows '{(before or ['farfield'])[-1]}' is empty; expected a value")
        sys.exit(2)
    app()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    modules: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module that registers mechanisms of your own, here and in every job.",
        ),
    ] = None,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"farfield {installed('farfield')}")
        raise typer.Exit
    if modules:
        with mistakes():
            from farfield.study.modules import import_modules

            import_modules(modules)
