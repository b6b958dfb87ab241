"""Rollouts that a run requests from agents: rewards of the run's own, and attempts that a stop cut off."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from etude.data import Dataset
from etude.data.sampler import ShuffledSampler
from etude.errors import CollectionError, DataError
from etude.images import ImageRef, image_digest
from etude.images.addresses import image_address
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.agent_runners import AgentRunners
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollout_ends import read_end
from etude.recipes.collect.rollouts import IssuedTasks
from etude.records import Outcome, Task
from etude.rewards import Gsm8k, Judge
from etude.store import Journal, Status, open_store
from etude.store.queue.local_queue import LOCAL_OWNER, LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, RolloutLimits, RolloutPurpose, RolloutRequest
from tests.data.test_task_images import png
from tests.recipes.collect.test_sources import outcomes
from tests.store.made import turn

SUM = Task(0, {"row": 0, "prompt": "1+1=", "ground_truth": "2"}, "sums")
SUCCESS, FAILURE = AttemptReport(Outcome.SUCCEEDED), AttemptReport(Outcome.FAILED, "no")


async def opened(store: Journal) -> LocalRolloutQueue:
    """Return the queue of a run that begins or continues."""
    queue = LocalRolloutQueue(store)
    await queue.acquire_lease(LOCAL_OWNER)
    return queue


def requested(
    queue: LocalRolloutQueue, judge: Judge, retries: int = 0, *, code_changed: bool = False
) -> RequestedRollouts:
    """Return the requested rollouts of a run with agents."""
    limits = RolloutLimits(max_attempts=1 + retries)
    runners = AgentRunners(queue, AgentConfig(), queue.journal.position)
    both: dict[RolloutPurpose, RolloutLimits] = {"train": limits, "val": limits}
    return RequestedRollouts(queue, queue.journal, judge, runners, both, code_changed=code_changed)


async def play(queue: LocalRolloutQueue, report: AttemptReport) -> None:
    """Make one attempt, with one turn."""
    (claim,) = await queue.claim("runner", 1, 5.0)
    drawn = turn()
    said = replace(drawn.completion, text="1 and 1 are 2. #### 2")
    await queue.record_turn(claim.attempt_id, replace(drawn, completion=said))
    await queue.finish(claim.attempt_id, report)


def test_a_reward_that_the_run_gave_is_read_again_as_it_was() -> None:
    """With the answer that the reward extracted, which the vote over the answers of an evaluation needs."""

    async def story(store: Journal) -> None:
        queue = await opened(store)
        with Judge(Gsm8k()) as judge:
            rollouts = requested(queue, judge)
            await rollouts.start([RolloutRequest(SUM, id=0, use="val")])
            assert rollouts.awaited == 1
            await play(queue, SUCCESS)
            ended = await rollouts.result(RolloutRequest(SUM, id=0))
            assert rollouts.recall(store.rollout(0)) is not None
        again = read_end(store, store.rollout(0))
        assert again is not None and again.verdict.reward == ended.verdict.reward == 1.0
        assert again.verdict.extracted_answer == ended.verdict.extracted_answer is not None
        await queue.close()

    with closing(open_store()) as store:
        asyncio.run(story(store))


@pytest.mark.parametrize("code_changed", [False, True])
def test_failures_from_before_the_agent_s_code_changed_do_not_count(code_changed: bool) -> None:
    async def story(store: Journal) -> None:
        with Judge(Gsm8k()) as judge:
            queue = await opened(store)
            await requested(queue, judge, retries=1).start([RolloutRequest(SUM, id=0)])
            await play(queue, FAILURE)
            await queue.close()
            queue = await opened(store)
            rollouts = requested(queue, judge, retries=1, code_changed=code_changed)
            await rollouts.start([RolloutRequest(SUM, id=0)])
            for _ in range(1 + code_changed):
                await play(queue, FAILURE)
            ended = await rollouts.result(RolloutRequest(SUM, id=0))
            assert not ended.succeeded and ended.verdict.error == "no"
            assert read_end(store, store.rollout(0), 0.25) is not None
            assert outcomes(store, 0) == [Status.FAILED] * (2 + code_changed)
            await rollouts.close()
            with pytest.raises(CollectionError, match="has stopped making rollouts"):
                await rollouts.start([RolloutRequest(SUM, id=0)])
            await queue.close()

    with closing(open_store()) as store:
        asyncio.run(story(store))


def test_the_images_of_a_task_are_stored_before_it_is_issued() -> None:
    whole, cut = png("red"), png("blue")[:45]
    data = Dataset.load([{"prompt": "<image>?", "images": [{"bytes": image, "path": None}]} for image in (whole, cut)])
    tasks = IssuedTasks(data, ShuffledSampler().start(2, seed=0))
    first, second = sorted((tasks.task(0), tasks.task(1)), key=lambda task: int(task["row"]))
    assert first.images == {image_digest(whole): whole} and not tasks.task(first.ordinal).images

    async def story(store: Journal) -> None:
        queue = await opened(store)
        with Judge(Gsm8k()) as judge:
            rollouts = requested(queue, judge)
            await rollouts.start([RolloutRequest(first, sample, sample) for sample in range(2)])
            assert await queue.get_images(list(first.images)) == first.images
            (claim,) = await queue.claim("runner", 1, 5.0)
            assert claim.task.fields["images"] == [image_address(ImageRef(image_digest(whole), 3, 2))]
            with pytest.raises(DataError, match=r"^Row 1 of the data \(task [01]\): The image cannot be read: .*trunc"):
                await rollouts.start([RolloutRequest(second, 0, 7)])
            assert len(store.tasks()) == 1
            await rollouts.close()
        await queue.close()

    with closing(open_store()) as store:
        asyncio.run(story(store))
