"""One run from start to end: train, save, evaluate. Its files are its only result.

    python -m farfield.study.job RUN_FOLDER --recipe OUT/recipe.toml

Whoever starts it prepares RUN_FOLDER (`Run.prepare`); what it finds there it continues.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farfield.study import recipe as recipes
from farfield.study.modules import import_modules, imported
from farfield.study.recipe import Recipe
from farfield.study.run import LOG, MODEL, POSITIONS, RESULTS, Record, Run
from farfield.training import CHECKPOINTS, NonFiniteLoss, Progress, train

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farfield import FarfieldForCausalLM
    from farfield.data import Corpus
    from farfield.evaluation.ladder import LadderResult

Watcher = Callable[[dict[str, Any]], None]


def main(arguments: list[str] | None = None) -> int:
    """Run the job that a folder describes; the exit status says how it went."""
    parser = argparse.ArgumentParser(prog="farfield.study.job", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", type=Path, required=True)
    given = parser.parse_args(arguments)
    quiet_libraries()
    import_modules(imported())
    recipe = recipes.load(str(given.recipe))
    facts = Run("", 0, given.folder).record
    run = Run(facts["mechanism"], facts["seed"], given.folder)
    stop = Stop()
    stop.with_parent()
    with stop.on_signals():
        status = execute(run, recipe, stop)
    return {"finished": 0, "interrupted": 130}.get(status, 1)


def execute(run: Run, recipe: Recipe, stop: Stop, watch: Watcher | None = None) -> str:
    """Train and evaluate a run from wherever its folder stands; returns its status.

    Whatever happens is in `run.json`: "finished"; "interrupted", to be continued; or "failed"
    with the one line that says why (the traceback goes to `log.txt`).
    """
    record = Record(run)
    try:
        record.update(status="running", phase="starting", started=_now(), finished=None, error=None)
        _steps(run, recipe, record, stop, watch or (lambda facts: None))
        record.update(status="finished", phase=None, finished=_now())
    except KeyboardInterrupt:
        _last_words(record, status="interrupted", finished=_now(), error=None)
    except Exception as error:
        with suppress(OSError), (run.folder / LOG).open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        _last_words(record, status="failed", finished=_now(), error=one_line(error, run.folder))
    return str(record.facts["status"])


def _last_words(record: Record, **facts: Any) -> None:
    """A full disk must not hide why the run ended: the caller still gets the status."""
    record.facts |= facts
    with suppress(OSError):
        record.update(peak_memory_bytes=peak_memory())


def _steps(run: Run, recipe: Recipe, record: Record, stop: Stop, watch: Watcher) -> None:
    from farfield.data import load_corpus

    data = recipe.data
    corpus = load_corpus(data.source, data.tokenizer, max_tokens=data.max_tokens)
    if not run.trained:
        _train(run, recipe, corpus, record, stop, watch)
    _ladder(run, recipe, corpus, record, stop, watch)
    shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)  # they served to resume alone


def build(recipe: Recipe, corpus: Corpus, mechanism: str, seed: int) -> FarfieldForCausalLM:
    """The recipe's model with one mechanism, its weights drawn from the seed.

    Raises: ValueError for a shape or mechanism that the model refuses.
    """
    from farfield import FarfieldForCausalLM

    model = FarfieldForCausalLM(_config(recipe, corpus, mechanism, seed))
    model.initialise(seed)
    return model


def _config(recipe: Recipe, corpus: Corpus, mechanism: str, seed: int) -> Any:
    from farfield import FarfieldConfig

    shape, tokenizer = recipe.model, corpus.tokenizer
    return FarfieldConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp_width,
        mechanism=mechanism,
        train_length=recipe.training.length,
        mixing_window=shape.mixing_window,
        seed=seed,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )


def _train(
    run: Run,
    recipe: Recipe,
    corpus: Corpus,
    record: Record,
    stop: Stop,
    watch: Watcher,
) -> None:
    model = build(recipe, corpus, run.mechanism, run.seed)
    settings = recipe.training
    record.update(
        phase="training",
        iterations=settings.iterations,
        parameters=_count(model),
        # What the mechanism adds to the same model without any position.
        parameters_transport=_count(model) - parameters(recipe, corpus, "nope"),
        flops_per_token=flops_per_token(model, settings.length),
    )
    watch(record.facts)

    def progress(state: Progress) -> None:
        record.progress(
            iteration=state.iteration,
            train_seconds=state.seconds,
            train_tokens=state.iteration * settings.batch * settings.length,
        )
        watch({**record.facts, "loss": state.loss, "tokens_per_second": state.tokens_per_second})

    with stop.patience():
        result = train(
            model,
            corpus,
            settings,
            run.folder,
            seed=run.seed,
            resume=True,  # a run to be started afresh has no checkpoint left
            progress=progress,
            stop=stop,
        )
    record.update(
        iteration=result.iterations,
        train_seconds=result.seconds,
        train_tokens=result.tokens,
        tokens_per_second=result.tokens / result.seconds,
        peak_memory_bytes=peak_memory(),
    )
    # The model's folder appears whole: where it is, training is done.
    partial = run.folder / f".{MODEL}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    corpus.tokenizer.save(partial)
    os.replace(partial, run.folder / MODEL)


def _ladder(
    run: Run, recipe: Recipe, corpus: Corpus, record: Record, stop: Stop, watch: Watcher
) -> None:
    import torch

    from farfield.evaluation.pretrained import load_model
    from farfield.evaluation.scaled import evaluate_each, scalable

    record.update(phase="ladder", ladder_share=0.0)
    watch(record.facts)
    measured = run.measured
    model = load_model(run.folder / MODEL, device="cuda" if torch.cuda.is_available() else "cpu")

    def progress(done: float, total: float) -> None:
        if stop():
            raise KeyboardInterrupt
        record.progress(ladder_share=done / total)
        watch(record.facts)

    started = time.perf_counter()
    for result in evaluate_each(
        model,
        corpus.test,
        ladder_settings(recipe),
        train_length=recipe.training.length,
        mechanism=run.mechanism,
        seed=run.seed,
        scaling=recipe.ladder.scaling if scalable(run.mechanism) else (),
        done=measured,
        progress=progress,
    ):
        (name,) = {row["mechanism"] for row in result.rows}
        _keep(run, result, measured)
        measured.add(name)
        _note(record, result, name == run.mechanism, time.perf_counter() - started)
        started = time.perf_counter()
    record.update(ladder_share=1.0)


def _note(record: Record, result: LadderResult, own: bool, seconds: float) -> None:
    """What a reading took and left out. The scaled ones' time is no cost of the mechanism: its own
    ladder is timed alone."""
    if own:
        record.update(ladder_seconds=seconds, left_out=result.left_out)
    else:
        earlier = record.facts.get("scaled_seconds") or 0.0
        known = record.facts["left_out"]
        more = [left for left in result.left_out if left not in known]
        record.update(scaled_seconds=earlier + seconds, left_out=known + more)
    record.update(peak_memory_bytes=peak_memory())


def _keep(run: Run, result: LadderResult, measured: Collection[str]) -> None:
    """Add a reading's rows to the run's files, beside those of the readings `measured` alone.

    The result rows go last: where they are, a reading counts as measured.
    """
    from farfield.evaluation import rows

    results, positions = run.folder / RESULTS, run.folder / POSITIONS
    if not measured:
        rows.write_positions(positions, result.positions)
        rows.write_rows(results, result.rows)
        return
    there = [row for row in rows.read_positions(positions) if row["mechanism"] in measured]
    rows.write_positions(positions, [*there, *result.positions])
    rows.append_rows(results, result.rows)


def ladder_settings(recipe: Recipe) -> Any:
    """The recipe's `[ladder]` as the evaluation takes it."""
    from farfield.evaluation.plan import LadderSettings

    ladder = recipe.ladder
    return LadderSettings(
        multiples=ladder.multiples,
        tokens=ladder.tokens,
        blocks=ladder.blocks,
        protocols=ladder.protocols,
    )


def parameters(recipe: Recipe, corpus: Corpus, mechanism: str) -> int:
    """How many parameters the recipe's model has with a mechanism, counted without memory.

    Raises: ValueError for a shape or mechanism that the model refuses.
    """
    import torch

    from farfield import FarfieldForCausalLM

    with torch.device("meta"):
        return _count(FarfieldForCausalLM(_config(recipe, corpus, mechanism, seed=0)))


def flops_per_token(model: Any, length: int) -> float:
    """Floating-point operations of the matrix products of a forward at L₀, per token.

    A multiply and an add are two. Attention counts as the full L₀ × L₀ products that kernels are
    charged with, whatever they skip of the causal half.
    """
    import torch
    from torch.utils import flop_counter

    # PyTorch 2.13 counts the attention kernels of GPUs, not the CPU's.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(flop_counter.sdpa_flop_count(query, key, value))

    counter = flop_counter.FlopCounterMode(display=False, custom_mapping={cpu_attention: attention})
    training = model.training
    model.eval()
    ids = torch.zeros((1, length), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad(), counter:
        model(input_ids=ids)
    model.train(training)
    return counter.get_total_flops() / length


def peak_memory() -> int:
    """The most memory this process has held so far. Units: bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def one_line(error: BaseException, folder: Path) -> str:
    """What went wrong, in one line; a full disk is named whichever library hit it."""
    text = " ".join(str(error).split()) or type(error).__name__
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
    if not full:
        # torch's writer says only that a write failed.
        with suppress(OSError):
            full = "writing" in text and shutil.disk_usage(folder).free < 2**20
    if full:
        return f"no space left on the disk of {folder}; free some and use --resume"
    expected = (ValueError, OSError, NonFiniteLoss)
    return text if isinstance(error, expected) else f"{type(error).__name__}: {text}"


class Stop:
    """A request to stop: training honours it after its iteration, all else at once."""

    def __init__(self) -> None:
        self.asked = False
        self._patient = False
        self._parent: int | None = None

    def ask(self) -> None:
        """Ask to stop. Raises: KeyboardInterrupt for a second request, or outside `patience`."""
        if self.asked or not self._patient:
            self.asked = True
            raise KeyboardInterrupt
        self.asked = True

    def with_parent(self) -> None:
        """Stop as well when the starting process is gone: killed outright, it can't ask."""
        self._parent = os.getppid()

    def __call__(self) -> bool:
        orphaned = self._parent is not None and os.getppid() != self._parent
        return self.asked or orphaned

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Within, a first request is only noted: the work inside looks for it."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within, SIGINT and SIGTERM are such requests."""

        def handle(number: int, frame: Any) -> None:
            self.ask()

        watched = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, handle) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def quiet_libraries() -> None:
    """No progress bars and notices of transformers in between."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
