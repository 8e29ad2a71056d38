"""Near and far sets: which keys of a query row count as near, as far, as a sink.

The near set of row i is the visible keys with i − j < near_window, the query's own token counted;
the far set is the rest of what the row sees. Sinks are the first keys of a document, wherever the
query is; where a measure sets them apart they are taken out of the far set and never of the near.

Positions are counted within the document, from 0, so that no set crosses a boundary. Every function
works on a tile: the positions of some queries and of some keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def near_mask(query: Tensor, key: Tensor, near_window: int) -> Tensor:
    """0 ≤ i − j < near_window, for every query i and key j of a tile.

    Shapes: query [..., Q], key [..., K] integer positions -> bool [..., Q, K].
    Units: tokens. Raises: ValueError for a negative window (0 leaves no key near).
    """
    distance = route_length(query, key)
    return (distance >= 0) & (distance < _size("near_window", near_window))


def far_mask(query: Tensor, key: Tensor, near_window: int) -> Tensor:
    """i − j ≥ near_window: the causal keys that are not near.

    Shapes: query [..., Q], key [..., K] integer positions -> bool [..., Q, K].
    Units: tokens. Raises: ValueError for a negative window (0 leaves every key far).
    """
    return route_length(query, key) >= _size("near_window", near_window)


def sink_mask(key: Tensor, sinks: int) -> Tensor:
    """j < sinks: the first keys of the document.

    Shapes: key [..., K] integer positions -> bool [..., K].
    Raises: ValueError for a negative count.
    """
    return key < _size("sinks", sinks)


def partition(
    query: Tensor, key: Tensor, near_window: int, sinks: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(near, far, sink): three disjoint masks that cover every causal key of a tile.

    A sink that is near is near: the three say where attention goes, and each key goes once.

    Shapes: query [..., Q], key [..., K] integer positions -> three bool [..., Q, K].
    Raises: ValueError for a negative window or count.
    """
    far = far_mask(query, key, near_window)
    first = sink_mask(key, sinks).unsqueeze(-2)
    return near_mask(query, key, near_window), far & ~first, far & first


def route_length(query: Tensor, key: Tensor) -> Tensor:
    """i − j of every query i and key j of a tile; negative where the key comes later.

    Shapes: query [..., Q], key [..., K] integer positions -> [..., Q, K]. Units: tokens.
    """
    return query.unsqueeze(-1) - key.unsqueeze(-2)


def near_count(query: Tensor, near_window: int) -> Tensor:
    """min(i + 1, near_window): the near keys of row i when it sees all that came before it.

    Shapes: query [..., Q] integer positions -> [..., Q]. Raises: ValueError for a negative window.
    """
    return (query + 1).clamp(min=0, max=_size("near_window", near_window))


def far_count(query: Tensor, near_window: int, sinks: int = 0) -> Tensor:
    """max(0, i + 1 − near_window), less the sinks among them.

    Shapes: query [..., Q] integer positions -> [..., Q].
    Raises: ValueError for a negative window or count.
    """
    far = (query + 1 - _size("near_window", near_window)).clamp(min=0)
    return far - sink_count(query, near_window, sinks)


def sink_count(query: Tensor, near_window: int, sinks: int) -> Tensor:
    """min(sinks, max(0, i + 1 − near_window)): the sinks that row i sees from afar.

    Shapes: query [..., Q] integer positions -> [..., Q].
    Raises: ValueError for a negative window or count.
    """
    far = (query + 1 - _size("near_window", near_window)).clamp(min=0)
    return far.clamp(max=_size("sinks", sinks))


def distance_bucket(query: Tensor, key: Tensor, edges: Tensor) -> Tensor:
    """The number of edges at or below i − j: one pass over a tile serves a ladder of near windows.

    With edges w_1 < … < w_n, bucket 0 is near for every window, bucket n is far for every window,
    and the near set of w_k is buckets 0 … k − 1. Keys after the query are bucket −1.

    Shapes: query [..., Q], key [..., K], edges [n] rising -> int64 [..., Q, K].
    Units: tokens. Raises: ValueError unless the edges rise from 0 or above.
    """
    if edges.ndim != 1 or bool((edges < 0).any()) or bool((edges.diff() <= 0).any()):
        raise ValueError(f"edges are {edges.tolist()}; expected rising distances of at least 0")
    distance = route_length(query, key)
    bucket = torch.bucketize(distance, edges.to(distance.device), right=True)
    return torch.where(distance < 0, -1, bucket)


def _size(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}; expected a count of at least 0")
    return value
