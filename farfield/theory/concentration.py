"""How far one far score strays, and the largest of M: T2a, T2a′, T2b and the union over keys.

Two ways to concentrate. On the whole sphere (a Haar transport, not reached by block-diagonal steps)
a coordinate has an exact law. In B planes the law is that of a sum over blocks, and it is block
independence that does the work: no mixing beyond the first moment is needed.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy import special

from farfield.theory import checks
from farfield.theory.checks import Floats, Reals, plain
from farfield.theory.series import power

HaarBound = Literal["exact", "closed", "levy"]
BlockBound = Literal["hoeffding", "uniform"]


def _one_of(name: str, got: str, kinds: Any) -> None:
    if got not in get_args(kinds):
        checks.refuse(name, got, f"one of {', '.join(get_args(kinds))}")


def haar_tail(t: Reals, head_dim: Reals, bound: HaarBound = "exact") -> Floats | float:
    """P(|X| ≥ t) of X = q·Pk/(|q||k|) for a Haar transport P of the sphere, d ≥ 2.

    exact: I_{1−t²}((d − 1)/2, ½); closed: ≤ (1 − t²)^{(d−1)/2}; levy: ≤ 2e^{−dt²/2}, not capped at
    1. Each is above the one before. SO(2) blocks never reach this law on SO(d): use `block_tail`.

    Shapes: t and head_dim broadcast. Units: t is a share of |q||k|.
    Raises: ValueError for t < 0, d < 2, an unknown bound. Source: docs/theory.md, T2a.
    """
    _one_of("bound", bound, HaarBound)
    x, d = checks.nonnegative("t", t), checks.counts("head_dim", head_dim, least=2)
    square = np.minimum(x * x, 1.0)
    if bound == "exact":
        return plain(special.betaincc(0.5, (d - 1) / 2, square))
    if bound == "closed":
        with np.errstate(divide="ignore"):
            return plain(np.exp((d - 1) / 2 * np.log1p(-square)))
    return plain(2 * np.exp(-d * x * x / 2))


def haar_threshold(
    far_keys: Reals,
    delta: Reals,
    head_dim: Reals,
    score_scale: Reals,
    bound: HaarBound = "exact",
) -> Floats | float:
    """τ with P(some |s_j| > τ) ≤ δ over M far keys, by the union bound: M·P(|X| ≥ τ/S) = δ.

    closed: τ = S√(1 − (δ/M)^{2/(d−1)}); levy: τ = S√(2 ln(2M/δ)/d). Keys may be dependent. Never
    above S; −∞ for no key.

    Shapes: broadcast. Units: S = |q||k|/√d (the largest over keys) and τ in nats.
    Raises: ValueError for M < 0, δ outside (0, 1), d < 2, S < 0, an unknown bound.
    Source: docs/theory.md, T2a.
    """
    _one_of("bound", bound, HaarBound)
    M, d = checks.counts("far_keys", far_keys), checks.counts("head_dim", head_dim, least=2)
    scale = checks.nonnegative("score_scale", score_scale)
    share = checks.fractions("delta", delta) / np.maximum(M, 1.0)
    if bound == "exact":
        square = special.betainccinv(0.5, (d - 1) / 2, share)
    elif bound == "closed":
        square = -np.expm1(2 / (d - 1) * np.log(share))
    else:
        square = np.minimum(2 * np.log(2 / share) / d, 1.0)
    return plain(np.where(M == 0, -np.inf, scale * np.sqrt(square)))


def householder_gamma2(head_dim: Reals) -> Floats | float:
    """γ₂ = |d − 2|/(d + 2) of a uniform Householder step, on traceless symmetric matrices.

    Shapes: [...] -> [...]. Units: per token. Raises: ValueError for d < 2.
    Source: docs/theory.md, T2a′.
    """
    d = checks.counts("head_dim", head_dim, least=2)
    return plain((d - 2) / (d + 2))


def empirical_gamma2(steps: Reals) -> float:
    """γ₂ = ‖K ↦ E[M K Mᵀ]‖ on traceless symmetric K, the mean taken over measured steps.

    A plug-in: noise adds about 2/√T. Memory d⁴.

    Shapes: steps [T, d, d] orthogonal. Units: per token.
    Raises: ValueError unless square, d ≥ 2. Source: docs/theory.md, T2a′.
    """
    M = checks.reals("steps", steps)
    checks.vector("steps", M, 3)
    checks.square("steps", M)
    T, d = M.shape[0], checks.counts("head_dim", M.shape[-1], least=2)
    n = int(d)
    flat = M.reshape(T, n * n)
    # (flatᵀ flat)[ij, kl] = Σ_t M_ij M_kl; the map sends K_jl to Σ_jl M_ij K_jl M_kl.
    mean = (flat.T @ flat / T).reshape(n, n, n, n).transpose(0, 2, 1, 3).reshape(n * n, n * n)
    rows, columns = np.triu_indices(n)
    basis = np.zeros((rows.size, n, n))
    basis[np.arange(rows.size), rows, columns] = np.where(rows == columns, 0.5, np.sqrt(0.5))
    symmetric = (basis + basis.transpose(0, 2, 1)).reshape(rows.size, n * n)
    trace = np.eye(n).ravel() / np.sqrt(n)
    traceless = symmetric - np.outer(symmetric @ trace, trace)
    return float(np.linalg.norm(traceless @ mean @ traceless.T, ord=2))


def score_square_bound(steps: Reals, head_dim: Reals, gamma2: Reals) -> Floats | float:
    """E X² ≤ 1/d + γ₂^n (1 − 1/d) after n independent steps, without Haar.

    An equality for uniform Householder steps and q ∥ k.

    Shapes: broadcast. Units: X = s·√d/(|q||k|). Raises: ValueError for negative steps, γ₂ outside
    [0, 1]. Source: docs/theory.md, T2a′.
    """
    d = checks.counts("head_dim", head_dim, least=2)
    left = power(checks.rates("gamma2", gamma2), checks.counts("steps", steps))
    return plain(1 / d + left * (1 - 1 / d))


def chebyshev_tail(t: Reals, steps: Reals, head_dim: Reals, gamma2: Reals) -> Floats | float:
    """P(|X| ≥ t) ≤ E X²/t² ≤ (1/d + γ₂^n (1 − 1/d))/t², at most 1.

    Shapes: broadcast. Units: t is a share of |q||k|. Raises: ValueError as `score_square_bound`, or
    t < 0. Source: docs/theory.md, T2a′.
    """
    x, square = checks.nonnegative("t", t), score_square_bound(steps, head_dim, gamma2)
    with np.errstate(divide="ignore"):
        return plain(np.minimum(square / x**2, 1.0))


def effective_blocks(energies: Reals) -> Floats | float:
    """B_eff = (Σ r_b)²/Σ r_b², between 1 (one block carries all) and B (all alike).

    Shapes: energies r_b = |q_b||k_b| [..., B] -> [...]. Units: blocks.
    Raises: ValueError for negative or vanishing energy. Source: docs/theory.md, T2b.
    """
    r = checks.nonnegative("energies", energies)
    checks.vector("energies", r)
    if (r.max(axis=-1) == 0).any():
        checks.refuse("energies", r, "at least one block with energy above 0")
    share = r / r.max(axis=-1, keepdims=True)
    return plain(share.sum(axis=-1) ** 2 / (share**2).sum(axis=-1))


def block_tail(t: Reals, energies: Reals, bound: BlockBound = "hoeffding") -> Floats | float:
    """P(|√d s − mean| ≥ t) ≤ 2 exp(−t²/(2Σr²)) for independent blocks, at any n; not capped at 1.

    uniform: 2 exp(−t²/Σr²), for phases that are uniform (mean 0), since I_0(y) ≤ e^{y²/4}. The mean
    is Re Σ z_b c_b^n, in modulus at most Σ r_b ρ_b^n. Fails for blocks that turn together: one
    scalar angle driving a head leaves `single_block_tail`.

    Shapes: t [...], energies [..., B] -> [...]. Units: t in those of r = |q_b||k_b|.
    Raises: ValueError for t < 0, negative or vanishing energy. Source: docs/theory.md, T2b.
    """
    _one_of("bound", bound, BlockBound)
    x, r = checks.nonnegative("t", t), checks.nonnegative("energies", energies)
    doubled = 2.0 if bound == "uniform" else 1.0
    largest = r.sum(axis=-1)
    with np.errstate(divide="ignore"):
        return plain(2 * np.exp(-doubled / 2 * effective_blocks(r) * (x / largest) ** 2))


def single_block_tail(share: Reals) -> Floats | float:
    """P(|cos Φ| ≥ x) = (2/π) arccos x: one block, or all of them turning together.

    Shapes: share x = |s|/s_max [...] -> [...]. Units: –. Raises: ValueError for x outside [0, 1].
    Source: docs/theory.md, T2b.
    """
    return plain(2 / np.pi * np.arccos(checks.rates("share", share)))


def block_threshold(
    far_keys: Reals,
    delta: Reals,
    energies: Reals,
    head_dim: Reals,
    bound: BlockBound = "hoeffding",
    rho: Reals = 0.0,
    near_window: Reals = 1,
) -> Floats | float:
    """τ = [Σ r_b ρ_b^w + √(2Σr² ln(2M/δ))]/√d: with probability 1 − δ no far |s_j| is above it.

    w is the least number of steps to a far key; ρ = 0 leaves the bias out. uniform: the spread is
    √(Σr² ln(2M/δ)), for uniform phases. r is the largest over keys, which
    may be dependent. −∞ for no key.

    Shapes: far_keys, delta [...], energies, rho [..., B] -> [...]. Units: nats for r in |q_b||k_b|.
    Raises: ValueError for M < 0, δ outside (0, 1), ρ outside [0, 1], negative or vanishing energy.
    Source: docs/theory.md, T2b (union).
    """
    _one_of("bound", bound, BlockBound)
    M, d = checks.counts("far_keys", far_keys), checks.counts("head_dim", head_dim, least=1)
    r, p = checks.nonnegative("energies", energies), checks.rates("rho", rho)
    checks.vector("energies", r)
    w = checks.counts("near_window", near_window)
    share = checks.fractions("delta", delta) / np.maximum(M, 1.0)
    bias = (r * power(p, w[..., None])).sum(axis=-1)
    factor = 1.0 if bound == "uniform" else 2.0
    spread = np.sqrt(factor * (r**2).sum(axis=-1) * np.log(2 / share))
    return plain(np.where(M == 0, -np.inf, (bias + spread) / np.sqrt(d)))


def cross_block_coherence(theta: Reals) -> npt.NDArray[np.float64]:
    """max(|mean e^{i(θ_b − θ_c)}|, |mean e^{i(θ_b + θ_c)}|): blocks that turn together, or against.

    T2b needs independent blocks; entries off the diagonal well above ρ_b ρ_c + 1.73/√T break it.

    Shapes: theta [T, B] -> [B, B]. Units: radians -> 0–1. Raises: ValueError for no angle or NaN.
    Source: docs/theory.md, T2b (fails).
    """
    angles = checks.reals("theta", theta)
    checks.vector("theta", angles, 2)
    turned = np.exp(1j * angles)
    apart = np.abs(turned.T @ turned.conj()) / len(angles)
    return np.maximum(apart, np.abs(turned.T @ turned) / len(angles))
