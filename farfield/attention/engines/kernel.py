"""Softmax attention of one block of queries to one run of keys, with what merging blocks needs.

On the CPU PyTorch's flash kernel gives the log-sum-exp beside the output, and its backward takes
both. Elsewhere no kernel promises that for every type, and the backward writes the block out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

UNSEEN = -1e30
"""What a masked logit is. Finite, so that a row of a block that sees none of its keys has a
log-sum-exp that weighs nothing beside another's, and no 0 · ∞ arises."""

_PAD = 8
"""Head dimensions are padded to a multiple of this: the kernels are slower on odd ones."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 at least: what logits, masks and potentials are kept in."""
    return torch.promote_types(dtype, torch.float32)


def float_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, else `UNSEEN`, as [B or 1, 1, queries, keys]."""
    mask = torch.zeros(seen.shape, dtype=wide_dtype(dtype), device=seen.device)
    mask.masked_fill_(~seen, UNSEEN)
    return mask if mask.dim() == 4 else mask[None, None]


def padded(x: Tensor, width: int) -> Tensor:
    """x with zeros behind its last dimension, up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def riding_width(dim: int, value_dim: int) -> int:
    """The head dimension in which a potential rides, and values fit."""
    width = max(dim + 1, value_dim)
    return width + -width % _PAD


def gives_lse(device: torch.device) -> bool:
    """Whether the kernel says the log-sum-exp on this device."""
    return device.type == "cpu"


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """(out, log Σ exp) of softmax(scale · q kᵀ + mask) v; `causal` where the block is square.

    Shapes: q [B, H, T, d], k and v [B, Hk, K, d] with K ≥ 1, mask [B or 1, H or 1, T, K] in
    float32 at least; returns [B, H, T, d] and, where the kernel gives it, [B, H, T].
    """
    if gives_lse(q.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    dtype = q.dtype
    if mask is not None and mask.shape[1] > 1:  # a bias, which a narrow type would round
        q, k, v = (x.to(mask.dtype) for x in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out.to(dtype), None


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k, v of `attend`: with P = exp(logit - lse), dS = P ∘ (grad vᵀ - grad · out).

    Shapes: as in `attend`, `grad` and `out` like q.
    """
    if lse is not None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    weights = _logits(q, k, mask, causal, scale).softmax(-1).to(q.dtype)
    # The heads of a group are rows of one product, and their sum comes with it.
    folded = [x.unflatten(1, (k.shape[1], -1)).flatten(2, 3) for x in (weights, grad, q, out)]
    weights, grad, queries, out = folded
    share = grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    slope = weights * share * scale
    to_q = (slope @ k).unflatten(2, (-1, q.shape[2])).flatten(1, 2)
    return to_q, slope.transpose(-1, -2) @ queries, weights.transpose(-1, -2) @ grad


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.transpose(-1, -2)
    logits = rows.unflatten(2, (-1, q.shape[2])).flatten(1, 2).to(wide_dtype(q.dtype)) * scale
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, UNSEEN)
    return logits if mask is None else logits + mask
