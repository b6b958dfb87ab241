"""The judge: where a run's answers become rewards, whatever the reward function does.

    with Judge(run.reward, run.judging) as judge:
        verdict = await judge.judge(task, answer)

Quick rewards are called in place. Coroutine functions are awaited in place, many at a time. Any other function runs
beside the run: on a thread, or in processes, as many as it asks for or as `Judging.workers` says. An exception, a call
that takes too long, a process that dies, a NaN: each is a verdict without a reward, and `Judging.on_error` says what
becomes of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from etude.config import Config
from etude.errors import ConfigError, RewardError
from etude.records import Outcome, Task
from etude.rewards.base import RewardFunction, named
from etude.rewards.function import Adapted
from etude.rewards.nothing import Nothing
from etude.rewards.seats import Pool, ProcessSeat, Seat, ThreadSeat
from etude.rewards.verdict import Verdict, extracted_by, failed, too_long, verdict_of

__all__ = ["Judge", "Judging"]

HOPELESS = 64
"""After so many failures in a row it is the reward function that is broken, not the answers, and the run stops."""


class Judging(Config):
    """How rewards are computed, and what becomes of an answer that could not be judged."""

    workers: int | None = Field(
        None, ge=0, description="processes that judge; 0 is none; null leaves it to the reward (2 for math and regex)"
    )
    timeout: float = Field(30.0, gt=0, description="seconds one answer may take, its wait for a worker not counted")
    on_error: Literal["drop", "score", "stop"] = Field(
        "drop", description="an answer that could not be judged is left out, gets `error_score`, or stops the run"
    )
    error_score: float | None = Field(
        None, allow_inf_nan=False, description="the reward of an answer that could not be judged, for on_error=score"
    )

    @model_validator(mode="after")
    def _score_belongs_to_its_policy(self) -> Judging:
        if (self.on_error == "score") != (self.error_score is not None):
            raise ConfigError(
                "`judging.on_error=score` and `judging.error_score` belong together: set both, or neither."
            )
        return self


class Judge:
    """Scores answers by one reward function. Any number of calls may be under way at once, in any event loop.

    Consumes tasks and answers; produces verdicts; waits for a free worker and for the function, each call of which is
    bounded by `Judging.timeout`. A function that blocks its event loop, or that holds the interpreter on a thread, is
    beyond that bound: give it `workers`.
    """

    def __init__(self, reward: RewardFunction | Callable[..., Any], judging: Judging | None = None) -> None:
        self._reward = reward if isinstance(reward, RewardFunction) else Adapted(reward)
        self._reward.prepare()
        self._judging = judging or Judging()
        self._failures = 0
        workers = self._judging.workers
        self._pool = self._opened(self._reward.processes if workers is None else workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def one_by_one(self) -> bool:
        """Whether it judges one answer at a time, though it might judge several."""
        return self._pool is not None and self._judging.workers is None and not self._reward.processes

    @property
    def judges(self) -> bool:
        """Whether its reward says anything of an answer, and does not leave all to the environment."""
        return self._reward.judges

    @property
    def pays(self) -> bool:
        """Whether there is anything to earn."""
        return not isinstance(self._reward, Nothing)

    async def judge(self, task: Task, answer: str) -> Verdict:
        """What this answer earns. Raises `RewardError` where a failure stops the run."""
        if self._pool is not None:
            return self._settled(await asyncio.wrap_future(self._pool.submit(task, answer)))
        return self._settled(await self._in_place(task, answer))

    def close(self) -> None:
        """End its threads and processes."""
        if self._pool is not None:
            self._pool.close()

    def _opened(self, processes: int) -> Pool | None:
        """The pool that the reward needs; None where it is called in place."""
        reward, title, limit = self._reward, self._reward.title, self._judging.timeout
        if processes:
            payload = _payload(reward, limit)
            return Pool(processes, lambda: ProcessSeat(payload, limit), title)
        if reward.quick or reward.waits:
            return None

        def open_seat() -> Seat:
            return ThreadSeat(reward, title, limit)

        return Pool(1, open_seat, title)

    async def _in_place(self, task: Task, answer: str) -> Verdict:
        began, title, limit = time.perf_counter(), self._reward.title, self._judging.timeout
        bound = asyncio.timeout(limit)
        try:
            async with bound:
                result = self._reward(task, answer)
                if self._reward.waits:
                    result = await cast(Awaitable[Any], result)
                extracted = extracted_by(self._reward, answer)
        except (Exception, SystemExit) as error:
            seconds = time.perf_counter() - began
            if bound.expired():
                told = f"The reward {title} {too_long(limit)} on {named(task)}."
                return Verdict.failure(Outcome.TIMED_OUT, told, seconds)
            return failed(error, title, task, seconds)
        return verdict_of(result, title, task, time.perf_counter() - began, extracted)

    def _settled(self, verdict: Verdict) -> Verdict:
        """What becomes of a verdict by the policy on failures."""
        if verdict.outcome is Outcome.SUCCEEDED:
            self._failures = 0
            return verdict
        if verdict.outcome is Outcome.CANCELLED:
            return verdict
        self._failures += 1
        if self._judging.on_error == "stop":
            raise RewardError(f"{verdict.error} The run stops here because `judging.on_error` is stop.")
        if self._failures >= HOPELESS:
            raise RewardError(f"{verdict.error} That was failure {HOPELESS} in a row, so the run stops here.")
        if self._judging.error_score is None:
            return verdict
        return dataclasses.replace(verdict, reward=self._judging.error_score, outcome=Outcome.SUCCEEDED)


def _payload(reward: RewardFunction | Adapted, limit: float) -> bytes:
    """What a process is told first; refuses what another process could not find again."""
    target = reward.function if isinstance(reward, Adapted) else type(reward)
    remedy = "Put it in a file and name it as path/to/file.py:name, or set `judging.workers` to 0."
    if getattr(target, "__module__", "") == "__main__":
        raise ConfigError(
            f"The reward {reward.title} is defined in the script that was started, where processes that judge cannot "
            f"find it. {remedy}"
        )
    try:
        return pickle.dumps((reward, limit))
    except Exception as error:  # pickling raises what it likes
        raise ConfigError(f"The reward {reward.title} cannot be sent to another process: {error}. {remedy}") from error
