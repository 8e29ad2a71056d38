"""`random` and `random_iid`: steps turned by random angles, drawn by hashing.

`random` hashes the token id, so a token turns by the same angle wherever it stands. `random_iid`
hashes the position, afresh for every training iteration, so the angles say nothing of the text and
only the law of the accumulated transport is left to learn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farfield.algebra.hashing import normal
from farfield.algebra.rotation import RotationFrame, mixing_scales
from farfield.algebra.turns import accumulate, to_turns
from farfield.attention.mechanism import Carry, Geometry, State, Tokens, Transport, end

_TABLE_ELEMENTS = 2**20
"""A table of all ids is kept as a cache where it has at most this many angles."""


@dataclass(frozen=True)
class Options:
    """No options: the scales follow from the head dimension and the mixing window."""


class _Hashed(Transport):
    """Angles N(0, σ_b²) by hash of (seed, layer, head, block, key), σ_b from `mixing_scales`."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        self.geometry = geometry
        self.scales = tuple(mixing_scales(geometry.head_dim, geometry.mixing_window).tolist())

    def drawn(self, draw: tuple[int, ...], key: Tensor) -> Tensor:
        """Turns int64 [..., heads, T, N] of int64 keys [..., T], in the draw of that name."""
        device = key.device
        head = torch.arange(self.geometry.kv_heads, device=device)[:, None, None]
        block = torch.arange(len(self.scales), device=device)
        scales = torch.tensor(self.scales, dtype=torch.float64, device=device)
        key = key[..., None, :, None]
        return to_turns(scales * normal(*draw, self.geometry.layer, head, block, key))

    def frame(self, turns: Tensor, tokens: Tokens, state: State) -> Carry:
        """Frames that continue the state by `turns` [B or 1, heads, T, N]."""
        sums = accumulate(tokens.real(turns), end(state, "turns"))
        frame = RotationFrame.from_turns(sums, tokens.frame_dtype)
        return Carry(frame, state={"turns": frame.trail})


class Random(_Hashed):
    """θ_{t,b} = σ_b · normal(seed, layer, head, block, id of token t)."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__(geometry, options)
        self._table: Tensor | None = None

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """Frames [B, kv heads, T, N]. Raises: ValueError where token ids are not known."""
        if tokens.ids is None:
            raise ValueError("random hashes token ids: pass input_ids, not inputs_embeds")
        return self.frame(self._turns(tokens.ids), tokens, state)

    def resize_vocabulary(self, size: int) -> None:
        """A new id has its hash like any other."""
        self.geometry = replace(self.geometry, vocab_size=size)
        self._table = None

    def _turns(self, ids: Tensor) -> Tensor:
        geometry = self.geometry
        if geometry.vocab_size * geometry.kv_heads * len(self.scales) > _TABLE_ELEMENTS:
            return self.drawn((geometry.seed,), ids)
        if self._table is None or self._table.device != ids.device:
            every = torch.arange(geometry.vocab_size, device=ids.device)
            self._table = self.drawn((geometry.seed,), every).transpose(0, 1).contiguous()
        return self._table[ids].transpose(1, 2)


class RandomIid(_Hashed):
    """θ_{t,b} = σ_b · normal(seed, nonce, layer, head, block, position of token t)."""

    fresh = True

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """Frames [B or 1, kv heads, T, N]."""
        draw = (self.geometry.seed, tokens.nonce)
        return self.frame(self.drawn(draw, tokens.position), tokens, state)
