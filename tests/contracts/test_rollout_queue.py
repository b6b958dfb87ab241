"""The contract of every rollout queue, with any journal and any transport."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from etude.errors import DataError, IllegalTransitionError, ImageError, NotFoundError, RewardError
from etude.images import ImageRef, ImageSpan, image_digest
from etude.records import Outcome, Task
from etude.store.journal.event_records import encode
from etude.store.journal.events import (
    AttemptEnded,
    AttemptStarted,
    NoteRecorded,
    RolloutQueued,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.journal.states import Status
from etude.store.queue.attempt_ends import INTERRUPTED
from etude.store.queue.rollout_queue import (
    AttemptId,
    AttemptReport,
    QueueOwner,
    RolloutLimits,
    RolloutQuery,
    RolloutQueue,
    RolloutRequest,
)
from tests.contracts.rollout_queues import QUEUES, Story, claim, ended, play, wanted
from tests.store.made import turn
from tests.waits import skip_time

DONE = AttemptReport(Outcome.SUCCEEDED)
RUN = QueueOwner("run", "/runs/mine")


TIERS = {"postgres": pytest.mark.smoke, "http": pytest.mark.slow, "socket": pytest.mark.slow}
KINDS = [pytest.param(kind, marks=TIERS.get(kind, ())) for kind in QUEUES]


@pytest.fixture(params=KINDS)
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Run a story on one of the queues."""
    return lambda story: play(request.param, tmp_path, story)


def test_a_rollout_from_beginning_to_end(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        endpoint = {"base_url": "http://127.0.0.1:8000/v1", "model": "policy"}
        assert await queue.put_resource("endpoint", endpoint) == 1
        limits = RolloutLimits(timeout_s=60, max_attempts=1)
        request = RolloutRequest(Task(7, {"prompt": "2+2?", "row": 3}, "sums"), sample=2, use="val", limits=limits)
        (id,) = await queue.enqueue([request])
        (got,) = await claim(queue)
        assert got.attempt_id == AttemptId(id, 0) and (got.task, got.use, got.limits) == (request.task, "val", limits)
        assert dict(got.resources) == {"endpoint": endpoint}
        assert got.model_key and got.reward_key and got.model_key != got.reward_key
        assert await queue.heartbeat("runner", [got.attempt_id]) == []
        await queue.ready(got.attempt_id)
        assert [
            await queue.record_turn(got.attempt_id, turn(0, seed=9)),
            await queue.record_turn(got.attempt_id, turn(0, seed=8)),
        ] == [0, 1]
        await queue.record_reward(got.attempt_id, 0.5, turn=1)
        await queue.record_note(got.attempt_id, "tool", {"name": "search", "took": 0.25})
        assert (
            await queue.finish(got.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward={"right": 1.0, "short": -0.25}))
            is True
        )
        cursor, (state,) = await queue.wait(0, 10)
        assert (state.id, state.task, state.sample, state.use, state.status) == (id, 7, 2, "val", Status.SUCCEEDED)
        last = state.last
        assert last is not None and (last.turns, last.reward, last.paid, last.total) == (2, 0.75, 0.5, 1.25)
        assert last.parts == {"right": 1.0, "short": -0.25} and last.runner == "runner"
        assert await queue.wait(cursor, 0) == (cursor, [])
        assert [recorded.reward for recorded in await queue.turns(id)] == [None, 0.5]
        assert await queue.notes(id) == [{"name": "tool", "data": {"name": "search", "took": 0.25}, "attempt": 0}]

    tell(story)


# -- queueing ---------------------------------------------------------------------------------------------------------


def test_the_longest_queued_is_claimed_first(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue([*wanted(2, 3), *wanted(0, 3)])
        await queue.enqueue(wanted(1, 3))
        assert [got.attempt_id.rollout for got in await claim(queue, 4)] == [6, 7, 8, 0]
        assert [got.attempt_id.rollout for got in await queue.claim("other", 100, 10)] == [1, 2, 3, 4, 5]

    tell(story)


def test_evaluations_are_claimed_before_training(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue([*wanted(0, 3), *wanted(2, 2, use="val"), *wanted(7, 1)])
        first, second, third = await claim(queue, 3)
        assert [got.attempt_id.rollout for got in (first, second, third)] == [4, 5, 0], "val, and then train"
        await queue.enqueue(wanted(8, 1, use="val"))
        for failed in (first, third):
            await queue.finish(failed.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        left = [got.attempt_id for got in await queue.claim("other", 100, 10)]
        assert left[:2] == [(8, 0), (4, 1)], "a retry is behind the queued ones of its use"
        assert left[2:] == [(1, 0), (2, 0), (7, 0), (0, 1)]

    tell(story)


def test_a_claim_waits_for_work_and_not_forever(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        began = time.monotonic()
        assert await queue.claim("runner", 1, 0.2) == [] and time.monotonic() - began > 0.15
        waiting = [asyncio.create_task(queue.claim(f"runner {place}", 2, 20)) for place in range(3)]
        await asyncio.sleep(0.1)
        await queue.enqueue(wanted(0, 6))
        got = [got_claim.attempt_id.rollout for claims in await asyncio.gather(*waiting) for got_claim in claims]
        assert sorted(got) == [0, 1, 2, 3, 4, 5]

    tell(story)


def test_a_repeated_request_is_queued_once(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        requests = [*wanted(0, 2), *wanted(0, 2)]
        assert await queue.enqueue(requests) == [0, 1, 0, 1] and await queue.enqueue(requests[:2]) == [0, 1]
        assert len(await queue.claim("runner", 10, 10)) == 2
        assert await queue.enqueue(requests[:1]) == [0]
        assert await queue.claim("runner", 10, 0) == []

    tell(story)


def test_a_repeated_request_with_other_content_is_refused_and_nothing_is_queued(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        task = wanted(0)[0].task
        for other, what in [
            (RolloutRequest(task, 1, 0), "Rollout 0 was queued before with other content"),
            (RolloutRequest(task, 0, 0, "val"), "Rollout 0 was queued before with other content"),
            (
                RolloutRequest(task, 0, 0, limits=RolloutLimits(timeout_s=1)),
                "Rollout 0 was queued before with other content",
            ),
            (RolloutRequest(Task(0, {"prompt": "?"}, "sums"), 0, 5), "Task 0 was issued before with other content"),
        ]:
            with pytest.raises(IllegalTransitionError, match=what):
                await queue.enqueue([*wanted(1), other])
        assert [state.id for state in (await queue.find(RolloutQuery())).rollouts] == [0]
        assert await queue.enqueue(wanted(1)) == [1]

    tell(story)


def test_the_queue_assigns_ids_that_were_not_given(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        task = Task(0, {"prompt": "?"})
        assert await queue.enqueue([RolloutRequest(task, 0), RolloutRequest(task, 1, 40), RolloutRequest(task, 2)]) == [
            0,
            40,
            41,
        ]
        assert await queue.enqueue([RolloutRequest(task, 3, 7), RolloutRequest(task, 4)]) == [7, 42]
        with pytest.raises(DataError, match="The id of a rollout is -1"):
            await queue.enqueue([RolloutRequest(task, 5, -1)])

    tell(story)


def test_a_rollout_that_waits_too_long_expires(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue([*wanted(0, limits=RolloutLimits(queue_timeout_s=0.2)), *wanted(1)])
        _, (state,) = await queue.wait(0, 20)
        assert (state.id, state.status, state.attempts) == (0, Status.FAILED, ())
        assert state.why == "It waited in the queue for 0.2 s."
        assert [got.attempt_id.rollout for got in await queue.claim("runner", 2, 10)] == [1]

    tell(story)


# -- ends of rollouts -------------------------------------------------------------------------------------------------


def test_a_repeated_report_counts_once(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        end = AttemptReport(Outcome.SUCCEEDED, reward=0.5)
        assert [await queue.finish(got.attempt_id, end), await queue.finish(got.attempt_id, end)] == [True, True]
        for other in (AttemptReport(Outcome.FAILED, "no"), AttemptReport(Outcome.SUCCEEDED, reward=0.25)):
            with pytest.raises(
                IllegalTransitionError, match=r"Attempt 0 of rollout 0 was reported as succeeded .* and cannot become"
            ):
                await queue.finish(got.attempt_id, other)
        _, (state,) = await queue.wait(0, 10)
        assert state.last is not None and state.last.reward == 0.5

    tell(story)


def test_a_reward_recorded_before_may_be_repeated_with_the_end(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 2))
        first, second = await claim(queue, 2)
        for got in (first, second):
            await queue.record_reward(got.attempt_id, {"right": 0.5})
        assert await queue.finish(first.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward={"right": 0.5}))
        with pytest.raises(IllegalTransitionError, match=r"it has 0\.5, which is final"):
            await queue.finish(second.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=0.25))
        assert await queue.finish(second.attempt_id, DONE)

    tell(story)


def test_an_attempt_that_takes_too_long_ends_and_its_late_report_is_stored(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, limits=RolloutLimits(timeout_s=20, max_attempts=1)))
        (got,) = await claim(queue)
        skip_time(30)
        cursor, (state,) = await queue.wait(0, 20)
        assert state.status is Status.TIMED_OUT and state.last is not None
        assert state.last.error == "It was not finished 20 s after it was claimed." == state.attempts[0].error
        assert await queue.heartbeat("runner", [got.attempt_id]) == [(got.attempt_id, state.last.error)]
        with pytest.raises(IllegalTransitionError, match="Rollout 0 is timed_out and cannot record a turn"):
            await queue.record_turn(got.attempt_id, turn())
        late = AttemptReport(Outcome.SUCCEEDED, reward=1.0)
        assert [await queue.finish(got.attempt_id, late), await queue.finish(got.attempt_id, late)] == [False, False]
        with pytest.raises(IllegalTransitionError, match="was reported late before, as succeeded"):
            await queue.finish(got.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        assert await queue.wait(cursor, 0) == (cursor, []), "a rollout ends once"
        (after,) = (await queue.find(RolloutQuery(ids=(0,)))).rollouts
        assert after.status is Status.TIMED_OUT and after.last is not None and after.last.reward is None
        assert after.last.late == {"outcome": "succeeded", "error": "", "reward": 1.0, "parts": {}}
        assert (await queue.statistics())["late"] == 1

    tell(story)


def test_a_runner_that_falls_silent_loses_its_work(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 2, RolloutLimits(unresponsive_s=40, max_attempts=1)))
        spoken_of, silent = await claim(queue, 2)
        skip_time(25)
        assert await queue.heartbeat("runner", [spoken_of.attempt_id]) == []
        skip_time(20)
        over: list[int] = []
        cursor, deadline = 0, time.monotonic() + 20
        while not over and time.monotonic() < deadline:
            assert await queue.heartbeat("runner", [spoken_of.attempt_id]) == []
            cursor, states = await queue.wait(cursor, 0.1)
            over += [state.id for state in states]
        assert over == [silent.attempt_id.rollout]
        (state,) = (await queue.find(RolloutQuery(statuses=(Status.UNRESPONSIVE,)))).rollouts
        assert state.last is not None and state.last.error == "Its runner 'runner' sent nothing for 40 s."
        assert await queue.finish(spoken_of.attempt_id, DONE)

    tell(story)


def test_a_failed_attempt_is_retried_by_its_limits(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        limits = RolloutLimits(max_attempts=3, retry_on=(Outcome.FAILED,))
        await queue.enqueue(wanted(0, 2, limits))
        for attempt in range(3):
            first, *others = await queue.claim("runner", 2, 10)
            assert first.attempt_id == AttemptId(0, attempt)
            assert await queue.finish(first.attempt_id, AttemptReport(Outcome.FAILED, f"failure {attempt}"))
            for other in others:
                assert await queue.finish(other.attempt_id, AttemptReport(Outcome.TIMED_OUT, "slow"))
        _, states = await queue.wait(0, 10)
        assert [(state.id, state.status) for state in states] == [(1, Status.TIMED_OUT), (0, Status.FAILED)]
        assert [attempt.error for attempt in states[1].attempts] == ["failure 0", "failure 1", "failure 2"]
        assert await queue.claim("runner", 1, 0) == [] and (await queue.statistics())["retries"] == 2

    tell(story)


def test_an_infrastructure_error_does_not_count_ten_times(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, limits=RolloutLimits(max_attempts=1)))
        for _ in range(11):
            (got,) = await claim(queue)
            assert await queue.finish(got.attempt_id, AttemptReport(Outcome.INFRA_ERROR, "the node went away"))
        _, (state,) = await queue.wait(0, 10)
        assert state.status is Status.INFRA_ERROR and len(state.attempts) == 11

    tell(story)


def test_a_result_of_an_attempt_that_was_retried_is_late(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, limits=RolloutLimits(timeout_s=20)))
        (first,) = await claim(queue)
        skip_time(30)
        (second,) = await claim(queue, runner="other")
        assert (first.attempt_id, second.attempt_id) == (AttemptId(0, 0), AttemptId(0, 1))
        assert await queue.finish(first.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)) is False
        with pytest.raises(IllegalTransitionError, match="only one of attempt 1"):
            await queue.record_reward(first.attempt_id, 1.0)
        assert await queue.finish(second.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=0.0)) is True
        _, (state,) = await queue.wait(0, 10)
        assert state.last is not None and state.last.reward == 0.0 and state.attempts[0].late is not None

    tell(story)


def test_a_cancellation_reaches_the_runner_at_its_next_heartbeat(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 3))
        done, running = await claim(queue, 2)
        assert await queue.finish(done.attempt_id, DONE)
        await queue.cancel([0, 1, 2, 1], "the step is full")
        assert await queue.heartbeat("runner", [running.attempt_id]) == [(running.attempt_id, "the step is full")]
        assert await queue.claim("runner", 1, 0) == []
        _, states = await queue.wait(0, 10)
        status = {state.id: state.status for state in states}
        assert status == {0: Status.SUCCEEDED, 1: Status.CANCELLED, 2: Status.CANCELLED}
        assert await queue.finish(running.attempt_id, DONE) is False
        with pytest.raises(IllegalTransitionError, match="Rollout 1 is cancelled and cannot be rewarded"):
            await queue.record_reward(running.attempt_id, 1.0)
        with pytest.raises(NotFoundError, match="rollout 9"):
            await queue.cancel([9], "who?")
        for nothing in ("", " "):
            with pytest.raises(DataError, match=r"The reason of the cancellation is empty|why: String should have"):
                await queue.cancel([0], nothing)

    tell(story)


def test_a_runner_must_stop_attempts_that_it_has_no_lease_of(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        stop = dict(await queue.heartbeat("impostor", [got.attempt_id, AttemptId(0, 1), AttemptId(99, 0)]))
        assert stop[got.attempt_id] == "The runner 'runner' has the lease of this attempt."
        assert stop[AttemptId(0, 1)] == stop[AttemptId(99, 0)] == "The store does not know this attempt."

    tell(story)


# -- the owner --------------------------------------------------------------------------------------------------------


def test_a_run_that_takes_a_queue_over_begins_another_epoch(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        assert await queue.acquire_lease(RUN) == 1
        first = queue.with_epoch(1)
        await first.enqueue(wanted(0, 4))
        under_way, done = await claim(queue, 2)
        await first.record_turn(under_way.attempt_id, turn())
        await queue.finish(done.attempt_id, DONE)
        assert "owner" not in under_way.resources
        assert await queue.acquire_lease(RUN) == 2
        second = queue.with_epoch(2)
        assert await queue.heartbeat("runner", [under_way.attempt_id]) == [(under_way.attempt_id, INTERRUPTED)]
        assert await queue.finish(under_way.attempt_id, DONE) is False, "its word comes too late"
        assert await queue.claim("runner", 4, 0.1) == [], "nothing of it was asked for again"
        assert (await queue.statistics())["queued"] == 3
        assert await second.enqueue(wanted(0, 3)) == [0, 1, 2]
        leased = await claim(queue, 2)
        assert [got.attempt_id for got in leased] == [AttemptId(0, 1), AttemptId(2, 0)], (
            "and the one that had ended has"
        )
        words = [
            first.enqueue(wanted(0, 4)),
            first.cancel([0], "it is mine"),
            first.wait(0, 0.0),
            first.put_resource("endpoint", {}),
            first.seal([1]),
            first.claim("runner", 1, 0.1),
            first.record_turn(leased[0].attempt_id, turn()),
            first.record_reward(leased[0].attempt_id, 1.0),
            first.acquire_lease(RUN, 1, 60.0),
        ]
        for word in words:
            with pytest.raises(IllegalTransitionError, match=r"from epoch 1 of the run.* began epoch 2"):
                await word
        await second.record_turn(leased[0].attempt_id, turn())
        assert await second.acquire_lease(RUN, 2) == 2
        for queued in (first, second):
            await queued.close()
        await queue.statistics()

    tell(story)


def test_without_a_lease_nothing_is_assigned_and_nothing_is_lost(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        epoch = await queue.acquire_lease(RUN, None, 60.0)
        limits = RolloutLimits(max_attempts=1, queue_timeout_s=20)
        await queue.enqueue([*wanted(0, limits=RolloutLimits(max_attempts=1)), *wanted(1, limits=limits)])
        for number in range(8):
            (got,) = await claim(queue)
            assert got.attempt_id == AttemptId(number % 2, number // 2)
            await queue.acquire_lease(RUN, epoch, 0.0)
            while not (stop := await queue.heartbeat("runner", [got.attempt_id])):
                await asyncio.sleep(0.02)
            assert stop == [(got.attempt_id, INTERRUPTED)]
            assert await queue.claim("runner", 2, 0.0) == []
            if number == 1:
                skip_time(30)
                assert (await queue.statistics())["failed"] == 0, "the wait without a run does not count"
            await queue.acquire_lease(RUN, epoch, 60.0)
        for got in await claim(queue, 2):
            assert await queue.finish(got.attempt_id, DONE)
        assert (await queue.statistics())["succeeded"] == 2

    tell(story)


def test_infrastructure_errors_are_retried_when_the_run_renews_its_lease(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        epoch = await queue.acquire_lease(RUN, None, 60.0)
        await queue.enqueue(wanted(0))
        for number in range(2):
            (got,) = await claim(queue)
            assert got.attempt_id == AttemptId(0, number)
            assert await queue.finish(
                got.attempt_id, AttemptReport(Outcome.INFRA_ERROR, "the endpoint does not answer")
            )
            assert await queue.claim("runner", 1, 0.1) == [] and (await queue.statistics())["queued"] == 1
            await queue.acquire_lease(RUN, epoch, 60.0)
        await claim(queue)

    tell(story)


def test_a_queue_has_one_run_in_one_directory(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        other, copied = QueueOwner("other", "/runs/other"), QueueOwner("run", "/runs/copied")
        await queue.acquire_lease(RUN, None, 60.0)
        with pytest.raises(IllegalTransitionError, match="another run, /runs/mine"):
            await queue.acquire_lease(other)
        await queue.acquire_lease(RUN, 1, 0.0)
        assert await queue.acquire_lease(other) == 2, "the first asked for nothing, and has gone"
        await queue.acquire_lease(other, 2, 0.0)
        assert await queue.acquire_lease(RUN) == 3
        await queue.enqueue(wanted(0))
        await queue.acquire_lease(RUN, 3, 0.0)
        with pytest.raises(IllegalTransitionError, match="another run, /runs/mine"):
            await queue.acquire_lease(other)
        with pytest.raises(
            IllegalTransitionError, match=r"active in /runs/mine, and was started in /runs/copied.*--give-over"
        ):
            await queue.acquire_lease(copied)
        with pytest.raises(DataError, match="records the queue's owner"):
            await queue.put_resource("owner", {})
        with pytest.raises(DataError, match=r"every wait must be bounded|lease_s: Input should be a finite number"):
            await queue.acquire_lease(RUN, None, math.inf)

    tell(story)


# -- reading ended rollouts -------------------------------------------------------------------------------------------


def test_a_sealed_rollout_takes_no_more_rewards(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 2))
        got, other = await claim(queue, 2)
        await queue.record_turn(got.attempt_id, turn())
        with pytest.raises(IllegalTransitionError, match="Rollout 0 is running and cannot be sealed"):
            await queue.seal([0])
        await queue.finish(got.attempt_id, DONE)
        await queue.record_reward(got.attempt_id, 0.25, turn=0)
        for _ in range(2):
            (state,) = await queue.seal([0])
            assert state.sealed and state.last is not None and (state.last.paid, state.last.reward) == (0.25, None)
        for late in (queue.record_reward(got.attempt_id, 0.5, turn=0), queue.record_reward(got.attempt_id, 1.0)):
            with pytest.raises(IllegalTransitionError, match="Rollout 0 is sealed, since its run has read it"):
                await late
        await queue.record_note(got.attempt_id, "afterwards", 1)
        assert await queue.finish(got.attempt_id, DONE) is True, "as it was handed in before"
        await queue.record_reward(other.attempt_id, 1.0)
        with pytest.raises(NotFoundError, match="no rollout 9"):
            await queue.seal([9])

    tell(story)


def test_a_rollouts_history_is_all_that_is_written_of_it(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        recorded = turn(seed=3)
        await queue.record_turn(got.attempt_id, recorded, began=1.75e9 + 0.125)
        await queue.record_note(got.attempt_id, "tool", {"name": "search", "share": math.nan})
        await queue.record_reward(got.attempt_id, {"right": 0.5, "short": -0.25}, turn=0)
        await queue.finish(got.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        (again,) = await claim(queue, runner="other")
        await queue.cancel([0], "enough")
        await queue.finish(again.attempt_id, DONE)
        queued, began, turned, noted, paid, ended_, *rest = await queue.history(0)
        assert isinstance(queued, RolloutQueued) and queued.limits == RolloutLimits()
        assert isinstance(began, AttemptStarted) and began.runner == "runner" and abs(began.at - time.time()) < 60
        assert isinstance(turned, TurnRecorded) and abs(turned.at - time.time()) < 60
        assert turned.began == 1.75e9 + 0.125
        np.testing.assert_array_equal(turned.turn.completion.logp, recorded.completion.logp)
        assert isinstance(noted, NoteRecorded) and math.isnan(noted.data["share"])
        assert paid == TurnRewarded(0, 0, 0, 0.25, {"right": 0.5, "short": -0.25})
        assert isinstance(ended_, AttemptEnded) and (ended_.error, ended_.retry) == ("no", True)
        assert [encode(event).kind for event in rest] == [
            "attempt_started",
            "rollout_cancelled",
            "late_result_recorded",
        ]
        with pytest.raises(NotFoundError, match="no rollout 9"):
            await queue.history(9)

    tell(story)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_ends_are_waited_for_in_their_order_and_none_is_missed(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 6))
        claims = await claim(queue, 6)
        order = [3, 0, 5, 1, 4, 2]
        waiting = asyncio.create_task(ended(queue, 6))
        for place in order:
            assert await queue.finish(claims[place].attempt_id, DONE)
        assert await waiting == order
        cursor, seen = 0, []
        for _ in range(3):
            cursor, states = await queue.wait(cursor, 10, limit=2)
            seen.append([state.id for state in states])
        assert seen == [[3, 0], [5, 1], [4, 2]]
        began = time.monotonic()
        assert await queue.wait(cursor, 0.2) == (cursor, []) and 0.15 < time.monotonic() - began < 10

    tell(story)


def test_a_wait_has_a_bound_and_a_cursor_of_this_journal(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        for seconds in (math.inf, -1.0):
            with pytest.raises(DataError, match="every wait must be bounded"):
                await queue.wait(0, seconds)
            with pytest.raises(DataError, match="every wait must be bounded"):
                await queue.claim("runner", 1, seconds)
        with pytest.raises(NotFoundError, match="it has no cursor 1000"):
            await queue.wait(1000, 0)
        with pytest.raises(DataError, match="n is 0"):
            await queue.claim("runner", 0, 0)

    tell(story)


# -- rewards and records ----------------------------------------------------------------------------------------------


def test_an_attempt_is_rewarded_once_and_rewards_of_a_turn_add_up(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        await queue.record_turn(got.attempt_id, turn())
        for reward in (0.5, {"a": 0.25, "b": -0.5}):
            await queue.record_reward(got.attempt_id, reward, turn=0)
        for _ in range(2):  # as a client repeats it after a lost reply
            await queue.record_reward(got.attempt_id, 1.0)
        with pytest.raises(IllegalTransitionError, match=r"cannot be rewarded 0\.5: it has 1\.0, which is final"):
            await queue.record_reward(got.attempt_id, 0.5)
        with pytest.raises(RewardError, match="beyond ±1e"):
            await queue.record_reward(got.attempt_id, 1e308, turn=0)
        with pytest.raises(IllegalTransitionError, match="cannot be rewarded for turn 1: it has 1 turns"):
            await queue.record_reward(got.attempt_id, 1.0, turn=1)
        for bad in (math.nan, {"right": math.inf}, {}):  # over HTTP, invalid numbers are refused by the client
            with pytest.raises(RewardError):
                await queue.record_reward(got.attempt_id, bad, turn=0)
        await queue.finish(got.attempt_id, DONE)
        await queue.record_reward(got.attempt_id, 0.125, turn=0)
        _, (state,) = await queue.wait(0, 10)
        assert state.last is not None and (state.last.reward, state.last.paid) == (1.0, 0.375)
        assert [recorded.reward for recorded in await queue.turns(0)] == [0.375]

    tell(story)


def test_turns_come_back_to_the_last_bit(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        turns = [turn(5, tokens, seed=tokens) for tokens in (1, 400, 30)]
        assert [await queue.record_turn(got.attempt_id, one) for one in turns] == [0, 1, 2]
        for read, wrote in zip(await queue.turns(0), turns, strict=True):
            np.testing.assert_array_equal(read.prompt, wrote.prompt)
            for name in ("ids", "logp", "version", "raw_logp", "top_ids", "top_logp"):
                np.testing.assert_array_equal(getattr(read.completion, name), getattr(wrote.completion, name))
            assert (read.model, read.tags, read.completion.text) == (wrote.model, wrote.tags, wrote.completion.text)
        with pytest.raises(DataError, match="already carries a reward"):
            await queue.record_turn(got.attempt_id, turn(reward=0.5))

    tell(story)


def test_every_attempt_has_separate_turns_and_notes(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        for attempt, outcome in enumerate((Outcome.FAILED, Outcome.SUCCEEDED)):
            (got,) = await claim(queue)
            await queue.record_turn(got.attempt_id, turn(seed=attempt))
            await queue.record_note(got.attempt_id, "seed", attempt)
            await queue.finish(got.attempt_id, AttemptReport(outcome, "" if outcome is Outcome.SUCCEEDED else "no"))
        await queue.record_note(AttemptId(0, 0), "afterwards", None)
        for attempt, texts in ((None, "answer 1.0 ✓"), (1, "answer 1.0 ✓"), (0, "answer 0.0 ✓")):
            assert [recorded.completion.text for recorded in await queue.turns(0, attempt)] == [texts]
        assert [note["data"] for note in await queue.notes(0)] == [1]
        assert [note["name"] for note in await queue.notes(0, 0)] == ["seed", "afterwards"]
        for ask in (queue.turns, queue.notes):
            with pytest.raises(NotFoundError, match="no attempt 2"):
                await ask(0, 2)

    tell(story)


def test_an_attempt_is_preparing_until_it_is_ready_or_records_something(tell: Callable[[Story], None]) -> None:
    async def status(queue: RolloutQueue, id: int) -> Status:
        (state,) = (await queue.find(RolloutQuery(ids=(id,)))).rollouts
        assert state.status is Status.RUNNING
        return state.attempts[-1].status

    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 4))
        says, calls, earns, notes = (got.attempt_id for got in await claim(queue, 4))
        assert [await status(queue, id) for id in range(4)] == [Status.PREPARING] * 4
        await queue.ready(says)
        await queue.ready(says)
        await queue.record_turn(calls, turn())
        await queue.record_reward(earns, 1.0)
        await queue.record_note(notes, "loaded", {})
        assert [await status(queue, id) for id in range(4)] == [Status.RUNNING] * 4
        await queue.finish(says, DONE)
        with pytest.raises(IllegalTransitionError, match="Rollout 0 is succeeded and cannot be ready"):
            await queue.ready(says)

    tell(story)


def test_unknown_ids_are_refused(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        for key in (AttemptId(0, 0), AttemptId(5, 0)):
            for ask in (
                queue.ready(key),
                queue.record_turn(key, turn()),
                queue.record_reward(key, 1.0),
                queue.record_note(key, "x", 1),
                queue.finish(key, DONE),
            ):
                with pytest.raises(NotFoundError, match=f"ollout {key.rollout}"):
                    await ask
        for read in (queue.turns, queue.notes):
            with pytest.raises(NotFoundError, match="no rollout 5"):
                await read(5)
            assert await read(0) == []
        with pytest.raises(NotFoundError, match="no resource 'endpoint'"):
            await queue.get_resource("endpoint")

    tell(story)


def test_a_refused_write_does_not_affect_others(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 20))
        claims = await claim(queue, 20)
        requests = [
            (queue.finish(got.attempt_id, DONE), queue.record_reward(AttemptId(got.attempt_id.rollout, 3), 1.0))
            for got in claims
        ]
        answers = await asyncio.gather(*(ask for pair in requests for ask in pair), return_exceptions=True)
        assert Counter(type(answer) for answer in answers) == {bool: 20, NotFoundError: 20}
        assert (await queue.statistics())["succeeded"] == 20

    tell(story)


# -- resources, runners, statistics -----------------------------------------------------------------------------------


def test_resources_have_versions(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        assert [await queue.put_resource("prompt", f"Think {n} times.") for n in (1, 2, 3)] == [1, 2, 3]
        assert await queue.put_resource("endpoint", {"model": "policy"}) == 1
        assert await queue.get_resource("prompt") == (3, "Think 3 times.")
        assert await queue.get_resource("prompt", 2) == (2, "Think 2 times.")
        with pytest.raises(NotFoundError, match="the versions 1 to 3, and no version 4"):
            await queue.get_resource("prompt", 4)
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        assert dict(got.resources) == {"prompt": "Think 3 times.", "endpoint": {"model": "policy"}}

    tell(story)


def test_every_attempt_of_a_rollout_gets_the_versions_that_its_request_names(
    tell: Callable[[Story], None],
) -> None:
    async def story(queue: RolloutQueue) -> None:
        for prompt in ("Think.", "Guess.", "Count."):
            await queue.put_resource("prompt", prompt)
        pinned = [RolloutRequest(Task(id, {}), id=id, resources={"prompt": id + 1}) for id in range(3)]
        await queue.enqueue(pinned)
        await queue.put_resource("prompt", "Newest.")
        await queue.enqueue([RolloutRequest(Task(3, {}), id=3)])
        prompts = ["Think.", "Guess.", "Count.", "Newest."]
        for _ in range(2):  # each is tried again
            claims = sorted(await claim(queue, 4), key=lambda got: got.attempt_id)
            assert [got.resources["prompt"] for got in claims] == prompts
            for got in claims:
                await queue.finish(got.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        await queue.enqueue(pinned)  # repeated, as after a lost reply
        with pytest.raises(IllegalTransitionError, match="Rollout 0 was queued before with other content"):
            await queue.enqueue([RolloutRequest(Task(0, {}), id=0, resources={"prompt": 2})])
        with pytest.raises(NotFoundError, match="version 5 of the resource 'prompt', which has the versions 1 to 4"):
            await queue.enqueue([RolloutRequest(Task(4, {}), id=4, resources={"prompt": 5})])
        with pytest.raises(NotFoundError, match="the resource 'tools', which does not exist"):
            await queue.enqueue([RolloutRequest(Task(4, {}), id=4, resources={"tools": 1})])

    tell(story)


def test_images_are_stored_once_and_turns_show_them(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        red, wide = png((3, 2)), png((7, 4))
        refs = await queue.put_images([red, wide, red])
        assert refs == [ImageRef(image_digest(content), *size) for content, size in ((red, (3, 2)), (wide, (7, 4)))] + [
            refs[0]
        ]
        assert await queue.put_images([wide]) == [refs[1]]
        assert await queue.get_images([refs[0].digest, "0" * 64]) == {refs[0].digest: red}
        with pytest.raises(ImageError, match="Image 1 cannot be read"):
            await queue.put_images([png((5, 5)), red[:40]])
        assert await queue.get_images([image_digest(png((5, 5)))]) == {}
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        span = ImageSpan(refs[1].digest, 0, 2, first=1)
        assert await queue.record_turn(got.attempt_id, replace(turn(), images=(span,))) == 0
        (recorded,) = await queue.turns(got.attempt_id.rollout)
        assert recorded.images == (span,)
        with pytest.raises(NotFoundError, match=f"shows the image {'0' * 64}, which the store does not have"):
            await queue.record_turn(got.attempt_id, replace(turn(), images=(ImageSpan("0" * 64, 0, 2),)))

    tell(story)


def png(size: tuple[int, int]) -> bytes:
    stream = BytesIO()
    Image.new("RGB", size, "red").save(stream, "PNG")
    return stream.getvalue()


def test_runners_are_listed_with_their_last_heartbeat(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue, runner="b")
        await queue.heartbeat("a", [], {"host": "node-1", "slots": 4})
        await queue.heartbeat("b", [got.attempt_id])
        first, second = await queue.runners()
        assert (first.name, first.running, dict(first.info)) == ("a", (), {"host": "node-1", "slots": 4})
        assert (second.name, second.running) == ("b", (got.attempt_id,)) and 0 <= second.silent_s < 20

    tell(story)


def test_rollouts_are_found_a_page_at_a_time(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue([request for task in range(50) for request in wanted(task, 4)])
        for place, got in enumerate(await claim(queue, 30)):
            if place < 20:
                await queue.finish(got.attempt_id, DONE if place % 2 else AttemptReport(Outcome.CANCELLED, "no"))
        await queue.enqueue([RolloutRequest(Task(50, {"prompt": "?"}), 0, 900, "val")])

        async def ids(what: RolloutQuery) -> tuple[list[int], bool]:
            page = await queue.find(what)
            return [state.id for state in page.rollouts], page.more

        assert await ids(RolloutQuery(limit=3)) == ([0, 1, 2], True)
        assert await ids(RolloutQuery(limit=3, after=197)) == ([198, 199, 900], False)
        assert await ids(RolloutQuery(limit=3, sort="-id")) == ([900, 199, 198], True)
        assert await ids(RolloutQuery(limit=3, sort="-id", after=2)) == ([1, 0], False)
        assert await ids(RolloutQuery(use="val")) == ([900], False)
        assert await ids(RolloutQuery(tasks=(3, 1), limit=5)) == ([4, 5, 6, 7, 12], True)
        assert await ids(RolloutQuery(tasks=(3, 1), ids=(7, 199, 13), sort="-id")) == ([13, 7], False)
        assert await ids(RolloutQuery(statuses=(Status.SUCCEEDED,), limit=100)) == (list(range(1, 20, 2)), False)
        assert await ids(RolloutQuery(statuses=(Status.RUNNING, Status.SUCCEEDED), after=15, limit=4)) == (
            [17, 19, 20, 21],
            True,
        )
        assert (await ids(RolloutQuery(statuses=(Status.QUEUED,), limit=500)))[0] == [*range(30, 200), 900]

    tell(story)


def test_statistics_count_rollouts_by_state(tell: Callable[[Story], None]) -> None:
    async def story(queue: RolloutQueue) -> None:
        await queue.enqueue(wanted(0, 5))
        first, second, _ = await claim(queue, 3)
        await queue.finish(first.attempt_id, DONE)
        await queue.finish(second.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        statistics = await queue.statistics()
        assert 0 < statistics.pop("oldest_queued_s") < 60
        assert {name: count for name, count in statistics.items() if count} == {
            "queued": 3,
            "running": 1,
            "succeeded": 1,
            "retries": 1,
        }
        assert {"failed", "timed_out", "unresponsive", "cancelled", "infra_error", "late"} < statistics.keys()

    tell(story)


# -- concurrency ------------------------------------------------------------------------------------------------------


def test_concurrent_runners_play_and_end_each_rollout_once(tell: Callable[[Story], None]) -> None:
    total = 60

    async def story(queue: RolloutQueue) -> None:
        played: list[AttemptId] = []

        async def produce() -> None:
            for task in range(total // 4):
                await queue.enqueue(wanted(task, 4))

        async def run(name: str) -> None:
            while len(played) < total:
                for got in await queue.claim(name, 2, 0.2):
                    await queue.record_turn(got.attempt_id, turn(seed=got.attempt_id.rollout))
                    await queue.record_reward(got.attempt_id, float(got.attempt_id.rollout))
                    assert await queue.finish(got.attempt_id, DONE)
                    played.append(got.attempt_id)

        *_, ids = await asyncio.gather(produce(), *(run(f"runner {n}") for n in range(8)), ended(queue, total))
        assert sorted(played) == [AttemptId(id, 0) for id in range(total)] and sorted(ids) == list(range(total))
        page = await queue.find(RolloutQuery(limit=total))
        assert all(state.last is not None and state.last.reward == state.id for state in page.rollouts)

    tell(story)
