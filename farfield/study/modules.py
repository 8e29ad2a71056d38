"""Modules of the user's own that register mechanisms, imported here and in every job."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

VARIABLE = "FARFIELD_IMPORT"
"""Names them, separated by commas, to the processes that a study starts."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, from the current folder as well, and have jobs import them too.

    Raises: ValueError naming one that isn't there.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--import {name}: {error}; expected a module that Python finds from {here}"
            ) from None
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*imported(), *names]))


def imported() -> list[str]:
    """Names of the modules that this process was asked to import."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def import_options() -> list[str]:
    """The same modules as options of the `farfield` command."""
    return [word for name in imported() for word in ("--import", name)]
