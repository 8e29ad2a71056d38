"""`logn`: logits grow with the logarithm of the number of keys they compete with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from farfield.attention.mechanism import Carry, Control, Geometry, State, Tokens


@dataclass(frozen=True)
class Options:
    """`scale`: learned (one s for every query head) or fixed, from 1/log L₀ either way."""

    scale: Literal["learned", "fixed"] = "learned"


class Logn(Control):
    """c_i = s log(n_i), n_i the number of keys that row i sees; s starts at 1/log L₀.

    A logit then keeps its share of the softmax while the keys it competes with grow in number:
    e^{c_i a} against n_i keys is n_i^{s a} against n_i. At i = L₀ it starts as plain attention.

    Source: Chiang and Cholak, "Overcoming a Theoretical Limitation of Self-Attention"
    (arXiv 2202.12172), §5; Nakanishi, "Scalable-Softmax" (arXiv 2501.19399), for a learned s.
    """

    unbounded = True

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        length = geometry.known_train_length("logn")
        if length < 2:
            raise ValueError(f"logn needs a training length of at least 2 tokens, got {length}")
        start = (1.0 / math.log(length),) * geometry.heads
        self.fixed = start
        if options.scale == "learned":
            self.initial_values = {"scale": start}
            self.scale = nn.Parameter(torch.tensor(start))

    def forward(self, tokens: Tokens, state: State, carry: Carry) -> Carry:
        """The Carry with its logits scaled by [B or 1, H, T]."""
        seen = tokens.position + 1
        if carry.window is not None:
            outside = (seen - carry.window).clamp(min=0)
            seen = seen - outside + outside.clamp(max=carry.sinks)
        exact = tokens.frame_dtype
        log = seen[:, None, :].to(exact).log()
        return carry.scaled(self._scale(log)[:, None] * log)

    def _scale(self, like: Tensor) -> Tensor:
        if hasattr(self, "scale"):
            return self.scale.to(like.dtype)
        return torch.tensor(self.fixed, dtype=like.dtype, device=like.device)
