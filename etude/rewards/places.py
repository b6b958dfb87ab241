"""Where a reward is computed: in place, on a thread or in processes beside the run, or part by part.

A place turns one call into a verdict, whatever the call does, and within its limit.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, cast

from etude.errors import ConfigError
from etude.observe import Metrics
from etude.records import Outcome, Task
from etude.rewards.base import RewardFunction, named
from etude.rewards.combined import Combined
from etude.rewards.function import Adapted
from etude.rewards.seats import Pool, ProcessSeat, Seat, ThreadSeat
from etude.rewards.verdict import Verdict, extracted_by, failed, too_long, verdict_of

__all__ = ["Place", "place_of"]

HELD_UP = 1.0
"""Seconds that a call waits for a seat before it is looked whether the others hang, so that one may be added."""
MOST_THREADS = 16
"""Calls of a function at a time on threads, where all but one hang."""
Judged: TypeAlias = RewardFunction | Adapted


class Place(ABC):
    """Somewhere a reward is computed. Any number of calls may be under way."""

    one_by_one = False
    """Whether it judges one answer at a time, though it might judge several."""

    @abstractmethod
    async def verdict(self, task: Task, answer: str) -> Verdict:
        """What this answer earns, or why there is no telling."""

    def spent(self) -> Metrics:
        """What its calls have cost since this was last asked."""
        return Metrics()

    def close(self) -> None:  # noqa: B027
        """End its threads and processes, where it has any."""


def place_of(reward: Judged, workers: int | None, limit: float) -> Place:
    """The place that a reward needs. workers: processes for it, where the run says so. limit: seconds of one call."""
    if isinstance(reward, Combined):
        return _open_parts(reward, workers, limit)
    if isinstance(reward, RewardFunction) and reward.in_place:
        _agree(reward, workers, limit)
        return _InPlace(reward, limit)
    processes = reward.processes if workers is None else workers
    if processes:
        payload = _payload(reward, limit)
        return _InPool(Pool(processes, lambda: ProcessSeat(payload, limit), reward.title))
    if reward.quick or reward.waits:
        return _InPlace(reward, limit)

    def open_seat() -> Seat:
        return ThreadSeat(reward, reward.title, limit)

    most = MOST_THREADS if workers is None else 1
    return _InPool(Pool(1, open_seat, reward.title, most), one_by_one=workers is None)


class _InPlace(Place):
    """Called where it is, and awaited where it waits."""

    def __init__(self, reward: Judged, limit: float) -> None:
        self._reward, self._limit = reward, limit

    async def verdict(self, task: Task, answer: str) -> Verdict:
        title, limit = self._reward.title, self._limit
        together = self._reward.together if isinstance(self._reward, RewardFunction) else 1
        bound = asyncio.timeout(None)
        began = time.perf_counter()
        try:
            async with self._line():
                began = time.perf_counter()
                async with bound:
                    bound.reschedule(asyncio.get_running_loop().time() + limit * together)
                    result = self._reward(task, answer)
                    if self._reward.waits:
                        result = await cast(Awaitable[Any], result)
                    extracted = extracted_by(self._reward, answer)
        except (Exception, SystemExit) as error:
            seconds = time.perf_counter() - began
            if bound.expired():
                told = f"The reward {title} {too_long(limit, together)} on {named(task)}."
                return Verdict.failure(Outcome.TIMED_OUT, told, seconds)
            return failed(error, title, task, seconds)
        return verdict_of(result, title, task, time.perf_counter() - began, extracted)

    def spent(self) -> Metrics:
        return self._reward.spent() if isinstance(self._reward, RewardFunction) else Metrics()

    def _line(self) -> AbstractAsyncContextManager[Any]:
        return self._reward.line() if isinstance(self._reward, RewardFunction) else nullcontext()


class _InPool(Place):
    """Called at one of a few seats."""

    def __init__(self, pool: Pool, *, one_by_one: bool = False) -> None:
        self._pool, self.one_by_one = pool, one_by_one

    async def verdict(self, task: Task, answer: str) -> Verdict:
        call = self._pool.submit(task, answer)
        future = asyncio.wrap_future(call)
        try:
            while not call.running() and not future.done():
                await asyncio.wait([future], timeout=HELD_UP)
                if not call.running() and not future.done():
                    self._pool.widen()
            return await future
        finally:
            future.cancel()

    def close(self) -> None:
        self._pool.close()


class _InParts(Place):
    """Several rewards, each in its own place, judged at the same time."""

    def __init__(self, reward: Combined, places: Mapping[str, Place]) -> None:
        self._reward, self._places = reward, places
        self.one_by_one = any(place.one_by_one for place in places.values())

    async def verdict(self, task: Task, answer: str) -> Verdict:
        asked = [asyncio.ensure_future(place.verdict(task, answer)) for place in self._places.values()]
        try:
            found = dict(zip(self._places, await asyncio.gather(*asked), strict=True))
        finally:
            for each in asked:
                each.cancel()
        seconds = max(verdict.seconds for verdict in found.values())
        lost = {name: verdict for name, verdict in found.items() if verdict.outcome is not Outcome.SUCCEEDED}
        if lost:
            name = next((name for name in lost if lost[name].outcome is Outcome.CANCELLED), next(iter(lost)))
            told = f"{lost[name].error} It is the part `{name}` of the reward."
            return replace(lost[name], error=told, seconds=seconds, part=name)
        parts = {name: self._reward.weighed(name, verdict.reward) for name, verdict in found.items()}
        said = next((verdict.extracted for verdict in found.values() if verdict.extracted is not None), None)
        return verdict_of(parts, self._reward.title, task, seconds, said)

    def spent(self) -> Metrics:
        metrics = Metrics()
        for place in self._places.values():
            metrics.merge(place.spent())
        return metrics

    def close(self) -> None:
        for place in self._places.values():
            place.close()


def _open_parts(reward: Combined, workers: int | None, limit: float) -> Place:
    """A place for each part. `workers` are for those that can use them, and there must be one."""
    if workers and all(part.in_place for part in reward.parts.values()):
        _agree(next(iter(reward.parts.values())), workers, limit)
    places: dict[str, Place] = {}
    try:
        for name, part in reward.parts.items():
            places[name] = place_of(part, None if part.in_place else workers, limit)
    except BaseException:
        for place in places.values():
            place.close()
        raise
    return _InParts(reward, places)


def _agree(reward: RewardFunction, workers: int | None, limit: float) -> None:
    """Refuse what a reward that keeps order among its own calls cannot have."""
    if workers:
        raise ConfigError(
            f"`judging.workers={workers}` judges in processes, and the reward {reward.title} keeps order among its own "
            f"calls, which takes one. Leave `judging.workers` out; `reward.at_once` says how many run side by side."
        )
    if reward.bound >= limit:
        raise ConfigError(
            f"The reward {reward.title} may take {reward.bound:g} seconds for an answer (`reward.total`), and "
            f"`judging.timeout` is {limit:g}. Set `judging.timeout` above {reward.bound:g}."
        )


def _payload(reward: Judged, limit: float) -> bytes:
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
