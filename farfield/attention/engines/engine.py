"""What an engine declares, and what a call asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farfield.algebra.contraction import Contraction, ContractionTrail
from farfield.attention.logit import Visible

HALF = frozenset({torch.bfloat16, torch.float16})
FLOATS = frozenset({torch.float32, torch.float64}) | HALF

FEATURES = {
    "grouped": "fewer key heads than query heads",
    "potential": "a potential",
    "padding": "padding",
    "window": "a window",
    "sinks": "sinks",
    "positions": "a window over given positions",
    "value dimension": "values of another dimension than keys",
}
"""What a call may ask for beyond causal attention: the word, and how a message says it."""

Ways = Literal["frame", "along", "trail"]
"""How keys reach queries: in a common frame, along a contraction, or along one from a cache."""

_WAYS: dict[Ways, str] = {
    "frame": "keys in a common frame",
    "along": "steps that contract",
    "trail": "steps that contract, in a cache (use_cache=False goes without)",
}


@dataclass(frozen=True)
class Engine:
    """One way to compute softmax attention, and the calls it serves.

    `devices` names device types (empty: any). `gradients` names those of them on which it is
    differentiable to q, k, v and the potential (empty: none). `serves` holds words of `FEATURES`.
    `log_sum_exp` says that the engine's module has a `with_lse` that returns it beside the output.
    `function` serves keys in a common frame; `along` a contraction, which it takes after v, for
    whole sequences; `trail` one from a cache, whose trail stands in the place of k. None: it can't.

    Shapes: `function` takes q [B, H, T, d], k [B, Hk, K, d], v [B, Hk, K, d_v], and by name
    potential [B or 1, Hk or H, K] float64 or None and visible; it returns [B, H, T, d_v].
    """

    name: str
    function: Callable[..., Tensor] | None
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    gradients: frozenset[str]
    serves: frozenset[str]
    log_sum_exp: bool = False
    along: Callable[..., Tensor] | None = None
    trail: Callable[..., Tensor] | None = None

    def way(self, keys: Ways) -> Callable[..., Tensor] | None:
        """What serves keys that reach queries this way."""
        return {"frame": self.function, "along": self.along, "trail": self.trail}[keys]

    def refusals(self, call: Call) -> list[str]:
        """What of the call is not served, in words; empty where all is."""
        found = [] if self.way(call.way) else [_WAYS[call.way]]
        found += [FEATURES[need] for need in FEATURES if need in call.needs - self.serves]
        if self.devices and call.device not in self.devices:
            found.append(f"device {call.device}")
        if call.dtype not in self.dtypes:
            found.append(str(call.dtype).removeprefix("torch."))
        if call.gradient and call.device not in self.gradients:
            found.append(f"gradients on {call.device}")
        return found


@dataclass(frozen=True)
class Call:
    """What one call asks of an engine."""

    device: str
    dtype: torch.dtype
    gradient: bool
    needs: frozenset[str]
    queries: int
    keys: int
    way: Ways = "frame"


def call_of(
    q: Tensor,
    k: Tensor | ContractionTrail,
    v: Tensor,
    contraction: Contraction | None,
    potential: Tensor | None,
    visible: Visible,
) -> Call:
    """The call that these arguments make.

    Raises: ValueError where their shapes or types do not fit together.
    """
    _check(q, k, v, potential, visible)
    given = [x for x in (q, k, v, potential) if isinstance(x, Tensor)]
    if contraction is not None:
        given += [contraction.w, contraction.beta]
    windowed = visible.window is not None
    asked = {
        "grouped": q.shape[1] != v.shape[1],
        "potential": potential is not None,
        "padding": visible.valid is not None,
        "window": windowed,
        "sinks": windowed and visible.sinks > 0,
        "positions": windowed and visible.position is not None,
        "value dimension": v.shape[-1] != q.shape[-1],
    }
    return Call(
        device=q.device.type,
        dtype=q.dtype,
        gradient=torch.is_grad_enabled() and any(x.requires_grad for x in given),
        needs=frozenset(need for need in asked if asked[need]),
        queries=visible.queries,
        keys=visible.keys,
        way=_way(k, contraction),
    )


def _way(k: Tensor | ContractionTrail, contraction: Contraction | None) -> Ways:
    if isinstance(k, ContractionTrail):
        return "trail"
    return "frame" if contraction is None else "along"


def _check(
    q: Tensor,
    k: Tensor | ContractionTrail,
    v: Tensor,
    potential: Tensor | None,
    visible: Visible,
) -> None:
    batch, heads, queries, dim = q.shape
    of_keys = tuple(k.shape)
    kv_heads, keys = of_keys[1:3]
    if of_keys[0] != batch or of_keys[-1] != dim or heads % kv_heads:
        raise ValueError(f"k is {of_keys}; expected [{batch}, a divisor of {heads}, ·, {dim}]")
    if v.shape[:3] != of_keys[:3]:
        raise ValueError(f"v is {tuple(v.shape)}; expected {of_keys[:3]} and any dimension")
    if (visible.queries, visible.keys) != (queries, keys):
        raise ValueError(
            f"visible is for {visible.queries} queries of {visible.keys} keys, and there are "
            f"{queries} of {keys}"
        )
    if isinstance(k, Tensor) and not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one type")
    if potential is None:
        return
    if potential.dtype != torch.float64:
        raise ValueError(f"potential is {potential.dtype}; it grows with length: expected float64")
    rows, of_heads, tokens = potential.shape
    if rows not in (1, batch) or of_heads not in (kv_heads, heads) or tokens != keys:
        raise ValueError(
            f"potential is {tuple(potential.shape)}; expected [1 or {batch}, {kv_heads} or {heads},"
            f" {keys}]"
        )
