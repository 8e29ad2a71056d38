"""The one line every engine implements.

    logit_ij = c_i · q_i · k_j / √d + (u_j - u_i)   if key j is visible to query i, else -∞

with q and k already pulled into the root frame, so that q_i · k_j is q_iᵀ P_{j→i} k_j, c_i already
multiplied into q (1, or the scale of log-n), and u the potential of explicit far-mass control.
Which keys are visible is `Visible`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.algebra.sets import near_mask, sink_mask


def scale(head_dim: int) -> float:
    """1/√d."""
    return 1.0 / math.sqrt(head_dim)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """x for each of `heads` query heads, which share evenly what is there for fewer.

    Shapes: [B, Hk or H, ...] -> [B, H, ...].
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@dataclass(frozen=True)
class Visible:
    """Which keys each query may see: the queries are the last `queries` of `keys` tokens in order.

    Key j is visible to query i when it is not later (j ≤ i, by index), is real, and is inside the
    window (position_i - position_j < window, itself counted) or a sink (position_j < sinks). A
    query always sees itself, so that the rows of padding, which nobody reads, are finite.

    `position` says how many real tokens precede each key in its row, where that isn't its index:
    rows with padding, or a cache from whose middle keys were dropped. It must not decrease.
    Without a window nothing depends on it, and all keys may be seen, sinks or not.

    Shapes: valid bool [B, keys] (None: all real); position int64 [B or 1, keys] (None: the index).
    Units: `window` and `sinks` in tokens. Raises: ValueError for counts or shapes that do not fit.
    """

    queries: int
    keys: int
    valid: Tensor | None = None
    position: Tensor | None = None
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.queries <= self.keys:
            raise ValueError(
                f"{self.queries} queries of {self.keys} keys; the queries are the last of the keys"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; expected at least 1 (a token sees itself)")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; expected 0 or more")
        for name, given in (("valid", self.valid), ("position", self.position)):
            if given is not None and given.shape[-1] != self.keys:
                raise ValueError(
                    f"{name} has {given.shape[-1]} columns; expected one for each of {self.keys} "
                    "keys"
                )
        if self.valid is not None and self.valid.dtype != torch.bool:
            raise ValueError(f"valid is {self.valid.dtype}; expected bool")

    @property
    def plain(self) -> bool:
        """Whether causality alone decides."""
        if self.valid is not None:
            return False
        return self.window is None or (self.position is None and self.keys <= self.window)

    def tile(
        self, start: int, stop: int, first: int, last: int, device: torch.device | str
    ) -> Tensor:
        """Which of the keys [first, last) the queries at key indices [start, stop) see.

        Shapes: bool [stop - start, last - first], with [B or 1, 1] before it where `valid` or
        `position` decide.
        """
        query = torch.arange(start, stop, device=device).unsqueeze(-1)
        key = torch.arange(first, last, device=device)
        seen = key <= query
        if self.window is not None:
            at, of = query.squeeze(-1), key
            if self.position is not None:
                at, of = (self.position[:, None, a:b] for a, b in ((start, stop), (first, last)))
            kept = sink_mask(of, self.sinks).unsqueeze(-2)
            seen = seen & (near_mask(at, of, self.window) | kept)
        if self.valid is not None:
            seen = seen & self.valid[:, None, None, first:last]
        if self.valid is None and (self.window is None or self.position is None):
            return seen
        return seen | (key == query)

    def first_key(self, start: int) -> int:
        """The lowest index that a query at index `start` or later sees, sinks apart.

        Exact where position is the index; else no row sees a lower one.
        """
        if self.window is None:
            return 0
        if self.position is None:
            return max(0, start - self.window + 1)
        before = self.position <= self.position[:, start : start + 1] - self.window
        return int(before.sum(-1).amin())

    def sink_stop(self) -> int:
        """One past the highest index of a sink: 0 where there are none."""
        if self.sinks == 0:
            return 0
        if self.position is None:
            return min(self.sinks, self.keys)
        return int((self.position < self.sinks).sum(-1).amax())
