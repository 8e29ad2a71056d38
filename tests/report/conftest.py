from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_study import make


@pytest.fixture
def study_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a study's folder below the test's own: study_folder(plan, states=…)."""

    def build(plan: Any = None, **options: Any) -> Path:
        return make(tmp_path / "study", plan, **options)

    return build
