"""Position-indexed baselines: a trained rotary model read further by scaling its frequencies.

Nothing is trained and no weight changes. At each length L of the ladder the rotations are those of
the factor s = max(1, L / L₀), so at L₀ and below the model is the one that was trained; `clipped`
never looks further than L₀ and is therefore the trained model's at every length.

farfield's own models are scaled where a transport's options are `scaling` and `factor`; models of
transformers where their rotary embeddings follow one set of `rope_parameters`. Which of these
rules a model gets is checked by its numbers, and what does not fit is refused.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from farfield.algebra.rotation import rotary_frequencies
from farfield.algebra.scaling import Scaling, scaled, temperature
from farfield.attention import Geometry, mechanisms
from farfield.evaluation.ladder import LadderResult, evaluate
from farfield.evaluation.plan import LadderSettings
from farfield.evaluation.protocols import Progress

if TYPE_CHECKING:
    from farfield.data import TokenStream

SCALINGS: tuple[Scaling, ...] = ("linear", "ntk", "yarn")


def scalable(mechanism: str) -> bool:
    """Whether a mechanism of ours has frequencies by position that a longer context can lower."""
    options = mechanisms.parse(mechanism).transport.options
    return getattr(options, "scaling", None) == "none"


def scaled_name(mechanism: str, scaling: Scaling) -> str:
    """The name of a mechanism's rows under a scaling, `rope:scaling=yarn`: its factor follows the
    length, so it is in each row's policy and not in the name.

    Raises: ValueError for a mechanism that can't be scaled, or is already.
    """
    composition = mechanisms.parse(mechanism)
    transport = composition.transport
    if not scalable(mechanism):
        known = getattr(transport.options, "scaling", None)
        why = f"is scaled already, by {known}" if known else "has no frequencies by position"
        raise ValueError(
            f"mechanism '{mechanism}' can't be scaled by {scaling}: its transport "
            f"'{transport.row.name}' {why}; expected one such as rope"
        )
    part = replace(transport, options=replace(transport.options, scaling=scaling))
    return str(replace(composition, transport=part))


def row_names(mechanism: str, scaling: Sequence[Scaling]) -> dict[str, Scaling]:
    """The names of the rows of a mechanism of ours: its own ("none"), then one for each scaling
    where it can be scaled."""
    names: dict[str, Scaling] = {mechanism: "none"}
    if scalable(mechanism):
        names |= {scaled_name(mechanism, one): one for one in scaling}
    return names


def check_scalings(names: Sequence[str]) -> tuple[Scaling, ...]:
    """The names as scalings, each once. Raises: ValueError naming the nearest."""
    for name in names:
        if name not in SCALINGS:
            near = difflib.get_close_matches(name, SCALINGS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"scaling {name!r}: expected some of {', '.join(SCALINGS)}{hint}")
    return cast("tuple[Scaling, ...]", tuple(dict.fromkeys(names)))


@dataclass(frozen=True)
class _Part:
    """A module of a model, and how to make the one that takes its place under a factor."""

    owner: nn.Module
    name: str
    made: Callable[[float], nn.Module]


class Scaled:
    """A rotary model as the ladder reads it under one scaling; its weights are the model's own.

    Units: train_length, L₀, in tokens.
    Raises: ValueError, one line that names the model, where it can't be scaled exactly.
    """

    def __init__(self, model: Any, scaling: Scaling, train_length: int) -> None:
        self.scaling = scaling
        self.train_length = train_length
        self.mechanism: str
        if model.config.model_type == "farfield":
            self.mechanism = scaled_name(model.config.mechanism, scaling)
            self._parts = _our_parts(model, scaling, train_length)
        else:
            self.mechanism = f"{model.config.model_type}:scaling={scaling}"
            self._parts = _their_parts(model, scaling, train_length)

    def factor(self, length: int) -> float:
        """s = max(1, L / L₀)."""
        return max(1.0, length / self.train_length)

    @contextmanager
    def at(self, length: int) -> Iterator[None]:
        """Within, the model's rotations are those of a length; then they are as they were."""
        factor = self.factor(length)
        if factor == 1.0:
            yield
            return
        before = [(part, getattr(part.owner, part.name)) for part in self._parts]
        try:
            for part, old in before:
                setattr(part.owner, part.name, part.made(factor).train(old.training))
            yield
        finally:
            for part, old in before:
                setattr(part.owner, part.name, old)


def evaluate_each(
    model: Any,
    stream: TokenStream,
    settings: LadderSettings,
    *,
    train_length: int,
    mechanism: str,
    seed: int,
    scaling: Sequence[Scaling] = (),
    done: Collection[str] = (),
    progress: Progress | None = None,
) -> Iterator[LadderResult]:
    """The ladder of a model, then of the same model under each scaling; one result after another.

    Rows of names in `done` are there already and are not measured again. Arguments otherwise as
    `evaluate`, and so are errors; ValueError as well where the model can't be scaled, before
    anything is measured.
    """
    readings: list[tuple[str, Scaled | None]] = [(mechanism, None)]
    for one in scaling:
        scaled_model = Scaled(model, one, train_length)
        readings.append((scaled_model.mechanism, scaled_model))
    due = [(name, reading) for name, reading in readings if name not in done]
    for index, (name, reading) in enumerate(due):
        yield evaluate(
            model,
            stream,
            settings,
            train_length=train_length,
            mechanism=name,
            seed=seed,
            progress=progress and partial(_part_of, progress, index, len(due)),
            scaled=reading,
        )


def _part_of(progress: Progress, index: int, count: int, done: float, total: float) -> None:
    progress(index * total + done, count * total)


def _our_parts(model: Any, scaling: Scaling, train_length: int) -> list[_Part]:
    """The transport of every layer. It has no weights, so another takes its place as it is."""
    transport = mechanisms.parse(model.config.mechanism).transport

    def made(geometry: Geometry, factor: float) -> nn.Module:
        options = replace(transport.options, scaling=scaling, factor=factor)
        module = transport.row.build(geometry, options)
        assert module is not None, "what has options to scale is no identity"
        return module

    parts = []
    for layer, mechanism in enumerate(model.mechanisms):
        geometry = replace(model.config.geometry(layer), train_length=train_length)
        parts.append(_Part(mechanism, "transport", partial(made, geometry)))
    return parts


def _their_parts(model: Any, scaling: Scaling, train_length: int) -> list[_Part]:
    """The rotary embeddings of a model of transformers, made anew from changed rope_parameters."""
    parts = []
    for name, module in model.named_modules():
        if not any(own.endswith("inv_freq") for own, _ in module.named_buffers(recurse=False)):
            continue
        problem = _unfit(module, scaling, train_length)
        if problem is not None:
            raise ValueError(
                f"a {model.config.model_type} model can't be scaled by {scaling}: "
                f"its rotary embedding {name} {problem}"
            )
        owner, _, own = name.rpartition(".")
        made = partial(_theirs_made, module, scaling, train_length)
        parts.append(_Part(model.get_submodule(owner), own, made))
    if not parts:
        raise ValueError(
            f"a {model.config.model_type} model can't be scaled by {scaling}: it has no rotary "
            "embeddings; expected a model that turns by position, such as llama"
        )
    return parts


def _unfit(module: Any, scaling: Scaling, train_length: int) -> str | None:
    """Why a rotary embedding can't be scaled: it must be plain, follow its parameters, and turn
    under a factor as the rule says, whatever its class makes of a configuration."""
    if not isinstance(getattr(module, "inv_freq", None), Tensor):
        return "has frequencies for each kind of layer; expected one set"
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return "does not follow one set of rope_parameters"
    if parameters.get("rope_type") != "default":
        return f"is of the type '{parameters.get('rope_type')}' already; expected 'default'"
    try:
        same = _theirs_made(module, "none", train_length, 1.0)
        twice = _theirs_made(module, scaling, train_length, 2.0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"can't be made from its rope_parameters ({type(error).__name__})"
    if not torch.equal(same.inv_freq, module.inv_freq):
        return "is not what its rope_parameters say"
    omega = rotary_frequencies(2 * len(module.inv_freq), float(parameters["rope_theta"]))
    expected = scaled(scaling, omega, 2.0, train_length).to(twice.inv_freq)
    # float32 powers are good to about 1e-6; a rule that is not followed is off by up to half.
    if not torch.allclose(twice.inv_freq, expected, rtol=1e-4, atol=0.0):
        return "does not turn as the rule says"
    factors = (getattr(same, "attention_scaling", None), getattr(twice, "attention_scaling", None))
    if factors != (1.0, temperature(scaling, 2.0)):
        return "does not scale its attention as the rule says"
    return None


def _theirs_made(module: Any, scaling: Scaling, train_length: int, factor: float) -> Any:
    """The module its class makes where rope_parameters name the rule and the factor."""
    config = copy.deepcopy(module.config)
    parameters = config.rope_parameters
    dim = 2 * len(module.inv_freq)
    rules: dict[Scaling, dict[str, Any]] = {
        "none": {},
        "linear": {"rope_type": "linear", "factor": factor},
        # NTK is the plain embedding with another base; their `dynamic` changes within a forward.
        "ntk": {"rope_theta": parameters["rope_theta"] * factor ** (dim / max(dim - 2, 1))},
        "yarn": {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": train_length,
        },
    }
    config.rope_parameters = {**parameters, **rules[scaling]}
    return type(module)(config).to(module.inv_freq.device)
