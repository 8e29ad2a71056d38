"""Skew matrices: their exponential, the orthogonal map, and what a change of one does to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def block_size(pairs: int) -> int:
    """b of b(b-1)/2 pairs."""
    size = (1 + math.isqrt(1 + 8 * pairs)) // 2
    if size < 2 or size * (size - 1) // 2 != pairs:
        raise ValueError(f"generators have {pairs} pairs; expected b(b-1)/2 for a block size b ≥ 2")
    return size


def skew_matrix(angle: Tensor, size: int) -> Tensor:
    """[..., b(b-1)/2] -> [..., b, b], the entries above the diagonal and their negatives below."""
    above = torch.triu_indices(size, size, 1, device=angle.device)
    skew = angle.new_zeros(*angle.shape[:-1], size, size)
    skew[..., above[0], above[1]] = angle
    return skew - skew.mT


def exponential(skew: Tensor) -> Tensor:
    """exp(S) of skew matrices: S/2^k by Taylor's series of degree 8, squared k times.

    What is squared is exp(S) - I, E → 2E + E², so that rounding stays in proportion to S and small
    steps are as exact as they are small. k is such that the series ends below half an ulp of the
    type. Differentiable.

    Shapes: [..., b, b]. Units: radians.
    """
    largest = _largest(skew)
    reach = 0.5 if skew.dtype == torch.float32 else 0.05
    halvings = math.ceil(math.log2(largest / reach)) if largest > reach else 0
    s1 = skew * 0.5**halvings
    s2 = s1 @ s1
    s3 = s2 @ s1
    one = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    e = s2 * (1 / 40320) + s1 * (1 / 5040) + one * (1 / 720)
    e = s3 @ e + s2 * (1 / 120) + s1 * (1 / 24) + one * (1 / 6)
    e = s3 @ e + s2 * 0.5 + s1
    for _ in range(halvings):
        e = 2.0 * e + e @ e
    return e + one


def averaged(skew: Tensor, turn: Tensor) -> Tensor:
    """∫_0^1 e^{-uS} K e^{uS} du for skew K: how a turn K of exp(S) is a change of S.

    For loss(exp(S)) with the gradient K exp(S), K skew, this is the gradient to S. It is
    K - [S, K]/2! + [S, [S, K]]/3! - …, and [S, K] = SK - (SK)ᵀ takes one product. Large S are
    halved, and the average over twice the way is (J + e^{-S} J e^{S})/2.

    Shapes: skew and turn [..., b, b].
    """
    size = _largest(skew)
    halvings = math.ceil(math.log2(size / 2.0)) if size > 2.0 else 0
    tolerance = 2.0**-26 if skew.dtype == torch.float32 else 2.0**-55
    s, reach = skew * 0.5**halvings, 2.0 * size * 0.5**halvings
    total, term, left, order = turn, turn, 1.0, 1
    while left > tolerance:
        order += 1
        left *= reach / order
        product = s @ term
        term = (product.mT - product) / order
        total = total + term
    if halvings:
        step = exponential(s)
        for _ in range(halvings):
            total = 0.5 * (total + step.mT @ total @ step)
            step = step @ step
    return total


def _largest(skew: Tensor) -> float:
    """A bound on the angles of all of them: they come in pairs, so it is at most |S| / √2. Matrices
    that are not finite say nothing of how the others are to be computed."""
    norms = torch.linalg.matrix_norm(skew.detach()).nan_to_num(0.0, 0.0, 0.0)
    return norms.amax().item() / math.sqrt(2.0) if norms.numel() else 0.0
