"""Near and far sets: which keys of a query row count as near, as far, as a sink.

The near set of row i is the visible keys with i − j < near_window, the query's own token counted;
the far set is the rest of what the row sees. Sinks are the first keys of a document, wherever the
query is: near to some, far from others.

Positions are counted within the document, from 0, so that no set crosses a boundary. Every function
works on a tile: the positions of some queries and of some keys.
"""

from __future__ import annotations

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


def route_length(query: Tensor, key: Tensor) -> Tensor:
    """i − j of every query i and key j of a tile; negative where the key comes later.

    Shapes: query [..., Q], key [..., K] integer positions -> [..., Q, K]. Units: tokens.
    """
    return query.unsqueeze(-1) - key.unsqueeze(-2)


def _size(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}; expected a count of at least 0")
    return value
