"""Every test has its own token cache, and no test asks the network for anything."""

from pathlib import Path

import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `load_corpus` keeps its tokens in."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FARFIELD_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name on the hub is refused at once instead of after half a minute of retries."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
