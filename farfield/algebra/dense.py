"""Frames of orthogonal blocks: every head is d/b blocks, and a token turns each by a b×b matrix.

Convention. Block n is the space of coordinates n, n + N, …, n + (b-1) N, with N = d/b. A token has
for each block a skew matrix S, whose entries (i, j), i < j, are a linear map of its coefficients,
and the step M = exp(S). With b = 2 this is the rotation R(-φ) by the angle φ of its one entry, in
sign and in pairing (see `rotation`).

Why the exponential, and not Cayley's map (I - S)⁻¹ (I + S): its eigenvalues turn by the angles that
S names, so that scales of angles mean what they mean for rotations, and a multiple of S is a power
of M; it reaches every rotation at a finite S, half turns (eigenvalue -1) among them, where Cayley's
map needs an infinite one and its gradient dies on the way. It is made of matrix products alone,
which batch well on every device; Cayley's solve is cheaper only for b up to 4 or so. Neither
reaches a determinant of -1: a product of steps is connected to the identity.

Frames take b numbers for each dimension of a token. They are made block by block of tokens, used,
and made again when needed next; where all of them are few they are kept. The gradient is a sum
from the end, like that of an angle: with y_t pulled and g_t its gradient in the root frame,

    J_s = ½ Σ_{t ≥ s} (y_t g_tᵀ - g_t y_tᵀ),   ∂loss/∂M_s = F_s J_s F_sᵀ M_s,

so all that passes from pulled vectors to steps is a skew matrix for each token and block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farfield.algebra.pairing import Pairing
from farfield.algebra.trail import Steps

_CHUNK = 64
"""Tokens in a chunk: their frames are products from its start, which is orthogonal as float64."""

_BLOCK_ELEMENTS = 2**21
"""Elements of frames made at once."""

_KEPT_ELEMENTS = 2**24
"""Frames are kept where all of them have at most this many elements."""


@dataclass(frozen=True)
class DenseFrame:
    """Orthogonal frames of T tokens, block-diagonal with b×b blocks.

    `turn` is zero, and what carries the gradient to coefficients and generators; the others are
    constants beside it. `begins` are the frames before each block of chunks, `kept` the frames
    themselves, where they are few. `base` and `end` are the frames before and after the tokens.

    Shapes: coefficient [..., T, r]; generators [..., N, b(b-1)/2, r]; turn [..., T, N·b(b-1)/2];
    base and end [..., d, b] float64, block above block. Laws: see `Frame`. In float32 and after any
    number of tokens (tested at 1,048,576), transports along routes of up to 4,096 tokens are within
    1e-5 of float64's.
    """

    coefficient: Tensor
    generators: Tensor
    turn: Tensor
    base: Tensor
    end: Tensor
    begins: tuple[Tensor, ...]
    kept: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def from_coefficients(
        cls, coefficient: Tensor, generators: Tensor, base: Tensor | None = None
    ) -> DenseFrame:
        """Frames of the steps exp(S_t), (S_t)_{ij} = Σ_r generators_{ij,r} coefficient_{t,r}.

        The map from coefficients is part of the frame, so that skew matrices are made block by
        block as well. Differentiable in both, and not in `base`.

        Shapes: coefficient [..., T, r]; generators [..., N, b(b-1)/2, r], pairs (i, j), i < j, row
        by row; base [..., d, b] or None for the root frame. Leading axes broadcast.
        Units: radians. Raises: TypeError for integers; ValueError for shapes that don't fit. A
        coefficient that is not finite makes the frames of the whole call not-a-number from its
        chunk on.
        """
        for name, x in (("coefficient", coefficient), ("generators", generators)):
            if not x.is_floating_point():
                raise TypeError(f"{name} is {x.dtype}; expected a floating type, for radians")
        blocks, pairs, rank = generators.shape[-3:]
        size = _size(pairs)
        if coefficient.shape[-1] != rank:
            raise ValueError(
                f"coefficient has {coefficient.shape[-1]} entries for a token; "
                f"the generators take {rank}"
            )
        if base is None:
            one = torch.eye(size, dtype=torch.float64, device=coefficient.device)
            base = one.repeat(blocks, 1)
        if tuple(base.shape[-2:]) != (blocks * size, size):
            raise ValueError(
                f"base has shape {list(base.shape)}; expected [..., {blocks * size}, {size}]"
            )
        lead = torch.broadcast_shapes(
            coefficient.shape[:-2], generators.shape[:-3], base.shape[:-2]
        )
        base = base.detach().to(torch.float64).expand(*lead, -1, -1)
        wide = torch.promote_types(coefficient.dtype, generators.dtype)
        wide = torch.promote_types(wide, torch.float32)
        coefficient, generators = coefficient.to(wide), generators.to(wide)
        plain = cls(coefficient.detach(), generators.detach(), base, base, base, (), ())
        frame = plain._built()
        return replace(frame, turn=_Turn.apply(coefficient, generators, frame))

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        return self.coefficient.shape[-2]

    @property
    def size(self) -> int:
        """b, the size of a block."""
        return self.base.shape[-1]

    @property
    def trail(self) -> Steps:
        """The frame before the tokens, and their coefficients."""
        return Steps(self.base, self.coefficient, partial(folded, self.generators))

    @property
    def last(self) -> Tensor:
        """The frame after the last token, [..., d, b] float64: the base of the next chunk."""
        return self.end

    def pull(self, x: Tensor) -> Tensor:
        """F_tᵀ x_t for every token.

        Shapes: x [..., T, d], in any floating type; returned in it, computed in float32 or wider.
        Raises: ValueError where T or d are not those of the frames.
        """
        return self._moved(x, False)

    def push(self, x: Tensor) -> Tensor:
        """F_t x_t for every token. Shapes and errors as `pull`."""
        return self._moved(x, True)

    def between(self, source: int, query: int) -> DenseFrame:
        """The one transport P_{j→i} = M_i ⋯ M_{j+1} as frames of length 1, by the steps themselves.

        It carries no gradient. Shapes: source j and query i index the T tokens (0-based).
        Raises: ValueError unless j ≤ i.
        """
        if source > query:
            raise ValueError(f"a route goes forward; got source {source} after query {query}")
        route = self.coefficient[..., source + 1 : query + 1, :]
        end = DenseFrame.from_coefficients(route, self.generators).end
        still = torch.zeros_like(self.coefficient[..., :1, :])
        return DenseFrame.from_coefficients(still, self.generators, end)

    def grouped(self) -> DenseFrame:
        """The same frames with an axis of size 1 before the tokens', for grouped query heads."""
        return replace(self, turn=self.turn.unsqueeze(-3))

    def _moved(self, x: Tensor, outward: bool) -> Tensor:
        expected = (self.length, self.base.shape[-2])
        if tuple(x.shape[-2:]) != expected:
            raise ValueError(
                f"x has shape {list(x.shape)}; these frames carry [..., {expected[0]} tokens, "
                f"{expected[1]} dimensions]"
            )
        return _Move.apply(x, self.turn, self, outward)

    # The frames of some chunks: P, the product from the start of its chunk to each token, and the
    # frame F before each chunk. Shapes: P [n, chunks, N, C, b, b], F [n, chunks, N, b, b].

    def parts(self) -> Iterator[slice]:
        """Slices of the tokens, each a few chunks (the last chunk may be short)."""
        chunk, rows = self.chunk, math.prod(self.base.shape[:-2])
        elements = max(1, rows * chunk * self.base.shape[-2] * self.size)
        step = chunk * max(1, _BLOCK_ELEMENTS // elements)
        for start in range(0, self.length, step):
            yield slice(start, min(start + step, self.length))

    @property
    def chunk(self) -> int:
        """C, the tokens in a chunk."""
        return max(1, min(_CHUNK, self.length))

    def frames(self, index: int, part: slice) -> tuple[Tensor, Tensor]:
        """P and F of the tokens in `part`, the index-th of the parts: kept or made again."""
        if self.kept:
            return self.kept[index]
        inside, starts, _ = _framed(exponential(self.skew(part)), self.begins[index])
        return inside, starts

    def skew(self, part: slice, inputs: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """S of the tokens in `part`, filled up with zeros: [n, chunks, N, C, b, b].

        `inputs` stand for the coefficients of the part and the generators.
        """
        coefficient, generators = inputs or (self.coefficient[..., part, :], self.generators)
        missing = -(part.stop - part.start) % self.chunk
        if missing:
            coefficient = torch.nn.functional.pad(coefficient, (0, 0, 0, missing))
        angle = coefficient @ generators.flatten(-3, -2).mT
        lead = self.base.shape[:-2]
        angle = angle.expand(*lead, *angle.shape[-2:]).reshape(
            math.prod(lead), -1, self.chunk, *generators.shape[-3:-1]
        )
        return _skew(angle.transpose(2, 3), self.size)

    def _built(self) -> DenseFrame:
        rows, (dim, size) = math.prod(self.base.shape[:-2]), self.base.shape[-2:]
        frame = self.base.reshape(rows, dim // size, size, size)
        begins, kept = [], []
        keep = rows * self.length * dim * size <= _KEPT_ELEMENTS
        with torch.no_grad(), torch.autocast(frame.device.type, enabled=False):
            for part in self.parts():
                begins.append(frame)
                inside, starts, frame = _framed(exponential(self.skew(part)), frame)
                if keep:
                    kept.append((inside, starts))
        end = frame.reshape(self.base.shape)
        return replace(self, end=end, begins=tuple(begins), kept=tuple(kept))


@torch.no_grad()
def folded(generators: Tensor, base: Tensor, coefficient: Tensor) -> Tensor:
    """The frame after the steps of `coefficient` that follow the frame `base`, in float64."""
    return DenseFrame.from_coefficients(coefficient, generators, base).end


def exponential(skew: Tensor) -> Tensor:
    """exp(S) of skew matrices: S/2^k by Taylor's series of degree 8, squared k times.

    What is squared is exp(S) - I, E → 2E + E², so that rounding stays in proportion to S and small
    steps are as exact as they are small. k is such that the series ends below half an ulp of the
    type. Differentiable.

    Shapes: [..., b, b]. Units: radians.
    """
    # The angles of a skew matrix come in pairs: the largest is at most |S| / √2. Matrices that are
    # not finite say nothing of how the others are to be computed.
    norms = torch.linalg.matrix_norm(skew.detach()).nan_to_num(0.0, 0.0, 0.0)
    largest = norms.amax().item() / math.sqrt(2.0) if norms.numel() else 0.0
    reach = 0.5 if skew.dtype == torch.float32 else 0.05
    halvings = math.ceil(math.log2(largest / reach)) if largest > reach else 0
    s1 = skew * 0.5**halvings
    s2 = s1 @ s1
    s3 = s2 @ s1
    one = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    e = s2 * (1 / 40320) + s1 * (1 / 5040) + one * (1 / 720)
    e = s3 @ e + s2 * (1 / 120) + s1 * (1 / 24) + one * (1 / 6)
    e = s3 @ e + s2 * 0.5 + s1
    for _ in range(halvings):
        e = 2.0 * e + e @ e
    return e + one


class _Turn(torch.autograd.Function):
    """(Coefficients, generators) → zero for each token, block and pair. A gradient that arrives
    there is the upper half of y gᵀ - g yᵀ, turns of the frame in the root frame."""

    @staticmethod
    def forward(ctx: Any, coefficient: Tensor, generators: Tensor, frame: DenseFrame) -> Tensor:
        ctx.frame = frame
        pairs = generators.shape[-3] * generators.shape[-2]
        return coefficient.new_zeros(()).expand(*frame.base.shape[:-2], frame.length, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        frame: DenseFrame = ctx.frame
        blocks, pairs = frame.generators.shape[-3:-1]
        rows = math.prod(frame.base.shape[:-2])
        grad_coefficient = torch.zeros_like(frame.coefficient)
        grad_generators = torch.zeros_like(frame.generators, dtype=torch.float64)
        later = torch.zeros_like(frame.base).reshape(rows, blocks, -1)
        for index, part in reversed(list(enumerate(frame.parts()))):
            turns = _in_chunks(grad[..., part, :].reshape(rows, -1, blocks * pairs), frame.chunk)
            turns = _skew(turns.unflatten(-1, (blocks, pairs)).transpose(2, 3), frame.size)
            with torch.autocast(grad.device.type, enabled=False):
                sums, later = _sums_from_the_end(0.5 * turns, later)
                inside, starts = frame.frames(index, part)
                turned = inside @ starts.unsqueeze(3)
                turned = turned @ sums @ turned.mT
                with torch.enable_grad():
                    own = frame.coefficient[..., part, :].detach().requires_grad_()
                    generators = frame.generators.detach().requires_grad_()
                    steps = exponential(frame.skew(part, (own, generators)))
                found = torch.autograd.grad(steps, (own, generators), turned @ steps.detach())
            grad_coefficient[..., part, :] = found[0]
            grad_generators += found[1]
        return grad_coefficient, grad_generators.to(frame.generators.dtype), None


class _Move(torch.autograd.Function):
    """y = F_tᵀ x (inward) or F_t x (outward)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor, frame: DenseFrame, outward: bool) -> Tensor:
        ctx.frame, ctx.outward, ctx.shape, ctx.lead = frame, outward, x.shape, turn.shape[:-2]
        with torch.autocast(x.device.type, enabled=False):
            y = _moved(x, frame, ctx.lead, outward)
        ctx.save_for_backward((x if outward else y) if turn.requires_grad else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        frame, (inner,) = ctx.frame, ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = _moved(grad, frame, ctx.lead, not ctx.outward)
            grad_turn = None
            if inner is not None:
                inner = inner.expand(grad.shape)
                left, right = (grad_x, inner) if ctx.outward else (inner, grad)
                grad_turn = _turns(left, right, frame, ctx.lead)
        return grad_x.sum_to_size(ctx.shape), grad_turn, None, None


def _size(pairs: int) -> int:
    """b of b(b-1)/2 pairs."""
    size = (1 + math.isqrt(1 + 8 * pairs)) // 2
    if size < 2 or size * (size - 1) // 2 != pairs:
        raise ValueError(f"generators have {pairs} pairs; expected b(b-1)/2 for a block size b ≥ 2")
    return size


def _skew(angle: Tensor, size: int) -> Tensor:
    """[..., b(b-1)/2] -> [..., b, b], the entries above the diagonal and their negatives below."""
    above = torch.triu_indices(size, size, 1, device=angle.device)
    skew = angle.new_zeros(*angle.shape[:-1], size, size)
    skew[..., above[0], above[1]] = angle
    return skew - skew.mT


def _framed(steps: Tensor, frame: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Products within chunks, the frame before each chunk, and the frame after all of them.

    Shapes: steps [n, m, N, C, b, b]; frame [n, N, b, b] float64 -> P as steps,
    F [n, m, N, b, b], end as frame.
    """
    found = [steps[..., 0, :, :]]
    for k in range(1, steps.shape[3]):
        found.append(steps[..., k, :, :] @ found[-1])
    inside = torch.stack(found, 3)
    starts = []
    for product in found[-1].to(torch.float64).unbind(1):
        starts.append(frame)
        frame = product @ frame
        # One step of Newton and Schulz to the orthogonal matrix nearby squares what is off.
        frame = 1.5 * frame - 0.5 * frame @ (frame.mT @ frame)
    return inside, torch.stack(starts, 1).to(steps.dtype), frame


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[..., T, ·] -> [..., chunks, C, ·], filled up with zeros."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (-1, chunk))


def _split(x: Tensor, frame: DenseFrame) -> Tensor:
    """[n, R, tokens, d] -> [n, chunks, N, C, R, b], in the type of the frames."""
    x = _in_chunks(x.to(frame.coefficient.dtype), frame.chunk)
    return x.unflatten(-1, (frame.size, -1)).permute(0, 2, 5, 3, 1, 4)


def _moved(x: Tensor, frame: DenseFrame, lead: torch.Size, outward: bool) -> Tensor:
    """F_tᵀ x or F_t x, one part of the tokens after another."""
    pairing = Pairing(x.shape[:-2], lead)
    rows = pairing.split(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    for index, part in enumerate(frame.parts()):
        inside, starts = frame.frames(index, part)
        y = _split(rows[:, :, part], frame)
        if outward:
            y = (y.flatten(3, 4) @ starts.mT).view(y.shape) @ inside.mT
        else:
            y = ((y @ inside).flatten(3, 4) @ starts).view(y.shape)
        y = y.permute(0, 4, 1, 3, 5, 2).flatten(4, 5).flatten(2, 3)
        out[:, :, part] = y[:, :, : part.stop - part.start]
    return pairing.join(out)


def _turns(left: Tensor, right: Tensor, frame: DenseFrame, lead: torch.Size) -> Tensor:
    """The upper half of l rᵀ - r lᵀ for each token and block, summed over vectors of one frame.

    Shapes: left and right [..., T, d] -> [lead, T, N·b(b-1)/2].
    """
    pairing = Pairing(left.shape[:-2], lead)
    lefts, rights = pairing.split(left), pairing.split(right)
    above = torch.triu_indices(frame.size, frame.size, 1, device=left.device)
    found = []
    for part in frame.parts():
        product = _split(lefts[:, :, part], frame).mT @ _split(rights[:, :, part], frame)
        product = (product - product.mT)[..., above[0], above[1]].transpose(2, 3).flatten(3, 4)
        found.append(product.flatten(1, 2)[:, : part.stop - part.start])
    pairs = frame.generators.shape[-3] * above.shape[1]
    if not found:
        return left.new_zeros(*lead, 0, pairs)
    return torch.cat(found, 1).reshape(*lead, frame.length, pairs)


def _sums_from_the_end(turns: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_{t ≥ s} turns_t + later, and that of the first token, which is in float64.

    Sums within a chunk and over chunks are products with ones above the diagonal: faster than a
    cumulative sum, and exact enough for so few.

    Shapes: turns [n, m, N, C, b, b]; later [n, N, b·b] float64.
    """
    chunks, chunk = turns.shape[1], turns.shape[3]
    flat = turns.flatten(4, 5)
    within = flat.new_ones(chunk, chunk).triu() @ flat
    totals = within[..., 0, :].transpose(1, 2)
    after = flat.new_ones(chunks, chunks).triu(1) @ totals + later.unsqueeze(2).to(flat.dtype)
    later = later + totals.sum(2, dtype=torch.float64)
    return (within + after.transpose(1, 2).unsqueeze(3)).view_as(turns), later
