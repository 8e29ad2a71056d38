"""What a source needs to know while a model runs: what to look at, whom to show it, what was seen.

Calls are counted per decoder layer. A layer whose attention was not seen is an error, unless it has
no softmax attention at all, and then it is named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farfield.diagnosis.tiles import Attended, Chunk

Visit = Callable[[Chunk], None]
"""Called with every chunk of sampled queries of every selected layer."""

_WITHOUT_SOFTMAX = re.compile(
    r"linear_?attention|mamba|delta_?net|short_?conv|rwkv|recurrent|rglru|hyena|retention|ssm|lightning",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a run, as far as a row of attention depends on them.

    Shapes: position int64 [B or 1, T], tokens of the document before each; real bool [B, T] or None
    (no padding); rows int64 [n], the sampled queries.
    """

    position: Tensor
    rows: Tensor
    real: Tensor | None = None


@dataclass
class Session:
    """One run of a model: which layers and heads are looked at (None: all), and what was seen.

    Raises: ValueError for a layer that the model doesn't have, and for a choice of nothing.
    """

    model: Any
    tokens: Tokens
    visit: Visit
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    calls: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.decoder = decoder_layers(self.model)
        self.current: int | None = None
        self.forwards = 0
        for what, some in (("layers", self.layers), ("heads", self.heads)):
            if some is not None and not some:
                raise ValueError(f"{what} are none at all; expected at least one, or None for all")
        wrong = sorted(set(self.layers or ()) - set(range(len(self.decoder))))
        if wrong:
            raise ValueError(f"layer {wrong[0]}: the model has layers 0 to {len(self.decoder) - 1}")

    @contextmanager
    def following(self) -> Iterator[None]:
        """Knows, while the model runs, which decoder layer is at work; counts its forwards."""
        handles = [self.decoder[0].register_forward_pre_hook(self._count)]
        for index, layer in enumerate(self.decoder):
            handles.append(layer.register_forward_pre_hook(self._entering(index)))
            handles.append(layer.register_forward_hook(self._leaving))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def wanted(self) -> bool:
        """Whether the layer at work is looked at."""
        return self.layers is None or self.current in self.layers

    def chosen(self, heads: int) -> tuple[int, ...]:
        """The heads looked at, of so many. Raises: ValueError for one that isn't there."""
        if self.heads is None:
            return tuple(range(heads))
        wrong = sorted(set(self.heads) - set(range(heads)))
        if wrong:
            raise ValueError(f"head {wrong[0]}: layer {self.current} has heads 0 to {heads - 1}")
        return tuple(dict.fromkeys(self.heads))

    def called(self) -> int:
        """Count a call; returns the layer at work.

        Raises: ValueError for a call outside of the decoder layers, or a second one in the layer.
        """
        if self.current is None:
            raise ValueError(
                f"{self._name}: attention outside of its decoder layers; expected a causal "
                "language model whose layers can be told apart"
            )
        self.calls[self.current] += 1
        if self.calls[self.current] > self.forwards:
            raise ValueError(
                f"{self._name}: layer {self.current} attends more than once in a forward; expected "
                "one attention a layer"
            )
        return self.current

    def show(self, attended: Attended) -> None:
        """The sampled queries of a call, chunk by chunk, to the visitor."""
        for chunk in attended.chunks(self.tokens.rows):
            self.visit(chunk)

    def missing(self) -> dict[int, str]:
        """The layers without softmax attention, and what they have in its place.

        Raises: ValueError where an attention was not seen in every forward, or there is none.
        """
        absent: dict[int, str] = {}
        for index, layer in enumerate(self.decoder):
            seen = self.calls[index]
            if seen == self.forwards:
                continue
            mixer = None if seen else _without_softmax(layer)
            if mixer is None:
                raise ValueError(
                    f"{self._name}: the attention of layer {index} ({_attention_of(layer)}) was "
                    f"seen {seen} times in {self.forwards} forwards; it doesn't go through the "
                    "interface that the probe reads"
                )
            absent[index] = mixer
        if len(absent) == len(self.decoder):
            raise ValueError(
                f"{self._name}: no layer has softmax attention ({absent[0]}); expected at least one"
            )
        return absent

    @property
    def _name(self) -> str:
        return str(getattr(self.model.config, "model_type", type(self.model).__name__))

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self.current = index

        return enter

    def _leaving(self, *_: Any) -> None:
        self.current = None


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a causal language model, first to last.

    Raises: ValueError where no list of as many modules as the configuration says is found.
    """
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(
        f"{model.config.model_type}: no list of {count} decoder layers found; expected a causal "
        "language model"
    )


def _names(layer: nn.Module) -> list[str]:
    return [type(module).__name__ for module in layer.modules() if module is not layer]


def _without_softmax(layer: nn.Module) -> str | None:
    """What a layer has instead of softmax attention; None where it has one."""
    names = _names(layer)
    if any(_ATTENTION.search(name) and not _WITHOUT_SOFTMAX.search(name) for name in names):
        return None
    mixers = [name for name in names if _WITHOUT_SOFTMAX.search(name) and "Norm" not in name]
    return next(iter(mixers), type(layer).__name__)


def _attention_of(layer: nn.Module) -> str:
    return next((name for name in _names(layer) if _ATTENTION.search(name)), type(layer).__name__)


def document_positions(position_ids: Tensor | None, real: Tensor | None, length: int) -> Tensor:
    """How many tokens of its document precede each: int64 [B or 1, T].

    Packed documents are told by positions that start again.
    """
    if real is not None:
        return (real.long().cumsum(-1) - 1).clamp(min=0)
    index = torch.arange(length).unsqueeze(0)
    if position_ids is None:
        return index
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    index = index.to(position_ids.device)
    return index - torch.where(begins, index, 0).cummax(-1).values
