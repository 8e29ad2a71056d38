"""What transports a trained model makes: step laws, lag curves, mixing windows, gates, values.

The model runs on one text after another. Each layer's Carry is met as its mechanism hands it over,
measured and let go, so that memory is linear in a text and nothing pools over texts but squares
less their noise. A position-indexed rotation goes through the same measures: its steps never vary,
|E e^{iθ}| is 1 in every block and no lag sees it mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farfield import theory
from farfield.algebra import step_measures
from farfield.algebra.rotation import RotationFrame
from farfield.attention import Attention
from farfield.attention.mechanism import Carry
from farfield.diagnosis.gates import Gates
from farfield.diagnosis.operators import (
    LONGEST_CONTRACTION,
    Operators,
    contraction_operators,
    frame_operators,
)
from farfield.evaluation.losses import undisturbed

ORDERS = (1, 2, 3, 4)
"""Harmonics c_m that are measured."""

Row = dict[str, Any]

_STILL = 1e-12


@dataclass
class Transports:
    """Rows of what was measured of transports; `head` counts key/value heads, None is all of them.

    steps      one block of rotations (or a head's operator): law, rate, windows, energy
    lags       the same at each lag: what is left, its noise floor, what independent steps leave
    couplings  one head: how far blocks are from independent
    gates      one head's potential: its gates and what they remember
    values     one head: mean power of each plane, noise power, and sizes of queries and keys
    layers     one layer: whether values are carried, window and sinks, whether logits are scaled
    """

    layers: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    lags: list[Row] = field(default_factory=list)
    couplings: list[Row] = field(default_factory=list)
    gates: list[Row] = field(default_factory=list)
    values: list[Row] = field(default_factory=list)


def lag_ladder(tokens: int) -> list[int]:
    """Lags 1, 2, 3, 4, 6, 8, 12, … up to a quarter of a text. Units: tokens."""
    lags, power = [], 1
    while power <= tokens // 4:
        lags += [power, power * 3 // 2] if power > 1 else [1]
        power *= 2
    return [lag for lag in lags if lag <= tokens // 4]


def measure_transports(
    model: Any,
    ids: Tensor,
    *,
    train_length: int,
    layers: Sequence[int] | None = None,
    lags: Sequence[int] | None = None,
    epsilon: float = theory.DEFAULT_EPSILON,
) -> Transports:
    """Runs the body of one of our models on each text and measures what its mechanisms carry.

    Shapes: ids int64 [texts, tokens]. Units: lags (default: `lag_ladder`) in tokens.
    Raises: ValueError for a model that is not ours, fewer than 4 tokens, a layer that isn't there.
    """
    if ids.ndim != 2 or ids.shape[1] < 4:
        raise ValueError(f"ids are of shape {list(ids.shape)}; expected [texts, at least 4 tokens]")
    found = Transports()
    wanted = list(lags) if lags is not None else lag_ladder(ids.shape[1])
    with undisturbed(model), watching(
        model, found, wanted, train_length=train_length, layers=layers, epsilon=epsilon
    ):  # fmt: skip
        for text in ids:
            model.base_model(input_ids=text[None], use_cache=False)
    return found


@contextmanager
def watching(
    model: Any,
    found: Transports,
    lags: Sequence[int],
    *,
    train_length: int,
    layers: Sequence[int] | None = None,
    epsilon: float = theory.DEFAULT_EPSILON,
) -> Iterator[None]:
    """Within, each run of one of our models on one text is measured; rows go to `found` at the end.

    Raises: ValueError as `measure_transports`.
    """
    if getattr(model.config, "model_type", None) != "farfield":
        raise ValueError(
            f"a {model.config.model_type} model has no Carry to read transports from; expected one "
            "of farfield's"
        )
    chosen = _layers(model, layers)
    readings = {index: _Reading(index, list(lags), epsilon, train_length) for index in chosen}
    with _caught(chosen, readings):
        yield
    for reading in readings.values():
        reading.write(found)


def _layers(model: Any, layers: Sequence[int] | None) -> dict[int, Attention]:
    every = [module for module in model.modules() if isinstance(module, Attention)]
    wrong = sorted(set(layers or ()) - set(range(len(every))))
    if wrong:
        raise ValueError(f"layer {wrong[0]}: the model has layers 0 to {len(every) - 1}")
    return {n: one for n, one in enumerate(every) if layers is None or n in layers}


@contextmanager
def _caught(layers: dict[int, Attention], readings: dict[int, _Reading]) -> Iterator[None]:
    """Within, what each layer's mechanism and projections return is read and let go."""
    handles = []
    for index, layer in layers.items():
        reading = readings[index]
        handles.append(
            layer.mechanism.register_forward_hook(lambda _m, _a, carry, r=reading: r.carry(carry))
        )
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer, name)
            handles.append(
                projection.register_forward_hook(
                    lambda _m, _a, out, r=reading, n=name[0], d=layer.head_dim: r.projected(
                        n, out.unflatten(-1, (-1, d)).transpose(1, 2)[0]
                    )
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reading:
    """One layer: sums over texts of what is measured in each."""

    def __init__(self, layer: int, lags: list[int], epsilon: float, train_length: int) -> None:
        self.layer, self.lags, self.epsilon, self.train_length = layer, lags, epsilon, train_length
        self.rotations: list[_Rotation] = []
        self.operators: list[list[Operators]] = []
        self.gates: Gates | None = None
        self.sums: dict[str, Tensor] = {}
        self.facts: Row = {}
        self.tokens = self.texts = 0

    def carry(self, carry: Carry) -> None:
        """What one text's Carry says."""
        self.texts += 1
        self.facts = {
            "carried": carry.value_frame is not None,
            "window": carry.window,
            "sinks": carry.sinks,
            "log_scaled": carry.logit_scale is not None,
        }
        if isinstance(carry.frame, RotationFrame):
            turns = carry.frame.turns[0]
            if not self.rotations:
                self.rotations = [_Rotation(self.lags, self.train_length) for _ in turns]
            for rotation, own in zip(self.rotations, turns, strict=True):
                rotation.add(own)
        elif carry.frame is not None:
            self.operators.append(frame_operators(carry.frame, self.lags))
        elif carry.contraction is not None:
            near = [lag for lag in self.lags if lag <= LONGEST_CONTRACTION]
            self.operators.append(contraction_operators(carry.contraction, near))
        if carry.potential is not None:
            self.gates = self.gates or Gates(self.lags)
            self.gates.add(carry.potential[0])

    def projected(self, name: str, rows: Tensor) -> None:
        """Queries, keys or values [heads, T, d] before they are moved: sums over tokens."""
        planes = torch.stack(rows.double().chunk(2, -1), -1)
        size = planes.norm(dim=-1)
        added = {f"{name}_size": size.sum(-2)}
        if name == "v":
            self.tokens += rows.shape[-2]
            added |= {"v": planes.sum(-3), "v_power": size.square().sum(-2)}
        for key, value in added.items():
            self.sums[key] = self.sums[key] + value if key in self.sums else value

    def write(self, found: Transports) -> None:
        """Its rows, appended."""
        found.layers.append({"layer": self.layer, **self.facts})
        energy = self._energy()
        shared = len(self.rotations) == 1 and len(energy) > 1
        for head, rotation in enumerate(self.rotations):
            named = {"layer": self.layer, "head": None if shared else head, "texts": self.texts}
            weight = energy.mean(0) if shared else energy[head]
            found.steps += rotation.step_rows(named, weight, self.epsilon)
            found.lags += rotation.lag_rows(named)
            found.couplings.append(named | rotation.coupling())
        if self.operators:
            self._write_operators(found)
        if self.gates is not None:
            named = {"layer": self.layer, "texts": self.texts}
            found.gates += [named | row for row in self.gates.rows()]
            found.lags += [named | row for row in self.gates.lag_rows()]
        found.values += self._value_rows(energy)

    def _energy(self) -> Tensor:
        """r_b = mean |q_b| · mean |k_b| of each key head, query heads of its group averaged."""
        key = self.sums["k_size"] / self.tokens
        query = self.sums["q_size"].unflatten(0, (len(key), -1)).mean(1) / self.tokens
        return query * key

    def _value_rows(self, energy: Tensor) -> list[Row]:
        mean = self.sums["v"] / self.tokens
        power = mean.square().sum(-1)
        noise = (self.sums["v_power"] / self.tokens).sum(-1) - power.sum(-1)
        return [
            {
                "layer": self.layer,
                "head": head,
                "tokens": self.tokens,
                "mean_power": power[head].tolist(),
                "noise_power": float(noise[head].clamp(min=0)),
                "energy": energy[head].tolist(),
                "effective_blocks": float(theory.effective_blocks(energy[head].numpy())),
            }
            for head in range(len(mean))
        ]

    def _write_operators(self, found: Transports) -> None:
        heads = len(self.operators[0])
        for head in range(heads):
            own = [text[head] for text in self.operators]
            named = {
                "layer": self.layer,
                "head": None if heads == 1 and len(self._energy()) > 1 else head,
                "texts": self.texts,
            }
            step, lags = _operator_rows(own, self.epsilon)
            found.steps.append(named | step)
            found.lags += [named | row for row in lags]


class _Rotation:
    """The rotations of one head: what is measured of each text, added up."""

    def __init__(self, lags: list[int], train_length: int) -> None:
        self.lags, self.train_length = lags, train_length
        self.texts = self.tokens = 0
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, turns: Tensor) -> None:
        """One text's accumulated turns int64 [T, B]. The first token's step is on no route."""
        steps = turns.diff(dim=0)
        squared, floor = step_measures.debiased_lag_curve(turns, self.lags)
        together, apart = step_measures.block_coupling(steps)
        found = {
            # e^{imθ} through turns, which multiply exactly.
            "harmonics": torch.cat([step_measures.step_harmonics(m * steps) for m in ORDERS]),
            "squared": squared,
            "floor": floor,
            "rho2": _debiased(steps),
            "coupling": torch.stack((together, apart)).square(),
        }
        if len(steps) >= 2 * self.train_length:
            found["first"] = _debiased(steps[: self.train_length])
            found["beyond"] = _debiased(steps[self.train_length :])
        for name, value in found.items():
            self.parts.setdefault(name, []).append(value)
        self.texts += 1
        self.tokens = len(turns)

    def mean(self, name: str) -> Tensor:
        """The mean over texts."""
        return torch.stack(self.parts[name]).mean(0)

    def noise(self) -> Tensor:
        """What noise adds to a mean over texts of |R_n|² less its floor, as its spread: a square
        that is all noise has the floor as its mean and as its spread. [lags, B]."""
        return self.mean("floor") / self.texts**0.5

    def rate(self, name: str = "rho2") -> Tensor:
        """√ of the mean over texts of (T|ĉ|² − 1)/(T − 1), cut to [0, 1]: [B].

        1 to rounding is 1: a step that never varies has no window, not one of 10¹⁵ tokens.
        """
        square = self.mean(name).clamp(0.0, 1.0)
        return torch.where(square > 1 - _STILL, 1.0, square.sqrt())

    def step_rows(self, named: Row, energy: Tensor, epsilon: float) -> list[Row]:
        """One row for each block."""
        rho, squared = self.rate(), self.mean("squared")
        harmonics = torch.stack(self.parts["harmonics"]).abs().square().mean(0).sqrt()
        drift = torch.stack(self.parts["harmonics"])[:, 0].mean(0).angle()
        left = squared.clamp(min=0.0).sqrt()
        window = step_measures.measured_window(left, self.lags, epsilon, self.noise())
        expected = torch.as_tensor(theory.mixing_window(rho.numpy(), epsilon))
        moved = {
            key: self.rate(part) if part in self.parts else torch.full_like(rho, torch.nan)
            for key, part in (("rho_first", "first"), ("rho_beyond", "beyond"))
        }
        return [
            named
            | {
                "kind": "rotation",
                "block": block,
                "tokens": self.tokens,
                "rho": float(rho[block]),
                "rho_floor": float(theory.null_quantile(self.tokens)),
                **{key: _number(value[block]) for key, value in moved.items()},
                "drift": float(drift[block]),
                "harmonics": harmonics[:, block].tolist(),
                "epsilon": epsilon,
                "window": _number(window[block]),
                "window_independent": _number(expected[block]),
                "mixes": bool(torch.isfinite(window[block])),
                "window_known": not bool(torch.isnan(window[block])),
                "energy": float(energy[block] / energy.sum()),
            }
            for block in range(len(rho))
        ]

    def lag_rows(self, named: Row) -> list[Row]:
        """One row for each block and lag."""
        rho, squared, floor = self.rate(), self.mean("squared"), self.noise()
        return [
            named
            | {
                "kind": "rotation",
                "block": block,
                "lag": lag,
                "squared": float(squared[at, block]),
                "left": float(squared[at, block].clamp(min=0).sqrt()),
                "floor": float(step_measures.VISIBLE * floor[at, block].sqrt()),
                "independent": float(rho[block] ** lag),
            }
            for block in range(len(rho))
            for at, lag in enumerate(self.lags)
        ]

    def coupling(self) -> Row:
        """How far pairs of blocks are from independent, the larger of their sum and difference."""
        together = self.mean("coupling").amax(0).sqrt()
        blocks = len(together)
        pairs = together[tuple(torch.triu_indices(blocks, blocks, 1))]
        noise = float(theory.null_quantile(self.tokens * self.texts, 1 - 0.05 / max(1, len(pairs))))
        if not len(pairs):
            return {"blocks": blocks, "largest": None, "typical": None, "noise": noise}
        return {
            "blocks": blocks,
            "largest": float(pairs.max()),
            "typical": float(pairs.square().mean().sqrt()),
            "noise": noise,
        }


def _debiased(steps: Tensor) -> Tensor:
    """(T|ĉ|² − 1)/(T − 1) of each block. Shapes: [T, B] -> [B]."""
    size = step_measures.step_harmonics(steps)[0].abs().square()
    return (len(steps) * size - 1) / (len(steps) - 1)


def _operator_rows(texts: list[Operators], epsilon: float) -> tuple[Row, list[Row]]:
    """The step's row and those of its lags: squares averaged over texts."""
    lags = texts[0].lags
    norm = torch.stack([one.norm for one in texts]).square().mean(0).sqrt()
    held_out = torch.stack([one.held_out for one in texts]).mean(0)
    aligned = torch.stack([one.aligned for one in texts]).mean(0)
    kept = torch.stack([one.kept for one in texts]).mean(0)
    floor = torch.stack([one.floor for one in texts]).mean(0)
    left = held_out.clamp(min=0.0)[:, None]
    noise = (floor / step_measures.VISIBLE / len(texts) ** 0.5).square()[:, None]
    window = step_measures.measured_window(left, lags, epsilon, noise)[0]
    rate = min(1.0, float(held_out[0].clamp(min=0.0)))
    step = {
        "kind": "operator",
        "block": None,
        "rho": rate,
        "gamma2": _number(torch.tensor(sum(one.gamma2 for one in texts) / len(texts))),
        "routes": texts[0].routes,
        "epsilon": epsilon,
        "window": _number(window),
        "window_independent": _number(torch.as_tensor(theory.mixing_window(rate, epsilon))),
        "mixes": bool(torch.isfinite(window)),
        "window_known": not bool(torch.isnan(window)),
    }
    rows = [
        {
            "kind": "operator",
            "block": None,
            "lag": lag,
            "left": float(left[at, 0]),
            "norm": float(norm[at]),
            "floor": float(floor[at]),
            "independent": rate**lag,
            "aligned": float(aligned[at]),
            "kept": float(kept[at]),
        }
        for at, lag in enumerate(lags)
    ]
    return step, rows


def _number(value: Tensor) -> float | None:
    """A number for a row; None where there is none, or no finite one."""
    return float(value) if bool(torch.isfinite(value)) else None
