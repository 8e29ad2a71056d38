"""What a position mechanism is: a map from tokens to a Carry.

A mechanism never touches queries, keys or values. It looks at the tokens (hidden states, ids,
positions) and says how they carry: with which transport a key reaches a query, whether values ride
along, and which potential holds far mass down. The attention layer does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from farfield.algebra.frame import Frame

State = Mapping[str, Tensor]
"""What a mechanism must remember: for each name a tensor [B or 1, heads, tokens, ·], one row a
token, of which the last row is where the next token starts from."""


@dataclass(frozen=True)
class Geometry:
    """What a mechanism is built for: one attention layer of a model.

    Units: `mixing_window` in tokens. `rope_base` is the base of RoPE's
    frequencies. `seed` and `layer` name the random angles. Raises: ValueError where heads do not
    divide, or a size or the base is not positive.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    mixing_window: float
    layer: int = 0
    seed: int = 0
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "heads", "kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not self.rope_base > 0:
            raise ValueError(f"rope_base is {self.rope_base}; expected a positive number")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly"
            )


@dataclass(frozen=True)
class Tokens:
    """The tokens a mechanism may look at: those of one call, the state holds the earlier ones.

    Shapes: hidden [B, T, D], the layer's normalised input; ids int64 [B, T] or None when the caller
    gave embeddings; valid bool [B, T] or None (all valid); position int64 [B or 1, T], how many
    valid tokens precede each one in its row, earlier calls included. `nonce` names the draw of
    fresh random angles: the training iteration, or 0 in evaluation.
    """

    hidden: Tensor
    position: Tensor
    ids: Tensor | None = None
    valid: Tensor | None = None
    nonce: int = 0

    @property
    def frame_dtype(self) -> torch.dtype:
        """What cosines and sines are kept in: float32, or float64 for float64 hidden states."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def real(self, x: Tensor) -> Tensor:
        """x [B or 1, heads, T, ·] with zeros at padding: there a step is the identity."""
        return x if self.valid is None else x * self.valid[:, None, :, None].to(x.dtype)


@dataclass(frozen=True)
class Carry:
    """How tokens carry: everything the engine needs to know of a mechanism.

    `frame` transports queries and keys (None: the identity), `value_frame` values (None: they are
    left alone). `potential` is u_t in score_ij + u_j - u_i, accumulated in float64.

    Shapes: frames of T tokens with leading axes [B or 1, kv heads or 1]; potential
    [B or 1, kv heads or query heads, T] float64.
    """

    frame: Frame | None = None
    value_frame: Frame | None = None
    potential: Tensor | None = None
    state: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.potential is not None and self.potential.dtype != torch.float64:
            raise TypeError(
                f"potential is {self.potential.dtype}; it grows with length and needs float64"
            )


class Transport(nn.Module):
    """One kind of step. Subclasses map tokens to frames.

    `angle_parameters` names the parameters of the module that fix angles; they may have a learning
    rate of their own. `fresh` is true where the angles change with the nonce.
    """

    angle_parameters: tuple[str, ...] = ()
    fresh: bool = False

    def resize_vocabulary(self, size: int) -> None:
        """Told when the model's vocabulary changes; nothing to do unless ids fix angles."""

    def forward(self, tokens: Tokens, state: State) -> tuple[Frame, State]:
        """Frames of the tokens that follow `state`, and the state after them."""
        raise NotImplementedError


class Control(nn.Module):
    """One kind of explicit far-mass control. Subclasses map tokens to a potential."""

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """Potential [B or 1, heads, T] of the tokens that follow `state`, and the new state."""
        raise NotImplementedError


class Mechanism(nn.Module):
    """A transport × (values left | carried) × a control, as one map from tokens to a Carry.

    Law: the Carry of a sequence equals the Carries of its chunks, each from the state of the one
    before (tested for every mechanism in the table).
    """

    def __init__(self, transport: Transport | None, carried: bool, control: Control | None) -> None:
        super().__init__()
        if carried and transport is None:
            raise ValueError("values can only be carried along a transport, and there is none")
        self.transport = transport
        self.control = control
        self.carried = carried

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """The Carry of `tokens`, which follow those `state` remembers."""
        frame, potential, new = None, None, {}
        if self.transport is not None:
            frame, new_transport = self.transport(tokens, state)
            new.update(new_transport)
        if self.control is not None:
            potential, new_control = self.control(tokens, state)
            new.update(new_control)
        return Carry(frame, frame if self.carried else None, potential, new)
