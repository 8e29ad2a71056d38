"""The stylised attention model: one query, its near and far keys, simulated and taken apart.

    s_n     = Σ_b x_b cos(Φ_n,b + ψ_n,b)       content logit of the key n tokens back (or S qᵀP_n k)
    logit_n = scale · s_n + bias_n             the control; keys outside a window are not seen
    out     = (1 − ρ_D) near + ρ_D far         softmax over all keys, split as `measures` splits it

Near keys (n < near_window) have the content logit `near_score`, or the one of a key shared by all
positions, and the value σ; far keys have values μ + ξ, carried through their route or left alone.
Keys are walked outward from the query in chunks: memory does not grow with length, and the routes
of a shorter length are those of a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from farfield.algebra import measures
from farfield.algebra.measures import LogitSums, ValueSums, logit_sums, value_sums
from farfield.theory import checks
from farfield.theory.laws import Draws, Maps, Rotations

Keys = Literal["independent", "shared"]
TURN = 2 * math.pi
_CHUNK = 1 << 20  # numbers in a chunk's values, 4 MB: few calls, and yet near a core's cache
_EVERY = torch.ones((), dtype=torch.bool)


@dataclass(frozen=True)
class Control:
    """What is done to logits by distance and length; the parts stack.

    slope   ALiBi's m: bias −m n. Units: nats per token.
    gates   (α, β): independent Beta(α, β) forget gates, bias Σ ln f over the n tokens of a route.
    window  W: only keys with n < W are seen. Units: tokens.
    log_n   c: content logits times c·ln L, L the number of keys seen.
    """

    slope: float = 0.0
    gates: tuple[float, float] | None = None
    window: int | None = None
    log_n: float | None = None

    def __post_init__(self) -> None:
        checks.nonnegative("slope", self.slope)
        if self.gates is not None:
            checks.positive("gates", self.gates)
        if self.window is not None:
            checks.counts("window", self.window, least=1)
        if self.log_n is not None:
            checks.positive("log_n", self.log_n)

    def scale(self, length: int) -> float:
        """c·ln(min(L, W)), or 1."""
        seen = length if self.window is None else min(length, self.window)
        return 1.0 if self.log_n is None else self.log_n * math.log(seen)


@dataclass(frozen=True)
class Model:
    """One query's attention.

    law          the steps of a route: rotations of planes, or maps of the whole head
    amplitudes   x_b = |q_b||k_b|/√d of each plane [B]; for maps one number, S = |q||k|/√d. Nats.
    near_window  w, how many keys are near
    near_score   their content logit, in nats; None with shared keys: what their own routes give
    keys         independent: every far key has a direction of its own, uniform in each plane (on
                 the sphere for maps). shared: all far keys look like the query itself, s_0 = Σ x.
    mean_power   |μ_b|² of each plane [B] (for maps one number), what far values have in common
    noise_power  E|ξ|² of the whole head, isotropic and normal, a fresh one at every key
    near_power   σ², the near signal's power. Units of powers: those of values, squared.
    """

    law: Rotations | Maps
    amplitudes: Any  # float64 [B] once made
    near_window: int
    near_score: float | None
    keys: Keys = "independent"
    control: Control = Control()
    mean_power: Any = 0.0  # float64 [B] once made
    noise_power: float = 1.0
    near_power: float = 1.0

    def __post_init__(self) -> None:
        x = np.atleast_1d(checks.nonnegative("amplitudes", self.amplitudes))
        if isinstance(self.law, Maps) and x.size != 1:
            checks.refuse("amplitudes", x, "one number for a law of whole-head maps")
        power = checks.nonnegative("mean_power", self.mean_power)
        if power.ndim and power.shape != x.shape:
            checks.refuse("mean_power", power, f"one number, or one for each of {x.size} planes")
        checks.counts("near_window", self.near_window, least=1)
        checks.nonnegative("noise_power", self.noise_power)
        checks.nonnegative("near_power", self.near_power)
        if self.keys not in ("independent", "shared"):
            checks.refuse("keys", self.keys, "independent or shared")
        if self.near_score is not None:
            checks.reals("near_score", self.near_score)
        elif self.keys != "shared":
            checks.refuse("near_score", None, "a number, unless keys are shared")
        object.__setattr__(self, "amplitudes", x)
        spread = power / x.size if power.ndim == 0 else power
        object.__setattr__(self, "mean_power", np.broadcast_to(spread, x.shape).copy())

    @property
    def value_dim(self) -> int:
        """How many coordinates a value has: d of a map, 2B of B planes (all cosines first)."""
        return self.law.head_dim if isinstance(self.law, Maps) else 2 * self.amplitudes.size


@dataclass(frozen=True)
class Attention:
    """What one length's simulation gives, a row for every route.

    near, far           sums of the logits as softmax sees them
    content             sums of the far content logits s alone (no bias, no scale)
    near_values         of the near signal
    far_carried         of the far values, carried through their routes
    far_still           of the same values, left alone
    """

    length: int
    near: LogitSums
    far: LogitSums
    content: LogitSums
    near_values: ValueSums
    far_carried: ValueSums
    far_still: ValueSums

    @property
    def far_mass(self) -> Tensor:
        """ρ_D of each route."""
        return measures.far_mass(self.near, self.far)

    def split(self, carried: bool) -> measures.SplitOutput:
        """The output's near and far part, values carried or not."""
        return measures.split_output(
            self.near_values, self.far_carried if carried else self.far_still
        )

    def far_power(self, carried: bool) -> tuple[float, float]:
        """E|far mean|², the far set's own output power, and its standard error over routes."""
        values = self.far_carried if carried else self.far_still
        return mean_and_error(values.mean.square().sum(-1))

    def snr(self, carried: bool) -> tuple[float, float]:
        """Mean near power over mean far power in the output, and its standard error (delta)."""
        parts = self.split(carried)
        near, far = parts.near.square().sum(-1), parts.far.square().sum(-1)
        ratio = float(near.mean() / far.mean())
        residual = (near - ratio * far) / far.mean()
        return ratio, mean_and_error(residual)[1]


def mean_and_error(sample: Tensor) -> tuple[float, float]:
    """(mean, standard error of the mean) of independent numbers. Shapes: [R], R ≥ 2."""
    wide = sample.double()
    return float(wide.mean()), float(wide.std() / math.sqrt(wide.numel()))


def simulate(
    model: Model, lengths: Sequence[int], routes: int = 100, seed: int = 0
) -> list[Attention]:
    """Attention of one query at each length, on the same routes, decomposed.

    Units: lengths in tokens, the query counted. Memory does not depend on length: one chunk of
    about a million numbers. Log-n scaling changes every logit with the length, so each length
    then is a pass of its own.
    Raises: ValueError for lengths not above the near window, or fewer than 2 routes.
    """
    chosen = sorted({int(n) for n in checks.counts("lengths", lengths, least=1)})
    if chosen[0] <= model.near_window:
        checks.refuse("lengths", chosen[0], f"more than near_window = {model.near_window}")
    checks.counts("routes", routes, least=2)
    if model.control.log_n is None:
        return list(_pass(model, chosen, routes, seed))
    return [found for n in chosen for found in _pass(model, [n], routes, seed)]


def _pass(model: Model, lengths: list[int], routes: int, seed: int) -> Iterator[Attention]:
    draws = Draws(seed)
    scale, bias = model.control.scale(lengths[-1]), _biases(model.control, routes, draws)
    near_bias = bias(model.near_window)
    keys = (_mapped if isinstance(model.law, Maps) else _rotated)(model, routes, draws)
    near, near_values = _near(model, scale * _near_content(model, keys, routes) + near_bias)
    most = max(1, _CHUNK // (routes * model.value_dim))
    far: _Far | None = None
    start = model.near_window
    for end in lengths:
        while start < end:
            tokens = min(most, end - start)
            content, values = keys(tokens)
            seen = _seen(model.control, start, tokens)
            part = _far(model, scale * content + bias(tokens), content, values, seen, draws)
            far = part if far is None else far.merged(part)
            start += tokens
        assert far is not None, "every length is above the near window"
        yield Attention(end, near, far.logits, far.content, near_values, far.carried, far.still)


@dataclass(frozen=True)
class _Far:
    logits: LogitSums
    content: LogitSums
    carried: ValueSums
    still: ValueSums

    def merged(self, other: _Far) -> _Far:
        return _Far(
            self.logits.merged(other.logits),
            self.content.merged(other.content),
            self.carried.merged(other.carried),
            self.still.merged(other.still),
        )


def _near(model: Model, logits: Tensor) -> tuple[LogitSums, ValueSums]:
    seen = _seen(model.control, 0, model.near_window)
    signal = torch.zeros(1, model.near_window, model.value_dim, dtype=torch.float64)
    signal[..., 0] = math.sqrt(model.near_power)
    return logit_sums(logits, seen), value_sums(logits, signal, seen)


def _near_content(model: Model, keys: _Source, routes: int) -> Tensor:
    if model.near_score is not None:
        return torch.full((routes, model.near_window), model.near_score, dtype=torch.float64)
    own = torch.full((routes, 1), float(model.amplitudes.sum()), dtype=torch.float64)
    return torch.cat([own, keys(model.near_window - 1)[0]], dim=1)


def _seen(control: Control, start: int, tokens: int) -> Tensor:
    if control.window is None:
        return _EVERY
    return torch.arange(start, start + tokens) < control.window


def _biases(control: Control, routes: int, draws: Draws) -> Callable[[int], Tensor]:
    """Called for the next n keys, their bias: float64 [1 or routes, n], from distance 0 outward."""
    at, decay = 0, torch.zeros(routes, 1, dtype=torch.float64)

    def more(tokens: int) -> Tensor:
        nonlocal at, decay
        distance = torch.arange(at, at + tokens, dtype=torch.float64)
        at += tokens
        bias = (-control.slope * distance)[None]
        if control.gates is None:
            return bias
        with np.errstate(divide="ignore"):
            gates = np.log(draws.numpy.beta(*control.gates, size=(routes, tokens)))
        sums = torch.from_numpy(gates).cumsum(1)
        before = torch.cat([torch.zeros(routes, 1, dtype=torch.float64), sums[:, :-1]], dim=1)
        bias = bias + decay + before
        decay = decay + sums[:, -1:]
        return bias

    return more


_Source = Callable[[int], tuple[Tensor, Tensor]]
"""The next n far keys: their content logits [routes, n], and where a unit value arrives through
the route, [2, routes, n, B] (cosines and sines) or [1, routes, n, d], good until the next call."""


def _rotated(model: Model, routes: int, draws: Draws) -> _Source:
    assert not isinstance(model.law, Maps)
    x = torch.from_numpy(model.amplitudes).float()
    phases = walked_phases(model.law, routes, x.numel(), draws, _first(model))
    room = torch.empty(0)

    def more(tokens: int) -> tuple[Tensor, Tensor]:
        phase = phases(tokens)
        # Two halves, each written and read in one run; the same memory for every chunk.
        carried = room.resize_(2, *phase.shape)
        torch.cos(phase, out=carried[0])
        torch.sin(phase, out=carried[1])
        if model.keys == "shared":
            return (carried[0] @ x).double(), carried
        # A direction of its own, uniform, forgets the route: its phase can be drawn afresh.
        own = draws.phases(routes, tokens, x.numel()).cos_()
        return (own @ x).double(), carried

    return more


def _first(model: Model) -> int:
    """The distance of the first key whose route is walked; that of the query's own is 0."""
    return 1 if model.near_score is None else model.near_window


def walked_phases(
    law: Rotations, routes: int, blocks: int, draws: Draws, first: int
) -> Callable[[int], Tensor]:
    """Called for the next n keys, their routes' phases Φ, from distance `first` ≥ 1 outward.

    Chunks are summed in float32 and joined in float64, reduced to one turn: the error does not
    grow into one that matters at a million tokens.

    Shapes: -> float32 [routes, n, B]. Units: radians.
    """
    walk = law.walk(routes, blocks, draws)
    base = torch.zeros(routes, 1, blocks, dtype=torch.float64)
    before = first - 1
    while before:
        tokens = min(before, max(1, _CHUNK // (routes * blocks)))
        base += walk(tokens).sum(1, keepdim=True, dtype=torch.float64)
        before -= tokens
    base.remainder_(TURN)

    def more(tokens: int) -> Tensor:
        nonlocal base
        phase = walk(tokens).cumsum_(1)
        last = phase[:, -1:].double()  # before the base: a large one would cost the sum digits
        phase += base.float()
        base = (base + last).remainder_(TURN)
        return phase

    return more


def _mapped(model: Model, routes: int, draws: Draws) -> _Source:
    law, d = model.law, model.value_dim
    assert isinstance(law, Maps)
    scale = float(model.amplitudes[0])
    product = torch.eye(d).expand(routes, d, d)
    for _ in range(_first(model) - 1):
        product = law.extend(product, draws)

    def more(tokens: int) -> tuple[Tensor, Tensor]:
        nonlocal product
        content, carried = torch.empty(routes, tokens), torch.empty(routes, tokens, d)
        for n in range(tokens):
            product = law.extend(product, draws)
            content[:, n] = product[:, 0, 0]
            carried[:, n] = product[:, :, -1]
        if model.keys == "independent":
            own = draws.normal(routes, tokens, d)
            content = own[..., 0] / torch.linalg.vector_norm(own, dim=-1)
        return scale * content.double(), carried[None]

    return more


def _far(
    model: Model, logits: Tensor, content: Tensor, values: Tensor, seen: Tensor, draws: Draws
) -> _Far:
    """One chunk of far keys.

    Normal noise that is alike in all directions stays so under any orthogonal map: Σ a ξ is drawn
    as the one normal vector it is, of variance Σ a² E|ξ|², exact in law whatever the routes.
    """
    sums = logit_sums(logits, seen)
    power = torch.from_numpy(model.mean_power).float()
    norms = (power.sum() + model.noise_power).sqrt().expand(logits.shape)
    both = value_sums(logits[None], values, seen, norms[None])
    carried = ValueSums(
        both.lse[0], both.mean.movedim(0, 1).flatten(1), both.coherent[0], both.incoherent[0]
    )
    root = power.sqrt().repeat(model.value_dim // power.numel())  # one size per plane, or for all
    noise = draws.normal(logits.shape[0], model.value_dim).double()
    share = torch.where(sums.count > 0, (sums.lse2 - 2 * sums.lse).exp(), 0.0).unsqueeze(-1)
    noise = noise * (share * model.noise_power / model.value_dim).sqrt()
    still = torch.zeros_like(noise)
    if isinstance(model.law, Maps):
        still[:, -1] = root[-1]
    else:
        still[:, : power.numel()] = root[: power.numel()]
    still = torch.where(sums.count.unsqueeze(-1) > 0, still, 0.0)
    return _Far(
        sums,
        sums if model.control == Control() else logit_sums(content, seen),
        replace(carried, mean=carried.mean * root + noise),
        replace(carried, mean=still + noise),
    )
