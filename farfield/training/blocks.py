"""Which tokens training and validation see, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from farfield.training.settings import TrainingSettings

if TYPE_CHECKING:
    import torch


class Stream(Protocol):
    """What training needs of a token stream."""

    def __len__(self) -> int: ...

    def block(self, start: int, length: int) -> np.ndarray: ...


class Splits(Protocol):
    """What training needs of a corpus."""

    @property
    def train(self) -> Stream: ...

    @property
    def validation(self) -> Stream: ...


class TrainingBlocks:
    """Example i of a run: L₀+1 consecutive tokens, that is L₀ predictions.

    Pass p over the text cuts it into disjoint blocks from an offset of its own and shuffles them;
    both are drawn from (seed, p) alone. So the order is the same for every mechanism, and example i
    is known without the examples before it.

    Shapes: an item is int64 [L₀+1].
    Raises: ValueError when the text holds no block.
    """

    def __init__(self, stream: Stream, length: int, examples: int, seed: int) -> None:
        if len(stream) < length + 1:
            raise ValueError(
                f"training text of {len(stream):,} tokens is shorter than one block; "
                f"expected at least length + 1 = {length + 1:,} tokens"
            )
        self.stream, self.length, self.examples, self.seed = stream, length, examples, seed
        # Room for an offset of up to a block, so that block borders differ from pass to pass.
        self.per_pass = max(1, (len(stream) - length) // length)
        self._pass: tuple[int, int, np.ndarray] | None = None

    def start(self, example: int) -> int:
        """Position in the text of the first token of `example`."""
        number, index = divmod(example, self.per_pass)
        if self._pass is None or self._pass[0] != number:
            draw = np.random.default_rng([self.seed, number])
            spare = len(self.stream) - 1 - self.per_pass * self.length
            offset = int(draw.integers(0, spare + 1))
            self._pass = (number, offset, draw.permutation(self.per_pass))
        _, offset, order = self._pass
        return offset + int(order[index]) * self.length

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, example: int) -> np.ndarray:
        return self.stream.block(self.start(example), self.length + 1)


def collate(examples: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """A batch whose labels are its inputs: models shift them. Shapes: int64 [B, L₀+1]."""
    import torch

    ids = torch.from_numpy(np.stack(examples))
    return {"input_ids": ids, "labels": ids}


def validation_loss(model: Any, stream: Stream, settings: TrainingSettings) -> float:
    """Mean loss over `validation_blocks` evenly spaced blocks of `stream`, or as many as it holds.

    Leaves the random state and the training mode as they were. Units: nats per token.
    Raises: ValueError when the text holds no block.
    """
    import torch

    length = settings.length
    held = (len(stream) - 1) // length
    if held < 1:
        raise ValueError(
            f"validation text of {len(stream):,} tokens is shorter than one block; "
            f"expected at least length + 1 = {length + 1:,} tokens"
        )
    count = min(settings.validation_blocks, held)
    starts = [held * i // count * length for i in range(count)]
    step = max(1, settings.batch // settings.accumulation)
    device = next(model.parameters()).device
    training, total = model.training, 0.0
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            for first in range(0, count, step):
                blocks = [stream.block(s, length + 1) for s in starts[first : first + step]]
                ids = torch.from_numpy(np.stack(blocks)).to(device)
                total += float(model(input_ids=ids, labels=ids).loss) * len(blocks)
    finally:
        model.train(training)
    return total / count
