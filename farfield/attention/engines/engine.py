"""What an engine declares, and what a call asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Engine:
    """One way to compute softmax attention, and the calls it serves.

    `devices` names device types (empty: any). `gradients` names those of them on which it is
    differentiable to q, k, v and the potential (empty: none). `serves` holds words of `FEATURES`.
    `log_sum_exp` says that the engine's module has a `with_lse` that returns it beside the output.
    `along` does the same along a contraction, which it takes after v, for whole sequences; None: it
    can't.

    Shapes: `function` takes q [B, H, T, d], k [B, Hk, K, d], v [B, Hk, K, d_v], and by name
    potential [B or 1, Hk or H, K] float64 or None and visible; it returns [B, H, T, d_v].
    """

    name: str
    function: Callable[..., Tensor]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    gradients: frozenset[str]
    serves: frozenset[str]
    log_sum_exp: bool = False
    along: Callable[..., Tensor] | None = None

    def refusals(self, call: Call) -> list[str]:
        """What of the call is not served, in words; empty where all is."""
        found = [FEATURES[need] for need in FEATURES if need in call.needs - self.serves]
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


def call_of(q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible) -> Call:
    """The call that these arguments make.

    Raises: ValueError where their shapes or types do not fit together.
    """
    _check(q, k, v, potential, visible)
    given = [x for x in (q, k, v, potential) if x is not None]
    windowed = visible.window is not None
    asked = {
        "grouped": q.shape[1] != k.shape[1],
        "potential": potential is not None,
        "padding": visible.valid is not None,
        "window": windowed,
        "sinks": windowed and visible.sinks > 0,
        "positions": windowed and visible.position is not None,
        "value dimension": v.shape[-1] != k.shape[-1],
    }
    return Call(
        device=q.device.type,
        dtype=q.dtype,
        gradient=torch.is_grad_enabled() and any(x.requires_grad for x in given),
        needs=frozenset(need for need in asked if asked[need]),
        queries=visible.queries,
        keys=visible.keys,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, potential: Tensor | None, visible: Visible) -> None:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    if k.shape[0] != batch or k.shape[-1] != dim or heads % kv_heads:
        raise ValueError(
            f"k is {tuple(k.shape)}; expected [{batch}, a divisor of {heads}, ·, {dim}]"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v is {tuple(v.shape)}; expected {tuple(k.shape[:3])} and any dimension")
    if (visible.queries, visible.keys) != (queries, keys):
        raise ValueError(
            f"visible is for {visible.queries} queries of {visible.keys} keys, and there are "
            f"{queries} of {keys}"
        )
    if not q.dtype == k.dtype == v.dtype:
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
