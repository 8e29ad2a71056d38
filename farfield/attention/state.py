"""What cached decoding remembers of one attention layer, in torch alone.

Keys and values are stored *pulled*, in the root frame, and never rewritten. Beside them the layer
remembers where the frame stands: the mechanism's trails, which hold the state after the last token
and, while recording, that before every token that may still be cropped.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from farfield.algebra.trail import Trail
from farfield.attention.mechanism import Carry, State

_ROOM = 256
"""Tokens of room, at least, in a buffer that has to grow."""

_SPARE = 64
"""Tokens out of reach that may pile up before they are evicted together."""


class DecodingState:
    """Pulled keys and values, the potential at each key, and the mechanism's trails.

    `capacity` fixes the size of the buffers (None: they grow). `reach` is the distance from which
    on a key can't matter any more (None: it always can); a window in the Carry is one as well. Keys
    out of reach are evicted while nothing is being recorded, and `index` then names the tokens
    that are kept. `valid` says which tokens are not padding (None: all are).

    Shapes: keys [B, kv heads, kept, d], values [B, kv heads, kept, d_v], potential
    [B or 1, heads, kept] float64 or None, index int64 [kept] or None (all), valid bool [B, length]
    or None. Raises: ValueError for a capacity or reach below 1.
    """

    def __init__(self, capacity: int | None = None, reach: int | None = None) -> None:
        for name, value in (("capacity", capacity), ("reach", reach)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1 token")
        self.capacity = capacity
        self.reach = reach
        self.recording = False
        self._forget()

    def _forget(self) -> None:
        self.length = 0
        self.valid: Tensor | None = None
        self.index: Tensor | None = None
        self.trails: dict[str, Trail] = {}
        self._evicted_at = 0
        self._evicted_to = 0
        self._buffers: dict[str, _Buffer] = {}

    @property
    def keys(self) -> Tensor | None:
        """Pulled keys; None before the first token, and where they are a trail of their own."""
        return self._kept("keys")

    @property
    def values(self) -> Tensor | None:
        """Values, pulled where they are carried, or None before the first token."""
        return self._kept("values")

    @property
    def potential(self) -> Tensor | None:
        """The potential at each key, or None where there is none."""
        return self._kept("potential")

    @property
    def batch(self) -> int | None:
        """Rows of the batch, or None before the first token."""
        return self._buffers["values"].batch if self._buffers else None

    @property
    def mechanism(self) -> State:
        """The mechanism's state after the last token."""
        return self.trails

    def extend(
        self, keys: Any, values: Tensor, carry: Carry, valid: Tensor | None = None
    ) -> tuple[Any, Tensor, Tensor | None]:
        """Append tokens; returns the keys, values and potentials that these tokens may need.

        `valid` is that of all tokens, earlier ones included. Keys are a tensor or, where they are
        transported as they age, a trail of their own.

        Raises: ValueError, before anything is changed, where a fixed capacity would not do.
        """
        new = {"values": values}
        if isinstance(keys, Tensor):
            new["keys"] = keys
        if carry.potential is not None:
            new["potential"] = carry.potential[..., None]
        count = values.shape[-2]
        self._evict(carry)
        if self.capacity is not None and self._kept_count() + count > self.capacity:
            raise ValueError(
                f"this cache holds {self.capacity} tokens at most: {self._kept_count()} are there, "
                f"{count} more don't fit"
            )
        for name, tokens in new.items():
            self._buffers.setdefault(name, _Buffer(self.capacity)).append(tokens)
        if self.index is not None:
            added = torch.arange(self.length, self.length + count, device=values.device)
            self.index = torch.cat((self.index, added))
        self.length += count
        self.valid = valid
        for name, trail in carry.state.items() if count else ():
            self._remember(name, trail)
        seen = self._remember("keys", keys) if not isinstance(keys, Tensor) else self.keys
        return seen, self._buffers["values"].view, self.potential

    def mark(self) -> Callable[[], None]:
        """What brings the state back to what it is now, however often it was extended since."""
        now = dict(self.__dict__)
        now["trails"] = dict(self.trails)
        buffers = {name: copy(buffer) for name, buffer in self._buffers.items()}

        def restore() -> None:
            self.__dict__.update(now, _buffers=buffers)

        return restore

    def commit(self) -> None:
        """What is remembered is final: fold what was recorded, so that it can't be cropped."""
        self.trails = {name: trail.last() for name, trail in self.trails.items()}

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, exactly.

        Raises: ValueError, changing nothing, where the state before them was not kept
        (`recording` was off), or where a key that was evicted could matter again.
        """
        if count == 0 or self.length == 0:
            return
        if count > self.length:
            raise ValueError(f"cannot crop {count} tokens: only {self.length} are cached")
        if count == self.length:
            self._forget()
            return
        if any(trail.spare < count for trail in self.trails.values()):
            raise ValueError(
                f"cannot crop {count} tokens: the frame before them was not kept. Call "
                "cache.activate_past_recording() before the tokens are decoded"
            )
        if self.length - count < self._evicted_at:
            raise ValueError(
                f"cannot crop {count} tokens: keys that the tokens before them may need were "
                "evicted. Call cache.activate_past_recording() before the tokens are decoded"
            )
        self.trails = {name: trail.cropped(count) for name, trail in self.trails.items()}
        for buffer in self._buffers.values():
            buffer.length -= count
        self.length -= count
        if self.index is not None:
            self.index = self.index[:-count]
        if self.valid is not None:
            self.valid = self.valid[:, :-count]

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis (reorder, repeat, select) to every tensor.

        Tensors that every row shares (batch axis 1 while there are more rows) stay as they are.
        """
        rows = self.batch
        if rows is None:
            return
        for name, buffer in self._buffers.items():
            if name in ("keys", "values") or buffer.batch == rows:
                buffer.map(change)
        if self.valid is not None:
            self.valid = change(self.valid)
        self.trails = {
            name: trail if trail.batch == 1 and rows > 1 else trail.mapped(change)
            for name, trail in self.trails.items()
        }

    def _remember(self, name: str, trail: Any) -> Any:
        """Join a trail to what is known; returns it whole, and keeps what may still be cropped."""
        known = self.trails.get(name)
        whole = trail if known is None else known.joined(trail)
        self.trails[name] = whole if self.recording else whole.last()
        return whole

    def _kept(self, name: str) -> Tensor | None:
        buffer = self._buffers.get(name)
        if buffer is None:
            return None
        return buffer.view.squeeze(-1) if name == "potential" else buffer.view

    def _kept_count(self) -> int:
        return self._buffers["values"].length if self._buffers else 0

    def _evict(self, carry: Carry) -> None:
        """Drop the keys that no later query can see, some at a time."""
        bounds = [bound for bound in (carry.window, self.reach) if bound is not None]
        if not bounds or self.recording or "keys" not in self._buffers:
            return
        reach, kept = min(bounds), self._kept_count()
        if kept < max(self._evicted_to, reach + carry.sinks) + _SPARE:
            return
        index = self.index
        if index is None:
            index = torch.arange(self.length, device=self._buffers["keys"].view.device)
        chosen = self._needed(index, reach, carry.sinks).nonzero().squeeze(-1)
        self._evicted_to = len(chosen)
        if len(chosen) == kept:
            return
        for buffer in self._buffers.values():
            buffer.select(chosen)
        self.index = index[chosen]
        self._evicted_at = self.length

    def _needed(self, index: Tensor, reach: int, sinks: int) -> Tensor:
        """Which of the tokens at `index` the next query may see, in any row: bool [kept]."""
        if self.valid is None:
            return (index > self.length - reach) | (index < sinks)
        position = self.valid.cumsum(-1) - 1
        following = position[:, -1:] + 1
        seen = self.valid & ((position > following - reach) | (position < sinks))
        return seen.any(0)[index]


class _Buffer:
    """Tokens along the last axis but one, with room for more: appending doesn't move the others."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.length = 0
        self.store: Tensor | None = None

    @property
    def view(self) -> Tensor:
        """The tokens that are there, [..., length, ·]."""
        assert self.store is not None
        return self.store[..., : self.length, :]

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        assert self.store is not None
        return self.store.shape[0]

    def append(self, new: Tensor) -> None:
        """Add tokens; in place, unless a gradient may look back at what is there."""
        count = new.shape[-2]
        if self.store is None and self.capacity is None:
            self.store, self.length = new, count
            return
        if self.store is None:
            self.store = new.new_empty(new.shape)[..., :0, :]
        if self.store.shape[0] != new.shape[0]:
            batch = max(self.store.shape[0], new.shape[0])
            self.store = self.store.expand(batch, *self.store.shape[1:])
            new = new.expand(batch, *new.shape[1:])
            self._move(self.length)
        if torch.is_grad_enabled():
            self.store = torch.cat((self.view, new), -2)
        else:
            if self.length + count > self.store.shape[-2] or self._fixed():
                self._move(self.length + count + max(_ROOM, self.length // 2))
            self.store[..., self.length : self.length + count, :] = new
        self.length += count

    def select(self, index: Tensor) -> None:
        """Keep the tokens of the index alone."""
        self.store = self.view.index_select(-2, index)
        self.length = len(index)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis."""
        self.store = change(self.view)

    def _fixed(self) -> bool:
        """Whether the store may not be written to here, though it has room."""
        assert self.store is not None
        return self.store.is_inference() and not torch.is_inference_mode_enabled()

    def _move(self, room: int) -> None:
        """The tokens into a store of their own, with room for more."""
        old, size = self.view, room if self.capacity is None else self.capacity
        self.store = old.new_empty((*old.shape[:-2], max(size, self.length), old.shape[-1]))
        self.store[..., : self.length, :] = old
