"""−log p of every target from any Hugging Face causal language model, in bounded memory.

The hidden states of a whole window are kept; logits exist for a piece of it at a time. How hidden
states become logits differs between models (soft caps, scales, biases), so a head is used only
after it gave, bit for bit, the model's own logits on a short probe.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Ids = npt.NDArray[np.int64]
Losses = npt.NDArray[np.float64]

PROBE_TOKENS = 16
_LOGITS_AT_ONCE = 2**22  # numbers, so 16 MiB as float32, whatever length and vocabulary


class Scorer:
    """The summands of every protocol: −log p(target | the tokens of its window before it).

    Use it inside `undisturbed(model)`. `head` says how logits are made:

    - "chunked": the output embeddings applied to pieces of the hidden states;
    - "replayed": the model's own forward, its body replaced by pieces of the hidden states, for
      models that do more than the output embeddings (Gemma 2's soft cap);
    - "full": whole-model logits, where neither equals them; memory then grows with
      length × vocabulary.

    `positions` is the number of learned absolute positions, None if there are none: seen from
    which tables the model reads in the probe, not from a name in its configuration.

    Shapes: probe [n], ids the model knows; n >= 2 lets positions be told from ids.
    """

    def __init__(self, model: Any, probe: Ids) -> None:
        self.model = model
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = str(parameter.dtype).removeprefix("torch.")
        # In descending order, so that token ids are never taken for positions.
        ids = torch.from_numpy(np.sort(probe)[::-1].copy())[None].to(self.device)
        with _TableReads(self.model.get_input_embeddings().weight) as reads:
            logits = self._model_logits(ids)
        self.positions = reads.positions(ids.shape[1])
        self._columns = logits.shape[-1]
        self.head, self._to_logits = self._choose_head(ids, logits)

    def nll(self, windows: Ids, keep: int) -> Losses:
        """−log p of the last `keep` tokens of each window, in nats; the softmax is in float32.

        A window of n + 1 tokens is n inputs and, shifted by one, n targets: target p (from 0)
        sees p + 1 tokens.

        Shapes: windows [rows, n + 1] -> [rows, keep], 1 <= keep <= n.
        """
        tokens = torch.from_numpy(windows).to(self.device)
        inputs, targets = tokens[:, :-1], tokens[:, -keep:].reshape(-1)
        if self._to_logits is None:
            return _cross_entropy(self._model_logits(inputs, keep), targets).reshape(-1, keep)
        hidden = self._body(inputs).last_hidden_state[:, -keep:]
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        losses = np.empty(len(targets))
        piece = max(1, _LOGITS_AT_ONCE // self._columns)
        for start in range(0, len(targets), piece):
            part = slice(start, start + piece)
            losses[part] = _cross_entropy(self._to_logits(hidden[:, part]), targets[part])
        return losses.reshape(-1, keep)

    def _choose_head(
        self, ids: Tensor, logits: Tensor
    ) -> tuple[str, Callable[[Tensor], Tensor] | None]:
        """The cheapest way from hidden states to logits that equals the model's own."""
        if self.model.base_model is self.model:  # no body apart from the head
            return "full", None
        output = self._body(ids)
        hidden = getattr(output, "last_hidden_state", None)
        if not isinstance(hidden, Tensor):
            return "full", None
        self._output_type = type(output)
        candidates = {"chunked": self.model.get_output_embeddings(), "replayed": self._replay}
        for name, head in candidates.items():
            if head is not None and _agrees(head, hidden, logits):
                return name, head
        return "full", None

    def _body(self, ids: Tensor) -> Any:
        body = self.model.base_model
        return body(input_ids=ids, **_accepted(body, use_cache=False))

    def _model_logits(self, ids: Tensor, keep: int = 0) -> Tensor:
        options = _accepted(self.model, use_cache=False, logits_to_keep=keep)
        logits: Tensor | None = getattr(self.model(input_ids=ids, **options), "logits", None)
        if logits is None:
            name = type(self.model).__name__
            raise ValueError(f"{name} gives no logits; expected a causal language model")
        return logits[:, -keep:]

    def _replay(self, hidden: Tensor) -> Tensor:
        """The model's own forward on hidden states that are known already."""
        prefix = self.model.base_model_prefix
        body = getattr(self.model, prefix)
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        setattr(self.model, prefix, _Replayed(self._output_type(last_hidden_state=hidden)))
        try:
            return self._model_logits(ids)
        finally:
            setattr(self.model, prefix, body)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients or autocast, after which nothing has changed.

    Restored: the random states of Python, NumPy and torch (CPU, and the model's own GPU), and
    every module's own training flag.
    """
    device = next(model.parameters()).device
    flags = [(module, module.training) for module in model.modules()]
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 (the global state is what is kept safe)
    model.eval()
    try:
        # Not inference_mode: a table that the model makes and keeps during evaluation would be
        # an inference tensor, and the next training iteration could not save it for backward.
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
            torch.no_grad(),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for module, training in flags:
            module.training = training


def vocabulary(model: Any) -> int:
    """How many token ids a model can read and predict."""
    sizes = [len(model.get_input_embeddings().weight)]
    output = model.get_output_embeddings()
    if output is not None:
        sizes.append(len(output.weight))
    return min(sizes)


class _Replayed(nn.Module):
    """Stands in for a model's body and returns what it returned."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.output


class _TableReads(TorchFunctionMode):
    """Watches which embedding tables a forward reads, and with which indices."""

    def __init__(self, token_table: Tensor) -> None:
        super().__init__()
        self.token_table = token_table
        self.reads: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.embedding and args[1] is not self.token_table:
            self.reads.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def positions(self, tokens: int) -> int | None:
        """Rows usable for positions, of the smallest table read at o, o + 1, …, o + tokens − 1."""
        usable = []
        for index, table in self.reads:
            if tokens < 2 or index.shape[-1:] != (tokens,):
                continue
            rows = index.reshape(-1, tokens)
            if bool((rows.diff(dim=-1) == 1).all()):
                usable.append(table.shape[0] - int(rows[:, 0].max()))
        return min(usable, default=None)


def _agrees(head: Callable[[Tensor], Tensor], hidden: Tensor, logits: Tensor) -> bool:
    """Whether a head gives these very logits. To the bit: a soft cap moves small ones little."""
    try:
        return torch.equal(head(hidden), logits)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # this model's forward is built so that this head can't be applied alone


def _accepted(module: nn.Module, **options: Any) -> dict[str, Any]:
    """Those of the options that the module's forward takes by name or passes on."""
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _cross_entropy(logits: Tensor, targets: Tensor) -> Losses:
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype != torch.float64:
        flat = flat.float()
    losses = F.cross_entropy(flat, targets, reduction="none")
    return losses.double().cpu().numpy()
