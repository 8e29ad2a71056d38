"""Step laws that can be drawn: what a token's map is, at random, in the stylised model.

A `Rotations` law turns B planes by an angle each; its `walk` gives the next tokens' angles from the
query outward, and `harmonic` says what they are on average. A `Maps` law is a d × d orthogonal
map; its `extend` multiplies routes by one more step. Everything is drawn from the generators
passed in, so that one seed names a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from farfield.theory import checks, steps
from farfield.theory.checks import Complexes, Reals

Walk = Callable[[int], Tensor]
"""The next n tokens' angles, float32 [routes, n, B], the caller's to overwrite; each call goes on
where the last one ended."""


class Draws:
    """The generators of one simulation, torch's and NumPy's, from one seed.

    Raises: ValueError for a seed below 0.
    """

    def __init__(self, seed: int) -> None:
        self.seed = int(checks.counts("seed", seed))
        self.torch = torch.Generator().manual_seed(self.seed)
        self.numpy = np.random.default_rng(self.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers of mean 0, float32."""
        return torch.empty(shape).normal_(std=scale, generator=self.torch)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers uniform on [0, 1), float32."""
        return torch.empty(shape).uniform_(generator=self.torch)

    def phases(self, *shape: int) -> Tensor:
        """Angles uniform on a circle of 2^16 points, float32, in [−π, π).

        Four come from each 64-bit draw. All harmonics below the 65,536th vanish, as they do on the
        whole circle, so that no moment of a score can tell.
        """
        count = math.prod(shape)
        words = torch.empty(-(-count // 4), dtype=torch.int64)
        words.random_(-(2**63), None, generator=self.torch)
        return words.view(torch.int16)[:count].view(shape).float().mul_(2 * math.pi / 2**16)


class Rotations(Protocol):
    """A law of independent or stationary angles, one per plane."""

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """A fresh walk of every route."""
        ...

    def harmonic(self, order: int) -> Complexes | complex:
        """c_m = E e^{imθ}, [B] or one for all planes."""
        ...


@runtime_checkable
class Maps(Protocol):
    """A law of independent orthogonal d × d maps."""

    @property
    def head_dim(self) -> int:
        """d."""
        ...

    def extend(self, routes: Tensor, draws: Draws) -> Tensor:
        """P M for every route, M fresh. Shapes: [routes, d, d] -> alike."""
        ...


def _row(name: str, value: Reals) -> Tensor:
    return torch.from_numpy(np.atleast_1d(checks.reals(name, value))).float()


@dataclass(frozen=True)
class Normal:
    """θ ~ N(mean, σ²). Units: radians per token; σ and mean are one for all planes or [B]."""

    sigma: Reals
    mean: Reals = 0.0

    def __post_init__(self) -> None:
        checks.nonnegative("sigma", self.sigma)
        checks.reals("mean", self.mean)

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """Independent angles."""
        sigma, mean = _row("sigma", self.sigma), _row("mean", self.mean)
        drift = bool((mean != 0).any())

        def more(tokens: int) -> Tensor:
            if sigma.numel() == 1:
                turned = draws.normal(routes, tokens, blocks, scale=sigma.item())
            else:
                turned = draws.normal(routes, tokens, blocks).mul_(sigma)
            return turned.add_(mean) if drift else turned

        return more

    def harmonic(self, order: int) -> Complexes | complex:
        """e^{imμ − m²σ²/2}."""
        return steps.normal_harmonic(order, self.sigma, self.mean)


@dataclass(frozen=True)
class Uniform:
    """θ uniform on [mean − a, mean + a]. Units: radians per token."""

    half_width: Reals
    mean: Reals = 0.0

    def __post_init__(self) -> None:
        checks.nonnegative("half_width", self.half_width)
        checks.reals("mean", self.mean)

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """Independent angles."""
        half, mean = _row("half_width", self.half_width), _row("mean", self.mean)

        def more(tokens: int) -> Tensor:
            return (2 * draws.uniform(routes, tokens, blocks) - 1) * half + mean

        return more

    def harmonic(self, order: int) -> Complexes | complex:
        """e^{imμ} sin(ma)/(ma)."""
        return steps.uniform_harmonic(order, self.half_width, self.mean)


@dataclass(frozen=True)
class VonMises:
    """θ ~ von Mises(mean, κ). Units: radians per token."""

    kappa: Reals
    mean: Reals = 0.0

    def __post_init__(self) -> None:
        checks.nonnegative("kappa", self.kappa)
        checks.reals("mean", self.mean)

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """Independent angles."""

        def more(tokens: int) -> Tensor:
            mean, kappa = np.asarray(self.mean, dtype=float), np.asarray(self.kappa, dtype=float)
            angles = draws.numpy.vonmises(mean, kappa, (routes, tokens, blocks))
            return torch.from_numpy(angles).float()

        return more

    def harmonic(self, order: int) -> Complexes | complex:
        """e^{imμ} I_m(κ)/I_0(κ)."""
        return steps.von_mises_harmonic(order, self.kappa, self.mean)


@dataclass(frozen=True)
class TwoPoint:
    """θ = ±angle with even odds. Units: radians per token."""

    angle: Reals

    def __post_init__(self) -> None:
        checks.reals("angle", self.angle)

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """Independent signs."""
        angle = _row("angle", self.angle)
        return lambda tokens: draws.uniform(routes, tokens, blocks).sub_(0.5).sign_() * angle

    def harmonic(self, order: int) -> Complexes | complex:
        """cos(m·angle)."""
        return steps.two_point_harmonic(order, self.angle)


@dataclass(frozen=True)
class Sometimes:
    """θ = angle with probability p, else 0: content that turns at some tokens only."""

    probability: Reals
    angle: Reals

    def __post_init__(self) -> None:
        checks.rates("probability", self.probability)
        checks.reals("angle", self.angle)

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """Independent turns."""
        p, angle = _row("probability", self.probability), _row("angle", self.angle)
        return lambda tokens: (draws.uniform(routes, tokens, blocks) < p) * angle

    def harmonic(self, order: int) -> Complexes | complex:
        """1 − p + p e^{im·angle}."""
        return steps.bernoulli_harmonic(order, self.probability, self.angle)


@dataclass(frozen=True)
class Constant:
    """θ_b = ω_b at every token: RoPE. Every |c_m| is 1 and nothing mixes."""

    frequencies: Reals

    def __post_init__(self) -> None:
        checks.reals("frequencies", self.frequencies)

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """The same angles on every route."""
        omega = _row("frequencies", self.frequencies)
        return lambda tokens: omega.expand(routes, tokens, blocks).clone()

    def harmonic(self, order: int) -> Complexes | complex:
        """e^{imω}."""
        return steps.normal_harmonic(order, 0.0, self.frequencies)


@dataclass(frozen=True)
class Markov:
    """θ = angles[state] of a stationary chain, one chain per plane; kernel rows sum to 1.

    Walks go from the query outward, so the chain is drawn backwards in time. The decay of E e^{iΦ}
    is not the marginal harmonic's: `dependence.markov_rate` gives it.
    """

    kernel: Reals
    angles: Reals
    stationary: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kernel = checks.rates("kernel", self.kernel)
        checks.square("kernel", kernel)
        angles = checks.reals("angles", self.angles)
        if kernel.ndim != 2 or len(angles) != len(kernel):
            checks.refuse("angles", angles, f"one for each of {len(kernel)} states")
        if np.abs(kernel.sum(axis=1) - 1).max() > 1e-9:
            checks.refuse("kernel", kernel, "rows that sum to 1")
        size = len(kernel)
        system = np.vstack([kernel.T - np.eye(size), np.ones(size)])
        weights = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
        object.__setattr__(self, "stationary", np.clip(weights, 0.0, None) / weights.sum())

    def walk(self, routes: int, blocks: int, draws: Draws) -> Walk:
        """Stationary from the query outward, by the reversed kernel π_y Q(y, x)/π_x."""
        kernel, pi = np.asarray(self.kernel, dtype=float), self.stationary
        reverse = (kernel.T * pi) / np.where(pi > 0, pi, 1.0)[:, None]
        edges = torch.from_numpy(reverse.cumsum(axis=1)[:, :-1]).float()
        first = torch.from_numpy(pi.cumsum()[:-1]).float()
        angles = _row("angles", self.angles)
        state = (draws.uniform(routes, blocks, 1) >= first).sum(-1)

        def more(tokens: int) -> Tensor:
            nonlocal state
            chance = draws.uniform(tokens, routes, blocks, 1)
            visited = torch.empty(tokens, routes, blocks, dtype=torch.int64)
            for t in range(tokens):
                visited[t] = state
                state = (chance[t] >= edges[state]).sum(-1)
            return angles[visited].transpose(0, 1)

        return more

    def harmonic(self, order: int) -> Complexes | complex:
        """The marginal Σ_y π_y e^{im·angle_y}: what one step is, not how routes decay."""
        turned = np.exp(1j * order * checks.reals("angles", self.angles))
        return complex(self.stationary @ turned)


@dataclass(frozen=True)
class Householder:
    """M = I − 2wwᵀ, w uniform on the sphere of R^d."""

    head_dim: int

    def __post_init__(self) -> None:
        checks.counts("head_dim", self.head_dim, least=1)

    def extend(self, routes: Tensor, draws: Draws) -> Tensor:
        """P M = P − 2 (P w) wᵀ."""
        w = draws.normal(routes.shape[0], self.head_dim, 1)
        w = w / torch.linalg.vector_norm(w, dim=1, keepdim=True)
        return torch.baddbmm(routes, routes @ w, w.transpose(1, 2), alpha=-2.0)


@dataclass(frozen=True)
class Haar:
    """M uniform on O(d): one step forgets everything."""

    head_dim: int

    def __post_init__(self) -> None:
        checks.counts("head_dim", self.head_dim, least=1)

    def extend(self, routes: Tensor, draws: Draws) -> Tensor:
        """P M, M the Q of a normal matrix with the signs that make it uniform."""
        q, r = torch.linalg.qr(draws.normal(routes.shape[0], self.head_dim, self.head_dim))
        return routes @ (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))


@dataclass(frozen=True)
class Cayley:
    """M = (I − A)(I + A)⁻¹, A skew with N(0, scale²) entries: dense steps that do not commute."""

    head_dim: int
    scale: float

    def __post_init__(self) -> None:
        checks.counts("head_dim", self.head_dim, least=1)
        checks.nonnegative("scale", self.scale)

    def step(self, count: int, draws: Draws) -> Tensor:
        """M itself. Shapes: -> [count, d, d]."""
        entries = self.scale * draws.normal(count, self.head_dim, self.head_dim).triu_(1)
        skew = entries - entries.transpose(1, 2)
        eye = torch.eye(self.head_dim)
        return torch.linalg.solve(eye + skew, eye - skew)

    def extend(self, routes: Tensor, draws: Draws) -> Tensor:
        """P M."""
        return routes @ self.step(routes.shape[0], draws)
