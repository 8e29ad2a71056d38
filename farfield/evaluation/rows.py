"""The rows of `results.jsonl` and `positions.jsonl`: their schema, checked on reading and writing.

One JSON object per line. Sums and counts come first; every rate in a row can be computed again
from them. Nothing here needs torch or a model, so a report can be drawn from the files alone.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from farfield.evaluation import whole

SCHEMA = 1
PROTOCOLS = ("windows", "fixed", "clipped")


class Policy(TypedDict, total=False):
    """How a number came about: what a reader must know before comparing it with another.

    Units: `discarded_tail` tokens of the stream after the last one scored; `non_finite` tokens;
    `stride` tokens from one window to the next, null for target blocks; `ratio_base` the summed
    nats and tokens that the ratio divides by. `scaling` and `factor`, in rows of a scaled model
    alone: the rule, and by how much the frequencies were lowered at most.
    """

    documents: str
    bos: bool
    stride: int | None
    dtype: str
    discarded_tail: int
    non_finite: int
    level: float
    resamples: int
    head: str
    context: str
    first_target: int
    ratio_base: dict[str, Any] | None
    blocks: dict[str, Any]
    scaling: str
    factor: float


class ResultRow(TypedDict):
    """One mechanism, seed, protocol and length: `tokens` targets with summed loss `nll` (nats).

    ppl = exp(nll / tokens); ratio = ppl / ppl at train_length under the same protocol, with the
    percentile interval [ratio_low, ratio_high] (null with fewer than two units). `unit_nll` sums
    the loss per window or target block of `unit_tokens` targets, in the order of the text. With
    any non-finite loss, nll, ppl, ratio and the units concerned are null.
    """

    schema: int
    mechanism: str
    seed: int
    train_length: int
    length: int
    protocol: str
    nll: float | None
    tokens: int
    bytes: int
    ppl: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    unit_nll: list[float | None]
    unit_tokens: int
    policy: Policy


class PositionRow(TypedDict):
    """Summed loss (nats) of the targets that see `low` to `high` − 1 tokens, in `windows`.

    `nll` is null where a loss is not finite; the `windows` row of that length counts them.
    """

    schema: int
    mechanism: str
    seed: int
    train_length: int
    length: int
    low: int
    high: int
    nll: float | None
    tokens: int


def read_rows(path: str | Path) -> list[ResultRow]:
    """The result rows of a file, every one checked.

    Keys that this schema doesn't know are kept, so that a study may add columns of its own.

    Raises: OSError when the file can't be read; ValueError naming file and line otherwise.
    """
    return cast("list[ResultRow]", _read(Path(path), check_row))


def read_positions(path: str | Path) -> list[PositionRow]:
    """The position rows of a file, every one checked; see `read_rows`."""
    return cast("list[PositionRow]", _read(Path(path), check_position))


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file by these result rows, whole or not at all.

    Raises: ValueError naming the row that breaks the schema (nothing is written); OSError.
    """
    _write(Path(path), list(rows), check_row)


def write_positions(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file by these position rows, whole or not at all; see `write_rows`."""
    _write(Path(path), list(rows), check_position)


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds result rows to a file (made if missing): what was there is checked and kept.

    The file is replaced whole, so a reader never meets half a line. For one writer at a time.
    """
    old = read_rows(path) if Path(path).exists() else []
    write_rows(path, [*old, *rows])


def perplexity(nll: float | None, tokens: int) -> float | None:
    """exp(nll / tokens), or None where that is not a finite number."""
    if nll is None or tokens < 1:
        return None
    try:
        value = math.exp(nll / tokens)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


_NUMBER = (int, float)
_RESULT_FIELDS: dict[str, tuple[tuple[type, ...], bool]] = {  # types, may be null
    "schema": ((int,), False),
    "mechanism": ((str,), False),
    "seed": ((int,), False),
    "train_length": ((int,), False),
    "length": ((int,), False),
    "protocol": ((str,), False),
    "nll": (_NUMBER, True),
    "tokens": ((int,), False),
    "bytes": ((int,), False),
    "ppl": (_NUMBER, True),
    "ratio": (_NUMBER, True),
    "ratio_low": (_NUMBER, True),
    "ratio_high": (_NUMBER, True),
    "unit_nll": ((list,), False),
    "unit_tokens": ((int,), False),
    "policy": ((dict,), False),
}
_POSITION_FIELDS: dict[str, tuple[tuple[type, ...], bool]] = {
    **{name: _RESULT_FIELDS[name] for name in ("schema", "mechanism", "seed", "train_length")},
    "length": ((int,), False),
    "low": ((int,), False),
    "high": ((int,), False),
    "nll": (_NUMBER, True),
    "tokens": ((int,), False),
}
_POLICY_FIELDS = ("documents", "stride", "dtype", "discarded_tail", "non_finite")


def check_row(row: Mapping[str, Any]) -> None:
    """Raises ValueError, one line, unless this is a result row of schema 1."""
    _check_fields(row, _RESULT_FIELDS)
    _check_positive(row, ("train_length", "length", "tokens", "unit_tokens"))
    protocol = row["protocol"]
    if protocol not in PROTOCOLS:
        near = difflib.get_close_matches(protocol, PROTOCOLS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"protocol = {protocol!r}: expected one of {', '.join(PROTOCOLS)}{hint}")
    for name in _POLICY_FIELDS:
        if name not in row["policy"]:
            raise ValueError(f"policy has no {name!r}: expected {', '.join(_POLICY_FIELDS)}")
    units = row["unit_nll"]
    for index, value in enumerate(units):
        if value is not None and not _is_number(value):
            raise ValueError(f"unit_nll[{index}] = {value!r}: expected a finite number or null")
    if len(units) * row["unit_tokens"] != row["tokens"]:
        raise ValueError(
            f"unit_nll holds {len(units)} units of {row['unit_tokens']} tokens, "
            f"but tokens = {row['tokens']}"
        )
    if row["nll"] is None and (row["ppl"] is not None or row["ratio"] is not None):
        raise ValueError("nll is null, but ppl or ratio is not")


def check_position(row: Mapping[str, Any]) -> None:
    """Raises ValueError, one line, unless this is a position row of schema 1."""
    _check_fields(row, _POSITION_FIELDS)
    _check_positive(row, ("train_length", "length", "low", "tokens"))
    if not row["low"] < row["high"] <= row["length"] + 1:
        raise ValueError(
            f"positions [{row['low']}, {row['high']}): expected low < high <= length + 1 "
            f"= {row['length'] + 1}"
        )


def _check_fields(
    row: Mapping[str, Any], fields: Mapping[str, tuple[tuple[type, ...], bool]]
) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"got {type(row).__name__}: expected an object")
    if "schema" in row and row["schema"] != SCHEMA:
        raise ValueError(f"schema = {row['schema']!r}: this version reads schema {SCHEMA}")
    for name, (types, nullable) in fields.items():
        if name not in row:
            extra = [key for key in row if key not in fields]
            near = difflib.get_close_matches(name, extra, 1)
            raise ValueError(
                f"no {name!r} in the row" + (f"; is {near[0]!r} meant?" if near else "")
            )
        value = row[name]
        if value is None and nullable:
            continue
        good = _is_number(value) if types is _NUMBER else _is_plain(value, types)
        if not good:
            expected = "a finite number" if types is _NUMBER else types[0].__name__
            raise ValueError(
                f"{name} = {value!r}: expected {expected}" + (" or null" if nullable else "")
            )


def _check_positive(row: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if row[name] < 1:
            raise ValueError(f"{name} = {row[name]}: expected at least 1")


def _is_plain(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(float(value))
    )


def _read(path: Path, check: Callable[[Mapping[str, Any]], None]) -> list[Any]:
    rows: list[Any] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
            check(row)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); "
                "expected one object per line"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append(row)
    return rows


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON: expected a finite number or null")


def _write(
    path: Path, rows: list[Mapping[str, Any]], check: Callable[[Mapping[str, Any]], None]
) -> None:
    lines = []
    for number, row in enumerate(rows, start=1):
        try:
            check(row)
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, row {number} not written: {error}") from None
    whole.write_text(path, "".join(f"{line}\n" for line in lines))


def non_finite_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Where losses of result rows are not finite, one line a row."""
    return [
        f"{row['policy']['non_finite']:,} of {row['tokens']:,} losses at {row['length']} "
        f"({row['protocol']}) are not finite"
        for row in rows
        if row["policy"]["non_finite"]
    ]
