"""Potentials that tokens contribute to: fixed-point sums of what each of them forgets.

A potential is the scalar twin of a frame: u_t = a_1 + ⋯ + a_t, of which only the differences
u_j - u_i along a route matter. Summed in units of 2^-36 nat as int64, the sums are exact: chunks
equal the whole bit for bit, and going back is a subtraction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NATS_PER_UNIT = 2.0**-36
"""Size of one unit. A sum holds 2^27 nats, 2 million tokens at the largest step."""

LARGEST_STEP = 64.0
"""Nats a single token may add, 2^6: e^-64 of a weight is nothing in any floating type."""


def accumulate_steps(step: Tensor, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """u_t = base + a_1 + ⋯ + a_t: the exact sums, and the potential they stand for.

    Differentiable in `step`: du_t/da_l = 1 for l ≤ t, summed in reverse in float64. Steps beyond
    `LARGEST_STEP` count as that, with no gradient.

    Shapes: step [..., T] float; base int64 [..., 1] or None; returns int64 and float64 [..., T].
    Units: nats. A step that is not finite makes the whole row of potentials not-a-number.
    """
    return _Accumulate.apply(step, base)


class _Accumulate(torch.autograd.Function):
    """Steps → (sums, u). The integer sums carry no gradient; the steps they stand for do."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = step.double()
        inside = wide.clamp(-LARGEST_STEP, LARGEST_STEP)
        units = (inside * 2.0**36).round_().to(torch.int64)
        sums = units.cumsum(-1)
        if base is not None:
            sums = sums + base
        poison = (wide * 0.0).sum(-1, keepdim=True)  # integers alone would swallow a NaN
        ctx.mark_non_differentiable(sums)
        ctx.save_for_backward(inside == wide)
        ctx.step_dtype = step.dtype
        return sums, torch.add(poison, sums.double(), alpha=NATS_PER_UNIT)

    @staticmethod
    def backward(ctx: Any, _, grad: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        sums = grad.double().cumsum(-1)
        reverse = sums[..., -1:] - sums + grad
        return (reverse * inside).to(ctx.step_dtype), None
