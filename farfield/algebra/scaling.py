"""Scaled frequencies: a model trained on positions up to L₀ read further, without training.

Each rule lowers RoPE's frequencies ω_b by up to s, the length over L₀, so that angles stay among
those that training has seen. The rules differ in which frequencies they lower, and s = 1 changes
none, to the bit. They need frequencies evenly spaced in the logarithm, as base^(-2b/d) is; what
transformers calls `linear` and `yarn`, and the change of base in its `dynamic`, are these.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Scaling = Literal["none", "linear", "ntk", "yarn"]

BETA_FAST = 32.0
"""Blocks that turn at least so often within L₀ keep their frequency under `yarn`."""
BETA_SLOW = 1.0
"""Blocks that turn at most so often within L₀ are interpolated under `yarn`."""


def scaled(kind: Scaling, omega: Tensor, factor: float, train_length: int | None = None) -> Tensor:
    """The frequencies under a rule by its name; `yarn` alone looks at the training length.

    Shapes: omega [N] float64, returned alike. Units: radians per token; train_length in tokens.
    Raises: ValueError for a factor below 1, or where `yarn` is given no training length.
    """
    if not 1.0 <= factor < math.inf:
        raise ValueError(f"factor is {factor:g}; expected a finite number of at least 1")
    if kind == "linear":
        return omega / factor
    if kind == "ntk":
        return ntk(omega, factor)
    if kind == "yarn":
        if train_length is None:
            raise ValueError("yarn needs the training length; none is given")
        return yarn(omega, factor, train_length)
    return omega


def ntk(omega: Tensor, factor: float) -> Tensor:
    """ω_b s^(-b/(N-1)): the first frequency stays and the last one is divided by s.

    For ω_b = base^(-2b/d) that is RoPE with base · s^(d/(d-2)). A single block keeps its frequency,
    which is 1 whatever the base.

    Shapes: omega [N] float64. Units: radians per token.
    Source: bloc97, "NTK-aware scaled RoPE" (2023); Peng et al., "YaRN" (arXiv 2309.00071), §3.1.
    """
    last = max(len(omega) - 1, 1)
    block = torch.arange(len(omega), dtype=omega.dtype, device=omega.device)
    return omega * factor ** (-block / last)


def yarn(omega: Tensor, factor: float, train_length: int) -> Tensor:
    """ω_b (1 - γ_b (1 - 1/s)): fast blocks keep their frequency, slow ones are interpolated.

    Block b turns L₀ ω_b / 2π times within L₀. γ_b rises from 0 where that is `BETA_FAST` to 1 where
    it is `BETA_SLOW`, linearly *in the block*, between those two places rounded outwards and cut to
    [0, d - 1]: the released code, which everything published as YaRN ran. (The paper's text has γ
    linear in the number of turns.) The first block is therefore never interpolated.

    Shapes: omega [N] float64. Units: radians per token; train_length in tokens.
    Raises: ValueError where the frequencies don't fall.
    Source: Peng et al., "YaRN" (arXiv 2309.00071), §3.2, and the authors' code.
    """
    count = len(omega)
    if count < 2:
        return omega
    fall = math.log(float(omega[0] / omega[-1])) / (count - 1)
    if not fall > 0:
        raise ValueError(
            f"yarn needs frequencies that fall from block to block; got {float(omega[0]):g} first "
            f"and {float(omega[-1]):g} last"
        )

    def place(turns: float) -> float:
        """The block, between whole ones, that turns so often within L₀."""
        return math.log(float(omega[0]) * train_length / (2.0 * math.pi * turns)) / fall

    low = max(math.floor(place(BETA_FAST)), 0)
    high = max(min(math.ceil(place(BETA_SLOW)), 2 * count - 1), low)
    block = torch.arange(count, dtype=omega.dtype, device=omega.device)
    gamma = ((block - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return omega * (1.0 - gamma * (1.0 - 1.0 / factor))


def temperature(kind: Scaling, factor: float) -> float:
    """What `yarn` multiplies queries and keys by, each: 0.1 ln s + 1; 1 under the other rules.

    Logits are multiplied by its square.
    Source: Peng et al., "YaRN" (arXiv 2309.00071), §3.4.
    """
    return 0.1 * math.log(factor) + 1.0 if kind == "yarn" else 1.0
