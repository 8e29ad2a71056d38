"""What is measured of steps, defined once: harmonics, lag curves, mixing windows, coupled blocks.

Every function takes one sequence or a batch of them and never pools across sequences: drift that
differs from document to document would look like decorrelation.

Shape letters: `...` sequences and heads; T tokens; B planes (blocks) of a head; d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farfield.algebra.turns import to_radians

VISIBLE = 3.0**0.5
"""|R| above this many √floor is more than noise: P(|R|² > 3/T) = e^{−3} ≈ 0.05 at R = 0."""


def unit(phase: Tensor) -> Tensor:
    """e^{iφ}. Shapes: any; radians (floating) or turns (int64) -> complex128."""
    angle = to_radians(phase) if phase.dtype == torch.int64 else phase.double()
    return torch.polar(torch.ones_like(angle), angle)


def step_harmonics(theta: Tensor, orders: Sequence[int] = (1,)) -> Tensor:
    """ĉ_m = (1/T) Σ_t e^{imθ_t}; |ĉ_1| estimates ρ, with E|ĉ|² = ρ² + (1 − ρ²)/T.

    Shapes: theta [..., T, B] radians or turns, orders of length M -> complex [..., M, B].
    Raises: ValueError without a step.
    """
    _some("theta", theta, 1)
    turn = unit(theta)
    return torch.stack([(turn**order).mean(-2) for order in orders], dim=-2)


def lag_curve(phase: Tensor, lags: Sequence[int]) -> Tensor:
    """R_n = mean_t e^{i(Φ_{t+n} − Φ_t)} over the N = T − n windows of a sequence.

    Shapes: cumulative phase [..., T, B] radians or turns -> complex [..., len(lags), B].
    Units: lags in tokens. |R_n| is what is left of a score's mean after n steps; average |R_n|²
    less its floor over sequences, never R_n itself.
    Raises: ValueError for a lag below 0 or not below T.
    """
    turn = unit(phase)
    return torch.stack([_lagged(turn, lag) for lag in _lags(lags, phase.shape[-2])], dim=-2)


def _lagged(turn: Tensor, lag: int) -> Tensor:
    ahead = turn[..., lag:, :]
    return (ahead * turn[..., : ahead.shape[-2], :].conj()).mean(-2)


def lag_floor(rho: Tensor, lags: Sequence[int], tokens: int) -> Tensor:
    """E|R_n|² − ρ^{2n} = N⁻² Σ_{|h|<min(n,N)} (N − |h|)(ρ^{2|h|} − ρ^{2n}), exact for independent
    steps: what noise adds to |R_n|², overlapping windows and all.

    For large n it tends to 1/T_eff, T_eff = N(1 − ρ²)/(1 + ρ²).

    Shapes: rho [..., B] in [0, 1] -> [..., len(lags), B]. Raises: as `lag_curve`.
    """
    lags = _lags(lags, tokens)
    square = rho.double().square()
    span = torch.arange(max(1, max(min(n, tokens - n) for n in lags)), dtype=torch.float64)
    power = square.unsqueeze(-1) ** span.to(square.device)
    plain = power.cumsum(-1)
    weighted = (power * span).cumsum(-1)
    rows = []
    for lag in lags:
        windows, inside = tokens - lag, min(lag, tokens - lag)
        if inside == 0:
            rows.append(torch.zeros_like(square))
            continue
        both = 2 * (windows * plain[..., inside - 1] - weighted[..., inside - 1]) - windows
        flat = 2 * (windows * inside - inside * (inside - 1) / 2) - windows
        rows.append((both - flat * square**lag).clamp(min=0.0) / windows**2)
    return torch.stack(rows, dim=-2)


def debiased_lag_curve(phase: Tensor, lags: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(|R_n|² less its floor, the floor), each sequence with its own: average over sequences.

    The floor is that of independent steps at the sequence's own debiased ρ. Not cut off at 0, so
    that an average over sequences stays unbiased.

    Shapes: phase [..., T, B] -> two [..., len(lags), B]. Raises: as `lag_curve`; ValueError for
    fewer than 3 tokens.
    """
    tokens = phase.shape[-2]
    _some("phase", phase, 3)
    steps = tokens - 1
    first = lag_curve(phase, [1])[..., 0, :].abs().square()
    rho = ((steps * first - 1) / (steps - 1)).clamp(0.0, 1.0).sqrt()
    floor = lag_floor(rho, lags, tokens)
    return lag_curve(phase, lags).abs().square() - floor, floor


def measured_window(
    size: Tensor, lags: Sequence[int], epsilon: float = 0.1, floor: Tensor | None = None
) -> Tensor:
    """The least measured lag from which |R_n| stays at or below ε to the end of the curve.

    ∞ where the last lag is still above ε. NaN where noise hides the answer: ε lies below what the
    curve can show (√3·√floor) at the lag that would be it.

    Shapes: size |R_n| [..., n, B] over rising lags, floor of |R_n|² alike -> [..., B].
    Units: tokens. Raises: ValueError for lags that do not rise, or ε outside (0, 1).
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}; expected a number between 0 and 1")
    if list(lags) != sorted(set(lags)) or len(lags) != size.shape[-2]:
        raise ValueError(f"lags are {list(lags)}; expected {size.shape[-2]} rising numbers")
    above = size > epsilon
    if floor is not None:
        hidden = (VISIBLE * floor.sqrt() > epsilon) & (size <= VISIBLE * floor.sqrt())
        above = above & ~hidden
    beyond = above.flip(-2).cumsum(-2).flip(-2)  # lags from here on that are above ε
    first = (beyond > 0).sum(-2)  # all lags before this one have something above at or after them
    table = torch.tensor([*map(float, lags), torch.inf], dtype=torch.float64, device=size.device)
    window = table[first]
    if floor is None:
        return window
    at = first.clamp(max=len(lags) - 1).unsqueeze(-2)
    return torch.where((first < len(lags)) & hidden.gather(-2, at).squeeze(-2), torch.nan, window)


def block_coupling(theta: Tensor) -> tuple[Tensor, Tensor]:
    """|mean e^{i(θ_b+θ_c)} − ĉ_b ĉ_c| and |mean e^{i(θ_b−θ_c)} − ĉ_b ĉ_c*|, 0 on the diagonal.

    Both are ≈ 1/√T for independent blocks; concentration over blocks is lost where they are large.

    Shapes: theta [..., T, B] radians or turns -> two [..., B, B]. Raises: ValueError without a
    step.
    """
    _some("theta", theta, 1)
    turn = unit(theta)
    mean = turn.mean(-2)
    tokens = theta.shape[-2]
    found = []
    for other, its_mean in ((turn, mean), (turn.conj(), mean.conj())):
        joint = turn.transpose(-1, -2) @ other / tokens
        excess = (joint - mean.unsqueeze(-1) * its_mean.unsqueeze(-2)).abs()
        found.append(excess - torch.diag_embed(excess.diagonal(dim1=-2, dim2=-1)))
    return found[0], found[1]


def _lags(lags: Sequence[int], tokens: int) -> list[int]:
    found = [int(lag) for lag in lags]
    if not found or min(found) < 0 or max(found) >= tokens:
        raise ValueError(f"lags are {found}; expected numbers from 0 to {tokens - 1}")
    return found


def _some(name: str, steps: Tensor, least: int) -> None:
    if steps.ndim < 2 or steps.shape[-2] < least:
        raise ValueError(
            f"{name} is of shape {list(steps.shape)}; expected [..., T, B], T ≥ {least}"
        )
