"""`farfield ladder` and `farfield generate`: what a trained model does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from farfield.cli.console import Json, err, mistakes, numbers, out, print_json, spelled, tell

commands = typer.Typer()


@commands.command(
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
    scaling: Annotated[
        str,
        typer.Option(
            metavar="linear,ntk,yarn",
            help="Measure a rotary model again with its frequencies scaled to each length.",
            show_default=False,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure a model's perplexity at many lengths, on the same tokens."""
    with mistakes():
        from farfield.evaluation import pretrained
        from farfield.evaluation.plan import LadderSettings, left_out_lines
        from farfield.evaluation.rows import non_finite_lines
        from farfield.study.display import Work
        from farfield.study.job import quiet_libraries

        quiet_libraries()
        chosen = numbers(lengths, "--lengths")
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
                scaling=scaling.split(",") if scaling else (),
            )  # fmt: skip
    tell(*left_out_lines(result.left_out), *non_finite_lines(result.rows))
    keys = ["protocol", "length", "tokens", "ppl", "ratio", "ratio_low", "ratio_high"]
    if scaling:
        keys.insert(0, "mechanism")
    rows = [{key: row[key] for key in keys} for row in result.rows]
    if as_json:
        print_json({"out": str(file), "rows": rows, "left_out": result.left_out})
        return
    shown = Table(*keys, box=None)
    for row in rows:
        shown.add_row(*(spelled(row[key]) for key in keys))
    out.print(shown)


@commands.command(
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
    with mistakes():
        from farfield.evaluation.pretrained import continue_text
        from farfield.study.job import quiet_libraries

        quiet_libraries()
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        text = continue_text(model, prompt, tokens, seed, sampling if temperature else {})
    if as_json:
        print_json({"prompt": prompt, "continuation": text})
    else:
        print(prompt + text)
