"""How the queries of one chunk meet all the keys they see, along contractions.

Private to the engine `path`, whose docstring says in which order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.algebra.contraction import CHUNK, Chunk
from farfield.attention import logit
from farfield.attention.engines import kernel
from farfield.attention.logit import Visible

_SCORES = 2**20
"""Scores that may exist at a time; one chunk of queries against one of keys always may."""


@dataclass(frozen=True)
class Job:
    """Which queries meet which keys: the last `queries` of `keys` tokens, chunk by chunk."""

    visible: Visible
    potential: Tensor | None
    keys: int
    queries: int

    @property
    def first(self) -> int:
        """The chunk of the first query."""
        return (self.keys - self.queries) // CHUNK

    @property
    def stop(self) -> int:
        """How many chunks there are, the last one maybe not full."""
        return -(-self.keys // CHUNK)

    @property
    def chunks(self) -> range:
        """The chunks that queries lie in."""
        return range(self.first, self.stop)

    def span(self, index: int) -> tuple[int, int]:
        """The queries of a chunk, as positions [start, stop) among the keys."""
        return max(index * CHUNK, self.keys - self.queries), min((index + 1) * CHUNK, self.keys)

    def rows(self, x: Tensor, index: int) -> Tensor:
        """The rows of x [..., T, ·] that belong to the queries of a chunk."""
        start, stop = (bound - (self.keys - self.queries) for bound in self.span(index))
        return x[..., start:stop, :]

    def far(self, index: int, rows: int) -> Iterator[tuple[int, int]]:
        """The chunks before `index` that its queries may see, from far to near, as ranges of chunks
        whose scores may exist at a time; `rows` is the number of rows of scores over B and H."""
        nearest = min(self.visible.first_key(self.span(index)[0]) // CHUNK, index)
        sinks = min(-(-self.visible.sink_stop() // CHUNK), nearest)
        size = max(1, _SCORES // (rows * CHUNK))
        for low, high in ((0, sinks), (nearest, index)):
            for start in range(low, high, size):
                yield start, min(start + size, high)

    def bias(self, index: int, first: int, runs: int, keys: int, like: Tensor) -> Tensor | None:
        """What is added to the scores of the queries of a chunk with `runs` runs of `keys` keys
        from `first` on: u_j - u_i, and a number below all others where j isn't visible. None: 0.

        Shapes: [B or 1, Hk or 1, runs, H/Hk or 1, rows, keys], in the type of `like`.
        """
        (start, stop), last = self.span(index), first + runs * keys
        bias = None
        if self.potential is not None:
            u = self.potential[..., None, first:last] - self.potential[..., start:stop, None]
            bias = u.to(like.dtype).unflatten(-1, (runs, keys)).movedim(-2, 2)
        if last <= start and self.visible.plain:
            return bias
        seen = self.visible.tile(start, stop, first, last, like.device)
        seen = seen.unflatten(-1, (runs, keys)).transpose(-2, -3).unsqueeze(-3)
        if seen.dim() == 4:
            seen = seen[None, None]
        bias = like.new_zeros(seen.shape) if bias is None else bias
        # Finite, so that a row that sees nothing of a chunk has a softmax there, of no weight.
        return bias.masked_fill(~seen, kernel.UNSEEN)


def chunks_of(x: Tensor, first: int, last: int) -> Tensor:
    """Chunks [first, last) of x [B, Hk, K, ·] as [B, Hk, n, C, ·]."""
    return x[:, :, first * CHUNK : last * CHUNK].unflatten(2, (last - first, CHUNK))


def met(job: Job, index: int, q: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Scores of the queries of a chunk with its keys [B, Hk, 1, H/Hk, rows, keys], and the queries
    moved back to its start [B, Hk, H/Hk · rows, d]. Shapes: q [B, Hk, H/Hk, rows, d]."""
    scores, moved = chunk.met(scaled(q), own_steps(job, index, q, chunk))
    return scores.unflatten(2, (1, *q.shape[2:4])), moved


def scaled(q: Tensor) -> Tensor:
    """q/√d with the members of a group one after the other: [B, Hk, H/Hk · rows, d]."""
    return q.flatten(2, 3) * logit.scale(q.shape[-1])


def own_steps(job: Job, index: int, q: Tensor, chunk: Chunk) -> Tensor:
    """Which steps of their chunk lie at or before each query, as ones: [H/Hk · rows, steps]."""
    start, stop = job.span(index)
    query = torch.arange(start, stop, device=q.device).repeat(q.shape[2]) - index * CHUNK
    step = torch.arange(chunk.length, device=q.device)
    return (step <= query[:, None]).to(q.dtype)


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax along the last axis, and the logarithm of its normaliser [...].

    The largest weight is e^(largest logit - normaliser): two maxima cost less than a sum of
    exponentials.
    """
    weight = logits.softmax(-1)
    return weight, logits.amax(-1) - weight.amax(-1).log()


def forward(
    job: Job, index: int, q: Tensor, chunk: Chunk, reach: Tensor, keys: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser of the queries of one chunk.

    Shapes: q [B, Hk, H/Hk, rows, d]; keys [B, Hk, ≥ index · C, d] at the ends of their chunks;
    returns [B, Hk, H/Hk, rows, d_v] and [B, Hk, H/Hk, rows].
    """
    start, groups = index * CHUNK, q.shape[2:4]
    scores, moved = met(job, index, q, chunk)
    bias = job.bias(index, start, 1, chunk.length, q)
    weight, whole = softmax(plus(scores, bias).squeeze(2).flatten(2, 3))
    out = weight @ v[:, :, start : start + chunk.length].to(q.dtype)
    for first, last in job.far(index, whole.numel()):
        at_ends = (moved @ reach[..., first:last, :].flatten(-2)).unflatten(-1, (last - first, -1))
        bias = job.bias(index, first * CHUNK, last - first, CHUNK, q)
        own_keys, own_v = (chunks_of(x, first, last).to(q.dtype) for x in (keys, v))
        found, parts = _part(at_ends.movedim(-2, 2), own_keys, own_v, bias, groups)
        before, whole = whole, torch.logaddexp(whole, parts.logsumexp(2))
        share = (parts - whole[:, :, None]).exp()[..., None]
        out = out * (before - whole).exp()[..., None] + (found * share).sum(2)
    return out.unflatten(2, groups), whole.unflatten(2, groups)


def _part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, groups: torch.Size
) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser over the keys of each chunk apart.

    The kernel takes chunks as heads. It doesn't differentiate normalisers.

    Shapes: q [B, Hk, n, H/Hk · rows, d], k [B, Hk, n, C, d], v [B, Hk, n, C, d_v], bias as
    `Job.bias` has it; returns [B, Hk, n, H/Hk · rows, d_v] and [B, Hk, n, H/Hk · rows].
    """
    given = (q, k, v) if bias is None else (q, k, v, bias)
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if learning or not fused(q, v):
        weight, parts = softmax(plus((q @ k.mT).unflatten(3, groups), bias).flatten(3, 4))
        return weight @ v, parts
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    out, normaliser = kernel.attend(q_, k_, v_, mask_of(bias, q, groups), False, 1.0)
    assert normaliser is not None
    return out.unflatten(0, q.shape[:2]), normaliser.unflatten(0, q.shape[:2])


def fused(q: Tensor, v: Tensor) -> bool:
    """Whether a kernel does what is wanted here: output and normaliser."""
    return kernel.gives_lse(q.device) and v.shape[-1] == q.shape[-1]


def mask_of(bias: Tensor | None, q: Tensor, groups: torch.Size) -> Tensor | None:
    """The bias as the kernel takes it, for q [B, Hk, n, H/Hk · rows, d]."""
    if bias is None:
        return None
    bias = bias.expand(*q.shape[:3], *groups, bias.shape[-1])
    return bias.flatten(3, 4).flatten(0, 1)


def plus(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Scores and what is added to them."""
    return scores if bias is None else scores + bias
