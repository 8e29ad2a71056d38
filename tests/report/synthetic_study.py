"""A made-up study's folder, with losses drawn so that its curves look like a real one's."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

L0 = 128
MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128)
# Perplexity at L₀ and ratio at 128 L₀.
MECHANISMS: dict[str, tuple[float, float]] = {
    "rope": (4.33, 12.4),
    "rope:mixing": (4.38, 6.1),
    "alibi": (4.60, 0.97),
    "random": (4.45, 2.21),
    "random+v": (4.14, 1.75),
    "learned": (4.36, 3.45),
    "learned+v": (4.16, 2.55),
    "learned+v+alibi": (3.93, 0.98),
}


@dataclass
class Plan:
    """What to make up. `ratios` are those at the longest length, `noise` is per window, in nats
    per token and the mechanism's own, `seed_noise` is each seed's own slope."""

    mechanisms: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MECHANISMS)
    seeds: Sequence[int] = (0, 1, 2)
    multiples: Sequence[int] = MULTIPLES
    protocols: Sequence[str] = ("windows", "fixed", "clipped")
    windows: int = 4
    noise: float = 0.01
    seed_noise: float = 0.04


def log_ratio(ratio: float, multiple: float, longest: float) -> float:
    """Flat for a mechanism that holds, bending upwards with the logarithm for one that fails."""
    share = math.log(multiple) / math.log(longest) if longest > 1 else 0.0
    return math.log(ratio) * share ** (1.0 if ratio > 5 else 2.0 if ratio > 1 else 0.7)


def result_rows(plan: Plan) -> list[dict[str, Any]]:
    """Result rows of every mechanism, seed, protocol and length of a plan."""
    text = np.random.default_rng(0).normal(0, 0.12, plan.windows * max(plan.multiples))
    rows = []
    for number, (name, (ppl, ratio)) in enumerate(plan.mechanisms.items()):
        for seed in plan.seeds:
            draw = np.random.default_rng([number, seed])
            tilt = draw.normal(0, plan.seed_noise)
            shift = draw.normal(0, 0.01)
            for protocol in plan.protocols:
                rows += _ladder(plan, name, ppl, ratio, seed, protocol, text + shift, tilt, draw)
    return rows


def _ladder(
    plan: Plan,
    name: str,
    ppl: float,
    ratio: float,
    seed: int,
    protocol: str,
    text: np.ndarray,
    tilt: float,
    draw: np.random.Generator,
) -> list[dict[str, Any]]:
    longest = max(plan.multiples)
    rows, home = [], None
    for multiple in plan.multiples:
        change = log_ratio(ratio, multiple, longest)
        change += tilt * change
        if protocol == "clipped":
            change = -0.035 * (1 - 1 / multiple)
        if protocol == "fixed":
            losses, unit = text[:: max(1, len(text) // 32)][:32], L0 // 4
            change *= 1.08
        else:
            losses, unit = text.reshape(-1, multiple).mean(axis=1), L0 * multiple
        noise = draw.normal(0, plan.noise, len(losses)) if multiple > 1 else 0.0
        units = (math.log(ppl) + losses + change + noise) * unit
        tokens = unit * len(units)
        row = result_row(name, seed, L0 * multiple, protocol, units.tolist(), unit)
        home = home or float(units.sum()) / tokens
        row["ratio"] = math.exp(float(units.sum()) / tokens - home)
        row["ratio_low"], row["ratio_high"] = row["ratio"] * 0.97, row["ratio"] * 1.03
        rows.append(row)
    return rows


def result_row(
    mechanism: str,
    seed: int,
    length: int,
    protocol: str,
    units: Sequence[float | None],
    unit_tokens: int,
) -> dict[str, Any]:
    """One result row of schema 1 from its windows' sums."""
    tokens = unit_tokens * len(units)
    bad = sum(value is None for value in units)
    nll = None if bad else sum(value for value in units if value is not None)
    ppl = None if nll is None else math.exp(nll / tokens)
    return {
        "schema": 1,
        "mechanism": mechanism,
        "seed": seed,
        "train_length": L0,
        "length": length,
        "protocol": protocol,
        "nll": nll,
        "tokens": tokens,
        "bytes": tokens,
        "ppl": ppl,
        "ratio": None,
        "ratio_low": None,
        "ratio_high": None,
        "unit_nll": list(units),
        "unit_tokens": unit_tokens,
        "policy": {
            "documents": "concatenated",
            "bos": False,
            "stride": L0 // 4 if protocol == "clipped" else length,
            "dtype": "float32",
            "discarded_tail": 1204,
            "non_finite": bad,
            "level": 0.95,
            "resamples": 2000,
            "head": "chunked",
        },
    }


def position_rows(plan: Plan) -> list[dict[str, Any]]:
    """Losses by position at every length of a plan."""
    rows = []
    longest = L0 * max(plan.multiples)
    for name, (ppl, ratio) in plan.mechanisms.items():
        for seed in plan.seeds:
            for length in (L0 * multiple for multiple in plan.multiples):
                for low, high in _buckets(length):
                    at = math.sqrt(low * max(low, high - 1))
                    loss = math.log(ppl) + 1.5 * at**-0.55 - 0.03
                    loss += log_ratio(ratio, max(1.0, 1.3 * at / L0), longest / L0)
                    tokens = (high - low) * plan.windows
                    rows.append(
                        {
                            "schema": 1,
                            "mechanism": name,
                            "seed": seed,
                            "train_length": L0,
                            "length": length,
                            "low": low,
                            "high": high,
                            "nll": loss * tokens,
                            "tokens": tokens,
                            "non_finite": 0,
                        }
                    )
    return rows


def _buckets(length: int) -> list[tuple[int, int]]:
    edges = sorted({1, 2, 3, *(s * 2**k for k in range(30) for s in (2, 3))})
    cut = [edge for edge in edges if edge < length + 1] + [length + 1]
    return list(itertools.pairwise(cut))


def metrics(ppl: float, iterations: int, seed: int, until: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for iteration in range(10, until + 1, 10):
        loss = math.log(ppl) + 4.1 * math.exp(-iteration / 22) + 1.1 * math.exp(-iteration / 140)
        rows.append(
            {
                "iteration": iteration,
                "loss": loss + draw.normal(0, 0.02),
                "learning_rate": 2e-3 * (1 - iteration / iterations),
                "grad_norm": 0.6,
                "tokens_per_second": 21_000,
                "seconds": 0.2 * iteration,
            }
        )
        if iteration % 50 == 0:
            rows.append({"iteration": iteration, "validation_loss": loss + 0.04})
    return rows


RECIPE = """name = "{name}"
description = "Seven mechanisms and one control on the King James text, three seeds each."
mechanisms = [{mechanisms}]
seeds = [{seeds}]

[data]
source = "kjv"
tokenizer = "bytes"

[model]
layers = 4
width = 128
heads = 4

[training]
length = 128
batch = 32
iterations = 400
learning_rate = 0.002

[ladder]
multiples = [1, 2, 4, 8, 16, 32, 64, 128]
tokens = 65536
"""


def run_record(mechanism: str, seed: int, status: str, **facts: Any) -> dict[str, Any]:
    """The `run.json` of a run in some state."""
    transport = 263_168 if mechanism.startswith("learned") else 0
    done = status == "finished"
    return {
        "schema": 1,
        "mechanism": mechanism,
        "seed": seed,
        "status": status,
        "phase": "training" if status == "running" else None,
        "iteration": 400 if done else 180 if status == "running" else 0,
        "iterations": 400,
        "error": None,
        "parameters": 858_240 + transport,
        "parameters_transport": transport,
        "flops_per_token": 1_720_320 + 2 * transport,
        "train_seconds": 92.0 + 14 * mechanism.count("+") if done else None,
        "ladder_seconds": 71.0 + 6 * mechanism.count("+") if done else None,
        "tokens_per_second": 17_800.0 - 1500 * mechanism.count("+") if done else None,
        "train_tokens": 400 * 32 * L0 if done else None,
        "peak_memory_bytes": 913 * 2**20 if done else None,
        "left_out": [],
        "started": "2026-11-29T16:00:00+00:00",
        "finished": "2026-11-29T16:21:00+00:00" if done else None,
    } | facts


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(
    folder: Path,
    plan: Plan | None = None,
    *,
    states: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    name: str = "three seeds",
) -> Path:
    """Write a study's folder. `states`: runs that are not finished, with what `run.json` says of
    them; those have no result rows, and a "pending" one has no folder at all."""
    plan, states = plan or Plan(), states or {}
    folder.mkdir(parents=True, exist_ok=True)
    listed = ", ".join(json.dumps(name) for name in plan.mechanisms)
    recipe = RECIPE.format(name=name, mechanisms=listed, seeds=", ".join(map(str, plan.seeds)))
    (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    environment = {
        "farfield": "0.1.0",
        "python": "3.11.7",
        "platform": "Linux-6.1-x86_64",
        "packages": {"torch": "2.13.0", "transformers": "5.24.0", "numpy": "2.4.1"},
        "threads_per_run": 1,
    }
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    for number, (mechanism, (ppl, _)) in enumerate(plan.mechanisms.items()):
        for seed in plan.seeds:
            facts = dict(states.get((mechanism, seed), {"status": "finished"}))
            status = facts.pop("status")
            if status == "pending":
                continue
            run = folder / "runs" / f"r{number}-s{seed}"
            run.mkdir(parents=True)
            record = run_record(mechanism, seed, status, **facts)
            (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
            until = 400 if status == "finished" else 180
            write_jsonl(run / "metrics.jsonl", metrics(ppl, 400, seed, until))
    kept = [
        [row for row in rows if (row["mechanism"], row["seed"]) not in states]
        for rows in (result_rows(plan), position_rows(plan))
    ]
    for file, rows in zip(("results.jsonl", "positions.jsonl"), kept, strict=True):
        if rows:
            write_jsonl(folder / file, rows)
    return folder
