"""The attention layer: projections, a mechanism's Carry, an engine."""

from __future__ import annotations

from torch import Tensor, nn

from farfield.algebra.frame import Frame
from farfield.attention import mechanisms
from farfield.attention.engines import sdpa
from farfield.attention.mechanism import Geometry, Tokens
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
        self.groups = geometry.heads // geometry.kv_heads
        query, key = (n * geometry.head_dim for n in (geometry.heads, geometry.kv_heads))
        self.q_proj = nn.Linear(geometry.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(geometry.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(geometry.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, geometry.hidden_size, bias=False)
        self.mechanism = mechanisms.build(mechanism, geometry)

    def forward(
        self,
        tokens: Tokens,
        state: DecodingState | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Attention of `tokens` to themselves and to those that `state` remembers.

        Shapes: valid bool [B, earlier + T] or None, for all keys; returns [B, T, D].
        """
        q, k, v = (
            projection(tokens.hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        carry = self.mechanism(tokens, state.mechanism if state is not None else {})
        if carry.frame is not None:
            q = self._ungrouped(self._per_head(carry.frame).pull(self._grouped(q)))
            k = carry.frame.pull(k)
        if carry.value_frame is not None:
            v = carry.value_frame.pull(v)
        potential = carry.potential
        if state is not None:
            k, v, potential = state.extend(k, v, potential, carry.state)
        out = sdpa.attend(q, k, v, potential=potential, valid=valid)
        if carry.value_frame is not None:
            out = self._ungrouped(self._per_head(carry.value_frame).push(self._grouped(out)))
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    # Query heads [B, H, T, d] are moved by the frames of the key head each one reads: with groups
    # of them apart, [B, Hk, H/Hk, T, d], the frames of Hk heads broadcast over each group.

    def _per_head(self, frame: Frame) -> Frame:
        return frame if self.groups == 1 else frame.grouped()

    def _grouped(self, x: Tensor) -> Tensor:
        return x if self.groups == 1 else x.unflatten(1, (-1, self.groups))

    def _ungrouped(self, x: Tensor) -> Tensor:
        return x if self.groups == 1 else x.flatten(1, 2)
