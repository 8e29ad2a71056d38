"""Ways to compute the same softmax attention, and the table of what each declares.

An engine is asked for by name and does what it declares, or the call is refused; `auto` chooses
among those that serve the call. (Contractions, which leave no common frame for keys, have an engine
of their own in `path`.)
"""

from __future__ import annotations

import difflib

import torch
from torch import Tensor

from farfield.attention.engines import explicit, flex, pruned, reference, sdpa
from farfield.attention.engines.engine import FEATURES, FLOATS, HALF, Call, Engine, call_of
from farfield.attention.logit import Visible

__all__ = ["TABLE", "Call", "Engine", "attend", "chosen", "with_lse"]

_CPU, _CUDA, _ALL = frozenset({"cpu"}), frozenset({"cuda"}), frozenset(FEATURES)
_BOTH = _CPU | _CUDA

TABLE: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("sdpa", sdpa.attend, _BOTH, FLOATS, _BOTH, _ALL, log_sum_exp=True),
        Engine("pruned", pruned.attend, _CPU, FLOATS, frozenset(), _ALL),
        Engine("flex", flex.attend, _BOTH, HALF | {torch.float32}, _CUDA, _ALL),
        Engine("explicit", explicit.attend, _BOTH, FLOATS, _BOTH, _ALL, log_sum_exp=True),
        Engine("reference", reference.attend, _BOTH, FLOATS, _BOTH, _ALL, log_sum_exp=True),
    )
}
"""The engines by name."""

_WITH_LSE = {
    "sdpa": sdpa.with_lse,
    "explicit": explicit.with_lse,
    "reference": reference.with_lse,
}

_WORTH_PRUNING = 4096
"""Fewest queries for which `auto` bounds what a potential leaves out."""

_WORTH_COMPILING = 1024
"""Fewest queries, on CUDA, for which `auto` compiles a potential, a mask or a window."""


def attend(
    engine: Engine | str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j for the last T of K tokens, logits as in `logit`.

    Under autocast q, k and v take its type, and the potential keeps its own.

    Shapes: q [B, H, T, d], pulled and multiplied by any logit scale; k [B, Hk, K, d]; v
    [B, Hk, K, d_v]; potential [B or 1, Hk or H, K] float64 or None. Returns [B, H, T, d_v].
    Raises: ValueError for a call that the engine doesn't serve, naming engines that do, and for
    arguments that do not fit together.
    """
    q, k, v = _autocast(q, k, v)
    call = call_of(q, k, v, potential, visible)
    found = chosen(engine, call)
    return found.function(q, k, v, potential=potential, visible=visible)


def with_lse(
    engine: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> tuple[Tensor, Tensor]:
    """The output, and log Σ_j exp(logit_ij) [B, H, T] beside it, in float32 at least.

    Units: nats. Raises: ValueError as `attend` does, and for an engine that doesn't give it.
    """
    q, k, v = _autocast(q, k, v)
    found = chosen(engine, call_of(q, k, v, potential, visible))
    if not found.log_sum_exp:
        raise ValueError(
            f"engine '{found.name}' gives no log-sum-exp; {_listed(list(_WITH_LSE))} do"
        )
    return _WITH_LSE[found.name](q, k, v, potential=potential, visible=visible)


def chosen(engine: Engine | str, call: Call) -> Engine:
    """The engine that is to serve the call.

    `auto` is sdpa; but pruned for thousands of queries under a potential without gradients, and
    flex on CUDA where a potential, a mask or a window keeps the plain kernel away.

    Raises: ValueError for an unknown name, or a call outside what the engine declares.
    """
    if isinstance(engine, str):
        if engine == "auto":
            engine = _auto(call)
        elif engine in TABLE:
            engine = TABLE[engine]
        else:
            near = difflib.get_close_matches(engine, [*TABLE, "auto"], 1, 0.0)[0]
            raise ValueError(f"no engine '{engine}'; did you mean '{near}'?")
    refused = engine.refusals(call)
    if refused:
        others = [other.name for other in TABLE.values() if not other.refusals(call)]
        serves = f"{_listed(others)} would" if others else "no engine does"
        raise ValueError(
            f"engine '{engine.name}' does not serve {_listed(refused)} in this call; {serves}"
        )
    return engine


def _auto(call: Call) -> Engine:
    serving = [name for name, engine in TABLE.items() if not engine.refusals(call)]
    pruning = "potential" in call.needs and call.queries >= _WORTH_PRUNING
    if "pruned" in serving and pruning:
        return TABLE["pruned"]
    masked = call.needs & {"potential", "padding", "window"} and call.device == "cuda"
    if "flex" in serving and masked and call.queries >= _WORTH_COMPILING:
        return TABLE["flex"]
    return TABLE[serving[0]] if serving else TABLE["sdpa"]


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the type that autocast gives to products, where it is on; float64 it leaves be."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"
