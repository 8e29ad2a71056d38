"""Models whose attention doesn't go through transformers' interface: each by name, or refused.

Their own eager code runs, fed a few queries at a time through their own cache, so that no table is
larger than those queries × all keys. What goes into the softmax is read where it goes in: these are
the model's logits, not a second computation of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from farfield.diagnosis.session import Session
from farfield.diagnosis.tiles import Attended, Written
from farfield.diagnosis.transformers_probe import eager

FEED = 128
"""Queries that are fed at a time, at most."""

REFUSED = {
    "gptj": "its attention is neither on transformers' interface nor known to an adapter",
    "codegen": "its attention is neither on transformers' interface nor known to an adapter",
}


@dataclass(frozen=True)
class Adapter:
    """What has to be known of an architecture beyond what its softmax shows.

    `attention` is the class whose forward holds the one softmax; `bias` reads from its arguments
    what was added to the scores ([B or 1, H, 1, K], None: nothing); `positions` is the number of
    tokens the model can read (None: any, or told by its tables); `refusal` a reason not to.
    """

    attention: str
    bias: Callable[[dict[str, Any], int], Tensor | None]
    positions: Callable[[Any], int | None] = lambda config: None
    refusal: Callable[[Any], str | None] = lambda config: None


def _bloom(given: dict[str, Any], keys: int) -> Tensor | None:
    alibi: Tensor = given["alibi"]  # [B·H, 1, K]
    return alibi.unflatten(0, (given["hidden_states"].shape[0], -1))


def _mpt(given: dict[str, Any], keys: int) -> Tensor | None:
    bias: Tensor = given["position_bias"]  # [H, 1, longest]
    return bias[None, :, :, bias.shape[-1] - keys :]


def _nothing(given: dict[str, Any], keys: int) -> Tensor | None:
    return None


def _falcon_refusal(config: Any) -> str | None:
    if not config.alibi:
        return None
    return (
        "Falcon with ALiBi: its eager code adds the bias twice and its default code once, so there "
        "is no one attention to measure"
    )


ADAPTERS = {
    "bloom": Adapter("BloomAttention", _bloom),
    "mpt": Adapter("MptAttention", _mpt, positions=lambda config: int(config.max_seq_len)),
    "falcon": Adapter("FalconAttention", _nothing, refusal=_falcon_refusal),
    "gpt_neo": Adapter("GPTNeoSelfAttention", _nothing),
}


def positions(model: Any) -> int | None:
    """How many tokens an adapted model can read; None where its tables tell, or for any number."""
    adapter = ADAPTERS.get(model.config.model_type)
    return None if adapter is None else adapter.positions(model.config)


@contextmanager
def attached(session: Session) -> Iterator[dict[str, Any]]:
    """The session sees the attention of an adapted model; afterwards the model is as it was.

    Raises: ValueError for a variant that is refused.
    """
    model = session.model
    adapter = ADAPTERS[model.config.model_type]
    reason = adapter.refusal(model.config)
    if reason is not None:
        raise ValueError(reason)
    watch = _Softmaxes(session, adapter)
    with ExitStack() as stack:
        for layer in session.decoder:
            for module in layer.modules():
                if type(module).__name__ == adapter.attention:
                    handle = module.register_forward_pre_hook(watch.entering, with_kwargs=True)
                    stack.callback(handle.remove)
                    stack.callback(module.register_forward_hook(watch.leaving).remove)
        stack.enter_context(eager(model))
        stack.enter_context(session.following())
        stack.enter_context(watch)
        yield {}


class _Softmaxes(TorchFunctionMode):
    """Watches what goes into a softmax while an attention module is at work."""

    def __init__(self, session: Session, adapter: Adapter) -> None:
        super().__init__()
        self.session = session
        self.adapter = adapter
        self.given: dict[str, Any] | None = None

    def entering(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Keep what an attention module is called with."""
        names = module.forward.__code__.co_varnames[1:]
        self.given = {**dict(zip(names, args, strict=False)), **given}

    def leaving(self, *_: Any) -> None:
        """An attention module is done."""
        self.given = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.softmax and self.given is not None:
            given, self.given = self.given, None  # what the visitor does is not watched
            self._look(args[0], given)
            self.given = given
        return func(*args, **(kwargs or {}))

    def _look(self, logits: Tensor, given: dict[str, Any]) -> None:
        session = self.session
        layer = session.called()
        if not session.wanted():
            return
        cache = given.get("layer_past") if given.get("cache") is None else given["cache"]
        if cache is None:
            raise ValueError(f"layer {layer}: no cache; expected the text to be fed through one")
        values = cache.layers[layer].values
        queries, keys = logits.shape[-2:]
        heads = session.chosen(logits.shape[1])
        bias = self.adapter.bias(given, keys)
        chosen = torch.tensor(heads, device=logits.device)
        shared = chosen // (logits.shape[1] // values.shape[1])
        logits = logits[:, chosen]
        seen = (logits[:, 0] > torch.finfo(logits.dtype).min / 2).expand(len(values), -1, -1)
        session.show(
            Attended(
                layer=layer,
                start=keys - queries,
                queries=queries,
                first=0,
                scores=Written(
                    logits[:, :, None],
                    keys - queries,
                    None if bias is None else bias[:, chosen, None],
                ),
                values=values[:, shared],
                visible=lambda rows: seen[:, rows],
                position=session.tokens.position,
                heads=heads,
                real=session.tokens.real,
            )
        )
