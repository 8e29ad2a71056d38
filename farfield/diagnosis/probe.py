"""One interface to what a model's attention does: run it on a text, look at sampled queries.

Ours go through an engine of their own, others through transformers' attention interface or, where
an architecture isn't on it, through a named adapter. What can't be measured is refused or named.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from farfield.diagnosis import adapters, own, transformers_probe
from farfield.diagnosis.sampling import Sampling
from farfield.diagnosis.session import Session, Tokens, Visit, document_positions
from farfield.evaluation.losses import Scorer, undisturbed, vocabulary

CHECKED_TOKENS = 128
"""Tokens at most on which a model's outputs are compared with those of its own eager attention."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""By how much a token's hidden state may differ, against its norm: the largest such difference over
tokens, for half precision (where an expert may be chosen otherwise) the median."""


@dataclass(frozen=True)
class Coverage:
    """What a run saw: the layers measured, those without softmax attention and what they have
    instead, and the sampled queries. Shapes: rows int64 [n]."""

    layers: tuple[int, ...]
    not_measured: dict[int, str]
    rows: Tensor


def observe(
    model: Any,
    ids: Tensor,
    visit: Visit,
    *,
    sampling: Sampling | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    feed: int | None = None,
    within: AbstractContextManager[Any] | None = None,
) -> Coverage:
    """Run a model on texts and show the attention of sampled queries, chunk by chunk, to `visit`.

    `layers` and `heads` (query heads) None: all. A text may be padded at either end, or hold packed
    documents (`position_ids` start again at each). `feed` tokens at a time go through the model's
    own cache (None: all at once), which bounds what its other layers need. `within` is entered
    around the run itself, for what else is to be read of it.

    Shapes: ids int64 [B, T], attention_mask [B, T], position_ids [B or 1, T].
    Raises: ValueError for a text the model can't read, weights that are not finite, a model whose
    attention can't be seen, or is seen otherwise than the model computes it.
    """
    _check_input(model, ids, attention_mask, feed)
    chosen = (sampling or Sampling()).rows(ids.shape[1])
    real = None if attention_mask is None else attention_mask.bool()
    position = document_positions(position_ids, real, ids.shape[1])
    tokens = Tokens(position.to(ids.device), chosen.to(ids.device), real)
    with undisturbed(model):
        _check_positions(model, ids)
        session = Session(model, tokens, visit, layers, heads)
        with _source(model, session, ids) as options, within or nullcontext():
            _run(model, ids, attention_mask, position_ids, _feed(model, feed), options)
        absent = session.missing()
    measured = [n for n in range(len(session.decoder)) if n not in absent]
    shown = [n for n in measured if layers is None or n in layers]
    if not shown:
        raise ValueError(f"layers {list(layers or ())}: none of them has softmax attention")
    return Coverage(tuple(shown), absent, chosen)


def _source(model: Any, session: Session, ids: Tensor) -> AbstractContextManager[dict[str, Any]]:
    kind = model.config.model_type
    if kind == "farfield":
        return own.attached(session)
    if kind in adapters.REFUSED:
        raise ValueError(f"{kind}: {adapters.REFUSED[kind]}")
    if kind in adapters.ADAPTERS:
        return adapters.attached(session)
    check_equal(model, ids[:, :CHECKED_TOKENS])
    return transformers_probe.attached(session)


def check_equal(model: Any, ids: Tensor) -> float:
    """How far the model's hidden states, seen through the probe, are from those of its eager code.

    Shapes: ids [B, T]. Units: relative to the norm of a token's hidden state.
    Raises: ValueError where that is more than `TOLERANCE`.
    """
    quiet = Tokens(torch.arange(ids.shape[1])[None], torch.arange(0))
    session = Session(model, quiet, lambda chunk: None)
    with transformers_probe.attached(session):
        seen = _hidden(model, ids)
    with transformers_probe.eager(model):
        expected = _hidden(model, ids)
    norm = expected.double().norm(dim=-1)
    difference = (seen - expected).double().norm(dim=-1) / torch.where(norm > 0, norm, 1.0)
    exact = TOLERANCE[expected.dtype] <= 1e-5
    error = float(difference.max() if exact else difference.median())
    if not error <= TOLERANCE[expected.dtype]:
        raise ValueError(
            f"{model.config.model_type}: its own attention differs from what the probe computes by "
            f"{error:.1e} in the hidden states; expected at most {TOLERANCE[expected.dtype]:.0e}"
        )
    return error


def _hidden(model: Any, ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def _feed(model: Any, feed: int | None) -> int | None:
    if model.config.model_type in adapters.ADAPTERS:
        return min(feed or adapters.FEED, adapters.FEED)
    return feed


def _run(
    model: Any,
    ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    feed: int | None,
    options: dict[str, Any],
) -> None:
    """The model's body on the text; the head, whose logits nobody asked for, is left out."""
    given = {"position_ids": position_ids} if position_ids is not None else {}
    if feed is None:
        body = model.base_model
        body(input_ids=ids, attention_mask=attention_mask, use_cache=False, **given, **options)
        return
    if position_ids is not None and attention_mask is None:
        raise ValueError("packed documents can't be fed through a cache; expected feed=None")
    ours = model.config.model_type == "farfield"
    cache = own.cache(model) if ours else DynamicCache(config=model.config)
    for start in range(0, ids.shape[1], feed):
        stop = min(start + feed, ids.shape[1])
        mask = None if attention_mask is None else attention_mask[:, :stop]
        if position_ids is not None:
            given = {"position_ids": position_ids[:, start:stop]}
        model.base_model(
            input_ids=ids[:, start:stop],
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            **given,
            **options,
        )


def _check_input(model: Any, ids: Tensor, mask: Tensor | None, feed: int | None) -> None:
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; expected int64 [texts, tokens], with "
            "at least one text of 2 tokens"
        )
    if feed is not None and feed < 1:
        raise ValueError(f"feed is {feed}; expected at least 1 token")
    words = vocabulary(model)
    if int(ids.min()) < 0 or int(ids.max()) >= words:
        raise ValueError(
            f"the text has token {int(ids.max() if ids.max() >= words else ids.min())}, and "
            f"the model knows 0 to {words - 1}; expected the model's own tokenizer"
        )
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"weight {name} holds NaN or infinity; expected finite weights")
    if mask is None:
        return
    if tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(f"attention_mask is of shape {list(mask.shape)}; expected that of ids")
    if bool((mask.bool().long().diff(dim=-1).abs().sum(-1) > 1).any()):
        raise ValueError("attention_mask has padding between tokens; expected it at one end")
    empty = (~mask.bool().any(-1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"attention_mask hides all of text {empty[0]}; expected a token in each")


def positions(model: Any, ids: Tensor) -> int | None:
    """How many absolute positions a model has, seen when it reads the text; None: any number.

    Shapes: ids int64 [B, T]. Raises: ValueError for a text or weights as `observe` does.
    """
    _check_input(model, ids, None, None)
    with undisturbed(model):
        return _positions(model, ids)


def _positions(model: Any, ids: Tensor) -> int | None:
    known = adapters.positions(model)
    return Scorer(model, ids[0, :16].cpu().numpy()).positions if known is None else known


def _check_positions(model: Any, ids: Tensor) -> None:
    """Past the end of a table of positions there is an index error, or nonsense."""
    known = _positions(model, ids)
    if known is not None and ids.shape[1] > known:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens, and {model.config.model_type} has {known} "
            "absolute positions; expected a text that is no longer"
        )
