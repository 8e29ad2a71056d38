"""The one line every engine implements.

    logit_ij = q_i · k_j / √d + (u_j - u_i)   if key j is visible to query i, else -∞

with q and k already pulled into the root frame, so that q_i · k_j is q_iᵀ P_{j→i} k_j, and u the
potential of explicit far-mass control. Key j is visible to query i when it is not later (j ≤ i)
and not padding. A query always sees itself, so that the rows of padding, which nobody reads, are
finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scale(head_dim: int) -> float:
    """1/√d."""
    return 1.0 / math.sqrt(head_dim)


def visible(start: int, stop: int, keys: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """Which of the first `keys` keys the queries at positions [start, stop) may see.

    Shapes: valid [B, ≥ keys] bool or None; returns [stop - start, keys], with [B, 1] before it
    where valid is given.
    """
    query = torch.arange(start, stop, device=device).unsqueeze(-1)
    key = torch.arange(keys, device=device)
    causal = key <= query
    if valid is None:
        return causal
    return (causal & valid[:, None, None, :keys]) | (key == query)
