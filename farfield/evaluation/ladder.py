"""The length ladder: every protocol over one model and one stream of tokens, as result rows.

What the protocols score is stated in `protocols`, which lengths and tokens in `plan`, how a loss
is computed in `losses`. Every number here is a sum of per-token losses (float64) and a count;
rates are taken from sums, never from other rates.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from farfield.evaluation import protocols
from farfield.evaluation.intervals import Interval, perplexity_ratio, pool
from farfield.evaluation.losses import PROBE_TOKENS, Losses, Scorer, undisturbed, vocabulary
from farfield.evaluation.plan import LadderSettings, Plan, make_plan, position_buckets
from farfield.evaluation.protocols import Progress, Reader
from farfield.evaluation.rows import SCHEMA, perplexity

if TYPE_CHECKING:
    from farfield.data import TokenStream
    from farfield.evaluation.scaled import Scaled

__all__ = ["LadderResult", "LadderSettings", "evaluate"]

_CHECKED_AT_ONCE = 2**20
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_NO_POSITION = ("out of range", "out of bounds")


@dataclass(frozen=True)
class LadderResult:
    """Rows of `results.jsonl` and `positions.jsonl`; the lengths left out, by protocol, and why."""

    rows: list[dict[str, Any]]
    positions: list[dict[str, Any]]
    left_out: list[dict[str, Any]]

    def joined(self, other: LadderResult) -> LadderResult:
        """Both, with what both left out said once."""
        more = [left for left in other.left_out if left not in self.left_out]
        return LadderResult(
            self.rows + other.rows, self.positions + other.positions, self.left_out + more
        )


def evaluate(
    model: nn.Module,
    stream: TokenStream,
    settings: LadderSettings,
    *,
    train_length: int,
    mechanism: str,
    seed: int,
    progress: Progress | None = None,
    scaled: Scaled | None = None,
) -> LadderResult:
    """Runs the ladder: ppl(L) = exp(Σ nll / tokens), ratio(L) = ppl(L) / ppl(L₀), by position too.

    The model is any Hugging Face causal language model. It comes back as it was, and so does
    every random state: training goes on as if nothing had been evaluated. `progress` is called
    with (done, total) in units of work, fit for a time left.

    A length that doesn't fit the text or the model is left out with its reason; so is one above
    the shortest whose forward runs out of memory or of positions.

    `scaled` sets the model's rotations for each length; it is asked for every one (see there).

    Units: nats; tokens. `seed` and `mechanism` only name the rows.
    Raises: ValueError when a token id is beyond the model's embedding, or no length fits.
    """
    if len(stream) < 2:
        raise ValueError(f"the stream has {len(stream)} tokens: expected at least 2")
    with undisturbed(model):
        probe = min(PROBE_TOKENS, len(stream))
        _check_ids(stream, probe, vocabulary(model))
        scorer = Scorer(model, stream.block(0, probe))
        plan = make_plan(settings, len(stream), train_length, scorer.positions)
        _check_ids(stream, plan.last_token, vocabulary(model))
        measured = _measure(Reader(scorer, stream, plan, progress), scaled)
    names = {
        "schema": SCHEMA,
        "mechanism": mechanism,
        "seed": seed,
        "train_length": train_length,
    }
    rows = [
        names | _row(plan, measured, protocol, length, stream, scorer, scaled)
        for protocol in plan.settings.protocols
        for length in plan.lengths
        if (protocol, length) in measured.units
    ]
    positions = [
        names | row
        for length in plan.lengths
        if ("windows", length) in measured.units
        for row in _position_rows(length, measured.by_position[length], plan.tokens // length)
    ]
    failed = measured.failed
    if scaled is not None:  # where only the scaled model failed, its name is part of the reason
        failed = [left | {"reason": f"{mechanism}: {left['reason']}"} for left in failed]
    return LadderResult(rows, positions, [asdict(left) for left in plan.left_out] + failed)


@dataclass
class _Measured:
    """Losses per unit [U] (NaN or infinite where a token's is), and what they came from."""

    units: dict[tuple[str, int], Losses]
    non_finite: dict[tuple[str, int], int]
    by_position: dict[int, Losses]  # length -> sums over its windows [L]
    failed: list[dict[str, Any]]

    def add(self, protocol: str, length: int, losses: Losses) -> None:
        self.units[protocol, length] = losses.sum(axis=1)
        self.non_finite[protocol, length] = int((~np.isfinite(losses)).sum())

    def fail(self, plan: Plan, length: int, reason: str) -> None:
        """Leaves out what the plan has at a length and no loss was measured for.

        With L₀ goes `clipped` at every length, which starts with its windows.
        """
        lost = [(length, protocol) for protocol in plan.settings.protocols]
        if length == plan.base:
            lost += [(longer, "clipped") for longer in plan.lengths if longer != length]
        self.failed += [
            {"length": at, "protocol": protocol, "reason": reason}
            for at, protocol in lost
            if plan.runs(protocol, at) and (protocol, at) not in self.units
        ]


def _measure(reader: Reader, scaled: Scaled | None) -> _Measured:
    """Runs the plan, length by length; what a length fails at is left out, what it gave is kept."""
    plan = reader.plan
    measured = _Measured({}, {}, {}, [])
    finished = 0.0
    # L₀ first: what the other lengths take from it is then there, whatever fails later.
    for length in sorted(plan.measured, key=lambda length: (length != plan.base, length)):
        finished += reader.planned[length]
        try:
            # What is longer than L₀ in `clipped` is read in contexts of L₀: at L₀, unscaled.
            with nullcontext() if scaled is None else scaled.at(length):
                _measure_length(reader, length, measured)
        except (IndexError, MemoryError, RuntimeError) as error:
            reason = _refusal(error)
            if reason is None or length == min(plan.measured):
                raise
            measured.fail(plan, length, reason)
        reader.advance(finished)
    return measured


def _measure_length(reader: Reader, length: int, measured: _Measured) -> None:
    """Every protocol at one length; at L₀, `clipped` of all lengths, which runs no longer ones."""
    plan = reader.plan
    scored = protocols.windows(reader, length) if plan.runs_windows(length) else None
    if scored is not None and plan.runs("windows", length):
        measured.add("windows", length, scored)
        measured.by_position[length] = scored.sum(axis=0)
    if plan.runs("fixed", length):
        measured.add("fixed", length, protocols.fixed(reader, length, scored))
    if scored is None or length != plan.base or not plan.runs("clipped", length):
        return
    measured.add("clipped", length, scored)
    slid = protocols.sliding(reader, scored) if plan.slides else scored
    for longer in plan.lengths:
        if longer > length and plan.runs("clipped", longer):
            measured.add("clipped", longer, protocols.clipped(plan, longer, scored, slid))


def _refusal(error: Exception) -> str | None:
    """Why a forward can't serve a length, where the error says so."""
    text = str(error)
    first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if isinstance(error, MemoryError) or any(phrase in text for phrase in _NO_MEMORY):
        return f"the forward ran out of memory: {first_line}"
    if any(phrase in text for phrase in _NO_POSITION):
        return f"the model has no positions so far: {first_line}"
    return None


def _row(
    plan: Plan,
    measured: _Measured,
    protocol: str,
    length: int,
    stream: TokenStream,
    scorer: Scorer,
    scaled: Scaled | None,
) -> dict[str, Any]:
    units = measured.units[protocol, length]
    fixed = protocol == "fixed"
    unit_tokens = plan.block if fixed else length
    tokens = unit_tokens * len(units)
    nll = _finite(units.sum())
    base = None if plan.base is None else measured.units.get((protocol, plan.base))
    ratio = _ratio(plan, units, length, base, fixed)
    if fixed:
        ends = [int(end) for end in plan.block_ends]
        count = sum(stream.byte_count(end - plan.block, end) for end in ends)
    else:
        count = stream.byte_count(1, plan.tokens + 1)
    return {
        "length": length,
        "protocol": protocol,
        "nll": nll,
        "tokens": tokens,
        "bytes": int(count),
        "ppl": perplexity(nll, tokens),
        "ratio": ratio.estimate,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "unit_nll": [_finite(value) for value in units],
        "unit_tokens": unit_tokens,
        "policy": {
            **_policy(plan, protocol, length),
            **({} if scaled is None else _scaling(scaled, protocol, length)),
            "dtype": scorer.dtype,
            "head": scorer.head,
            "non_finite": measured.non_finite[protocol, length],
            "ratio_base": None
            if base is None
            else {"length": plan.base, "nll": _finite(base.sum()), "tokens": tokens},
        },
    }


def _ratio(plan: Plan, units: Losses, length: int, base: Losses | None, fixed: bool) -> Interval:
    """ppl(L)/ppl(L₀); units that hold the same tokens are resampled together."""
    if base is None:
        return Interval(None, None, None)
    unit_tokens = plan.block
    if not fixed:
        unit_tokens = math.lcm(length, plan.train_length)
        units = pool(units, length, unit_tokens)
        base = pool(base, plan.train_length, unit_tokens)
    settings = plan.settings
    return perplexity_ratio(
        units, base, unit_tokens, level=settings.level, resamples=settings.resamples
    )


def _scaling(scaled: Scaled, protocol: str, length: int) -> dict[str, Any]:
    """By which rule and factor the rotations were scaled; `clipped` reads no context beyond L₀."""
    factor = scaled.factor(scaled.train_length if protocol == "clipped" else length)
    return {"scaling": scaled.scaling, "factor": factor}


def _policy(plan: Plan, protocol: str, length: int) -> dict[str, Any]:
    """How the protocol chose tokens and contexts at this length."""
    block, base = plan.block, plan.train_length
    stated: dict[str, Any] = {
        "documents": "concatenated",
        "bos": False,
        "level": plan.settings.level,
        "resamples": plan.settings.resamples,
        "discarded_tail": plan.stream_tokens - 1 - plan.tokens,
    }
    if protocol == "windows":
        return stated | {"stride": length, "context": f"1 to {length} tokens"}
    if protocol == "clipped":
        context = f"1 to {base} tokens, then {base - plan.stride + 1} to {base}"
        return stated | {"stride": plan.stride, "context": context}
    ends = plan.block_ends
    return stated | {
        "stride": None,
        "context": f"{length - block} to {length - 1} tokens",
        "discarded_tail": plan.stream_tokens - int(ends[-1]),
        "blocks": {
            "tokens": block,
            "asked": plan.settings.blocks,
            "kept": len(ends),
            "grid": plan.block_grid,
            "first_end": int(ends[0]),
            "last_end": int(ends[-1]),
        },
    }


def _position_rows(length: int, sums: Losses, windows: int) -> list[dict[str, Any]]:
    return [
        {
            "length": length,
            "low": low,
            "high": high,
            "nll": _finite(sums[low - 1 : high - 1].sum()),
            "tokens": windows * (high - low),
        }
        for low, high in position_buckets(length)
    ]


def _check_ids(stream: TokenStream, stop: int, size: int) -> None:
    """Refuses a token that the model has no embedding for, before any forward meets it."""
    for start in range(0, stop, _CHECKED_AT_ONCE):
        ids = stream.block(start, min(_CHECKED_AT_ONCE, stop - start))
        if ids.max() >= size or ids.min() < 0:
            offset = int(np.argmax((ids >= size) | (ids < 0)))
            raise ValueError(
                f"token id {int(ids[offset])} at token {start + offset} of the text: the model "
                f"has embeddings for ids 0 to {size - 1}; is the text tokenised with the model's "
                "own tokenizer?"
            )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
