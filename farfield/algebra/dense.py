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
from farfield.algebra.skew import averaged, block_size, exponential, skew_matrix
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
        size = block_size(pairs)
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
        if torch.compiler.is_compiling():  # one operator makes the frames where they are used
            return cls(coefficient, generators, base[..., :1], base, base, (), ())
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
        end = None if torch.compiler.is_compiling() else self.end
        return Steps(self.base, self.coefficient, partial(folded, self.generators), end)

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
        if torch.compiler.is_compiling():
            grouped = self.turn.dim() > self.base.dim()
            return moved_by(x, self.coefficient, self.generators, self.base, outward, grouped)
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
        return skew_matrix(angle.transpose(2, 3), self.size)

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
        return *_turned_back(grad, ctx.frame), None


class _Move(torch.autograd.Function):
    """y = F_tᵀ x (inward) or F_t x (outward)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor, frame: DenseFrame, outward: bool) -> Tensor:
        ctx.frame, ctx.outward, ctx.shape, ctx.lead = frame, outward, x.shape, turn.shape[:-2]
        y = _moved(x, frame, ctx.lead, outward)
        ctx.save_for_backward((x if outward else y) if turn.requires_grad else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        frame, (inner,) = ctx.frame, ctx.saved_tensors
        grad_x = _moved(grad, frame, ctx.lead, not ctx.outward)
        grad_turn = None
        if inner is not None:
            inner = inner.expand(grad.shape)
            left, right = (grad_x, inner) if ctx.outward else (inner, grad)
            grad_turn = _turns(left, right, frame, ctx.lead)
        return grad_x.sum_to_size(ctx.shape), grad_turn, None, None


def _turned_back(grad: Tensor, frame: DenseFrame) -> tuple[Tensor, Tensor]:
    """The gradients of coefficients and generators, from that of the turns [..., T, pairs]."""
    blocks, pairs = frame.generators.shape[-3:-1]
    rows = math.prod(frame.base.shape[:-2])
    above = torch.triu_indices(frame.size, frame.size, 1, device=grad.device)
    grad_coefficient = torch.zeros_like(frame.coefficient)
    grad_generators = torch.zeros_like(frame.generators, dtype=torch.float64).flatten(-3, -2)
    later = torch.zeros_like(frame.base).reshape(rows, blocks, -1)
    flat = frame.generators.flatten(-3, -2)
    for index, part in reversed(list(enumerate(frame.parts()))):
        turns = _in_chunks(grad[..., part, :].reshape(rows, -1, blocks * pairs), frame.chunk)
        turns = skew_matrix(turns.unflatten(-1, (blocks, pairs)).transpose(2, 3), frame.size)
        with torch.autocast(grad.device.type, enabled=False):
            sums, later = _sums_from_the_end(0.5 * turns, later)
            inside, starts = frame.frames(index, part)
            frames = inside @ starts.unsqueeze(3)
            turned = averaged(frame.skew(part), frames @ sums @ frames.mT)
            # (i, j) and (j, i) both stand for the pair.
            angle = 2.0 * turned[..., above[0], above[1]].transpose(2, 3).flatten(3, 4)
            angle = angle.flatten(1, 2)[:, : part.stop - part.start]
            angle = angle.reshape(*frame.base.shape[:-2], *angle.shape[1:])
            own = frame.coefficient[..., part, :]
            grad_coefficient[..., part, :] = (angle @ flat).sum_to_size(own.shape)
            grad_generators += (angle.mT @ own).sum_to_size(flat.shape)
    grad_generators = grad_generators.view(frame.generators.shape)
    return grad_coefficient, grad_generators.to(frame.generators.dtype)


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
        with torch.autocast(x.device.type, enabled=False):
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
        with torch.autocast(left.device.type, enabled=False):
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


# To torch.compile a move is one operator, which would otherwise unroll its loops over chunks anew
# for every length. It makes the frames each time it is called.


@torch.library.custom_op("farfield::dense_move", mutates_args=())
def moved_by(
    x: Tensor, coefficient: Tensor, generators: Tensor, base: Tensor, outward: bool, grouped: bool
) -> Tensor:
    """F_tᵀ x_t (or F_t x_t, outward) by the frames of these coefficients; see `DenseFrame`."""
    frame = DenseFrame.from_coefficients(coefficient, generators, base)
    return _own(_moved(x, frame, _lead(frame, grouped), outward))


@moved_by.register_fake
def _(x, coefficient, generators, base, outward, grouped):
    return x.new_empty(x.shape)


@torch.library.custom_op("farfield::dense_move_backward", mutates_args=())
def _moved_back(
    grad: Tensor, inner: Tensor, steps: list[Tensor], outward: bool, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    frame = DenseFrame.from_coefficients(*steps)
    lead = _lead(frame, grouped)
    grad_x = _moved(grad, frame, lead, not outward)
    left, right = (grad_x, inner) if outward else (inner, grad)
    turns = _turns(left, right, frame, lead).reshape(*frame.turn.shape)
    return tuple(map(_own, (grad_x, *_turned_back(turns, frame))))  # type: ignore[return-value]


@_moved_back.register_fake
def _(grad, inner, steps, outward, grouped):
    return tuple(like.new_empty(like.shape) for like in (grad, *steps[:2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, coefficient, generators, base, ctx.outward, ctx.grouped = inputs
    ctx.save_for_backward(x if ctx.outward else output, coefficient, generators, base)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inner, *steps = ctx.saved_tensors
    found = _moved_back(grad, inner, steps, ctx.outward, ctx.grouped)
    return *found, None, None, None


moved_by.register_autograd(_differentiate, setup_context=_save)


def _own(x: Tensor) -> Tensor:
    """A tensor of an operator's own, laid out as its shape says."""
    return x.clone(memory_format=torch.contiguous_format)


def _lead(frame: DenseFrame, grouped: bool) -> torch.Size:
    lead = frame.turn.shape[:-2]
    return torch.Size((*lead, 1)) if grouped else lead
