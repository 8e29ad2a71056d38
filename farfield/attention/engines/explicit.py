"""Attention whose weights can be looked at: logits of some queries at a time, written out.

`weights` yields them; the engine sums values with them and shows each tile to an observer. Memory
is linear in the number of keys, since a tile holds few queries where there are many keys.

Serves: everything a call can ask for, on any device, with gradients (autograd then keeps every
tile, and memory is quadratic) and the log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.attention import logit
from farfield.attention.logit import Visible

_ELEMENTS = 2**22
"""Largest tile, in logits of all rows and heads, unless the caller says how many queries."""


@dataclass(frozen=True)
class Tile:
    """How the queries at key indices [start, stop) see the keys [first, stop).

    Shapes: logits [B, H, stop - start, stop - first], -∞ where a key isn't seen; log_sum_exp
    [B, H, stop - start]; in float32, or float64 for float64 queries. Units: nats.
    """

    start: int
    stop: int
    first: int
    logits: Tensor
    log_sum_exp: Tensor

    @property
    def log_weights(self) -> Tensor:
        """log α_ij = logit_ij - log Σ_j exp(logit_ij)."""
        return self.logits - self.log_sum_exp.unsqueeze(-1)

    @property
    def weights(self) -> Tensor:
        """α_ij; each row sums to 1."""
        return self.log_weights.exp()


Observer = Callable[[Tile], None]


def weights(
    q: Tensor,
    k: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
    chunk: int | None = None,
) -> Iterator[Tile]:
    """The logits of all queries in order, `chunk` of them at a time.

    Shapes: q [B, H, T, d], k [B, Hk, K, d], potential [B or 1, Hk or H, K] float64 or None.
    Raises: ValueError for a chunk of less than one query.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1 query")
    batch, heads, queries, dim = q.shape
    groups, keys = k.shape[1:3]
    chunk = chunk or max(1, _ELEMENTS // max(1, batch * heads * keys))
    wide = torch.promote_types(q.dtype, torch.float32)
    for start in range(keys - queries, keys, chunk):
        stop = min(start + chunk, keys)
        first = visible.first_key(start) if visible.sinks == 0 else 0
        rows = q[..., start - keys + queries : stop - keys + queries, :].to(wide)
        # The heads of a group are rows of one product, so that no key is repeated.
        rows = rows.unflatten(1, (groups, -1)).flatten(2, 3)
        with torch.autocast(q.device.type, enabled=False):
            logits = rows @ k[..., first:stop, :].to(wide).transpose(-1, -2) * logit.scale(dim)
        logits = logits.unflatten(2, (-1, stop - start)).flatten(1, 2)
        if potential is not None:
            difference = potential[..., None, first:stop] - potential[..., start:stop, None]
            logits = logits + logit.per_query_head(difference.to(wide), heads)
        seen = visible.tile(start, stop, first, stop, q.device)
        logits = logits.masked_fill(~seen, -math.inf)
        yield Tile(start, stop, first, logits, logits.logsumexp(-1))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
    chunk: int | None = None,
    observe: Observer | None = None,
) -> Tensor:
    """Σ_j α_ij v_j, each tile of α shown to `observe`. Shapes: as in `Engine`."""
    return _attend(q, k, v, potential, visible, chunk, observe)[0]


def with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, potential: Tensor | None = None, visible: Visible
) -> tuple[Tensor, Tensor]:
    """The output, and log Σ_j exp(logit_ij) [B, H, T] beside it, in float32 at least."""
    return _attend(q, k, v, potential, visible, None, None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Tensor | None,
    visible: Visible,
    chunk: int | None,
    observe: Observer | None,
) -> tuple[Tensor, Tensor]:
    groups = k.shape[1]
    out, sums = [], []
    for tile in weights(q, k, potential=potential, visible=visible, chunk=chunk):
        if observe is not None:
            observe(tile)
        alpha = tile.weights.unflatten(1, (groups, -1)).flatten(2, 3)
        with torch.autocast(q.device.type, enabled=False):
            part = alpha @ v[..., tile.first : tile.stop, :].to(alpha.dtype)
        part = part.unflatten(2, (-1, tile.stop - tile.start)).flatten(1, 2)
        out.append(part.to(v.dtype))
        sums.append(tile.log_sum_exp)
    if not out:
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=wide)
    return torch.cat(out, -2), torch.cat(sums, -1)
