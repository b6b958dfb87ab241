"""A reward model's score: what an answer is worth to a model that learned what people prefer.

The reward itself says which model, and hands prompt and answer on. Whoever starts the run loads the model, and gives
the reward whom to ask (`with_scorer`): here nothing is computed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from etude.records import Task
from etude.rewards.base import RewardFunction
from etude.rewards.capacity_limiter import CapacityLimiter

__all__ = ["RewardModelScore"]

ScoreFunction = Callable[[Task, str], Awaitable[float]]


class RewardModelScore(RewardFunction):
    """The score that a trained reward model gives a prompt with its answer, as a bare number.

    The model is one of transformers' sequence classifiers with one label, such as `etude reward-model` trains and
    `etude export` writes. It reads the answer by its own tokenizer and chat template, with the end that an answer has.
    """

    path: Path = Field(description="the directory of a reward model: config.json, weights with a score head, tokenizer")
    precision: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="what it computes in")
    max_tokens_per_micro_batch: int = Field(
        16384, ge=1, description="tokens it computes at once; fewer need less memory"
    )
    max_concurrency: int = Field(
        64, ge=1, description="answers that are scored together, and have the `judging.timeout` of all of them"
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
        """The same reward, with whom to ask."""
        other = self.model_copy()
        other._scorer = scorer
        return other

    async def __call__(self, task: Task, answer: str) -> float:
        assert self._scorer is not None, "whoever starts a run loads its reward model"
        return await self._scorer(task, answer)
