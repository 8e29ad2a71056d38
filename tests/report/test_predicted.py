"""Curves predicted from a head's measurements: the theory's numbers, and pictures of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farfield import theory
from farfield.report.predicted import predicted_curve, predicted_picture

RHO = [math.exp(-0.08)] * 32
ROW: dict[str, Any] = {
    "layer": 1, "head": 3, "near_window": 32, "lse_near": 4 + math.log(32), "rho": RHO,
    "lambda": 8.0, "mean_power": [1 / 32] * 32, "noise_power": 1.0, "near_power": 1.0,
    "carried": True, "points": [{"length": 512, "far_mass": 0.3121, "snr": 78.7}],
}  # fmt: skip


def test_the_curve_is_the_predictor_s() -> None:
    curve = predicted_curve(ROW, [512, 65536])
    assert curve.name == "layer 1 head 3"
    assert curve.far_mass[1] == pytest.approx(0.9840495767808)
    assert curve.snr is not None
    assert curve.snr[1] == pytest.approx(0.5873125181957)
    assert curve.points == ((512, 0.3121, 78.7),)
    left = predicted_curve({**ROW, "carried": False}, [65536]).snr
    assert left is not None
    assert left[0] == pytest.approx(2.627198659174e-4)


def test_lambda_is_ell_of_equal_planes_and_a_gate_is_a_slope() -> None:
    x = np.full(32, 0.25)
    told = {**ROW, "ell": theory.ell_blocks(x), "ell2": theory.ell_blocks(2 * x)}
    assert np.array_equal(
        predicted_curve(told, [4096]).far_mass, predicted_curve(ROW, [4096]).far_mass
    )
    gated = predicted_curve({**ROW, "mean_gate": math.exp(-0.001)}, [65536])
    sloped = predicted_curve({**ROW, "slope": 0.001}, [65536])
    assert gated.far_mass == pytest.approx(sloped.far_mass)
    assert sloped.far_mass[0] == pytest.approx(0.4771608207957)
    assert sloped.snr is not None
    assert sloped.snr[0] == pytest.approx(82.80420831360)


def test_without_powers_there_is_no_ratio() -> None:
    row = {key: value for key, value in ROW.items() if not key.endswith("_power")}
    curve = predicted_curve(row, [512])
    assert curve.snr is None
    assert curve.far_mass[0] == pytest.approx(predicted_curve(ROW, [512]).far_mass[0])


def test_a_file_of_rows_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    plain = {"near_window": 32, "lse_near": 6.0, "rho": [0.9], "ell": 0.5}
    file.write_text(json.dumps(ROW) + "\n\n" + json.dumps(plain) + "\n")
    out = predicted_picture(file, tmp_path / "predicted.png")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 rows"),
        ("{", "line 1"),
        ("3", "expected an object"),
        (json.dumps({"rho": [0.9], "lse_near": 1}), "near_window"),
        (json.dumps({"rho": [0.9], "lse_near": 1, "near_window": 8}), "neither 'ell' nor"),
        (json.dumps({**ROW, "rho": [1.5] * 32}), "c is"),
        (json.dumps({**ROW, "mean_gate": 0}), "mean_gate is 0"),
        (json.dumps({**ROW, "near_window": 40_000}), "longest is 65536"),
    ],
)
def test_what_is_no_measurement_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        predicted_picture(file, tmp_path / "predicted.png")


def test_a_picture_s_name_says_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "measurements.jsonl"
    file.write_text(json.dumps(ROW))
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        predicted_picture(file, tmp_path / "predicted.pdf")
