"""What there is to measure, what of it fits into the time, and how the time is shared out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farfield.benchmark.pairing import FEWEST, Report
from farfield.benchmark.rows import LeftOut, Row
from farfield.benchmark.targets import target

if TYPE_CHECKING:
    from farfield import FarfieldForCausalLM
    from farfield.data import Corpus
    from farfield.training import TrainingSettings

CALLS = FEWEST + 1
"""Calls of a case at least: the warm-up and the rounds."""

_PROBE = (4, 2048, 64)
_SLACK = 1.3
"""What is measured costs more than its matrix products."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is. The defaults are those that targets are stated for.

    Units: lengths in tokens. `layer`, `pruned` and `memory` hold the lengths that are measured one
    by one; `growth` the two that are compared. `context` is what a decoded token sees and what is
    diagnosed with `queries`, `llama` the layers of the model beside Llama, `train` the (batch,
    length) of its iteration.
    """

    width: int = 256
    heads: int = 4
    layer: tuple[int, ...] = (2048, 8192)
    context: int = 16384
    decode_layers: int = 2
    reflection: int = 4096
    growth: tuple[int, int] = (4096, 65536)
    path: int = 2048
    pruned: tuple[int, ...] = (4096, 16384, 65536)
    llama: int = 4
    train: tuple[int, int] = (4, 512)
    memory: tuple[int, ...] = (16384, 65536)
    memory_heads: int = 12
    queries: int = 512

    @property
    def head_dim(self) -> int:
        """d, the dimension of a head."""
        return self.width // self.heads

    def words(self, batch: int = 1) -> str:
        """The shape of a layer, in words."""
        return f"width {self.width}, {self.heads} heads, batch {batch}"


QUICK = Sizes(
    layer=(512,),
    context=2048,
    reflection=1024,
    growth=(512, 4096),
    path=512,
    pruned=(1024, 4096),
    llama=2,
    train=(2, 128),
    memory=(4096, 8192),
    queries=64,
)
"""Everything runs, in a fraction of the time; nothing is held to a target."""


@dataclass(frozen=True)
class Workload:
    """What sections that train need of a recipe: mechanisms, settings, a text, and its models."""

    recipe: str
    mechanisms: tuple[str, ...]
    settings: TrainingSettings
    corpus: Corpus
    build: Callable[[str], FarfieldForCausalLM]


@dataclass(frozen=True)
class Setting:
    """What every section is given. `models` are folders of trained models; `say` takes a line
    about something that takes long."""

    sizes: Sizes = Sizes()
    seed: int = 0
    threads: int = 1
    workload: Workload | None = None
    models: tuple[Path, ...] = ()
    say: Callable[[str], None] = lambda line: None

    @property
    def needed_workload(self) -> Workload:
        """The workload. Raises: ValueError where none was given."""
        if self.workload is None:
            raise ValueError("this section trains, and has no recipe; expected a workload")
        return self.workload


@dataclass(frozen=True)
class Job:
    """A piece of a section: what it compares, how much work that is at least, and how to do it.

    Units: `operations` are floating-point operations of matrix products, `seconds` what comes on
    top. `run` is given seconds to use and whom to tell which share of them is used. `after` names
    the job of the section that does, and is counted with, what this one relies on.
    """

    section: str
    name: str
    operations: float
    run: Callable[[float, Report], list[Row]]
    seconds: float = 0.5
    after: str = ""


@dataclass(frozen=True)
class Plan:
    """Jobs with the seconds each may use, and what doesn't fit."""

    jobs: tuple[Job, ...]
    allowances: tuple[float, ...]
    left_out: tuple[LeftOut, ...]


Watch = Callable[[Job, float, float], None]
"""Told which job is being done, and how much of the plan is over: (job, seconds, of seconds)."""


def attention(tokens: int, heads: int, dim: int, backward: bool = False) -> float:
    """Operations of causal attention's two products, T² · heads · d each; the backward has five."""
    return 2.0 * tokens**2 * heads * dim * (3.5 if backward else 1.0)


def projections(tokens: int, width: int, backward: bool = False) -> float:
    """Operations of an attention layer's four projections."""
    return 8.0 * tokens * width**2 * (3.0 if backward else 1.0)


def speed() -> float:
    """Operations per second that plain attention reaches here and now."""
    import torch
    import torch.nn.functional as F

    heads, tokens, dim = _PROBE
    x = torch.randn(1, heads, tokens, dim, generator=torch.Generator().manual_seed(0))
    taken = []
    with torch.no_grad():
        for _ in range(4):
            start = time.perf_counter()
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
            taken.append(time.perf_counter() - start)
    return attention(tokens, heads, dim) / sorted(taken[1:])[1]


def plan(found: Sequence[Job | LeftOut], budget: float, operations_per_second: float) -> Plan:
    """The quickest jobs that fit into `budget` seconds together, the sections' jobs interleaved: a
    machine that turns out slower than planned then leaves out something of each, and none whole.

    The quickest one is done whatever it takes. What time is left goes to all of them, more of it
    to the slower ones, by the square root of what they need.
    """
    jobs = [one for one in found if isinstance(one, Job)]
    need = [_SLACK * job.operations / operations_per_second + job.seconds for job in jobs]
    chosen: set[int] = set()
    spent = 0.0
    for index in _by_need(jobs, need):
        if chosen and spent + need[index] > budget:
            break
        chosen.add(index)
        spent += need[index]
    out = [one for one in found if isinstance(one, LeftOut)]
    everything = math.ceil(1.1 * sum(need) / 60)
    for index, job in enumerate(jobs):
        if index not in chosen:
            reason = f"needs {_time(need[index])} here (everything: --budget {everything})"
            out.append(LeftOut(job.section, job.name, reason))
    kept = _interleaved(sorted(chosen), [job.section for job in jobs])
    spare = max(0.0, budget - spent)
    roots = [math.sqrt(need[index]) for index in kept]
    shares = [need[i] + spare * root / sum(roots) for i, root in zip(kept, roots, strict=True)]
    return Plan(tuple(jobs[index] for index in kept), tuple(shares), tuple(out))


def _by_need(jobs: Sequence[Job], need: Sequence[float]) -> list[int]:
    """Indices of the jobs, the quickest first, but none before the one it comes after."""
    index_of = {(job.section, job.name): index for index, job in enumerate(jobs)}

    def longest(index: int) -> float:
        before = index_of.get((jobs[index].section, jobs[index].after))
        return need[index] if before is None else max(need[index], longest(before))

    return sorted(range(len(jobs)), key=lambda index: (longest(index), index))


def _interleaved(indices: list[int], sections: list[str]) -> list[int]:
    """Indices so that after any share of them about that share of each section's has come."""
    of = {
        index: [other for other in indices if sections[other] == sections[index]]
        for index in indices
    }
    return sorted(indices, key=lambda index: (of[index].index(index) + 0.5) / len(of[index]))


def carry_out(made: Plan, watch: Watch) -> tuple[list[Row], list[LeftOut]]:
    """Run a plan's jobs one after the other; what one leaves of its time goes to the next.

    Every row is judged by the target that stands for it, if any. A machine that turns out slower
    than planned runs out of time: what has not begun by then is left out.
    """
    rows: list[Row] = []
    late: list[LeftOut] = []
    total, begun = sum(made.allowances), time.perf_counter()
    done = 0.0
    for job, allowance in zip(made.jobs, made.allowances, strict=True):
        start = time.perf_counter()
        if rows and start - begun > total:
            late.append(LeftOut(job.section, job.name, "what came before took all of the budget"))
            continue
        watch(job, done, total)

        def report(share: float, job: Job = job, base: float = done, of: float = allowance) -> None:
            watch(job, base + share * of, total)

        spare = done - (start - begun)
        rows += [_judged(row) for row in job.run(max(allowance, allowance + spare), report)]
        done += allowance
    return rows, late


def _judged(row: Row) -> Row:
    return row.judged(target(row.section, row.case, row.measure, row.tokens, row.baseline))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min"


def shared(report: Report, start: float, stop: float) -> Report:
    """A report of one part of a job, that goes from `start` to `stop` of the whole."""

    def part(share: float) -> None:
        report(start + share * (stop - start))

    return part


def where(setting: Setting, section: str, **more: Any) -> dict[str, Any]:
    """The fields that the rows of a section have in common."""
    return {"section": section, "seed": setting.seed, **more}
