"""The judge: where a run's answers become rewards, whatever the reward function does.

    with Judge(run.reward, run.judging) as judge:
        verdict = await judge.judge(task, answer)

Quick rewards are called in place. Coroutine functions are awaited in place, many at a time. Any other function runs
beside the run: on a thread, where one call that hangs does not hold up the others, or in processes, as many as it asks
for or as `JudgingConfig.workers` says. The parts of a combined reward have a place each (`etude.rewards.executors`). An
exception, a call that takes too long, a process that dies, a NaN: each is a verdict without a reward, and
`JudgingConfig.on_error` says what becomes of it. The first of them are told at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from etude.config import Config
from etude.errors import ConfigError, RewardError
from etude.observe import Metrics, get_logger
from etude.records import Outcome, Task
from etude.rewards.base import RewardFunction
from etude.rewards.executors import make_executor
from etude.rewards.function import FunctionAdapter
from etude.rewards.no_reward import NoReward
from etude.rewards.verdict import Verdict

__all__ = ["Judge", "JudgingConfig"]

MAX_CONSECUTIVE_FAILURES = 64
"""After so many failures in a row it is the reward function that is broken, not the answers, and the run stops."""


class JudgingConfig(Config):
    """How rewards are computed, and what becomes of an answer that could not be judged."""

    workers: int | None = Field(
        None,
        ge=0,
        description="processes that judge; 0 is none, and one call at a time; null leaves it to the reward (2 for math "
        "and regex)",
    )
    timeout: float = Field(30.0, gt=0, description="seconds one answer may take, its wait for a worker not counted")
    on_error: Literal["drop", "score", "stop"] = Field(
        "drop", description="an answer that could not be judged is left out, gets `error_score`, or stops the run"
    )
    error_score: float | None = Field(
        None, allow_inf_nan=False, description="the reward of an answer that could not be judged, for on_error=score"
    )

    @model_validator(mode="after")
    def _score_belongs_to_its_policy(self) -> JudgingConfig:
        if (self.on_error == "score") != (self.error_score is not None):
            raise ConfigError(
                "`judging.on_error=score` and `judging.error_score` belong together: set both, or neither."
            )
        return self


class Judge:
    """Scores answers by one reward function. Any number of calls may be under way at once, in any event loop.

    Consumes tasks and answers; produces verdicts; waits for a free worker and for the function, each call of which is
    bounded by `JudgingConfig.timeout`. A function that blocks its event loop, or that holds the interpreter on a
    thread, is beyond that bound: give it `workers`.
    """

    def __init__(self, reward: RewardFunction | Callable[..., Any], judging: JudgingConfig | None = None) -> None:
        judged = reward if isinstance(reward, RewardFunction) else FunctionAdapter(reward)
        self._judging = judging or JudgingConfig()
        self._reward, self._failures, self._failed = judged, 0, 0
        judged.prepare()
        self._executor = make_executor(judged, self._judging.workers, self._judging.timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def one_by_one(self) -> bool:
        """Whether it judges one answer at a time, though it might judge several."""
        return self._executor.one_by_one

    @property
    def scores_answers(self) -> bool:
        """Whether its reward says anything of an answer, and does not leave all to the environment."""
        return self._reward.scores_answers

    @property
    def has_reward(self) -> bool:
        """Whether there is anything to earn."""
        return not isinstance(self._reward, NoReward)

    async def judge(self, task: Task, answer: str) -> Verdict:
        """What this answer earns. Raises `RewardError` where a failure stops the run."""
        return self._apply_error_policy(await self._executor.run(task, answer))

    def pop_metrics(self) -> Metrics:
        """What judging has cost since this was last asked, where it costs anything that is counted."""
        return self._executor.pop_metrics()

    def close(self) -> None:
        """End its threads and processes."""
        self._executor.close()

    def _apply_error_policy(self, verdict: Verdict) -> Verdict:
        """What becomes of a verdict by the policy on failures."""
        if verdict.outcome is Outcome.SUCCEEDED:
            self._failures = 0
            return verdict
        if verdict.outcome is Outcome.CANCELLED:
            return verdict
        self._failures += 1
        self._failed += 1
        if self._judging.on_error == "stop":
            raise RewardError(f"{verdict.error} The run stops here because `judging.on_error` is stop.")
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise RewardError(
                f"{verdict.error} That was failure {MAX_CONSECUTIVE_FAILURES} in a row, so the run stops here."
            )
        if self._failed.bit_count() == 1:  # 1, 2, 4, 8 …
            get_logger("rewards").warning(
                "%s So far %s could not be judged; %d failures in a row stop the run.",
                *(
                    verdict.error,
                    "1 answer" if self._failed == 1 else f"{self._failed} answers",
                    MAX_CONSECUTIVE_FAILURES,
                ),
            )
        if self._judging.error_score is None:
            return verdict
        return dataclasses.replace(verdict, reward=self._judging.error_score, outcome=Outcome.SUCCEEDED)
