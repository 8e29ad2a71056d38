"""The diagnosis of a model folder on disk, as a folder of rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from farfield.data import Splits, load_corpus
from farfield.diagnosis import own
from farfield.diagnosis.diagnose import FORMATS, Diagnosis, Stage, diagnose
from farfield.diagnosis.engines import check_names
from farfield.diagnosis.interventions import chosen
from farfield.evaluation.pretrained import (
    SPLITS,
    check_name,
    load_config,
    load_model,
    resolve_train_length,
)

if TYPE_CHECKING:
    from farfield.data import TokenStream


@dataclass(frozen=True)
class Options:
    """What is measured, beside the model and its text: arguments of `diagnose` and of loading.

    Raises: ValueError for an unknown split, format or intervention, before a model is read.
    """

    lengths: list[int] | None = None
    near_windows: list[int] | None = None
    queries: int = 512
    layers: list[int] | None = None
    heads: list[int] | None = None
    intervene: tuple[str, ...] | None = None
    tokens: int | None = None
    split: str = "test"
    dtype: str | None = None
    device: str = "cpu"
    kind: str = "jsonl"

    def __post_init__(self) -> None:
        check_name("split", self.split, SPLITS)
        check_name("format", self.kind, FORMATS)
        check_names(self.intervene or ())


def of_model(
    model_folder: str | Path,
    data: str,
    out: str | Path,
    options: Options | None = None,
    train_length: int | None = None,
    *,
    stage: Stage | None = None,
) -> Diagnosis:
    """Diagnoses a model folder on a text tokenised with its own tokenizer, and writes the rows.

    Rows are named by the model's mechanism, or else by its model type.

    Raises: OSError and ValueError as `load_model`, `load_corpus` and `diagnose`.
    """
    options = options or Options()
    load_config(Path(model_folder))  # a folder without a model is refused before a text is read
    splits = Splits(0.0, 0.0, 1.0) if options.split == "all" else Splits()
    corpus = load_corpus(data, str(model_folder), splits=splits)
    stream = getattr(corpus, "test" if options.split == "all" else options.split)
    return of_stream(model_folder, stream, out, options, train_length, stage=stage)


def of_stream(
    model_folder: str | Path,
    stream: TokenStream,
    out: str | Path,
    options: Options,
    train_length: int | None = None,
    *,
    stage: Stage | None = None,
) -> Diagnosis:
    """The same on tokens that are there already. Raises: as `of_model`."""
    _check_destination(Path(out))
    model = load_model(model_folder, dtype=options.dtype, device=options.device)
    config = model.config
    found = diagnose(
        model,
        stream,
        options.lengths,
        train_length=resolve_train_length(config, train_length),
        name=getattr(config, "mechanism", None) or config.model_type,
        seed=getattr(config, "seed", None) or 0,
        near_windows=options.near_windows,
        queries=options.queries,
        layers=options.layers,
        heads=options.heads,
        intervene=options.intervene,
        tokens=options.tokens,
        stage=stage,
    )
    found.write(out, options.kind)
    return found


def _check_destination(out: Path) -> None:
    """Before the work, not after it: can a folder be made here, and files in it?"""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; expected a folder to write into")
    there = next(path for path in (out, *out.parents) if path.exists())
    try:
        with TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{out}: can't be written: {error.strerror}") from None


def check_served(model_folder: str | Path, options: Options) -> None:
    """Raises ValueError, naming the folder, where its model doesn't take what is asked for."""
    if not options.intervene and options.heads is None:
        return
    model = load_model(model_folder)
    try:
        chosen(model, options.intervene)
        own.check_heads(model, options.heads)
    except ValueError as error:
        raise ValueError(f"{model_folder}: {error}") from error
