"""`rope`: the constant step R(-ω_b), which makes the position itself the angle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farfield.algebra.rotation import RotationFrame, mixing_scales, rotary_frequencies
from farfield.algebra.scaling import Scaling, scaled, temperature
from farfield.algebra.turns import to_turns
from farfield.attention.mechanism import Carry, Geometry, State, Tokens, Transport

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
    """`frequencies`: rotary (RoPE's own) or mixing (those of `random` and `learned`). `scaling`:
    the rule by which a longer context lowers them, for contexts of `factor` L₀."""

    frequencies: Frequencies = "rotary"
    scaling: Scaling = "none"
    factor: float = 1.0


class Rope(Transport):
    """Φ_t = ω_b t: frames from the position alone, an exact integer multiple of the step.

    `logit_scale` multiplies the logits: the square of the temperature that `yarn` gives queries and
    keys alike, else 1. Raises: ValueError for a factor below 1, or one that no scaling uses, and
    for `yarn` without a training length.
    """

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        if not options.factor >= 1.0:
            raise ValueError(
                f"option 'factor' of 'rope' is {options.factor:g}; expected at least 1, the "
                "context over the training length"
            )
        if options.scaling == "none" and options.factor != 1.0:
            raise ValueError(
                f"option 'factor' of 'rope' is {options.factor:g} and nothing is scaled by it; "
                "give a scaling: linear, ntk or yarn"
            )
        length = None
        if options.scaling == "yarn":
            length = geometry.known_train_length("rope:scaling=yarn")
        omega = frequencies(options.frequencies, geometry)
        omega = scaled(options.scaling, omega, options.factor, length)
        self.turns = tuple(to_turns(omega).tolist())
        self.logit_scale = temperature(options.scaling, options.factor) ** 2

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """Frames [B or 1, 1, T, N], shared by all heads; no state, the position says it all."""
        step = torch.tensor(self.turns, dtype=torch.int64, device=tokens.position.device)
        turns = tokens.position[:, None, :, None] * step
        frame = RotationFrame.from_turns(turns, tokens.frame_dtype)
        if self.logit_scale == 1.0:
            return Carry(frame)
        scale = torch.full_like(frame.cos[:1, :, :, 0], self.logit_scale)
        return Carry(frame, logit_scale=scale)
