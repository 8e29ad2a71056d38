"""Softmax attention along contractions (PaTH), where transport can't be absorbed into keys.

    logit_ij = q_iᵀ H_i H_{i-1} ⋯ H_{j+1} k_j / √d + (u_j - u_i),    H_t = I - β_t w_t w_tᵀ

Queries are taken a chunk at a time. Their own chunk is met through the triangular form of its
steps; the chunks before it through queries moved back to where each of them ends, where its keys
wait. Scores exist for one chunk of queries at a time, and every chunk of keys has a softmax of its
own, put together by their normalisers as in flash attention: memory is linear in the number of
tokens. The backward pass computes scores again.

Serves: any device; computed in float32, or float64 for float64 inputs, and returned in the type of
the values; gradients to queries, keys, values, steps and potential; grouped heads; values of any
dimension. Chunks that no query sees are skipped. With sinks, gradients to the steps between a sink
and a window still pass through every chunk.

Source: Yang et al., "PaTH Attention" (arXiv 2505.16381), §4, for the order of work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from farfield.algebra.contraction import (
    CHUNK,
    Chunk,
    Contraction,
    ContractionTrail,
    Rows,
    moved_on,
    no_reach,
)
from farfield.attention import logit
from farfield.attention.engines import kernel
from farfield.attention.engines.path_chunks import (
    Job,
    chunks_of,
    forward,
    fused,
    mask_of,
    met,
    own_steps,
    plus,
    scaled,
    softmax,
)
from farfield.attention.logit import Visible


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    contraction: Contraction,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j of a whole sequence, from its first token on.

    Shapes: q [B, H, T, d], k [B, Hk, T, d], v [B, Hk, T, d_v] with Hk dividing H; contraction of
    [B or 1, Hk or 1, T] steps; potential [B or 1, Hk or H, T] float64 or None. Returns
    [B, H, T, d_v]. Raises: ValueError for a contraction of other tokens.
    """
    return with_lse(q, k, v, contraction, potential=potential, visible=visible)[0]


def with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    contraction: Contraction,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> tuple[Tensor, Tensor]:
    """The output, and log Σ_j exp(logit_ij) [B, H, T] beside it, which has no gradient.

    Units: nats. Raises: ValueError as `attend` does.
    """
    rows = ContractionTrail.of(contraction, k).fresh
    if q.shape[-2] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1])
    with torch.autocast(q.device.type, enabled=False):
        out, whole, *_ = _path(
            _grouped(q, k),
            *rows,
            v,
            _per_group(potential, k),
            visible.valid,
            visible.position,
            visible.window,
            visible.sinks,
        )
    return out.flatten(1, 2).to(v.dtype), whole.flatten(1, 2)


def attend_cached(
    q: Tensor,
    trail: ContractionTrail,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> Tensor:
    """The same for the last T of the K tokens in `trail`, whose rows it must still hold.

    Shapes: as in `attend`, with v [B, Hk, K, d_v] and potential [B or 1, Hk or H, K].
    """
    if q.shape[-2] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    trail = trail.settled
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.promote_types(q.dtype, trail.open.taking.dtype)
        grouped = _grouped(q, trail.keys).to(wide)
        job = Job(visible, _per_group(potential, trail.keys), trail.length, q.shape[-2])
        out = []
        reach = trail.reach(job.first)
        for index in job.chunks:
            chunk = trail.chunk(index)
            out.append(
                forward(job, index, job.rows(grouped, index), chunk, reach, trail.keys, v)[0]
            )
            if index + 1 < job.stop:
                reach = moved_on(reach, [chunk.product])
    return torch.cat(out, -2).flatten(1, 2).to(v.dtype)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, T, d] → [B, Hk, H/Hk, T, d]."""
    return q.unflatten(1, (k.shape[1], -1))


def _per_group(potential: Tensor | None, k: Tensor) -> Tensor | None:
    """[B or 1, Hk or H, K] → [B or 1, Hk, 1 or H/Hk, K]."""
    return None if potential is None else potential.unflatten(1, (k.shape[1], -1))


_ARGUMENTS = "Tensor q, Tensor keys, Tensor w, Tensor beta, Tensor v, Tensor? potential, "
_VISIBLE = "Tensor? valid, Tensor? position, int? window, int sinks"


@torch.library.custom_op(
    "farfield::path",
    mutates_args=(),
    schema=f"({_ARGUMENTS}{_VISIBLE}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _path(
    q: Tensor,
    keys: Tensor,
    w: Tensor,
    beta: Tensor,
    v: Tensor,
    potential: Tensor | None,
    valid: Tensor | None,
    position: Tensor | None,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole sequence: its output, and what the backward pass needs beside it, the
    log-normalisers, the keys at the ends of their chunks and the products of the chunks."""
    length, wide = w.shape[-2], torch.promote_types(q.dtype, w.dtype)
    visible = Visible(length, length, valid, position, window, sinks)
    job, rows = Job(visible, potential, length, length), Rows(keys, w, beta)
    out, whole, ends, products = _empty(q, w, v)
    reach = no_reach(w)
    for index in job.chunks:
        start, stop = job.span(index)
        chunk = Chunk.solved(rows.cut(start, stop))
        own = q[..., start:stop, :].to(wide)
        found = forward(job, index, own, chunk, reach, ends, v)
        out[..., start:stop, :], whole[..., start:stop] = found
        if index + 1 < job.stop:
            ends[:, :, start:stop] = chunk.transported
            products[index] = chunk.product
            reach = moved_on(reach, [products[index]])
    return out, whole, ends, products


@_path.register_fake
def _(q, keys, w, beta, v, potential, valid, position, window, sinks):
    return _empty(q, w, v)


def _empty(q: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, w.dtype)
    before = -(-w.shape[-2] // CHUNK) - 1
    return (
        q.new_empty(*q.shape[:-1], v.shape[-1], dtype=wide),
        q.new_empty(q.shape[:-1], dtype=wide),
        w.new_empty(*w.shape[:2], before * CHUNK, w.shape[-1]),
        w.new_empty(before, *w.shape[:2], w.shape[-1], w.shape[-1]),
    )


@torch.library.custom_op(
    "farfield::path_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}Tensor out, Tensor whole, Tensor ends, Tensor products, "
    f"{_VISIBLE}, bool learned) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _path_backward(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    w: Tensor,
    beta: Tensor,
    v: Tensor,
    potential: Tensor | None,
    out: Tensor,
    whole: Tensor,
    ends: Tensor,
    products: Tensor,
    valid: Tensor | None,
    position: Tensor | None,
    window: int | None,
    sinks: int,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    visible = Visible(w.shape[-2], w.shape[-2], valid, position, window, sinks)
    job, rows = Job(visible, potential, w.shape[-2], w.shape[-2]), Rows(keys, w, beta)
    backward = _Backward(job, ends, v.to(out.dtype), products, learned)
    of_q, found = torch.empty_like(q), Rows(*(torch.empty_like(x) for x in rows))
    with torch.autocast(q.device.type, enabled=False):
        for index in job.chunks[::-1]:
            start, stop = job.span(index)
            of_chunk = backward.chunk(index, q, rows, grad, out, whole)
            of_q[..., start:stop, :] = of_chunk[0]
            for total, part in zip(found.cut(start, stop), of_chunk[1], strict=True):
                total.copy_(part)
    of_u = w.new_zeros(0, dtype=torch.float64) if backward.of_u is None else backward.of_u
    return of_q, *found, backward.of_v.to(v.dtype), of_u


@_path_backward.register_fake
def _(
    grad, q, keys, w, beta, v, potential, out, whole, ends, products, valid, position, window,
    sinks, learned,
):  # fmt: skip
    of_u = torch.empty_like(potential) if learned else w.new_empty(0, dtype=torch.float64)
    return *(torch.empty_like(x) for x in (q, keys, w, beta, v)), of_u


def _save(ctx, inputs, output):
    *tensors, ctx.window, ctx.sinks = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, grad, *_):
    *tensors, valid, position, out, whole, ends, products = ctx.saved_tensors
    learned = ctx.needs_input_grad[5]
    *grads, of_u = _path_backward(
        grad, *tensors, out, whole, ends, products, valid, position, ctx.window, ctx.sinks, learned
    )
    return *grads, of_u if learned else None, None, None, None, None


_path.register_autograd(_differentiate, setup_context=_save)


class _Backward:
    """Gradients from the last chunk of queries to the first.

    In this order all that reaches a chunk's keys and product from later queries is known when the
    chunk's own turn comes, and its steps need to be differentiated only once.
    """

    def __init__(self, job: Job, ends: Tensor, v: Tensor, products: Tensor, learned: bool) -> None:
        self.job, self.ends, self.v, self.products = job, ends, v, products
        self.of_ends, self.of_v = torch.zeros_like(ends), torch.zeros_like(v)
        self.of_products = torch.zeros_like(products)
        u = job.potential
        self.of_u = torch.zeros_like(u) if u is not None and learned else None

    def chunk(
        self, index: int, q: Tensor, rows: Rows, grad: Tensor, out: Tensor, whole: Tensor
    ) -> tuple[Tensor, Rows]:
        """Gradients to the queries and rows of chunk `index`."""
        start, stop = self.job.span(index)
        result = _Result(
            grad[..., start:stop, :].to(out.dtype), out[..., start:stop, :], whole[..., start:stop]
        )
        q, chunk = q[..., start:stop, :].to(out.dtype), Chunk.solved(rows.cut(start, stop))
        scores, moved = met(self.job, index, q, chunk)
        logits = plus(scores, self.job.bias(index, start, 1, chunk.length, scores))
        of_scores, of_v = self._written_out(logits, self.v[:, :, None, start:stop], result, start)
        self.of_v[:, :, start:stop] += of_v.squeeze(2)
        of_moved = self._far(index, moved, result)
        ends, product = torch.zeros_like(chunk.rows.w), torch.zeros_like(chunk.product)
        if index + 1 < self.job.stop:
            ends, product = self.of_ends[:, :, start:stop], self.of_products[index]
        own, of_scores = own_steps(self.job, index, q, chunk), of_scores.squeeze(2).flatten(2, 3)
        of_q, of_rows = chunk.gradients(scaled(q), own, of_scores, of_moved, ends, product)
        return (of_q * logit.scale(q.shape[-1])).unflatten(2, q.shape[2:4]), of_rows

    def _far(self, index: int, moved: Tensor, result: _Result) -> Tensor:
        """Gradient to the queries of a chunk at its start, and into everything before.

        From near to far, queries are moved back; from far to near, their gradients come along.
        """
        parts = list(self.job.far(index, result.whole.numel()))
        along = torch.zeros_like(moved)
        if not parts:
            return along
        lowest = here = parts[0][0]
        at_ends = [moved]
        for product in self.products[lowest + 1 : index].flip(0):
            at_ends.append(at_ends[-1] @ product)
        queries = torch.stack(at_ends[::-1], 2)
        for first, last in parts:
            while here < first:  # chunks that no query sees, between sinks and the window
                along = self._through(here, queries[:, :, here - lowest], along)
                here += 1
            q = queries[:, :, first - lowest : last - lowest]
            direct = self._seen(index, q, first, last, result)
            while here < last:
                own = here - first
                along = self._through(here, q[:, :, own], along) + direct[:, :, own]
                here += 1
        while here < index:
            along = self._through(here, queries[:, :, here - lowest], along)
            here += 1
        return along

    def _through(self, index: int, q: Tensor, along: Tensor) -> Tensor:
        """Gradient to queries at the end of a chunk from that at its start."""
        self.of_products[index] += q.mT @ along
        return along @ self.products[index].mT

    def _seen(self, index: int, q: Tensor, first: int, last: int, result: _Result) -> Tensor:
        """Gradient to queries at the ends of chunks [first, last), from what they see there.

        Shapes: q [B, Hk, n, H/Hk · rows, d], as is what is returned.
        """
        keys, v = chunks_of(self.ends, first, last), chunks_of(self.v, first, last)
        bias = self.job.bias(index, first * CHUNK, last - first, CHUNK, q)
        groups = result.whole.shape[2:]
        if self.of_u is None and fused(q, v):
            grad, out, whole = (x.flatten(0, 1) for x in result.repeated(last - first))
            q_, keys_, v_ = (x.flatten(0, 1) for x in (q, keys, v))
            mask = mask_of(bias, q, groups)
            found = kernel.backward(grad, q_, keys_, v_, out, whole, mask, False, 1.0)
            of_q, of_keys, of_v = (x.unflatten(0, q.shape[:2]) for x in found)
        else:
            logits = plus((q @ keys.mT).unflatten(3, groups), bias)
            of_scores, of_v = self._written_out(logits, v, result, first * CHUNK)
            of_scores = of_scores.flatten(3, 4)
            of_q, of_keys = of_scores @ keys, of_scores.mT @ q
        self.of_ends[:, :, first * CHUNK : last * CHUNK] += of_keys.flatten(2, 3)
        self.of_v[:, :, first * CHUNK : last * CHUNK] += of_v.flatten(2, 3)
        return of_q

    def _written_out(
        self, logits: Tensor, v: Tensor, result: _Result, first: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients to scores and values, and into the potential of the keys from `first` on.

        A query's own potential gets none: what it adds to all logits of a row, the softmax takes
        away.

        Shapes: logits [B, Hk, n, H/Hk, rows, keys], v [B, Hk, n, keys, d_v].
        """
        weight, parts = softmax(logits)
        share = (parts - result.whole[:, :, None]).exp()
        grad = (result.grad[:, :, None] * share[..., None]).flatten(3, 4)
        of_scores = (grad @ v.mT).view_as(weight)
        delta = (result.grad * result.out).sum(-1)
        of_scores.sub_((delta[:, :, None] * share)[..., None]).mul_(weight)
        if self.of_u is not None:
            column = of_scores.sum(-2).transpose(2, 3).flatten(3)  # [B, Hk, H/Hk, n · keys]
            of_u = self.of_u[..., first : first + column.shape[-1]]
            of_u += column.sum_to_size(of_u.shape)
        return of_scores, weight.flatten(3, 4).mT @ grad


class _Result(NamedTuple):
    """What a chunk of queries came to: the gradient to their output, the output and the
    log-normaliser, [B, Hk, H/Hk, rows, d_v] and [B, Hk, H/Hk, rows]."""

    grad: Tensor
    out: Tensor
    whole: Tensor

    def repeated(self, runs: int) -> tuple[Tensor, ...]:
        """The same beside every one of `runs` chunks of keys: [B, Hk, runs, H/Hk · rows, ·]."""
        flat = (x.flatten(2, 3).unsqueeze(2) for x in self)
        return tuple(x.expand(*x.shape[:2], runs, *x.shape[3:]) for x in flat)
