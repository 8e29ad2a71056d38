"""What a prediction is given: sampled queries at the training length, one by one, head by head.

A mean of logistic functions is not the logistic function of a mean, so queries are not averaged:
each keeps its near and far log-sum-exp, and what it takes to say how they would change with the
number of keys and the scale of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farfield.algebra.measures import LogitSums, split_output
from farfield.diagnosis.probe import observe
from farfield.diagnosis.sampling import Sampling
from farfield.diagnosis.sums import KeySums, query_sums
from farfield.diagnosis.tiles import Chunk

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Keys:
    """One set of keys of each query: how many, ln Σ e^s, ln Σ e^{2s}, the mean logit under softmax.

    Shapes: [n] each. Units: nats.
    """

    count: Floats
    lse: Floats
    lse2: Floats
    tilted: Floats

    def scaled(self, beta: npt.ArrayLike) -> Floats:
        """ln Σ e^{βs}: a convex function of β whose value and slope at 1 and value at 2 are known.

        The cubic through them and ln M at β = 0; exact at 0, 1 and 2, an approximation elsewhere.

        Shapes: β broadcast against [n]. Units: nats. Raises: ValueError for β outside [0, 4].
        """
        b = np.asarray(beta, dtype=np.float64)
        if (b < 0).any() or (b > 4).any():
            raise ValueError(f"beta goes from {b.min():g} to {b.max():g}; expected 0 to 4")
        with np.errstate(divide="ignore"):
            at0 = np.log(self.count)
        x = b - 1.0
        # p(x) = lse + tilted·x + A x² + B x³ with p(−1) = ln M and p(1) = lse2.
        even = 0.5 * (at0 + self.lse2) - self.lse
        odd = 0.5 * (self.lse2 - at0) - self.tilted
        return np.asarray(self.lse + self.tilted * x + even * x**2 + odd * x**3)


@dataclass(frozen=True)
class HeadSample:
    """The sampled queries of one layer's head with keys both near and far.

    context tokens that a query sees, itself counted; near_power |Σ_near a v|² of the near keys'
    own softmax (σ_S² of the predictor); far_power |F|² of the far part of the output.

    Shapes: [n] each.
    """

    context: Floats
    near: Keys
    far: Keys
    near_power: Floats
    far_power: Floats

    @property
    def far_mass(self) -> Floats:
        """The measured far mass of each query: [n]."""
        return np.asarray(1 / (1 + np.exp(self.near.lse - self.far.lse)))


Samples = dict[tuple[int, int], HeadSample]
"""(layer, query head) -> its queries."""


def sample(
    model: Any,
    ids: Tensor,
    near_window: int,
    *,
    queries: int = 64,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Samples:
    """The queries in the second half of each text, at most `queries` of each.

    Give it texts of the training length: what it keeps is all that a prediction may know.

    Shapes: ids int64 [texts, tokens]. Units: near_window in tokens.
    Raises: ValueError as `observe`, and where the near window leaves no far key to half of the
    queries.
    """
    tokens = ids.shape[-1]
    if not 1 <= near_window < (tokens + 1) // 2:
        raise ValueError(
            f"near_window is {near_window}; expected 1 to {(tokens + 1) // 2 - 1}, so that queries "
            f"in the second half of {tokens} tokens have far keys"
        )
    reader = _Reader(near_window, tokens // 2)
    # Twice as many, since the first half is left out of a sample stratified by octaves.
    observe(
        model, ids, reader, sampling=Sampling("stratified", _asked(queries, tokens)),
        layers=layers, heads=heads,
    )  # fmt: skip
    return reader.samples()


def _asked(queries: int, tokens: int) -> int:
    """How many stratified queries hold about `queries` of the last octave."""
    return min(tokens, max(1, queries // 2) * max(1, 2 * (tokens.bit_length() - 1)))


class _Reader:
    """A visitor that keeps every query of the later half."""

    def __init__(self, near_window: int, after: int) -> None:
        self.near_window, self.after = near_window, after
        self.kept: dict[int, list[dict[str, Tensor]]] = {}
        self.heads: tuple[int, ...] = ()

    def __call__(self, chunk: Chunk) -> None:
        context = chunk.position + 1
        if int(context.max()) <= self.after:
            return
        found = query_sums(chunk, (self.near_window,), 1)
        near, far = found.near[0], found.far[0]
        parts = split_output(near.values, far.values)
        heads = near.logits.lse.shape
        columns = {
            "context": context[:, None, None].expand(heads).double(),
            "near_power": near.values.mean.square().sum(-1),
            "far_power": parts.far.square().sum(-1),
            "here": (chunk.real & (context > self.after))[:, None, None].expand(heads)
            & (far.logits.count > 0)
            & (near.logits.count > 0),
            **_columns("near", near),
            **_columns("far", far),
        }
        self.heads = chunk.call.heads
        kept = {key: value.flatten(1, 2).transpose(0, 1).cpu() for key, value in columns.items()}
        self.kept.setdefault(chunk.layer, []).append(
            {key: value.flatten(1) for key, value in kept.items()}
        )

    def samples(self) -> Samples:
        """What was kept, by layer and head."""
        found: Samples = {}
        for layer in sorted(self.kept):
            parts = self.kept[layer]
            whole = {key: torch.cat([part[key] for part in parts], -1) for key in parts[0]}
            for row, head in enumerate(self.heads):
                here = whole["here"][row]
                if bool(here.any()):
                    own = {key: value[row][here].numpy() for key, value in whole.items()}
                    found[layer, head] = _head_sample(own)
        return found


def _columns(name: str, keys: KeySums) -> dict[str, Tensor]:
    sums: LogitSums = keys.logits
    names = ("count", "lse", "lse2", "tilted")
    return {f"{name}_{key}": getattr(sums, key) for key in names}


def _head_sample(own: dict[str, Floats]) -> HeadSample:
    near, far = (
        Keys(*(own[f"{name}_{key}"] for key in ("count", "lse", "lse2", "tilted")))
        for name in ("near", "far")
    )
    return HeadSample(own["context"], near, far, own["near_power"], own["far_power"])
