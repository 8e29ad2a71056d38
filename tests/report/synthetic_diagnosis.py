"""Diagnoses written by hand, with the numbers of the sentences that a page must say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BASE = 128
CONTEXTS = (96, 128, 192, 256, 512, 1024, 2048)
LENGTHS = (128, 512, 2048)
HEADS = ((0, 0), (0, 1), (1, 0), (1, 1))


def make(
    folder: Path,
    model: str = "rope",
    *,
    mass: float = 0.8,
    ratio: float = 9.0,
    masked: float = 1.1,
    dropped: float = 1.2,
    moved: float = 1.5,
    ell: float = 2.0,
    rho: float = 1.0,
    slope: float = 0.0,
    error: float = 0.3,
    guess: float = 0.2,
    **facts: Any,
) -> Path:
    """The folder of a diagnosis: far mass rises to `mass` at the longest context, perplexity 5 at
    L₀ to `ratio` times that, `masked` times with far keys hidden."""
    folder.mkdir(parents=True)
    tables = {
        "attention": _attention(mass),
        "steps": _steps(rho),
        "lags": _lags(rho, slope),
        "gates": _gates(slope) if slope else [],
        "layers": [{"layer": layer, "carried": False} for layer in (0, 1)],
        "prediction": _prediction(error, guess),
        "assumptions": [
            {
                "assumption": "ell_stationary", "layer": layer, "head": head, "value": ell,
                "limit": 0.25, "sense": "at most", "holds": abs(ell) <= 0.25,
            }
            for layer, head in HEADS
        ],
        "interventions": _interventions(model, ratio, masked, dropped, moved),
    }  # fmt: skip
    for name, rows in tables.items():
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    told = {
        "schema": 1, "model": model, "kind": "farfield", "train_length": BASE, "queries": 64,
        "lengths": list(LENGTHS), "near_windows": [32, 128], "intervention_window": 128,
        "not_measured": {}, "bounds_checked": 4321,
    }  # fmt: skip
    (folder / "diagnosis.json").write_text(json.dumps(told | facts), encoding="utf-8")
    return folder


def _attention(mass: float) -> list[dict[str, Any]]:
    rows = []
    for window in (32, 128):
        for layer, head in HEADS:
            for at in CONTEXTS:
                keys = max(0, at - window)
                share = mass * keys / (2048 - window) if keys else None
                if share is not None and (layer, head) == HEADS[-1]:
                    share = min(1.0, share * 1.1)
                rows.append(
                    {
                        "layer": layer, "head": head, "near_window": window, "low": at,
                        "high": at + 1, "far_keys": keys, "far_mass": share,
                        "t4_prime": None if share is None else share / 2,
                    }
                )  # fmt: skip
    return rows


def _steps(rho: float) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer, "head": None, "kind": "rotation", "block": block, "rho": rho,
            "window": None if rho == 1 else 40.0 + 10 * block,
            "window_independent": None if rho == 1 else 45.0,
            "mixes": rho < 1, "window_known": True, "energy": 0.5,
        }
        for layer in (0, 1)
        for block in (0, 1)
    ]  # fmt: skip


def _lags(rho: float, slope: float) -> list[dict[str, Any]]:
    lags = (1, 4, 16, 64, 128, 256)
    rows: list[dict[str, Any]] = [
        {
            "layer": layer, "head": None, "kind": "rotation", "block": block, "lag": lag,
            "left": rho**lag, "floor": 0.05, "independent": rho**lag,
        }
        for layer in (0, 1)
        for block in (0, 1)
        for lag in lags
    ]  # fmt: skip
    if slope:
        rows += [
            {
                "layer": layer, "head": head, "kind": "gate", "block": None, "lag": lag,
                "left": 2.718281828 ** (-slope * lag), "floor": 0.0, "independent": 0.0,
            }
            for layer, head in HEADS
            for lag in lags
        ]  # fmt: skip
    return rows


def _gates(slope: float) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer, "head": head, "heads": 2, "constant": True, "slope": slope,
            "memory": (1 + head) / slope,
        }
        for layer, head in HEADS
    ]  # fmt: skip


def _prediction(error: float, guess: float) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer, "head": head, "near_window": 32, "low": at, "high": at + 1,
            "measured": 0.5, "predicted": 0.5 + error, "no_change": 0.1, "proportional": 1.0,
            "proportional_odds": 0.5 + guess, "error": error, "error_no_change": 0.4,
            "error_proportional": 0.5, "error_proportional_odds": guess,
            "beats_guesses": error < guess,
        }
        for layer, head in HEADS
        for at in CONTEXTS
        if at > BASE
    ]  # fmt: skip


def _interventions(
    model: str, ratio: float, masked: float, dropped: float, moved: float
) -> list[dict[str, Any]]:
    ends = {
        "none": ratio, "far_masked": masked, "far_values_dropped": dropped,
        "far_logits_mean": masked, "alibi": ratio**0.5, "far_frame": ratio * moved,
    }  # fmt: skip
    rows = []
    for name, end in ends.items():
        for at, length in enumerate(LENGTHS):
            grown, own = (x ** (at / (len(LENGTHS) - 1)) for x in (end, ratio))
            rows.append(
                {
                    "mechanism": model, "intervention": name, "near_window": 128,
                    "length": length, "ppl": 5 * grown, "ratio": grown, "against": grown / own,
                }
            )  # fmt: skip
    return rows


def study(folder: Path, models: Sequence[tuple[str, dict[str, Any]]]) -> Path:
    """A study's folder with nothing in it but diagnoses, of seeds 0."""
    for model, changes in models:
        make(folder / "diagnosis" / f"{model.replace(':', '~')}-s0", model, **changes)
    return folder
