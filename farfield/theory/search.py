"""The least whole number for which a monotone condition holds, for many conditions at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from farfield.theory.checks import Floats

MOST = 2.0**53  # beyond it a float no longer counts


def least_count(holds: Callable[[Floats], npt.NDArray[np.bool_]], shape: tuple[int, ...]) -> Floats:
    """The least n ≥ 1 with `holds(n)`, elementwise; ∞ where it does not hold at 2⁵³.

    `holds` must stay true once it is; it is called with arrays of `shape`, about 2 log₂ n times.

    Shapes: `shape`. Units: those of n. Source: doubling, then bisection.
    """
    low, high = np.zeros(shape), np.ones(shape)
    while (short := ~holds(high) & (high < MOST)).any():
        low, high = np.where(short, high, low), np.where(short, 2 * high, high)
    never = ~holds(high)
    while (open_ := high - low > 1).any():
        middle = np.floor((low + high) / 2)
        true = holds(middle)
        high = np.where(open_ & true, middle, high)
        low = np.where(open_ & ~true, middle, low)
    return np.where(never, np.inf, high)
