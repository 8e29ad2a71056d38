"""Changing one thing at evaluation: which part of a model's attention does the work, or the harm.

Each intervention is an engine that is passed with the call, so that the model itself is untouched,
and the ladder reads the same tokens with it. What they change is the far set, the keys at a
distance of at least `near_window`:

| name                 | what a query gets                                                        |
|----------------------|--------------------------------------------------------------------------|
| `far_masked`         | near keys alone: no far key is seen, nor in the denominator              |
| `far_values_dropped` | near values at the weights they had: the far keys still take theirs      |
| `far_logits_mean`    | every far logit replaced by the mean of the row's far logits             |
| `far_frame`          | far keys (and carried values) moved by one more, random, orthogonal map  |
| `alibi`              | ALiBi's slopes added to whatever the model has                           |
| `log_n`              | logits times ln n / ln L₀ where a query sees n > L₀ keys                 |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from farfield.attention.engines import Engine
from farfield.diagnosis import own
from farfield.diagnosis.engines import ALONG, NAMES, NONE, Far, check_names, engine
from farfield.evaluation.ladder import evaluate
from farfield.evaluation.plan import LadderSettings
from farfield.evaluation.protocols import Progress

if TYPE_CHECKING:
    from farfield.data import TokenStream


def serving(model: Any) -> tuple[str, ...]:
    """The names of those that a model takes: all, four, or none where it takes no engine."""
    if getattr(model.config, "model_type", None) != "farfield":
        return ()
    return ALONG if own.contracts(model) else NAMES


def chosen(model: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """The names asked for (None: all that the model takes).

    Raises: ValueError for an unknown name, and for one that the model doesn't take.
    """
    takes = serving(model)
    if names is None:
        return takes
    check_names(names)
    if names and not takes:
        raise ValueError(
            f"interventions on a {model.config.model_type} model: expected none of them, since "
            "only farfield's models take an engine"
        )
    refused = [name for name in names if name not in takes]
    if refused:
        raise ValueError(
            f"intervention {refused[0]!r} takes far keys apart, and this model's steps contract; "
            f"expected some of {', '.join(takes)}"
        )
    return tuple(dict.fromkeys(names))


@contextmanager
def under(model: Any, using: Engine) -> Iterator[None]:
    """Within, every call of one of our models computes its attention with this engine.

    Raises: ValueError for a model that takes no engine.
    """
    if getattr(model.config, "model_type", None) != "farfield":
        raise ValueError(
            f"a {model.config.model_type} model takes no engine; interventions are for farfield's"
        )

    def with_engine(_: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**options, "engine": using}

    handle = model.base_model.register_forward_pre_hook(with_engine, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def run(
    model: Any,
    stream: TokenStream,
    settings: LadderSettings,
    far: Far,
    *,
    mechanism: str,
    seed: int,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """The ladder of the model as it is, then under each intervention, on the same tokens.

    `names` None: all that the model takes. Rows are those of the ladder with the keys
    `intervention` and `near_window`, and `against`, the perplexity over the untouched model's at
    the same length.

    Raises: ValueError as `evaluate` and `chosen`, before anything is measured.
    """
    engines = [engine(name, far) for name in (NONE, *chosen(model, names))]
    rows: list[dict[str, Any]] = []
    for done, one in enumerate(engines):
        part = None if progress is None else _Part(progress, done, len(engines))
        with under(model, one):
            result = evaluate(
                model, stream, settings, train_length=far.train_length, mechanism=mechanism,
                seed=seed, progress=part,
            )  # fmt: skip
        known = {"intervention": one.name, "near_window": far.near_window}
        rows += [{**row, **known} for row in result.rows]
    untouched = {
        (row["protocol"], row["length"]): row["ppl"] for row in rows if row["intervention"] == NONE
    }
    for row in rows:
        base = untouched[row["protocol"], row["length"]]
        row["against"] = row["ppl"] / base if row["ppl"] is not None and base else None
    return rows


class _Part:
    """Progress of one ladder among several."""

    def __init__(self, progress: Progress, done: int, parts: int) -> None:
        self.progress, self.done, self.parts = progress, done, parts

    def __call__(self, done: float, total: float) -> None:
        self.progress(total * self.done + done, total * self.parts)
