"""Far mass and signal-to-noise ratio over length, predicted from a head's measurements alone.

One row a head: what was measured at one length, usually the training length. The prediction is the
theory's, and no model is needed to draw it; measured points stand beside it where a row has them.

    near_window  tokens                     lse_near   ln Σ e^logit over near keys, nats
    rho          [B] rates of the planes    ell        ln of a far key's mean weight, nats
    ell2         ln E e^{2s}; 2·ell if left out (equal weights)
    lambda       in place of ell and ell2: the half-range of the content logits, spread over planes
    slope        ALiBi's, or mean_gate: φ, as a slope of −ln φ; neither is no control
    mean_power   [B] |μ_b|², noise_power E|ξ|², near_power σ²: all three, or there is no ratio
    carried      whether values are carried (false if left out)
    points       measured: [{length, far_mass, snr}], snr may be left out
    layer, head  names
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farfield.theory import ell_blocks, predict
from farfield.theory.drawing import CARRIED, CONTROL, EDGE, LEFT, PLAIN, length_axis, sheet

_NEEDED = ("near_window", "lse_near", "rho")
_POWERS = ("mean_power", "noise_power", "near_power")
_INKS = (LEFT, PLAIN, CONTROL, CARRIED)


@dataclass(frozen=True)
class Curve:
    """One head's prediction over lengths, and what was measured.

    Shapes: lengths, far_mass, snr [L]; snr is None without the powers of values.
    points: (length, far mass, SNR or None). Units: tokens; –.
    """

    name: str
    lengths: npt.NDArray[np.float64]
    far_mass: npt.NDArray[np.float64]
    snr: npt.NDArray[np.float64] | None
    points: tuple[tuple[float, float, float | None], ...]


def read_measurements(file: Path | str) -> list[dict[str, Any]]:
    """The rows of a .jsonl file of measurements.

    Raises: ValueError naming the line that is no row; OSError.
    """
    rows = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: expected an object, got {row!r}")
            rows.append(row)
    return rows


def predicted_curve(row: Mapping[str, Any], lengths: Sequence[float]) -> Curve:
    """The far mass, and with powers of values the SNR, that a head's measurements predict.

    Raises: ValueError naming a key that is missing or a value that none can have.
    """
    for key in _NEEDED:
        if key not in row:
            raise ValueError(f"measurements have no {key!r}; expected {', '.join(_NEEDED)}")
    rho = np.atleast_1d(np.asarray(row["rho"], dtype=np.float64))
    ell, ell2 = _weights(row, rho.size)
    known = all(row.get(key) is not None for key in _POWERS)
    given: Sequence[Any] = (
        [row[key] for key in _POWERS] if known else (np.zeros(rho.size), 1.0, 1.0)
    )
    mean, noise, near = given
    told = predict(
        np.asarray(lengths, dtype=np.float64), row["near_window"], row["lse_near"], ell, ell2,
        mean, rho, noise, near, bool(row.get("carried", False)), _slope(row),
    )  # fmt: skip
    points = tuple((p["length"], p["far_mass"], p.get("snr")) for p in row.get("points", ()))
    name = " ".join(f"{key} {row[key]}" for key in ("layer", "head") if key in row)
    return Curve(
        name or "head", np.asarray(lengths, dtype=np.float64), np.asarray(told.far_mass),
        np.asarray(told.snr) if known else None, points,
    )  # fmt: skip


def predicted_rows(file: Path | str, lengths: Sequence[float]) -> list[dict[str, Any]]:
    """What the measurements of each row of a file predict at each length: a row each.

    `snr` is None without powers of values. Raises: ValueError as `predicted_curve`, for a length
    below 1 and a file without rows; OSError.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths are {list(lengths)}; expected at least one, all of 1 or more")
    rows = read_measurements(file)
    if not rows:
        raise ValueError(f"{file} has no rows; expected one for each head")
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            curve = predicted_curve(row, lengths)
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from None
        snr = [None] * len(lengths) if curve.snr is None else curve.snr.tolist()
        for n, mass, ratio in zip(lengths, curve.far_mass.tolist(), snr, strict=True):
            found.append({"head": curve.name, "length": n, "far_mass": mass, "snr": ratio})
    return found


def _weights(row: Mapping[str, Any], blocks: int) -> tuple[float, float]:
    if "ell" in row:
        return float(row["ell"]), float(row.get("ell2", 2 * row["ell"]))
    if "lambda" not in row:
        raise ValueError("measurements have neither 'ell' nor 'lambda'; expected one of them")
    x = np.full(blocks, float(row["lambda"]) / blocks)
    return float(ell_blocks(x)), float(ell_blocks(2 * x))


def _slope(row: Mapping[str, Any]) -> float:
    if "mean_gate" not in row:
        return float(row.get("slope", 0.0))
    gate = float(row["mean_gate"])
    if not 0 < gate <= 1:
        raise ValueError(f"mean_gate is {gate}; expected a number above 0, at most 1")
    return -math.log(gate) + float(row.get("slope", 0.0))


def predicted_picture(file: Path | str, out: Path | str, longest: int = 1 << 16) -> Path:
    """Draw the predicted curves of every row of a file, measured points beside them.

    Raises: ValueError for no row, more rows than can be told apart, a row that is none, or a name
    that ends in neither .png nor .svg; OSError.
    """
    rows = read_measurements(file)
    if not 1 <= len(rows) <= len(_INKS):
        raise ValueError(f"{file} has {len(rows)} rows; expected 1 to {len(_INKS)} heads to draw")
    first = max(2 * row.get("near_window", 1) for row in rows)
    if longest <= first:
        raise ValueError(f"longest is {longest}; expected more than {first} tokens")
    lengths = np.unique(np.round(np.geomspace(first, longest, 80)))
    curves = [predicted_curve(row, lengths.tolist()) for row in rows]
    with_snr = any(curve.snr is not None for curve in curves)
    with sheet(Path(out), 1 + with_snr, 3.8, "Predicted from measurements at one length") as panels:
        for curve, ink in zip(curves, _INKS, strict=False):
            panels[0].plot(lengths, curve.far_mass, color=ink, linewidth=2, label=curve.name)
            at = [(n, mass) for n, mass, _ in curve.points]
            panels[0].plot(*_columns(at), "o", color=ink, markersize=5, mfc="white")
            if curve.snr is not None:
                panels[1].plot(lengths, curve.snr, color=ink, linewidth=2, label=curve.name)
                at = [(n, snr) for n, _, snr in curve.points if snr is not None]
                panels[1].plot(*_columns(at), "o", color=ink, markersize=5, mfc="white")
        panels[0].set(ylim=(0, 1.01), title="far mass")
        if with_snr:
            panels[1].set(yscale="log", title="near signal over far noise (power)")
            panels[1].axhline(1, color=EDGE, linewidth=1)
        for axes in panels:
            length_axis(axes, lengths[0], longest)
            axes.set_xlabel("context length, tokens (lines predicted, points measured)")
        panels[0].legend(loc="upper left")
    return Path(out)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
