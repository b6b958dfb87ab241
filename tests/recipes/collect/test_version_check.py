"""An engine with other weights than it was sent: its rollouts are made again or left out, and never trained on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from etude.errors import CollectionError
from etude.protocols import Ids
from etude.recipes.collect.resume import unread_version
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.event_loop import LoopThread
from etude.records import Completion, Outcome, SamplingParams, Task
from etude.rewards import Judge, JudgingConfig
from etude.store import Journal, Status, open_store
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, QueueOwner, RolloutRequest
from tests.recipes.collect.commits import record_commits
from tests.recipes.collect.test_sources import Scripted, outcomes, sourced
from tests.recipes.test_replays import admitted, by_agents, killed
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
    with closing(open_store()) as store:
        batches = record_commits(store)
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


async def played_by_an_agent(store: Journal, *, floor: int, ended: bool) -> PlayedRollout:
    """Have an agent make a rollout with tokens of version 3, and again with those of version 4 if it is queued again;
    return what the run reads of it. ended: it has ended before it is requested with this floor."""

    def unasked(task: Task, answer: str) -> float:
        pytest.fail("the judge was asked for a rollout that the agent rewards")

    with Judge(unasked, JudgingConfig()) as judge:
        queue = LocalRolloutQueue(store)
        await queue.acquire_lease(QueueOwner("this run", "here"))
        wanted = RolloutRequest(Task(0, {"row": 0, "prompt": "1+1="}, "sums"), id=0, floor=floor)
        source = by_agents(queue, store, judge)
        await source.start([replace(wanted, floor=3) if ended else wanted])
        for version in (3, 4):
            for claim in await queue.claim("runner", 1, 0.0):
                drawn = turn(seed=3)
                versions = np.full(len(drawn.completion.ids), version, np.int32)
                await queue.record_turn(
                    claim.attempt_id, replace(drawn, completion=replace(drawn.completion, version=versions))
                )
                await queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0))
        if ended:
            assert unread_version(store, 0) == 3
            source = by_agents(queue, store, judge)
            await source.start([wanted])
        played = await source.result(wanted)
        await queue.close()
        return played


@pytest.mark.parametrize(
    ("floor", "ended", "versions"),
    [(3, False, [3]), (4, False, [3, 4]), (4, True, [3])],
)
def test_an_agent_s_rollout_of_older_weights_is_made_again_unless_it_had_ended_before_a_kill(
    floor: int, ended: bool, versions: list[int]
) -> None:
    """After a kill a rollout that had ended is requested with the newest floor. Its own was older, and held."""
    with closing(open_store()) as store, LoopThread() as loop:
        played = loop.run(played_by_an_agent(store, floor=floor, ended=ended))
        assert [attempt.oldest for attempt in store.rollout(0).attempts] == versions
    assert played.succeeded and played.oldest == versions[-1]
