"""Rollouts by an engine: one answer each, or as many turns as an environment takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from etude.errors import CollectionError
from etude.observe import Metrics
from etude.recipes.collect.engine_runner import EngineRunner
from etude.recipes.collect.player import EnginePlayer, end_reason
from etude.recipes.collect.rollouts import PlayedRollout, WantedRollout
from etude.records import Outcome, SamplingParams
from etude.rewards import Verdict
from etude.store import Journal, RolloutState, Status
from etude.store.queue.checks import limits_of
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits, RolloutPurpose, RolloutRequest


class EngineSource:
    """Requests rollouts from the run's rollout queue, has its own runner play them, and returns how each ended. Lives
    in one event loop.

    The queue repeats what failed, what a kill cut off, and what was drawn with outdated weights. Waits for the player,
    whose limits bound an attempt.
    """

    def __init__(
        self,
        queue: LocalRolloutQueue,
        players: Mapping[RolloutPurpose, tuple[EnginePlayer, SamplingParams]],
        *,
        seed: int,
        retries: int,
        code_changed: bool = False,
    ) -> None:
        """queue: that the run owns. players: makes the attempts for each use, with these sampling parameters. retries:
        further attempts at a rollout for training that failed; one that scores the model is attempted once.
        code_changed: the code of the reward or the environment changed since the run was started, so that earlier
        failures do not count."""
        self._queue = queue
        self._players = players
        self._limits: dict[RolloutPurpose, RolloutLimits] = {
            "train": RolloutLimits(timeout_s=None, max_attempts=1 + retries),
            "val": RolloutLimits(timeout_s=None, max_attempts=1),
        }
        self._code_changed = code_changed
        self._runner = EngineRunner(queue, players, seed, self._on_end)
        self._running: asyncio.Task[None] | None = None
        self._stopped: BaseException | None = None
        """The error that ended the runner; None while it makes rollouts."""
        self._pending: dict[int, asyncio.Future[PlayedRollout]] = {}
        self._lost: dict[int, list[PlayedRollout]] = {}
        """The attempts at each pending rollout that failed in this process."""

    async def start(self, wanted: Sequence[WantedRollout], use: RolloutPurpose = "train") -> None:
        """Have these rollouts made: they are in the journal when this returns. Asking again does no harm."""
        loop = asyncio.get_running_loop()
        for each in wanted:
            self._pending.setdefault(each.id, loop.create_future())
        known = self._queue.journal.load_states(RolloutState, [each.id for each in wanted])
        requests = [
            RolloutRequest(
                each.task,
                each.sample,
                each.id,
                use,
                limits_of(known[each.id]) if each.id in known else self._limits[use],
                greedy=each.greedy,
                floor=each.floor,
                forgive=self._code_changed,
            )
            for each in wanted
        ]
        await self._queue.enqueue(requests)
        for state in known.values():  # of an evaluation that a stop cut off
            if (played := self.recall(state)) is not None and not self._pending[state.id].done():
                self._pending[state.id].set_result(played)
        if self._running is None:
            self._running = asyncio.create_task(self._runner.run())
            self._running.add_done_callback(self._on_stop)
        elif self._stopped is not None:
            raise self._stopped

    async def result(self, wanted: WantedRollout) -> PlayedRollout:
        """Return the final result of a started rollout, once it is in the journal."""
        try:
            return await self._pending[wanted.id]
        finally:
            self._pending.pop(wanted.id, None)
            self._lost.pop(wanted.id, None)

    def start_scoring(self, step: int) -> None:
        """Use the rollouts that follow to score this step."""
        player, _ = self._players["val"]
        player.start_scoring(step)

    async def close(self) -> None:
        """Stop the runner. A resumed run repeats the attempts that it leaves."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def _on_end(self, state: RolloutState, played: PlayedRollout) -> None:
        end = self._pending.get(state.id)
        if end is None or end.done():
            return
        if state.status is Status.QUEUED:
            self._lost.setdefault(state.id, []).append(played)
        else:
            end.set_result(replace(played, lost=tuple(self._lost.pop(state.id, ()))))

    def _on_stop(self, running: asyncio.Task[None]) -> None:
        """Raise what ended the runner where a rollout is awaited, also by an evaluation that its run has left."""
        failure = None if running.cancelled() else running.exception()
        self._stopped = failure or CollectionError("The run has stopped making rollouts.")
        for end in self._pending.values():
            if not end.done():
                end.set_exception(self._stopped)
                end.exception()  # where its waiter has left, asyncio must not report it

    async def cancel(self, ids: Sequence[int], why: str) -> None:
        """Cancel in the journal those rollouts that have not ended."""
        known = self._queue.journal.load_states(RolloutState, ids)
        await self._queue.cancel(list(known), why)

    def recall(self, state: RolloutState) -> PlayedRollout | None:
        """Return how a rollout ended, by the journal; None if it must be started again."""
        return recall_rollout(self._queue.journal, state)

    def pop_metrics(self) -> Metrics:
        """Return no metrics: the engine has its own."""
        return Metrics()


def recall_rollout(store: Journal, state: RolloutState) -> PlayedRollout | None:
    """Return how a rollout by an engine ended, by the journal; None if it has not ended."""
    last = state.last
    if last is None or state.status in (Status.QUEUED, Status.RUNNING):
        return None
    turns = tuple(store.turns(state.id))
    if last.reward is None:
        verdict = Verdict.failure(Outcome(state.status.value), last.error)
    else:
        verdict = Verdict(last.reward, last.parts, error=last.error, extracted_answer=last.extracted)
    return PlayedRollout(turns, verdict, last.truncated, end_reason(turns, last.truncated, None), last.role)
