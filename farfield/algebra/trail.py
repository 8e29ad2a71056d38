"""What is remembered of the tokens read so far: where the next one starts from, and, for those that
may still be forgotten again, where each of them started from.

An accumulated state can't be run backwards: pulled keys don't tell the frame they were pulled
from, and a frame is a product whose last factor is gone once it is multiplied in. So a trail keeps
as many steps as may be cropped, and folds the others into one state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, cat

Change = Callable[[Tensor], Tensor]
"""A change of the batch axis: reorder, repeat or select rows."""


class Trail(Protocol):
    """The trail of T tokens. Laws, tested for every implementation:

    * a.joined(b) is the trail of the tokens of a and b, where b started from a's end;
    * cropped(n) is the trail before its last n tokens, exactly, for n ≤ spare;
    * last() is the same end with nothing spare.
    """

    @property
    def spare(self) -> int:
        """How many tokens can be cropped."""
        ...

    @property
    def batch(self) -> int:
        """Rows of the batch; 1 where all rows share the trail."""
        ...

    def last(self) -> Any:
        """The end alone."""
        ...

    def joined(self, new: Any) -> Any:
        """This trail and the one that started from its end."""
        ...

    def cropped(self, count: int) -> Any:
        """This trail without its last `count` tokens."""
        ...

    def mapped(self, change: Change) -> Any:
        """The trail of other rows of the batch."""
        ...


@dataclass(frozen=True)
class Rows:
    """The trail of a state small enough to be written down after every token.

    Shapes: rows [B or 1, heads, n ≥ 1, ·], the state after each of n tokens.
    """

    rows: Tensor

    @property
    def end(self) -> Tensor:
        """The state after the last token, [..., 1, ·]."""
        return self.rows[..., -1:, :]

    @property
    def spare(self) -> int:
        """n - 1: the state before the first of the rows is not known."""
        return self.rows.shape[-2] - 1

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.rows.shape[0]

    def last(self) -> Rows:
        """The last row alone."""
        return Rows(self.end)

    def joined(self, new: Rows) -> Rows:
        """These rows, then the new ones."""
        return Rows(joined(self.rows, new.rows))

    def cropped(self, count: int) -> Rows:
        """All but the last `count` rows."""
        return Rows(self.rows[..., : self.rows.shape[-2] - count, :])

    def mapped(self, change: Change) -> Rows:
        """The rows of other members of the batch."""
        return Rows(change(self.rows))


@dataclass(frozen=True)
class Steps:
    """The trail of a state too large for every token: a base, and the steps since.

    `fold(base, steps)` is the base after the steps; `end` is what it would give, where known.

    Shapes: base and end [B or 1, heads, ·, ·]; steps [B or 1, heads, n ≥ 0, ·].
    """

    base: Tensor
    steps: Tensor
    fold: Callable[[Tensor, Tensor], Tensor]
    end: Tensor | None = None

    @property
    def folded(self) -> Tensor:
        """The state after all steps, shaped as the base."""
        if self.end is not None:
            return self.end
        return self.fold(self.base, self.steps) if self.spare else self.base

    @property
    def spare(self) -> int:
        """n: the base is the state before all of them."""
        return self.steps.shape[-2]

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return max(self.base.shape[0], self.steps.shape[0])

    def last(self) -> Steps:
        """The steps folded into the base."""
        return replace(self, base=self.folded, steps=self.steps[..., :0, :], end=None)

    def joined(self, new: Steps) -> Steps:
        """The old base, with the steps of both."""
        return replace(self, steps=joined(self.steps, new.steps), end=new.end)

    def cropped(self, count: int) -> Steps:
        """All but the last `count` steps."""
        end = None if count else self.end
        return replace(self, steps=self.steps[..., : self.spare - count, :], end=end)

    def mapped(self, change: Change) -> Steps:
        """The base and steps of other members of the batch."""
        batch = self.batch
        known = [x for x in (self.base, self.steps, self.end) if x is not None]
        base, steps, *end = (change(x.expand(batch, *x.shape[1:])) for x in known)
        return replace(self, base=base, steps=steps, end=end[0] if end else None)


def joined(old: Tensor, new: Tensor, dim: int = -2) -> Tensor:
    """Both along `dim`; where rows that shared one state have come to differ, it is repeated."""
    if old.shape[0] != new.shape[0]:
        batch = max(old.shape[0], new.shape[0])
        old, new = (x.expand(batch, *x.shape[1:]) for x in (old, new))
    return cat((old, new), dim)
