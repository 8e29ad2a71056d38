"""Percentile bootstrap of statistics of paired sums, over windows and over seeds. NumPy alone.

Everything here works on *sums per unit*: x[s, u] is the summed loss (nats) of seed s on unit u, a
window or a target block. All units hold equally many tokens, so a resample always holds as many
tokens as the original and a mean is its total over a constant.

The seeds of one study read the same text, so a unit is the same tokens in every seed. Units are
therefore resampled once for all seeds (crossed, not nested), and every array given to one call is
resampled with the same draws: what two mechanisms or two lengths have in common cancels.

**How far to trust it.** The percentile interval is too narrow when few units or seeds are
resampled: its spread is short by sqrt((n − 1)/n), it uses no Student quantile, and it can't reach
beyond the values that were seen. With about thirty units coverage is near nominal; with two to
five it is well below (tests/evaluation/test_intervals.py measures both). Three seeds bound the
spread between seeds only roughly: read such an interval as a lower bound on the uncertainty.
Target blocks and windows are next to each other in one text; what correlation is left between
neighbours is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
RESAMPLES = 2000
GENERATOR_SEED = 20_260_624
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the resampling counts, whatever the units

Floats = npt.NDArray[np.float64]
Statistic = Callable[..., Any]


@dataclass(frozen=True)
class Interval:
    """A statistic of the data and the percentile interval of its resamples.

    `low` and `high` are None where nothing can be resampled (fewer than two units), and so is
    `estimate` where the data themselves are not finite.
    """

    estimate: float | None
    low: float | None
    high: float | None


def pool(units: npt.ArrayLike, unit_tokens: int, pooled_tokens: int) -> Floats:
    """Sums over consecutive units, so that shorter windows pair with the longer one they fill.

    Shapes: units [..., U] -> [..., U · unit_tokens / pooled_tokens].
    Units: unit_tokens and pooled_tokens in tokens; the values are sums (nats).
    Raises: ValueError when a pooled unit doesn't hold whole units, or the units don't fill it.
    """
    values = _sums(units)
    if unit_tokens < 1 or pooled_tokens % unit_tokens:
        raise ValueError(
            f"can't pool units of {unit_tokens} tokens into {pooled_tokens}: not a whole multiple"
        )
    group = pooled_tokens // unit_tokens
    if values.shape[-1] % group:
        raise ValueError(
            f"can't pool {values.shape[-1]} units in groups of {group}: "
            "the last group would not be whole"
        )
    pooled: Floats = values.reshape(*values.shape[:-1], -1, group).sum(axis=-1)
    return pooled


def hierarchical(
    statistic: Statistic,
    *sums: npt.ArrayLike,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    generator_seed: int = GENERATOR_SEED,
) -> Interval:
    """Interval of statistic(totals of each array) with seeds *and* units drawn with replacement.

    For resample r with seed counts a_s (Σ a_s = S) and unit counts b_u (Σ b_u = U), the total of
    an array x is X_r = Σ_s a_s Σ_u b_u x[s, u]. Every array is totalled with the same counts, and
    `statistic` is called once with one array of totals [resamples] per array given, so it must
    work elementwise. Totals always stand for S · U units.

        # ratio of one mechanism over seeds, its windows of L tokens paired with those of L₀
        tokens = x.size * L
        hierarchical(lambda far, near: np.exp((far - near) / tokens), x, pool(x0, L0, L))
        # difference of log-ratios between two mechanisms, paired over seeds and windows
        hierarchical(lambda a, a0, b, b0: ((a - a0) - (b - b0)) / tokens, a, a0, b, b0)
        # difference of log perplexity at L₀
        hierarchical(lambda a, b: (a - b) / tokens, a, b)

    One seed leaves the units alone to vary. With fewer than two units there is no interval.

    Shapes: every array [S, U], or [U] for one seed; all alike.
    Raises: ValueError on arrays of different shapes, on none, or on a level outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level = {level}: expected a number between 0 and 1, such as 0.95")
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: expected at least 1")
    arrays = np.stack(_alike([np.atleast_2d(_sums(array)) for array in sums]))
    seeds, units = arrays.shape[1:]
    if not np.isfinite(arrays).all():
        return Interval(None, None, None)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows becomes None
        estimate = _finite(float(statistic(*arrays.sum(axis=(1, 2)))))
        if units < 2:
            return Interval(estimate, None, None)
        totals = _resampled_totals(arrays, seeds, units, resamples, generator_seed)
        values = np.asarray(statistic(*totals), dtype=np.float64)
        if values.shape != (resamples,):
            raise ValueError(
                f"the statistic returned shape {values.shape} for totals of shape ({resamples},): "
                "expected one value per resample"
            )
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, _finite(float(low)), _finite(float(high)))


def perplexity_ratio(
    far: npt.ArrayLike, near: npt.ArrayLike, unit_tokens: int, **options: Any
) -> Interval:
    """Interval of exp((Σ far − Σ near) / tokens): perplexity over perplexity, paired by unit.

    Both arrays hold summed nats of the *same* unit_tokens tokens per unit, [U] or [S, U] (see
    `pool`); over several seeds this is the geometric mean of their ratios. `options` are those of
    `hierarchical`. The ratio is computed from the difference, so it stays finite where a
    perplexity alone would overflow.
    """
    tokens = np.atleast_2d(_sums(far)).size * unit_tokens
    return hierarchical(lambda f, n: np.exp((f - n) / tokens), far, near, **options)


def _resampled_totals(
    arrays: Floats, seeds: int, units: int, resamples: int, generator_seed: int
) -> Floats:
    """Totals [arrays, resamples] under counts of seeds and units drawn with replacement."""
    # Two generators: how many resamples fit into one block must not change what is drawn.
    unit_generator, seed_generator = (
        np.random.default_rng(child) for child in np.random.SeedSequence(generator_seed).spawn(2)
    )
    totals = np.empty((arrays.shape[0], resamples))
    block = max(1, _DRAWS_AT_ONCE // units)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        unit_counts = _counts(unit_generator, rows, units)
        seed_counts = _counts(seed_generator, rows, seeds)
        by_seed = np.matmul(arrays, unit_counts.T)  # [arrays, S, rows]
        totals[:, start : start + rows] = (by_seed * seed_counts.T).sum(axis=1)
    return totals


def _counts(generator: np.random.Generator, rows: int, size: int) -> Floats:
    """How often each of `size` things is drawn in `size` draws with replacement: [rows, size]."""
    drawn = generator.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float64)


def _sums(values: npt.ArrayLike) -> Floats:
    """Values as float64, with None (a unit that holds a non-finite loss) as NaN."""
    return np.asarray(values, dtype=np.float64)


def _alike(arrays: list[Floats]) -> list[Floats]:
    if not arrays:
        raise ValueError("no arrays to resample: expected at least one of shape [seeds, units]")
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or len(arrays[0].shape) != 2 or arrays[0].size == 0:
        listed = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(
            f"paired arrays have shapes {listed}: expected one shape [seeds, units], none empty"
        )
    return arrays


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
