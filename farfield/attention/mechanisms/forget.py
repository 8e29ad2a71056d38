"""`forget`: a gate the token sets decides how much of everything before it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.algebra.potential import accumulate_steps
from farfield.algebra.trail import Rows
from farfield.attention.mechanism import Carry, Control, Geometry, State, Tokens, end

SHORTEST = 4.0
"""Tokens in which the most forgetful head keeps 1/e at the start of training."""


@dataclass(frozen=True)
class Options:
    """`longest`: tokens in which the head that remembers longest keeps 1/e at the start (0: twice
    the training length). `std`: that of W at the start."""

    longest: float = 0.0
    std: float = 0.02


class Forget(Control):
    """u_t = -Σ_{l≤t} log f_l, f_t = sigmoid(W x_t + b) for every key/value head.

    A score on the route from j to i gains Σ_{l=j+1..i} log f_l: the gate of the query counts, that
    of the key does not. At the start head h keeps 1/e over τ_h tokens, log-spaced from `SHORTEST`
    to `longest`: with one common gate every head would forget alike, and none could learn that the
    far past matters.

    Source: Lin et al., "Forgetting Transformer" (arXiv 2503.02130), §3.
    """

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        if options.std < 0 or options.longest < 0:
            raise ValueError(
                f"forget:longest={options.longest:g},std={options.std:g}: expected at least 0"
            )
        longest = options.longest or 2.0 * geometry.known_train_length("forget without longest")
        self.initial_std = options.std
        self.initial_values = {"bias": _biases(geometry.kv_heads, longest)}
        self.weight = nn.Parameter(torch.randn(geometry.kv_heads, geometry.hidden_size))
        self.bias = nn.Parameter(torch.tensor(self.initial_values["bias"]))

    def forward(self, tokens: Tokens, state: State, carry: Carry) -> Carry:
        """The Carry with a potential [B, kv heads, T] float64. Padding forgets nothing."""
        forgotten = tokens.real(self.log_gate(tokens)[..., None]).squeeze(-1).neg()
        base = end(state, "forgotten")
        sums, potential = accumulate_steps(forgotten, None if base is None else base.squeeze(-1))
        trail = {"forgotten": Rows(sums[..., None])}
        return replace(carry, potential=potential, state={**carry.state, **trail})

    def log_gate(self, tokens: Tokens) -> Tensor:
        """log f_t [B, kv heads, T] in float32 or wider, outside autocast."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(tokens.hidden.device.type, enabled=False):
            gate = F.linear(tokens.hidden.to(wide), self.weight.to(wide), self.bias.to(wide))
            return F.logsigmoid(gate).transpose(1, 2)


def _biases(heads: int, longest: float) -> tuple[float, ...]:
    """b_h with sigmoid(b_h) = e^{-1/τ_h}, τ_h log-spaced from `SHORTEST` to `longest` tokens."""
    shortest = min(SHORTEST, longest)
    found = []
    for head in range(heads):
        share = head / (heads - 1) if heads > 1 else 1.0
        tau = shortest * (longest / shortest) ** share
        found.append(-math.log(math.expm1(1.0 / tau)))
    return tuple(found)
