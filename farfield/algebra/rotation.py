"""SO(2) frames: every head is d/2 planes, and a token turns each plane by its own angle.

Convention. Block b is the plane of coordinates (b, b + N), N = d/2. A token with angle φ_b has the
step M = R(-φ_b), R(t) = [[cos t, -sin t], [sin t, cos t]]. With Φ_t = φ_1 + ⋯ + φ_t,

    pull:       F_tᵀ x = R(+Φ_t) x
    push:       F_t x  = R(-Φ_t) x
    transport:  P_{j→i} = F_i F_jᵀ = R(-(Φ_i - Φ_j))

so the constant angle φ_b = ω_b is the rotation of Llama, in sign and in pairing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from farfield.algebra.trail import Rows
from farfield.algebra.turns import RADIANS_PER_UNIT, accumulate, to_radians, to_turns


def rotary_frequencies(head_dim: int, base: float = 10000.0) -> Tensor:
    """RoPE's frequencies: ω_b = base^(-2b/d) for b = 0 … d/2 - 1.

    Shapes: [N] float64. Units: radians per token. Raises: ValueError for an odd head dimension.
    Source: Su et al., "RoFormer" (arXiv 2104.09864), §3.2.2.
    """
    blocks = torch.arange(_blocks(head_dim), dtype=torch.float64, device="cpu")
    return base ** (-2.0 * blocks / head_dim)


def mixing_scales(head_dim: int, mixing_window: float, epsilon: float = 0.1) -> Tensor:
    """Step scales σ_b, log-spaced from 1 down to the one that mixes in `mixing_window` tokens.

    A step N(0, σ²) has |E e^{iθ}| = e^{-σ²/2}, so n steps fall to ε when n = 2 ln(1/ε)/σ². The
    smallest scale is therefore √(2 ln(1/ε) / mixing_window): every block mixes within that many
    tokens, the first one within a few.

    Shapes: [N] float64. Units: radians per token; `mixing_window` in tokens.
    Raises: ValueError for an odd head dimension or a window below 2 ln(1/ε) tokens.
    Source: E exp(iθ) of a normal angle; docs/mechanisms.md names the set.
    """
    count = _blocks(head_dim)
    shortest = 2.0 * math.log(1.0 / epsilon)
    if not mixing_window >= shortest:
        raise ValueError(
            f"mixing_window is {mixing_window} tokens; a step of scale 1 already needs "
            f"{shortest:.1f} to mix to {epsilon}"
        )
    smallest = math.sqrt(shortest / mixing_window)
    # On the CPU by name: models are built under a default device that holds no data.
    return torch.logspace(0.0, math.log10(smallest), count, dtype=torch.float64, device="cpu")


def _blocks(head_dim: int) -> int:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotations need an even number, two per block")
    return head_dim // 2


@dataclass(frozen=True)
class RotationFrame:
    """SO(2) frames of T tokens: fixed-point turns, and cosine and sine of the angle they stand for.

    `phase`, that angle, is there where it carries a gradient to the steps' angles (else None);
    `cos` and `sin` are constants beside it.

    Shapes: turns int64 [..., T, N]; phase, cos, sin [..., T, N] (float32, or float64 for float64
    angles). Leading axes broadcast against those of what is pulled. Laws: see `Frame`.
    """

    turns: Tensor
    phase: Tensor | None
    cos: Tensor
    sin: Tensor

    @classmethod
    def from_angles(
        cls, angle: Tensor, base: Tensor | None = None, constant: Tensor | None = None
    ) -> RotationFrame:
        """Frames of the steps R(-angle_t) after a frame whose turns are `base`.

        `constant` is a part of every step that is known as turns, hence without rounding.
        Differentiable in `angle`: dΦ_t/dφ_l = 1 for l ≤ t, summed in reverse in float64.

        Shapes: angle [..., T, N] float; base int64 [..., 1, N] or None for the root frame;
        constant int64, broadcast against angle, or None.
        Units: radians. Raises: TypeError for integer angles. A non-finite angle makes every cosine
        and sine of its sequence in this call not-a-number, so that it is noticed.
        """
        if not angle.is_floating_point():
            raise TypeError(f"angles are {angle.dtype}; expected a floating type in radians")
        turns, phase = _Accumulate.apply(angle, base, constant)
        if phase.requires_grad:
            return cls(turns, phase, *_cos_sin(phase))
        return cls(turns, None, phase.cos(), phase.sin_())

    @classmethod
    def from_turns(cls, turns: Tensor, dtype: torch.dtype = torch.float32) -> RotationFrame:
        """Frames whose accumulated turns are known, without a gradient to any angle.

        Shapes: turns int64 [..., T, N].
        """
        phase = to_radians(turns, dtype)
        return cls(turns, None, phase.cos(), phase.sin_())

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        return self.turns.shape[-2]

    @property
    def trail(self) -> Rows:
        """Turns after each token, rows int64 [..., T, N]; any of them is a base."""
        return Rows(self.turns)

    @property
    def last(self) -> Tensor:
        """Turns after the last token, int64 [..., 1, N]: the base of the next chunk.

        Raises: ValueError for frames of no tokens.
        """
        if self.length == 0:
            raise ValueError(
                "frames of no tokens have no last one; keep the base they started from"
            )
        return self.turns[..., -1:, :]

    def pull(self, x: Tensor) -> Tensor:
        """F_tᵀ x_t = R(+Φ_t) x_t.

        Shapes: x [..., T, d], in any floating type; returned in it.
        Raises: ValueError where T or d are not those of the frames.
        """
        return self._turned(x, 1)

    def push(self, x: Tensor) -> Tensor:
        """F_t x_t = R(-Φ_t) x_t. Shapes and errors as `pull`."""
        return self._turned(x, -1)

    def between(self, source: int, query: int) -> RotationFrame:
        """The one transport P_{j→i} as frames of length 1: `push` applies P, `pull` its transpose.

        Its angle carries no gradient. Shapes: source j and query i index the T tokens (0-based).
        """
        turns = self.turns[..., query, :] - self.turns[..., source, :]
        return RotationFrame.from_turns(turns.unsqueeze(-2), self.cos.dtype)

    def grouped(self) -> RotationFrame:
        """The same frames with an axis of size 1 before the tokens', for grouped query heads."""
        phase = None if self.phase is None else self.phase.unsqueeze(-3)
        turns, cos, sin = (part.unsqueeze(-3) for part in (self.turns, self.cos, self.sin))
        return RotationFrame(turns, phase, cos, sin)

    def _turned(self, x: Tensor, sign: int) -> Tensor:
        expected = (self.length, 2 * self.turns.shape[-1])
        if tuple(x.shape[-2:]) != expected:
            raise ValueError(
                f"x has shape {list(x.shape)}; these frames carry [..., {expected[0]} tokens, "
                f"{expected[1]} dimensions]"
            )
        return _Rotate.apply(x, self.phase, self.cos, self.sin, sign)


def _cos_sin(phase: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return phase.cos(), phase.sin()


class _Accumulate(torch.autograd.Function):
    """Angles → (turns, Φ). The integer sums carry no gradient; the angles they stand for do."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor, base: Tensor | None, constant: Tensor | None):
        steps = to_turns(angle)
        turns = accumulate(steps if constant is None else steps + constant, base)
        dtype = torch.promote_types(angle.dtype, torch.float32)
        # Σ 0 · angle is 0, or NaN where an angle is not finite: integers alone would swallow it.
        poison = (angle * 0.0).sum((-2, -1), keepdim=True, dtype=dtype)
        ctx.mark_non_differentiable(turns)
        ctx.angle_dtype = angle.dtype
        return turns, torch.add(poison, turns.to(dtype), alpha=RADIANS_PER_UNIT)

    @staticmethod
    def backward(ctx: Any, _, grad: Tensor):
        # Φ_t contains every φ_l with l ≤ t: the gradient of φ_l is the sum from l to the end.
        sums = grad.cumsum(-2, dtype=torch.float64)
        reverse = sums[..., -1:, :] - sums + grad
        return reverse.to(ctx.angle_dtype), None, None


class _Rotate(torch.autograd.Function):
    """y = R(±Φ) x in every plane (b, b + N).

    Backward: ∂x = R(∓Φ) ∂y, and ∂Φ_b = ±(∂x_{b+N} x_b - ∂x_b x_{b+N}), since a rotation commutes
    with the quarter turn that differentiates it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, phase: Tensor | None, cos: Tensor, sin: Tensor, sign: int
    ) -> Tensor:
        ctx.sign, ctx.shape = sign, cos.shape
        kept = x if phase is not None and phase.requires_grad else None
        ctx.save_for_backward(kept, cos, sin)
        return _rotate(x, cos, sin, sign)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        x, cos, sin = ctx.saved_tensors
        grad_x = _rotate(grad, cos, sin, -ctx.sign)
        if x is None:
            return grad_x, None, None, None, None
        wide = torch.promote_types(x.dtype, cos.dtype)
        first, second = x.to(wide).chunk(2, -1)
        grad_first, grad_second = grad_x.to(wide).chunk(2, -1)
        grad_phase = (grad_second * first).addcmul_(grad_first, second, value=-1.0)
        grad_phase = grad_phase.sum_to_size(ctx.shape) * ctx.sign
        return grad_x, grad_phase, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """R(±Φ) x, computed in the wider of the two types and returned in that of x."""
    wide = torch.promote_types(x.dtype, cos.dtype)
    first, second = x.to(wide).chunk(2, -1)
    if torch.compiler.is_compiling():  # what fuses there; the halves of a buffer don't
        turned = (first * cos - second * (sin * sign), second * cos + first * (sin * sign))
        return torch.cat(turned, -1).to(x.dtype)
    shape = (*_common(x.shape[:-1], cos.shape[:-1]), x.shape[-1])
    out = torch.empty(shape, dtype=wide, device=x.device)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out.to(x.dtype)


def _common(shape: Sequence[int], other: Sequence[int]) -> list[int]:
    """The shape that both broadcast to; `torch.broadcast_shapes` would cost more than a token's
    whole rotation."""
    pairs = zip_longest(reversed(shape), reversed(other), fillvalue=1)
    return [n if m == 1 else m for m, n in pairs][::-1]
