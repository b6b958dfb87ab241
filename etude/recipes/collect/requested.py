"""The rollouts that a run requests from its rollout queue, up to their ends: the trainer's half.

    RolloutRequest ─start─► queue ─► runners ─report─► sealed, judged ─result─► PlayedRollout

Who plays them is the only difference between an engine and agents (`RolloutRunners`). The run's own runner plays and
judges in one, and reports all of it. Agents may give a reward or none; then the run's own reward judges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from etude.errors import CollectionError, DataError, ImageError
from etude.observe import Metrics
from etude.recipes.collect.agent_statistics import AgentStatistics, RewardedBy
from etude.recipes.collect.rollout_ends import FailedReward, failure, read_end, read_turns, rollout_end
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Outcome, Task, Turn
from etude.rewards import Judge, Verdict
from etude.rewards.base import describe_task
from etude.store import AttemptRewarded, Journal, RolloutState, Status
from etude.store.queue.checks import limits_of
from etude.store.queue.rollout_queue import (
    RolloutLimits,
    RolloutPurpose,
    RolloutQueue,
    RolloutRequest,
)


class RolloutRunners(Protocol):
    """Play the rollouts of a queue: the run's engine, or agents."""

    async def run(self, requested: RequestedRollouts) -> None:
        """Report the attempts that end, until this is cancelled or no rollout is awaited. Raises the error that ended
        the runners."""
        ...


class RequestedRollouts:
    """Requests rollouts from the rollout queue, and returns how each ended. Lives in one event loop.

    The queue writes the events of attempts. It repeats what failed, what a kill cut off, and what was drawn with
    outdated weights. This class writes the reward, if the runner gives none. It follows from the journal and the
    options alone, so a later reading gives the same. Rollouts that a killed run left queued wait until they are started
    again, and with them the weights that sample them.

    Waits for the runners. The limits of a rollout bound it while a runner plays it.
    """

    def __init__(
        self,
        queue: RolloutQueue,
        journal: Journal,
        judge: Judge,
        runners: RolloutRunners,
        limits: Mapping[RolloutPurpose, RolloutLimits],
        *,
        failed_reward: FailedReward = "drop",
        code_changed: bool = False,
        statistics: AgentStatistics | None = None,
    ) -> None:
        """queue: that the run owns; each rollout that ended in it is in the journal. limits: of the rollouts of each
        use. failed_reward: of a rollout whose last attempt failed. code_changed: the code of the agent, the environment
        or the reward changed since the run was started, so that earlier failures do not count. statistics: counts the
        rollouts of agents."""
        self._queue = queue
        self._journal = journal
        self._judge = judge
        self._runners = runners
        self._limits = limits
        self._failed_reward = failed_reward
        self._code_changed = code_changed
        self._statistics = statistics
        self._pending: dict[int, asyncio.Future[PlayedRollout | None]] = {}
        """Of each rollout that is awaited, its end; None if it is to be read from the journal."""
        self._lost: dict[int, list[PlayedRollout]] = {}
        """The attempts at each pending rollout that failed in this process."""
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    # -- for the trainer ----------------------------------------------------------------------------------------------

    async def start(self, wanted: Sequence[RolloutRequest]) -> None:
        """Request these rollouts: they are in the journal when this returns. Requesting one again does no harm."""
        loop = asyncio.get_running_loop()
        ids = [_id_of(request) for request in wanted]
        for id in ids:
            self._pending.setdefault(id, loop.create_future())
        known = self._journal.load_states(RolloutState, ids)
        await asyncio.gather(*(self.store_images(request.task) for request in wanted if request.task.images))
        await self._queue.enqueue([self._complete(request, known) for request in wanted])
        for state in known.values():  # one that ended before the request is not reported again
            if state.status not in (Status.QUEUED, Status.RUNNING):
                self.report(state, self.recall(state))
        self._start_runners()

    async def store_images(self, task: Task) -> Task:
        """Store the images of a task, before the journal has the task, and return it without their bytes.

        One that cannot be read is an error.
        """
        if not task.images:
            return task
        try:
            await self._queue.put_images(list(task.images.values()))
        except ImageError as error:
            raise DataError(f"Row {task.get('row')} of the data ({describe_task(task)}): {error}") from error
        return replace(task, images={})

    async def result(self, request: RolloutRequest) -> PlayedRollout:
        """Return the final result of a started rollout, once it is in the journal.

        A failure of the rollout is an outcome; a failure of the engine or the runners is raised.
        """
        id = _id_of(request)
        try:
            played = await self._pending[id]
        finally:
            self._pending.pop(id, None)
            self._lost.pop(id, None)
        return await self._read_result(id, request.task) if played is None else played

    async def cancel(self, ids: Sequence[int], why: str) -> None:
        """Cancel those rollouts that have not ended. Only a run that begins may call it."""
        known = self._journal.load_states(RolloutState, ids)
        await self._queue.cancel(list(known), why)

    def recall(self, state: RolloutState) -> PlayedRollout | None:
        """Return how a rollout ended, by the journal; None if it must be started again."""
        return read_end(self._journal, state, self._failed_reward)

    def pop_metrics(self) -> Metrics:
        """Return the metrics of the rollouts that ended since the last call. An engine has its own."""
        return Metrics() if self._statistics is None else self._statistics.pop_metrics()

    async def close(self) -> None:
        """Stop the runners. A resumed run repeats the attempts that they leave."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    # -- for the runners ----------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> int:
        """The number of started rollouts whose end has not been reported."""
        return sum(not end.done() for end in self._pending.values())

    def report(self, state: RolloutState, played: PlayedRollout | None = None) -> None:
        """Take notice of an attempt that has ended in the queue, where its rollout now has this state.

        played: the end of the attempt, with its reward; None if it is to be read and judged.
        """
        end = self._pending.get(state.id)
        if end is None or end.done():
            return
        if state.status is not Status.QUEUED:
            lost = tuple(self._lost.pop(state.id, ()))
            end.set_result(None if played is None else replace(played, lost=lost))
        elif played is not None:
            self._lost.setdefault(state.id, []).append(played)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _complete(self, request: RolloutRequest, known: Mapping[int, RolloutState]) -> RolloutRequest:
        """Return a request with its limits; a rollout that was requested before keeps those that it had."""
        id = _id_of(request)
        limits = limits_of(known[id]) if id in known else self._limits[request.use]
        return replace(request, limits=limits, forgive=self._code_changed)

    def _start_runners(self) -> None:
        if self._is_closed:
            raise _stopped()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._runners.run(self))
            self._running.add_done_callback(self._on_stop)

    def _on_stop(self, running: asyncio.Task[None]) -> None:
        """Raise what ended the runners where a rollout is awaited, also by an evaluation that its run has left."""
        error = _stopped() if running.cancelled() else running.exception()
        if error is None:
            return
        for end in self._pending.values():
            if not end.done():
                end.set_exception(error)
                end.exception()  # where its waiter has left, asyncio must not report it

    async def _read_result(self, id: int, task: Task) -> PlayedRollout:
        """Return how a rollout ended, and write the reward that it gets here.

        It is sealed first, so that later readings give the same result.
        """
        (state,) = await self._queue.seal([id])
        by: RewardedBy = "runner"
        played = await asyncio.to_thread(self.recall, state)
        if played is None:
            turns = await asyncio.to_thread(read_turns, self._journal, state)
            verdict, by = await self._judge_result(id, task, turns)
            played = rollout_end(state, turns, verdict)
            self._write_reward(state, played)
        if self._statistics is not None and state.use == "train":
            self._statistics.add(state, played.turns, by)
        return played

    async def _judge_result(self, id: int, task: Task, turns: Sequence[Turn]) -> tuple[Verdict, RewardedBy]:
        """Return the verdict on a rollout that succeeded without a reward of its agent."""
        if self._judge.scores(task):
            answers = [turn.completion.text for turn in turns if turn.completion.finish_reason != "abort"]
            judged = await self._judge.judge(task, answers[-1] if answers else "")
            if judged.outcome is Outcome.SUCCEEDED:
                return judged, "judge"
            why = "The agent ended without a reward, and the run's `reward` could not judge its last answer instead. "
            return replace(judged, error=f"{why}{judged.error}"), "judge"
        if any(turn.reward is not None for turn in turns):
            return Verdict(0.0), "turns"
        error = (
            f"The agent ended rollout {id} without a reward. Have it return a number, call `etude.emit.reward`, or "
            "give the run a `reward` that judges its last answer."
        )
        return failure(self._failed_reward, Outcome.FAILED, error), "nobody"

    def _write_reward(self, state: RolloutState, played: PlayedRollout) -> None:
        """Write the reward that the run gave a rollout, unless its task was closed meanwhile."""
        if not played.succeeded:
            return
        verdict = played.verdict
        rewarded = AttemptRewarded(
            state.id,
            len(state.attempts) - 1,
            verdict.reward,
            verdict.parts,
            played.truncated,
            role=played.role,
            extracted=verdict.extracted_answer if state.use == "val" else None,
        )
        with self._journal.transaction() as writing:
            newest = writing.state(RolloutState, state.id)
            assert newest is not None and newest.last is not None, "a rollout that ended is in the journal"
            if newest.closed is None and newest.last.reward is None:
                writing.append([rewarded])


def _id_of(request: RolloutRequest) -> int:
    assert request.id is not None, "a run gives ids to its rollouts"
    return request.id


def _stopped() -> CollectionError:
    return CollectionError("The run has stopped making rollouts.")
