"""A study's folder: whose it is, what holds it, and what is gathered from its runs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from farfield.data import Corpus
from farfield.evaluation import whole
from farfield.study import files
from farfield.study import recipe as recipes
from farfield.study.modules import imported
from farfield.study.recipe import Recipe
from farfield.study.run import POSITIONS, RESULTS, Run

RECIPE = "recipe.toml"
ENVIRONMENT = "environment.json"
PACKAGES = ("farfield", "torch", "transformers", "accelerate", "tokenizers", "numpy")


def refuse_another(out: Path, recipe: Recipe) -> None:
    """Nothing when `out` can be this recipe's folder; its study may grow by mechanisms and seeds.

    Raises: ValueError naming the first key that differs where it holds another study, or when it
    holds something else.
    """
    if (out / RECIPE).exists():
        held = recipes.load(str(out / RECIPE))
        differs = recipes.difference(held, recipe)
        if differs:
            raise ValueError(
                f"{out} already holds another study ({held.name}): {differs}; "
                "expected the same recipe, or another --out"
            )
    elif out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the study")
    elif out.is_dir() and any(entry.name != ".lock" for entry in out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no study; expected a new or empty folder")


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Within, `out` exists and no other study process writes to it.

    Raises: ValueError when one does; OSError when it can't be made.
    """
    out.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield  # there is no flock; two studies in one folder are then the caller's to avoid
        return
    import fcntl

    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another farfield process is writing to {out}; wait for it, or "
                "choose another --out"
            ) from None
        yield


def refuse_other_text(out: Path, corpus: Corpus) -> None:
    """Nothing when what `out` holds was made from this text, tokenizer and split.

    Raises: ValueError when the text behind the same name has changed since: verdicts pair runs
    window by window, which means something only on one text.
    """
    held = (files.read_json(out / ENVIRONMENT) or {}).get("text") or {}
    if held.get("fingerprint") not in (None, corpus.fingerprint):
        raise ValueError(
            f"the text has changed since the runs in {out} were made (fingerprint "
            f"{held['fingerprint'][:12]} there, {corpus.fingerprint[:12]} now); "
            "expected the same text, or another --out"
        )


def describe(out: Path, recipe: Recipe, jobs: int, corpus: Corpus) -> None:
    """Write `recipe.toml`, resolved, and `environment.json`, which names the text as well."""
    text = {"fingerprint": corpus.fingerprint, "policy": corpus.policy}
    whole.write_text(out / RECIPE, recipes.dump(recipe))
    files.write_json(out / ENVIRONMENT, {**environment(jobs), "text": text})


def environment(jobs: int) -> dict[str, Any]:
    """What a reader needs to judge times and to run the study again."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "schema": 1,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "gpus": gpus,
        "jobs": jobs,
        "threads_per_job": 1,
        "modules": imported(),
    }


def cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """The commit the package was run from, `+changes` where files differ; None outside git."""
    package = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # An installed copy may lie inside somebody else's checkout.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = git("rev-parse", "HEAD")
    return f"{head}+changes" if head and git("status", "--porcelain", ".") else head


def gather(out: Path, runs: Sequence[Run]) -> None:
    """Write `results.jsonl` and `positions.jsonl` anew from the finished runs' own files."""
    from farfield.evaluation import rows

    finished = [run.folder for run in runs if run.status == "finished"]
    rows.write_rows(
        out / RESULTS, [row for folder in finished for row in rows.read_rows(folder / RESULTS)]
    )
    rows.write_positions(
        out / POSITIONS,
        [row for folder in finished for row in rows.read_positions(folder / POSITIONS)],
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name, as well as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
