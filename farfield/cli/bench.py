"""`farfield bench`: what accumulated transports cost on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from farfield.cli.console import Settings, err, mistakes, out, tell

if TYPE_CHECKING:
    from farfield.benchmark import Job, Results, Row, Workload

commands = typer.Typer()

_QUICK_BUDGET, _BUDGET = 1.0, 5.0
"""Minutes."""


@commands.command(
    epilog="Examples:  farfield bench  ·  farfield bench --only decode --budget 20  ·  "
    "farfield bench smoke --quick --json bench.json"
)
def bench(
    recipe: Annotated[
        str,
        typer.Argument(
            help="The recipe (name or .toml file) that `model`, `pruned` and `diagnosis` use."
        ),
    ] = "laptop",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="SECTION",
            help="layer, model, decode, scaling, pruned, peers, memory or diagnosis; may be given "
            "several times. [default: all]",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, which nothing is held to.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            help="What doesn't fit into it is left out, and said so. [default: 5; with --quick 1]",
            show_default=False,
        ),
    ] = None,
    models: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="A trained model with alibi or forget, for `pruned`; may be given several times. "
            "[default: trained on the spot]",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of the one process. [default: the cores]", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Names the weights and the inputs.")] = 0,
    file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the rows; as bench.json in a study's folder they are on its page.",
        ),
    ] = None,
) -> None:
    """Measure speed and memory in pairs, on this machine, beside what they should be."""
    with mistakes():
        import os

        from farfield import benchmark

        sections = list(dict.fromkeys(only or benchmark.SECTIONS))
        benchmark.check(sections)
        _check_destination(file)
        minutes = budget if budget is not None else _QUICK_BUDGET if quick else _BUDGET
        trains = any(name in benchmark.TRAINING for name in sections)
        with _Watch() as watch:
            results = benchmark.run(
                benchmark.Setting(
                    sizes=benchmark.QUICK if quick else benchmark.Sizes(),
                    seed=seed,
                    threads=(os.cpu_count() or 1) if threads is None else threads,
                    workload=_workload(recipe, settings or (), seed) if trains else None,
                    models=tuple(models or ()),
                    say=tell,
                ),
                sections,
                60.0 * minutes,
                watch,
            )
        if file is not None:
            results.write(file)
    _show(results)


def _check_destination(file: Path | None) -> None:
    """What can't be written is better known before minutes of measuring. Raises: OSError."""
    if file is not None and not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {file}: no folder {file.absolute().parent}")
    if file is not None and file.is_dir():
        raise IsADirectoryError(f"--json {file}: this is a folder; expected a file")


def _workload(recipe: str, settings: Any, seed: int) -> Workload:
    from farfield.benchmark import Workload
    from farfield.data import load_corpus
    from farfield.study import job
    from farfield.study import recipe as recipes

    job.quiet_libraries()
    resolved = recipes.load(recipe, settings).canonical()
    data = resolved.data
    corpus = load_corpus(data.source, data.tokenizer, max_tokens=data.max_tokens)
    return Workload(
        resolved.name,
        resolved.mechanisms,
        resolved.training,
        corpus,
        lambda mechanism: job.build(resolved, corpus, mechanism, seed),
    )


class _Watch:
    """How far the benchmark is: a bar on a terminal, a line for every piece elsewhere."""

    def __init__(self) -> None:
        from farfield.study.display import Work

        self._work = Work(err, "bench")
        self._job: Job | None = None
        self._started = time.monotonic()

    def __enter__(self) -> _Watch:
        self._work.__enter__()
        return self

    def __exit__(self, *given: object) -> None:
        self._work.__exit__(*given)

    def __call__(self, job: Job, done: float, total: float) -> None:
        from farfield.study.display import time_left

        named = f"{job.section}: {job.name}"
        if job is not self._job and not err.is_terminal:
            passed = time.monotonic() - self._started
            left = passed * (total - done) / done if done > 0 else total
            tell(f"{named}; {time_left(left)}")
        self._job, self._work.name = job, named
        self._work(done, total)


def _show(results: Results) -> None:
    for section in dict.fromkeys(row.section for row in results.rows):
        rows = [row for row in results.rows if row.section == section]
        shown = Table(
            *("case", "over", "measure", "tokens", "ratio", "interval", "median", "target", ""),
            title=section,
            title_justify="left",
            box=None,
        )
        for row in rows:
            shown.add_row(*_cells(row))
        out.print(shown)
        for row in rows:
            if row.note:
                out.print(f"{row.case}, {row.tokens:,} tokens, {row.measure}: {row.note}")
        out.print()
    for one in results.left_out:
        out.print(f"left out: {one.section}, {one.case}: {one.reason}", highlight=False)
    told = results.machine
    load = "unknown" if told["load"] is None else told["load"]
    out.print(
        f"{told['processor']}, {told['threads']} of {told['cores']} cores, load {load}, torch "
        f"{told['torch']}, {told['date']}",
        highlight=False,
    )


def _cells(row: Row) -> list[str]:
    bounds = "" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
    return [
        row.case,
        row.baseline,
        row.measure,
        f"{row.tokens:,}",
        "not finite"
        if row.ratio is None
        else f"{row.ratio:.3g}"
        if row.ratio < 0.1
        else f"{row.ratio:.3f}",
        bounds,
        _amount(row),
        "" if row.target is None else f"≤ {row.target:g}",
        row.verdict,
    ]


def _amount(row: Row) -> str:
    if row.median is None:
        return ""
    if row.unit == "B":
        return f"{row.median / 2**20:,.0f} MiB"
    return f"{row.median:.3f} s" if row.median >= 1 else f"{1000 * row.median:.2f} ms"
