"""`farfield theory`: each statement for your own numbers, as a table, as JSON, or as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from farfield.cli.console import Json, mistakes, numbers, out, print_json, spelled, tell

commands = typer.Typer(
    no_args_is_help=True,
    help="What the theory says of your own numbers, and whether it holds when simulated.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

LawOption = Annotated[
    str,
    typer.Option(
        help="normal:SIGMA[,MEAN], uniform:HALF_WIDTH[,MEAN], von_mises:KAPPA[,MEAN], "
        "two_point:ANGLE, sometimes:PROBABILITY,ANGLE, rope:HEAD_DIM[,BASE] or "
        "reflection:HEAD_DIM."
    ),
]
Blocks = Annotated[int, typer.Option(help="Planes of the head, d/2.")]
Amplitude = Annotated[
    float,
    typer.Option(help="|q_b||k_b|/√d of each plane, nats; logits lie within ±λ, λ = blocks × it."),
]
NearWindow = Annotated[int, typer.Option(help="Keys that count as near, the query's own included.")]
NearScore = Annotated[float, typer.Option(help="Content logit of a near key, nats.")]
Delta = Annotated[float, typer.Option(help="Chance that a bound may fail.")]
Slope = Annotated[float, typer.Option(help="ALiBi's slope, nats per token.")]
Picture = Annotated[
    Path | None, typer.Option(help="Draw into this .png or .svg file as well.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Names what is simulated.")]
Routes = Annotated[int, typer.Option(help="Simulated queries in a picture.")]
Noise = Annotated[float, typer.Option(help="E|ξ|², power of what far values do not share.")]
Mean = Annotated[float, typer.Option(help="|μ|², power of what far values have in common.")]


@commands.command(epilog="Example:  farfield theory window --law normal:0.4 --epsilon 0.1,0.01")
def window(
    law: LawOption = "normal:0.4",
    epsilon: Annotated[str, typer.Option(help="What a mean is to shrink to.")] = "0.1,0.01,0.001",
    picture: Picture = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """How many steps until a route's mean is forgotten, and how few until it has moved (T1)."""
    with mistakes():
        from farfield.theory import answers, figures

        chosen, levels = answers.law_of(law), _reals(epsilon, "--epsilon")
        rows = answers.windows(chosen, levels)
        if picture is not None:
            figures.window_picture(chosen, picture, levels[0], seed)
    _show(rows, picture, as_json)


@commands.command(
    name="break-length", epilog="Example:  farfield theory break-length --near-score 5"
)
def break_length(
    law: LawOption = "normal:0.4",
    blocks: Blocks = 32,
    amplitude: Amplitude = 0.25,
    near_window: NearWindow = 32,
    near_score: NearScore = 4.0,
    mean: Mean = 1.0,
    noise: Noise = 1.0,
    share: Annotated[float, typer.Option(help="The far mass that counts as broken.")] = 0.5,
    delta: Delta = 0.05,
    slope: Slope = 0.001,
    picture: Picture = None,
    routes: Routes = 100,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The number of far keys at which far mass, or far noise, takes over (T3, T4, T6)."""
    with mistakes():
        from farfield.theory import answers, figures

        head = _head(law, blocks, amplitude, near_window, near_score, mean, noise)
        rows = answers.breaks(head, share, delta) + answers.snr_breaks(head, slope)
        if picture is not None:
            figures.break_picture(head, picture, slope, routes, seed)
    _show(rows, picture, as_json)


@commands.command(epilog="Example:  farfield theory bounds --lengths 512,65536 --slope 0.01")
def bounds(
    law: LawOption = "normal:0.4",
    lengths: Annotated[str, typer.Option(help="Context lengths, tokens.")] = "512,4096,65536",
    blocks: Blocks = 32,
    amplitude: Amplitude = 0.25,
    near_window: NearWindow = 32,
    near_score: NearScore = 4.0,
    delta: Delta = 0.05,
    slope: Slope = 0.0,
    gate: Annotated[
        float | None, typer.Option(help="Mean forget gate per token.", show_default=False)
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", help="A sliding window, tokens.", show_default=False)
    ] = None,
    picture: Picture = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Far mass at each length: forced, typical, not to be passed; the score threshold (T2–T4)."""
    with mistakes():
        from farfield.theory import answers, figures

        head = _head(law, blocks, amplitude, near_window, near_score)
        at = numbers(lengths, "--lengths") or []
        rows = answers.bounds(head, at, delta, slope, gate, window)
        if picture is not None:
            figures.bounds_picture(head, picture, delta, seed)
    _show(rows, picture, as_json)


@commands.command(epilog="Example:  farfield theory values --law normal:0.1 --far-keys 1024,65536")
def values(
    law: LawOption = "normal:0.4",
    far_keys: Annotated[str, typer.Option(help="Numbers of far keys.")] = "64,1024,16384,262144",
    blocks: Blocks = 32,
    amplitude: Amplitude = 0.25,
    near_window: NearWindow = 32,
    near_score: NearScore = 4.0,
    mean: Mean = 1.0,
    noise: Noise = 1.0,
    picture: Picture = None,
    routes: Routes = 100,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Power of the far part with values left alone and carried, its gain and its floor (T5)."""
    with mistakes():
        from farfield.theory import answers, figures

        head = _head(law, blocks, amplitude, near_window, near_score, mean, noise)
        rows = answers.value_rows(head, numbers(far_keys, "--far-keys") or [])
        if picture is not None:
            figures.values_picture(head, picture, routes, seed)
    _show(rows, picture, as_json)


@commands.command(
    name="phase-diagram",
    epilog="Example:  farfield theory phase-diagram --over sigma --picture sigma.png",
)
def phase_diagram(
    over: Annotated[str, typer.Option(help="lambda, sigma or slope.")] = "lambda",
    law: LawOption = "normal:0.4",
    blocks: Blocks = 32,
    amplitude: Amplitude = 0.25,
    near_window: NearWindow = 32,
    near_score: NearScore = 4.0,
    mean: Mean = 1.0,
    noise: Noise = 1.0,
    slope: Slope = 0.001,
    points: Annotated[int, typer.Option(help="Values along the axis.")] = 61,
    longest: Annotated[int, typer.Option(help="The longest context, tokens.")] = 1 << 20,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Where near signal survives: with Q/K rotated, with Q/K/V rotated, and under ALiBi (T6).

    Over λ, near scores grow in proportion. Over the slope, all panels have ALiBi.
    """
    with mistakes():
        from farfield.theory import figures
        from farfield.theory.diagram import diagram

        head = _head(law, blocks, amplitude, near_window, near_score, mean, noise)
        found = diagram(over, head, slope, points, longest=longest)  # type: ignore[arg-type]
        if picture is not None:
            figures.phase_picture(found, picture)
    rows = found.rows()
    if not as_json:
        rows = rows[:: max(1, (len(rows) - 1) // 12)]
        tell("context length at which near signal is lost (SNR = 1), tokens")
    _show(rows, picture, as_json)


@commands.command(
    epilog="Example:  farfield theory predict heads.jsonl --lengths 1024,16384 --picture heads.png"
)
def predict(
    measurements: Annotated[
        Path,
        typer.Argument(
            help="A .jsonl file, one head a line: near_window, lse_near, rho and ell or lambda; "
            "slope or mean_gate; mean_power, noise_power and near_power for a ratio; points."
        ),
    ],
    lengths: Annotated[str, typer.Option(help="Context lengths.")] = "1024,4096,16384,65536",
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """What heads that were measured at one length will do at others: far mass, SNR (T6)."""
    with mistakes():
        from farfield.report import predicted

        at = numbers(lengths, "--lengths") or []
        rows = predicted.predicted_rows(measurements, at)
        if picture is not None:
            predicted.predicted_picture(measurements, picture, max(at))
    _show(rows, picture, as_json)


@commands.command(epilog="Example:  farfield theory verify --seed 7 --only T5")
def verify(
    seed: Annotated[int, typer.Option(help="With a check's name, names its generator.")] = 0,
    only: Annotated[
        str | None,
        typer.Option(help="One check or one file of them, such as mass or mass.controls."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate every statement: predicted, measured, standard error. Status 1 if any fails.

    Identities are z-tests at 4; bounds have one side and show their slack; approximations must
    come closer.
    """
    with mistakes():
        from farfield.theory.verify import verify as run

        found = []
        for outcome in run(seed, only):
            found.append(outcome)
            if not as_json:
                _tell_outcome(outcome)
    failed = [outcome for outcome in found if not outcome.passed]
    if as_json:
        print_json({"seed": seed, "outcomes": [vars(outcome) for outcome in found]})
    else:
        generators = "generators: PCG64 of (seed, CRC-32 of the check's name)"
        print(f"{len(found)} statements, {len(failed)} failed; seed {seed}; {generators}")
    raise typer.Exit(1 if failed else 0)


def _tell_outcome(outcome: Any) -> None:
    mark = "ok  " if outcome.passed else "FAIL"
    error = f"± {outcome.standard_error:.1g}" if outcome.standard_error else ""
    print(
        f"{mark} {outcome.statement:<4}{outcome.kind:<14}{outcome.predicted:>11.5g} "
        f"{outcome.measured:>11.5g} {error:<9} {outcome.note:<34} {outcome.what}",
        flush=True,
    )


def _head(
    law: str,
    blocks: int,
    amplitude: float,
    near_window: int,
    near_score: float,
    mean: float = 1.0,
    noise: float = 1.0,
) -> Any:
    from farfield.theory.answers import Head, law_of

    return Head(law_of(law), blocks, amplitude, near_window, near_score, mean, noise)


def _reals(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: expected numbers such as 0.1,0.01") from None


def _show(rows: Sequence[dict[str, Any]], picture: Path | None, as_json: bool) -> None:
    if as_json:
        print_json([{key: _plain(value) for key, value in row.items()} for row in rows])
    else:
        shown = Table(*(key.replace("_", " ") for key in rows[0]), box=None)
        for row in rows:
            shown.add_row(*(_cell(value) for value in row.values()))
        out.print(shown)
    if picture is not None:
        tell(str(picture))


def _plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "never" if value > 0 else "−∞"
    whole = isinstance(value, float) and value >= 1000
    return f"{value:,.0f}" if whole else spelled(value)
