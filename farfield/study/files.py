"""JSON that is whole or not there: what a killed process leaves never breaks the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farfield.evaluation import whole


def write_json(path: Path, value: Any) -> None:
    """Replace a file by `value` as JSON, whole or not at all. Raises: OSError."""
    whole.write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file or it holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
