"""What every command shares: its two streams, one-line mistakes, JSON, and options' common forms.

A caller's mistake ends with one line and status 2; anything else that fails ends with status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console

out = Console(width=None if sys.stdout.isatty() else 200)  # a pipe cuts nothing off
err = Console(stderr=True, emoji=False)

Settings = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this at run time on Python 3.10 as well)
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a recipe's key, such as training.iterations=100; may be given several times.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def mistakes() -> Iterator[None]:
    """A ValueError or OSError inside is the caller's: one line, status 2, no traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(" ".join(_words(error).split()))


def _words(error: ValueError | OSError) -> str:
    """What a person reads of a mistake: of the system's own, the file and what is wrong with it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    what = error.strerror[0].lower() + error.strerror[1:]
    return f"{error.filename}: {what}" if error.filename else what


def fail(line: str) -> NoReturn:
    """End with one line and status 2."""
    tell(f"farfield: {line}")
    raise typer.Exit(2)


def tell(*lines: str) -> None:
    """Lines for a person, on the error stream, as they are."""
    for line in lines:
        err.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """A value for a program, on the output stream."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def numbers(text: str | None, option: str) -> list[int] | None:
    """`0,1,2` as numbers. Raises: ValueError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: expected whole numbers such as 0,1,2") from None


def spelled(value: Any) -> str:
    """A table's cell: four figures of a number, a dash for nothing."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
