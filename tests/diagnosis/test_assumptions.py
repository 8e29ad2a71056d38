"""Assumptions hold or fail by the numbers they are given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from farfield.diagnosis.assumptions import of_logits, of_transports
from farfield.diagnosis.prediction import Control
from farfield.diagnosis.samples import HeadSample, Keys
from farfield.diagnosis.transport import Transports


def steps(**changes: Any) -> dict[str, Any]:
    row = {
        "layer": 0, "head": 1, "block": 0, "window": 30.0, "window_independent": 20.0,
        "rho_first": 0.9, "rho_beyond": 0.92,
    }  # fmt: skip
    return row | changes


def verdicts(rows: list[dict[str, Any]]) -> dict[str, tuple[float, bool]]:
    return {row["assumption"]: (row["value"], row["holds"]) for row in rows}


def test_of_transports() -> None:
    found = Transports(
        steps=[steps(), steps(block=1, window=50.0), steps(block=2, window=None, rho_first=0.8)],
        couplings=[{"layer": 0, "head": 1, "largest": 0.2, "typical": 0.1, "noise": 0.03}],
        values=[{"layer": 0, "head": 1, "effective_blocks": 1.2, "energy": [1.0, 0.1, 0.1]}],
    )
    told = verdicts(of_transports(found))
    assert told["steps_independent"] == (pytest.approx(2.0), False)  # median of 1.5 and 2.5
    assert told["steps_stationary"] == (pytest.approx(0.12), False)
    assert told["blocks_independent"] == (0.2, False)
    assert told["energy_spread"] == (pytest.approx(0.4), False)
    fine = Transports(
        steps=[steps()],
        couplings=[{"layer": 0, "head": 1, "largest": 0.2, "typical": 0.1, "noise": 0.3}],
        values=[{"layer": 0, "head": 1, "effective_blocks": 2.9, "energy": [1.0, 1.0, 0.9]}],
    )
    assert all(holds for _, holds in verdicts(of_transports(fine)).values())


def test_a_block_that_never_mixes_is_no_evidence() -> None:
    found = Transports(steps=[steps(window=None, window_independent=None, rho_first=None)])
    assert of_transports(found) == []


@pytest.mark.parametrize(("left", "holds"), [(0.1, True), (0.5, False)])
def test_gates(left: float, holds: bool) -> None:
    slope = math.log(10) / 16
    lags = [
        {"kind": "gate", "layer": 0, "head": 0, "lag": lag, "left": left if lag == 16 else 9.0,
         "independent": math.exp(-slope * lag)}
        for lag in (1, 4, 16, 64)
    ]  # fmt: skip
    gate = {"layer": 0, "head": 0, "constant": False, "slope": slope}
    told = verdicts(of_transports(Transports(gates=[gate], lags=lags)))
    assert told["gates_independent"] == (pytest.approx(10 * left), holds)
    assert not of_transports(Transports(gates=[gate | {"constant": True}], lags=lags))


def keys(count: float, lse: float, lse2: float, rows: int) -> Keys:
    return Keys(*(np.full(rows, x) for x in (count, lse, lse2, 0.0)))


@pytest.mark.parametrize("slope", [0.0, 0.01])
def test_logits_that_move_with_the_context(slope: float) -> None:
    """ℓ is compared with the bias's own sum taken off, so that a bias alone changes nothing."""
    rows = 100

    def lse(count: int, ell: float) -> float:
        return ell + math.log(sum(math.exp(-slope * n) for n in range(count)))

    sample = HeadSample(
        np.full(rows, 96.0), keys(32, 5.0, 9.0, rows),
        keys(64, lse(64, 0.3), 2 * lse(64, 0.3) - math.log(40.0), rows),
        np.ones(rows), np.ones(rows),
    )  # fmt: skip
    measured = {
        "layer": 0, "head": 0, "near_window": 32, "low": 1000, "high": 1001, "far_keys": 968.0,
        "lse_far": lse(968, 0.8), "lse_near": 5.1, "ell_sd": 0.2, "lse_near_sd": 0.2,
        "queries": 50,
    }  # fmt: skip
    controls = {(0, 0): Control(slope)}
    told = verdicts(of_logits({(0, 0): sample}, [measured], 32, 128, controls))
    assert told["ell_stationary"] == (pytest.approx(0.5), False)
    assert told["near_stationary"] == (pytest.approx(0.1), True)
    assert told["far_keys_many"] == (pytest.approx(40.0), True)
    short = measured | {"low": 100, "high": 101}
    assert set(verdicts(of_logits({(0, 0): sample}, [short], 32, 128, controls))) == {
        "far_keys_many"
    }
