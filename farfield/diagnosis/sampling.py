"""Which queries of a text are looked at, by a rule that a row of results can state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.evaluation.plan import position_buckets

RULES = ("all", "stratified")


@dataclass(frozen=True)
class Sampling:
    """All queries, or `count` of them stratified by how many tokens they see.

    The strata are `position_buckets`: two per octave, 1, 2, 3, 4, 5–6, 7–8, 9–12, …. Each gives as
    many queries as the next, or all it has; inside a stratum they are evenly spaced from a random
    offset that (seed, stratum) names, so that a stratum's mean is an unbiased estimate of it.

    Units: `count` in queries of each text. Raises: ValueError for an unknown rule, or a stratified
    sample without a count of at least 1.
    """

    rule: str = "stratified"
    count: int | None = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; expected one of {', '.join(RULES)}")
        if self.rule == "stratified" and (self.count is None or self.count < 1):
            raise ValueError(f"count is {self.count}; expected at least 1 query")

    @classmethod
    def everything(cls) -> Sampling:
        """Every query."""
        return cls("all", None)

    def rows(self, length: int) -> Tensor:
        """The sampled queries of a text of `length` tokens: indices from 0, rising.

        Shapes: -> int64 [at most count]. Raises: ValueError for a length below 1.
        """
        if length < 1:
            raise ValueError(f"length is {length}; expected at least 1 token")
        if self.rule == "all" or self.count is None or self.count >= length:
            return torch.arange(length)
        buckets = position_buckets(length)
        shares = _shares([high - low for low, high in buckets], self.count)
        chosen = [
            _evenly(low - 1, high - 1, share, self.seed + stratum)
            for stratum, ((low, high), share) in enumerate(zip(buckets, shares, strict=True))
        ]
        return torch.cat(chosen)


def _shares(sizes: list[int], count: int) -> list[int]:
    """How many of each size, `count` in all: equal shares, cut at the size, the rest handed on.

    The largest sizes come first where the count does not divide: they stand for the most queries.
    """
    shares, left = [0] * len(sizes), count
    order = sorted(range(len(sizes)), key=lambda index: (sizes[index], index))
    for done, index in enumerate(order):
        shares[index] = min(sizes[index], left // (len(sizes) - done))
        left -= shares[index]
    return shares


def _evenly(first: int, stop: int, count: int, seed: int) -> Tensor:
    """`count` different integers of [first, stop), evenly spaced from a random offset."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.rand(1, generator=generator, dtype=torch.float64)
    steps = torch.arange(count, dtype=torch.float64)
    size = stop - first
    return first + ((steps + offset) * size / max(1, count)).floor().long().clamp(max=size - 1)
