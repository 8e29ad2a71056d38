"""Files that are whole or as they were, whatever happens to the process that writes them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The scratch file to write in place of `path`, which it replaces once the block is done.

    It lies beside `path` under a name of its own, so that any number of writers may be at it: the
    last one stays. It is on the disk before it replaces anything. Where the block or anything after
    it fails, the old file stays and the scratch file goes; only a killed process leaves one behind.

    Raises: OSError.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield scratch
        with scratch.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        with suppress(OSError):  # it is gone once it has replaced; else what failed is raised
            scratch.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` in UTF-8, whole or not at all. Raises: OSError, as `replacing`."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
