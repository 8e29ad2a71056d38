"""How vectors meet frames that several of them share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Pairing:
    """How leading axes of vectors meet those of frames: [..., T, d] <-> [N, R, T, d], where N
    counts the frames and R the vectors that share one."""

    def __init__(self, vectors: torch.Size, frames: torch.Size) -> None:
        self.lead = torch.broadcast_shapes(vectors, frames)
        padded = (1,) * (len(self.lead) - len(frames)) + tuple(frames)
        own = [axis for axis, size in enumerate(padded) if size == self.lead[axis] != 1]
        free = [axis for axis in range(len(self.lead)) if axis not in own]
        self.order = [*own, *free]
        self.inverse = [self.order.index(axis) for axis in range(len(self.order))]
        self.own = math.prod(self.lead[axis] for axis in own)
        self.free = math.prod(self.lead[axis] for axis in free)

    def split(self, x: Tensor) -> Tensor:
        """[..., T, d] -> [N, R, T, d]; a copy only where axes are out of order."""
        count = len(self.lead)
        x = x.expand(*self.lead, *x.shape[-2:]).permute(*self.order, count, count + 1)
        return x.reshape(self.own, self.free, *x.shape[-2:])

    def join(self, x: Tensor) -> Tensor:
        """[N, R, T, d] -> [..., T, d]."""
        count = len(self.lead)
        x = x.reshape(*(self.lead[axis] for axis in self.order), *x.shape[-2:])
        return x.permute(*self.inverse, count, count + 1)
