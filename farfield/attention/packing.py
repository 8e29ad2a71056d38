"""Packed documents: several in one row, none of which knows of the others.

Documents don't meet anywhere in attention: not in its softmax, and not in the frames, potentials
and convolutions that start anew with each. So a packed row is unpacked into a batch with a row for
each document, and packed again after attention. Every mechanism and engine then serves packed input
as it serves a batch, at the cost of plain causal attention over each document, and a document's
numbers can't depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the documents of a packed batch lie.

    Documents of similar length (within a factor of two) share a batch, filled up on the right with
    repetitions of their first token, which causality hides.

    Shapes: each of `documents` int64 [documents, longest], the flat index b·T + t of every token;
    `position` int64 [B, T], that of a token in its document; `place` int64 [B, T], where a token
    lies in the flattened documents, one after the other, and one beyond them for padding.
    """

    documents: tuple[Tensor, ...]
    position: Tensor
    place: Tensor

    @classmethod
    def of(cls, segments: Tensor, valid: Tensor | None = None) -> Packing:
        """The documents of segment ids: runs of equal ids in a row, padding left out.

        Shapes: segments int64 [B, T]; valid bool [B, T] or None.
        Raises: ValueError where an id comes back after another one.
        """
        batch, length = segments.shape
        flat = torch.arange(batch * length, device=segments.device).view(batch, length)
        starts = torch.ones_like(segments, dtype=torch.bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        run = starts.flatten().cumsum(0) - 1
        kept = flat.flatten() if valid is None else flat.flatten()[valid.flatten()]
        _, run, counts = run[kept].unique_consecutive(return_inverse=True, return_counts=True)
        first = counts.cumsum(0) - counts
        _check_runs(kept[first] // max(length, 1), segments.flatten()[kept[first]])
        position = torch.zeros(batch * length, dtype=torch.int64, device=segments.device)
        position[kept] = torch.arange(len(kept), device=kept.device) - first[run]
        place = torch.full_like(position, -1)
        documents, before = [], 0
        bucket = counts.double().log2().ceil()
        for size in bucket.unique(sorted=True):
            chosen = (bucket == size).nonzero().squeeze(-1)
            longest = int(counts[chosen].max())
            offset = torch.arange(longest, device=kept.device)
            inside = offset < counts[chosen, None]
            index = kept[first[chosen, None] + offset * inside]
            documents.append(index)
            where = before + torch.arange(index.numel(), device=kept.device).view_as(index)
            place[index[inside]] = where[inside]
            before += index.numel()
        place[place < 0] = before
        return cls(tuple(documents), position.view(batch, length), place.view(batch, length))

    def unpacked(self, x: Tensor) -> list[Tensor]:
        """Batches of documents [documents, longest, ...] of x [B, T, ...]."""
        flat = x.flatten(0, 1)
        return [flat[index] for index in self.documents]

    def packed(self, parts: list[Tensor]) -> Tensor:
        """What `unpacked` took apart: [B, T, D] of [documents, longest, D]; zeros at padding."""
        rows = [part.flatten(0, 1) for part in parts]
        return torch.cat((*rows, rows[0].new_zeros(1, rows[0].shape[-1])))[self.place]


def segments_of(
    cu_seqlens: Tensor, batch: int, length: int, segment_ids: Tensor | None = None
) -> Tensor:
    """Segment ids [1, T] of cumulative document lengths, as flattened batches give them.

    Shapes: cu_seqlens int [documents + 1], from 0 to T; a document may be empty.
    Raises: ValueError for more than one row, for boundaries that don't cover it in order, or where
    `segment_ids` is given as well and says otherwise.
    """
    bounds = cu_seqlens.to(torch.int64)
    if batch != 1:
        raise ValueError(f"cu_seqlens describe one flattened row, the input has {batch}")
    if bounds.dim() != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens is {bounds.tolist()}; expected bounds from 0 to {length}")
    if bool((bounds.diff() < 0).any()):
        raise ValueError(f"cu_seqlens is {bounds.tolist()}; expected bounds that don't decrease")
    index = torch.arange(len(bounds) - 1, device=bounds.device)
    segments = index.repeat_interleave(bounds.diff())[None]
    if segment_ids is not None:
        given, ours = (x[:, 1:] != x[:, :-1] for x in (segment_ids, segments))
        if not torch.equal(given.to(ours.device), ours):
            raise ValueError("segment_ids and cu_seqlens disagree on where documents begin")
    return segments


def _check_runs(row: Tensor, segment: Tensor) -> None:
    found, counts = torch.stack((row, segment)).unique(dim=1, return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(
            f"segment id {int(found[1][counts > 1][0])} comes back after another one; "
            "expected each document in one piece"
        )
