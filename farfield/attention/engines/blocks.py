"""Attention in blocks of queries: a mask, a window or a potential, memory linear in the keys.

A block sees its mask alone, never a matrix over all queries; a window slices the keys; a potential
rides as one more dimension of the head, centred on each block so that float32 differences between
near keys stay exact however far the block lies from the start. The backward goes through the blocks
once more. One custom operator, so that `torch.compile` neither breaks at the loop nor unrolls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.attention import logit
from farfield.attention.engines import kernel
from farfield.attention.logit import Visible, per_query_head

_MASK_ELEMENTS = 2**22
"""Largest [query, key] mask a block may build, in elements."""

_BIAS_ELEMENTS = 2**24
"""Largest [row, head, query, key] bias or table of logits a block may build, in elements."""

_MASKED_QUERIES = 256
"""Most queries of a block with a mask: it computes all pairs of the triangle on its end."""

_FEW_QUERIES = 16
"""Up to so many queries a bias for each key is cheaper than a copy of the keys."""

_WINDOW_QUERIES = (64, 256)
"""Fewest and most queries that share a slice of keys under a window; between, half the window."""

_RIDING_RANGE = 64.0
"""By how many nats the potential may change between queries that share a centre, if that leaves
32 of them: the float32 rounding of differences grows with the distance from it."""


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v and potential, the latter with a row for each key head."""


@torch.library.custom_op(
    "farfield::blocks",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? potential, Tensor? valid, Tensor? position, "
    "int? window, int sinks) -> (Tensor, Tensor)",
)
def blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Tensor | None,
    valid: Tensor | None,
    position: Tensor | None,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, differentiable in the former to q, k, v and potential.

    Shapes: as in `Engine`; returns [B, H, T, d_v] and, in float32 at least, [B, H, T].
    """
    visible = Visible(q.shape[-2], k.shape[-2], valid, position, window, sinks)
    out, lse = _empty(q, v)
    for members in _members(q, k, potential):
        u = None if potential is None else potential[:, members]
        found = lse[:, members] if lse.numel() else None
        _forward((q[:, members], k, v, u), visible, out[:, members], found)
    return out, lse


@blocks.register_fake
def _(q, k, v, potential, valid, position, window, sinks):
    return _empty(q, v)


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    shape = q.shape[:-1] if kernel.gives_lse(q.device) else (0,)
    lse = q.new_empty(shape, dtype=kernel.wide_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op(
    "farfield::blocks_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? potential, "
    "Tensor? valid, Tensor? position, int? window, int sinks) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _blocks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    potential: Tensor | None,
    valid: Tensor | None,
    position: Tensor | None,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visible = Visible(q.shape[-2], k.shape[-2], valid, position, window, sinks)
    wide = kernel.wide_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    du = torch.zeros_like(q[:0] if potential is None else potential, dtype=torch.float64)
    for members in _members(q, k, potential):
        u = None if potential is None else potential[:, members]
        known = lse[:, members] if lse.numel() else None
        _backward(
            (grad[:, members], out[:, members], known),
            (q[:, members], k, v, u),
            visible,
            (dq[:, members], dk, dv, du[:, members]),
        )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), du


@_blocks_backward.register_fake
def _(grad, q, k, v, out, lse, potential, valid, position, window, sinks):
    du = torch.empty_like(q[:0] if potential is None else potential, dtype=torch.float64)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), du


def _save(ctx, inputs, output):
    q, k, v, potential, valid, position, ctx.window, ctx.sinks = inputs
    ctx.save_for_backward(q, k, v, *output, potential, valid, position)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _):
    q, k, v, out, lse, potential, valid, position = ctx.saved_tensors
    *grads, du = _blocks_backward(
        grad, q, k, v, out, lse, potential, valid, position, ctx.window, ctx.sinks
    )
    return *grads, None if potential is None else du, None, None, None, None


blocks.register_autograd(_differentiate, setup_context=_save)


def _members(q: Tensor, k: Tensor, potential: Tensor | None) -> list[slice]:
    """Query heads that can go together: one of each group where they differ in potential."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or potential is None or potential.shape[1] == k.shape[1]:
        return [slice(None)]
    return [slice(member, None, groups) for member in range(groups)]


@dataclass(frozen=True)
class _Block:
    """Queries at key indices [start, stop), the runs of keys they see, and which of those."""

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    causal: bool
    mask: Tensor | None
    offset: int

    @property
    def rows(self) -> slice:
        """The block's queries in q."""
        return slice(self.start - self.offset, self.stop - self.offset)

    def of(self, x: Tensor, dim: int = -2) -> Tensor:
        """x at the block's keys."""
        parts = [x.narrow(dim, first, last - first) for first, last in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def add(self, total: Tensor, part: Tensor, dim: int = -2) -> None:
        """Add what belongs to the block's keys to what belongs to all."""
        at = 0
        for first, last in self.runs:
            total.narrow(dim, first, last - first).add_(part.narrow(dim, at, last - first))
            at += last - first


def _blocks(visible: Visible, q: Tensor, u: Tensor | None) -> Iterator[_Block]:
    """The queries in blocks, in order."""
    queries, keys = visible.queries, visible.keys
    if visible.plain and u is None and queries == keys:
        yield _Block(0, keys, ((0, keys),), causal=True, mask=None, offset=0)
        return
    start = offset = keys - queries
    fixed = visible.valid is None and visible.position is None and visible.window is not None
    shape: tuple[int, int, int] | None = None
    mask = None
    while start < keys:
        stop = min(start + _length(visible, q), keys)
        if u is not None and not _few(q, keys):
            stop = _near(u, start, stop)
        runs = _runs(visible, start, stop)
        before, shape = shape, (stop - start, start - runs[-1][0], len(runs))
        if not fixed or shape != before:  # a window's mask is the same all along the diagonal
            mask = _mask(visible, start, stop, runs, q)
        yield _Block(start, stop, runs, causal=False, mask=mask, offset=offset)
        start = stop


def _length(visible: Visible, q: Tensor) -> int:
    """How many queries a block may have."""
    span, most = visible.keys, _MASKED_QUERIES
    if visible.window is not None:
        low, high = _WINDOW_QUERIES
        most = max(low, min(high, visible.window // 2))
        if visible.position is None:
            span = min(span, visible.window + most + visible.sinks)
    masks = q.shape[0] if visible.valid is not None or visible.position is not None else 1
    most = min(most, _MASK_ELEMENTS // (span * masks))
    if not kernel.gives_lse(q.device):
        most = min(most, _BIAS_ELEMENTS // (span * q.shape[0] * q.shape[1]))
    return max(1, most)


def _few(q: Tensor, keys: int) -> bool:
    return q.shape[-2] <= _FEW_QUERIES and q.shape[:-1].numel() * keys <= _BIAS_ELEMENTS


def _near(u: Tensor, start: int, stop: int) -> int:
    """A block's end that leaves it the queries that lie close enough in potential."""
    while stop - start > 32:
        low, high = u[..., start:stop].aminmax(dim=-1)
        if (high - low).amax() <= _RIDING_RANGE:
            break
        stop = start + max(32, (stop - start) // 2)
    return stop


def _runs(visible: Visible, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """The keys that some query of the block may see: a run, and one of sinks before it."""
    first = visible.first_key(start)
    sinks = min(visible.sink_stop(), stop) if visible.window is not None else 0
    if sinks >= first:
        return ((0, stop),)
    return ((0, sinks), (first, stop)) if sinks else ((first, stop),)


def _mask(
    visible: Visible, start: int, stop: int, runs: tuple[tuple[int, int], ...], q: Tensor
) -> Tensor:
    if visible.window is not None:
        tiles = [visible.tile(start, stop, first, last, q.device) for first, last in runs]
        return kernel.float_mask(torch.cat(tiles, -1), q.dtype)
    dtype, rows = kernel.wide_dtype(q.dtype), stop - start
    if visible.valid is None:
        mask = q.new_zeros(1, 1, rows, stop, dtype=dtype)
    else:
        real = kernel.float_mask(visible.valid[:, None, None, :stop], q.dtype)
        mask = real.repeat(1, 1, rows, 1)
    own = mask[..., start:]
    own.diagonal(dim1=-2, dim2=-1).zero_()
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
    own.masked_fill_(later, kernel.UNSEEN)
    return mask


class _Operands:
    """What the kernel is given: q, k, v of one head dimension, the potential riding where it does.

    (q/√d, 1) · (k, u - centre) = q·k/√d + u - centre.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rides: bool) -> None:
        self.dim, self.rides = q.shape[-1], rides
        if not rides:
            self.width, self.dtype = max(self.dim, v.shape[-1]), q.dtype
            self._q, self._k = q, kernel.padded(k, self.width)
            self._v = kernel.padded(v, self.width)
            return
        self.width = kernel.riding_width(self.dim, v.shape[-1])
        self.dtype = kernel.wide_dtype(q.dtype)
        self._q = q
        self._k = k.new_zeros(*k.shape[:-1], self.width, dtype=self.dtype)
        self._k[..., : self.dim] = k
        self._v = kernel.padded(v.to(self.dtype), self.width)

    @property
    def scale(self) -> float:
        """What the kernel still has to multiply its dot products by."""
        return 1.0 if self.rides else logit.scale(self.dim)

    def queries(self, block: _Block) -> Tensor:
        """The block's queries."""
        q = self._q[..., block.rows, :]
        if not self.rides:
            return kernel.padded(q, self.width)
        wide = q.new_zeros(*q.shape[:-1], self.width, dtype=self.dtype)
        torch.mul(q, logit.scale(self.dim), out=wide[..., : self.dim])
        wide[..., self.dim] = 1.0
        return wide

    def keys(self, block: _Block, u: Tensor | None, centre: Tensor | None) -> Tensor:
        """The keys that the block sees."""
        if self.rides and u is not None and centre is not None:
            for first, last in block.runs:
                self._k[..., first:last, self.dim] = u[..., first:last] - centre
        return block.of(self._k)

    def values(self, block: _Block) -> Tensor:
        """The values that the block sees."""
        return block.of(self._v)

    def outer(self, x: Tensor) -> Tensor:
        """Gradients or outputs as the kernel sees them."""
        return kernel.padded(x.to(self.dtype), self.width)


def _forward(inputs: Inputs, visible: Visible, out: Tensor, lse: Tensor | None) -> None:
    q, k, v, u = inputs
    few = _few(q, visible.keys)
    operands = _Operands(q, k, v, rides=u is not None and not few)
    for block in _blocks(visible, q, u):
        mask, centre = block.mask, None
        if u is not None and few:
            mask = _bias(u, block, q.shape[1], kernel.wide_dtype(q.dtype))
        elif u is not None:
            centre = _centre(u, block)
        found, sums = kernel.attend(
            operands.queries(block),
            operands.keys(block, u, centre),
            operands.values(block),
            mask,
            block.causal,
            operands.scale,
        )
        out[..., block.rows, :] = found[..., : v.shape[-1]]
        if lse is not None and sums is not None:
            shift = 0.0 if u is None or centre is None else _shift(u, centre, block, q.shape[1])
            lse[..., block.rows] = sums - shift


def _backward(
    known: tuple[Tensor, Tensor, Tensor | None],
    inputs: Inputs,
    visible: Visible,
    totals: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    (grad, out, lse), (q, k, v, u), (dq, dk, dv, du) = known, inputs, totals
    operands = _Operands(q, k, v, rides=u is not None)
    for block in _blocks(visible, q, u):
        centre = None if u is None else _centre(u, block)
        sums = None if lse is None else lse[..., block.rows]
        if sums is not None and u is not None and centre is not None:
            sums = sums + _shift(u, centre, block, q.shape[1]).to(sums.dtype)
        to_q, to_k, to_v = kernel.backward(
            operands.outer(grad[..., block.rows, :]),
            operands.queries(block),
            operands.keys(block, u, centre),
            operands.values(block),
            operands.outer(out[..., block.rows, :]),
            sums,
            block.mask,
            block.causal,
            operands.scale,
        )
        dim = operands.dim
        dq[..., block.rows, :] = to_q[..., :dim]
        block.add(dk, to_k[..., :dim])
        block.add(dv, to_v[..., : v.shape[-1]])
        if u is not None:
            to_u = to_k[..., dim].double()
            block.add(du, to_u if du.shape[0] > 1 else to_u.sum(0, keepdim=True), -1)
    if operands.rides:
        dq.mul_(logit.scale(operands.dim))


def _centre(u: Tensor, block: _Block) -> Tensor:
    """The middle of the block's potentials, [B or 1, heads, 1]."""
    low, high = u[..., block.start : block.stop].aminmax(dim=-1, keepdim=True)
    return (low + high) / 2


def _shift(u: Tensor, centre: Tensor, block: _Block, heads: int) -> Tensor:
    """u_i - centre of the block's queries, [B or 1, H, T]."""
    return per_query_head(u[..., block.start : block.stop] - centre, heads)


def _bias(u: Tensor, block: _Block, heads: int, dtype: torch.dtype) -> Tensor:
    """The mask with u_j - u_i in it, [B or 1, H, T, K]."""
    bias = block.of(u, -1).unsqueeze(-2) - u[..., block.start : block.stop].unsqueeze(-1)
    bias = per_query_head(bias.to(dtype), heads)
    return bias if block.mask is None else bias + block.mask
