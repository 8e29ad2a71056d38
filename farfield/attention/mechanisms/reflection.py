"""`reflection`: the token says in which hyperplane it reflects, M_t = I - 2 w wᵀ, w from W x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.algebra.convolution import causal_convolution
from farfield.algebra.reflection import ReflectionFrame
from farfield.algebra.trail import Rows, Steps
from farfield.attention.mechanism import Carry, Geometry, State, Tokens, Transport, end


@dataclass(frozen=True)
class Options:
    """`rank`: that of W (0: full). `conv`: taps of a short causal convolution with SiLU over W x
    (0: none). `source`: hidden (W x_t) or token (a learned row for each token id)."""

    rank: int = 0
    conv: int = 0
    source: Literal["hidden", "token"] = "hidden"


class Reflection(Transport):
    """M_t = I - 2 w_t w_tᵀ with w_t = W x_t / |W x_t|, for every key/value head.

    Only the direction of W x counts, so no scale has to be chosen at the start: a step moves one
    dimension of d and leaves the others. Vectors in all directions alike give E P = (1 - 2/d)^n
    over n tokens, which is 0.1 after about 1.15 d: near tokens are seen as they are from the first
    iteration on, and the far ones are what has to be learned. With rank r < d all vectors of a head
    lie in r dimensions, mixed as with d = r; the other d - r dimensions are moved by no token.

    The convolution starts as the identity. Where W x = 0 the step is the identity as well (`nope`).

    Source: Yang et al., "PaTH Attention" (arXiv 2505.16381), for vectors of low rank with a short
    convolution and SiLU; this is its step with β = 2.
    """

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        for name in ("rank", "conv"):
            if getattr(options, name) < 0:
                raise ValueError(
                    f"option '{name}' of 'reflection' is {getattr(options, name)}; "
                    "expected at least 0"
                )
        self.options = options
        self.head_dim = geometry.head_dim
        size = geometry.kv_heads * geometry.head_dim
        inner = options.rank or size
        self.weight: nn.Module
        if options.source == "token":
            self.weight = nn.Embedding(geometry.vocab_size, inner)
        else:
            self.weight = nn.Linear(geometry.hidden_size, inner, bias=False)
        names = ["weight.weight"]
        if options.rank:
            self.spread = nn.Linear(inner, size, bias=False)
            names.append("spread.weight")
        if options.conv:
            now = torch.zeros(size, options.conv, device="cpu")
            now[:, -1] = 1.0
            self.initial_values = {"taps": tuple(map(tuple, now.tolist()))}
            self.taps = nn.Parameter(now.clone())
            names.append("taps")
        self.angle_parameters = tuple(names)

    def forward(self, tokens: Tokens, state: State) -> Carry:
        """Frames [B, kv heads, T, d]. Raises: ValueError where the source is the token id and ids
        are not known."""
        vector, trail = self.vectors(tokens, state)
        before = state.get("frame")
        base = before.folded if isinstance(before, Steps) else None
        frame = ReflectionFrame.from_vectors(vector, base)
        return Carry(frame=frame, state={"frame": frame.trail, **trail})

    def resize_vocabulary(self, size: int) -> None:
        """Refused where each id has a learned row: a new id would have none."""
        if self.options.source == "token":
            raise ValueError(
                "reflection:source=token has a row for each id; its vocabulary is fixed"
            )

    def vectors(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """W x_t [B, kv heads, T, d], zero at padding, in float32 or wider, outside autocast: a
        vector in half precision would turn even near routes. And the trail of the convolution."""
        trail: State = {}
        with torch.autocast(tokens.hidden.device.type, enabled=False):
            vector = self._data(tokens)
            if self.options.rank:
                vector = _applied(self.spread, vector)
            if self.options.conv:
                taps = self.taps.to(vector.dtype)
                tail = end(state, "inputs")
                tail = None if tail is None else tail.squeeze(1)
                vector, tails = causal_convolution(vector, taps, tail, tokens.valid)
                vector = F.silu(vector)
                trail = {"inputs": Rows(tails.unsqueeze(1))} if tails.shape[-1] else {}
            vector = vector.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            return tokens.real(vector), trail

    def _data(self, tokens: Tokens) -> Tensor:
        if self.options.source == "hidden":
            return _applied(self.weight, tokens.hidden)
        if tokens.ids is None:
            raise ValueError(
                "reflection:source=token looks token ids up: pass input_ids, not inputs_embeds"
            )
        rows: Tensor = self.weight(tokens.ids)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _applied(layer: nn.Module, x: Tensor) -> Tensor:
    """W x in float32 or wider."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))
