"""The checks themselves: what passes, what fails, and that a seed and a name repeat one."""

from __future__ import annotations

import numpy as np
import pytest

from farfield import theory
from farfield.theory import verify as verification
from farfield.theory.verify import CHECKS, outcome, verify

QUICK = ["steps.near", "steps.law_not_mean", "scores.sphere", "scores.planes", "values.powers"]


@pytest.mark.parametrize("name", QUICK)
def test_statements_hold_by_simulation(name: str) -> None:
    found = list(verify(3, only=name))
    assert found
    assert [each for each in found if not each.passed] == []


def test_every_statement_has_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification.steps, "SAMPLES", 4000)
    parts = {name.partition(".")[0] for name in CHECKS}
    assert parts == {"steps", "estimates", "scores", "mass", "values", "prediction"}
    told = {each.statement for each in verify(0, only="steps")}
    assert told == {"T1", "T1b", "T1c", "T1d"}


def test_one_check_alone_sees_the_numbers_it_sees_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verification.steps, "SAMPLES", 4000)
    alone = list(verify(5, only="steps.near"))
    among = [each for each in verify(5, only="steps") if each.statement == "T1b"]
    assert alone == among
    assert alone != list(verify(6, only="steps.near"))


def test_a_wrong_formula_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    true = theory.haar_tail
    monkeypatch.setattr(theory, "haar_tail", lambda t, d, *rest: true(t, d + 3, *rest))
    failed = [each for each in verify(0, only="scores.sphere") if not each.passed]
    assert {each.kind for each in failed} == {"identity"}


def test_identities_are_z_tests_at_4() -> None:
    def passed(measured: float, error: float, rounding: float = 0.0) -> bool:
        return outcome.identity("T1", "", 1.0, measured, error, rounding).passed

    assert passed(1.039, 0.01)
    assert not passed(0.959, 0.01)
    assert passed(1.0005, 0.0, 1e-3)
    assert not passed(1.002, 0.0, 1e-3)


def test_bounds_have_one_side() -> None:
    assert outcome.below("T2", "", 0.5, 0.1).passed
    assert outcome.below("T2", "", 0.5, 0.53, 0.01).passed
    assert not outcome.below("T2", "", 0.5, 0.55, 0.01).passed
    assert outcome.above("T4", "", 0.5, 0.9).passed
    assert not outcome.above("T4", "", 0.5, 0.45, 0.01).passed


def test_approximations_must_come_closer() -> None:
    def passed(measured: list[float], error: float = 0.0) -> bool:
        return outcome.shrinking("T6", "", (1, 10), [1.0, 1.0], measured, [0.0, error]).passed

    assert passed([1.3, 1.01])
    assert not passed([1.01, 1.01]), "no closer"
    assert not passed([2.0, 1.2]), "closer, not close"
    assert passed([1.01, 1.01], error=0.01), "lost in noise"


def test_a_number_that_is_none_does_not_pass() -> None:
    assert not outcome.identity("T1", "", 1.0, np.nan, 0.1).passed
    assert not outcome.below("T1", "", 1.0, np.nan, 0.1).passed
    assert not outcome.above("T1", "", np.nan, 1.0, 0.1).passed
    assert not outcome.shrinking("T1", "", (1, 2), [1, 1], [2.0, np.nan], [0, 0]).passed


def test_unknown_names_and_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of steps"):
        next(verify(0, only="stepps"))
    with pytest.raises(ValueError, match="seed"):
        verification.generator(-1, "steps.means")
