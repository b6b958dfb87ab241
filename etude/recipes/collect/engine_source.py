"""Rollouts by an engine: one answer each, or as many turns as an environment takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from etude.observe import Metrics
from etude.recipes.collect.player import EnginePlayer, TurnSeeds, end_reason
from etude.recipes.collect.rollouts import (
    PlayedRollout,
    VersionCheck,
    WantedRollout,
    cancel_queued,
    is_outdated,
    row_of,
)
from etude.recipes.collect.sampling import derived_seed
from etude.recipes.collect.statistics import ended_attempts
from etude.records import Outcome, SamplingParams
from etude.rewards import Verdict
from etude.store import Journal, RolloutState, Status, TaskState
from etude.store.journal import events
from etude.store.queue.queue_state import INTERRUPTED

MAX_OUTDATED = 10
"""The most attempts that are made in place of those with tokens of outdated weights."""


@dataclass(slots=True)
class _Attempts:
    """The attempts at a rollout that is being made."""

    current: int = 0
    """The number of the one that runs now."""
    failed: int = 0
    """Number of those that failed by themselves: `collect.retries` limits them."""
    outdated: int = 0
    """Number of those that an engine drew with outdated weights: `MAX_OUTDATED` limits them."""
    drawn: int = 0
    """Number of attempts with their own seeds. An attempt that a stop cut off has the same seeds again."""


class EngineSource:
    """Makes rollouts with an engine. Lives in one event loop.

    Waits for the player, whose limits bound an attempt. A rollout that failed is attempted `retries` times more. One
    that a kill cut off is sampled again with the same random numbers. So is one with tokens of outdated weights.
    """

    def __init__(
        self,
        player: EnginePlayer,
        sampling: SamplingParams,
        store: Journal,
        *,
        seed: int,
        retries: int,
        code_changed: bool = False,
    ) -> None:
        """code_changed: the code of the reward or the environment changed since the run was started, so that earlier
        failures do not count."""
        self._player = player
        self._sampling = sampling
        self._store = store
        self._seed = seed
        self._retries = retries
        self._code_changed = code_changed
        self._unwritten: list[events.Event] = []
        self._written: asyncio.Future[None] | None = None
        """The write of those events; None if there are none."""
        self._versions = VersionCheck()
        self._attempts: dict[int, _Attempts] = {}

    async def start(self, wanted: Sequence[WantedRollout]) -> None:
        """Have these rollouts made: they are in the journal when this returns. Asking again does no harm."""
        new = [each for each in wanted if each.id not in self._attempts]
        rollouts = self._store.load_states(RolloutState, [each.id for each in new])
        tasks = set(self._store.load_states(TaskState, [each.task.ordinal for each in new]))
        written: list[events.Event] = []
        for each in new:
            task, state = each.task, rollouts.get(each.id)
            if task.ordinal not in tasks:
                tasks.add(task.ordinal)
                written.append(events.TaskIssued(task.ordinal, row_of(task), task.source, task.fields))
            if state is None:
                written.append(events.RolloutQueued(each.id, task.ordinal, each.sample))
            attempts = self._attempts[each.id] = self._read_attempts(state)
            written.append(events.AttemptStarted(each.id, attempts.current, at=time.time()))
        if written:
            self._store.append(written)

    async def result(self, wanted: WantedRollout) -> PlayedRollout:
        """Return the final result of a started rollout, once it is in the journal."""
        attempts, lost = self._attempts[wanted.id], list[PlayedRollout]()
        sampling = replace(self._sampling, temperature=0.0) if wanted.greedy else self._sampling
        try:
            while True:
                played = await self._player.play(wanted.task, sampling, self._seeds(wanted, attempts.drawn))
                played = self._versions.check(wanted, played)
                attempts.drawn += played.verdict.outcome not in (Outcome.SUCCEEDED, Outcome.INFRA_ERROR)
                retry = not played.succeeded and self._may_retry(attempts, played.verdict.error)
                written = self._end_events(wanted.id, attempts.current, played, retry)
                if retry:
                    attempts.current += 1
                    written.append(events.AttemptStarted(wanted.id, attempts.current, at=time.time()))
                await self._write(written)
                if not retry:
                    return replace(played, lost=tuple(lost))
                lost.append(played)
        finally:
            del self._attempts[wanted.id]

    async def _write(self, written: Sequence[events.Event]) -> None:
        """Return when these events are in the journal, which they reach even if the caller is cancelled.

        A write waits for the disk. Rollouts that end in one turn of the event loop share a transaction, and its error.
        """
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            loop.call_soon(self._write_all, self._written)
        self._unwritten += written
        await asyncio.shield(self._written)

    def _write_all(self, done: asyncio.Future[None]) -> None:
        written = self._unwritten
        self._unwritten = []
        self._written = None
        try:
            self._store.append(written)
        except Exception as error:
            done.set_exception(error)
            done.exception()  # each waiter raises it; if all were cancelled, asyncio must not report it
        else:
            done.set_result(None)

    def _may_retry(self, attempts: _Attempts, error: str) -> bool:
        """Count a failed attempt, and return whether another one follows."""
        if is_outdated(error):
            attempts.outdated += 1
            return attempts.outdated <= MAX_OUTDATED
        attempts.failed += 1
        return attempts.failed <= self._retries

    def resume(self, left: Sequence[RolloutState]) -> None:
        """End in the journal the attempts that a stop of the run cut off."""
        now = time.time()
        cut = [(state.id, len(state.attempts) - 1) for state in left if state.status is Status.RUNNING]
        if cut:
            self._store.append(
                [
                    events.AttemptEnded(id, attempt, Outcome.INFRA_ERROR, INTERRUPTED, retry=True, at=now)
                    for id, attempt in cut
                ]
            )

    async def cancel(self, ids: Sequence[int], why: str) -> None:
        """Cancel in the journal those rollouts that have not ended."""
        cancel_queued(self._store, ids, why)

    def recall(self, state: RolloutState) -> PlayedRollout | None:
        """Return how a rollout ended, by the journal; None if it must be started again."""
        return recall_rollout(self._store, state)

    def pop_metrics(self) -> Metrics:
        """Return no metrics: the engine has its own."""
        return Metrics()

    def _read_attempts(self, state: RolloutState | None) -> _Attempts:
        """Return the attempts that the journal has of a rollout."""
        if state is None:
            return _Attempts()
        drawn = [attempt for attempt in state.attempts if attempt.status not in (Status.RUNNING, Status.INFRA_ERROR)]
        outdated = sum(is_outdated(attempt.error) for attempt in state.attempts)
        failed = 0 if self._code_changed else len(ended_attempts(state)) - outdated
        return _Attempts(len(state.attempts), failed, outdated, len(drawn))

    def _seeds(self, wanted: WantedRollout, drawn: int) -> TurnSeeds:
        def seed(turn: int) -> int:  # the seed of the first turn is the same with and without later turns
            task = wanted.task.ordinal
            return derived_seed(self._seed, "train", task, wanted.sample, drawn, *([turn] if turn else []))

        return seed

    def _end_events(self, id: int, attempt: int, played: PlayedRollout, retry: bool) -> list[events.Event]:
        verdict, now = played.verdict, time.time()
        times = zip(played.turns, chain(played.times, repeat((0.0, now))), strict=False)
        written: list[events.Event] = [
            events.TurnRecorded(id, attempt, turn, ended, began) for turn, (began, ended) in times
        ]
        if played.succeeded:
            written.append(
                events.AttemptRewarded(
                    id,
                    attempt,
                    verdict.reward,
                    verdict.parts,
                    truncated=played.truncated,
                    paid=played.turn_rewards,
                    role=played.role,
                )
            )
        return [*written, events.AttemptEnded(id, attempt, verdict.outcome, verdict.error, retry, at=now)]


def recall_rollout(store: Journal, state: RolloutState) -> PlayedRollout | None:
    """Return how a rollout by an engine ended, by the journal; None if it has not ended."""
    last = state.last
    if last is None or state.status in (Status.QUEUED, Status.RUNNING):
        return None
    turns = tuple(store.turns(state.id))
    if last.reward is None:
        verdict = Verdict.failure(Outcome(state.status.value), last.error)
    else:
        verdict = Verdict(last.reward, last.parts, error=last.error)
    return PlayedRollout(turns, verdict, last.truncated, end_reason(turns, last.truncated, None), last.role)
