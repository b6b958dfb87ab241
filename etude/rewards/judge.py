"""The judge, which turns a run's answers into rewards and contains every failure of the reward function.

    with Judge(run.reward, run.judging) as judge:
        verdict = await judge.judge(task, answer)

The judge calls quick rewards in place and awaits coroutine functions in place, many at a time. It runs any other
function outside the event loop. On a thread, a call that hangs does not block the others. In worker processes, the
reward or `JudgingConfig.workers` sets their number. Each part of a combined reward has a separate executor, and so
has the reward of each data source.

An exception, a call that takes too long, a process that dies, a NaN: each is a verdict without a reward.
`JudgingConfig.on_error` decides what happens to it. The judge logs the first failure of each cause at once.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import Field, model_validator

from etude.call_task import CallTask, TimeLimitError
from etude.config import Config
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import ConfigError, RewardError
from etude.observe import Metrics, get_logger
from etude.records import Outcome, Task
from etude.rewards.base import RewardFunction, describe_task
from etude.rewards.by_source import BySourceReward
from etude.rewards.combined import CombinedReward
from etude.rewards.constant import NoReward
from etude.rewards.function import FunctionAdapter
from etude.rewards.verdict import Verdict, describe_timeout, extract_answer, make_failed_verdict, make_verdict
from etude.rewards.worker_pool import ProcessWorker, ThreadWorker, Worker, WorkerPool

MAX_CONSECUTIVE_FAILURES = 64
"""The failures in a row that stop the run: then the reward function is broken, not the answers."""
QUEUE_CHECK_INTERVAL_S = 1.0
"""Seconds that a call waits for a worker before the executor checks whether all workers hang and adds one."""
MAX_THREADS = 16
"""The most threads of a function, when all threads but one hang."""
AnyReward: TypeAlias = RewardFunction | FunctionAdapter


class JudgingConfig(Config):
    """Options of the computation of rewards, and of answers that could not be judged."""

    workers: Annotated[int | None, MAY_CHANGE] = Field(
        None,
        ge=0,
        description="processes that judge; more judge more answers at once, 0 judges one at a time without processes; "
        "null is the reward's default (2 for math and regex)",
    )
    timeout: Annotated[float, MAY_CHANGE] = Field(
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
        self._reward = judged
        self._failures = 0
        self._logged_causes: set[str] = set()
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

    def scores(self, task: Task) -> bool:
        """Return False for a task whose whole reward comes from the environment and none from the answer's text."""
        return not isinstance(self._reward, RewardFunction) or self._reward.of_task(task).scores_answers

    @property
    def has_reward(self) -> bool:
        """False for a run without a reward."""
        return not isinstance(self._reward, NoReward)

    async def judge(self, task: Task, answer: str) -> Verdict:
        """Judge one answer. A failure stays, gets a score, or stops the run, by `JudgingConfig.on_error`.

        Raises `RewardError` where it stops the run.
        """
        verdict = await self._executor.run(task, answer)
        if verdict.outcome is Outcome.SUCCEEDED:
            self._failures = 0
            return verdict
        if verdict.outcome is Outcome.CANCELLED:
            return verdict
        self._failures += 1
        if self._judging.on_error == "stop":
            raise RewardError(f"{verdict.error} The run stops here because `judging.on_error` is stop.")
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise RewardError(
                f"{verdict.error} That was failure {MAX_CONSECUTIVE_FAILURES} in a row, so the run stops here."
            )
        if verdict.cause not in self._logged_causes:
            self._logged_causes.add(verdict.cause)
            get_logger("rewards").warning(
                "%s This is logged once, and answers that fail like it are only counted. Correct the reward, or choose "
                "what such answers get by `judging.on_error`. %d failures in a row stop the run.",
                verdict.error,
                MAX_CONSECUTIVE_FAILURES,
            )
        if self._judging.error_score is None:
            return verdict
        return replace(verdict, reward=self._judging.error_score, outcome=Outcome.SUCCEEDED)

    def pop_metrics(self) -> Metrics:
        """Return the cost of judging since the last `pop_metrics`, if the reward counts any."""
        return self._executor.pop_metrics()

    def close(self) -> None:
        """End its threads and processes."""
        self._executor.close()


# -- executors -------------------------------------------------------------------------------------------------------


class RewardExecutor(ABC):
    """Runs the calls of one reward. Any number of calls may run at once."""

    one_by_one = False
    """True where it judges one answer at a time, though `judging.workers` would let it judge several."""

    @abstractmethod
    async def run(self, task: Task, answer: str) -> Verdict:
        """Judge one answer. A failure is a verdict too."""

    def pop_metrics(self) -> Metrics:
        """Return the cost of its calls since the last `pop_metrics`."""
        return Metrics()

    def close(self) -> None:  # noqa: B027
        """End its threads and processes, if it has any."""


def make_executor(reward: AnyReward, workers: int | None, limit: float) -> RewardExecutor:
    """Create the executor for a reward.

    workers: the number of processes, or None for the reward's default. limit: the seconds of one call.
    """
    if isinstance(reward, CombinedReward):
        return _CombinedExecutor(reward, _make_member_executors(reward, workers, limit))
    if isinstance(reward, BySourceReward):
        return _BySourceExecutor(reward, _make_member_executors(reward, workers, limit))
    if isinstance(reward, RewardFunction) and reward.in_place:
        _check_inline_options(reward, workers, limit)
        return _InlineExecutor(reward, limit)
    processes = reward.default_workers if workers is None else workers
    if processes:
        payload = _pickle_reward(reward, limit)
        return _PoolExecutor(WorkerPool(processes, lambda: ProcessWorker(payload, limit), reward.title))
    if reward.quick or reward.is_async:
        return _InlineExecutor(reward, limit)

    def start_thread() -> Worker:
        return ThreadWorker(reward, reward.title, limit)

    max_threads = MAX_THREADS if workers is None else 1
    return _PoolExecutor(WorkerPool(1, start_thread, reward.title, max_threads), one_by_one=workers is None)


class _InlineExecutor(RewardExecutor):
    """Calls the reward in the event loop, and awaits it if it is a coroutine function."""

    def __init__(self, reward: AnyReward, limit: float) -> None:
        self._reward = reward
        self._limit = limit

    async def run(self, task: Task, answer: str) -> Verdict:
        title, limit = self._reward.title, self._limit
        batch_size = self._reward.max_batch_size if isinstance(self._reward, RewardFunction) else 1
        began = time.perf_counter()
        try:
            async with self._throttle():
                began = time.perf_counter()
                if self._reward.is_async:
                    call = cast(Callable[[], Awaitable[Any]], partial(self._reward, task, answer))
                    with CallTask(f"The reward {title}") as calls:
                        result = await calls.call(call, limit * batch_size)
                else:
                    result = self._reward(task, answer)
                extracted = extract_answer(self._reward, answer)
        except TimeLimitError:
            message = f"The reward {title} {describe_timeout(limit, batch_size)} on {describe_task(task)}."
            return Verdict.failure(Outcome.TIMED_OUT, message, time.perf_counter() - began, f"{title} timed out")
        except (Exception, SystemExit) as error:
            return make_failed_verdict(error, title, task, time.perf_counter() - began)
        return make_verdict(result, title, task, time.perf_counter() - began, extracted)

    def pop_metrics(self) -> Metrics:
        return self._reward.pop_metrics() if isinstance(self._reward, RewardFunction) else Metrics()

    def _throttle(self) -> AbstractAsyncContextManager[Any]:
        return self._reward.throttle() if isinstance(self._reward, RewardFunction) else nullcontext()


class _PoolExecutor(RewardExecutor):
    """Calls the reward on one of the workers of a pool."""

    def __init__(self, pool: WorkerPool, *, one_by_one: bool = False) -> None:
        self._pool = pool
        self.one_by_one = one_by_one

    async def run(self, task: Task, answer: str) -> Verdict:
        call = self._pool.submit(task, answer)
        future = asyncio.wrap_future(call)
        try:
            while not call.running() and not future.done():
                await asyncio.wait([future], timeout=QUEUE_CHECK_INTERVAL_S)
                if not call.running() and not future.done():
                    self._pool.add_worker_if_hung()
            return await future
        finally:
            future.cancel()

    def close(self) -> None:
        self._pool.close()


class _MemberExecutors(RewardExecutor):
    """The executors of the members of a reward, by name."""

    def __init__(self, executors: Mapping[str, RewardExecutor]) -> None:
        self._executors = executors
        self.one_by_one = any(executor.one_by_one for executor in executors.values())

    def pop_metrics(self) -> Metrics:
        metrics = Metrics()
        for executor in self._executors.values():
            metrics.merge(executor.pop_metrics())
        return metrics

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()


class _BySourceExecutor(_MemberExecutors):
    """Judges each answer by the reward of its task's data source."""

    def __init__(self, reward: BySourceReward, executors: Mapping[str, RewardExecutor]) -> None:
        super().__init__(executors)
        self._reward = reward

    async def run(self, task: Task, answer: str) -> Verdict:
        self._reward.of_task(task)  # refuses a source without a reward
        return await self._executors[task.source].run(task, answer)


class _CombinedExecutor(_MemberExecutors):
    """Judges the parts of a combined reward at the same time, each on its own executor."""

    def __init__(self, reward: CombinedReward, executors: Mapping[str, RewardExecutor]) -> None:
        super().__init__(executors)
        self._reward = reward

    async def run(self, task: Task, answer: str) -> Verdict:
        calls = [asyncio.ensure_future(executor.run(task, answer)) for executor in self._executors.values()]
        try:
            verdicts = dict(zip(self._executors, await asyncio.gather(*calls), strict=True))
        finally:
            for call in calls:
                call.cancel()
        seconds = max(verdict.seconds for verdict in verdicts.values())
        failed = {name: verdict for name, verdict in verdicts.items() if verdict.outcome is not Outcome.SUCCEEDED}
        if failed:
            name = next((name for name in failed if failed[name].outcome is Outcome.CANCELLED), next(iter(failed)))
            message = f"{failed[name].error} It is the part `{name}` of the reward."
            return replace(failed[name], error=message, seconds=seconds, failed_part=name)
        parts = {name: self._reward.apply_weight(name, verdict.reward) for name, verdict in verdicts.items()}
        extracted = next(
            (verdict.extracted_answer for verdict in verdicts.values() if verdict.extracted_answer is not None), None
        )
        return make_verdict(parts, self._reward.title, task, seconds, extracted)


def _make_member_executors(reward: RewardFunction, workers: int | None, limit: float) -> dict[str, RewardExecutor]:
    """Create an executor for each member. The members that can use `workers` get them; at least one must."""
    members = reward.members()
    if workers and all(member.in_place for member in members.values()):
        _check_inline_options(next(iter(members.values())), workers, limit)
    executors: dict[str, RewardExecutor] = {}
    try:
        for name, member in members.items():
            executors[name] = make_executor(member, None if member.in_place else workers, limit)
    except BaseException:
        for executor in executors.values():
            executor.close()
        raise
    return executors


def _check_inline_options(reward: RewardFunction, workers: int | None, limit: float) -> None:
    """Refuse worker processes and a too short timeout for a reward that must run in the run's own process."""
    if workers:
        raise ConfigError(
            f"`judging.workers={workers}` judges in several processes, and the reward {reward.title} must order its "
            "own calls in one process. Leave `judging.workers` out; `reward.max_concurrency` sets how many calls run "
            "at once."
        )
    if reward.max_seconds >= limit:
        raise ConfigError(
            f"The reward {reward.title} may take {reward.max_seconds:g} seconds for an answer "
            f"(`reward.total_timeout`), and `judging.timeout` is {limit:g}. Set `judging.timeout` above "
            f"{reward.max_seconds:g}."
        )


def _pickle_reward(reward: AnyReward, limit: float) -> bytes:
    """Return the first message to a worker process; refuse a reward that another process cannot import."""
    target = reward.function if isinstance(reward, FunctionAdapter) else type(reward)
    remedy = "Put it in a file and name it as path/to/file.py:name, or set `judging.workers` to 0."
    if getattr(target, "__module__", "") == "__main__":
        raise ConfigError(
            f"The reward {reward.title} is defined in the script that was started, which worker processes cannot "
            f"import. {remedy}"
        )
    try:
        return pickle.dumps((reward, limit))
    except Exception as error:  # pickling may raise any exception
        raise ConfigError(f"The reward {reward.title} cannot be sent to another process: {error}. {remedy}") from error
