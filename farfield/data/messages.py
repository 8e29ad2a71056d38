"""How an error names what was probably meant, and quotes a library's message on one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

QUOTED_CHARACTERS = 240


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "; nearest: 'kjv'" for a name that resembles a valid one, else the empty string."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; nearest: {matches[0]!r}" if matches else ""


def one_line(error: BaseException) -> str:
    """A library's message without its line breaks, cut to a length that fits a terminal."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= QUOTED_CHARACTERS else text[: QUOTED_CHARACTERS - 1] + "…"
