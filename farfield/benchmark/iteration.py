"""Section `model`: a training iteration of each mechanism of a recipe, over that of `rope`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from farfield.benchmark.layer import BASELINE
from farfield.benchmark.pairing import Report, groups, paired
from farfield.benchmark.plan import CALLS, Job, Setting, Workload, where
from farfield.benchmark.rows import Row, timed
from farfield.training.blocks import TrainingBlocks, collate
from farfield.training.loop import parameter_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from farfield.training import TrainingSettings

SECTION = "model"
ITERATION = "training iteration"


def jobs(setting: Setting) -> list[Job]:
    """One job for every three mechanisms of the recipe, beside their baseline."""
    work = setting.needed_workload
    names = [name for name in work.mechanisms if name != BASELINE]
    # Forward and backward of a model: six operations per parameter and token, attention apart.
    parameters = sum(p.numel() for p in work.build(BASELINE).parameters())
    once = 6.0 * parameters * _part(work.settings) * work.settings.length
    return [
        Job(
            SECTION,
            f"{work.recipe}: {', '.join(group)}",
            2.0 * CALLS * (1 + len(group)) * once,
            partial(_compare, setting, group),
            seconds=1.0,
        )
        for group in groups(names)
    ]


def _compare(setting: Setting, group: Sequence[str], allowance: float, report: Report) -> list[Row]:
    work = setting.needed_workload
    steps = {name: _of_recipe(work, name, setting.seed) for name in (BASELINE, *group)}
    samples = paired(steps, allowance, report=report)
    length, part = work.settings.length, _part(work.settings)
    sizes = f"recipe {work.recipe}, batch {part}"
    fields = where(setting, SECTION, measure=ITERATION, tokens=length, sizes=sizes)
    return [timed(samples, name, BASELINE, **fields) for name in group]


def _part(settings: TrainingSettings) -> int:
    return settings.batch // settings.accumulation


def _of_recipe(work: Workload, mechanism: str, seed: int) -> Callable[[], None]:
    """An iteration on one part of a batch, where the recipe accumulates several."""
    settings = work.settings
    model = work.build(mechanism)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable()
    blocks = TrainingBlocks(work.corpus.train, settings.length, _part(settings), seed)
    ids = collate([blocks[i] for i in range(len(blocks))])["input_ids"]
    return iteration(model, ids, settings)


def iteration(
    model: PreTrainedModel, ids: torch.Tensor, settings: TrainingSettings
) -> Callable[[], None]:
    """A call of one training iteration: forward, backward, clipping and AdamW, as training has
    them. Shapes: ids int64 [B, T]."""
    model.train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings), betas=(0.9, settings.beta2), eps=1e-8
    )
    half = settings.dtype == "bfloat16"
    nonce = {"nonce": 1} if getattr(model, "needs_nonce", False) else {}

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=ids, labels=ids, use_cache=False, **nonce).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step
