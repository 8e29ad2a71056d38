"""What carrying values along the route does to the far part of the output: T5 and its relatives.

F = Σ_j a_j P_{j→i} v_j with v_j = μ + ξ_j. Left alone, means add up: power (Σa)²|μ|². Carried, two
of them differ by the steps between, and only Σ a² times a correlation time is left. Weights are
given and independent of the phases unless a function says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import signal, special

from farfield.theory import checks
from farfield.theory.checks import Floats, Reals, plain
from farfield.theory.series import correlation_time, harmonic_count, lag_sum, power

_LAGS_AT_ONCE = 1 << 12  # bounds the memory of the coupled kernel, whatever the length
_MIXED = 1e-18  # a power of a harmonic below this is zero beside a kernel of order one


def _weights(weights: Reals) -> Floats:
    a = checks.nonnegative("weights", weights)
    checks.vector("weights", a)
    return a


def quadratic_form(weights: Reals, c: npt.ArrayLike) -> Floats | float:
    """Σ_{j,l} a_j a_l Re c^{|j−l|} in O(M): 2 Re Σ_l a_l z_l − Σ a², z_l = c z_{l−1} + a_l.

    Shapes: weights a [..., M] in order of position, c [B...] -> [..., B...]. Units: those of a².
    Raises: ValueError for negative weights, |c| > 1. Source: docs/theory.md, T5.
    """
    a, h = _weights(weights), checks.harmonics("c", c)
    own = (a**2).sum(axis=-1)
    forms = [
        2 * (a * signal.lfilter([1.0], [1.0, -each], a, axis=-1)).sum(axis=-1).real - own
        for each in h.ravel()
    ]
    return plain(np.stack(forms, axis=-1).reshape(a.shape[:-1] + h.shape))


def uniform_form(c: npt.ArrayLike, far_keys: Reals) -> Floats | float:
    """g_M(c) = M⁻²[M + 2 Re(Mc/(1 − c) − c(1 − c^M)/(1 − c)²)]: the form for a = 1/M.

    1 at c = 1, 1/M at c = 0; summed without cancellation at any c and M.

    Shapes: c and far_keys broadcast. Units: –. Raises: ValueError for |c| > 1, M < 1.
    Source: docs/theory.md, T5.
    """
    M = checks.counts("far_keys", far_keys, least=1)
    return plain(lag_sum(c, M) / M**2)


def uniform_gain(c: npt.ArrayLike, far_keys: Reals) -> Floats | float:
    """1/g_M(c): by how much carrying values shrinks the mean's power; ∞ where c^M sums to nothing.

    Shapes: broadcast. Units: –. Raises: ValueError for |c| > 1, M < 1. Source: docs/theory.md, T5.
    """
    with np.errstate(divide="ignore"):
        return plain(1 / np.maximum(np.asarray(uniform_form(c, far_keys)), 0.0))


def asymptotic_gain(c: npt.ArrayLike, far_keys: Reals) -> Floats | float:
    """M |1 − c|²/(1 − ρ²), i.e. M(1 − ρ)/(1 + ρ) without drift: the gain for M ≫ 1/(1 − ρ).

    An approximation, linear in M; drift makes it larger. 1 at c = 1.

    Shapes: broadcast. Units: –. Raises: ValueError for |c| > 1, M < 1. Source: docs/theory.md, T5.
    """
    h, M = checks.harmonics("c", c), checks.counts("far_keys", far_keys, least=1)
    size = np.minimum(np.abs(h), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = M * np.abs(1 - h) ** 2 / ((1 - size) * (1 + size))
    return plain(np.where(h == 1, 1.0, gain))


def head_gain(mean_power: Reals, c: npt.ArrayLike, far_keys: Reals) -> Floats | float:
    """|μ|²/Σ_b |μ_b|² g_M(c_b): the gain of a head. Blocks that hardly turn cap it.

    Shapes: mean_power |μ_b|² [..., B], c [..., B], far_keys [...] -> [...]. Units: –.
    Raises: ValueError for |c| > 1, M < 1, negative or vanishing power. Source: docs/theory.md, T5.
    """
    m2, h = checks.nonnegative("mean_power", mean_power), checks.harmonics("c", c)
    checks.matching(mean_power=m2, c=h)
    if (m2.sum(axis=-1) == 0).any():
        checks.refuse("mean_power", m2, "at least one block with power above 0")
    M = checks.counts("far_keys", far_keys, least=1)[..., None]
    return plain(m2.sum(axis=-1) / (m2 * uniform_form(h, M)).sum(axis=-1))


@dataclass(frozen=True)
class ValuePower:
    """E‖F‖² with values left alone and carried, its bound, and the gain of the means.

    Shapes: all [...], the leading axes of the weights. Units: those of |v|²; gain –.
    """

    left: Any
    carried: Any
    bound: Any
    gain: Any


def value_power(
    weights: Reals, mean_power: Reals, c: npt.ArrayLike, noise_power: Reals = 0.0
) -> ValuePower:
    """E‖F‖² for weights independent of the phases, v = μ + ξ, ξ independent of zero mean.

    left: (Σa)²|μ|² + Σa² E|ξ|². carried: Σ_b |μ_b|² Σ_{j,l} a_j a_l Re c_b^{|j−l|} + Σa² E|ξ|².
    bound: `value_power_bound` per block. gain: the ratio of the two mean parts. Exact for
    independent SO(2) steps, and with one block c = ρ for any with E M = ρI (uniform Householder).
    Fails where softmax sees the same phases (`coupled_power`) or the value the same token as its
    step (`content_coupled_power`).

    Shapes: weights [..., M], mean_power |μ_b|² [B], c [B], noise_power E|ξ|² [] -> [...].
    Units: those of |v|². Raises: ValueError for negative weights or powers, |c| > 1, differing
    numbers of blocks. Source: docs/theory.md, T5.
    """
    a, m2 = _weights(weights), checks.nonnegative("mean_power", mean_power)
    h, noise = checks.harmonics("c", c), checks.nonnegative("noise_power", noise_power)
    checks.matching(mean_power=m2, c=h)
    if m2.ndim != 1 or h.ndim != 1:
        checks.refuse("mean_power, c", f"shapes {m2.shape} and {h.shape}", "one number per block")
    own = (a**2).sum(axis=-1)
    together = a.sum(axis=-1) ** 2 * m2.sum()
    apart = (m2 * quadratic_form(a, h)).sum(axis=-1)
    size = np.minimum(np.abs(h), 1.0)
    bound = sum(value_power_bound(a, part, rho) for part, rho in zip(m2, size, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(together > 0, together / apart, 1.0)
    return ValuePower(
        left=plain(together + own * noise),
        carried=plain(apart + own * noise),
        bound=plain(bound + own * noise),
        gain=plain(gain),
    )


def value_power_bound(
    weights: Reals, mean_power: Reals, rho: Reals, noise_power: Reals = 0.0
) -> Floats | float:
    """E‖F‖² ≤ Σa² (1 + ρ)/(1 − ρ)|μ|² + Σa² E|ξ|² for any independent orthogonal steps.

    ‖E M‖ ≤ ρ; no commutativity: P_j and P_l differ by the steps between, which are orthogonal. The
    mean part is never above (Σa)²|μ|², which takes over at ρ → 1. Fails for a contraction.

    Shapes: weights [..., M], the rest broadcast with [...]. Units: those of |v|².
    Raises: ValueError for negative weights or powers, ρ outside [0, 1].
    Source: docs/theory.md, T5 and T5′.
    """
    a, m2 = _weights(weights), checks.nonnegative("mean_power", mean_power)
    own, whole = (a**2).sum(axis=-1), a.sum(axis=-1) ** 2
    time = np.where(own > 0, correlation_time(rho), 1.0)
    noise = checks.nonnegative("noise_power", noise_power)
    return plain(np.minimum(own * time, whole) * m2 + own * noise)


def value_power_dense(
    weights: Reals, mean_step: Reals, mean_value: Reals, noise_power: Reals = 0.0
) -> float:
    """E‖F‖² = Σ_{j,l} a_j a_l μᵀ(E M)^{|j−l|}μ + Σa² E|ξ|², exact for independent orthogonal steps.

    They need not commute. O(M d²): z_l = (E M) z_{l−1} + a_l μ.

    Shapes: weights [M], mean_step E M [d, d], mean_value μ [d]. Units: those of |v|².
    Raises: ValueError for negative weights or shapes that don't match. Source: docs/theory.md, T5′.
    """
    a, A = _weights(weights), checks.reals("mean_step", mean_step)
    mu, noise = (
        checks.reals("mean_value", mean_value),
        checks.nonnegative("noise_power", noise_power),
    )
    checks.square("mean_step", A)
    checks.matching(mean_step=A, mean_value=mu)
    z, form = np.zeros_like(mu), 0.0
    for weight in a:
        z = A @ z + weight * mu
        form += 2 * weight * float(mu @ z)
    own = float((a**2).sum())
    return form - own * float(mu @ mu) + own * float(noise)


def content_coupled_power(
    weights: Reals,
    c: npt.ArrayLike,
    mean_value: npt.ArrayLike,
    coupling: npt.ArrayLike,
    value_square: Reals,
) -> Floats | float:
    """E‖F‖² = Σa² E|v|² + 2 Re Σ_b κ_b μ_b Σ_{j<l} a_j a_l c_b^{l−j−1}, exact.

    For a value and a step made from one token, (v_l, θ_l) independent between tokens.
    κ_b = E[e^{iθ_b} v̄_b] over one token. The noise no longer drops out of the cross terms, and the
    exponent is one less. Without coupling κ_b = c_b μ̄_b and it is T5.

    Shapes: weights [..., M]; c, mean_value μ_b, coupling κ_b complex [B]; value_square E|v|² [].
    Units: those of |v|². Raises: ValueError for |c| > 1, negative weights, differing numbers of
    blocks. Source: docs/theory.md, T5 (content-coupled).
    """
    a, h = _weights(weights), checks.harmonics("c", c)
    mu, kappa = np.atleast_1d(np.asarray(mean_value)), np.atleast_1d(np.asarray(coupling))
    for name, array in (("mean_value", mu), ("coupling", kappa)):
        checks.reals(name, np.abs(array))
    checks.matching(c=h, mean_value=mu, coupling=kappa)
    cross: Any = 0.0
    for each, weight in zip(h, kappa * mu, strict=True):
        cross = cross + 2 * (weight * _shifted_form(a, each)).real
    square = checks.nonnegative("value_square", value_square)
    return plain((a**2).sum(axis=-1) * square + cross)


def _shifted_form(a: Floats, c: Any) -> npt.NDArray[Any]:
    """Σ_{j<l} a_j a_l c^{l−j−1}."""
    before = signal.lfilter([0.0, 1.0], [1.0, -c], a, axis=-1)
    return np.asarray((a * before).sum(axis=-1))


def content_coupled_bound(
    weights: Reals, rho: float, mean_norm: Reals, coupled_norm: Reals, value_square: Reals
) -> Floats | float:
    """E‖F‖² ≤ Σa² E|v|² + 2 Σ_{j<l} a_j a_l |E Mᵀv||μ| ρ^{l−j−1}, any independent orthogonal pairs.

    (M_l, v_l) are made from one token and independent between tokens.

    Shapes: weights [..., M], rho [], the rest broadcast with [...]. Units: those of |v|².
    Raises: ValueError for ρ outside [0, 1] or negative arguments.
    Source: docs/theory.md, T5 (content-coupled).
    """
    a, p = _weights(weights), float(checks.rates("rho", rho))
    size = checks.nonnegative("mean_norm", mean_norm)
    size = size * checks.nonnegative("coupled_norm", coupled_norm)
    square = checks.nonnegative("value_square", value_square)
    return plain((a**2).sum(axis=-1) * square + 2 * size * _shifted_form(a, p))


def covariance_bound(
    weights: Reals, mean_power: Reals, rho: Reals, noise_power: Reals
) -> Floats | float:
    """‖Cov F‖ ≤ max_b[|μ_b|²(1 + ρ_b)/(1 − ρ_b) + E|ξ_b|²] Σ a²: no direction stands out.

    Independent blocks, noise uncorrelated across blocks. ∞ where a block with ρ = 1 has a mean.

    Shapes: weights [..., M]; mean_power, rho, noise_power per block [B] -> [...].
    Units: those of |v|². Raises: ValueError for ρ outside [0, 1], negative arguments, differing
    numbers of blocks. Source: docs/theory.md, T5 (covariance).
    """
    a, m2 = _weights(weights), checks.nonnegative("mean_power", mean_power)
    p, noise = checks.rates("rho", rho), checks.nonnegative("noise_power", noise_power)
    checks.matching(mean_power=m2, rho=p, noise_power=noise)
    time = np.where(m2 > 0, correlation_time(p), 1.0)
    return plain((m2 * time + noise).max(axis=-1) * (a**2).sum(axis=-1))


def mean_output_bound(
    largest_weight: Reals, mean_norm: Reals, rho: Reals, near_window: Reals
) -> Floats | float:
    """|E F_b| ≤ |μ_b| max(a) ρ_b^w/(1 − ρ_b): the far part of the output forgets its mean.

    Shapes: broadcast. Units: those of |v|. Raises: ValueError for ρ outside [0, 1], negative
    arguments. ∞ at ρ = 1. Source: docs/theory.md, T5 (covariance).
    """
    size = checks.nonnegative("largest_weight", largest_weight)
    size = size * checks.nonnegative("mean_norm", mean_norm)
    p, w = checks.rates("rho", rho), checks.counts("near_window", near_window)
    with np.errstate(divide="ignore"):
        reach = power(p, w) / (1 - p)
    return plain(np.where(size == 0, 0.0, np.where(size == 0, 1.0, size) * reach))


def coupling_floor(x: Reals) -> Floats | float:
    """κ_b² = (I_1(x_b)/I_0(x_b))²: the power left, per |μ_b|²A², when softmax sees the same phases.

    Far keys that share a direction tilt the phases towards it, so the gain saturates at 1/κ². With
    a random key direction per key there is no floor.

    Shapes: x = |q_b||k_b|/√d [...] -> [...]. Units: –. Raises: ValueError for x < 0.
    Source: docs/theory.md, T5″.
    """
    blocks = checks.nonnegative("x", x)
    return plain((special.ive(1, blocks) / special.ive(0, blocks)) ** 2)


def _coupling_inputs(x: Reals, moments: npt.ArrayLike) -> tuple[Floats, npt.NDArray[Any]]:
    blocks, h = checks.nonnegative("x", x), checks.harmonics("moments", moments)
    checks.vector("moments", h, 2)
    checks.matching(x=blocks, moments=h)
    needed = harmonic_count(blocks, 1e-8)  # they enter squared
    if len(h) < needed:
        checks.refuse(
            "moments", f"{len(h)} harmonics", f"at least {needed} for x up to {blocks.max():g}"
        )
    return blocks, h


def coupling_kernel(lags: Reals, x: Reals, moments: npt.ArrayLike) -> Floats:
    """[Σ_m I_{m−1}² c_m^h]_b Π_{b'≠b} [Σ_m I_m² c_m^h]_{b'}, over Π I_0²: the tilted lag kernel.

    What c_b^h becomes when the weights are e^s of the same phases: its value at h → ∞ is κ_b², the
    floor. Sums run over all integers m, c_{−m} = c̄_m.

    Shapes: lags [N], x [B], moments c_m [H, B] for m = 1 … H -> [N, B]. Units: –.
    Raises: ValueError for too few harmonics (`harmonic_count`), |c| > 1, x < 0.
    Source: docs/theory.md, T5″.
    """
    h, (blocks, c) = checks.counts("lags", lags), _coupling_inputs(x, moments)
    checks.vector("lags", h)
    orders = np.arange(len(c) + 2)[:, None]
    ratio = (special.ive(orders, blocks) / special.ive(0, blocks)) ** 2
    turned = power(c, h[:, None, None]).real
    own = ratio[1] + ((ratio[:-2] + ratio[2:]) * turned).sum(axis=1)
    other = 1 + 2 * (ratio[1:-1] * turned).sum(axis=1)
    before = np.cumprod(np.hstack([np.ones((len(h), 1)), other[:, :-1]]), axis=1)
    after = np.cumprod(np.hstack([np.ones((len(h), 1)), other[:, :0:-1]]), axis=1)[:, ::-1]
    return np.asarray(own * before * after)


def coupled_power(far_keys: int, x: Reals, moments: npt.ArrayLike) -> Floats:
    """M⁻² Σ_{|h|<M} (M − |h|) kernel_b(h): E‖F_b‖² per |μ_b|²A², weights e^s of the same phases.

    Approximate: E‖Σ e^s P v‖²/(E Z)² stands for the mean of the ratio. The error shrinks with M
    (Z = Σ e^s must hardly fluctuate: M ≫ E2 times the mixing window). O(min(M, window)).

    Shapes: far_keys M, x [B], moments [H, B] -> [B]. Units: –.
    Raises: ValueError for M < 1, and as `coupling_kernel`. Source: docs/theory.md, T5″.
    """
    M = int(checks.counts("far_keys", far_keys, least=1))
    blocks, c = _coupling_inputs(x, moments)
    slowest = np.abs(c).max()
    until = M if slowest >= 1 else 1 + int(np.log(_MIXED) / np.log(max(slowest, 1e-300)))
    until = min(M, max(until, 1))
    total = M * coupling_kernel([0], blocks, c)[0]
    for start in range(1, until, _LAGS_AT_ONCE):
        h = np.arange(start, min(start + _LAGS_AT_ONCE, until))
        total = total + 2 * ((M - h)[:, None] * coupling_kernel(h, blocks, c)).sum(axis=0)
    mixed = (M - until + 1.0) * (M - until)  # 2 Σ_{h=until}^{M−1} (M − h)
    return np.asarray((total + mixed * coupling_floor(blocks)) / float(M) ** 2)
