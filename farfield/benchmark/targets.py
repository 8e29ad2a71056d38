"""What the benchmark's figures should be: one table, beside the cases that are held to it.

The figures are for two cores of a CPU in float32, at the lengths that stand here; a row measured at
another length is held to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

ROTATIONS = ("random", "random_iid", "learned")
"""Accumulated rotations that move queries and keys."""

CARRIED = ("rope+v", "random+v", "learned+v")
"""Rotations that move values as well."""

CONTRACTIONS = ("path",)
"""What can't be absorbed into keys."""


@dataclass(frozen=True)
class Target:
    """The most that a ratio may be: of these cases (empty: of all but `but`) in one section's
    measure, over one baseline, at one length in tokens."""

    section: str
    measure: str
    tokens: int
    baseline: str
    most: float
    cases: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


LAYER = "forward + backward"

TARGETS = (
    Target("layer", LAYER, 2048, "rope", 1.10, ROTATIONS),
    Target("layer", LAYER, 2048, "rope", 1.20, CARRIED),
    Target("layer", LAYER, 8192, "rope", 1.05, ROTATIONS),
    Target("layer", LAYER, 8192, "rope", 1.08, CARRIED),
    Target("decode", "one token", 16384, "rope", 1.05, but=CONTRACTIONS),
    Target("scaling", LAYER, 4096, "rope", 1.5, ("reflection",)),
    Target("scaling", "forward", 4096, "rope", 1.5, ("reflection",)),
    Target("scaling", "growth from 4,096", 65536, "rope", 1.0, ("reflection",)),
    Target("scaling", LAYER, 2048, "fla's naive PaTH", 0.5, ("path",)),
    Target("pruned", "forward", 65536, "full", 0.25, ("alibi",)),
    Target("pruned", "largest output error", 65536, "", 1e-5, ("alibi",)),
    Target("pruned", "growth from 16,384", 65536, "", 6.0, ("alibi",)),
    Target("peers", "training iteration", 512, "Llama", 1.03, ("rope",)),
    Target("peers", "forward", 16384, "Llama", 1.03, ("rope",)),
    Target("peers", "one token", 16384, "Llama", 1.03, ("rope",)),
    Target("diagnosis", "diagnosis", 16384, "evaluation", 3.0),
    Target("memory", "peak memory", 65536, "sdpa", 1.5, but=("sdpa",)),
    Target("memory", "growth from 16,384", 65536, "", 4.4, but=("sdpa",)),
    Target("memory", "growth from 4,096", 16384, "", 4.4, ("path, backward",)),
)
"""What is linear in length grows fourfold over these lengths; a tenth is allowed on top."""


def target(section: str, case: str, measure: str, tokens: int, baseline: str) -> Target | None:
    """The target of a row, or None where nothing is asked of it."""
    for one in TARGETS:
        where = (one.section, one.measure, one.tokens, one.baseline)
        held = case in one.cases if one.cases else case not in one.but
        if held and where == (section, measure, tokens, baseline):
            return one
    return None
