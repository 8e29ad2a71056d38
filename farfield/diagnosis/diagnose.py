"""One call that measures a trained model, predicts it from its training length, and intervenes.

Everything comes back as rows, and is written as a folder of them that a page can be drawn from:

| file            | rows                                                              |
|-----------------|-------------------------------------------------------------------|
| `attention`     | layer, head, near window, stratum of contexts: see `rows`         |
| `steps`         | layer, head, block: law of a step, rate, windows (`transport`)    |
| `lags`          | the same at each lag: what is left of a transport                 |
| `couplings`     | layer, head: how far blocks are from independent                  |
| `gates`         | layer, head: what a potential forgets                             |
| `values`        | layer, head: mean and noise power of values, sizes of q and k     |
| `layers`        | layer: what its mechanism does beside transport                   |
| `prediction`    | layer, head, stratum beyond L₀: predicted, guessed, measured      |
| `assumptions`   | layer, head: what the theory assumes, and whether it holds        |
| `interventions` | intervention, length: the ladder's rows                           |

`diagnosis.json` says what was run. A table without a row has no file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farfield.diagnosis import assumptions, interventions, rows
from farfield.diagnosis.engines import Far
from farfield.diagnosis.measured import Measured, Settings, measure
from farfield.diagnosis.prediction import controls_of, facts_of, predicted_rows
from farfield.diagnosis.probe import positions
from farfield.diagnosis.samples import Samples, sample
from farfield.diagnosis.sampling import Sampling
from farfield.diagnosis.transport import (
    Row,
    Transports,
    lag_ladder,
    measure_transports,
    watching,
)
from farfield.evaluation import whole
from farfield.evaluation.plan import LadderSettings, make_plan

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import pyarrow

    from farfield.data import TokenStream

FACTS = "diagnosis.json"
FORMATS = ("jsonl", "parquet")
TABLES = (
    "attention", "steps", "lags", "couplings", "gates", "values", "layers", "prediction",
    "assumptions", "interventions",
)  # fmt: skip

BASE_TOKENS = 16384
"""Tokens, at most, that are read in texts of the training length: what predictions know."""

BASE_QUERIES = 32
"""Queries, about, of each of those texts."""

LAG_TOKENS = 16384
"""Tokens, at most, whose transports are measured at length: a lag curve needs no more."""

Stage = Callable[[str], None]
"""Called with the name of what begins."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found: facts of the run, and its tables of rows by name (`TABLES`)."""

    facts: dict[str, Any]
    tables: dict[str, list[Row]] = field(default_factory=dict)

    def frame(self, table: str) -> pandas.DataFrame | pyarrow.Table:
        """A table as a pandas data frame where pandas is installed, else as a pyarrow table.

        Raises: ValueError for a name that is no table.
        """
        if table not in TABLES:
            raise ValueError(f"table {table!r}: expected one of {', '.join(TABLES)}")
        try:
            import pandas as pd
        except ImportError:
            import pyarrow as pa

            return pa.Table.from_pylist(self.tables.get(table, []))
        return pd.DataFrame(self.tables.get(table, []))

    def write(self, folder: str | Path, kind: str = "jsonl") -> Path:
        """The tables as files of a folder, made if missing; each is replaced whole or not at all.

        Files of an earlier diagnosis that this one has no rows for are taken away.
        Raises: ValueError for a kind that is neither jsonl nor parquet; OSError.
        """
        if kind not in FORMATS:
            raise ValueError(f"format {kind!r}: expected one of {', '.join(FORMATS)}")
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            for old in FORMATS:
                if old != kind or not self.tables.get(table):
                    (out / f"{table}.{old}").unlink(missing_ok=True)
            if self.tables.get(table):
                write = rows.write_rows if table == "attention" else rows.write_table
                write(out / f"{table}.{kind}", self.tables[table])
        whole.write_text(out / FACTS, json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n")
        return out


def diagnose(
    model: Any,
    stream: TokenStream,
    lengths: Sequence[int] | None = None,
    *,
    train_length: int,
    name: str,
    seed: int = 0,
    near_windows: Sequence[int] | None = None,
    queries: int = 512,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    intervene: Sequence[str] | None = None,
    tokens: int | None = None,
    stage: Stage | None = None,
) -> Diagnosis:
    """Measures, predicts and intervenes; `stage` is told what begins.

    Contexts are measured up to the longest of `lengths` (default: 1 to 128 times L₀, as far as the
    text goes): causal attention inside a long text is at each token what a text that ends there has
    at its end. `near_windows` default to L₀/8, L₀/4 and L₀, those that leave far keys; predictions
    take the last that is below L₀/2, interventions L₀ (or the largest there is). `queries` of each
    text are looked at. Interventions score `tokens` (default: the longest length) at each of the
    lengths; None runs those that the model takes: all of them for farfield's models, the four that
    serve contractions for such, and none for others' models, which take no engine.

    Units: tokens. Raises: ValueError for a text that is too short, a near window that leaves no
    far key, and as `observe`, `measure_transports` and `interventions.run` do.
    """
    changed = interventions.chosen(model, intervene)
    known = positions(model, torch.from_numpy(stream.block(0, min(16, len(stream))))[None])
    chosen = _lengths(lengths, train_length, len(stream), known)
    windows = _windows(near_windows, train_length, chosen[-1])
    ladder = LadderSettings(
        lengths=tuple(chosen), tokens=chosen[-1] if tokens is None else tokens,
        protocols=("windows",),
    )  # fmt: skip
    if changed:
        make_plan(ladder, len(stream), train_length, known)
    run = _Run(
        model, stream, train_length, chosen, windows, name, queries, layers, heads,
        stage or (lambda _: None),
    )  # fmt: skip
    clock = time.monotonic()
    # What is refused is refused first, on texts of the training length.
    samples = run.samples()
    at_base = run.transports(run.base)
    found, at_length = run.attention(at_base)
    measuring = time.monotonic() - clock
    tables = _tables(found, samples, at_base, at_length, run)
    if changed:
        far = _far(windows, train_length, at_base)
        tables["interventions"] = run.interventions(changed, far, seed, ladder)
    facts = run.facts(found, tables) | {
        "seed": seed,
        "seconds_measuring": round(measuring, 1),
        "seconds": round(time.monotonic() - clock, 1),
    }
    return Diagnosis(facts, tables)


@dataclass(frozen=True)
class _Run:
    """The parts of one diagnosis: what they share, and one method for each."""

    model: Any
    stream: TokenStream
    train_length: int
    lengths: list[int]
    windows: tuple[int, ...]
    name: str
    queries: int
    layers: Sequence[int] | None
    heads: Sequence[int] | None
    begin: Stage

    @property
    def ours(self) -> bool:
        """Whether the model is one of farfield's."""
        return getattr(self.model.config, "model_type", None) == "farfield"

    @property
    def query_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.model.config.get_text_config(decoder=True).num_attention_heads)

    @property
    def base(self) -> Tensor:
        """Texts of L₀ tokens."""
        return self._texts(self.train_length, BASE_TOKENS)

    @property
    def predicting(self) -> int:
        """The near window of predictions: the last that leaves far keys in the second half of L₀.

        Raises: ValueError where none does.
        """
        half = (min(self.train_length, len(self.stream)) + 1) // 2
        fitting = [window for window in self.windows if window < half]
        if not fitting:
            raise ValueError(
                f"near_windows are {list(self.windows)}; expected one below half of the training "
                f"length {self.train_length}, so that there are far keys to predict from"
            )
        return fitting[-1]

    def samples(self) -> Samples:
        """What predictions may know of the logits."""
        self.begin("attention at the training length")
        return sample(
            self.model, self.base, self.predicting, queries=BASE_QUERIES, layers=self.layers,
            heads=self.heads,
        )  # fmt: skip

    def transports(self, ids: Tensor) -> Transports:
        """Transports in texts [texts, tokens]; none in others' models."""
        if not self.ours:
            return Transports()
        self.begin(f"transports at {ids.shape[1]:,} tokens")
        return measure_transports(
            self.model, ids, train_length=self.train_length, layers=self.layers
        )

    def attention(self, known: Transports) -> tuple[Measured, Transports]:
        """Rows of every context up to the longest, with T4″ where rates are known; transports at
        length, in the same run where it isn't longer than they need."""
        longest, found, within = self.lengths[-1], Transports(), None
        if longest > LAG_TOKENS:
            found = self.transports(self._texts(LAG_TOKENS, LAG_TOKENS))
        elif self.ours:
            within = watching(
                self.model, found, lag_ladder(longest), train_length=self.train_length,
                layers=self.layers,
            )  # fmt: skip
        self.begin(f"attention at {longest:,} tokens")
        settings = Settings(self.windows, rho=_rates(known, self.query_heads) or None)
        measured = measure(
            self.model, self._texts(longest, longest), name=self.name, settings=settings,
            sampling=Sampling("stratified", self.queries), layers=self.layers, heads=self.heads,
            within=within,
        )  # fmt: skip
        return measured, found

    def interventions(
        self, names: Sequence[str], far: Far, seed: int, ladder: LadderSettings
    ) -> list[Row]:
        """The ladder under each."""
        self.begin(f"interventions on keys beyond {far.near_window:,} tokens")
        return interventions.run(
            self.model, self.stream, ladder, far, mechanism=self.name, seed=seed, names=names
        )

    def facts(self, found: Measured, tables: dict[str, list[Row]]) -> dict[str, Any]:
        """What was run, for `diagnosis.json`."""
        changed = tables.get("interventions")
        return {
            "schema": rows.SCHEMA,
            "model": self.name,
            "kind": str(self.model.config.model_type),
            "train_length": self.train_length,
            "lengths": self.lengths,
            "near_windows": list(self.windows),
            "prediction_window": self.predicting,
            "intervention_window": changed[0]["near_window"] if changed else None,
            "queries": self.queries,
            "base_texts": int(self.base.shape[0]),
            "layers": list(found.coverage.layers),
            "not_measured": {str(n): why for n, why in found.coverage.not_measured.items()},
            "bounds_checked": found.checked,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }

    def _texts(self, length: int, tokens: int) -> Tensor:
        """The first texts of a length, `tokens` in all at most: int64 [texts, length]."""
        length = min(length, len(self.stream))
        count = max(1, min(tokens, len(self.stream)) // length)
        ids = torch.from_numpy(self.stream.block(0, count * length)).view(count, length)
        return ids.to(next(self.model.parameters()).device)


def _lengths(
    lengths: Sequence[int] | None, train_length: int, tokens: int, known: int | None
) -> list[int]:
    """`known` positions that the model has, None for any number."""
    if known is not None and known < max([train_length, *(lengths or ())]):
        what = f"the longest length is {max(lengths)}" if lengths else f"L₀ is {train_length}"
        raise ValueError(
            f"{what}, and the model has {known} absolute positions; expected at most as many"
        )
    if lengths is None:
        chosen = [train_length * 2**n for n in range(8)]
        fitting = [n for n in chosen if n < tokens and (known is None or n <= known)]
        if not fitting:
            raise ValueError(
                f"the text has {tokens} tokens; expected more than the training length "
                f"{train_length}"
            )
        return fitting
    chosen = sorted(set(lengths))
    if not chosen or chosen[0] < 2:
        raise ValueError(f"lengths are {list(lengths)}; expected at least one, all of 2 or more")
    if chosen[-1] >= tokens:
        raise ValueError(
            f"the text has {tokens} tokens, and the longest length is {chosen[-1]}; expected a "
            "longer text, or shorter lengths"
        )
    return chosen


def _windows(given: Sequence[int] | None, train_length: int, longest: int) -> tuple[int, ...]:
    if given is not None:
        wrong = [window for window in given if not 1 <= window < longest]
        if wrong or not given:
            raise ValueError(
                f"near_windows are {list(given)}; expected some from 1 to {longest - 1}, below the "
                "longest length"
            )
        return tuple(sorted(set(given)))
    chosen = {max(1, train_length // 8), max(2, train_length // 4), train_length}
    fitting = tuple(sorted(window for window in chosen if window < longest))
    if not fitting:
        raise ValueError(
            f"no near window of ⅛, ¼ or 1 training lengths of {train_length} is below the longest "
            f"length {longest}; expected longer lengths, or near_windows"
        )
    return fitting


def _rates(found: Transports, heads: int) -> dict[int, list[float]]:
    """‖E M‖ of every query head: the largest rate of its blocks, 1 where steps never vary."""
    rates: dict[int, dict[int | None, float]] = {}
    for row in found.steps:
        own = rates.setdefault(row["layer"], {})
        own[row["head"]] = max(own.get(row["head"], 0.0), row["rho"])
    return {
        layer: [
            own[None] if None in own else own[head * len(own) // heads] for head in range(heads)
        ]
        for layer, own in rates.items()
    }


def _far(windows: Sequence[int], train_length: int, found: Transports) -> Far:
    near = train_length if train_length in windows else max(windows)
    kinds = {row["kind"] for row in found.steps}
    bounded = [row["window"] for row in found.layers if row["window"] is not None]
    near = min([near, *(max(1, window // 2) for window in bounded if window <= near)])
    return Far(
        near, train_length, planes="operator" not in kinds,
        carried=any(row["carried"] for row in found.layers),
    )  # fmt: skip


def _tables(
    found: Measured, samples: Samples, at_base: Transports, at_length: Transports, run: _Run
) -> dict[str, list[Row]]:
    heads, window, train_length = run.query_heads, run.predicting, run.train_length
    controls = controls_of(at_base, heads)
    checked = assumptions.of_transports(at_length)
    checked += assumptions.of_logits(samples, found.rows, window, train_length, controls)
    return {
        "attention": found.rows,
        **{key: getattr(at_length, key) for key in TABLES[1:7]},
        "prediction": predicted_rows(
            samples, found.rows, near_window=window, train_length=train_length,
            controls=controls, facts=facts_of(at_base, heads),
        ),
        "assumptions": checked,
    }  # fmt: skip
