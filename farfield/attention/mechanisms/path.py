"""`path`: the token says in which direction it takes away, and how much: M_t = I - β w wᵀ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.algebra.contraction import Contraction
from farfield.attention.mechanism import Carry, Geometry, State, Tokens
from farfield.attention.mechanisms import reflection

_SHORTEST = 1e-6
"""Vectors shorter than this have no direction: they are not lengthened to unit length."""


@dataclass(frozen=True)
class Options:
    """`rank`: that of W (0: full). `conv`: taps of a short causal convolution with SiLU over W x
    (0: none). `bias`: that of β's projection at the start. `beta`: one strength for every step, 2
    being the reflection (0: every token chooses its own)."""

    rank: int = 32
    conv: int = 3
    bias: float = 0.0
    beta: float = 0.0


class Path(reflection.Reflection):
    """M_t = I - β_t w_t w_tᵀ with w_t = W x_t / |W x_t| as in `reflection`, and
    β_t = 2 sigmoid(U x_t + b), for every key/value head.

    At the start b = 0 and U is small, so β ≈ 1: a step takes the part along w out and adds nothing.
    That is halfway between keeping (β = 0) and reflecting (β = 2), where the sigmoid is steepest,
    and it forgets at a rate that a model can use: over directions at random E P = (1 - 1/d)^n for n
    tokens, 0.1 after about 2.3 d. With rank r < d a head's vectors lie in r dimensions; the others
    are carried unchanged, so that something of the far past remains to be learned from.

    Values can't be carried: what a step took out of a key it could not put back into an output.

    Source: Yang et al., "PaTH Attention" (arXiv 2505.16381), §3.
    """

    contracts = True

    def __init__(self, geometry: Geometry, options: Options) -> None:
        for name in ("rank", "conv"):
            if getattr(options, name) < 0:
                raise ValueError(
                    f"option '{name}' of 'path' is {getattr(options, name)}; expected at least 0"
                )
        if not 0 <= options.beta <= 2:
            raise ValueError(
                f"option 'beta' of 'path' is {options.beta:g}; expected 0 (every token chooses) to "
                "2: beyond, a step lengthens what it carries"
            )
        super().__init__(geometry, reflection.Options(options.rank, options.conv))
        self.beta = options.beta
        if not self.beta:
            self.strength = nn.Linear(geometry.hidden_size, geometry.kv_heads)
            start = (options.bias,) * geometry.kv_heads
            self.strength.initial_values = {"bias": start}  # type: ignore[assignment]
            with torch.no_grad():
                self.strength.bias.fill_(options.bias)
            self.angle_parameters = (*self.angle_parameters, "strength.weight", "strength.bias")

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """A Carry with the contraction [B, kv heads, T] of the tokens."""
        vector, trail = self.vectors(tokens, state)
        w = F.normalize(vector, dim=-1, eps=_SHORTEST)
        beta = tokens.real(self.strengths(tokens).to(w.dtype)[..., None]).squeeze(-1)
        return Carry(contraction=Contraction(w, beta.expand(w.shape[:-1])), state=trail)

    def strengths(self, tokens: Tokens) -> Tensor:
        """β_t [B, kv heads, T] (or one of each for all) in float32 or wider, outside autocast."""
        if self.beta:
            return tokens.position.new_full(
                (1, 1, tokens.hidden.shape[1]), self.beta, dtype=torch.float32
            )
        weight, bias = self.strength.weight, self.strength.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(tokens.hidden.device.type, enabled=False):
            raw = F.linear(tokens.hidden.to(wide), weight.to(wide), bias.to(wide))
            return 2.0 * raw.sigmoid().transpose(1, 2)
