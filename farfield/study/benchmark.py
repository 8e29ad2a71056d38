"""What a mechanism costs: training iterations, paired against `rope` in one run on this machine.

Times on a shared machine drift, so mechanisms take turns and every ratio is between neighbours in
time; the figure is the median of the ratios, with a bootstrap interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from farfield.study.job import build
from farfield.study.recipe import Recipe
from farfield.training.blocks import TrainingBlocks, collate
from farfield.training.loop import parameter_groups

if TYPE_CHECKING:
    from farfield.data import Corpus

BASELINE = "rope"
_RESAMPLES = 2000
_LEVEL = 0.95


def iterations(
    recipe: Recipe,
    corpus: Corpus,
    rounds: int,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Time of one training iteration of each mechanism of the recipe over that of `rope`.

    An iteration is forward, backward, clipping and AdamW as the recipe has them, on one part of a
    batch where it accumulates several.

    Units: `seconds` is the median over rounds; `ratio` the median of the paired ratios, with its
    `low` and `high` (percentile bootstrap). Raises: ValueError for fewer than 3 rounds.
    """
    import torch

    if rounds < 3:
        raise ValueError(f"rounds is {rounds}; expected at least 3, a median needs them")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        names = [BASELINE, *(name for name in recipe.mechanisms if name != BASELINE)]
        steps = {name: _iteration(recipe, corpus, name) for name in names}
        for step in steps.values():
            step()  # the first iteration allocates
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for index in range(rounds):
            for name, step in steps.items():
                seconds[name].append(step())
            if progress is not None:
                progress(index + 1, rounds)
    finally:
        torch.set_num_threads(before)
    base = np.array(seconds[BASELINE])
    return [{"mechanism": name} | _ratio(np.array(taken), base) for name, taken in seconds.items()]


def _iteration(recipe: Recipe, corpus: Corpus, mechanism: str) -> Callable[[], float]:
    import torch

    settings = recipe.training
    model = build(recipe, corpus, mechanism, recipe.seeds[0]).train()
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings), betas=(0.9, settings.beta2), eps=1e-8
    )
    part = settings.batch // settings.accumulation
    blocks = TrainingBlocks(corpus.train, settings.length, part, recipe.seeds[0])
    batch = collate([blocks[i] for i in range(part)])
    half = settings.dtype == "bfloat16"
    nonce = {"nonce": 1} if model.needs_nonce else {}

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(**batch, use_cache=False, **nonce).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def _ratio(taken: np.ndarray, base: np.ndarray) -> dict[str, float]:
    ratios = taken / base
    draws = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    tail = (1 - _LEVEL) / 2
    return {
        "seconds": float(np.median(taken)),
        "ratio": float(np.median(ratios)),
        "low": float(np.quantile(medians, tail)),
        "high": float(np.quantile(medians, 1 - tail)),
        "rounds": len(ratios),
    }
