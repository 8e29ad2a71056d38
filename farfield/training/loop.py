"""The training itself, on transformers.Trainer, which is imported when it is needed."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farfield.training.blocks import Splits, TrainingBlocks, collate
from farfield.training.books import CHECKPOINTS, Books, Interrupted, Progress, last_checkpoint
from farfield.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


@dataclass(frozen=True)
class TrainingResult:
    """What training came to. Units: losses in nats per token; `seconds` spent in iterations."""

    iterations: int
    loss: float
    validation_loss: float
    seconds: float
    tokens: int


def train(
    model: PreTrainedModel,
    corpus: Splits,
    settings: TrainingSettings,
    out: Path,
    *,
    seed: int,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainingResult:
    """Train a causal model: AdamW, linear warm-up, cosine decay, clipped gradients.

    `out` receives `metrics.jsonl` and `checkpoints/`. With `resume` the newest complete checkpoint
    there is continued, bit for bit as if it had never stopped. `progress` is called after every
    iteration; when `stop` says so, a checkpoint is written and `Interrupted` raised.

    Raises: NonFiniteLoss, Interrupted; ValueError for a text shorter than a block, or for a
    checkpoint of a run of another length.
    """
    blocks = TrainingBlocks(
        corpus.train, settings.length, settings.iterations * settings.batch, seed
    )
    checkpoint = last_checkpoint(out) if resume else None
    if checkpoint is not None:
        _check_same_run(checkpoint[1], settings)
    books = Books(model, corpus.validation, settings, out, checkpoint, progress, stop)
    use_cache = model.config.use_cache
    with _tensorboard_folder(out):
        trainer = _trainer(model, blocks, settings, out, seed, books)
    books.log = trainer.log
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint[1]) if checkpoint else None)
    finally:
        # The Trainer wraps the forward for bfloat16 and turns the cache off: undo both.
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        model.config.use_cache = use_cache
        if settings.gradient_checkpointing:
            model.activation_checkpointing_disable()
        model.zero_grad(set_to_none=True)
        model.eval()
    if books.iteration < settings.iterations:
        raise Interrupted(books.iteration)
    return TrainingResult(
        iterations=books.iteration,
        loss=books.loss,
        validation_loss=books.validation_loss,
        seconds=books.seconds,
        tokens=settings.train_tokens,
    )


def _check_same_run(checkpoint: Path, settings: TrainingSettings) -> None:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    if state["max_steps"] != settings.iterations:
        raise ValueError(
            f"{checkpoint} is of a run of {state['max_steps']} iterations; "
            f"expected {settings.iterations}: its learning rates follow another schedule"
        )


def parameter_groups(model: PreTrainedModel, settings: TrainingSettings) -> list[dict[str, Any]]:
    """AdamW's groups: weight decay on matrices only (norms and biases are vectors), and the
    parameters that fix angles under their own learning rate where one is set."""
    named = getattr(model, "angle_parameters", None)
    angles = set(named()) if callable(named) else set()
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name in angles, parameter.ndim >= 2), []).append(parameter)
    angle_rate = settings.angle_learning_rate or settings.learning_rate
    return [
        {
            "params": parameters,
            "lr": angle_rate if angle else settings.learning_rate,
            "weight_decay": settings.weight_decay if matrix else 0.0,
        }
        for (angle, matrix), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def _trainer(
    model: PreTrainedModel,
    blocks: TrainingBlocks,
    settings: TrainingSettings,
    out: Path,
    seed: int,
    books: Books,
) -> Trainer:
    """The Trainer, told to keep to the order of `blocks` and to report to `books`."""
    import torch
    from transformers import Trainer, TrainerCallback, get_scheduler
    from transformers.trainer_callback import PrinterCallback

    class Reporter(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            books.started()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            books.before_update()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            books.done(control)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            books.logged(logs)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            books.saved()

    class BlockTrainer(Trainer):
        # Blocks are equally long, so the mean over the parts of a batch is the batch's mean.
        loss_is_scaled_for_ga = False

        def compute_loss(
            self,
            model: Any,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            if getattr(self.model, "needs_nonce", False):
                inputs = {**inputs, "nonce": self.state.global_step + 1}
            outputs = model(**inputs)
            books.part_done(outputs.loss)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings), betas=(0.9, settings.beta2), eps=1e-8
    )
    schedule = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=settings.warmup_iterations,
        num_training_steps=settings.iterations,
        scheduler_specific_kwargs={"min_lr_rate": settings.final},
    )
    trainer = BlockTrainer(
        model=model,
        args=_arguments(settings, out, seed),
        train_dataset=blocks,
        data_collator=collate,
        optimizers=(optimizer, schedule),
        callbacks=[Reporter()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(settings: TrainingSettings, out: Path, seed: int) -> Any:
    import torch
    from transformers import TrainingArguments

    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "training.tensorboard is on, but tensorboard is not installed: pip install tensorboard"
        )
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        max_steps=settings.iterations,
        per_device_train_batch_size=settings.batch // settings.accumulation,
        gradient_accumulation_steps=settings.accumulation,
        train_sampling_strategy="sequential",  # `TrainingBlocks` is shuffled already
        max_grad_norm=settings.clip,
        learning_rate=settings.learning_rate,
        seed=seed,
        bf16=settings.dtype == "bfloat16",
        activation_checkpointing=settings.gradient_checkpointing,
        save_steps=settings.checkpoint_every,
        save_total_limit=1,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        report_to=["tensorboard"] if settings.tensorboard else [],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        use_cpu=not cuda,
    )


@contextmanager
def _tensorboard_folder(out: Path) -> Iterator[None]:
    """Transformers takes TensorBoard's folder from the environment alone."""
    name = "TENSORBOARD_LOGGING_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(out / "tensorboard")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
