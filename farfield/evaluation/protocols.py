"""The protocols: which forward gives the loss of which target. Per-token losses in, sums later.

- `windows`: non-overlapping windows of L tokens; the target at offset p sees p + 1 tokens.
- `fixed`: target blocks of B = L₀/4 tokens, the same at every length; with window [e − L, e) and
  block [e − B, e), each target sees L − B to L − 1 tokens.
- `clipped`: the targets of `windows` in a context of at most L₀ that slides by L₀/4: the target at
  offset p sees p + 1 tokens up to L₀, then 3L₀/4 + 1 to L₀. It says what the longer windows of
  text are worth to a model that never looks further back than it was trained to.

A loss is computed once. `windows` at L₀ are the heads of `clipped` at every length, and its other
targets are one pass over the text; a target block that ends a window is taken from `windows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from farfield.evaluation.losses import Losses, Scorer
from farfield.evaluation.plan import Plan

if TYPE_CHECKING:
    from farfield.data import TokenStream

Progress = Callable[[float, float], None]


class Reader:
    """Scores stretches of a stream, several short ones per forward, and reports work done.

    Work is weighted by what a forward multiplies, so that (done, total) gives a time left.
    """

    def __init__(
        self, scorer: Scorer, stream: TokenStream, plan: Plan, progress: Progress | None
    ) -> None:
        self.scorer, self.stream, self.plan, self.progress = scorer, stream, plan, progress
        self.linear, self.attention = _multiplications(scorer.model)
        self.planned = {length: self._planned(length) for length in plan.measured}
        self.done = 0.0

    def losses(self, ends: npt.NDArray[np.int64], inputs: int, keep: int) -> Losses:
        """Losses of the last `keep` targets of each stretch of `inputs` tokens ids[e−inputs, e).

        Shapes: ends [n] -> [n, keep]; the last target of a stretch is ids[e].
        """
        losses = np.empty((len(ends), keep))
        rows = max(1, self.plan.settings.forward_tokens // inputs)
        for start in range(0, len(ends), rows):
            part = ends[start : start + rows]
            tokens = np.stack([self.stream.block(int(e) - inputs, inputs + 1) for e in part])
            losses[start : start + rows] = self.scorer.nll(tokens, keep)
            self.advance(self.done + self._cost(len(part), inputs))
        return losses

    def advance(self, done: float) -> None:
        self.done = done
        if self.progress is not None:
            total = sum(self.planned.values())
            self.progress(min(done, total), total)

    def _cost(self, forwards: int, inputs: int) -> float:
        return float(forwards * inputs * (self.linear + self.attention * inputs))

    def _planned(self, length: int) -> float:
        plan, work = self.plan, 0.0
        if plan.runs_windows(length):
            work += self._cost(plan.tokens // length, length)
        if plan.runs("fixed", length):
            work += self._cost(int((~plan.shared_ends(length)).sum()), length - 1)
        if length == plan.base:
            work += self._cost(len(plan.sliding_starts()), length)
        return work


def windows(reader: Reader, length: int) -> Losses:
    """Losses [N/L, L] of non-overlapping windows."""
    ends = np.arange(length, reader.plan.tokens + 1, length)
    return reader.losses(ends, length, length)


def fixed(reader: Reader, length: int, scored: Losses | None) -> Losses:
    """Losses [blocks, B] of the target blocks; `scored`: the windows of this length, if run.

    The window [e − L, e) has L tokens, the last target among them: L − 1 inputs.
    """
    plan = reader.plan
    losses = np.empty((len(plan.block_ends), plan.block))
    shared = plan.shared_ends(length) if scored is not None else np.zeros(len(losses), dtype=bool)
    if scored is not None:
        of_window = plan.block_ends[shared] // length - 1
        losses[shared] = scored[of_window, length - plan.block - 1 : length - 1]
    losses[~shared] = reader.losses(plan.block_ends[~shared] - 1, length - 1, plan.block)
    return losses


def sliding(reader: Reader, heads: Losses) -> Losses:
    """Losses [N] with a context of L₀ that slides by L₀/4 over the text; its first L₀ are a head.

    Shapes: heads [N/L₀, L₀], the windows of L₀, which also hold every fourth step of the slide.
    """
    plan = reader.plan
    ends = plan.sliding_starts() + plan.train_length
    losses = heads.reshape(-1).copy()
    fresh = reader.losses(ends, plan.train_length, plan.stride)
    losses[ends[:, None] + np.arange(-plan.stride, 0)] = fresh
    return losses


def clipped(plan: Plan, length: int, heads: Losses, slid: Losses) -> Losses:
    """Losses [N/L, L]: each window starts like a window of L₀, then slides.

    Windows of every length start at multiples of L₀, so each slide is the one over the text.
    """
    losses = slid.reshape(-1, length).copy()
    losses[:, : plan.train_length] = heads.reshape(-1, length)[:, : plan.train_length]
    return losses


def _multiplications(model: Any) -> tuple[int, int]:
    """Per input: by weights, and by causal attention per token of length (0 if unknown)."""
    embedding = model.get_input_embeddings().weight
    linear = sum(p.numel() for p in model.parameters() if p is not embedding)
    config = getattr(model, "config", None)
    width, layers = (getattr(config, name, 0) for name in ("hidden_size", "num_hidden_layers"))
    return linear, width * layers
