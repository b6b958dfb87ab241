"""The judge, which turns a run's answers into rewards and contains every failure of the reward function.

    with Judge(run.reward, run.judging) as judge:
        verdict = await judge.judge(task, answer)

The judge calls quick rewards in place and awaits coroutine functions in place, many at a time. It runs any other
function outside the event loop. On a thread, a call that hangs does not block the others. In worker processes, the
reward or `JudgingConfig.workers` sets their number. Each part of a combined reward has a separate executor
(`etude.rewards.executors`).

An exception, a call that takes too long, a process that dies, a NaN: each is a verdict without a reward.
`JudgingConfig.on_error` decides what happens to it. The judge logs the first failures at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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

MAX_CONSECUTIVE_FAILURES = 64
"""The failures in a row that stop the run: then the reward function is broken, not the answers."""


class JudgingConfig(Config):
    """Options of the computation of rewards, and of answers that could not be judged."""

    workers: int | None = Field(
        None,
        ge=0,
        description="processes that judge; more judge more answers at once, 0 judges one at a time without processes; "
        "null is the reward's default (2 for math and regex)",
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="seconds of judging one answer, without its wait for a worker; larger lets slow rewards finish, "
        "smaller ends hung calls sooner",
    )
    on_error: Literal["drop", "score", "stop"] = Field(
        "drop",
        description="an answer that could not be judged: `drop` leaves it out, `score` gives it `error_score`, `stop` "
        "stops the run",
    )
    error_score: float | None = Field(
        None, allow_inf_nan=False, description="reward of an answer that could not be judged, for on_error=score"
    )

    @model_validator(mode="after")
    def _score_belongs_to_its_policy(self) -> JudgingConfig:
        if (self.on_error == "score") != (self.error_score is not None):
            raise ConfigError(
                "`judging.on_error=score` and `judging.error_score` belong together: set both, or neither."
            )
        return self


class Judge:
    """Scores answers with one reward function. Any number of calls may run at once, in any event loop.

    Consumes tasks and answers; produces verdicts; waits for a free worker and for the function.
    `JudgingConfig.timeout` limits each call. It cannot end a function that blocks its event loop, or that holds the
    interpreter lock on a thread. Give such a function `workers`.
    """

    def __init__(self, reward: RewardFunction | Callable[..., Any], judging: JudgingConfig | None = None) -> None:
        judged = reward if isinstance(reward, RewardFunction) else FunctionAdapter(reward)
        self._judging = judging or JudgingConfig()
        self._reward, self._failures, self._failed = judged, 0, 0
        judged.prepare()
        self._executor = make_executor(judged, self._judging.workers, self._judging.timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def one_by_one(self) -> bool:
        """True where it judges one answer at a time, though `judging.workers` would let it judge several."""
        return self._executor.one_by_one

    @property
    def scores_answers(self) -> bool:
        """False where all reward comes from the environment and none from the answer's text."""
        return self._reward.scores_answers

    @property
    def has_reward(self) -> bool:
        """False for a run without a reward."""
        return not isinstance(self._reward, NoReward)

    async def judge(self, task: Task, answer: str) -> Verdict:
        """Judge one answer. Raises `RewardError` where a failure stops the run."""
        return self._apply_error_policy(await self._executor.run(task, answer))

    def pop_metrics(self) -> Metrics:
        """Return the cost of judging since the last `pop_metrics`, if the reward counts any."""
        return self._executor.pop_metrics()

    def close(self) -> None:
        """End its threads and processes."""
        self._executor.close()

    def _apply_error_policy(self, verdict: Verdict) -> Verdict:
        """Apply `JudgingConfig.on_error` to a verdict: a failure stays, gets a score, or stops the run."""
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
