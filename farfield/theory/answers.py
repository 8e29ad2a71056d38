"""Worked answers: one head's numbers put through the statements, as rows a table can show.

A head has B planes of one logit amplitude x, so that its content logits lie in [−λ, λ], λ = B x;
w near keys of content logit s, and far keys whose steps follow one law. Every row is a plain
dictionary, for tables and for programs alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farfield.algebra.rotation import rotary_frequencies
from farfield.theory import (
    checks,
    concentration,
    controls,
    laws,
    mass,
    predictor,
    series,
    steps,
    values,
)
from farfield.theory.checks import Floats

Row = dict[str, Any]
Law = laws.Rotations | laws.Maps
_SPELLINGS: dict[str, tuple[Callable[..., Law], int, str]] = {
    "normal": (lambda *p: laws.Normal(*p), 2, "normal:SIGMA[,MEAN]"),
    "uniform": (lambda *p: laws.Uniform(*p), 2, "uniform:HALF_WIDTH[,MEAN]"),
    "von_mises": (lambda *p: laws.VonMises(*p), 2, "von_mises:KAPPA[,MEAN]"),
    "two_point": (lambda *p: laws.TwoPoint(*p), 1, "two_point:ANGLE"),
    "sometimes": (lambda *p: laws.Sometimes(*p), 2, "sometimes:PROBABILITY,ANGLE"),
    "rope": (lambda d, *p: laws.Constant(_rope(d, *p)), 2, "rope:HEAD_DIM[,BASE]"),
    "reflection": (lambda d: laws.Householder(_whole(d)), 1, "reflection:HEAD_DIM"),
}


def law_of(text: str) -> Law:
    """A step law from its spelling, such as normal:0.4 or reflection:64.

    Raises: ValueError naming the spellings there are.
    """
    name, _, numbers = text.partition(":")
    if name not in _SPELLINGS:
        expected = ", ".join(spelling for _, _, spelling in _SPELLINGS.values())
        raise ValueError(f"law is {text!r}; expected one of {expected}")
    make, most, spelling = _SPELLINGS[name]
    try:
        parameters = [float(part) for part in numbers.split(",")]
        if not 1 <= len(parameters) <= most:
            raise ValueError
        return make(*parameters)
    except (TypeError, ValueError) as error:
        reason = f" ({error})" if " is " in str(error) else ""
        raise ValueError(f"law is {text!r}; expected {spelling}{reason}") from None


def _whole(head_dim: float) -> int:
    return int(checks.counts("head_dim", head_dim, least=2))


def _rope(head_dim: float, base: float = 10000.0) -> Floats:
    return rotary_frequencies(_whole(head_dim), base).double().numpy()


def harmonic_of(law: Law) -> Any:
    """c = E e^{iθ} of a law: of its planes [B], or one for all; ρ of a law of maps.

    Raises: ValueError for a law of maps other than uniform reflections.
    """
    if isinstance(law, laws.Householder):
        return steps.householder_rate(law.head_dim)
    if isinstance(law, laws.Maps):
        checks.refuse("law", law, "a law whose rate is known")
    return law.harmonic(1)


@dataclass(frozen=True)
class Head:
    """One head, and what it reads.

    law          of its steps; blocks B; amplitude x of each plane, in nats
    near_window  w; near_score s, in nats
    mean_power   |μ|², noise_power E|ξ|², near_power σ_S²: of values, in any one unit
    """

    law: Law
    blocks: int = 32
    amplitude: float = 0.25
    near_window: int = 32
    near_score: float = 4.0
    mean_power: float = 1.0
    noise_power: float = 1.0
    near_power: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.law, laws.Maps):
            checks.refuse("law", self.law, "a law of angles, which planes turn by")
        checks.counts("blocks", self.blocks, least=1)
        checks.positive("amplitude", self.amplitude)
        checks.counts("near_window", self.near_window, least=1)
        checks.reals("near_score", self.near_score)
        for name in ("mean_power", "noise_power", "near_power"):
            checks.nonnegative(name, getattr(self, name))
        assert self.harmonics.size == self.blocks
        if abs(self.near_score) > self.half_range:
            expected = f"at most blocks × amplitude = {self.half_range:g} either way"
            checks.refuse("near_score", self.near_score, expected)

    @property
    def amplitudes(self) -> Floats:
        """x_b [B]."""
        return np.full(self.blocks, float(self.amplitude))

    @property
    def half_range(self) -> float:
        """λ = B x: content logits lie in [−λ, λ]."""
        return self.blocks * float(self.amplitude)

    @property
    def harmonics(self) -> Any:
        """c_b [B]."""
        c = np.atleast_1d(harmonic_of(self.law))
        if c.size not in (1, self.blocks):
            checks.refuse("law", self.law, f"one law, or one for each of {self.blocks} planes")
        return np.broadcast_to(c, (self.blocks,))

    @property
    def ell(self) -> float:
        """ℓ of its independent far keys, in nats."""
        return float(mass.ell_blocks(self.amplitudes))

    @property
    def ell2(self) -> float:
        """log E e^{2s}, in nats."""
        return float(mass.ell_blocks(2 * self.amplitudes))

    def lse_near(self, slope: float = 0.0) -> float:
        """LSE_N = s + ln Σ_{n<w} e^{−mn}."""
        return self.near_score + float(series.log_geometric_sum(slope, self.near_window))

    def _means(self) -> tuple[Floats, Any]:
        """(|μ_b|², c_b), planes of one law taken together."""
        alike, count = np.unique(self.harmonics, return_counts=True)
        return self.mean_power * count / self.blocks, alike

    def predicted(self, lengths: Any, carried: bool, slope: float = 0.0) -> predictor.Prediction:
        """Far mass, powers and SNR at each length."""
        return predictor.predict(
            lengths, self.near_window, self.lse_near(slope), self.ell, self.ell2, *self._means(),
            self.noise_power, self.near_power, carried, slope,
        )  # fmt: skip

    def break_length(self, carried: bool, slope: float = 0.0) -> float:
        """The least number of far keys with SNR ≤ 1, in tokens; ∞ where it stays above."""
        found = predictor.snr_break_length(
            self.lse_near(slope), self.ell, self.ell2, *self._means(), self.noise_power,
            self.near_power, carried, slope, self.near_window,
        )  # fmt: skip
        return float(found)


def windows(law: Law, epsilons: Sequence[float]) -> list[Row]:
    """ρ, mixing window and preservation window of a law's fastest and slowest plane, and its head.

    A law of several planes (RoPE, or σ as an array) has a head of equal energies.
    Raises: ValueError for ε outside (0, 1).
    """
    rho = np.abs(np.atleast_1d(harmonic_of(law)))
    rho = np.where(rho > 1 - 1e-14, 1.0, rho)  # |e^{iω}| is 1 but for rounding
    rows: list[Row] = []
    for epsilon in epsilons:
        planes = {"plane": rho[0]} if rho.size == 1 else {
            "fastest plane": rho.min(), "slowest plane": rho.max()
        }  # fmt: skip
        for name, rate in planes.items():
            rows.append(
                {
                    "of": name,
                    "rho": float(rate),
                    "epsilon": epsilon,
                    "mixing_window": float(steps.mixing_window(rate, epsilon)),
                    "preservation_window": float(steps.preservation_window(rate, epsilon)),
                }
            )
        if rho.size > 1:
            window = float(steps.head_window(np.ones_like(rho), rho, epsilon))
            row = {"of": "head", "rho": None, "epsilon": epsilon, "mixing_window": window}
            rows.append(row | {"preservation_window": None})
    return rows


def breaks(head: Head, far_share: float = 0.5, delta: float = 0.05) -> list[Row]:
    """The number of far keys at which far mass reaches a share, by each argument, shortest first.

    Raises: ValueError for a share or δ outside (0, 1).
    """
    near, ell = head.lse_near(), head.ell
    dim = 2 * head.blocks
    energies = head.amplitudes * np.sqrt(dim)

    def threshold(M: Floats) -> Any:
        return concentration.block_threshold(M, delta, energies, dim, "uniform")

    sure = f"Chebyshev, {1 - delta:.0%} sure"
    early, late = mass.break_length_interval(
        near, ell, mass.e2_blocks(head.amplitudes), delta, far_share
    )
    union = mass.union_break_length(near, threshold, far_share)
    bounded = mass.global_break_length(head.near_window, head.half_range, far_share)
    rows = [
        ("union-safe", "until then no far logit passes its threshold", union),
        ("earliest", sure, early),
        ("typical", "M e^ℓ against Z_N", mass.typical_break_length(near, ell, far_share)),
        ("latest", sure, late),
        ("forced, decohered", "far logits average 0", mass.decohered_break_length(near, far_share)),
        ("forced, bounded", "logits lie within ±λ, nothing else", bounded),
    ]
    return [{"argument": name, "because": why, "far_keys": float(M)} for name, why, M in rows]


def snr_breaks(head: Head, slope: float) -> list[Row]:
    """The number of far keys at which near signal over far noise falls to 1, each way.

    Raises: ValueError for a negative slope.
    """
    ways = (
        ("signal lost, values left", "near signal over far noise, Q/K rotated", False, 0.0),
        ("signal lost, values carried", "the same, Q/K/V rotated", True, 0.0),
        ("signal lost, carried + ALiBi", f"the same under a slope of {slope:g}", True, slope),
    )
    return [
        {"argument": name, "because": why, "far_keys": head.break_length(carried, m)}
        for name, why, carried, m in ways
    ]


def bounds(
    head: Head,
    lengths: Sequence[int],
    delta: float = 0.05,
    slope: float = 0.0,
    mean_gate: float | None = None,
    window: int | None = None,
) -> list[Row]:
    """Far mass at each length: what is forced, what is typical, what cannot be passed.

    lower          T4, any logits within ±λ (ALiBi's own lower bound under a slope)
    decohered      T4″, independent steps, 1 − δ sure (no control)
    typical        T3 under the control
    upper          the union bound's, 1 − δ sure, or the control's, whichever is less
    Raises: ValueError for lengths not above near_window, or a control that is none.
    """
    w, lam, dim = head.near_window, head.half_range, 2 * head.blocks
    energies = head.amplitudes * np.sqrt(dim)
    rows = []
    for length in lengths:
        if length <= w:
            checks.refuse("lengths", length, f"more than near_window = {w}")
        seen = length if window is None else min(length, window)
        M = max(seen - w, 0)
        far = series.log_geometric_sum(slope, M) - slope * w
        tau = concentration.block_threshold(M, delta, energies, dim, "uniform")
        upper = [mass.far_mass(far + tau, head.lse_near(slope))]
        lower, most = controls.alibi_bounds(lam, slope, w, M)
        upper.append(most)
        if mean_gate is not None:
            upper.append(controls.gate_upper(lam, mean_gate, w))
            lower = 0.0  # gates may close
        plain = slope == 0 and mean_gate is None and M > 0
        rho = float(np.abs(head.harmonics).max())
        rows.append(
            {
                "length": length,
                "lower": float(lower),
                "decohered": float(
                    mass.far_mass_lower_decohered(M, head.lse_near(), lam, rho, delta)
                )
                if plain
                else None,
                "typical": float(mass.far_mass(far + head.ell, head.lse_near(slope)))
                if mean_gate is None
                else None,
                "upper": float(min(upper)),
                "threshold": float(tau),
            }
        )
    return rows


def value_rows(head: Head, far_keys: Sequence[int]) -> list[Row]:
    """Far power per |v|² at equal weights, values left alone and carried, and what caps the gain.

    floor is κ² |μ|²: what is left when far keys share a direction and softmax sees the phases that
    values are carried by. Raises: ValueError for counts below 1.
    """
    power = np.full(head.blocks, head.mean_power / head.blocks)
    floor = float((power * values.coupling_floor(head.amplitudes)).sum())
    rows = []
    for M in far_keys:
        keys = float(checks.counts("far_keys", M, least=1))
        form = np.asarray(values.uniform_form(head.harmonics, keys))
        noise = head.noise_power / keys
        rows.append(
            {
                "far_keys": int(keys),
                "left": head.mean_power + noise,
                "carried": float((power * form).sum()) + noise,
                "gain": float(values.head_gain(np.ones(head.blocks), head.harmonics, keys)),
                "floor": floor,
            }
        )
    return rows
