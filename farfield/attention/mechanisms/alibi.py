"""`alibi`: a penalty that grows with distance, as the potential u_t = m t."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.attention.mechanism import Control, Geometry, State, Tokens


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

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """Potential [B or 1, H, T] float64; no state, the position says it all."""
        slope = torch.tensor(self.slopes, dtype=torch.float64, device=tokens.position.device)
        return tokens.position[:, None, :] * slope[:, None], {}
