"""What cached decoding remembers of one attention layer, in torch alone.

Keys and values are stored *pulled*, in the root frame, and never rewritten. Beside them the layer
remembers where the frame stands: the mechanism's state after the last token and, while recording,
after every token that may still be cropped, since an earlier frame can't be recovered from pulled
keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farfield.attention.mechanism import State


class DecodingState:
    """Pulled keys and values, the potential at each key, and the mechanism's trail.

    `valid` says which tokens are not padding, where the caller keeps it (None: all are).

    Shapes: keys [B, kv heads, tokens, d], values [B, kv heads, tokens, d_v], potential
    [B or 1, heads, tokens] float64 or None, valid bool [B, tokens] or None. `trail` maps names to
    [B or 1, heads, rows, ·].
    """

    def __init__(self) -> None:
        self.recording = False
        self._forget()

    def _forget(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.potential: Tensor | None = None
        self.valid: Tensor | None = None
        self.trail: dict[str, Tensor] = {}

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return 0 if self.keys is None else self.keys.shape[-2]

    @property
    def mechanism(self) -> State:
        """The mechanism's state after the last token."""
        return {name: rows[..., -1:, :] for name, rows in self.trail.items()}

    def extend(
        self, keys: Tensor, values: Tensor, potential: Tensor | None, state: State
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append tokens; returns all keys, values and potentials remembered now."""
        self.keys = _joined(self.keys, keys, -2)
        self.values = _joined(self.values, values, -2)
        if potential is not None:
            self.potential = _joined(self.potential, potential, -1)
        for name, rows in state.items() if keys.shape[-2] else ():
            kept = self.trail.get(name) if self.recording else None
            self.trail[name] = _joined(kept, rows if self.recording else rows[..., -1:, :], -2)
        return self.keys, self.values, self.potential

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, exactly.

        Raises: ValueError where the state before them was not kept (`recording` was off).
        """
        if count == 0 or self.keys is None or self.values is None:
            return
        if count > self.length:
            raise ValueError(f"cannot crop {count} tokens: only {self.length} are cached")
        if count == self.length:
            self._forget()
            return
        if any(rows.shape[-2] <= count for rows in self.trail.values()):
            raise ValueError(
                f"cannot crop {count} tokens: the frame before them was not kept. Call "
                "cache.activate_past_recording() before the tokens are decoded"
            )
        self.trail = {name: rows[..., :-count, :] for name, rows in self.trail.items()}
        self.keys = self.keys[..., :-count, :]
        self.values = self.values[..., :-count, :]
        if self.potential is not None:
            self.potential = self.potential[..., :-count]
        if self.valid is not None:
            self.valid = self.valid[:, :-count]

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis (reorder, repeat, select) to every tensor.

        Tensors that every row shares (batch axis 1 while there are more rows) stay as they are.
        """
        if self.keys is None or self.values is None:
            return
        rows = self.keys.shape[0]

        def changed(x: Tensor) -> Tensor:
            return x if x.shape[0] == 1 and rows > 1 else change(x)

        self.keys, self.values = change(self.keys), change(self.values)
        if self.potential is not None:
            self.potential = changed(self.potential)
        if self.valid is not None:
            self.valid = change(self.valid)
        self.trail = {name: changed(kept) for name, kept in self.trail.items()}


def _joined(old: Tensor | None, new: Tensor, dim: int) -> Tensor:
    if old is None:
        return new
    if old.shape[0] != new.shape[0]:  # rows that shared one state have come to differ
        batch = max(old.shape[0], new.shape[0])
        old, new = (x.expand(batch, *x.shape[1:]) for x in (old, new))
    return torch.cat((old, new), dim)
