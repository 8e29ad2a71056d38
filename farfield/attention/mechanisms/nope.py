"""`nope`: no step at all. A key reaches a query as it is, and only causality tells positions."""

from __future__ import annotations

from dataclasses import dataclass

from farfield.attention.mechanism import Geometry


@dataclass(frozen=True)
class Options:
    """No options."""


def nope(geometry: Geometry, options: Options) -> None:
    """The identity transport: nothing to pull and nothing to push."""
