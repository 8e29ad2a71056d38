"""The ladder for a model folder on disk: ours, or any Hugging Face causal language model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from farfield.data import Splits, TokenStream, load_corpus, load_tokenizer
from farfield.evaluation.ladder import LadderResult
from farfield.evaluation.plan import LadderSettings
from farfield.evaluation.protocols import Progress
from farfield.evaluation.rows import write_positions, write_rows
from farfield.evaluation.scaled import check_scalings, evaluate_each, scaled_name

SPLITS = ("train", "validation", "test", "all")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def run(
    model_folder: str | Path,
    data: str = "kjv",
    *,
    out: str | Path,
    settings: LadderSettings | None = None,
    train_length: int | None = None,
    split: str = "test",
    dtype: str | None = None,
    device: str = "cpu",
    cache_dir: Path | None = None,
    max_tokens: int | None = None,
    scaling: Sequence[str] = (),
    progress: Progress | None = None,
) -> LadderResult:
    """Evaluates a model folder on a text tokenised with the model's own tokenizer.

    Writes the result rows to `out` and the losses by position beside it (`positions_path`), each
    whole or not at all. Rows are named by the model's mechanism and seed, or else by its model
    type and seed 0. `split` "all" reads the whole text. `dtype` None keeps the saved type.
    `data`, `cache_dir` and `max_tokens` are those of `load_corpus`. Each of `scaling` adds the rows
    of the same model with its rotations scaled to the length (`scaled`).

    Raises: OSError (no such folder or text, `out` can't be written) and ValueError (not a causal
    language model, weights missing from it, no training length known, no length that fits, a
    model that can't be scaled).
    """
    out = Path(out)
    _check_destination(out)
    check_name("split", split, SPLITS)
    scalings = check_scalings(scaling)
    config = load_config(Path(model_folder))
    length = resolve_train_length(config, train_length)
    if config.model_type == "farfield":
        for rule in scalings:
            scaled_name(config.mechanism, rule)  # refused before a text is read
    stream = _stream(Path(model_folder), data, split, cache_dir, max_tokens)
    model = load_model(model_folder, dtype=dtype, device=device)
    whole = LadderResult([], [], [])
    for result in evaluate_each(
        model,
        stream,
        settings or LadderSettings(),
        train_length=length,
        mechanism=getattr(config, "mechanism", None) or config.model_type,
        seed=getattr(config, "seed", None) or 0,
        scaling=scalings,
        progress=progress,
    ):
        whole = whole.joined(result)
    write_rows(out, whole.rows)
    write_positions(positions_path(out), whole.positions)
    return whole


def load_model(model_folder: str | Path, *, dtype: str | None = None, device: str = "cpu") -> Any:
    """The causal language model of a folder, every weight of it read from there.

    Raises: FileNotFoundError without a config.json; ValueError when transformers can't build it,
    or when weights are missing (it would fill them with random numbers).
    """
    folder = Path(model_folder)
    load_config(folder)
    if dtype is not None:
        check_name("dtype", dtype, DTYPES)
    loader: Any = AutoModelForCausalLM
    try:
        model, found = loader.from_pretrained(
            folder,
            dtype="auto" if dtype is None else getattr(torch, dtype),
            output_loading_info=True,
            local_files_only=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: not loaded as a causal language model: {_one_line(error)}"
        ) from None
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights are missing, the first is {missing[0]}: "
            "expected a complete causal language model"
        )
    unread = sorted(found["unexpected_keys"])
    if unread and model.config.model_type == "farfield":
        raise ValueError(
            f"{folder}: {len(unread)} weights have no place in the model that config.json "
            f"describes, the first is {unread[0]}: expected the configuration they were saved with"
        )
    return model.to(_device(device))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (AssertionError, NotImplementedError, RuntimeError):
        there = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"device {name!r}: not on this machine; expected {there}") from None
    return device


def resolve_train_length(config: Any, given: int | None = None) -> int:
    """L₀ in tokens: what was given, else what the model says it was trained at.

    That is `train_length` for farfield's models and `max_position_embeddings` for others.

    Raises: ValueError when none of these says it, or the length is below 1.
    """
    names = ("train_length", "max_position_embeddings")
    known = [given, *(getattr(config, name, None) for name in names)]
    length = next((value for value in known if value is not None), None)
    if length is None:
        raise ValueError(
            f"a {config.model_type} configuration does not say the training length: "
            "expected --train-length TOKENS"
        )
    if length < 1:
        raise ValueError(f"train_length = {length}: expected at least 1 token")
    return int(length)


def positions_path(out: Path) -> Path:
    """Where the losses by position go: FILE.positions.jsonl beside FILE.jsonl."""
    return out.with_name(f"{out.stem}.positions.jsonl")


def load_config(folder: Path) -> Any:
    """The configuration of a model folder. Raises: as `load_model`."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no model there; expected a folder with a config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{folder}: config.json not understood: {_one_line(error)}") from None


def _stream(
    folder: Path, data: str, split: str, cache_dir: Path | None, max_tokens: int | None
) -> TokenStream:
    splits = Splits(0.0, 0.0, 1.0) if split == "all" else Splits()
    corpus = load_corpus(
        data, str(folder), cache_dir=cache_dir, splits=splits, max_tokens=max_tokens
    )
    stream: TokenStream = getattr(corpus, "test" if split == "all" else split)
    return stream


def _check_destination(out: Path) -> None:
    """Before the evaluation, which may take long, not after it."""
    if out.is_dir():
        raise IsADirectoryError(f"{out}: is a folder; expected the name of a .jsonl file")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: its folder {out.parent} does not exist")
    probe = out.with_name(f".{out.name}.probe")
    try:
        probe.write_text("")
    except OSError as error:
        raise OSError(f"{out}: can't be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    """Raises ValueError, naming the nearest, for a name that isn't known."""
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} {name!r}: expected one of {', '.join(known)}{hint}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def continue_text(
    folder: Path, prompt: str, tokens: int, seed: int, sampling: dict[str, float]
) -> str:
    """What a model on disk makes of a prompt, decoding with its cache: greedily where `sampling`
    is empty, else sampled with its `temperature`, `top_k` and `top_p`; `seed` names the draw.

    Units: `tokens` to add at most. Raises: as `run`; ValueError for a prompt without a token.
    """
    model = load_model(folder, device="cuda" if torch.cuda.is_available() else "cpu").eval()
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt holds no tokens; expected some text to continue")
    torch.manual_seed(seed)
    inputs = torch.tensor([ids], device=model.device)
    try:
        made = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=tokens,
            use_cache=True,
            do_sample=bool(sampling),
            pad_token_id=tokenizer.pad_id,
            **sampling,
        )
    except IndexError:  # a table of learned positions came to its end
        raise ValueError(
            f"{folder}: no positions for {len(ids)} tokens of prompt and {tokens} more"
        ) from None
    return tokenizer.decode([i for i in made[0, len(ids) :].tolist() if i != tokenizer.eos_id])
