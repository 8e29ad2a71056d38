"""One step's law and what n independent steps make of it: T1, T1b and T1c.

A block turns by θ per token. Its m-th harmonic is c_m = E e^{imθ}; ρ = |c_1| is what the mean of a
transport shrinks by per token, 1 − ρ the spectral gap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from farfield.algebra.rotation import rotary_frequencies
from farfield.theory import checks
from farfield.theory.checks import Complexes, Floats, Reals, plain
from farfield.theory.search import least_count
from farfield.theory.series import power

DEFAULT_EPSILON = 0.1


def _turned(order: Floats, mean: Reals, size: Any) -> Any:
    return plain(size * np.exp(1j * order * checks.reals("mean", mean)))


def _order(order: Reals) -> Floats:
    return checks.counts("order", order, least=-(2**53))


def normal_harmonic(order: Reals, sigma: Reals, mean: Reals = 0.0) -> Complexes | complex:
    """E e^{imθ} = e^{imμ − m²σ²/2} of a normal angle.

    Shapes: order m, sigma, mean broadcast. Units: radians per token. Drift turns c, never |c|.
    Raises: ValueError for sigma < 0 or an order that is not whole. Source: docs/theory.md, T1.
    """
    m, s = _order(order), checks.nonnegative("sigma", sigma)
    return _turned(m, mean, np.exp(-0.5 * (m * s) ** 2))


def uniform_harmonic(order: Reals, half_width: Reals, mean: Reals = 0.0) -> Complexes | complex:
    """E e^{imθ} = e^{imμ} sin(ma)/(ma) of an angle uniform on [μ − a, μ + a]; ρ is its modulus.

    The real factor is negative for some ma > π: take the modulus before calling it a rate.

    Shapes: order m, half_width a, mean broadcast. Units: radians per token.
    Raises: ValueError for half_width < 0. Source: docs/theory.md, T1.
    """
    m, a = _order(order), checks.nonnegative("half_width", half_width)
    return _turned(m, mean, np.sinc(m * a / np.pi))


def von_mises_harmonic(order: Reals, kappa: Reals, mean: Reals = 0.0) -> Complexes | complex:
    """E e^{imθ} = e^{imμ} I_m(κ)/I_0(κ) of a von Mises angle.

    Shapes: order m, kappa κ ≥ 0, mean broadcast. Units: radians per token.
    Raises: ValueError for kappa < 0. Source: docs/theory.md, T1; SciPy's `ive`, safe at large κ.
    """
    m, k = _order(order), checks.nonnegative("kappa", kappa)
    return _turned(m, mean, special.ive(np.abs(m), k) / special.ive(0, k))


def bernoulli_harmonic(order: Reals, probability: Reals, angle: Reals) -> Complexes | complex:
    """E e^{imθ} = 1 − p + p e^{ima}: turn by a with probability p, else stand still.

    |c_1| = √(1 − 4p(1 − p) sin²(a/2)).

    Shapes: order m, probability p, angle a broadcast. Units: radians per token.
    Raises: ValueError for p outside [0, 1]. Source: docs/theory.md, T1.
    """
    m, p = _order(order), checks.rates("probability", probability)
    a = checks.reals("angle", angle)
    return plain(1 - p + p * np.exp(1j * m * a))


def two_point_harmonic(order: Reals, angle: Reals) -> Complexes | complex:
    """E e^{imθ} = cos(ma): turn by +a or −a with even odds.

    Shapes: order m and angle a broadcast. Units: radians per token.
    Raises: ValueError for an order that is not whole. Source: docs/theory.md, T1.
    """
    return plain(np.cos(_order(order) * checks.reals("angle", angle)) + 0j)


def householder_rate(head_dim: Reals) -> Floats | float:
    """ρ = 1 − 2/d: E M = (1 − 2/d) I of a reflection I − 2wwᵀ, w uniform on the sphere.

    Shapes: head_dim d ≥ 1. Units: per token. Raises: ValueError for d < 1.
    Fails: for w that prefers a direction ‖E M‖ differs; measure E wwᵀ. Source: docs/theory.md, T1.
    """
    return plain(np.abs(1 - 2 / checks.counts("head_dim", head_dim, least=1)))


def empirical_harmonic(theta: Reals, order: Reals = 1) -> Complexes | complex:
    """ĉ_m = mean_t e^{imθ_t} of measured angles. Biased: E|ĉ|² = ρ² + (1 − ρ²)/T.

    Shapes: theta [T, ...] in radians; the result is order.shape + theta.shape[1:].
    Raises: ValueError for no angle or NaN. Source: docs/theory.md, T1e.
    """
    angles, m = checks.reals("theta", theta), _order(order)
    checks.vector("theta", angles)
    rows = [np.exp(1j * each * angles).mean(axis=0) for each in m.ravel()]
    return plain(np.reshape(rows, m.shape + angles.shape[1:]))


def step_norms(mean_step: Reals) -> tuple[Any, Any]:
    """(operator norm, spectral radius) of E M.

    The norm is enough for decay; for independent, equally distributed steps E P_n = (E M)^n decays
    if and only if the spectral radius is below 1, and the norm may exceed it.

    Shapes: mean_step [..., d, d] -> two [...]. Units: per token.
    Raises: ValueError unless square and finite. Source: docs/theory.md, T1.
    """
    matrix = checks.reals("mean_step", mean_step)
    checks.square("mean_step", matrix)
    norm = np.linalg.norm(matrix, ord=2, axis=(-2, -1))
    return plain(norm), plain(np.abs(np.linalg.eigvals(matrix)).max(axis=-1))


def mean_score_bound(
    score_scale: Reals, rho: Reals, steps: Reals, shared_token: bool = False
) -> Floats | float:
    """|E s| ≤ S ρ^n over n independent steps with ‖E M‖ ≤ ρ; ρ^{n−1} where q shares a token.

    If q_i and M_i are both made from token i, condition on it: one step is no longer averaged.
    S = 1 gives the bound on ‖E P‖. Fails for dependent steps (`perturbed_bound`,
    `two_sided_bound`); says nothing about |s| itself, whose size may never shrink.

    Shapes: all broadcast. Units: S = |q||k|/√d in nats; steps in tokens.
    Raises: ValueError for ρ outside [0, 1], S < 0, negative steps. Source: docs/theory.md, T1.
    """
    n = checks.counts("steps", steps)
    exponent = np.maximum(n - 1, 0) if shared_token else n
    scale = checks.nonnegative("score_scale", score_scale)
    return plain(scale * power(checks.rates("rho", rho), exponent))


def mixing_window(rho: Reals, epsilon: Reals = DEFAULT_EPSILON) -> Floats | float:
    """w(ε) = ⌈ln(1/ε)/ln(1/ρ)⌉, the least n with ρ^n ≤ ε; 1 at ρ = 0, ∞ at ρ = 1.

    Shapes: rho [B...] and epsilon broadcast. Units: tokens. Fails for dependent steps: a marginal
    gap is not enough, measure the lag curve.
    Raises: ValueError for ρ outside [0, 1] or ε outside (0, 1). Source: docs/theory.md, T1.
    """
    rates, e = checks.rates("rho", rho), checks.fractions("epsilon", epsilon)
    with np.errstate(divide="ignore"):
        exact = np.log(e) / np.log(np.where(rates == 1, 0.5, rates))
    # Both logarithms are right to one unit in the last place; their quotient may be off by a few.
    least = np.maximum(np.ceil(exact * (1 - 4 * np.finfo(float).eps)), 1.0)
    return plain(np.where(rates == 1, np.inf, least))


def head_window(energies: Reals, rho: Reals, epsilon: Reals = DEFAULT_EPSILON) -> Floats | float:
    """The least n with Σ_b r_b ρ_b^n ≤ ε Σ_b r_b: the mean score bound of a whole head.

    Never above max_b w_b, which is the worst head of those block rates; slow blocks dominate. ∞
    where blocks with ρ = 1 carry more than ε of the energy.

    Shapes: energies r [..., B], rho [..., B], epsilon [...] -> [...]. Units: r = |q_b||k_b|, any;
    result in tokens. Raises: ValueError for negative or vanishing energy, ρ outside [0, 1], ε
    outside (0, 1), differing numbers of blocks. Source: docs/theory.md, T1.
    """
    r, p = checks.nonnegative("energies", energies), checks.rates("rho", rho)
    e = checks.fractions("epsilon", epsilon)
    checks.matching(energies=r, rho=p)
    total = r.sum(axis=-1)
    if (total == 0).any():
        checks.refuse("energies", r, "at least one block with energy above 0")

    def enough(n: Floats) -> npt.NDArray[np.bool_]:
        left = (r * power(p, n[..., None])).sum(axis=-1)
        return np.asarray(left <= e * total * (1 + 4 * np.finfo(float).eps))

    shape = np.broadcast_shapes(np.broadcast_shapes(r.shape, p.shape)[:-1], e.shape)
    # Blocks that never turn keep their energy, however far the others' underflows.
    stuck = ((p == 1) * r).sum(axis=-1) >= e * total
    only_fixed = ((p > 0) & (p < 1) & (r > 0)).sum(axis=-1) == 0
    least = least_count(lambda n: enough(n) & ~(stuck & ~only_fixed), shape)
    return plain(least)


def preservation_window(rho: Reals, eta: Reals = DEFAULT_EPSILON) -> Floats | float:
    """⌊ln(1/(1 − η))/ln(1/ρ)⌋: with no drift, the last n with ρ^n ≥ 1 − η; ∞ at ρ = 1.

    Shapes: rho and eta broadcast. Units: tokens. Fails with drift, which turns even where it does
    not shrink. Raises: ValueError for ρ outside [0, 1] or η outside (0, 1).
    Source: docs/theory.md, T1b.
    """
    rates, loss = checks.rates("rho", rho), checks.fractions("eta", eta)
    with np.errstate(divide="ignore"):
        exact = np.log1p(-loss) / np.log(np.where(rates == 1, 0.5, rates))
    return plain(np.where(rates == 1, np.inf, np.floor(exact * (1 + 4 * np.finfo(float).eps))))


def unsettled_factor(epsilon: Reals = DEFAULT_EPSILON, eta: Reals = DEFAULT_EPSILON) -> Any:
    """ln(1/ε)/ln(1/(1 − η)): how many times longer mixing takes than preservation lasts.

    Between the two a route is neither near nor far, whatever ρ is: a factor 21.9 at ε = η = 0.1.

    Shapes: broadcast. Units: –. Raises: ValueError for ε or η outside (0, 1).
    Source: docs/theory.md, T1b.
    """
    e, loss = checks.fractions("epsilon", epsilon), checks.fractions("eta", eta)
    return plain(np.log(e) / np.log1p(-loss))


def near_displacement(block_energy: Reals, c: npt.ArrayLike, steps: Reals) -> Floats | float:
    """E‖P_n x − x‖² = 2 Σ_b |x_b|² (1 − Re c_b^n), exact for independent SO(2) steps.

    Shapes: block_energy |x_b|² [..., B], c = E e^{iθ_b} [..., B], steps [N...] -> [N..., ...].
    Units: those of |x|². Raises: ValueError for |c| > 1, negative energy or steps, differing
    numbers of blocks. Source: docs/theory.md, T1b.
    """
    energy, h = checks.nonnegative("block_energy", block_energy), checks.harmonics("c", c)
    n = checks.counts("steps", steps)
    checks.matching(block_energy=energy, c=h)
    n = n.reshape(n.shape + (1,) * np.broadcast(energy, h).ndim)
    nothing = h == 0
    with np.errstate(under="ignore"):  # 1 − c^n through expm1: exact digits while c^n is near 1
        moved = -np.expm1(n * np.log(np.where(nothing, 1.0, h) + 0j)).real
    moved = np.where(nothing, np.minimum(n, 1.0), moved)
    return plain(2 * (energy * moved).sum(axis=-1))


def near_change_bound(score_scale: Reals, step_distances: Reals) -> Floats | float:
    """|q·P k − q·k| ≤ |q||k| Σ_t ‖M_t − I‖, on every path.

    A rotation by θ has ‖M − I‖ = 2|sin(θ/2)|. An extra small-step assumption makes it small: it is
    false that near routes stay near the identity whatever the angles.

    Shapes: score_scale [...], step_distances [..., n] -> [...]. Units: those of |q||k|.
    Raises: ValueError for negative numbers. Source: docs/theory.md, T1b.
    """
    distances = checks.nonnegative("step_distances", step_distances)
    checks.vector("step_distances", distances)
    return plain(checks.nonnegative("score_scale", score_scale) * distances.sum(axis=-1))


def total_variation_bounds(moduli: Reals, steps: Reals, omitted: Reals = 0.0) -> tuple[Any, Any]:
    """½ max_m |c_m|^n ≤ TV(Φ_n, uniform) ≤ ½ √(2 Σ_{m≥1} |c_m|^{2n}), independent steps.

    Lower: the test function cos(mΦ + phase). Upper: Cauchy–Schwarz and Parseval; it is ∞ (here 1)
    for laws with atoms. The upper bound needs every harmonic: `omitted` bounds Σ_{m>H} |c_m|^{2n}.

    Shapes: moduli |c_m| [..., H] for m = 1 … H; steps [...] -> two [...]. Units: –.
    Raises: ValueError for |c_m| outside [0, 1], negative steps or omitted.
    Source: docs/theory.md, T1c.
    """
    size, n = checks.rates("moduli", moduli), checks.counts("steps", steps)
    checks.vector("moduli", size)
    left = power(size, n[..., None])
    rest = checks.nonnegative("omitted", omitted)
    upper = 0.5 * np.sqrt(2 * ((left**2).sum(axis=-1) + rest))
    return plain(0.5 * left.max(axis=-1)), plain(np.minimum(upper, 1.0))


def score_moments(
    z: npt.ArrayLike, c1: npt.ArrayLike, c2: npt.ArrayLike, steps: Reals, head_dim: Reals
) -> tuple[Any, Any]:
    """(E s, E s²) of s = Re Σ_b z_b e^{iΦ_b}/√d, blocks independent, steps independent: exact.

    √d E s = Re Σ z_b c_b^n, and
    d E s² = ½ Re Σ_{b,c} [z_b z_c E e^{i(Φ_b+Φ_c)} + z_b z̄_c E e^{i(Φ_b−Φ_c)}]:
    the second moment needs the harmonic m = 2, and the first does not tell it.

    Shapes: z = r e^{iψ} [..., B], c1, c2 [..., B], steps [...] -> two [...]. Units: nats.
    Raises: ValueError for |c| > 1, differing numbers of blocks. Source: docs/theory.md, T1c.
    """
    vectors = np.asarray(z, dtype=np.complex128)
    checks.reals("z", np.abs(vectors))
    first, second = checks.harmonics("c1", c1), checks.harmonics("c2", c2)
    checks.matching(z=vectors, c1=first, c2=second)
    n, d = checks.counts("steps", steps), checks.counts("head_dim", head_dim, least=1)
    means = vectors * power(first, n[..., None])
    total = means.sum(axis=-1)
    same = (vectors**2 * power(second, n[..., None]) - means**2).sum(axis=-1)
    spread = (np.abs(vectors) ** 2 - np.abs(means) ** 2).sum(axis=-1)
    square = 0.5 * ((total**2 + same).real + np.abs(total) ** 2 + spread)
    return plain(total.real / np.sqrt(d)), plain(square / d)


def score_square_mean(
    z: npt.ArrayLike, sum_means: npt.ArrayLike, difference_means: npt.ArrayLike, head_dim: Reals
) -> float:
    """E s² = (1/2d) Re Σ_{b,c} [z_b z_c E e^{i(Φ_b+Φ_c)} + z_b z̄_c E e^{i(Φ_b−Φ_c)}], any phases.

    For blocks that depend on each other; `score_moments` is the independent case.

    Shapes: z [B], sum_means E e^{i(Φ_b+Φ_c)} and difference_means E e^{i(Φ_b−Φ_c)} [B, B].
    Units: nats². Raises: ValueError for |mean| > 1, shapes that don't match.
    Source: docs/theory.md, T1c.
    """
    vectors = np.asarray(z, dtype=np.complex128)
    checks.reals("z", np.abs(vectors))
    total = checks.harmonics("sum_means", sum_means)
    apart = checks.harmonics("difference_means", difference_means)
    for name, matrix in (("sum_means", total), ("difference_means", apart)):
        checks.square(name, matrix)
    checks.matching(z=vectors, sum_means=total, difference_means=apart)
    d = float(checks.counts("head_dim", head_dim, least=1))
    form = vectors @ total @ vectors + vectors @ apart @ vectors.conj()
    return float(form.real) / (2 * d)


def rope_mean_cosine(steps: Reals, head_dim: int, base: float = 10000.0) -> Floats | float:
    """mean_b cos(ω_b n), ω_b = base^{−2b/d}: RoPE's score of equal blocks at distance n.

    Every harmonic has modulus 1, so ρ = 1 and no window is long enough: the mean over blocks falls
    and returns, quasi-periodic, without a limit.

    Shapes: steps [...] -> [...]. Units: tokens. Raises: ValueError for an odd head dimension or
    negative steps. Source: docs/theory.md, T1c; Su et al. (arXiv 2104.09864) for ω_b.
    """
    n = checks.counts("steps", steps)
    frequencies = rotary_frequencies(head_dim, base).numpy()
    return plain(np.cos(n[..., None] * frequencies).mean(axis=-1))
