"""PaTH's maps: steps that may take away more of a vector than a reflection leaves.

A token with unit vector w and strength β has the step H = I - β w wᵀ: the identity at β = 0, the
projection off w at β = 1, the reflection at β = 2. Between, H has no usable inverse, so there are
no frames, and nothing can be pulled into a root. The transport P_{j→i} = H_i H_{i-1} ⋯ H_{j+1} is
taken apart at fixed places instead, at multiples of `CHUNK` tokens:

    q_iᵀ P_{j→i} k_j = (q_i moved back to where its chunk starts)ᵀ
                       · (the products of the chunks between)
                       · (k_j moved on to where its chunk ends)

A key is moved once, over less than a chunk, and never again: what is rounded stays where it is.

Inside a chunk with rows w_1 … w_C, what step l takes off a vector x from before the chunk is
w_l y_l, y_l = β_l w_lᵀ H_{l-1} ⋯ H_1 x. These coefficients solve a triangular system,

    (I + β stril(W Wᵀ)) Y = β W X ,

whose leading blocks serve the prefixes and whose trailing blocks serve the suffixes of the chunk.
No entry of Y exceeds β|x|, since every H is a contraction, so the system is as tame as its answer.

Source: Yang et al., "PaTH Attention" (arXiv 2505.16381), §3; the triangular form is the compact one
of products of Householder matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.algebra.trail import Change

CHUNK = 128
"""Tokens in a chunk. Longer ones cost more inside, C² per token; shorter ones more between, d²/C
for each pair of a token and a chunk. Measured best between 64 and 256 at heads of 64."""


@dataclass(frozen=True)
class Contraction:
    """The steps H_t = I - β_t w_t w_tᵀ of T consecutive tokens.

    Shapes: w [B or 1, heads or 1, T, d], unit rows; beta [B or 1, heads or 1, T] from 0 to 2.
    Raises: ValueError for shapes that don't go together; TypeError below float32.
    """

    w: Tensor
    beta: Tensor

    def __post_init__(self) -> None:
        if self.w.shape[:-1] != self.beta.shape:
            raise ValueError(
                f"w is {list(self.w.shape)} and beta {list(self.beta.shape)}; expected "
                "[B, heads, T, d] and [B, heads, T]"
            )
        for name, x in (("w", self.w), ("beta", self.beta)):
            if torch.promote_types(x.dtype, torch.float32) != x.dtype:
                raise TypeError(f"{name} is {x.dtype}; steps multiply up and need float32 at least")

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        return self.w.shape[-2]

    def between(self, source: int, query: int) -> Tensor:
        """P_{j→i} = H_i ⋯ H_{j+1} as a matrix [..., d, d]; the identity for i = j.

        Shapes: source j ≤ query i index the T tokens (0-based).
        """
        w, beta = self.w[..., source + 1 : query + 1, :], self.beta[..., source + 1 : query + 1]
        product = _identity(w)
        for part, strength in zip(w.split(CHUNK, -2), beta.split(CHUNK, -1), strict=True):
            product = Chunk.solved(Rows(part[..., :0, :], part, strength)).product @ product
        return product


class Rows(NamedTuple):
    """Tokens as they came: keys [B, heads, n, d], w [B, heads, n, d], beta [B, heads, n]."""

    keys: Tensor
    w: Tensor
    beta: Tensor

    def cut(self, start: int, stop: int) -> Rows:
        """The rows [start, stop)."""
        return Rows(
            self.keys[..., start:stop, :], self.w[..., start:stop, :], self.beta[..., start:stop]
        )

    @staticmethod
    def joined(parts: Iterable[Rows]) -> Rows:
        """One after the other."""
        keys, w, beta = zip(*parts, strict=True)
        return Rows(torch.cat(keys, -2), torch.cat(w, -2), torch.cat(beta, -1))

    @property
    def length(self) -> int:
        """n, the number of tokens."""
        return self.w.shape[-2]


@dataclass(frozen=True)
class Chunk:
    """The n ≤ C tokens of a chunk, and what each of its steps takes away.

    `taken` has at (l, j) what step l takes off key j on its way, β_l w_lᵀ H_{l-1} ⋯ H_{j+1} k_j,
    and 0 for j ≥ l; row l of `taking` is the map β_l w_lᵀ H_{l-1} ⋯ H_1 of a vector from before.

    Shapes: taken [B, heads, n, n]; taking [B, heads, n, d].
    """

    rows: Rows
    taken: Tensor
    taking: Tensor

    @classmethod
    def solved(cls, rows: Rows) -> Chunk:
        """The chunk of these tokens."""
        _, w, beta = rows
        strength = beta[..., None]
        system = strength * (w @ w.mT).tril(-1)
        onto_keys = (w @ rows.keys.mT).tril(-1)
        wanted = strength * torch.cat((onto_keys, w), -1)
        return cls(
            rows, *_substituted(system, wanted).split((rows.keys.shape[-2], w.shape[-1]), -1)
        )

    def extended(self, new: Rows) -> Chunk:
        """The chunk with more tokens: the rows that are known stay as they are."""
        if self.length == 0:
            return Chunk.solved(new)
        rows = Rows.joined((self.rows, new))
        known, strength = self.length, new.beta[..., None]
        onto_keys = (new.w @ rows.keys.mT).tril(known - 1)
        earlier = torch.nn.functional.pad(self.taken, (0, new.length))
        earlier = torch.cat((earlier, self.taking), -1)
        wanted = torch.cat((onto_keys, new.w), -1) - (new.w @ self.rows.w.mT) @ earlier
        system = strength * (new.w @ new.w.mT).tril(-1)
        found = torch.cat((earlier, _substituted(system, strength * wanted)), -2)
        return Chunk(rows, *found.split((rows.length, new.w.shape[-1]), -1))

    def cropped(self, length: int) -> Chunk:
        """The chunk's first `length` tokens."""
        taken, taking = self.taken[..., :length, :length], self.taking[..., :length, :]
        return Chunk(self.rows.cut(0, length), taken, taking)

    @property
    def length(self) -> int:
        """n, the number of tokens."""
        return self.rows.length

    @property
    def product(self) -> Tensor:
        """H_n ⋯ H_1 [B, heads, d, d]."""
        return _identity(self.taking) - self.rows.w.mT @ self.taking

    @property
    def transported(self) -> Tensor:
        """Every key moved on to the end of the chunk, H_n ⋯ H_{j+1} k_j [B, heads, n, d]."""
        return self.rows.keys - self.taken.mT @ self.rows.w

    def met(self, q: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Scores q_iᵀ P_{j→i} k_j with the keys of the chunk, and queries moved back to its start.

        Scores are those of keys that are not later; the others mean nothing.

        Shapes: q [B, heads, R, d]; own [R, n], which steps lie at or before each query's own, as
        ones and zeros; returns [B, heads, R, n] and [B, heads, R, d].
        """
        onto = (q @ self.rows.w.mT) * own
        return q @ self.rows.keys.mT - onto @ self.taken, q - onto @ self.taking

    def gradients(
        self, q: Tensor, own: Tensor, scores: Tensor, moved: Tensor, ends: Tensor, product: Tensor
    ) -> tuple[Tensor, Rows]:
        """Gradients to the queries and rows from those to the results of `met`, to `transported`
        and to `product`.

        With X = (I + A)⁻¹ R, A strictly lower: dR = (I + A)⁻ᵀ dX and dA = -stril(dR Xᵀ).

        Shapes: q and own as in `met`; the others as what they are gradients to.
        """
        keys, w, beta = self.rows
        strength = beta[..., None]
        onto = (q @ w.mT) * own
        of_onto = (scores @ self.taken.mT + moved @ self.taking.mT).neg_().mul_(own)
        of_q = scores @ keys + moved + of_onto @ w
        of_keys = scores.mT @ q + ends
        of_w = of_onto.mT @ q - self.taken @ ends - self.taking @ product.mT
        of_taken = (onto.mT @ scores + w @ ends.mT).neg_()
        of_taking = (onto.mT @ moved + w @ product).neg_()
        inner = (w @ w.mT).tril_(-1)
        wanted = _substituted(
            (strength * inner).mT, torch.cat((of_taken, of_taking), -1), transposed=True
        )
        to_keys, to_w = wanted.split((keys.shape[-2], w.shape[-1]), -1)
        of_inner = (to_keys @ self.taken.mT + to_w @ self.taking.mT).neg_().tril_(-1)
        onto_keys = (w @ keys.mT).tril_(-1)
        of_beta = (to_keys * onto_keys).sum(-1) + (to_w * w).sum(-1) + (of_inner * inner).sum(-1)
        of_onto_keys, of_inner = (strength * to_keys).tril_(-1), strength * of_inner
        of_w = of_w + strength * to_w + of_onto_keys @ keys + (of_inner + of_inner.mT) @ w
        return of_q, Rows(of_keys + of_onto_keys.mT @ w, of_w, of_beta)


def moved_on(reach: Tensor, products: Iterable[Tensor]) -> Tensor:
    """The reach n further chunks on, of whose steps these are the products.

    The reach of a place is, for every chunk b before it, the transport from the end of b to there,
    as [..., :, b, :]: one product with a query moves it back to all those ends.

    Shapes: reach [B, heads, d, m, d], products of [B, heads, d, d]; returns m + n of them.
    """
    found: list[Tensor] = []
    rest = None
    for product in reversed(list(products)):
        found.append(_identity(product) if rest is None else rest)
        rest = product if rest is None else rest @ product
    if rest is None:
        return reach
    earlier = (rest @ reach.flatten(-2)).unflatten(-1, reach.shape[-2:])
    return torch.cat((earlier, torch.stack(found[::-1], -2)), -2)


def no_reach(like: Tensor) -> Tensor:
    """The reach of the first chunk's start, before which there are none.

    Shapes: like [B, heads, ·, d].
    """
    return like.new_zeros(*like.shape[:2], like.shape[-1], 0, like.shape[-1])


@dataclass(frozen=True)
class ContractionTrail:
    """What cached decoding keeps of keys along contractions; a `Trail` of T tokens.

    Closed chunks are keys at the end of their own chunk, and how each chunk reaches the end of the
    last one. The open chunk has its keys as they came and what its steps take away. Chunks start
    at multiples of `CHUNK` from the first token, so that the cache doesn't depend on how the tokens
    came in. The rows of tokens that may be cropped are kept as well, from where their chunk starts.

    Shapes: keys [B, heads, closed · C, d] in the type they came in; `marks` are reaches at several
    places, the last of them [B, heads, d, closed, d]; `raw` are the last closed chunks' rows.
    `fresh` are tokens not yet sorted into chunks.
    """

    keys: Tensor
    marks: tuple[Tensor, ...]
    raw: tuple[Rows, ...]
    open: Chunk
    spare: int
    fresh: Rows

    @classmethod
    def of(cls, contraction: Contraction, keys: Tensor) -> ContractionTrail:
        """The trail of these tokens alone. Shapes: keys [B, heads, T, d].

        Raises: ValueError where keys and steps are not of the same tokens.
        """
        if keys.shape[-2] != contraction.length or keys.shape[-1] != contraction.w.shape[-1]:
            raise ValueError(
                f"keys are {list(keys.shape)} and steps {list(contraction.w.shape)}; expected the "
                "same tokens and head dimension"
            )
        wide = torch.promote_types(keys.dtype, contraction.w.dtype)
        w = contraction.w.to(wide).expand_as(keys)
        fresh = Rows(keys.to(wide), w, contraction.beta.to(wide).expand(keys.shape[:-1]))
        none = fresh.cut(0, 0)
        taken = w.new_zeros(*keys.shape[:-2], 0, 0)
        empty = Chunk(none, taken, none.w)
        return cls(keys[..., :0, :], (no_reach(w),), (), empty, keys.shape[-2], fresh)

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        return self.keys.shape[-2] + self.open.length + self.fresh.length

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, heads, T, d]."""
        return (*self.keys.shape[:2], self.length, self.keys.shape[-1])

    @property
    def closed(self) -> int:
        """How many chunks are closed."""
        return self.keys.shape[-2] // CHUNK

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.keys.shape[0]

    @cached_property
    def settled(self) -> ContractionTrail:
        """The same trail with all its tokens in chunks."""
        return self if self.fresh.length == 0 else self._read()

    def chunk(self, index: int) -> Chunk:
        """Chunk number `index`, of those whose rows are kept."""
        if index == self.closed:
            return self.open
        return Chunk.solved(self.raw[index - self.closed])

    def reach(self, chunk: int) -> Tensor:
        """For every chunk before number `chunk`: the transport from its end to that one's start.

        Shapes: [B, heads, d, chunk, d].
        """
        nearest = [mark for mark in self.marks if mark.shape[-2] <= chunk][-1]
        between = range(nearest.shape[-2], chunk)
        return moved_on(nearest, [self.chunk(index).product for index in between])

    def last(self) -> ContractionTrail:
        """The end alone."""
        whole = self.settled
        return replace(whole, marks=whole.marks[-1:], raw=(), spare=0)

    def joined(self, new: ContractionTrail) -> ContractionTrail:
        """This trail and the one that started from its end.

        Raises: ValueError where rows of the new one are no longer known.
        """
        if new.spare != new.length:
            raise ValueError(
                f"the rows of {new.length - new.spare} of the new {new.length} tokens are folded"
            )
        fresh = Rows.joined((*new.raw, new.open.rows, new.fresh))
        return replace(self.settled, fresh=fresh, spare=self.spare + new.length).settled

    def cropped(self, count: int) -> ContractionTrail:
        """This trail without its last `count` ≤ `spare` tokens."""
        whole = self.settled
        length, spare = whole.length - count, whole.spare - count
        index = length // CHUNK
        if index == whole.closed:
            opened = whole.open.cropped(length - index * CHUNK)
            return replace(whole, open=opened, spare=spare)
        place = len(whole.raw) - (whole.closed - index)
        opened = Chunk.solved(whole.raw[place].cut(0, length - index * CHUNK))
        earlier = tuple(mark for mark in whole.marks if mark.shape[-2] < index)
        return ContractionTrail(
            whole.keys[..., : index * CHUNK, :],
            (*earlier, whole.reach(index)),
            whole.raw[:place],
            opened,
            spare,
            whole.fresh,
        )

    def mapped(self, change: Change) -> ContractionTrail:
        """The trail of other rows of the batch."""
        whole = self.settled

        def moved(rows: Rows) -> Rows:
            return Rows(*(change(x) for x in rows))

        opened = Chunk(moved(whole.open.rows), change(whole.open.taken), change(whole.open.taking))
        return ContractionTrail(
            change(whole.keys),
            tuple(change(mark) for mark in whole.marks),
            tuple(moved(rows) for rows in whole.raw),
            opened,
            whole.spare,
            moved(whole.fresh),
        )

    def _read(self) -> ContractionTrail:
        """The fresh tokens sorted into chunks."""
        with torch.autocast(self.keys.device.type, enabled=False):
            opened, keys, raw, products = self.open, [self.keys], list(self.raw), []
            start = 0
            while start < self.fresh.length:
                stop = min(start + CHUNK - opened.length, self.fresh.length)
                opened = opened.extended(self.fresh.cut(start, stop))
                if opened.length == CHUNK:
                    keys.append(opened.transported.to(self.keys.dtype))
                    products.append(opened.product)
                    raw.append(opened.rows)
                    opened = opened.cropped(0)
                start = stop
            joined = torch.cat(keys, -2) if products else self.keys
            first = (self.length - self.spare) // CHUNK  # the first chunk that may be cropped into
            place = len(raw) - (joined.shape[-2] // CHUNK - first)
            marks = self.marks
            if products:
                base = [mark for mark in marks if mark.shape[-2] <= first][-1:]
                latest = moved_on(marks[-1], products)
                marks = (*base, marks[-1], latest) if base[0] is not marks[-1] else (*base, latest)
            none = self.fresh.cut(0, 0)
            return ContractionTrail(joined, marks, tuple(raw[place:]), opened, self.spare, none)


def _substituted(system: Tensor, wanted: Tensor, transposed: bool = False) -> Tensor:
    """Y of (I + system) Y = wanted, for a strictly lower triangular system (or its transpose)."""
    if wanted.shape[-2] <= 1:
        return wanted
    return torch.linalg.solve_triangular(system, wanted, upper=transposed, unitriangular=True)


def _identity(like: Tensor) -> Tensor:
    """I of the head dimension, [B, heads, d, d]."""
    identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return identity.expand(*like.shape[:-2], -1, -1)
