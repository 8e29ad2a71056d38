"""Training one model on one text.

| module     | what it holds                                                     |
|------------|-------------------------------------------------------------------|
| `settings` | `TrainingSettings`, the `[training]` table of a recipe            |
| `blocks`   | which tokens are trained on and validated on, and in which order  |
| `books`    | metrics, checkpoints, finiteness                                  |
| `loop`     | `train`, on transformers.Trainer                                  |
"""

from farfield.training.blocks import Splits, Stream, TrainingBlocks, validation_loss
from farfield.training.books import (
    CHECKPOINTS,
    METRICS,
    Interrupted,
    NonFiniteLoss,
    Progress,
    last_checkpoint,
    read_metrics,
)
from farfield.training.loop import TrainingResult, parameter_groups, train
from farfield.training.settings import TrainingSettings

__all__ = [
    "CHECKPOINTS",
    "METRICS",
    "Interrupted",
    "NonFiniteLoss",
    "Progress",
    "Splits",
    "Stream",
    "TrainingBlocks",
    "TrainingResult",
    "TrainingSettings",
    "last_checkpoint",
    "parameter_groups",
    "read_metrics",
    "train",
    "validation_loss",
]
