"""The shared options of supervised runs, on demonstrations, preferences, or a teacher's distributions.

Nothing is sampled. The loss decides what a run needs besides its model: columns of a reference or a teacher, or a score
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from etude.algorithms import Loss
from etude.checkpoint import CheckpointConfig
from etude.config import Config
from etude.config.resume_marks import MAY_CHANGE, SETS_LENGTH
from etude.data.examples import SupervisedDataConfig
from etude.errors import ConfigError
from etude.recipes.option_names.aliases import SUPERVISED_ALIASES
from etude.recipes.recipe import Recipe
from etude.train import TrainConfig


class ValidationConfig(Config):
    """Options of the validation on `data.val`, which is never trained on."""

    every: int = Field(0, ge=0, description="measure every n steps, and after the last; 0 measures after the last only")
    first: bool = Field(True, description="measure before the first step too")
    limit: int | None = Field(None, ge=1, description="measure on the first n examples only")

    def is_due(self, step: int, last: int) -> bool:
        """Return whether to measure after this step."""
        return step == last or (step == 0 and self.first) or bool(step and self.every and step % self.every == 0)


class SupervisedRun(Recipe):
    """The options of a supervised run."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES
    provided_columns: ClassVar[frozenset[str]] = frozenset()
    """The columns that examples or an auxiliary model provide."""
    outputs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy"})
    """The outputs that the model's forward pass can compute for a loss."""

    data: SupervisedDataConfig
    loss: Loss
    train: TrainConfig = Field(TrainConfig(learning_rate=1e-5), description="the optimizer and its precision")
    evaluate: Annotated[ValidationConfig, MAY_CHANGE] = Field(
        ValidationConfig(), description="measuring the model on `data.val` during training"
    )

    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = Field(
        CheckpointConfig(every=100), description="checkpoints on disk"
    )
    batch_size: int = Field(
        32, ge=1, description="examples per optimizer step; larger gives smoother gradients and fewer steps per epoch"
    )
    steps: Annotated[int | None, SETS_LENGTH] = Field(
        None, ge=1, description="optimizer steps; null is as many as `epochs` take"
    )
    epochs: Annotated[float | None, SETS_LENGTH] = Field(
        None, gt=0, description="passes over the examples; null is 1, unless `steps` is given"
    )

    def longest_row(self, room: int) -> tuple[int, str]:
        return self.data.max_tokens or room, "a lower `data.max_tokens`"

    def double_length_option(self, steps: int) -> str:
        """Return the option in steps or in epochs, as the run was given its length."""
        return super().double_length_option(steps) if self.steps is not None else f"epochs={2 * (self.epochs or 1):g}"

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"`steps={self.steps}` and `epochs={self.epochs:g}` both set the length of the run. Give one of them."
            )
        return self
