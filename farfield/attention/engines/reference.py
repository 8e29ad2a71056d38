"""The definition as an engine: one dense matrix of logits, in float64.

It shares no code with the engines that it judges, visibility included: `farfield.algebra.reference`
has the same definition as loops over tokens.

Serves: everything a call can ask for, on any device with float64, with gradients; quadratic memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farfield.attention.logit import Visible, per_query_head


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, potential: Tensor | None = None, visible: Visible
) -> Tensor:
    """softmax(q kᵀ/√d + u_j - u_i, or -∞) v. Shapes: as in `Engine`."""
    return _dense(q, k, v, potential, visible)[0]


def with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, potential: Tensor | None = None, visible: Visible
) -> tuple[Tensor, Tensor]:
    """The output, and log Σ_j exp(logit_ij) [B, H, T] beside it, in float64."""
    return _dense(q, k, v, potential, visible)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible
) -> tuple[Tensor, Tensor]:
    heads, queries, dim = q.shape[1:]
    keys = k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        key, value = (per_query_head(x.double(), heads) for x in (k, v))
        table = torch.einsum("bhid,bhjd->bhij", q.double(), key) / math.sqrt(dim)
        if potential is not None:
            u = per_query_head(potential, heads)
            table = table + u[:, :, None, :] - u[:, :, keys - queries :, None]
        table = torch.where(_seen(visible, q.device), table, -math.inf)
        out = torch.einsum("bhij,bhjd->bhid", torch.softmax(table, -1), value)
    return out.to(v.dtype), torch.logsumexp(table, -1)


def _seen(visible: Visible, device: torch.device) -> Tensor:
    """[B or 1, 1, T, K]: not later, real, within the window or a sink; and each its own."""
    index = torch.arange(visible.keys, device=device)
    last = index[visible.keys - visible.queries :, None]
    seen = (last >= index)[None, None]
    if visible.window is not None:
        position = index[None] if visible.position is None else visible.position
        reach = position[:, visible.keys - visible.queries :, None] - position[:, None, :]
        recent, sink = reach < visible.window, position[:, None, :] < visible.sinks
        seen = seen & (recent | sink)[:, None]
    if visible.valid is not None:
        seen = seen & visible.valid[:, None, None, :]
    return seen | (last == index)
