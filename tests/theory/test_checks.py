"""Bad input is refused by name, everywhere, with what was got and what was expected."""

import numpy as np
import pytest

from farfield import theory
from farfield.theory import checks

NAN = float("nan")
MIX = [[0.1, 0.9], [0.9, 0.1]]

REFUSED = [
    ("rho", lambda: theory.mixing_window(1.1)),
    ("rho", lambda: theory.mixing_window(-0.1)),
    ("rho", lambda: theory.mixing_window(NAN)),
    ("rho", lambda: theory.mixing_window([])),
    ("rho", lambda: theory.mixing_window("fast")),
    ("rho", lambda: theory.mixing_window(0.5j)),
    ("epsilon", lambda: theory.mixing_window(0.5, 0.0)),
    ("epsilon", lambda: theory.head_window([1.0], [0.5], 1.0)),
    ("energies", lambda: theory.head_window([0.0, 0.0], [0.5, 0.5])),
    ("energies has 2, rho has 3", lambda: theory.head_window([1, 1], [0.5, 0.5, 0.5])),
    ("steps", lambda: theory.mean_score_bound(1, 0.5, -1)),
    ("steps", lambda: theory.mean_score_bound(1, 0.5, 1.5)),
    ("order", lambda: theory.normal_harmonic(0.5, 1.0)),
    ("sigma", lambda: theory.normal_harmonic(1, -1.0)),
    ("theta", lambda: theory.empirical_harmonic([])),
    ("mean_step", lambda: theory.step_norms(np.ones((2, 3)))),
    ("c", lambda: theory.uniform_form(1.5, 4)),
    ("far_keys", lambda: theory.uniform_form(0.5, 0)),
    ("slope", lambda: theory.alibi_bounds(1, -0.1, 4)),
    ("near_window", lambda: theory.alibi_bounds(1, 0.1, 0)),
    ("mean_gate", lambda: theory.gate_upper(1, 1.2, 4)),
    ("mean_log_decay", lambda: theory.gate_upper_sure(1, 3.0, 1.0, 4, 0.1)),
    ("far_share", lambda: theory.typical_break_length(1, 1, 1.0)),
    ("far_keys", lambda: theory.typical_far_mass(-1, 0, 0)),
    ("lse_far", lambda: theory.far_mass(-np.inf, -np.inf)),
    ("near_keys", lambda: theory.far_mass_lower(4, 0, 1)),
    ("far_logits", lambda: theory.far_mass_lower_rows([], [1.0])),
    ("e2", lambda: theory.break_length_interval(1, 1, 0.5, 0.1)),
    ("delta", lambda: theory.haar_threshold(4, 2.0, 8, 1)),
    ("head_dim", lambda: theory.haar_tail(0.1, 1)),
    ("bound", lambda: theory.haar_tail(0.1, 8, "tight")),  # type: ignore[arg-type]
    ("bound", lambda: theory.block_tail(0.1, [1.0], "levy")),  # type: ignore[arg-type]
    ("transition", lambda: theory.markov_rate([[0.5, 0.4], [0.5, 0.5]], [1, -1])),
    ("transition", lambda: theory.markov_mean(np.eye(2), [1, -1], 3)),
    ("initial", lambda: theory.markov_mean(MIX, [1, -1], 3, initial=[0.5, 0.6])),
    ("tokens", lambda: theory.null_quantile(0)),
    ("theta", lambda: theory.estimate_rho([1.0])),
    ("lags", lambda: theory.lag_curve(np.zeros((8, 1)), [8])),
    ("weights", lambda: theory.value_power([-1.0, 1.0], [1.0], [0.5])),
    ("mean_power", lambda: theory.value_power([1.0], [[1.0]], [[0.5]])),
    ("moments", lambda: theory.coupled_power(8, [0.5], [[0.5]])),
    ("moments", lambda: theory.log_shared_key_kernel(1, [0.5], [[0.5]])),
    ("lengths", lambda: theory.predict(4, 8, 1, 0, 0, [1], [0.5], 0, 1, True)),
    ("ell2", lambda: theory.predict(8, 4, 1, 1, 1, [1], [0.5], 0, 1, True)),
    ("samples", lambda: theory.sign_flips(3, 1, np.random.default_rng(0))),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=range(len(REFUSED)))
def test_the_argument_is_named(name, call):
    with pytest.raises(ValueError, match=name) as caught:
        call()
    assert "expected" in str(caught.value)


def test_a_message_says_what_was_got():
    with pytest.raises(ValueError, match=r"rho is 1\.5; expected numbers in \[0, 1\]"):
        checks.rates("rho", np.array(1.5))


def test_numbers_give_numbers_and_arrays_arrays():
    assert isinstance(theory.mixing_window(0.5), float)
    assert isinstance(theory.far_mass(1, 2), float)
    assert theory.mixing_window([[0.5], [0.9]], [0.1, 0.2]).shape == (2, 2)


def test_what_is_exported_exists_and_is_documented():
    for name in theory.__all__:
        thing = getattr(theory, name)
        if callable(thing):
            text = " ".join((thing.__doc__ or "").split())
            assert text, name
            if not isinstance(thing, type) and thing.__module__.split(".")[-1] in MINE:
                assert "Source:" in text, name
                assert "Shapes:" in text, name
                assert "Raises:" in text, name


MINE = {
    "concentration", "controls", "counterexamples", "dependence", "estimation", "mass",
    "predictor", "series", "steps", "values",
}  # fmt: skip
