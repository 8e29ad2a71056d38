"""What a position mechanism is: a map from tokens to a Carry.

A mechanism never touches queries, keys or values. It looks at the tokens (hidden states, ids,
positions) and says how they carry: with which transport a key reaches a query, whether values ride
along, and what holds far mass down. The attention layer does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from farfield.algebra.frame import Frame
from farfield.algebra.trail import Rows, Trail
from farfield.attention.packing import Packing

if TYPE_CHECKING:
    from farfield.algebra.contraction import Contraction

State = Mapping[str, Trail]
"""What a mechanism must remember of the tokens before: a trail for each name."""


def end(state: State, name: str) -> Tensor | None:
    """The last row [..., 1, ·] of a trail of rows; None at the start."""
    trail = state.get(name)
    return trail.end if isinstance(trail, Rows) else None


@dataclass(frozen=True)
class Geometry:
    """What a mechanism is built for: one attention layer of a model.

    Units: `mixing_window` and `train_length` (None: not known) in tokens. `rope_base` is the base
    of RoPE's frequencies. `seed` and `layer` name the random angles. `value_dim` is the dimension
    of values (None: that of keys). Raises: ValueError where heads do not divide, or a size or the
    base is not positive.
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
    train_length: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "heads", "kv_heads", "head_dim", "vocab_size", "value_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not self.rope_base > 0:
            raise ValueError(f"rope_base is {self.rope_base}; expected a positive number")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly"
            )

    def known_train_length(self, wanted_by: str) -> int:
        """L₀, for a mechanism that can't be built without. Raises: ValueError where not known."""
        if self.train_length is None:
            raise ValueError(f"{wanted_by} needs the training length; give train_length")
        return self.train_length


@dataclass(frozen=True)
class Tokens:
    """The tokens a mechanism may look at: those of one call, the state holds the earlier ones.

    Shapes: hidden [B, T, D], the layer's normalised input; ids int64 [B, T] or None when the caller
    gave embeddings; valid bool [B, T] or None (all valid); position int64 [B or 1, T], how many
    valid tokens precede each one in its row, earlier calls included. `nonce` names the draw of
    fresh random angles: the training iteration, or 0 in evaluation. `packing` says where documents
    begin (None: a row is one); the layer unpacks them, so that no mechanism sees a packed row.
    """

    hidden: Tensor
    position: Tensor
    ids: Tensor | None = None
    valid: Tensor | None = None
    nonce: int = 0
    packing: Packing | None = None

    @property
    def frame_dtype(self) -> torch.dtype:
        """What cosines and sines are kept in: float32, or float64 for float64 hidden states."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def unpacked(self) -> list[Tokens]:
        """The documents of packed rows, as batches of tokens with a row for each."""
        assert self.packing is not None
        hidden = self.packing.unpacked(self.hidden)
        ids = [None] * len(hidden) if self.ids is None else self.packing.unpacked(self.ids)
        return [
            Tokens(x, torch.arange(x.shape[1], device=x.device)[None], i, None, self.nonce)
            for x, i in zip(hidden, ids, strict=True)
        ]

    def real(self, x: Tensor) -> Tensor:
        """x [B or 1, heads, T, ·] with zeros at padding: there a step is the identity."""
        return x if self.valid is None else x * self.valid[:, None, :, None].to(x.dtype)


@dataclass(frozen=True)
class Carry:
    """How tokens carry: everything the layer needs to know of a mechanism.

    `frame` transports queries and keys, `value_frame` values; `contraction` takes the place of a
    frame where steps have no inverse; `potential` is u_t and `logit_scale` c_t in
    c_i · score_ij + u_j - u_i; `window` and `sinks` bound what is visible. None: the identity,
    zero, one, no bound. `state` is the trail of these tokens.

    Shapes: frames of T tokens with leading axes [B or 1, kv heads or 1]; potential
    [B or 1, kv heads or query heads, T] float64, accumulated; logit_scale
    [B or 1, query heads or 1, T]. Raises: TypeError for a potential of another type; ValueError for
    carries that contradict themselves.
    """

    frame: Frame | None = None
    value_frame: Frame | None = None
    contraction: Contraction | None = None
    potential: Tensor | None = None
    logit_scale: Tensor | None = None
    window: int | None = None
    sinks: int = 0
    state: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.potential is not None and self.potential.dtype != torch.float64:
            raise TypeError(
                f"potential is {self.potential.dtype}; it grows with length and needs float64"
            )
        if self.contraction is not None and (self.frame or self.value_frame):
            raise ValueError("a Carry has a frame or a contraction, not both")
        if self.window is None and self.sinks:
            raise ValueError(f"sinks is {self.sinks} without a window they could be outside of")

    def scaled(self, logit_scale: Tensor) -> Carry:
        """This Carry with its logits multiplied once more."""
        known = self.logit_scale
        return replace(self, logit_scale=logit_scale if known is None else known * logit_scale)


class Transport(nn.Module):
    """One kind of step. Subclasses map tokens to a Carry with a frame (or a contraction).

    `angle_parameters` names the parameters of the module that fix angles; they may have a learning
    rate of their own. `fresh` is true where the angles change with the nonce. `logit_scale` is what
    the logits are multiplied by, whatever the tokens. `contracts` is true where every Carry has a
    contraction and no frame. A module's `initial_values` names parameters that start from given
    values, its `initial_std` is that of the others.
    """

    angle_parameters: tuple[str, ...] = ()
    fresh: bool = False
    logit_scale: float = 1.0
    contracts: bool = False

    def resize_vocabulary(self, size: int) -> None:
        """Told when the model's vocabulary changes; nothing to do unless ids fix angles."""

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """The Carry of the tokens that follow `state`, with the trail of these tokens."""
        raise NotImplementedError


class Control(nn.Module):
    """One kind of explicit far-mass control. Subclasses complete a Carry.

    `unbounded` is true where it lets logits grow with length, whatever the content.
    """

    unbounded: bool = False

    def forward(self, tokens: Tokens, state: State, carry: Carry) -> Carry:
        """`carry` with the field this control sets, and its trail (if any) in the state."""
        raise NotImplementedError

    def reach(self, cap: Tensor, epsilon: float) -> int | None:
        """Tokens after which a key can't matter: all of them together have at most ε times the
        weight a query gives itself, if |content logit| ≤ `cap` [H]. None: that can't be promised.
        """
        return None


class Mechanism(nn.Module):
    """A transport × (values left | carried) × controls, as one map from tokens to a Carry.

    Law: the Carry of a sequence equals the Carries of its chunks, each from the state of the one
    before (tested for every mechanism in the table).
    """

    def __init__(
        self, transport: Transport | None, carried: bool, controls: tuple[Control, ...] = ()
    ) -> None:
        super().__init__()
        if carried and transport is None:
            raise ValueError("values can only be carried along a transport, and there is none")
        self.transport = transport
        self.controls = nn.ModuleList(controls)
        self.carried = carried

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """The Carry of `tokens`, which follow those `state` remembers."""
        carry = Carry() if self.transport is None else self.transport(tokens, state)
        if (carry.contraction is not None) != self.contracts:
            raise ValueError(
                f"{type(self.transport).__name__} gives "
                f"{'no ' * self.contracts}contraction, and declares contracts = {self.contracts}"
            )
        if self.carried:
            carry = replace(carry, value_frame=carry.frame)
        for control in self._controls():
            carry = control(tokens, state, carry)
        return carry

    @property
    def contracts(self) -> bool:
        """Whether steps are contractions, which no key can absorb."""
        return self.transport is not None and self.transport.contracts

    def reach(self, cap: Tensor, epsilon: float) -> int | None:
        """The least reach that one of the controls promises; see `Control.reach`."""
        if any(control.unbounded for control in self._controls()):
            cap = torch.full_like(cap, torch.inf)
        found = [control.reach(cap, epsilon) for control in self._controls()]
        return min((one for one in found if one is not None), default=None)

    def _controls(self) -> list[Control]:
        return list(self.controls)  # type: ignore[arg-type]
