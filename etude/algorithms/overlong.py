"""DAPO's soft penalty on answers near the length limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from etude.algorithms.view import View
from etude.config import Config
from etude.errors import ConfigError
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from etude.batch import Batch


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return min(−(length − (max_length − buffer)) / buffer · factor, 0), in float64: 0 up to the buffer's start."""
    over = lengths.double() - (max_length - buffer)
    return -over.clamp(min=0) / buffer * factor


class OverlongPenalty(Config):
    """The soft over-long penalty: min(−(len − (max − buffer))/buffer · factor, 0) is added to the reward.

    Source: 2503.14476 (with 20,480 tokens, a buffer of 4,096 and factor 1). Assumes that a rollout's length is its
    number of action tokens, so that tool output is not penalized. `collect.refill` compares groups before the penalty:
    by the task's own reward, not by length.
    Ours: beyond the limit the penalty continues to fall, where the paper's stops at −factor. A sampler that obeys the
    limit never gets there.
    """

    max_length: int = Field(gt=0, description="action tokens after which the sampler cuts an answer off")
    buffer: int | None = Field(
        None, gt=0, description="tokens before the limit at which the penalty begins; none is a fifth of `max_length`"
    )
    factor: float = Field(1.0, gt=0, description="the penalty at the limit")

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongPenalty:
        if self.buffer is not None and self.buffer > self.max_length:
            raise ConfigError(
                f"`buffer` is {self.buffer}, more than the whole of `max_length` = {self.max_length}: every answer "
                f"would be penalized. Lower `buffer`, leave it out (then it is a fifth of `max_length`), or raise "
                f"`max_length`."
            )
        return self

    def penalty(self, lengths: Tensor) -> Tensor:
        """[U] action tokens → [U] ≤ 0, in float64."""
        buffer = max(self.max_length // 5, 1) if self.buffer is None else self.buffer
        return overlong_penalty(lengths, max_length=self.max_length, buffer=buffer, factor=self.factor)

    def apply_penalty(self, view: View, metrics: Metrics) -> Batch:
        """Return the batch with the penalty added to its rewards."""
        penalty = self.penalty(view.rollouts.lengths)
        metrics.add("overlong_penalty", Mean.over(penalty.sum(), len(penalty)))
        metrics.add("overlong_share", Mean.over((penalty < 0).sum(), len(penalty)))
        return view.batch.replace(
            reward=view.batch.require("reward", needed_by="The over-long penalty").double() + penalty
        )
