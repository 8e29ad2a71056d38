"""What the ladder will do before it does it: lengths that fit, tokens scored, target blocks.

Token convention: a window [s, s + L) of inputs predicts ids[s+1 … s+L], so the target at offset p
sees p + 1 tokens. Every length scores the same targets ids[1 … N], the *region*; N is a multiple
of every length kept.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farfield.evaluation.intervals import LEVEL, RESAMPLES
from farfield.evaluation.rows import PROTOCOLS


@dataclass(frozen=True)
class LadderSettings:
    """What to evaluate: `lengths` in tokens, or else `multiples` of the training length L₀.

    `tokens`: at most so many targets per length for `windows` and `clipped`, rounded down to a
    multiple of every length; None scores all of the stream. `blocks`: target blocks of `fixed`.
    `forward_tokens`: short windows share a forward of about so many tokens (speed and memory; the
    result does not depend on it).

    Raises: ValueError on an empty or non-positive value or an unknown protocol.
    """

    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    lengths: tuple[int, ...] | None = None
    tokens: int | None = None
    blocks: int = 32
    protocols: tuple[str, ...] = PROTOCOLS
    forward_tokens: int = 8192
    level: float = LEVEL
    resamples: int = RESAMPLES

    def __post_init__(self) -> None:
        for name in ("multiples", "lengths", "protocols"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("multiples", "lengths"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ValueError(f"ladder {name} = {list(values)}: expected at least one, all >= 1")
        for name in ("tokens", "blocks", "forward_tokens", "resamples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"ladder {name} = {value}: expected at least 1")
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"ladder level = {self.level}: expected a number between 0 and 1")
        if not self.protocols:
            raise ValueError(f"ladder protocols is empty: expected some of {', '.join(PROTOCOLS)}")
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                near = difflib.get_close_matches(protocol, PROTOCOLS, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"ladder protocol {protocol!r}: expected some of {', '.join(PROTOCOLS)}{hint}"
                )


@dataclass(frozen=True)
class LeftOut:
    """A length that a protocol can't be evaluated at, and why."""

    length: int
    protocol: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The work of one ladder.

    `lengths`: those to report, ascending. `base`: L₀, what ratios divide by, or None when it
    can't be evaluated (ratios are then null). `tokens`: N. `block_ends`: ids[e − B, e) is a
    target block for each e.
    """

    settings: LadderSettings
    train_length: int
    lengths: tuple[int, ...]
    base: int | None
    tokens: int
    stream_tokens: int
    block: int
    block_ends: npt.NDArray[np.int64]
    block_grid: int
    left_out: tuple[LeftOut, ...]

    @property
    def measured(self) -> tuple[int, ...]:
        """The lengths to run, ascending, L₀ among them even where it was not asked for."""
        return tuple(sorted({*self.lengths, *([] if self.base is None else [self.base])}))

    @property
    def stride(self) -> int:
        """Tokens from one context of `clipped` to the next: L₀/4."""
        return self.block

    @property
    def last_token(self) -> int:
        """One past the last token that any protocol reads."""
        if "fixed" not in self.settings.protocols:
            return self.tokens + 1
        return max(self.tokens + 1, int(self.block_ends[-1]))

    def runs(self, protocol: str, length: int) -> bool:
        """Whether a protocol has a row at a length, or serves as the base of such rows."""
        return protocol in self.settings.protocols and all(
            (left.length, left.protocol) != (length, protocol) for left in self.left_out
        )

    def runs_windows(self, length: int) -> bool:
        """Whether windows of a length are run: for their own row, or as heads of `clipped`."""
        heads = length == self.base and "clipped" in self.settings.protocols
        return heads or self.runs("windows", length)

    def shared_ends(self, length: int) -> npt.NDArray[np.bool_]:
        """Which target blocks end a whole window of a length: `windows` has scored them already.

        The block ids[e − B, e) with window [e − L, e) is that window's targets L−B−1 … L−2.
        """
        ends = self.block_ends
        if not self.runs_windows(length):
            return np.zeros(len(ends), dtype=bool)
        return (ends % length == 0) & (ends <= self.tokens)

    @property
    def slides(self) -> bool:
        """Whether `clipped` is asked for at any length above L₀."""
        return any(self.runs("clipped", length) for length in self.lengths if length != self.base)

    def sliding_starts(self) -> npt.NDArray[np.int64]:
        """Starts of the contexts of L₀ of which `clipped` takes the last L₀/4 targets.

        Those at multiples of L₀ are windows already scored.
        """
        if not self.slides:
            return np.empty(0, dtype=np.int64)
        starts = np.arange(self.stride, self.tokens - self.train_length + 1, self.stride)
        return starts[starts % self.train_length != 0]


def make_plan(
    settings: LadderSettings, stream_tokens: int, train_length: int, positions: int | None
) -> Plan:
    """Which of the lengths asked for fit the text and the model, and on which tokens.

    Lengths are taken in ascending order while windows of all of them can tile one region.

    Raises: ValueError when not a single length can be evaluated, or train_length < 1.
    """
    if train_length < 1:
        raise ValueError(f"train_length = {train_length}: expected at least 1 token")
    asked = sorted(set(settings.lengths or (m * train_length for m in settings.multiples)))
    kept: list[int] = []
    reasons: dict[int, str] = {}
    region, room = 1, min(stream_tokens - 1, settings.tokens or stream_tokens - 1)
    for length in [*asked, *([] if train_length in asked else [train_length])]:
        reason = _unfit(length, settings, stream_tokens, positions)
        together = math.lcm(region, length)
        if reason is None and together > room:
            reason = (
                f"windows of {length} and of {', '.join(map(str, kept))} tokens tile "
                f"a multiple of {together} tokens, more than the {room} there are to score"
            )
        if reason is None:
            kept.append(length)
            region = together
        else:
            reasons[length] = reason
    lengths = tuple(length for length in kept if length in asked)
    if not lengths:
        first = asked[0]
        raise ValueError(f"no length can be evaluated; {first}: {reasons[first]}")
    block = max(1, train_length // 4)
    tokens = room // region * region
    ends, grid = _block_ends(settings.blocks, block, sorted(kept), tokens, stream_tokens)
    base = train_length if train_length in kept else None
    left_out = []
    for length in sorted({*kept, *reasons}):
        for protocol in settings.protocols:
            reason = reasons.get(length) or _protocol_unfit(
                protocol, length, train_length, block, base
            )
            if reason is not None:
                left_out.append(LeftOut(length, protocol, reason))
    return Plan(
        settings=settings,
        train_length=train_length,
        lengths=lengths,
        base=base,
        tokens=tokens,
        stream_tokens=stream_tokens,
        block=block,
        block_ends=ends,
        block_grid=grid,
        left_out=tuple(left_out),
    )


def left_out_lines(left_out: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a ladder left out, one line a reason."""
    reasons: dict[str, list[str]] = {}
    for left in left_out:
        reasons.setdefault(left["reason"], []).append(f"{left['length']} ({left['protocol']})")
    return [
        f"left out of the ladder: {', '.join(which)}: {reason}" for reason, which in reasons.items()
    ]


def position_buckets(length: int) -> list[tuple[int, int]]:
    """Buckets [low, high) of the tokens seen before a target: two per octave, 1 … length.

    Each ends at a power of two or one and a half of it: 1, 2, 3, 4, 5–6, 7–8, 9–12, 13–16, …, so
    that the last one ends at the window's length, and buckets of different lengths agree. Where
    the length is neither, the last bucket is cut there.
    """
    buckets, low, power = [], 1, 1
    while low <= length:
        for last in sorted({power, power * 3 // 2}):
            if low <= last:
                buckets.append((low, min(last, length) + 1))
                low = last + 1
            if low > length:
                break
        power *= 2
    return buckets


def _unfit(
    length: int, settings: LadderSettings, stream_tokens: int, positions: int | None
) -> str | None:
    if positions is not None and length > positions:
        return f"the model has {positions} learned absolute positions and none beyond"
    if length + 1 > stream_tokens:
        return f"text too short: {length + 1} tokens needed, the stream has {stream_tokens}"
    if settings.tokens is not None and length > settings.tokens:
        return f"longer than the {settings.tokens} tokens to score"
    return None


def _protocol_unfit(
    protocol: str, length: int, train_length: int, block: int, base: int | None
) -> str | None:
    if protocol == "fixed" and length <= block:
        return f"no longer than a target block (a quarter of the training length: {block} tokens)"
    if protocol == "clipped":
        if train_length % 4:
            return (
                f"its stride is a quarter of the training length; 4 does not divide {train_length}"
            )
        if base is None:
            return f"it starts like windows of {train_length} tokens, which are left out"
        if length % train_length:
            return f"not a multiple of the training length {train_length}"
    return None


def _block_ends(
    blocks: int, block: int, lengths: list[int], tokens: int, stream_tokens: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Ends of the target blocks, evenly spread, and the grid of tokens they lie on.

    The first lies where the longest window fits. The grid is the coarsest that has room for all:
    a block that ends at a multiple of a window's length costs nothing at that length. Blocks
    never overlap; where the text has no room for all, as many as fit are kept.
    """
    longest = lengths[-1]
    last = tokens if tokens // longest >= blocks else stream_tokens
    for grid in [*(length for length in reversed(lengths) if length > block), block]:
        first = -(-longest // grid)
        places = last // grid - first + 1
        if places >= blocks:
            break
    count = min(blocks, places)
    steps = np.arange(count) * (places - 1) // max(1, count - 1)
    return grid * (first + steps).astype(np.int64), grid
