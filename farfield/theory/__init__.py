"""Why accumulated maps extrapolate, and where they stop: every statement as a function.

NumPy arrays in, numbers or arrays out, no torch and no model. The statements and their proofs are
in docs/theory.md under the labels (T1 … T6) that each docstring names.
"""

from farfield.theory.series import (
    geometric_sum,
    lag_sum,
    log_geometric_sum,
    log_hyp0f1,
)
from farfield.theory.steps import (
    DEFAULT_EPSILON,
    bernoulli_harmonic,
    empirical_harmonic,
    head_window,
    householder_rate,
    mean_score_bound,
    mixing_window,
    near_change_bound,
    near_displacement,
    normal_harmonic,
    preservation_window,
    rope_mean_cosine,
    score_moments,
    step_norms,
    total_variation_bounds,
    two_point_harmonic,
    uniform_harmonic,
    unsettled_factor,
    von_mises_harmonic,
)

__all__ = [
    "DEFAULT_EPSILON",
    "bernoulli_harmonic",
    "empirical_harmonic",
    "geometric_sum",
    "head_window",
    "householder_rate",
    "lag_sum",
    "log_geometric_sum",
    "log_hyp0f1",
    "mean_score_bound",
    "mixing_window",
    "near_change_bound",
    "near_displacement",
    "normal_harmonic",
    "preservation_window",
    "rope_mean_cosine",
    "score_moments",
    "step_norms",
    "total_variation_bounds",
    "two_point_harmonic",
    "uniform_harmonic",
    "unsettled_factor",
    "von_mises_harmonic",
]
