"""Softmax attention on PyTorch's scaled_dot_product_attention.

The kernel knows nothing of potentials, and takes a position bias only as a [query, key] matrix. The
engine therefore works in blocks of queries wherever the plain causal kernel does not apply, and
lets the potential ride as one more dimension of the head, centred on each block so that float32
differences between near keys stay exact however far the block lies from the start.

Serves: any device and floating type that the kernel serves; gradients to q, k and v, none to the
potential; grouped heads; memory linear in the number of keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.attention import logit

_MASK_ELEMENTS = 2**22
"""Largest [query, key] matrix a block may build, in elements."""

_BIAS_ELEMENTS = 2**18
"""Largest [head, query, key] bias worth building: the kernels' bias path is the slow one."""

_RIDING_QUERIES = 256
"""Most queries that share a centre where the potential rides: the float32 rounding of differences
grows with the distance from it."""

_PAD = 8
"""Head dimensions are padded to a multiple of this: the kernels are slower on odd ones."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j for the last T of K tokens, logits as in `logit`.

    Shapes: q [B, H, T, d], k [B, Hk, K, d], v [B, Hk, K, d_v] with Hk dividing H and T ≤ K;
    potential [B or 1, Hk or H, K] float64 or None; valid [B, K] bool or None. Returns
    [B, H, T, d_v].
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    grouped = q.shape[1] != k.shape[1]
    if potential is None and valid is None and (queries in (1, keys)):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=queries > 1, enable_gqa=grouped, scale=logit.scale(q.shape[-1])
        )
    if potential is not None:
        potential = _per_query_head(potential, q.shape[1])
        grouped_by = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(grouped_by, 1) if grouped else x for x in (k, v))
        grouped = False
    masks = 1 if valid is None else q.shape[0]
    block = max(1, min(queries, _MASK_ELEMENTS // (keys * masks)))
    if potential is not None and q.shape[1] * queries * keys > _BIAS_ELEMENTS:
        block = min(block, _RIDING_QUERIES)
    offset = keys - queries
    out = []
    for start in range(offset, keys, block):
        stop = min(start + block, keys)
        out.append(_block(q, k, v, potential, valid, start, stop, grouped))
    return out[0] if len(out) == 1 else torch.cat(out, -2)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Tensor | None,
    valid: Tensor | None,
    start: int,
    stop: int,
    grouped: bool,
) -> Tensor:
    """Attention of the queries at positions [start, stop) to the keys before `stop`."""
    offset = k.shape[-2] - q.shape[-2]
    q, k, v = q[..., start - offset : stop - offset, :], k[..., :stop, :], v[..., :stop, :]
    seen = logit.visible(start, stop, stop, valid, q.device)
    scale = logit.scale(q.shape[-1])
    if potential is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=grouped, scale=scale
        )
    if stop - start == 1 or q.shape[1] * (stop - start) * stop <= _BIAS_ELEMENTS:
        bias = potential[..., None, :stop] - potential[..., start:stop, None]
        exact = torch.promote_types(q.dtype, torch.float32)
        bias = bias.to(exact).masked_fill(~seen, float("-inf"))
        return _unrounded(q.to(exact), k.to(exact), v.to(exact), bias, scale).to(v.dtype)
    wide = _riding(q, k, v, potential[..., :stop] - potential[..., start, None], scale)
    out = _unrounded(*wide, seen, scale)
    return out[..., : v.shape[-1]].to(v.dtype)


def _unrounded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The kernel on q, k, v as they are: autocast would round the potential on its doorstep."""
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _riding(
    q: Tensor, k: Tensor, v: Tensor, potential: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with the centred potential as one more dimension, in float32 at least.

    (q, 1/scale) · (k, u) · scale = q·k·scale + u. A type with fewer bits would round u.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, _, dim = q.shape
    width = max(dim + 1, v.shape[-1])
    width += -width % _PAD
    u = potential.to(wide).expand(batch, heads, -1).unsqueeze(-1)
    one = torch.full_like(q[..., :1], 1.0 / scale, dtype=wide)
    q = F.pad(torch.cat((q.to(wide), one), -1), (0, width - dim - 1))
    k = F.pad(torch.cat((k.to(wide), u), -1), (0, width - dim - 1))
    return q, k, F.pad(v.to(wide), (0, width - v.shape[-1]))


def _per_query_head(potential: Tensor, heads: int) -> Tensor:
    """[B, Hk or H, K] → [B, H, K]: query head h reads key/value head h // (H / Hk)."""
    if potential.shape[1] == heads:
        return potential
    return potential.repeat_interleave(heads // potential.shape[1], 1)
