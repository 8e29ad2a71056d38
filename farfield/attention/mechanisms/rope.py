"""`rope`: the constant step R(-ω_b), which makes the position itself the angle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farfield.algebra.rotation import RotationFrame, mixing_scales, rotary_frequencies
from farfield.algebra.turns import to_turns
from farfield.attention.mechanism import Geometry, State, Tokens, Transport

Frequencies = Literal["rotary", "mixing"]
"""`rotary`: RoPE's base^(-2b/d). `mixing`: the scales σ_b that `random` uses, each of which mixes
within the mixing window; RoPE with these is the control that tells data from frequencies."""


def frequencies(kind: Frequencies, geometry: Geometry) -> Tensor:
    """The frequencies ω_b [N] of the name, float64, radians per token."""
    if kind == "rotary":
        return rotary_frequencies(geometry.head_dim, geometry.rope_base)
    return mixing_scales(geometry.head_dim, geometry.mixing_window)


@dataclass(frozen=True)
class Options:
    """`frequencies`: rotary (RoPE's own) or mixing (those of `random` and `learned`)."""

    frequencies: Frequencies = "rotary"


class Rope(Transport):
    """Φ_t = ω_b t: frames from the position alone, an exact integer multiple of the step."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        self.turns = tuple(to_turns(frequencies(options.frequencies, geometry)).tolist())

    def forward(self, tokens: Tokens, state: State) -> tuple[RotationFrame, State]:
        """Frames [B or 1, 1, T, N], shared by all heads; no state, the position says it all."""
        step = torch.tensor(self.turns, dtype=torch.int64, device=tokens.position.device)
        turns = tokens.position[:, None, :, None] * step
        return RotationFrame.from_turns(turns, tokens.frame_dtype), {}
