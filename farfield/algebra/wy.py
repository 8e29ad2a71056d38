"""Products of reflections by chunks, in the compact WY form: the arithmetic of `reflection`.

No gradient passes through anything here. `accumulated`, `moved` and `turns` are one operator each
to `torch.compile`, which would otherwise unroll their loops over chunks, anew for every length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from farfield.algebra.pairing import Pairing

CHUNK = 64
"""Tokens in a chunk: the fastest of 32, 64 and 128 at d = 64 on a CPU, forward and backward."""

_GROUP = 16
"""Chunks in a group at most: their frames are products from the group's start, which is as
orthogonal as float64 can be."""

_BLOCK_ELEMENTS = 2**18
"""Elements of x worked on at once: bounds the memory that is used beside the result."""

SHORTEST = 1e-6
"""A vector of this length or less has no direction: its step is the identity."""


def chunked(x: Tensor) -> Tensor:
    """[..., T, d] -> [..., chunks, C, d], filled up with zeros; a short sequence is one chunk."""
    length, dim = x.shape[-2:]
    size = max(1, min(CHUNK, length))
    missing = -length % size
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:-2], (length + missing) // size, size, dim)


def doubled(rows: Tensor) -> Tensor:
    """V = L⁻¹ W of each chunk by itself, in float64: L may be far from the identity, and what is
    off in V is off in every frame after it. Shapes: [..., C, d] -> [..., C, d].
    """
    rows = rows.to(torch.float64)
    # |w|² as it is, not as it should be: taken for 1, it would make steps that aren't orthogonal.
    if rows.shape[-2] == 1:
        return 2.0 * rows / rows.square().sum(-1, keepdim=True).clamp_min(SHORTEST)
    products = rows @ rows.mT
    products.diagonal(dim1=-2, dim2=-1).mul_(0.5).clamp_(min=SHORTEST)
    return torch.linalg.solve_triangular(products, rows, upper=False)


def accumulated(vectors: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V of every token and the frames before each chunk and after them all.

    Shapes: vectors [..., n, C, d], base [..., d, d] -> turned [..., n, C, d], starts
    [..., n, d, d], end [..., d, d] float64.
    """
    return (_accumulated_op if torch.compiler.is_compiling() else _accumulated)(vectors, base)


def moved(x: Tensor, turned: Tensor, vectors: Tensor, starts: Tensor, outward: bool) -> Tensor:
    """F_tᵀ x or F_t x, all chunks of a block at once.

    Shapes: x [..., T, d]; turned and vectors [..., n, C, d]; starts [..., n, d, d].
    """
    operator = _moved_op if torch.compiler.is_compiling() else _moved
    return operator(x, turned, vectors, starts, outward)


def turns(a: Tensor, b: Tensor, turned: Tensor) -> Tensor:
    """K_s v_s with K_s = Σ_{t ≥ s} (b_t a_tᵀ - a_t b_tᵀ), summed from the end in float64.

    Shapes: a and b [..., T, d]; turned [..., n, C, d], as the result.
    """
    return (_turns_op if torch.compiler.is_compiling() else _turns)(a, b, turned)


def _accumulated(vectors: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *lead, chunks, size, dim = vectors.shape
    if chunks == 1:  # a cached step above all: no products, and the end as exact as any
        rows = vectors.squeeze(-3).to(torch.float64)
        local = doubled(rows) @ base
        turned, starts = (x.to(vectors.dtype).unsqueeze(-3) for x in (local, base))
        return turned, starts, base - rows.mT @ local
    vectors = vectors.reshape(math.prod(lead), chunks, size, dim)
    frame = base.reshape(math.prod(lead), dim, dim)
    turned = torch.empty_like(vectors)
    starts = vectors.new_empty(vectors.shape[0], chunks, dim, dim)
    for part in _blocks(vectors.shape[0], chunks, size * dim, _GROUP):
        local = doubled(vectors[:, part])
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


@torch.library.custom_op("farfield::reflection_accumulated", mutates_args=())
def _accumulated_op(vectors: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    turned, starts, end = _accumulated(vectors, base)
    return turned, starts.clone() if starts.data_ptr() == base.data_ptr() else starts, end


@_accumulated_op.register_fake
def _(vectors: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *lead, chunks, _, dim = vectors.shape
    return (
        torch.empty_like(vectors),
        vectors.new_empty(*lead, chunks, dim, dim),
        base.new_empty(base.shape),
    )


@torch.library.custom_op("farfield::reflection_moved", mutates_args=())
def _moved_op(x: Tensor, turned: Tensor, vectors: Tensor, starts: Tensor, outward: bool) -> Tensor:
    return _moved(x, turned, vectors, starts, outward).contiguous()


@_moved_op.register_fake
def _(x: Tensor, turned: Tensor, vectors: Tensor, starts: Tensor, outward: bool) -> Tensor:
    lead = torch.broadcast_shapes(x.shape[:-2], starts.shape[:-3])
    return x.new_empty(*lead, *x.shape[-2:])


@torch.library.custom_op("farfield::reflection_turns", mutates_args=())
def _turns_op(a: Tensor, b: Tensor, turned: Tensor) -> Tensor:
    return _turns(a, b, turned).contiguous()


@_turns_op.register_fake
def _(a: Tensor, b: Tensor, turned: Tensor) -> Tensor:
    return turned.new_empty(turned.shape)
