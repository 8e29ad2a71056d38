"""Ways to compute the same softmax attention, and the table of what each declares.

An engine is asked for by name and does what it declares, or the call is refused; `auto` chooses
among those that serve the call. Contractions, which leave no common frame for keys, are served by
engines of their own.
"""

from __future__ import annotations

import difflib

import torch
from torch import Tensor

from farfield.algebra.contraction import Contraction, ContractionTrail
from farfield.attention.engines import explicit, fla_path, flex, path, pruned, reference, sdpa
from farfield.attention.engines.engine import FEATURES, FLOATS, HALF, Call, Engine, call_of
from farfield.attention.logit import Visible

__all__ = ["TABLE", "Call", "Engine", "attend", "chosen", "with_lse"]

_CPU, _CUDA, _ALL = frozenset({"cpu"}), frozenset({"cuda"}), frozenset(FEATURES)
_BOTH = _CPU | _CUDA
_FLA = HALF | {torch.float32}
_FLA_SERVES = frozenset({"grouped", "potential", "value dimension"})

TABLE: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("sdpa", sdpa.attend, _BOTH, FLOATS, _BOTH, _ALL, log_sum_exp=True),
        Engine("pruned", pruned.attend, _CPU, FLOATS, frozenset(), _ALL),
        Engine("flex", flex.attend, _BOTH, HALF | {torch.float32}, _CUDA, _ALL),
        Engine("explicit", explicit.attend, _BOTH, FLOATS, _BOTH, _ALL, log_sum_exp=True),
        Engine("reference", reference.attend, _BOTH, FLOATS, _BOTH, _ALL, log_sum_exp=True),
        Engine(
            "path", None, _BOTH, FLOATS, _BOTH, _ALL, along=path.attend, trail=path.attend_cached
        ),
        Engine("fla_path", None, _CUDA, _FLA, _CUDA, _FLA_SERVES, along=fla_path.attend),
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
    k: Tensor | ContractionTrail,
    v: Tensor,
    contraction: Contraction | None = None,
    *,
    potential: Tensor | None = None,
    visible: Visible,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j for the last T of K tokens, logits as in `logit`.

    Along a `contraction`, of whole sequences, or along one whose trail stands in the place of k,
    logits are those of `path`. Under autocast q, k and v take its type, and the potential keeps its
    own.

    Shapes: q [B, H, T, d], pulled and multiplied by any logit scale; k [B, Hk, K, d]; v
    [B, Hk, K, d_v]; potential [B or 1, Hk or H, K] float64 or None. Returns [B, H, T, d_v].
    Raises: ValueError for a call that the engine doesn't serve, naming engines that do, and for
    arguments that do not fit together.
    """
    q, v = _autocast(q), _autocast(v)
    k = _autocast(k) if isinstance(k, Tensor) else k
    call = call_of(q, k, v, contraction, potential, visible)
    serve = chosen(engine, call).way(call.way)
    assert serve is not None
    along = () if contraction is None else (contraction,)
    return serve(q, k, v, *along, potential=potential, visible=visible)


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
    q, k, v = (_autocast(x) for x in (q, k, v))
    found = chosen(engine, call_of(q, k, v, None, potential, visible))
    if not found.log_sum_exp:
        raise ValueError(
            f"engine '{found.name}' gives no log-sum-exp; {_listed(list(_WITH_LSE))} do"
        )
    return _WITH_LSE[found.name](q, k, v, potential=potential, visible=visible)


def chosen(engine: Engine | str, call: Call) -> Engine:
    """The engine that is to serve the call.

    `auto` is sdpa; but pruned for thousands of queries under a potential without gradients, flex on
    CUDA where a potential, a mask or a window keeps the plain kernel away, and path along
    contractions.

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
    able = [name for name, engine in TABLE.items() if engine.way(call.way)]
    serving = [name for name in able if not TABLE[name].refusals(call)]
    pruning = "potential" in call.needs and call.queries >= _WORTH_PRUNING
    if "pruned" in serving and pruning:
        return TABLE["pruned"]
    masked = call.needs & {"potential", "padding", "window"} and call.device == "cuda"
    if "flex" in serving and masked and call.queries >= _WORTH_COMPILING:
        return TABLE["flex"]
    return TABLE[(serving or able)[0]]


def _autocast(x: Tensor) -> Tensor:
    """x in the type that autocast gives to products, where it is on; float64 it leaves be."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"
