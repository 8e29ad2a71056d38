"""`dense`: the token says how each block of b dimensions turns, M_t = exp(S_t), S_t skew."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from farfield.algebra.dense import DenseFrame
from farfield.algebra.trail import Steps
from farfield.attention.mechanism import Carry, Geometry, State, Tokens, Transport
from farfield.attention.mechanisms.rope import Frequencies, frequencies

LARGEST = 8
"""The block size is the largest divisor of the head dimension up to this one, unless given."""


@dataclass(frozen=True)
class Options:
    """`block`: its size b, a divisor of the head dimension (0: the largest up to 8). `frequencies`:
    mixing or rotary. `c`: the constant part (0: the data alone). `std`: W's at the start."""

    block: int = 0
    frequencies: Frequencies = "mixing"
    c: float = 1.0
    std: float = 0.02


class Dense(Transport):
    """M_t = exp(S_t) on every block of every key/value head,

        (S_t)_ij = √(ω_i ω_j) (c [i and j are a plane] + (W x_t)_ij / √(b-1))   for i < j.

    Dimensions 2k and 2k+1 of a block are its k-th plane, both with the plane's frequency; where b
    is odd, the last dimension shares that of the last plane and no plane. So the constant part is a
    rotation with ⌊b/2⌋ of the frequencies that rotations have: which basis its planes stand in
    makes no difference, as the projections of queries and keys may turn it. The data turn every
    dimension into all others of its block, at the rate at which `learned` turns it into one: the
    root of the b-1 terms is taken out. Steps are near the identity at the start, but for the
    planes of frequencies near 1; dense:2 is `learned`.
    """

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        if options.std < 0:
            raise ValueError(f"option 'std' of 'dense' is {options.std:g}; expected at least 0")
        self.options = options
        self.heads = geometry.kv_heads
        self.block = _block(options.block, geometry.head_dim)
        constant, scale = _plan(self.block, geometry, options)
        self.constant, self.scale = _tuples(constant), _tuples(scale)
        size = self.heads * scale.numel()
        self.weight = nn.Linear(geometry.hidden_size, size, bias=False)
        self.weight.initial_std = options.std  # type: ignore[assignment]
        self.angle_parameters = ("weight.weight",)

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """Frames [B, kv heads, T, d]."""
        generators = self._generators(tokens)
        hidden = tokens.hidden.to(generators.dtype)
        one = hidden.new_ones(*hidden.shape[:-1], 1)
        coefficient = tokens.real(torch.cat((hidden, one), -1).unsqueeze(1))
        before = state.get("frame")
        base = before.folded if isinstance(before, Steps) else None
        frame = DenseFrame.from_coefficients(coefficient, generators, base)
        return Carry(frame=frame, state={"frame": frame.trail})

    def _generators(self, tokens: Tokens) -> Tensor:
        """[kv heads, N, pairs, D + 1] in float32 or wider: W with its scales, and the constant."""
        weight = self.weight.weight
        wide = torch.promote_types(tokens.frame_dtype, weight.dtype)
        constant, scale = (
            torch.tensor(values, dtype=torch.float64, device=weight.device).unsqueeze(-1).to(wide)
            for values in (self.constant, self.scale)
        )
        learned = weight.to(wide).unflatten(0, (self.heads, *scale.shape[:2])) * scale
        return torch.cat((learned, constant.expand(self.heads, -1, -1, -1)), -1)


def _block(given: int, head_dim: int) -> int:
    if given == 0:
        sizes = [size for size in range(2, LARGEST + 1) if head_dim % size == 0]
        if not sizes:
            raise ValueError(f"no block size from 2 to {LARGEST} divides head_dim {head_dim}")
        return sizes[-1]
    if given < 2 or head_dim % given:
        raise ValueError(
            f"option 'block' of 'dense' is {given}; expected a divisor of head_dim {head_dim}, "
            "at least 2"
        )
    return given


def _plan(block: int, geometry: Geometry, options: Options) -> tuple[Tensor, Tensor]:
    """The constant part of each pair and the scale of its learned part, [N, b(b-1)/2] each."""
    blocks, planes = geometry.head_dim // block, block // 2
    shape = replace(geometry, head_dim=2 * blocks * planes)
    omega = frequencies(options.frequencies, shape).reshape(blocks, planes)
    each = omega.repeat_interleave(2, dim=1)
    each = torch.cat((each, omega[:, -1:]), 1)[:, :block]
    first, second = torch.triu_indices(block, block, 1, device="cpu")
    scale = (each[:, first] * each[:, second]).sqrt()
    plane = (first % 2 == 0) & (second == first + 1)
    return options.c * scale * plane, scale / math.sqrt(block - 1)


def _tuples(x: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, x.tolist()))
