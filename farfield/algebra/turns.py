"""Angles as fixed-point turns: sums over a million tokens that are exact and wrap by themselves.

An angle is stored as an int64 fraction of a turn, 2**64 units to the circle. Integer addition then
*is* addition on the circle: it has no rounding, it can be split into chunks or undone by
subtraction bit for bit, and it needs no reduction. The only rounding is where a real angle becomes
turns (`to_turns`, once per token) and where a sum becomes a cosine and a sine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RADIANS_PER_UNIT = 2.0 * math.pi / 2.0**64
"""Size of one unit, in radians."""


def to_turns(angle: Tensor) -> Tensor:
    """Fixed-point turns of an angle: round(2^64 · angle / 2π) mod 2^64.

    The division is done in float64 whatever the input's type, so that the step is the one its
    float32 angle names: a relative error of 1e-8 here would be 0.01 rad after a million steps.

    Shapes: any. Units: radians in, units of 2^-64 turn out (int64, two's complement).
    An angle that is not finite has no direction and the integer it becomes means nothing:
    `RotationFrame.from_angles` keeps it from passing unseen.
    """
    fraction = (angle.to(torch.float64) * (0.5 / math.pi)).frac_()
    # Up to a whole turn, 2^64: more than int64 holds. Convert two bits short; the shift wraps.
    return fraction.mul_(2.0**62).round_().to(torch.int64).bitwise_left_shift_(2)


def to_radians(turns: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The angle of fixed-point turns: 2π · turns / 2^64, in [-π, π] (rounding reaches π).

    Shapes: any. Units: radians. In float32 the error is at most 1.2e-7 of the angle.
    """
    return turns.to(dtype) * RADIANS_PER_UNIT


def accumulate(turns: Tensor, base: Tensor | None = None) -> Tensor:
    """Inclusive sums along the tokens: Φ_t = base + φ_1 + ⋯ + φ_t, exact and wrapping.

    Shapes: turns [..., T, N], base [..., 1, N] or None (zero); returns [..., T, N].
    """
    sums = turns.cumsum(-2)
    return sums if base is None else sums + base
