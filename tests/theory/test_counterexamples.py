"""Each counterexample, run: the belief is refuted and the true value is met."""

import numpy as np
import pytest

from farfield import theory

RUNS = {
    "sign flips": lambda g: theory.sign_flips(9, 2000, g),
    "even right angles": lambda g: theory.right_angle_turns(8, 2000, g),
    "odd right angles": lambda g: theory.right_angle_turns(7, 2000, g),
    "shared token": lambda g: theory.shared_token(10, 0.4, 200_000, g),
    "alternating chain": lambda g: theory.alternating_chain(20, 0.9, 1.0, 50_000, g),
    "undoing history": lambda g: theory.undoing_history(50, 0.5, 50_000, g),
    "telescoping steps": lambda g: theory.telescoping_steps(50, 0.5, 20_000, g),
    "pooled documents": lambda g: theory.pooled_documents(5, 0.1, 0.3, 20_000, g),
    "one angle": lambda g: theory.one_angle_head(0.4, 16, 50_000, g),
}
TRUE = {
    "even right angles": 1.0,
    "odd right angles": 0.0,
    "shared token": 0.4868,
    "alternating chain": 0.28437,
    "undoing history": 0.8825,
    "telescoping steps": 0.7788,
    "pooled documents": 0.975,
    "one angle": 0.738,
}


@pytest.mark.parametrize("name", RUNS)
def test_the_belief_is_refuted_and_the_truth_met(name):
    told = RUNS[name](np.random.default_rng(5))
    assert abs(told.measured - told.true) <= 4 * told.standard_error + 1e-12
    assert abs(told.measured - told.believed) > 8 * told.standard_error
    assert told.true == pytest.approx(TRUE.get(name, 1.0), abs=5e-4)
    assert told.belief


def test_the_same_generator_gives_the_same_numbers():
    runs = [theory.shared_token(4, 0.5, 100, np.random.default_rng(1)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert theory.alternating_chain(1, 0.5, 1.0, 50, np.random.default_rng(0)).true == (
        pytest.approx(np.cos(1))
    )
