"""Householder frames: every token reflects its head in the hyperplane across a vector of its own.

Convention. A token with the vector w ≠ 0 has the step M = I - 2 w wᵀ/|w|², which is symmetric and
its own inverse; a token with w = 0 (padding) has M = I. With F_t = M_t ⋯ M_1 F_0,

    pull:       F_tᵀ x = F_0ᵀ M_1 ⋯ M_t x
    push:       F_t x  = M_t ⋯ M_1 F_0 x

Tokens are taken in chunks. Where F is the frame before a chunk of rows W, and

    L = tril(W Wᵀ, -1) + ½ diag(W Wᵀ),   V = L⁻¹ W F,

row s of V is v_s = 2 F_{s-1}ᵀ w_s/|w_s|², the vector twice over, in the root frame, and

    F_tᵀ x = Fᵀ x - Σ_{s ≤ t} v_s (w_s · x),   F_t y = F y - Σ_{s ≤ t} w_s (v_s · y),

sums over the chunk alone. So W, V and one d×d matrix for each chunk are all there is to keep, the
work is linear in the tokens, and all chunks are worked on at once. (Per chunk this is the compact
WY form of a product of reflections: H_1 ⋯ H_C = I - Wᵀ (L⁻¹)ᵀ W.)

Gradient. A small change of w_s turns all later frames, and in the root frame such turns simply add
up. With y_t pulled and g_t its gradient there, K_s = Σ_{t ≥ s} (g_t y_tᵀ - y_t g_tᵀ) is skew, and

    ∂loss/∂w_s = F_{s-1} K_s v_s,

a sum from the end, like that of an angle; nothing is kept for it but W, V and the pulled vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farfield.algebra.pairing import Pairing
from farfield.algebra.trail import Steps

_CHUNK = 64
"""Tokens in a chunk: the fastest of 32, 64 and 128 at d = 64 on a CPU, forward and backward."""

_GROUP = 16
"""Chunks in a group at most: their frames are products from the group's start, which is as
orthogonal as float64 can be."""

_BLOCK_ELEMENTS = 2**20
"""Elements of x worked on at once: bounds the memory that is used beside the result."""

_SHORTEST = 1e-6
"""A vector of this length or less has no direction: its step is the identity."""


@dataclass(frozen=True)
class ReflectionFrame:
    """Householder frames of T tokens.

    `turned` holds v_s and is what carries the gradient to the vectors; the others are constants
    beside it. `base` and `end` are the frames before and after the tokens, in float64.

    Shapes: vectors and turned [..., chunks, C, d], in which the tokens past T are zero; starts
    [..., chunks, d, d], the frame before each chunk; base and end [..., d, d]. Types: float32, or
    float64 for float64 vectors. Leading axes broadcast against those of what is pulled. Laws: see
    `Frame`. In float32 and after any number of tokens (tested at 1,048,576), transports along
    routes of up to 4,096 tokens are within 1e-5 of float64's, for unit vectors.
    """

    length: int
    vectors: Tensor
    turned: Tensor
    starts: Tensor
    base: Tensor
    end: Tensor

    @classmethod
    def from_vectors(cls, vector: Tensor, base: Tensor | None = None) -> ReflectionFrame:
        """Frames of the steps I - 2 w_t w_tᵀ/|w_t|² after the frame `base`.

        Differentiable in `vector`, whatever its length, and not in `base`. A vector of length 1e-6
        or less has no direction; its step is the identity and its gradient zero.

        Shapes: vector [..., T, d] float; base [..., d, d] orthogonal, or None for the root frame.
        Raises: TypeError for vectors of integers; ValueError for a base of another dimension. A
        vector that is not finite makes the frames of its sequence not-a-number, from the start of
        its chunk on, so that it is noticed.
        """
        if not vector.is_floating_point():
            raise TypeError(f"vectors are {vector.dtype}; expected a floating type")
        dim = vector.shape[-1]
        if base is None:
            base = torch.eye(dim, dtype=torch.float64, device=vector.device)
        if tuple(base.shape[-2:]) != (dim, dim):
            raise ValueError(
                f"base has shape {list(base.shape)}; vectors of dimension {dim} start from "
                f"[..., {dim}, {dim}]"
            )
        lead = torch.broadcast_shapes(vector.shape[:-2], base.shape[:-2])
        vector = vector.expand(*lead, *vector.shape[-2:])
        base = base.detach().to(torch.float64).expand(*lead, dim, dim)
        vectors, turned, starts, end = _Accumulate.apply(vector, base)
        return cls(vector.shape[-2], vectors, turned, starts, base, end)

    @property
    def trail(self) -> Steps:
        """The frame before the tokens, and their vectors [..., T, d] of length 1 (or 0)."""
        vectors = self.vectors.flatten(-3, -2)[..., : self.length, :]
        return Steps(self.base, vectors, folded)

    @property
    def last(self) -> Tensor:
        """The frame after the last token, [..., d, d] float64: the base of the next chunk."""
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

    def between(self, source: int, query: int) -> ReflectionFrame:
        """The one transport P_{j→i} = M_i ⋯ M_{j+1} as frames of length 1, by the steps themselves.

        It carries no gradient. Shapes: source j and query i index the T tokens (0-based).
        Raises: ValueError unless j ≤ i.
        """
        if source > query:
            raise ValueError(f"a route goes forward; got source {source} after query {query}")
        route = self.trail.steps[..., source + 1 : query + 1, :]
        one = torch.eye(route.shape[-1], dtype=torch.float64, device=route.device)
        still = route.new_zeros(*route.shape[:-2], 1, route.shape[-1])
        return ReflectionFrame.from_vectors(still, folded(one, route))

    def grouped(self) -> ReflectionFrame:
        """The same frames with an axis of size 1 before the tokens', for grouped query heads."""
        return ReflectionFrame(
            self.length,
            self.vectors.unsqueeze(-4),
            self.turned.unsqueeze(-4),
            self.starts.unsqueeze(-4),
            self.base.unsqueeze(-3),
            self.end.unsqueeze(-3),
        )

    def _moved(self, x: Tensor, outward: bool) -> Tensor:
        expected = (self.length, self.vectors.shape[-1])
        if tuple(x.shape[-2:]) != expected:
            raise ValueError(
                f"x has shape {list(x.shape)}; these frames carry [..., {expected[0]} tokens, "
                f"{expected[1]} dimensions]"
            )
        return _Move.apply(x, self.turned, self.vectors, self.starts, outward)


@torch.no_grad()
def folded(base: Tensor, vectors: Tensor) -> Tensor:
    """The frame after the steps of `vectors` that follow the frame `base`, in float64.

    Shapes: base [..., d, d]; vectors [..., n, d] -> [..., d, d].
    """
    if vectors.shape[-2] <= _CHUNK:
        base = base.to(torch.float64)
        return base - vectors.to(torch.float64).mT @ (_doubled(vectors) @ base)
    return ReflectionFrame.from_vectors(vectors, base).end


class _Accumulate(torch.autograd.Function):
    """Vectors → (W, V, F before each chunk, F after all). Gradients arrive at V as K_s v_s, turns
    in the root frame; here they are carried to where the vector stands."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, base: Tensor):
        wide = vector.to(torch.promote_types(vector.dtype, torch.float32))
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        vectors = _chunked(torch.where(size <= _SHORTEST, 0.0, wide / size))
        with torch.autocast(vector.device.type, enabled=False):
            turned, starts, end = _accumulated(vectors, base)
        ctx.save_for_backward(vectors, turned, starts, size)
        ctx.dtype = vector.dtype
        ctx.mark_non_differentiable(vectors, starts, end)
        return vectors, turned, starts, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _vectors, grad: Tensor, *_):
        vectors, turned, starts, size = ctx.saved_tensors
        length = size.shape[-2]
        with torch.autocast(grad.device.type, enabled=False):
            grad = grad.flatten(-3, -2)[..., :length, :]
            grad = _moved(grad, turned, vectors, starts, outward=True)
            # K_s v_s is orthogonal to v_s, where the step s itself changes nothing: F_s = F_{s-1}.
            unit = vectors.flatten(-3, -2)[..., :length, :]
            grad = grad - (grad * unit).sum(-1, keepdim=True) * unit
        grad = torch.where(size <= _SHORTEST, 0.0, grad / size)
        return grad.to(ctx.dtype), None


class _Move(torch.autograd.Function):
    """y = F_tᵀ x (inward) or F_t x (outward), and K_s v_s as the gradient of v_s."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, turned: Tensor, vectors: Tensor, starts: Tensor, outward: bool
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = _moved(x, turned, vectors, starts, outward)
        ctx.outward, ctx.shape = outward, x.shape
        inner = (x if outward else y) if turned.requires_grad else None
        ctx.save_for_backward(inner, turned, vectors, starts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        inner, turned, vectors, starts = ctx.saved_tensors
        grad_turned = None
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = _moved(grad, turned, vectors, starts, not ctx.outward)
            if inner is not None:
                inner = inner.expand(grad.shape)
                a, b = (grad_x, inner) if ctx.outward else (inner, grad)
                grad_turned = _turns(a, b, turned)
        return grad_x.sum_to_size(ctx.shape), grad_turned, None, None, None


# Everything below works on constants: no gradient passes through it.


def _chunked(x: Tensor) -> Tensor:
    """[..., T, d] -> [..., chunks, C, d], filled up with zeros; a short sequence is one chunk."""
    length, dim = x.shape[-2:]
    size = max(1, min(_CHUNK, length))
    missing = -length % size
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:-2], (length + missing) // size, size, dim)


def _doubled(rows: Tensor) -> Tensor:
    """V = L⁻¹ W of each chunk by itself, in float64: L may be far from the identity, and what is
    off in V is off in every frame after it. Shapes: [..., C, d] -> [..., C, d].
    """
    rows = rows.to(torch.float64)
    # |w|² as it is, not as it should be: taken for 1, it would make steps that aren't orthogonal.
    if rows.shape[-2] == 1:
        return 2.0 * rows / rows.square().sum(-1, keepdim=True).clamp_min(_SHORTEST)
    products = rows @ rows.mT
    products.diagonal(dim1=-2, dim2=-1).mul_(0.5).clamp_(min=_SHORTEST)
    return torch.linalg.solve_triangular(products, rows, upper=False)


def _accumulated(vectors: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V of every token and the frames before each chunk and after them all.

    Shapes: vectors [..., n, C, d], base [..., d, d] -> turned [..., n, C, d], starts
    [..., n, d, d], end [..., d, d] float64.
    """
    *lead, chunks, size, dim = vectors.shape
    if chunks == 1:  # a cached step above all: no products, and the end as exact as any
        rows = vectors.squeeze(-3).to(torch.float64)
        local = _doubled(rows) @ base
        turned, starts = (x.to(vectors.dtype).unsqueeze(-3) for x in (local, base))
        return turned, starts, base - rows.mT @ local
    vectors = vectors.reshape(math.prod(lead), chunks, size, dim)
    frame = base.reshape(math.prod(lead), dim, dim)
    turned = torch.empty_like(vectors)
    starts = vectors.new_empty(vectors.shape[0], chunks, dim, dim)
    for part in _blocks(vectors.shape[0], chunks, size * dim, _GROUP):
        local = _doubled(vectors[:, part])
        product = _one_less(vectors[:, part].mT.to(torch.float64) @ local)
        starts[:, part], frame = _scanned(product.to(vectors.dtype), frame)
        turned[:, part] = local.to(vectors.dtype) @ starts[:, part]
    return (
        turned.view(*lead, chunks, size, dim),
        starts.view(*lead, chunks, dim, dim),
        frame.view_as(base),
    )


def _scanned(products: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """The frame before each chunk and after the last, from the product of each chunk's steps.

    Frames within a group of chunks are products from its start, all groups at once; the group's
    start is a product of groups, in float64 and made orthogonal each time, so that orthogonality
    doesn't wear off with length.

    Shapes: products [N, n, d, d], frame [N, d, d] float64 -> [N, n, d, d], [N, d, d] float64.
    """
    rows, chunks, dim = products.shape[:3]
    size = min(_GROUP, math.ceil(math.sqrt(chunks)))
    missing = -chunks % size
    one = torch.eye(dim, dtype=products.dtype, device=products.device)
    if missing:
        products = torch.cat((products, one.expand(rows, missing, dim, dim)), 1)
    grouped = products.unflatten(1, (-1, size))
    inside = torch.empty_like(grouped)
    inside[:, :, 0] = one
    for k in range(1, size):
        torch.matmul(grouped[:, :, k - 1], inside[:, :, k - 1], out=inside[:, :, k])
    whole = (grouped[:, :, -1] @ inside[:, :, -1]).to(torch.float64)
    begins = []
    for product in whole.unbind(1):
        begins.append(frame)
        frame = _orthogonal(product @ frame)
    begin = torch.stack(begins, 1).to(products.dtype)
    return (inside @ begin.unsqueeze(2)).flatten(1, 2)[:, :chunks], frame


def _one_less(product: Tensor) -> Tensor:
    """I - product, in place."""
    product.neg_().diagonal(dim1=-2, dim2=-1).add_(1.0)
    return product


def _orthogonal(frame: Tensor) -> Tensor:
    """The orthogonal matrix next to one that nearly is: F (3 I - Fᵀ F)/2, which squares the error.

    Source: one step of Newton and Schulz for the polar factor.
    """
    return 1.5 * frame - 0.5 * frame @ (frame.mT @ frame)


def _moved(x: Tensor, turned: Tensor, vectors: Tensor, starts: Tensor, outward: bool) -> Tensor:
    """F_tᵀ x or F_t x, all chunks of a block at once.

    Shapes: x [..., T, d]; turned and vectors [..., n, C, d]; starts [..., n, d, d].
    """
    chunks, size, dim = vectors.shape[-3:]
    score, add = (turned, vectors) if outward else (vectors, turned)
    if chunks == 1:  # a cached step above all, where every call counts
        one, score, add = starts.squeeze(-3), score.squeeze(-3), add.squeeze(-3)
        wide = x.to(vectors.dtype)
        scores = wide @ score.mT
        moved = wide @ (one.mT if outward else one)
        return (moved - (scores.tril_() if size > 1 else scores) @ add).to(x.dtype)
    pairing = Pairing(x.shape[:-2], starts.shape[:-3])
    x_rows = pairing.split(x)
    score, add = (part.reshape(pairing.own, chunks, size, dim) for part in (score, add))
    starts = starts.reshape(pairing.own, chunks, dim, dim)
    starts = starts.mT if outward else starts
    out = torch.empty(x_rows.shape, dtype=x.dtype, device=x.device)
    rows, shared = x_rows.shape[:2]
    for part in _blocks(rows, chunks, shared * size * dim):
        block = _gathered(x_rows, part, size, vectors.dtype)
        scores = block @ score[:, part].flatten(0, 1).mT
        scores.unflatten(1, (shared, size)).tril_()
        moved = torch.bmm(block, starts[:, part].reshape(-1, dim, dim))
        moved.baddbmm_(scores, add[:, part].flatten(0, 1), alpha=-1.0)
        _scattered(moved, out, part, size)
    return pairing.join(out)


def _turns(a: Tensor, b: Tensor, turned: Tensor) -> Tensor:
    """K_s v_s with K_s = Σ_{t ≥ s} (b_t a_tᵀ - a_t b_tᵀ), summed from the end in float64.

    Shapes: a and b [..., T, d]; turned [..., n, C, d], as the result.
    """
    pairing = Pairing(a.shape[:-2], turned.shape[:-3])
    a_rows, b_rows = pairing.split(a), pairing.split(b)
    *_, chunks, size, dim = turned.shape
    v = turned.reshape(pairing.own, chunks, size, dim)
    rows, shared = a_rows.shape[:2]
    later = torch.zeros(rows, 1, dim * dim, dtype=torch.float64, device=a.device)
    out = torch.empty_like(v)
    for part in reversed(list(_blocks(rows, chunks, shared * size * dim))):
        a_block, b_block = (_gathered(x, part, size, v.dtype) for x in (a_rows, b_rows))
        v_block = v[:, part].flatten(0, 1)
        sums = torch.bmm(a_block.mT, b_block).reshape(rows, -1, dim * dim)
        # A product with ones above the diagonal is a sum from the end, and faster than `cumsum`.
        above = sums.new_ones(sums.shape[1], sums.shape[1]).triu_(1)
        after = torch.baddbmm(later.to(v.dtype).expand_as(sums), above.expand(rows, -1, -1), sums)
        later = later + sums.sum(1, keepdim=True, dtype=torch.float64)
        after = after.reshape(-1, dim, dim)
        found = torch.bmm(v_block, after - after.mT)
        for left, right, sign in ((a_block, b_block, 1.0), (b_block, a_block, -1.0)):
            scores = torch.bmm(v_block, left.mT)
            scores.unflatten(2, (shared, size)).transpose(1, 2).triu_()
            found.baddbmm_(scores, right, alpha=sign)
        out[:, part] = found.unflatten(0, (rows, -1))
    return out.view_as(turned)


def _blocks(rows: int, chunks: int, elements: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of the chunks, so many at once that a block has about `_BLOCK_ELEMENTS`."""
    fitting = max(1, _BLOCK_ELEMENTS // max(1, rows * elements))
    fitting = math.ceil(fitting / multiple) * multiple
    for start in range(0, chunks, fitting):
        yield slice(start, min(start + fitting, chunks))


def _gathered(x: Tensor, part: slice, size: int, dtype: torch.dtype) -> Tensor:
    """The rows of some chunks: [N, R, T, d] -> [N · chunks, R · C, d], zeros past T."""
    block = x[:, :, part.start * size : part.stop * size].to(dtype)
    missing = (part.stop - part.start) * size - block.shape[2]
    if missing:
        block = torch.nn.functional.pad(block, (0, 0, 0, missing))
    block = block.unflatten(2, (-1, size)).transpose(1, 2)
    return block.reshape(-1, block.shape[2] * size, block.shape[-1])


def _scattered(block: Tensor, out: Tensor, part: slice, size: int) -> None:
    """The inverse of `_gathered`, into out [N, R, T, d]."""
    rows, shared, length, dim = out.shape
    stop = min(part.stop * size, length)
    block = block.reshape(rows, -1, shared, size, dim).transpose(1, 2).flatten(2, 3)
    out[:, :, part.start * size : stop] = block[:, :, : stop - part.start * size]
