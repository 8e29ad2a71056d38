"""A text and a recipe small enough to train in a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farfield.study import recipe as recipes
from farfield.study.recipe import Recipe


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens are cached in a folder of this session, for jobs in other processes as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARFIELD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    words = ["far", "field", "near", "set", "turn", "frame", "step", "route"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words[i] for i in draw.integers(0, len(words), 4000)))
    return path


@pytest.fixture(scope="session")
def small_table(text_file: Path) -> dict[str, Any]:
    """Two mechanisms, two layers of width 32, a handful of iterations; not to be changed."""
    return {
        "name": "small",
        "mechanisms": ["rope", "learned+v"],
        "data": {"source": str(text_file)},
        "model": {"layers": 2, "width": 32, "heads": 2},
        "training": {
            "length": 16,
            "batch": 4,
            "iterations": 8,
            "learning_rate": 1e-3,
            "log_every": 2,
            "validate_every": 4,
            "validation_blocks": 4,
            "checkpoint_every": 4,
        },
        "ladder": {"multiples": [1, 2, 4], "tokens": 256, "blocks": 4},
    }


@pytest.fixture(scope="session")
def small(small_table: dict[str, Any]) -> Recipe:
    return recipes.recipe_from(small_table, "small")
