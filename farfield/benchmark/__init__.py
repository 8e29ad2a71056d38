"""What accumulated transports cost, measured in pairs in one run on one machine.

    results = run(Setting(threads=2), ["layer", "decode"], budget=300.0)

One file for each section; `pairing` measures, `plan` shares out the time, `targets` is what the
figures are held to, `rows` is what comes of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from farfield.benchmark import (
    decode,
    diagnosis,
    iteration,
    layer,
    memory,
    peers,
    plan,
    pruned,
    rows,
    scaling,
)
from farfield.benchmark.plan import QUICK, Job, Setting, Sizes, Watch, Workload
from farfield.benchmark.rows import LeftOut, Results, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

SECTIONS: dict[str, Callable[[Setting], Sequence[Job | LeftOut]]] = {
    module.SECTION: module.jobs
    for module in (layer, iteration, decode, scaling, pruned, peers, memory, diagnosis)
}
"""What can be measured: the name of each section, and what it consists of."""

TRAINING = (iteration.SECTION, pruned.SECTION, diagnosis.SECTION)
"""The sections that need a workload."""


def run(
    setting: Setting, sections: Sequence[str], budget: float, watch: Watch | None = None
) -> Results:
    """Measure what of these sections fits into the budget.

    Units: `budget` in seconds; the quickest piece is measured whatever it takes.
    Raises: ValueError for a section that doesn't exist, a budget or number of threads that isn't
    positive, a trained model that won't do, and what a piece refuses.
    """
    check(sections)
    if not budget > 0:
        raise ValueError(f"budget is {budget:g} s; expected a positive number")
    if setting.threads < 1:
        raise ValueError(f"threads is {setting.threads}; expected at least 1")
    with _threads(setting.threads):
        quick = setting.sizes == QUICK
        machine = rows.machine(setting.threads, sections, budget, quick)
        found = [piece for name in sections for piece in SECTIONS[name](setting)]
        made = plan.plan(found, budget, plan.speed())
        measured, late = plan.carry_out(made, watch or (lambda job, done, total: None))
    return Results(machine, tuple(measured), (*made.left_out, *late))


def check(sections: Sequence[str]) -> None:
    """Raises: ValueError for a section that doesn't exist, naming the nearest, or for none."""
    if not sections:
        raise ValueError(f"no section to measure; expected some of {', '.join(SECTIONS)}")
    for name in sections:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"no section {name!r} to measure{hint} (sections: {', '.join(SECTIONS)})"
            )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = [
    "QUICK",
    "SECTIONS",
    "TRAINING",
    "Job",
    "LeftOut",
    "Results",
    "Row",
    "Setting",
    "Sizes",
    "Workload",
    "check",
    "run",
]
