"""What each head of a trained model does with near and far keys, as a function of context length.

A measurement visits the chunks of a run (`probe.observe`), sums every query's near and far keys up
with `farfield.algebra.measures`, checks the lower bounds of the far mass on each, and keeps sums
over the queries of a stratum alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield.algebra import measures
from farfield.diagnosis.probe import Coverage, observe
from farfield.diagnosis.rows import BOUNDS, MEANS, SPREADS, WHOLE, identity
from farfield.diagnosis.sampling import Sampling
from farfield.diagnosis.sums import KeySums, query_sums
from farfield.diagnosis.tiles import Chunk, DotProducts
from farfield.evaluation.plan import position_buckets
from farfield.theory import mass, values

ROUNDING = 1e-5
"""By how much, in nats of log odds, a bound may seem to fail: logits and their exponentials are
float32."""

Columns = dict[str, Tensor]
"""Name of a measure -> its values [W, B, H, Q] float64, NaN where it means nothing."""


class BoundViolationError(RuntimeError):
    """A far mass below a bound that holds for every row of every softmax: a bug in the probe."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    `windows` are the near windows, rising; `first_tokens` how many keys at the start of a document
    count as its first; `rho` the rates ρ of each layer's query heads where they are known (for T4″,
    which holds with probability 1 − δ).

    Units: tokens. Raises: ValueError for windows that do not rise from 1, no first token, or δ
    outside (0, 1).
    """

    windows: tuple[int, ...] = (16, 64, 256)
    first_tokens: int = 4
    rho: Mapping[int, Sequence[float]] | None = None
    delta: float = 0.05

    def __post_init__(self) -> None:
        rising = list(self.windows) == sorted(set(self.windows))
        if not self.windows or self.windows[0] < 1 or not rising:
            raise ValueError(f"windows are {list(self.windows)}; expected rising sizes from 1 on")
        if self.first_tokens < 1:
            raise ValueError(f"first_tokens is {self.first_tokens}; expected at least 1")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta}; expected a number between 0 and 1")


@dataclass(frozen=True)
class Measured:
    """The rows of a run (`rows` says what is in them), what it covered, and on how many pairs of a
    query and a near window, head by head, the bounds T4 and T4′ were checked."""

    rows: list[dict[str, Any]]
    coverage: Coverage
    checked: int


def measure(
    model: Any,
    ids: Tensor,
    *,
    name: str,
    settings: Settings | None = None,
    sampling: Sampling | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    feed: int | None = None,
    within: AbstractContextManager[Any] | None = None,
) -> Measured:
    """Run a model on texts and measure each selected layer and head at each context length.

    `name` names the model in the rows; the other arguments are those of `observe`.

    Shapes: ids int64 [B, T]. Raises: ValueError as `observe`, and for a near window that leaves no
    key far at this length; BoundViolationError where a bound that must hold doesn't.
    """
    chosen, sample = settings or Settings(), sampling or Sampling()
    if ids.ndim == 2 and ids.shape[1] <= chosen.windows[0]:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens, and the smallest near window is "
            f"{chosen.windows[0]}; expected a longer text"
        )
    kept = Measurement(chosen, ids.shape[-1])
    coverage = observe(
        model,
        ids,
        kept,
        sampling=sample,
        layers=layers,
        heads=heads,
        attention_mask=attention_mask,
        position_ids=position_ids,
        feed=feed,
        within=within,
    )
    rows = kept.rows(identity(name, model, ids, sample))
    return Measured(rows, coverage, kept.checked)


class Measurement:
    """A visitor that keeps, for each layer, the sums of every measure over a stratum of queries."""

    def __init__(self, settings: Settings, length: int) -> None:
        self.settings = settings
        self.buckets = position_buckets(length)
        self.checked = 0
        self._lows = torch.tensor([low for low, _ in self.buckets])
        self._layers: dict[int, _Totals] = {}

    def __call__(self, chunk: Chunk) -> None:
        columns, counted = of_chunk(chunk, self.settings)
        self.checked += check_bounds(chunk.layer, columns)
        stratum = torch.bucketize(chunk.position.cpu() + 1, self._lows, right=True) - 1
        kept = self._layers.get(chunk.layer)
        if kept is None:
            kept = _Totals(chunk.call.heads, chunk.call.carried, len(self.buckets))
            self._layers[chunk.layer] = kept
        kept.add(columns, counted.cpu(), stratum.expand(counted.shape))

    def rows(self, known: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A row for each layer, head, near window and stratum with a query in it."""
        found = []
        for layer in sorted(self._layers):
            for row in self._layers[layer].rows(self.settings.windows, self.buckets):
                found.append({**known, "layer": layer, **row})
        return found


def of_chunk(chunk: Chunk, settings: Settings) -> tuple[Columns, Tensor]:
    """(every measure of each query of a chunk, which queries count: real tokens that see a key).

    Shapes: measures [W, B, H, Q] for W near windows; bool [B, Q].
    """
    found = query_sums(chunk, settings.windows, settings.first_tokens)
    counted = (found.all.logits.count > 0).flatten(1, 2).all(1) & chunk.real
    parts = [
        _of_window(near, far, first)
        for near, far, first in zip(found.near, found.far, found.first_far, strict=True)
    ]
    columns = {key: torch.stack([part[key] for part in parts]) for key in parts[0]}
    whole = _of_row(chunk, found.all, found.first, found.sink_weight)
    columns.update({key: value.expand_as(columns["far_mass"]) for key, value in whole.items()})
    for key in ("near_norm", "far_norm", "out_norm"):
        columns[key] = columns[key] * (1 - columns["learned_sink"])
    for key in ("far_power", "far_power_coherent", "far_power_incoherent"):
        columns[key] = columns[key] * (1 - columns["learned_sink"]) ** 2
    columns = {key: value.flatten(2, 3).double().cpu() for key, value in columns.items()}
    there = counted[None, :, None].cpu()
    columns = {key: torch.where(there, value, torch.nan) for key, value in columns.items()}
    columns.update(_bounds(columns, settings, _rho(chunk, settings)))
    return columns, counted


def _of_window(near: KeySums, far: KeySums, first_far: measures.LogitSums) -> Columns:
    """The measures that depend on where near ends, each [B, G, R, Q]."""
    some = far.logits.count > 0
    parts = measures.split_output(near.values, far.values)
    near_norm, far_norm, out_norm = (
        torch.linalg.vector_norm(x, dim=-1) for x in (parts.near, parts.far, parts.out)
    )
    weight = parts.far_mass**2
    columns = {
        "near_keys": near.logits.count,
        "far_keys": far.logits.count,
        "far_mass": measures.far_mass(near.logits, far.logits),
        "lse_near": near.logits.lse,
        "lse_far": far.logits.lse,
        "ell": measures.log_mean_exp(far.logits),
        "log_e2": measures.log_second_moment(far.logits),
        "near_max": near.logits.largest,
        "far_max": far.logits.largest,
        "near_mean": measures.mean_logit(near.logits),
        "far_mean": measures.mean_logit(far.logits),
        "score_gap": measures.score_gap(near.logits, far.logits),
        "near_content": measures.mean_logit(near.content),
        "far_content": measures.mean_logit(far.content),
        "first_far_mass": _share(first_far, near.logits.merged(far.logits)),
        "near_norm": near_norm,
        "far_norm": torch.where(some, far_norm, 0.0),
        "out_norm": torch.where(some, out_norm, near_norm),
        "cosine": parts.cosine,
        "far_power": far_norm**2,
        "far_power_coherent": weight * far.values.coherent**2,
        "far_power_incoherent": weight * far.values.incoherent,
        "far_coherence": measures.value_coherence(far.values),
        "far_gain": measures.coherence_gain(far.values),
    }
    for key in ("lse_far", "far_max", "far_power", "far_power_coherent", "far_power_incoherent"):
        columns[key] = torch.where(some, columns[key], torch.nan)
    return {key: torch.where(value.isinf(), torch.nan, value) for key, value in columns.items()}


def _of_row(chunk: Chunk, row: KeySums, first: measures.LogitSums, sink: Tensor) -> Columns:
    """The measures of whole rows, each [B, G, R, Q] or an axis of size 1 in its place."""
    columns = {
        "half_range": measures.half_range(row.logits),
        "half_range_content": measures.half_range(row.content),
        "half_range_bias": 0.5 * (row.bias_largest - row.bias_least),
        "entropy": measures.entropy(row.logits),
        "effective_keys": measures.effective_keys(row.logits),
        "participation": measures.inverse_participation(row.logits),
        "first_mass": _share(first, row.logits),
        "learned_sink": sink,
        "score_scale": torch.full_like(sink, torch.nan),
        "coupling_floor": torch.full_like(sink, torch.nan),
    }
    scores = chunk.call.scores
    if isinstance(scores, DotProducts):
        local = chunk.rows - chunk.call.start
        query = scores.query[..., local, :].double()
        reach = scores.largest_key[..., chunk.rows - chunk.call.first].unsqueeze(2)
        columns["score_scale"] = scores.scale * query.norm(dim=-1) * reach
        if chunk.call.planes and chunk.call.carried:
            columns["coupling_floor"] = _coupling_floor(query, scores)
    return columns


def _coupling_floor(query: Tensor, scores: DotProducts) -> Tensor:
    """κ² of T5″, averaged over the planes of a head, at x_b = |q_b| mean|k_b|/√d."""
    planes = query.unflatten(-1, (2, -1)).norm(dim=-2)
    x = scores.scale * planes * scores.mean_plane[:, :, None, None]
    floor = values.coupling_floor(x.cpu().numpy())
    return torch.from_numpy(np.asarray(floor)).mean(-1).to(query.device)


def _share(part: measures.LogitSums, whole: measures.LogitSums) -> Tensor:
    """e^{LSE_part − LSE_whole}: the weight on some of the keys. 0 for none of them."""
    return torch.where(part.count > 0, torch.exp(part.lse - whole.lse), 0.0)


def _rho(chunk: Chunk, settings: Settings) -> Tensor | None:
    if settings.rho is None or chunk.layer not in settings.rho:
        return None
    known = settings.rho[chunk.layer]
    return torch.tensor([known[head] for head in chunk.call.heads], dtype=torch.float64)


def _bounds(columns: Columns, settings: Settings, rho: Tensor | None) -> Columns:
    """T4, T4′ and T4″ beside the far mass, and by how many nats of log odds it exceeds the first
    two. NaN where no key is far (or near)."""
    near, far = columns["near_keys"], columns["far_keys"]
    there = (near > 0) & (far > 0)
    K, M = (torch.where(there, x, 1.0).numpy() for x in (near, far))
    lam, lse, mean, scale = (
        torch.where(there, columns[key], 0.0).numpy()
        for key in ("half_range", "lse_near", "far_mean", "score_scale")
    )
    odds = columns["lse_far"] - columns["lse_near"]
    bounds = {
        "t4": mass.far_mass_lower(M, K, lam),
        "t4_prime": mass.far_mass(np.log(M) + mean, lse),
        "t4_slack": odds.numpy() - (np.log(M) - np.log(K) - 2 * lam),
        "t4_prime_slack": odds.numpy() - (np.log(M) + mean - lse),
        "t4_decohered": np.full_like(M, np.nan),
    }
    if rho is not None and not np.isnan(scale).any():
        per_head = np.broadcast_to(rho.view(-1, 1).numpy(), M.shape)
        bounds["t4_decohered"] = mass.far_mass_lower_decohered(
            M, lse, scale, per_head, settings.delta
        )
    found = {key: torch.from_numpy(np.asarray(value)) for key, value in bounds.items()}
    return {key: torch.where(there, value, torch.nan) for key, value in found.items()}


def check_bounds(layer: int, columns: Columns) -> int:
    """How many rows T4 and T4′ were checked on.

    Raises: BoundViolationError where the far mass is below one by more than rounding.
    """
    for name in BOUNDS:
        slack = columns[f"{name}_slack"]
        if bool((slack < -ROUNDING).any()):
            at = tuple((slack < -ROUNDING).nonzero()[0].tolist())
            _, text, head, _ = at
            raise BoundViolationError(
                f"layer {layer}, head number {head}, text {text}: a far mass of "
                f"{columns['far_mass'][at]:.6g} is below {name} = {columns[name][at]:.6g}, by "
                f"{-slack[at]:.2e} nats of log odds"
            )
    return int((~columns["t4_slack"].isnan()).sum())


class _Totals:
    """Sums over the queries of each stratum, of one layer: [W, H, strata]."""

    def __init__(self, heads: tuple[int, ...], carried: bool, strata: int) -> None:
        self.heads, self.carried, self.strata = heads, carried, strata
        self.queries = torch.zeros(strata, dtype=torch.int64)
        self.sums: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def add(self, columns: Columns, counted: Tensor, stratum: Tensor) -> None:
        """Shapes: columns [W, B, H, Q], counted and stratum [B, Q]."""
        self.queries.index_add_(0, stratum[counted], torch.ones_like(stratum[counted]))
        index = stratum.flatten()
        for key, values_ in columns.items():
            flat = values_.transpose(1, 2).flatten(2)  # [W, H, B·Q]
            if key not in self.sums:
                zeros = torch.zeros(*flat.shape[:2], self.strata, dtype=torch.float64)
                self.sums[key] = (
                    zeros,
                    zeros.clone(),
                    zeros.clone(),
                    torch.full_like(zeros, torch.inf),
                )
            there = ~flat.isnan()
            amount = torch.where(there, flat, 0.0)
            count, total, square, least = self.sums[key]
            count.index_add_(2, index, there.double())
            total.index_add_(2, index, amount)
            square.index_add_(2, index, amount**2)
            floor = torch.where(there, flat, torch.inf)
            least.scatter_reduce_(2, index.expand_as(floor), floor, "amin")

    def rows(self, windows: Sequence[int], buckets: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """The means of every stratum that has a query in it."""
        table = self._values()
        found = []
        for h, head in enumerate(self.heads):
            for w, window in enumerate(windows):
                for s, (low, high) in enumerate(buckets):
                    if self.queries[s] == 0:
                        continue
                    row: dict[str, Any] = {"head": head, "near_window": window}
                    row |= {"low": low, "high": high, "carried": self.carried}
                    row["queries"] = int(self.queries[s])
                    row["far_queries"] = int(self.sums["t4"][0][w, h, s])
                    for key, values_ in table.items():
                        value = values_[w][h][s]
                        row[key] = value if math.isfinite(value) else None
                    found.append(row)
        return found

    def _values(self) -> dict[str, list[list[list[float]]]]:
        """Name -> [W][H][strata], not finite where there is nothing to say."""
        table: dict[str, Tensor] = {}
        for key in (*MEANS, *WHOLE):
            count, total, square, _ = self.sums[key]
            mean = total / count
            table[key] = mean
            if key in SPREADS:
                table[f"{key}_sd"] = (square / count - mean**2).clamp(min=0.0).sqrt()
        for key in BOUNDS:
            table[f"{key}_slack"] = self.sums[f"{key}_slack"][3]
        return {key: value.tolist() for key, value in table.items()}
