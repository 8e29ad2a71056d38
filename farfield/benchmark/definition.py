"""Attention along steps I - β w wᵀ as T×T matrices: the definition that linear memory replaces.

    logit_ij = q_iᵀ H_i H_{i-1} ⋯ H_{j+1} k_j / √d,    H_t = I - β_t w_t w_tᵀ

With L = I + diag(β) stril(W Wᵀ), the product of the steps from j+1 to i is I - Wᵀ L⁻¹ diag(β) W,
rows and columns of the route alone, and L⁻¹ of a route is that part of the whole L⁻¹. So all
scores at once are

    S = Q Kᵀ - tril(Q Wᵀ) L⁻¹ diag(β) stril(W Kᵀ) ,   lower triangle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j, every T×T matrix in full; differentiable.

    Shapes: q, k, w [B, H, T, d], unit rows of w; v [B, H, T, d_v]; beta [B, H, T]. Returns
    [B, H, T, d_v]. Source: Yang et al., "PaTH Attention" (arXiv 2505.16381), §3.
    """
    tokens, dim = q.shape[-2:]
    strength = beta[..., None]
    system = torch.eye(tokens, dtype=q.dtype, device=q.device) + (strength * (w @ w.mT)).tril(-1)
    taken = torch.linalg.solve_triangular(
        system, (strength * (w @ k.mT)).tril(-1), upper=False, unitriangular=True
    )
    scores = (q @ k.mT - (q @ w.mT).tril() @ taken) / math.sqrt(dim)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v
