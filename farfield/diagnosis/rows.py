"""The rows of a diagnosis: one for each layer, head, near window and stratum of context lengths.

A row averages over the sampled queries whose context (the tokens of their document up to and
including themselves) is `low` to `high` − 1 tokens, in all texts of the run. Attention is causal:
a context of n tokens inside a long text shows what a text of n tokens shows at its end.

    schema          1
    model           the name the caller gave; `kind` is the configuration's model type
    length, texts   tokens of each text of the run, and how many texts
    rule, sampled   how queries were chosen (`Sampling`), and how many of each text; `sample_seed`
    layer, head     counted from 0; head is a query head
    near_window     tokens: keys at a distance below it are near, the query's own included
    low, high       the stratum [low, high) of context lengths
    carried         whether values ride along the transport
    queries         rows of attention averaged (fully masked and padded ones are left out), and
    far_queries     those of them with near and far keys both: T4 and T4′ were checked on each

Means over those queries, null where none has it (logits in nats, as softmax sees them):

    near_keys, far_keys      K and M, visible keys
    far_mass                 share of the far keys in the weight on keys (ρ_D)
    lse_near, lse_far        ln Σ e^s
    ell                      ln((1/M) Σ e^s) over far keys (ℓ); log_e2, ln(M Σe^{2s}/(Σe^s)²)
    near_max, far_max, near_mean, far_mean     of logits; near_content, far_content: their means
                             without the bias (the same where there is none)
    score_gap                near_max − far_max
    first_far_mass           share of those first keys of the document that are far
    near_norm, far_norm, out_norm, cosine      of the output's two parts, before the output matrix
    far_power, far_power_coherent, far_power_incoherent    |F|² of the far part, what it would be
                             with all far values aligned, and in mean with independent directions
    far_coherence            1 aligned, 0 independent (`measures.value_coherence`)
    far_gain                 far_power_coherent / far_power
    t4, t4_prime             lower bounds of the far mass that always hold
    t4_decohered             T4″, probable where steps are independent; null without known rates ρ

The same for every near window:

    half_range               λ of the logits; half_range_content, half_range_bias: apart
    entropy                  nats; effective_keys its exponential; participation 1/Σp²
    first_mass               weight on the document's first keys, near or far
    learned_sink             weight on a learned sink logit: all other weights share out the rest,
                             and norms and powers are of the output itself, with it taken off
    score_scale              scale · |q| max|k|; null where scores aren't dot products
    coupling_floor           mean κ_b² of T5″ over planes; null unless rotations carry values

Spreads (`…_sd`, over queries) are there for far_mass, lse_near and ell. `t4_slack` and
`t4_prime_slack` are the *least* excess of the far mass's log odds over the bound's, in nats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farfield.diagnosis.sampling import Sampling
from farfield.evaluation import whole

SCHEMA = 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MEANS = _words(
    "near_keys far_keys far_mass lse_near lse_far ell log_e2 near_max far_max near_mean far_mean "
    "near_content far_content score_gap first_far_mass near_norm far_norm out_norm cosine "
    "far_power far_power_coherent far_power_incoherent far_coherence far_gain "
    "t4 t4_prime t4_decohered"
)
WHOLE = _words(
    "half_range half_range_content half_range_bias entropy effective_keys participation "
    "first_mass learned_sink score_scale coupling_floor"
)
SPREADS = ("far_mass", "lse_near", "ell")
BOUNDS = ("t4", "t4_prime")

_KEYS: dict[str, type] = {
    **dict.fromkeys(("schema", "length", "texts", "sampled", "sample_seed"), int),
    **dict.fromkeys(("layer", "head", "near_window", "low", "high"), int),
    **dict.fromkeys(("queries", "far_queries"), int),
    **dict.fromkeys(("model", "kind", "rule"), str),
    "carried": bool,
}
_VALUES = (*MEANS, *WHOLE, *(f"{key}_sd" for key in SPREADS), *(f"{key}_slack" for key in BOUNDS))


def identity(name: str, model: Any, ids: Any, sampling: Sampling) -> dict[str, Any]:
    """What all rows of a run have in common."""
    return {
        "schema": SCHEMA,
        "model": name,
        "kind": str(model.config.model_type),
        "length": int(ids.shape[1]),
        "texts": int(ids.shape[0]),
        "rule": sampling.rule,
        "sampled": len(sampling.rows(int(ids.shape[1]))),
        "sample_seed": sampling.seed,
    }


def check_row(row: Mapping[str, Any]) -> None:
    """Raises ValueError, one line, unless this is a diagnosis row of schema 1."""
    missing = sorted({*_KEYS, *_VALUES} - set(row))
    if missing:
        raise ValueError(f"a diagnosis row lacks {', '.join(missing)}")
    for key, kind in _KEYS.items():
        if type(row[key]) is not kind:
            raise ValueError(f"{key} is {row[key]!r}; expected {kind.__name__}")
    for key in _VALUES:
        if row[key] is not None and type(row[key]) not in (int, float):
            raise ValueError(f"{key} is {row[key]!r}; expected a number or null")
    if row["schema"] != SCHEMA:
        raise ValueError(f"schema is {row['schema']}; expected {SCHEMA}")


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file by these rows, whole or not at all: .jsonl, or .parquet.

    Raises: ValueError for another ending, or a row that breaks the schema (nothing is written);
    OSError.
    """
    kept = [dict(row) for row in rows]
    for row in kept:
        check_row(row)
    write_table(Path(path), kept)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces the file by rows of any table, unchecked; else as `write_rows`."""
    if _format(path) == "jsonl":
        lines = (json.dumps(row, allow_nan=False, ensure_ascii=False) for row in rows)
        whole.write_text(path, "".join(f"{line}\n" for line in lines))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with whole.replacing(path) as scratch:
            pq.write_table(pa.Table.from_pylist(rows), scratch)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl or .parquet file, every one checked.

    Raises: OSError; ValueError naming file and row.
    """
    source = Path(path)
    if _format(source) == "jsonl":
        rows = _read_lines(source)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(source).to_pylist()
        except pa.ArrowInvalid as error:
            raise ValueError(f"{source}: not parquet: {' '.join(str(error).split())}") from None
    for number, row in enumerate(rows, 1):
        try:
            check_row(row)
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from None
    return rows


def _format(path: Path) -> str:
    kind = path.suffix.removeprefix(".")
    if kind not in ("jsonl", "parquet"):
        raise ValueError(f"{path}: expected a name that ends in .jsonl or .parquet")
    return kind


def _read_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected an object")
        rows.append(row)
    return rows
