"""What softmax attention does with some queries, in tiles of keys.

A source (a model's attention, caught in the act) says what its softmax sees through `Attended`; the
sampled queries come in chunks (`Chunk`), and each can be asked for tiles of its keys. Nothing of
size queries × keys exists but a tile.

Shape letters: B texts, G key/value heads, R query heads that share one (query head h = gR + r), Q
queries, K keys, d and v the dimensions of keys and values. Indices count the tokens of a text,
padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from farfield.algebra.sets import far_mask, route_length

Keys = slice | Tensor
"""Keys of a tile, from the first one there: a slice for all queries, or an index [Q, k]."""

Bias = Callable[[Tensor, Keys], Tensor]
"""(queries [Q], keys) -> what is added to their content logits, [B or 1, G or 1, R or 1, Q, k]."""

_ELEMENTS = 2**19
"""Logits of a tile, about: what a core's cache holds."""

_GATHERED = 2**21
"""Numbers of keys and values that a tile along the diagonal may copy, about."""

_QUERIES = 64
"""Most queries of a chunk."""


class Scores(Protocol):
    """The logits of pairs, before a mask: content and bias apart."""

    def content(self, rows: Tensor, keys: Keys) -> Tensor:
        """Scaled (and capped) scores of queries and keys: [B, G, R, Q, k], float32 at least."""
        ...

    def bias(self, rows: Tensor, keys: Keys) -> Tensor | None:
        """What is added to them, 0 at a query's own key; None where nothing is."""
        ...


@dataclass(frozen=True)
class DotProducts:
    """cap · tanh(scale · q·k / cap) + bias; without a cap, scale · q·k + bias.

    Shapes: query [B, G, R, T, d], key [B, G, K, d]. Units: nats.
    """

    query: Tensor
    key: Tensor
    scale: float
    cap: float | None = None
    added: Bias | None = None

    def content(self, rows: Tensor, keys: Keys) -> Tensor:
        """As in `Scores`."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        query = self.query[..., rows, :].to(wide)
        key = pick(self.key, keys).to(wide)
        if isinstance(keys, slice):
            grouped = query.flatten(2, 3) @ key.transpose(-1, -2)
            scores = grouped.unflatten(2, query.shape[2:4])
        else:
            scores = (query.transpose(2, 3) @ key.transpose(-1, -2)).transpose(2, 3)
        scores = scores * self.scale
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)

    def bias(self, rows: Tensor, keys: Keys) -> Tensor | None:
        """As in `Scores`."""
        return None if self.added is None else self.added(rows, keys)

    @cached_property
    def largest_key(self) -> Tensor:
        """max_{j ≤ i} |k_j| for every key i: [B, G, K] float64."""
        return torch.linalg.vector_norm(self.key, dim=-1, dtype=torch.float64).cummax(-1).values

    @cached_property
    def mean_plane(self) -> Tensor:
        """The mean size of the keys in each plane (x_b, x_{b+d/2}): [B, G, d/2] float64."""
        planes = self.key.unflatten(-1, (2, -1))
        return torch.linalg.vector_norm(planes, dim=-2).mean(2, dtype=torch.float64)


@dataclass(frozen=True)
class Written:
    """Logits that a model wrote out, and the bias that is known to be in them.

    The first query's own key is key `own`.

    Shapes: logits [B, G, R, T, K]; added [B or 1, G, R, 1, K], the same for all queries.
    Units: nats.
    """

    logits: Tensor
    own: int
    added: Tensor | None = None

    def content(self, rows: Tensor, keys: Keys) -> Tensor:
        """As in `Scores`. Masked logits stay as they are written."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        logits = self._of(self.logits[..., rows, :].to(wide), keys)
        return logits if self.added is None else logits - self._of(self.added, keys).to(wide)

    def bias(self, rows: Tensor, keys: Keys) -> Tensor | None:
        """As in `Scores`."""
        if self.added is None:
            return None
        return self._of(self.added, keys) - self.added[..., 0, rows + self.own].unsqueeze(-1)

    def _of(self, table: Tensor, keys: Keys) -> Tensor:
        if isinstance(keys, slice):
            return table[..., keys]
        index = keys.expand(*table.shape[:-2], *keys.shape)
        return table.expand(*table.shape[:-2], keys.shape[0], -1).gather(-1, index)


@dataclass(frozen=True)
class Attended:
    """One call of one layer's attention: its last T tokens look at K keys.

    `start` is the token of the first query, `first` that of the first key (a cache may have dropped
    earlier ones). `visible` says which of the keys there are seen by which queries (both counted
    from 0 in this call).
    `sink` is a learned logit that takes weight and brings no value. `position` counts the tokens of
    a query's document before it, for keys and queries alike; `real` is False at padding. `planes`
    says that a transport turns the pairs (x_b, x_{b+d/2}) of queries, keys and carried values.

    Shapes: values [B, G, K, v]; visible: rows [Q] -> bool [B or 1, Q, K]; sink [G, R]; position
    [B or 1, first + K]; real bool [B, first + K] or None.
    """

    layer: int
    start: int
    queries: int
    first: int
    scores: Scores
    values: Tensor
    visible: Callable[[Tensor], Tensor]
    position: Tensor
    heads: tuple[int, ...]
    real: Tensor | None = None
    sink: Tensor | None = None
    carried: bool = False
    planes: bool = False

    @cached_property
    def norms(self) -> Tensor:
        """|v_j|: [B, G, K], float32 at least."""
        wide = torch.promote_types(self.values.dtype, torch.float32)
        return torch.linalg.vector_norm(self.values, dim=-1, dtype=wide)

    def chunks(self, rows: Tensor, size: int = _QUERIES) -> Iterator[Chunk]:
        """The sampled queries among those of this call, at most `size` at a time."""
        here = rows[(rows >= self.start) & (rows < self.start + self.queries)]
        for part in here.split(size) if len(here) else ():
            yield Chunk(self, part.to(self.values.device))


@dataclass(frozen=True)
class Tile:
    """Some queries and some of their keys.

    Where `seen` is False the logits mean nothing. `distance` is i − j. `norms` are |v_j|.

    Shapes: content and bias (None: none) [B, G, R, Q, k], the latter up to axes of size 1; seen
    bool [B or 1, 1, 1, Q, k]; distance [Q, k]; key_position [B or 1, 1, 1, 1 or Q, k]; values
    [B, G, 1, 1 or Q, k, v]; norms [B, G, 1, 1 or Q, k]. Units: nats; those of the values.
    """

    content: Tensor
    bias: Tensor | None
    seen: Tensor
    distance: Tensor
    key_position: Tensor
    values: Tensor
    norms: Tensor

    @property
    def logits(self) -> Tensor:
        """What softmax sees of the keys that are seen."""
        return self.content if self.bias is None else self.content + self.bias.to(self.content)

    def weights(self, log_sum_exp: Tensor) -> Tensor:
        """α_ij, 0 where not seen. Shapes: log_sum_exp [B, G, R, Q] -> [B, G, R, Q, k]."""
        shifted = self.logits - log_sum_exp.unsqueeze(-1).to(self.content)
        return torch.where(self.seen, shifted.exp(), 0.0)


@dataclass(frozen=True)
class Chunk:
    """Some sampled queries of one call: whom they see, and in which tiles it can be looked at.

    Shapes: rows int64 [Q], the queries' tokens, rising.
    """

    call: Attended
    rows: Tensor

    @property
    def layer(self) -> int:
        """The layer, counted from 0 over all decoder layers."""
        return self.call.layer

    @property
    def position(self) -> Tensor:
        """Tokens of their document before the queries: [B or 1, Q]."""
        return self.call.position.to(self.rows.device)[:, self.rows]

    @property
    def real(self) -> Tensor:
        """Which queries are not padding: bool [B, Q]."""
        batch = self.call.values.shape[0]
        if self.call.real is None:
            return torch.ones(batch, len(self.rows), dtype=torch.bool, device=self.rows.device)
        return self.call.real.to(self.rows.device)[:, self.rows]

    def parts(self, size: int) -> Iterator[Chunk]:
        """The same queries, at most `size` at a time."""
        for part in self.rows.split(max(1, size)):
            yield replace(self, rows=part)

    def near_parts(self, window: int) -> Iterator[Chunk]:
        """The same queries, so few at a time that `near(window)` copies little."""
        values = self.call.values
        width = values.shape[1] * window * 2 * values.shape[-1] * values.shape[0]
        yield from self.parts(_GATHERED // max(1, width))

    def near(self, window: int) -> Tile:
        """The keys at distances window − 1, …, 1, 0, in this order: column c is distance
        window − 1 − c for every query.

        Shapes: a tile of k = window keys; those before the first key are not seen.
        """
        back = torch.arange(window - 1, -1, -1, device=self.rows.device)
        index = self.rows.unsqueeze(-1) - back - self.call.first
        there = index >= 0
        keys = index.clamp(min=0)
        seen = self._seen().gather(-1, keys.expand(self._seen().shape[0], *keys.shape)) & there
        return self._tile(keys, seen, back.expand_as(keys))

    def far(self, window: int) -> Iterator[Tile]:
        """The keys at a distance of at least `window`, in tiles in order of the keys."""
        stop = int(self.rows[-1]) - self.call.first - window + 1
        values = self.call.values
        heads = len(self.call.heads) * values.shape[0]
        width = max(64, _ELEMENTS // max(1, heads * len(self.rows)))
        seen = self._seen()
        for first in range(0, stop, width):
            keys = slice(first, min(stop, first + width))
            key = torch.arange(keys.start, keys.stop, device=self.rows.device) + self.call.first
            far = seen[..., keys] & far_mask(self.rows, key, window)
            yield self._tile(keys, far, route_length(self.rows, key))

    def tiles(self) -> Iterator[Tile]:
        """All keys of the queries, each in one tile."""
        yield from self.far(0)

    def log_sum_exp(self) -> Tensor:
        """ln Σ_j e^{logit_ij}, the learned sink included. Shapes: [B, G, R, Q]. Units: nats."""
        total: Tensor | None = None
        for tile in self.tiles():
            part = torch.where(tile.seen, tile.logits, -torch.inf).double().logsumexp(-1)
            total = part if total is None else torch.logaddexp(total, part)
        assert total is not None, "a query sees its own key's tile"
        if self.call.sink is not None:
            total = torch.logaddexp(total, self.call.sink.double()[:, :, None].expand_as(total))
        return total

    def output(self) -> Tensor:
        """Σ_j α_ij v_j as it arrives in the frame of the values. Shapes: [B, G, R, Q, v]."""
        lse = self.log_sum_exp()
        total: Tensor | float = 0.0
        for tile in self.tiles():
            alpha = tile.weights(lse)
            total = total + alpha @ tile.values[:, :, :, 0].to(alpha)
        assert isinstance(total, Tensor)
        return total

    def _seen(self) -> Tensor:
        return self.call.visible(self.rows - self.call.start)

    def _tile(self, keys: Keys, seen: Tensor, distance: Tensor) -> Tile:
        call, rows = self.call, self.rows - self.call.start
        values, norms = pick(call.values, keys), pick(call.norms, keys)
        values = values[:, :, None, None] if isinstance(keys, slice) else values[:, :, None]
        if isinstance(keys, slice):
            index = torch.arange(keys.start, keys.stop, device=self.rows.device)
            position = call.position.to(index.device)[:, index + call.first][:, None]
        else:
            position = call.position.to(keys.device)[:, keys + call.first]
        return Tile(
            content=call.scores.content(rows, keys),
            bias=call.scores.bias(rows, keys),
            seen=seen[:, None, None],
            distance=distance,
            key_position=position[:, None, None],
            values=values,
            norms=norms[:, :, None, None] if isinstance(keys, slice) else norms[:, :, None],
        )


def grouped(x: Tensor, groups: int) -> Tensor:
    """Query heads by the key head they read. Shapes: [B, H, T, ·] -> [B, G, R, T, ·]."""
    return x.unflatten(1, (groups, -1))


def pick(x: Tensor, keys: Keys) -> Tensor:
    """Keys or values of a tile. Shapes: x [B, G, K, …] -> [B, G, k, …], or [B, G, Q, k, …]."""
    if isinstance(keys, slice):
        return x[:, :, keys]
    return x.index_select(2, keys.flatten()).unflatten(2, keys.shape)
