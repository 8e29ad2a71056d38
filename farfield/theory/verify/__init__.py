"""Every statement checked by simulation, each by its kind; repeatable from named generators.

`verify(seed)` runs all checks; each draws from a generator named by the seed and its own name, so
that one of them, run alone, sees the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np

from farfield.theory import checks
from farfield.theory.verify import estimates, mass, prediction, scores, steps, values
from farfield.theory.verify.outcome import Outcome

__all__ = ["CHECKS", "Outcome", "verify"]

Check = Callable[[np.random.Generator], Iterator[Outcome]]
CHECKS: dict[str, Check] = {
    f"{module.__name__.rpartition('.')[2]}.{check.__name__}": check
    for module in (steps, estimates, scores, mass, values, prediction)
    for check in module.CHECKS
}
"""The checks by name, in order: the names name their generators, with the seed."""


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator of one check: PCG64 seeded with (seed, CRC-32 of the name).

    Raises: ValueError for a seed below 0.
    """
    return np.random.default_rng([int(checks.counts("seed", seed)), zlib.crc32(name.encode())])


def verify(seed: int = 0, only: str | None = None) -> Iterator[Outcome]:
    """Every outcome of every check, as they come; `only` names one check, or a part such as mass.

    Raises: ValueError for a seed below 0, or a name that no check has.
    """
    chosen = [name for name in CHECKS if only is None or only in (name, name.partition(".")[0])]
    if not chosen:
        raise ValueError(f"only is {only!r}; expected one of {', '.join(CHECKS)}")
    for name in chosen:
        yield from CHECKS[name](generator(seed, name))
