"""Section `pruned`: attention that stops where a potential has left nothing, over all of it.

Queries, keys, values and potentials are those of a trained model on a text it wasn't trained on:
zeros and random gates would prove nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farfield import FarfieldForCausalLM
from farfield.attention import engines, mechanisms
from farfield.attention.engines import pruned
from farfield.attention.engines.engine import FEATURES, FLOATS, Engine
from farfield.attention.logit import Visible
from farfield.benchmark.pairing import Report, paired
from farfield.benchmark.plan import CALLS, Job, Setting, attention, where
from farfield.benchmark.rows import LeftOut, Row, quantity, timed
from farfield.evaluation.pretrained import load_model
from farfield.training import train

SECTION = "pruned"
TRAINED = ("alibi", "forget")
"""What is trained where no model is given."""

FULL, PRUNED = "full", "pruned"
_RIDING = 2.0
"""What a potential costs the full kernel, as a multiple of none."""


@dataclass
class Source:
    """A trained model, once it is needed: read from a folder, or trained here."""

    setting: Setting
    mechanism: str
    folder: Path | None = None
    _model: FarfieldForCausalLM | None = field(default=None, init=False)

    @property
    def model(self) -> FarfieldForCausalLM:
        """The model. Raises: ValueError for one that has no potential, or reads another text."""
        if self._model is None:
            self._model = self._trained() if self.folder is None else self._read(self.folder)
        return self._model

    def _read(self, folder: Path) -> FarfieldForCausalLM:
        model = checked(folder)
        known = self.setting.needed_workload.corpus.tokenizer.vocab_size
        if model.config.vocab_size != known:
            raise ValueError(
                f"{folder} has {model.config.vocab_size} token ids and the recipe's text {known}; "
                "give the recipe it was trained by"
            )
        return model

    def _trained(self) -> FarfieldForCausalLM:
        work = self.setting.needed_workload
        count = work.settings.iterations
        self.setting.say(
            f"training {self.mechanism} by the recipe {work.recipe} ({count} iterations) for the "
            f"inputs of {SECTION}; --model FOLDER takes one that is trained"
        )
        started = time.perf_counter()
        model = work.build(self.mechanism)
        with tempfile.TemporaryDirectory(prefix="farfield-bench-") as folder:
            train(model, work.corpus, work.settings, Path(folder), seed=self.setting.seed)
        took = time.perf_counter() - started
        self.setting.say(f"trained {self.mechanism} in {took:.0f} s")
        return model.eval()


@dataclass(frozen=True)
class Captured:
    """What one layer's attention was called with. Shapes: as in `Engine`."""

    q: Tensor
    k: Tensor
    v: Tensor
    potential: Tensor
    visible: Visible


def checked(folder: Path) -> FarfieldForCausalLM:
    """The model of a folder. Raises: ValueError for one whose attention has no potential."""
    model = load_model(folder)
    if not isinstance(model, FarfieldForCausalLM):
        raise ValueError(f"{folder} holds a {type(model).__name__}; expected a model of farfield")
    controls = mechanisms.parse(model.config.mechanism).controls
    if not any(control.row.sets == "potential" for control in controls):
        raise ValueError(
            f"{folder} has {model.config.mechanism}, and no potential to stop by; expected a "
            "mechanism with alibi or forget"
        )
    return model.eval()


def jobs(setting: Setting) -> list[Job | LeftOut]:
    """One job for each model and length."""
    found: list[Job | LeftOut] = []
    text = len(setting.needed_workload.corpus.test)
    for source in _sources(setting):
        for index, tokens in enumerate(setting.sizes.pruned):
            name = f"{source.mechanism} at T = {tokens:,}"
            if tokens > text:
                found.append(LeftOut(SECTION, name, f"the test text holds {text:,} tokens"))
                continue
            work = _work(setting, source, tokens, index == 0 and source.folder is None)
            shorter = setting.sizes.pruned[index - 1] if index else None
            run = partial(_compare, setting, source, tokens, shorter)
            before = f"{source.mechanism} at T = {shorter:,}" if shorter else ""
            found.append(Job(SECTION, name, work, run, 1.0, before))
    return found


def _sources(setting: Setting) -> list[Source]:
    if not setting.models:
        return [Source(setting, name) for name in TRAINED]
    return [Source(setting, checked(folder).config.mechanism, folder) for folder in setting.models]


def _work(setting: Setting, source: Source, tokens: int, training: bool) -> float:
    """Operations: layers up to the one that is measured, then full and pruned attention; and the
    training, where it comes first."""
    work = setting.needed_workload
    config = work.build(source.mechanism).config if source.folder is None else source.model.config
    heads = config.num_attention_heads
    once = _RIDING * attention(tokens, heads, config.head_dim or config.hidden_size // heads)
    operations = once * (CALLS * 1.5 + config.num_hidden_layers // 2)
    if training:
        weights = sum(p.numel() for p in work.build(source.mechanism).parameters())
        operations += 8.0 * weights * work.settings.train_tokens
    return operations


def _compare(
    setting: Setting,
    source: Source,
    tokens: int,
    shorter: int | None,
    allowance: float,
    report: Report,
) -> list[Row]:
    started = time.perf_counter()
    ids = source.setting.needed_workload.corpus.test.block(0, tokens)
    given = captured(source.model, torch.from_numpy(ids)[None])
    skipped: list[Tensor] = []
    with torch.no_grad():
        error = (_full(given) - _pruned(given, skipped.append)).abs().amax()
    calls: dict[str, Callable[[], Tensor]] = {
        FULL: partial(_full, given),
        PRUNED: partial(_pruned, given),
    }
    if shorter is not None:
        calls["shorter"] = partial(_pruned, _first(given, shorter))
    left = allowance - (time.perf_counter() - started)
    with torch.no_grad():
        samples = paired(calls, max(0.0, left), report=report)
    layers = source.model.config.num_hidden_layers
    fields = where(
        setting,
        SECTION,
        tokens=tokens,
        sizes=f"{_words(given)}, layer {layers // 2 + 1} of {layers}, on the test text",
        case=source.mechanism,
    )
    shares = ", ".join(f"{share:.3f}" for share in skipped[0][0].tolist())
    rows = [
        timed(samples, PRUNED, FULL, measure="forward", **fields),
        quantity(float(error), measure="largest output error", **fields),
        quantity(
            float(skipped[0].mean()), measure="share skipped", note=f"by head: {shares}", **fields
        ),
    ]
    if shorter is not None:
        fields["measure"] = f"growth from {shorter:,}"
        rows.append(timed(samples, PRUNED, "shorter", **{**fields, "baseline": ""}))
    return rows


def captured(model: FarfieldForCausalLM, ids: Tensor) -> Captured:
    """What the attention of the middle layer is called with on a text.

    Shapes: ids int64 [1, T]. The layers above it are cut off the model, which is of no use for
    anything else afterwards.
    """
    decoder = model.model
    last = model.config.num_hidden_layers // 2
    decoder.layers = nn.ModuleList(list(decoder.layers)[: last + 1])
    seen: list[Captured] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Tensor:
        seen.append(Captured(q, k, v, asked["potential"], asked["visible"]))
        if len(seen) > last:
            return torch.zeros_like(v)
        return engines.attend("auto", q, k, v, **asked)

    engine = Engine("record", record, frozenset(), FLOATS, frozenset(), frozenset(FEATURES))
    with torch.no_grad():
        decoder(input_ids=ids, engine=engine, use_cache=False)
    return seen[-1]


def _first(given: Captured, tokens: int) -> Captured:
    """The same for the first tokens alone."""
    q, k, v = (x[:, :, :tokens].contiguous() for x in (given.q, given.k, given.v))
    return Captured(q, k, v, given.potential[..., :tokens], Visible(tokens, tokens))


def _full(given: Captured) -> Tensor:
    return engines.attend(
        "sdpa", given.q, given.k, given.v, potential=given.potential, visible=given.visible
    )


def _pruned(given: Captured, report: Callable[[Tensor], None] | None = None) -> Tensor:
    return pruned.attend(
        given.q,
        given.k,
        given.v,
        potential=given.potential,
        visible=given.visible,
        report=report,
    )


def _words(given: Captured) -> str:
    return f"{given.q.shape[1]} heads of {given.q.shape[-1]}, batch 1"
