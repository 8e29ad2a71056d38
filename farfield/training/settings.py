"""How one model is trained: the settings of a recipe's `[training]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainingSettings(BaseModel):
    """How one model is trained; the `[training]` table of a recipe.

    Units: `length` in tokens; `batch` in blocks per iteration; `warmup` and `final` are shares
    (of the iterations, of the peak learning rate); `*_every` in iterations.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    length: int = Field(default=128, ge=2)
    batch: int = Field(default=32, ge=1)
    iterations: int = Field(default=400, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    angle_learning_rate: float | None = Field(default=None, gt=0)
    warmup: float = Field(default=0.05, ge=0, lt=1)
    final: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    beta2: float = Field(default=0.999, gt=0, lt=1)
    clip: float = Field(default=1.0, gt=0)
    accumulation: int = Field(default=1, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    log_every: int = Field(default=10, ge=1)
    validate_every: int = Field(default=50, ge=1)
    validation_blocks: int = Field(default=64, ge=1)
    checkpoint_every: int = Field(default=100, ge=1)
    tensorboard: bool = False

    @model_validator(mode="after")
    def _parts_are_equal(self) -> TrainingSettings:
        if self.batch % self.accumulation:
            raise ValueError(
                f"accumulation {self.accumulation} does not divide batch {self.batch}; "
                f"expected a divisor of {self.batch}"
            )
        return self

    @property
    def warmup_iterations(self) -> int:
        return round(self.warmup * self.iterations)

    @property
    def train_tokens(self) -> int:
        """Predictions made in training: iterations · batch · L₀."""
        return self.iterations * self.batch * self.length
