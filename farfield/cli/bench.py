"""`farfield bench`: what a training iteration of each mechanism costs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from farfield.cli.console import Json, Settings, err, mistakes, out, print_json

commands = typer.Typer()


@commands.command(epilog="Example:  farfield bench laptop --rounds 20")
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a .toml file.")] = "laptop",
    settings: Settings = None,
    rounds: Annotated[int, typer.Option(help="Turns that every mechanism takes.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the one process.")] = 1,
    as_json: Json = False,
) -> None:
    """Time a training iteration of each mechanism against `rope`, paired, on this machine."""
    with mistakes():
        from farfield.data import load_corpus
        from farfield.study import benchmark
        from farfield.study import recipe as recipes
        from farfield.study.display import Work

        resolved = recipes.load(recipe, settings or ()).canonical()
        data = resolved.data
        corpus = load_corpus(data.source, data.tokenizer, max_tokens=data.max_tokens)
        with Work(err, "bench") as progress:
            rows = benchmark.iterations(resolved, corpus, rounds, threads, progress)
    if as_json:
        print_json(rows)
        return
    shown = Table("mechanism", "seconds", "ratio to rope", "interval", box=None)
    for row in rows:
        shown.add_row(
            row["mechanism"],
            f"{row['seconds']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
        )
    out.print(shown)
