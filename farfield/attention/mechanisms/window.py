"""`window`: a query sees the last N tokens, itself counted, and nothing further."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from farfield.attention.mechanism import Carry, Control, Geometry, State, Tokens


@dataclass(frozen=True)
class Options:
    """`size`: visible tokens, the query itself counted (0: the training length). `sinks`: how many
    of a row's first tokens stay visible for ever."""

    size: int = 0
    sinks: int = 0


class Window(Control):
    """Key j is visible to query i if i - j < N, or if j is one of the first `sinks` tokens.

    Source: Beltagy et al., "Longformer" (arXiv 2004.05150), §3.1, made causal; sinks: Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).
    """

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        if options.size < 0 or options.sinks < 0:
            raise ValueError(
                f"window:size={options.size},sinks={options.sinks}: expected numbers of tokens"
            )
        self.size = options.size or geometry.known_train_length("window without a size")
        self.sinks = options.sinks

    def forward(self, tokens: Tokens, state: State, carry: Carry) -> Carry:
        """The Carry with its window; nothing of the tokens matters."""
        return replace(carry, window=self.size, sinks=self.sinks)

    def reach(self, cap: Tensor, epsilon: float) -> int | None:
        """N, whatever the logits."""
        return self.size
