"""What every accumulated orthogonal transport has in common."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from farfield.algebra.trail import Trail


class Frame(Protocol):
    """The frames F_t = M_t M_{t-1} ⋯ M_1 of T consecutive tokens, base included.

    Laws, for all positions j ≤ l ≤ i (tested for every implementation):

    * the transport P_{j→i} = F_i F_jᵀ is orthogonal, P_{i→i} = I and P_{j→i} = P_{l→i} P_{j→l};
    * `pull` is F_tᵀ and `push` is F_t, row by row, so push(pull(x)) = x;
    * q_iᵀ P_{j→i} k_j = pull(q)_i · pull(k)_j, whatever frame the first token started from;
    * frames computed in chunks, each from the `last` of the one before, equal the whole.
    """

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        ...

    @property
    def trail(self) -> Trail:
        """What the tokens leave behind: the frames of the next ones start from its end."""
        ...

    @property
    def last(self) -> Tensor:
        """The frame after the last token, as `from_…` takes it for a base."""
        ...

    def pull(self, x: Tensor) -> Tensor:
        """F_tᵀ x_t for every token; x is [..., T, d]."""
        ...

    def push(self, x: Tensor) -> Tensor:
        """F_t x_t for every token; x is [..., T, d]."""
        ...

    def between(self, source: int, query: int) -> Frame:
        """The transport P_{j→i} as frames of length 1: `push` applies it, `pull` its transpose."""
        ...

    def grouped(self) -> Frame:
        """The same frames with an axis of size 1 before the tokens', for grouped query heads."""
        ...
