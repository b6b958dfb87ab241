"""An engine with other weights than it was sent: its rollouts are made again or left out, and never trained on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from etude.errors import CollectionError
from etude.protocols import Ids
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.agent_source import AgentSource
from etude.recipes.collect.resume import unread_version
from etude.recipes.collect.rollouts import PlayedRollout, WantedRollout
from etude.recipes.event_loop import LoopThread
from etude.records import Completion, Outcome, SamplingParams, Task
from etude.rewards import Judge, JudgingConfig
from etude.store import Event, Journal, Status, open_store
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, QueueOwner
from tests.recipes.collect.test_sources import Scripted, outcomes, sourced
from tests.recipes.test_replays import admitted, killed
from tests.store.made import turn


class Lying(Scripted):
    """An engine that gives some answers of step 2 from the weights before the published ones."""

    def __init__(self, lies: int) -> None:
        """lies: the number of these answers."""
        super().__init__()
        self.version = 0
        self._lies = lies

    async def generate(self, prompt: Ids, sampling: SamplingParams, **given: object) -> Completion:  # type: ignore[override]
        """Answer, with the versions of the weights that drew each token."""
        drawn = await super().generate(prompt, sampling, **given)  # type: ignore[arg-type]
        if self.version and self._lies:
            self._lies -= 1
            return replace(drawn, version=np.array([1, 0, 1], np.int32))
        return drawn


def test_a_rollout_of_older_weights_is_made_again_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Lying(lies=3)
    with closing(open_store()) as store, sourced(engine, store, retries=0, max_concurrency=1) as source:
        source.next(1)
        engine.version = 1
        source.published(1)
        groups = source.next(2)
        assert {each.oldest for each in groups.scored} == {1}
        lost = [id for id in range(6, 12) if Status.INFRA_ERROR in outcomes(store, id)]
        assert sum(outcomes(store, id).count(Status.INFRA_ERROR) for id in lost) == 3
        assert all(outcomes(store, id)[-1] is Status.SUCCEEDED for id in lost), "retries are for failures"
        assert len(set(engine.asked)) == 12, "it is made again with the same numbers"
    assert groups.metrics.reduce()["failed_attempts/infra_error"] == 3
    said = [line for line in caplog.messages if "one of them has older weights" in line]
    assert len(said) == 1 and "with version 0 after version 1 was published" in said[0]


def test_an_engine_that_never_gets_the_weights_ends_the_run() -> None:
    """A kill gives no rollout more attempts."""
    batches: list[list[Event]] = []
    with closing(open_store()) as store:
        append = store.append
        store.append = lambda events: (batches.append(list(events)), append(events))[1]  # type: ignore[method-assign]
        _fail_second_step(store)
        assert _outdated_attempts(store) == {11}
    with closing(killed(batches[: admitted(batches, 1) + 5])) as store:
        assert max(_outdated_attempts(store)) in range(1, 10)
        _fail_second_step(store)
        assert _outdated_attempts(store) == {11}


def _fail_second_step(store: Journal) -> None:
    engine = Lying(lies=10**6)
    with sourced(engine, store, retries=0) as source:
        source.next(1)
        engine.version = 1
        source.published(1)
        with pytest.raises(CollectionError, match=r"nothing to train on.* with version 0 after version 1 was"):
            source.next(2)


def _outdated_attempts(store: Journal) -> set[int]:
    """Return the numbers of outdated attempts that a rollout of step 2 has."""
    rollouts = [state for state in store.rollouts() if state.task >= 2]
    return {sum("after version 1" in attempt.error for attempt in state.attempts) for state in rollouts}


async def played_by_an_agent(
    queue: LocalRolloutQueue, store: Journal, *, floor: int, ended: bool, reward: float | None
) -> tuple[PlayedRollout, PlayedRollout]:
    """Have an agent make a rollout with tokens of version 3, and return what the source and that of a resumed run read
    of it. ended: it has ended before the source requests it. reward: that of the agent; the judge is not to be asked
    for another."""

    def unasked(task: Task, answer: str) -> float:
        pytest.fail("the judge was asked for a rollout that it does not score")

    with Judge(unasked, JudgingConfig()) as judge:

        def restart() -> AgentSource:
            return AgentSource(AgentConfig(), 0, queue, judge, store, store.position)

        source = restart()
        wanted = WantedRollout(0, Task(0, {"row": 0, "prompt": "1+1="}, "sums"), 0, floor=floor)
        await queue.acquire_lease(QueueOwner("this run", "here"))
        await source.start([wanted])
        (claim,) = await queue.claim("runner", 1, 10.0)
        await queue.record_turn(claim.attempt_id, turn(seed=3))
        await queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=reward))
        if ended:
            assert unread_version(store, 0) == 3
            source = restart()
            await source.start([wanted])
        first = await source.result(wanted)
        source = restart()
        recalled = source.recall(store.rollout(0))
        assert (recalled is not None) == first.succeeded
        await source.start([wanted])
        return first, await source.result(wanted)


@pytest.mark.parametrize(
    ("floor", "ended", "reward", "outcome"),
    [
        (3, False, 1.0, Outcome.SUCCEEDED),
        (4, False, 1.0, Outcome.INFRA_ERROR),
        (4, False, None, Outcome.INFRA_ERROR),
        (4, True, 1.0, Outcome.SUCCEEDED),
    ],
)
def test_an_agent_s_rollout_of_older_weights_is_lost_unless_it_had_ended_before_a_kill(
    floor: int, ended: bool, reward: float | None, outcome: Outcome
) -> None:
    """After a kill a rollout that had ended is requested with the newest floor. Its own was older, and held. One that
    was refused stays so, and is refused before it is judged."""
    with closing(open_store()) as store, LoopThread() as loop:
        queue = LocalRolloutQueue(store)
        results = loop.run(played_by_an_agent(queue, store, floor=floor, ended=ended, reward=reward))
        loop.run(queue.close())
    assert all(result.verdict.outcome is outcome and len(result.turns) == 1 for result in results)
