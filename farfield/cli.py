"""The `farfield` command: every command is one function call into the package.

A caller's mistake ends with one line and status 2; anything else that fails ends with status 1.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="farfield",
    help="Train, measure and compare attention by accumulated transformation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True, emoji=False)

Settings = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this at run time on Python 3.10 as well)
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a recipe's key, such as training.iterations=100; may be given several times.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main() -> None:
    """Entry point of the `farfield` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek shows ? and goes on
    app()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    modules: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module that registers mechanisms of your own, here and in every job.",
        ),
    ] = None,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"farfield {installed('farfield')}")
        raise typer.Exit
    if modules:
        with _mistakes():
            from farfield.study.modules import import_modules

            import_modules(modules)


@app.command(
    epilog="Examples:  farfield study smoke  ·  farfield study laptop --seeds 0,1,2 "
    "--set training.iterations=600  ·  farfield study laptop --resume"
)
def study(
    recipe: Annotated[
        str,
        typer.Argument(help="A packaged recipe's name (see `farfield recipes`) or a .toml file."),
    ] = "laptop",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The study's folder. [default: studies/RECIPE]", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="0,1,2", help="Seeds to train every mechanism from, instead of the recipe's."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs at a time, each on one thread. [default: one per core, or per GPU]",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue unfinished runs from their last checkpoint.")
    ] = False,
) -> None:
    """Train several mechanisms alike, measure how far each holds, and write one page.

    Runs that are finished are not repeated. More mechanisms or seeds enlarge a study.
    """
    with _mistakes():
        from farfield.study import recipe as recipes
        from farfield.study.display import for_console
        from farfield.study.launch import command_to_resume
        from farfield.study.launch import study as run_study

        resolved = recipes.load(recipe, settings or (), _numbers(seeds, "--seeds"))
        where = folder or Path("studies") / resolved.name
        with for_console(err) as display:
            outcome = run_study(resolved, where, jobs=jobs, resume=resume, display=display)
    for run in outcome.failed:
        _tell(f"failed: {run.name}: {run.record['error']}")
    _tell(*outcome.problems)
    if outcome.interrupted:
        _tell(f"interrupted; continue with: {command_to_resume(where)}")
    if outcome.report is not None:
        print(outcome.report)
    raise typer.Exit(outcome.exit_status)


@app.command(epilog="Example:  farfield train learned+v+alibi --recipe smoke --out my-run")
def train(
    mechanism: Annotated[str, typer.Argument(help="A composed name; see `farfield mechanisms`.")],
    recipe: Annotated[str, typer.Option(help="The recipe whose settings to use.")] = "laptop",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The run's folder. [default: runs/MECHANISM-sSEED]", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="Names the weights, angles and order of data.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")
    ] = False,
) -> None:
    """Train one mechanism by a recipe's settings, and evaluate its length ladder."""
    with _mistakes():
        from farfield.evaluation.plan import left_out_lines
        from farfield.study import recipe as recipes
        from farfield.study.display import Training
        from farfield.study.single import run_to_resume, train_one

        changes = [*(settings or ()), *(["training.tensorboard=true"] if tensorboard else [])]
        resolved = recipes.load(recipe, changes)
        with Training(err) as watch:
            run = train_one(resolved, mechanism, seed, folder, resume=resume, watch=watch)
    record = run.record
    if record["status"] == "interrupted":
        _tell(f"interrupted; continue with: {run_to_resume(run)}")
        raise typer.Exit(130)
    if record["status"] == "failed":
        _tell(f"failed: {record['error']}")
        raise typer.Exit(1)
    _tell(*left_out_lines(record["left_out"] or []))
    print(run.folder)


@app.command(
    epilog="Example:  farfield ladder studies/laptop/runs/rope-s0/model --data kjv "
    "--lengths 128,256 --out ladder.jsonl"
)
def ladder(
    model: Annotated[Path, typer.Argument(help="A folder of any Hugging Face causal model.")],
    file: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Result rows; the losses by position go to FILE.positions.jsonl beside it.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="kjv; a file, folder or glob of .txt, .jsonl or "
            ".parquet; or hub:NAME[:CONFIG[:SPLIT]]."
        ),
    ] = "kjv",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="128,256",
            help="Lengths in tokens. [default: 1 to 128 times the training length]",
            show_default=False,
        ),
    ] = None,
    train_length: Annotated[
        int | None,
        typer.Option(help="Training length, where the model doesn't say it."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to score at every length. [default: the whole split]", show_default=False
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(help="Target blocks of the protocol `fixed`.")] = 32,
    protocols: Annotated[str, typer.Option(help="Any of these.")] = "windows,fixed,clipped",
    split: Annotated[str, typer.Option(help="train, validation, test or all.")] = "test",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, … [default: as saved]", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure a model's perplexity at many lengths, on the same tokens."""
    with _mistakes():
        from farfield.evaluation import pretrained
        from farfield.evaluation.plan import LadderSettings, left_out_lines
        from farfield.evaluation.rows import non_finite_lines
        from farfield.study.display import Work
        from farfield.study.job import quiet_libraries

        quiet_libraries()
        chosen = _numbers(lengths, "--lengths")
        settings = LadderSettings(
            lengths=tuple(chosen) if chosen else None,
            tokens=tokens,
            blocks=blocks,
            protocols=tuple(protocols.split(",")),
        )
        with Work(err, "ladder") as progress:
            result = pretrained.run(
                model, data, out=file, settings=settings, train_length=train_length,
                split=split, dtype=dtype, device=device, progress=progress,
            )  # fmt: skip
    _tell(*left_out_lines(result.left_out), *non_finite_lines(result.rows))
    keys = ("protocol", "length", "tokens", "ppl", "ratio", "ratio_low", "ratio_high")
    rows = [{key: row[key] for key in keys} for row in result.rows]
    if as_json:
        _print_json({"out": str(file), "rows": rows, "left_out": result.left_out})
        return
    shown = Table(*keys, box=None)
    for row in rows:
        shown.add_row(*(_spelled(row[key]) for key in keys))
    out.print(shown)


@app.command(
    epilog="Example:  farfield generate studies/laptop/runs/rope-s0/model "
    "--prompt 'In the beginning' --temperature 0.8"
)
def generate(
    model: Annotated[Path, typer.Argument(help="A folder of any Hugging Face causal model.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token (greedy); above, sample.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest; 0: all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Sample from the likeliest that make up this probability."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Names the draw.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, decoding with its cache."""
    with _mistakes():
        from farfield.evaluation.pretrained import continue_text
        from farfield.study.job import quiet_libraries

        quiet_libraries()
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        text = continue_text(model, prompt, tokens, seed, sampling if temperature else {})
    if as_json:
        _print_json({"prompt": prompt, "continuation": text})
    else:
        print(prompt + text)


@app.command(epilog="Example:  farfield report studies/laptop")
def report(
    folder: Annotated[Path, typer.Argument(help="A study's folder.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the ratio curves into this .png or .svg file instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a study's page anew from its files, or draw one picture of its curves.

    --json prints the verdicts as well, one sentence each.
    """
    with _mistakes():
        from farfield.evaluation.rows import read_rows
        from farfield.report import curves_picture, verdicts, write

        made = write(folder) if picture is None else curves_picture(folder, picture)
        rows = read_rows(folder / "results.jsonl") if as_json else []
    if as_json:
        keys = ("claim", "status", "title", "sentence")
        found = [{key: getattr(one, key) for key in keys} for one in verdicts(rows)]
        _print_json({"out": str(made), "verdicts": found})
    else:
        print(made)


@app.command(epilog="Example:  farfield bench laptop --rounds 20")
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a .toml file.")] = "laptop",
    settings: Settings = None,
    rounds: Annotated[int, typer.Option(help="Turns that every mechanism takes.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the one process.")] = 1,
    as_json: Json = False,
) -> None:
    """Time a training iteration of each mechanism against `rope`, paired, on this machine."""
    with _mistakes():
        from farfield.data import load_corpus
        from farfield.study import benchmark
        from farfield.study import recipe as recipes
        from farfield.study.display import Work

        resolved = recipes.load(recipe, settings or ()).canonical()
        data = resolved.data
        corpus = load_corpus(data.source, data.tokenizer, max_tokens=data.max_tokens)
        with Work(err, "bench") as progress:
            rows = benchmark.iterations(resolved, corpus, rounds, threads, progress)
    if as_json:
        _print_json(rows)
        return
    shown = Table("mechanism", "seconds", "ratio to rope", "interval", box=None)
    for row in rows:
        shown.add_row(
            row["mechanism"],
            f"{row['seconds']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
        )
    out.print(shown)


@app.command()
def mechanisms(as_json: Json = False) -> None:
    """The parts of a mechanism's name: TRANSPORT[+v][+CONTROL], such as learned+v+alibi."""
    with _mistakes():
        from dataclasses import fields

        from farfield import mechanisms as table

        rows: list[dict[str, Any]] = [
            {
                "name": row.name,
                "kind": row.kind,
                "summary": row.summary,
                "equation": row.equation,
                "options": {option.name: option.default for option in fields(row.options)},
            }
            for row in table.table()
        ]
    if as_json:
        _print_json(rows)
        return
    shown = Table("name", "kind", "what it is", "step or potential", "options", box=None)
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        shown.add_row(row["name"], row["kind"], row["summary"], row["equation"], options)
    shown.add_row("v", "values", "values carried along the transport", "", "")
    out.print(shown)


@app.command(name="recipes", epilog="Example:  farfield recipes laptop")
def show_recipes(
    name: Annotated[Optional[str], typer.Argument(help="Print this one, resolved.")] = None,  # noqa: UP045
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """The recipes that ship with farfield; or one of them with every setting it resolves to."""
    with _mistakes():
        from farfield.study import recipe as recipes

        names = recipes.packaged() if name is None else [name]
        found = [recipes.load(one, settings or ()) for one in names]
    if as_json:
        tables = [one.as_toml() for one in found]
        _print_json(tables if name is None else tables[0])
    elif name is not None:
        print(recipes.dump(found[0]), end="")
    else:
        shown = Table("name", "what it is", "mechanisms", "seeds", "lengths", box=None)
        for one in found:
            lengths = f"{one.lengths[0]:,} to {one.lengths[-1]:,}"
            shown.add_row(
                one.name,
                one.description,
                ", ".join(one.mechanisms),
                ", ".join(map(str, one.seeds)),
                lengths,
            )
        out.print(shown)


@contextmanager
def _mistakes() -> Iterator[None]:
    """A ValueError or OSError inside is the caller's: one line, status 2, no traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        _fail(" ".join(str(error).split()))


def _fail(line: str) -> NoReturn:
    _tell(f"farfield: {line}")
    raise typer.Exit(2)


def _tell(*lines: str) -> None:
    for line in lines:
        err.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _numbers(text: str | None, option: str) -> list[int] | None:
    """`0,1,2` as numbers. Raises: ValueError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: expected whole numbers such as 0,1,2") from None


def _spelled(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
