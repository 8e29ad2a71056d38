"""`alibi`: a penalty that grows with distance, as the potential u_t = m t."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farfield.attention.mechanism import Carry, Control, Geometry, State, Tokens


@dataclass(frozen=True)
class Options:
    """No options: the slopes follow from the number of heads."""


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes: m_h = 2^(-8h/n) for h = 1 … n where n is a power of two.

    For other numbers of heads: the slopes of the next lower power of two, then every second one of
    the next higher.

    Shapes: [heads] float64. Units: nats per token.
    Source: Press, Smith and Lewis, "Train Short, Test Long" (arXiv 2108.12409), §3, and the
    authors' rule for other counts.
    """
    power = 2 ** math.floor(math.log2(heads))
    exponents = [8.0 * (h + 1) / power for h in range(power)]
    exponents += [4.0 * (2 * h + 1) / power for h in range(heads - power)]
    return 2.0 ** -torch.tensor(exponents, dtype=torch.float64, device="cpu")


class Alibi(Control):
    """score_ij + u_j - u_i = score_ij - m_h (i - j), one slope for every query head."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        self.slopes = tuple(slopes(geometry.heads).tolist())

    def forward(self, tokens: Tokens, state: State, carry: Carry) -> Carry:
        """Potential [B or 1, H, T] float64; no state, the position says it all."""
        slope = torch.tensor(self.slopes, dtype=torch.float64, device=tokens.position.device)
        return replace(carry, potential=tokens.position[:, None, :] * slope[:, None])

    def reach(self, cap: Tensor, epsilon: float) -> int | None:
        """The least n with Σ_{l≥n} e^{Λ - m l} ≤ ε e^{-Λ} for every head, Λ its cap.

        Source: docs/theory.md, T4 (ALiBi), with the query's own key alone as the near set.
        """
        slope = torch.tensor(self.slopes, dtype=torch.float64, device=cap.device)
        tail = -torch.log(-torch.expm1(-slope)) - math.log(epsilon)
        least = ((2.0 * cap.double() + tail) / slope).ceil().clamp(min=1.0).amax()
        return int(least) if bool(least.isfinite()) else None
