"""The score of a reward model, which was trained on preferences.

The reward names the model, and passes the prompt and the answer on. The run loads the model and gives the reward a
function that scores (`with_scorer`). This module computes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from etude.config.resume_marks import MAY_CHANGE
from etude.records import Task
from etude.rewards.base import CapacityLimiter, RewardFunction

ScoreFunction = Callable[[Task, str], Awaitable[float]]


class RewardModelScore(RewardFunction):
    """The raw score that a trained reward model gives a prompt with its answer.

    The model is a sequence classifier of transformers with one label, such as `etude reward-model` trains and `etude
    export` writes. It uses its own tokenizer and chat template, and reads the answer with its end.
    """

    path: Path = Field(description="directory of a reward model: config.json, weights with a score head, tokenizer")
    precision: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="dtype of the model's computation")
    max_tokens_per_micro_batch: int = Field(
        16384, ge=1, description="most tokens of one forward pass; larger is faster and needs more memory"
    )
    max_concurrency: Annotated[int, MAY_CHANGE] = Field(
        64,
        ge=1,
        description="answers scored together; larger batches better; together they have the `judging.timeout` of all",
    )

    in_place: ClassVar[bool] = True

    _scorer: ScoreFunction | None = PrivateAttr(None)

    @property
    def title(self) -> str:
        return f"reward_model ({self.path.name})"

    @property
    def max_batch_size(self) -> int:
        return self.max_concurrency

    @cached_property
    def _limiter(self) -> CapacityLimiter:
        return CapacityLimiter(self.max_concurrency)

    def throttle(self) -> AbstractAsyncContextManager[Any]:
        return self._limiter.slot()

    def with_absolute_paths(self, absolute: Callable[[Path], Path]) -> Self:
        return self.model_copy(update={"path": absolute(self.path)})

    def files(self) -> list[Path]:
        return sorted(file for file in self.path.glob("*") if file.is_file())

    def with_scorer(self, scorer: ScoreFunction) -> Self:
        """Return the same reward with a scoring function."""
        other = self.model_copy()
        other._scorer = scorer
        return other

    async def __call__(self, task: Task, answer: str) -> float:
        assert self._scorer is not None, "the run must load the reward model"
        return await self._scorer(task, answer)
