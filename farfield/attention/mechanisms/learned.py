"""`learned`: the token says how far it turns, θ_b = ω_b (c + W x)_b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from farfield.algebra.rotation import RotationFrame
from farfield.algebra.turns import to_turns
from farfield.attention.mechanism import Carry, Geometry, State, Tokens, Transport, end
from farfield.attention.mechanisms.rope import Frequencies, frequencies


@dataclass(frozen=True)
class Options:
    """`frequencies`: mixing or rotary. `c`: the constant part (1: RoPE's; 0: the data alone).
    `source`: hidden (W x_t) or token (a learned row for each token id). `std`: W's at the start."""

    frequencies: Frequencies = "mixing"
    c: float = 1.0
    source: Literal["hidden", "token"] = "hidden"
    std: float = 0.02


class Learned(Transport):
    """θ_{t,h,b} = ω_b (c + (W x_t)_{h,b}), for every key/value head h and block b.

    With W = 0 and c = 1 this is RoPE with frequencies ω_b, to the bit: the constant part of an
    angle, c ω_b, is kept apart from the learned one as exact turns.
    """

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        if options.std < 0:
            raise ValueError(f"option 'std' of 'learned' is {options.std:g}; expected at least 0")
        self.options = options
        self.heads = geometry.kv_heads
        self.omega = tuple(frequencies(options.frequencies, geometry).tolist())
        constant = options.c * frequencies(options.frequencies, geometry)
        self.constant = tuple(to_turns(constant).tolist())
        size = self.heads * len(self.omega)
        self.weight: nn.Module
        if options.source == "token":
            self.weight = nn.Embedding(geometry.vocab_size, size)
        else:
            self.weight = nn.Linear(geometry.hidden_size, size, bias=False)
        self.weight.initial_std = options.std  # type: ignore[assignment]
        self.angle_parameters = ("weight.weight",)

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """Frames [B, kv heads, T, N]. Raises: ValueError where the source is the token id and
        ids are not known."""
        angle = tokens.real(self._angle(tokens))
        constant = torch.tensor(self.constant, dtype=torch.int64, device=angle.device)
        constant = tokens.real(constant.expand(1, 1, 1, -1))
        frame = RotationFrame.from_angles(angle, end(state, "turns"), constant)
        return Carry(frame, state={"turns": frame.trail})

    def resize_vocabulary(self, size: int) -> None:
        """Refused where each id has a learned row: a new id would have none."""
        if self.options.source == "token":
            raise ValueError("learned:source=token has a row for each id; its vocabulary is fixed")

    def _angle(self, tokens: Tokens) -> Tensor:
        """ω_b (W x_t)_b [B, kv heads, T, N] in float32 or wider, outside autocast: an angle in
        half precision would lose even near routes."""
        with torch.autocast(tokens.hidden.device.type, enabled=False):
            data = self._data(tokens)
            data = data.to(torch.promote_types(data.dtype, torch.float32))
            data = data.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            omega = torch.tensor(self.omega, dtype=torch.float64, device=data.device)
            return data * omega.to(data.dtype)

    def _data(self, tokens: Tokens) -> Tensor:
        if self.options.source == "token":
            if tokens.ids is None:
                raise ValueError(
                    "learned:source=token looks token ids up: pass input_ids, not inputs_embeds"
                )
            return self.weight(tokens.ids)
        weight: Tensor = self.weight.weight  # type: ignore[assignment]
        wide = torch.promote_types(weight.dtype, torch.float32)
        return nn.functional.linear(tokens.hidden.to(wide), weight.to(wide))
