"""The three sums that the statements are made of, safe where their textbook forms are not.

Written naively, (1 − ρ^n)/(1 − ρ) and its second-order relatives are 0/0 at ρ → 1 and lose all
digits near it, and Σ e^{−mn}ρ^{|h|} has a removable pole at ρ = e^{−m}. Here single sums go through
`expm1`, and double sums through a doubling recursion whose terms are all non-negative for real
ρ ≥ 0: nothing cancels, there is no threshold to choose, and a length of 10⁹ takes 30 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from farfield.theory import checks
from farfield.theory.checks import Floats, Reals, plain


def power(c: npt.NDArray[Any], n: Reals) -> npt.NDArray[Any]:
    """c^n elementwise for whole n, with 0⁰ = 1 and no warning where it underflows.

    Shapes: c and n broadcast. Source: definition; complex powers through n·log c.
    """
    exponent = np.asarray(n, dtype=np.float64)
    if not np.iscomplexobj(c):
        with np.errstate(under="ignore"):
            return np.power(c, exponent)
    nothing = c == 0
    with np.errstate(under="ignore"):
        value = np.exp(exponent * np.log(np.where(nothing, 1.0, c)))
    return np.where(nothing, np.where(exponent == 0, 1.0, 0.0), value)


def geometric_sum(ratio: npt.ArrayLike, count: Reals) -> Any:
    """Σ_{k<n} c^k = (1 − c^n)/(1 − c); n at c = 1, and 0 for no term.

    Shapes: ratio (real or complex, |c| ≤ 1) and count broadcast. Units: –.
    Raises: ValueError for |c| > 1, or a count that is negative or not whole.
    Source: docs/theory.md, Numerics.
    """
    c, n = np.broadcast_arrays(checks.harmonics("ratio", ratio), checks.counts("count", count))
    unity = c == 1
    nothing = (c == 0) | unity
    log_c = np.log(np.where(nothing, 0.5, c) + (0j if (c.real < 0).any() else 0.0))
    with np.errstate(under="ignore"):
        total = np.expm1(n * log_c) / np.expm1(log_c)
    total = np.where(unity, n, np.where(nothing, np.minimum(n, 1.0), total))
    return plain(total if np.iscomplexobj(c) else total.real)


def log_geometric_sum(slope: Reals, count: Reals) -> Any:
    """log Σ_{n<M} e^{−mn} = log(1 − e^{−mM}) − log(1 − e^{−m}); log M at m = 0, −∞ for no term.

    Shapes: slope m ≥ 0 and count M (∞ allowed) broadcast. Units: slope in nats per token.
    Raises: ValueError for a negative slope, or a count that is negative or not whole.
    Source: docs/theory.md, Numerics.
    """
    m = checks.nonnegative("slope", slope)
    M = checks.counts("count", count, infinite=True)
    m, M = np.broadcast_arrays(m, M)
    flat = m == 0
    steep = np.where(flat, 1.0, m)
    with np.errstate(divide="ignore", under="ignore"):
        falling = np.log(-np.expm1(-steep * M)) - np.log(-np.expm1(-steep))
        return plain(np.where(flat, np.log(M), falling))


def lag_sum(c: npt.ArrayLike, count: Reals, slope: Reals = 0.0) -> Any:
    """Σ_{j,l<M} e^{−m(j+l)} Re c^{|j−l|}, the quadratic form of T5 for weights e^{−mj}.

    At m = 0 it is M²·g_M(c). Doubling: with H(n) = Σ_{j<n} a^j c^{n−1−j}, G(n) = Σ_{j<n} (ac)^j,
    a = e^{−m}, the half-sum U(n) over j ≤ l < n obeys
    U(2n) = U(n)(1 + a^{2n}) + c·H(n)·a^n·G(n) and U(n+1) = U(n) + a^n·H(n+1); the form is
    2 Re U − Σ a^{2j}.

    Shapes: c (real or complex, |c| ≤ 1), count M and slope m broadcast. Units: slope in nats per
    token. Raises: ValueError for |c| > 1, a negative slope, a count negative or not whole.
    Source: docs/theory.md, Numerics (the closed forms of T5 and of the predictor).
    """
    c, M, m = np.broadcast_arrays(
        checks.harmonics("c", c), checks.counts("count", count), checks.nonnegative("slope", slope)
    )
    bits = M.astype(np.int64)
    n = np.zeros_like(m)
    half, mixed, product = np.zeros_like(c), np.zeros_like(c), np.zeros_like(c)
    diagonal = np.zeros_like(m)
    with np.errstate(under="ignore"):
        a = np.exp(-m)
        for bit in range(int(bits.max()).bit_length() - 1, -1, -1):
            a_n, c_n = np.exp(-m * n), power(c, n)
            half = half * (1 + a_n**2) + c * mixed * a_n * product
            mixed, product = mixed * (a_n + c_n), product * (1 + a_n * c_n)
            diagonal, n = diagonal * (1 + a_n**2), 2 * n
            a_n, c_n = np.exp(-m * n), power(c, n)
            more = ((bits >> bit) & 1).astype(bool)
            longer = a * mixed + c_n
            half = np.where(more, half + a_n * longer, half)
            mixed = np.where(more, longer, mixed)
            product = np.where(more, product + a_n * c_n, product)
            diagonal = np.where(more, diagonal + a_n**2, diagonal)
            n = n + more
    return plain(2 * half.real - diagonal)


def log_hyp0f1(b: Reals, z: Reals) -> Floats | float:
    """log ₀F₁(; b; z) for b > 0, z ≥ 0: log I_0(x) is b = 1, z = x²/4.

    The series has positive terms and is summed in log space, so nothing overflows (₀F₁ itself does
    at z ≈ 10⁵) and small values keep their digits; it takes about √z + √(√z) terms. Beyond √z = 200
    the exponentially scaled Bessel function takes over where it has not underflowed.

    Shapes: b and z broadcast. Units: nats. Raises: ValueError for b ≤ 0 or z < 0.
    Source: docs/theory.md, T3 (ℓ of a Haar step and of uniform blocks); SciPy's `ive`.
    """
    b, z = np.broadcast_arrays(checks.positive("b", b), checks.nonnegative("z", z))
    root = np.sqrt(z)
    with np.errstate(divide="ignore"):
        log_z = np.log(z)
        scaled = special.ive(b - 1, 2 * root)
        large = (root > 200) & (scaled > 0)
        bessel = special.gammaln(b) + (1 - b) * np.log(np.where(large, root, 1.0)) + 2 * root
        bessel = bessel + np.log(np.where(large, scaled, 1.0))
    log_z = np.where(large, -np.inf, log_z)
    log_term = np.zeros_like(root)
    tail = np.full_like(root, -np.inf)
    k = 0
    while True:
        k += 1
        log_term = log_term + log_z - np.log(k * (b + k - 1))
        tail = np.logaddexp(tail, log_term)
        falling = 2 * z <= k * (b + k - 1)
        if (large | (falling & (log_term < tail - 40)) | (log_term == -np.inf)).all():
            break
    return plain(np.where(large, bessel, np.logaddexp(0.0, tail)))


def correlation_time(rho: Reals, shared_token: bool = False) -> Floats | float:
    """(1 + ρ)/(1 − ρ) = Σ_h ρ^{|h|}, the most that Σ a_j a_l ρ^{|j−l|} can be per Σ a²; ∞ at ρ = 1.

    The maximum of the Poisson kernel, the symbol of the Toeplitz matrix ρ^{|j−l|}. With
    `shared_token` the exponent is |h| − 1 for h ≠ 0 (a vector and its step are made from one
    token), and the sum is (3 − ρ)/(1 − ρ).

    Shapes: rho [...] -> [...]. Units: tokens. Raises: ValueError for ρ outside [0, 1].
    Source: docs/theory.md, T5.
    """
    rates = checks.rates("rho", rho)
    with np.errstate(divide="ignore"):
        return plain((3 - rates if shared_token else 1 + rates) / (1 - rates))


def harmonic_count(x: Reals, tolerance: float = 1e-16) -> int:
    """The least H with I_{H+1}(x)/I_0(x) ≤ tolerance: how many harmonics a tilt e^{x cos Φ} needs.

    e^{x cos Φ} = I_0(x) + 2 Σ_m I_m(x) cos(mΦ), so that its mean after n steps asks for c_1 … c_H.

    Shapes: x of any shape -> one number for all. Units: –. Raises: ValueError for x < 0.
    Source: docs/theory.md, T5″ and T6; Jacobi–Anger.
    """
    largest = checks.nonnegative("x", x).max()
    enough = largest > 0 and int(np.ceil(40 + 10 * np.sqrt(largest)))
    orders = np.arange(2, 2 + max(int(enough), 1))
    ratios = special.ive(orders, largest) / special.ive(0, largest)
    return int(orders[np.argmax(ratios <= tolerance)]) - 1
