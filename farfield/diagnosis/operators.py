"""What is left of a transport after n steps, for maps that do not turn planes: operator forms.

A rotation's mean is a number for each block. Reflections, dense maps and contractions mix all of a
head, so what decays is the norm of a matrix, ‖mean P‖ over routes of n steps, and the second moment
that says how a score spreads. Routes start at evenly spaced tokens; only their ends are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield import theory
from farfield.algebra.contraction import Contraction
from farfield.algebra.frame import Frame

ROUTES = 512
"""Routes of a sequence, at most, for each lag."""

LARGEST = 64
"""Head dimension up to which γ₂ is computed: it needs d⁴ numbers."""

LONGEST_CONTRACTION = 1024
"""Longest route of a contraction: its steps have no inverse, so every route is walked."""


@dataclass(frozen=True)
class Operators:
    """One head's routes of n steps in one sequence, for each lag.

    norm ‖mean P‖ over the routes; held_out u·(mean P of the second half)·v for the leading u, v of
    the first half, which has no bias from choosing them; floor what `norm` is without memory;
    aligned E (e_i·P e_i)², the mean square cosine of a query with a key it was aligned with;
    kept E ‖P‖²_F/d, 1 for orthogonal maps; gamma2 ‖K ↦ E[M K Mᵀ]‖ of one step (NaN for a head too
    wide for it, or a step that is no orthogonal map).

    Shapes: all but routes and gamma2 [lags]. Units: –.
    """

    lags: tuple[int, ...]
    norm: Tensor
    held_out: Tensor
    floor: Tensor
    aligned: Tensor
    kept: Tensor
    routes: int
    gamma2: float


def sources(tokens: int, longest: int, routes: int = ROUTES) -> Tensor:
    """Where routes of up to `longest` steps may start: evenly spaced, int64 [at most routes].

    Raises: ValueError where no token has so many after it.
    """
    room = tokens - longest
    if room < 2:
        raise ValueError(f"{tokens} tokens have fewer than 2 routes of {longest} steps")
    count = min(routes, room)
    return torch.arange(count) * room // count


def frame_operators(frame: Frame, lags: Sequence[int], routes: int = ROUTES) -> list[Operators]:
    """The operators of every head of frames of one sequence.

    Shapes: frames of leading axes [1, heads]. Raises: ValueError for lags that do not rise from 1.
    """
    lags = _rising(lags)
    starts = sources(frame.length, lags[-1], routes)
    ends = torch.stack([starts + lag for lag in lags])
    needed, place = torch.unique(torch.cat((starts, ends.flatten())), return_inverse=True)
    frames = _matrices(frame, needed)
    first, later = place[: len(starts)], place[len(starts) :].view_as(ends)
    found = []
    for head in range(frames.shape[0]):
        own = frames[head].double()
        back = own[first].mT
        maps = (own[at] @ back for at in later)
        found.append(_operators(maps, lags, len(starts), _spacing(starts), own.shape[-1]))
    return found


def contraction_operators(
    contraction: Contraction, lags: Sequence[int], routes: int = ROUTES
) -> list[Operators]:
    """The same for steps without an inverse: every route is walked, step by step.

    Shapes: contraction of leading axes [1, heads]. Raises: ValueError for lags that do not rise
    from 1, or are longer than `LONGEST_CONTRACTION`.
    """
    lags = _rising(lags)
    if lags[-1] > LONGEST_CONTRACTION:
        raise ValueError(f"a lag of {lags[-1]}; expected at most {LONGEST_CONTRACTION}")
    starts = sources(contraction.length, lags[-1], routes)
    dim = contraction.w.shape[-1]
    found = []
    for w, beta in zip(contraction.w[0], contraction.beta[0], strict=True):
        kept, maps = [], torch.eye(dim, dtype=w.dtype).expand(len(starts), dim, dim)
        for step in range(1, lags[-1] + 1):
            own, strength = w[starts + step], beta[starts + step]
            taken = strength[:, None] * (own[:, None] @ maps).squeeze(1)
            maps = maps - own[:, :, None] * taken[:, None]
            if step in lags:
                kept.append(maps.double())
        found.append(_operators(iter(kept), lags, len(starts), _spacing(starts), dim))
    return found


def _rising(lags: Sequence[int]) -> tuple[int, ...]:
    found = tuple(int(lag) for lag in lags)
    if not found or found[0] != 1 or list(found) != sorted(set(found)):
        raise ValueError(f"lags are {list(found)}; expected rising numbers from 1")
    return found


def _spacing(starts: Tensor) -> float:
    return float(starts[-1] - starts[0]) / max(1, len(starts) - 1)


def _matrices(frame: Frame, tokens: Tensor) -> Tensor:
    """F_t of some tokens, [heads, n, d, d], a column at a time."""
    dim = frame.last.shape[-2]
    columns = []
    for column in range(dim):
        x = torch.zeros(1, 1, frame.length, dim, device=frame.last.device)
        x[..., column] = 1.0
        columns.append(frame.push(x)[0][:, tokens])
    return torch.stack(columns, dim=-1)


def _operators(
    maps: Iterator[Tensor], lags: tuple[int, ...], routes: int, spacing: float, dim: int
) -> Operators:
    rows: list[tuple[float, float, float, float]] = []
    gamma2, rate = float("nan"), 1.0
    for lag, P in zip(lags, maps, strict=True):
        norm = float(torch.linalg.matrix_norm(P.mean(0), 2))
        square = P.square().sum((-2, -1)).mean() / dim
        if lag == 1:
            rate = min(1.0, norm)
            if dim <= LARGEST and abs(float(square) - 1) < 1e-3:
                gamma2 = theory.empirical_gamma2(P.numpy())
        half = routes // 2
        u, _, v = torch.linalg.svd(P[:half].mean(0))
        apart = float(u[:, 0] @ P[half:].mean(0) @ v[0])
        aligned = float(P.diagonal(dim1=-2, dim2=-1).square().mean())
        rows.append((norm, apart, aligned, float(square)))
    # Windows that overlap are worth fewer: neighbours share all but `spacing` steps at each end.
    worth = [_worth(rate, spacing, lag, routes) for lag in lags]
    table = torch.tensor(rows, dtype=torch.float64)
    floor = torch.tensor([float(theory.haar_norm_floor(n)) for n in worth], dtype=torch.float64)
    return Operators(
        lags, table[:, 0], table[:, 1], floor, table[:, 2], table[:, 3], routes, gamma2
    )


def _worth(rate: float, spacing: float, lag: int, routes: int) -> int:
    """How many independent routes the overlapping ones are worth, at least 1."""
    if lag <= spacing:
        return routes
    return max(1, int(theory.effective_windows(rate**spacing, routes)))
