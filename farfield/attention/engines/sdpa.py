"""Softmax attention on PyTorch's scaled_dot_product_attention: the workhorse.

Where the plain causal kernel applies, it is called and nothing else. One query is one row of
logits, with the potential in its mask. Everything between goes through `blocks`.

Serves: everything a call can ask for, with gradients, on the CPU and on CUDA; the log-sum-exp on
the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.attention import logit
from farfield.attention.engines import blocks, kernel
from farfield.attention.logit import Visible


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j for the last T of K tokens, logits as in `logit`.

    Shapes: q [B, H, T, d], k [B, Hk, K, d], v [B, Hk, K, d_v] with Hk dividing H and T ≤ K;
    potential [B or 1, Hk or H, K] float64 or None. Returns [B, H, T, d_v].
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if queries == 1:
        return _one(q, k, v, potential, visible)
    same = v.shape[-1] == q.shape[-1]
    if potential is None and visible.plain and queries == keys and same:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped, scale=logit.scale(q.shape[-1])
        )
    return _blocks(q, k, v, potential, visible)[0]


def with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, potential: Tensor | None = None, visible: Visible
) -> tuple[Tensor, Tensor]:
    """The output, and log Σ_j exp(logit_ij) beside it, which carries no gradient.

    Shapes: as in `attend`; the log-sum-exp is [B, H, T], in float32 at least. Units: nats.
    Raises: ValueError off the CPU.
    """
    if not kernel.gives_lse(q.device):
        raise ValueError(f"sdpa gives no log-sum-exp on {q.device.type}; explicit does")
    if q.shape[-2] == 0:
        empty = q.new_zeros(q.shape[:-1], dtype=kernel.wide_dtype(q.dtype))
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), empty
    out, lse = _blocks(q, k, v, potential, visible)
    return out, lse.detach()


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible
) -> tuple[Tensor, Tensor]:
    return blocks.blocks(
        q, k, v, potential, visible.valid, visible.position, visible.window, visible.sinks
    )


def _one(q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible) -> Tensor:
    """One query: the heads that share keys are the rows of one product, nothing is repeated."""
    keys, groups = k.shape[-2], k.shape[1]
    rows = q.reshape(q.shape[0], groups, -1, q.shape[-1])
    bias = None
    if potential is not None:
        u = potential - potential[..., -1:]
        u = u.unsqueeze(2) if u.shape[1] == groups else u.unflatten(1, (groups, -1))
        bias = u.to(kernel.wide_dtype(q.dtype))
    first = 0
    if visible.window is not None and visible.position is None and visible.sinks == 0:
        first = max(0, keys - visible.window)
        k, v = k[..., first:, :], v[..., first:, :]
        bias = None if bias is None else bias[..., first:]
    if not visible.plain:
        mask = kernel.float_mask(visible.tile(keys - 1, keys, first, keys, q.device), q.dtype)
        bias = mask if bias is None else bias + mask
    return _rows(rows, k, v, bias).reshape(*q.shape[:-1], v.shape[-1])


def _rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel on q, k, v as they are: autocast would round the bias on its doorstep."""
    scale, dtype = logit.scale(q.shape[-1]), v.dtype
    if bias is not None and q.dtype != bias.dtype and q.device.type != "cpu":
        q, k, v = (x.to(bias.dtype) for x in (q, k, v))  # only the CPU takes a wider bias
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).to(dtype)
