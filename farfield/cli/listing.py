"""`farfield mechanisms` and `farfield recipes`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer
from rich.table import Table

from farfield.cli.console import Json, Settings, mistakes, out, print_json

commands = typer.Typer()


@commands.command()
def mechanisms(as_json: Json = False) -> None:
    """The parts of a mechanism's name: TRANSPORT[+v][+CONTROL], such as learned+v+alibi."""
    with mistakes():
        from dataclasses import fields

        from farfield import mechanisms as table

        rows: list[dict[str, Any]] = [
            {
                "name": row.name,
                "kind": row.kind,
                "summary": row.summary,
                "equation": row.equation,
                "options": {option.name: option.default for option in fields(row.options)},
            }
            for row in table.table()
        ]
    if as_json:
        print_json(rows)
        return
    shown = Table("name", "kind", "what it is", "step or potential", "options", box=None)
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        shown.add_row(row["name"], row["kind"], row["summary"], row["equation"], options)
    shown.add_row("v", "values", "values carried along the transport", "", "")
    out.print(shown)


@commands.command(name="recipes", epilog="Example:  farfield recipes laptop")
def show_recipes(
    name: Annotated[Optional[str], typer.Argument(help="Print this one, resolved.")] = None,  # noqa: UP045
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """The recipes that ship with farfield; or one of them with every setting it resolves to."""
    with mistakes():
        from farfield.study import recipe as recipes

        names = recipes.packaged() if name is None else [name]
        found = [recipes.load(one, settings or ()) for one in names]
    if as_json:
        tables = [one.as_toml() for one in found]
        print_json(tables if name is None else tables[0])
    elif name is not None:
        print(recipes.dump(found[0]), end="")
    else:
        shown = Table("name", "what it is", "mechanisms", "seeds", "lengths", box=None)
        for one in found:
            lengths = f"{one.lengths[0]:,} to {one.lengths[-1]:,}"
            shown.add_row(
                one.name,
                one.description,
                ", ".join(one.mechanisms),
                ", ".join(map(str, one.seeds)),
                lengths,
            )
        out.print(shown)
