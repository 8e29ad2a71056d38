"""Near and far keys of every query of a chunk, summed up for a ladder of near windows in one pass.

Distances fall into classes [0, w_1), [w_1, w_2), …, [w_n, ∞). The last is read in tiles shared by
the queries; the others along the diagonal, where a class is a range of columns. The near set of w_k
is the first k classes merged, the far set the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from farfield.algebra.measures import LogitSums, ValueSums, logit_sums, value_sums
from farfield.algebra.sets import sink_mask
from farfield.diagnosis.tiles import Chunk, Tile

Sums = TypeVar("Sums", LogitSums, ValueSums)


@dataclass(frozen=True)
class KeySums:
    """One set of keys of each row: its logits, their content alone, its values, its biases' range.

    Shapes: [B, G, R, Q] each, values in the mean also [v].
    """

    logits: LogitSums
    content: LogitSums
    values: ValueSums
    bias_least: Tensor
    bias_largest: Tensor

    def merged(self, other: KeySums) -> KeySums:
        """The sums of the union of two disjoint sets."""
        logits = self.logits.merged(other.logits)
        bare = self.content is self.logits and other.content is other.logits
        return KeySums(
            logits,
            logits if bare else self.content.merged(other.content),
            self.values.merged(other.values),
            torch.minimum(self.bias_least, other.bias_least),
            torch.maximum(self.bias_largest, other.bias_largest),
        )


@dataclass(frozen=True)
class QuerySums:
    """Rows of attention summed up: `near` and `far` for each near window, and `all` keys.

    `first` are the first keys of the document, `first_far` those of them that are far.
    `sink_weight` is the weight on a learned sink: near, far and `all` share out the rest.
    """

    near: list[KeySums]
    far: list[KeySums]
    all: KeySums
    first: LogitSums
    first_far: list[LogitSums]
    sink_weight: Tensor


def query_sums(chunk: Chunk, windows: Sequence[int], first_tokens: int) -> QuerySums:
    """The sums of every query of a chunk, each [B, G, R, Q]. Units: nats; those of the values."""
    edges = [0, *windows]
    distant = _distant(chunk, windows[-1], first_tokens)
    diagonal = [_diagonal(part, edges, first_tokens) for part in chunk.near_parts(windows[-1])]
    classes = [_cat([part[n] for part in diagonal]) for n in range(len(windows))]
    classes.append(_nothing(classes[0]) if distant is None else distant)
    near, far = [], []
    for k in range(1, len(edges)):
        near.append(reduce(_merge, classes[:k]))
        far.append(reduce(_merge, classes[k:]))
    whole, first = _merge(near[0], far[0])
    return QuerySums(
        near=[sums for sums, _ in near],
        far=[sums for sums, _ in far],
        all=whole,
        first=first,
        first_far=[of_first for _, of_first in far],
        sink_weight=_sink_weight(chunk, whole.logits.lse),
    )


_Class = tuple[KeySums, LogitSums]
"""All keys of a class, and the first tokens among them."""


def _merge(one: _Class, other: _Class) -> _Class:
    return one[0].merged(other[0]), one[1].merged(other[1])


def _diagonal(part: Chunk, edges: Sequence[int], first_tokens: int) -> list[_Class]:
    """The classes of near distances; column c of the tile is distance edges[-1] − 1 − c."""
    tile, width = part.near(edges[-1]), edges[-1]
    return [
        _sums(_columns(tile, slice(width - high, width - low)), first_tokens)
        for low, high in pairwise(edges)
    ]


def _distant(chunk: Chunk, window: int, first_tokens: int) -> _Class | None:
    """The class of the farthest distances; None where no query has one."""
    total: _Class | None = None
    for tile in chunk.far(window):
        part = _sums(tile, first_tokens)
        total = part if total is None else _merge(total, part)
    return total


def _sums(tile: Tile, first_tokens: int) -> _Class:
    logits, seen = tile.logits, tile.seen
    all_ = logit_sums(logits, seen)
    content, least, largest = all_, torch.zeros_like(all_.lse), torch.zeros_like(all_.lse)
    if tile.bias is not None:
        content = logit_sums(tile.content, seen)
        least = torch.where(seen, tile.bias, torch.inf).amin(-1).double().expand_as(all_.lse)
        largest = torch.where(seen, tile.bias, -torch.inf).amax(-1).double().expand_as(all_.lse)
    else:
        least = torch.where(all_.count > 0, 0.0, torch.inf)
        largest = -least
    sums = KeySums(all_, content, _value_sums(tile, logits), least, largest)
    first = sink_mask(tile.key_position, first_tokens)
    columns = (first & seen).flatten(0, -2).any(0).nonzero().squeeze(-1)
    few = logits.index_select(-1, columns)
    shown = (first & seen).expand_as(seen | first).index_select(-1, columns)
    return sums, logit_sums(few, shown.expand_as(few))


def _value_sums(tile: Tile, logits: Tensor) -> ValueSums:
    """`value_sums`; where all queries share the values, their mean is one product of matrices."""
    if tile.values.shape[3] != 1:
        return value_sums(logits, tile.values, tile.seen, tile.norms)
    sums = value_sums(logits, tile.values[..., :0], tile.seen, tile.norms)
    shift = torch.where(sums.lse == -torch.inf, 0.0, sums.lse).to(logits).unsqueeze(-1)
    weights = torch.where(tile.seen, (logits - shift).exp(), 0.0)
    mean = weights.flatten(2, 3) @ tile.values[:, :, 0, 0].to(weights)
    return replace(sums, mean=mean.unflatten(2, logits.shape[2:4]).double())


def _columns(tile: Tile, part: slice) -> Tile:
    """Some keys of a tile."""
    return Tile(
        content=tile.content[..., part],
        bias=None if tile.bias is None else tile.bias[..., part],
        seen=tile.seen[..., part],
        distance=tile.distance[..., part],
        key_position=tile.key_position[..., part],
        values=tile.values[..., part, :],
        norms=tile.norms[..., part],
    )


def _nothing(like: _Class) -> _Class:
    """The sums of no key, for the same rows."""
    shape, device = like[0].logits.lse.shape, like[0].logits.lse.device
    none = torch.zeros(*shape, 0, device=device)
    empty = logit_sums(none, none.bool())
    width = like[0].values.mean.shape[-1]
    carried = value_sums(none, torch.zeros(0, width, device=device), none.bool())
    endless = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
    return KeySums(empty, empty, carried, endless, -endless), empty


def _cat(parts: list[_Class]) -> _Class:
    """Queries behind one another."""
    if len(parts) == 1:
        return parts[0]
    sums = [part[0] for part in parts]
    logits = _joined([part.logits for part in sums])
    bare = all(part.content is part.logits for part in sums)
    return (
        KeySums(
            logits,
            logits if bare else _joined([part.content for part in sums]),
            _joined([part.values for part in sums]),
            torch.cat([part.bias_least for part in sums], -1),
            torch.cat([part.bias_largest for part in sums], -1),
        ),
        _joined([part[1] for part in parts]),
    )


def _joined(parts: list[Sums]) -> Sums:
    """Queries behind one another, field by field; they are the fourth axis of each."""
    kept = {
        field.name: torch.cat([getattr(part, field.name) for part in parts], 3)
        for field in fields(parts[0])
    }
    return type(parts[0])(**kept)


def _sink_weight(chunk: Chunk, lse: Tensor) -> Tensor:
    if chunk.call.sink is None:
        return torch.zeros_like(lse)
    return torch.sigmoid(chunk.call.sink.double()[None, :, :, None] - lse)
