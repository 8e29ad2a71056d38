"""The attention layer: projections, a mechanism's Carry, an engine."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from farfield.algebra.contraction import ContractionTrail
from farfield.algebra.frame import Frame
from farfield.attention import engines, mechanisms
from farfield.attention.engines import Engine
from farfield.attention.logit import Visible
from farfield.attention.mechanism import Carry, Geometry, Tokens
from farfield.attention.state import DecodingState


class Attention(nn.Module):
    """Multi-head attention whose position mechanism is a named accumulated transport.

        out_i = F_i Σ_j α_ij F_jᵀ v_j   or   Σ_j α_ij v_j,   α_i = softmax_j(logit_ij)

    Queries, keys and carried values are pulled into the root frame, plain softmax attention runs
    there, and the output is pushed back: one path for every mechanism.

    Shapes: hidden [B, T, D] in and out; H query heads share Hk key/value heads evenly.
    Raises: ValueError for a mechanism or geometry that doesn't exist.
    """

    def __init__(self, mechanism: str, geometry: Geometry) -> None:
        super().__init__()
        self.head_dim = geometry.head_dim
        self.kv_heads = geometry.kv_heads
        self.groups = geometry.heads // geometry.kv_heads
        query, key = (n * geometry.head_dim for n in (geometry.heads, geometry.kv_heads))
        value_dim = geometry.value_dim or geometry.head_dim
        self.q_proj = nn.Linear(geometry.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(geometry.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(geometry.hidden_size, geometry.kv_heads * value_dim, bias=False)
        self.o_proj = nn.Linear(geometry.heads * value_dim, geometry.hidden_size, bias=False)
        self.mechanism = mechanisms.build(mechanism, geometry)

    def forward(
        self,
        tokens: Tokens,
        state: DecodingState | None = None,
        valid: Tensor | None = None,
        engine: Engine | str = "auto",
    ) -> Tensor:
        """Attention of `tokens` to themselves and to those that `state` remembers.

        Shapes: valid bool [B, earlier + T] or None, for all keys; returns [B, T, D].
        Raises: ValueError for an engine that doesn't serve what is asked of it, and for packed
        documents with a state.
        """
        if tokens.packing is None:
            return self._attend(tokens, state, valid, engine)
        if state is not None:
            raise ValueError("packed documents have no one state to continue from")
        parts = [self._attend(document, None, None, engine) for document in tokens.unpacked()]
        return tokens.packing.packed(parts) if parts else tokens.hidden * 0.0

    def _attend(
        self,
        tokens: Tokens,
        state: DecodingState | None,
        valid: Tensor | None,
        engine: Engine | str,
    ) -> Tensor:
        # Steps first, then one projection at a time: what each needs in between is never there
        # together.
        carry = self.mechanism(tokens, state.mechanism if state is not None else {})
        out = self._softmax(self._pulled(tokens.hidden, carry), carry, tokens, state, valid, engine)
        if carry.value_frame is not None:
            out = self._ungrouped(self._per_head(carry.value_frame).push(self._grouped(out)))
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _pulled(self, hidden: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention takes them: [B, heads, T, ·]."""
        q = self.q_proj(hidden).unflatten(-1, (self.kv_heads * self.groups, -1)).transpose(1, 2)
        if carry.frame is not None:
            q = self._ungrouped(self._per_head(carry.frame).pull(self._grouped(q)))
        if carry.logit_scale is not None:
            q = (q * carry.logit_scale[..., None]).to(q.dtype)
        k = self.k_proj(hidden).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if carry.frame is not None:
            k = carry.frame.pull(k)
        v = self.v_proj(hidden).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if carry.value_frame is not None:
            v = carry.value_frame.pull(v)
        return q, k, v

    def _softmax(
        self,
        vectors: tuple[Tensor, Tensor, Tensor],
        carry: Carry,
        tokens: Tokens,
        state: DecodingState | None,
        valid: Tensor | None,
        engine: Engine | str,
    ) -> Tensor:
        """Softmax attention of pulled queries, keys and values, or along contractions, which can't
        be pulled out of keys and queries."""
        (q, k, v), potential, contraction, index = vectors, carry.potential, carry.contraction, None
        if state is not None:
            keys = k if contraction is None else ContractionTrail.of(contraction, k)
            k, v, potential = state.extend(keys, v, carry, valid)
            contraction, index = None, state.index
        seen = self._visible(carry, tokens, v.shape[-2], valid, index)
        return engines.attend(engine, q, k, v, contraction, potential=potential, visible=seen)

    def _visible(
        self, carry: Carry, tokens: Tokens, keys: int, valid: Tensor | None, index: Tensor | None
    ) -> Visible:
        """What the tokens may see of `keys` keys: those of all tokens, or of those in `index`."""
        position = None
        if carry.window is not None:
            if valid is not None:
                position = (valid.cumsum(-1) - 1).clamp(min=0)
            elif index is not None:
                position = index[None]
        if index is not None and valid is not None:
            valid = valid[:, index]
            position = None if position is None else position[:, index]
        queries = tokens.hidden.shape[1]
        return Visible(queries, keys, valid, position, carry.window, carry.sinks)

    def logit_cap(self, gain: Tensor) -> Tensor:
        """The largest |q_i · k_j|/√d that any input could give, for every query head.

        The input is x = g ⊙ y with |y| ≤ √D, as RMSNorm makes it, so |W x| ≤ ‖W diag(g)‖ √D; a
        transport preserves norms or shrinks them.

        Shapes: gain g [D]; returns [H] float64. Units: nats.
        """
        q, k = (
            torch.linalg.matrix_norm(
                (p.weight * gain).double().unflatten(0, (-1, self.head_dim)), 2
            )
            for p in (self.q_proj, self.k_proj)
        )
        largest = q * k.repeat_interleave(self.groups) * gain.shape[0]
        if self.mechanism.transport is not None:
            largest = largest * self.mechanism.transport.logit_scale
        return largest / math.sqrt(self.head_dim)

    # Query heads [B, H, T, d] are moved by the frames of the key head each one reads: with groups
    # of them apart, [B, Hk, H/Hk, T, d], the frames of Hk heads broadcast over each group.

    def _per_head(self, frame: Frame) -> Frame:
        return frame if self.groups == 1 else frame.grouped()

    def _grouped(self, x: Tensor) -> Tensor:
        return x if self.groups == 1 else x.unflatten(1, (-1, self.groups))

    def _ungrouped(self, x: Tensor) -> Tensor:
        return x if self.groups == 1 else x.flatten(1, 2)
