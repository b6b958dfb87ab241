"""The rollout queue of a journal in this process: many threads, restarts, kills, full disks, and bounded memory."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pytest

from etude.errors import IllegalTransitionError, RewardError, StoreError
from etude.records import Outcome, Task
from etude.store import Journal, Phase, RolloutsAdmitted, RolloutState, Status, open_store
from etude.store.journal import sql
from etude.store.queue.keys import Grant, Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.records import AttemptEnd, LeasedAttempt, RecordedTurn
from etude.store.queue.rollout_queue import (
    AttemptId,
    AttemptReport,
    QueueOwner,
    RolloutLimits,
    RolloutQuery,
    RolloutRequest,
)
from etude.store.queue.waiters import MAX_RECENT_ENDS
from tests.contracts.rollout_queues import claim, ended, wanted
from tests.store.made import turn
from tests.waits import blocked_until

ROOT = Path(__file__).parents[3]
DONE = AttemptReport(Outcome.SUCCEEDED, reward=1.0)
T = TypeVar("T")


def with_queue(
    journal: Journal, story: Callable[[LocalRolloutQueue], Awaitable[T]], keyring: Keyring | None = None
) -> T:
    """Open a queue over a journal, run a test on it, and close it."""

    async def whole() -> T:
        queue = LocalRolloutQueue(journal, keyring)
        try:
            return await asyncio.wait_for(story(queue), 60)
        finally:
            await queue.close()

    return asyncio.run(whole())


# -- the run's own runner ---------------------------------------------------------------------------------------------


def test_an_end_of_the_own_runner_that_is_refused_affects_no_other() -> None:
    async def story(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(wanted(0, 2))
        first, second = await queue.claim_own(2, 1.0)
        ends = [
            AttemptEnd(first.attempt_id, Outcome.SUCCEEDED, reward=math.nan),
            AttemptEnd(second.attempt_id, Outcome.SUCCEEDED, reward=1.0),
        ]
        refused, written = await queue.finish_own(ends)
        assert isinstance(refused, RewardError) and isinstance(written, RolloutState)
        assert written.status is Status.SUCCEEDED and written.last is not None and written.last.reward == 1.0
        assert queue.journal.rollout(first.attempt_id.rollout).status is Status.RUNNING

    with closing(open_store()) as journal:
        with_queue(journal, story)


def test_an_attempt_of_the_own_runner_has_no_deadline_and_ends_with_the_run() -> None:
    """Limits of silence and time are those of other runners. The next epoch repeats it with the same random numbers."""
    owner = QueueOwner("a run", "here")
    request = replace(wanted(0, 1, RolloutLimits(timeout_s=0.05, unresponsive_s=0.05))[0], floor=3, id=0)

    async def life(queue: LocalRolloutQueue, floor: int) -> LeasedAttempt:
        await queue.acquire_lease(owner)
        assert await queue.claim_own(1, 0.0) == [], "a rollout of an earlier life waits for its run"
        await queue.enqueue([replace(request, floor=floor)])
        (claim,) = await queue.claim_own(1, 1.0)
        await asyncio.sleep(0.3)
        return claim

    async def resumed(queue: LocalRolloutQueue) -> None:
        again = await life(queue, 5)
        assert again.attempt_id == AttemptId(0, 1) and again.drawn == 0
        end = AttemptEnd(again.attempt_id, Outcome.SUCCEEDED, turns=[RecordedTurn(turn(seed=4))])
        (state,) = await queue.finish_own([end])
        assert isinstance(state, RolloutState) and state.status is Status.QUEUED, "version 4 is below the new floor"
        assert [attempt.status for attempt in state.attempts] == [Status.INFRA_ERROR, Status.INFRA_ERROR]

    with closing(open_store()) as journal:
        first = with_queue(journal, lambda queue: life(queue, 3))
        assert first.attempt_id == AttemptId(0, 0) and journal.rollout(0).status is Status.RUNNING
        with_queue(journal, resumed)


@pytest.mark.parametrize("forgive", [False, True])
def test_attempts_before_the_code_changed_do_not_count(forgive: bool) -> None:
    owner, request = QueueOwner("a run", "here"), replace(wanted(0, 1, RolloutLimits(max_attempts=2))[0], id=0)

    async def fail(queue: LocalRolloutQueue, forgive: bool) -> RolloutState:
        await queue.acquire_lease(owner)
        await queue.enqueue([replace(request, forgive=forgive)])
        (claim,) = await queue.claim_own(1, 1.0)
        (state,) = await queue.finish_own([AttemptEnd(claim.attempt_id, Outcome.FAILED, "no")])
        assert isinstance(state, RolloutState)
        return state

    with closing(open_store()) as journal:
        assert with_queue(journal, lambda queue: fail(queue, False)).status is Status.QUEUED
        state = with_queue(journal, lambda queue: fail(queue, forgive))
        assert state.status is (Status.QUEUED if forgive else Status.FAILED)


# -- threads, loops and coroutines ------------------------------------------------------------------------------------


def test_loops_in_several_threads_share_a_queue(tmp_path: Path) -> None:
    """A trainer and two servers: each has its own loop, and all see one queue."""
    total = 80
    with closing(open_store(tmp_path / "journal.db")) as journal:
        queue = LocalRolloutQueue(journal)
        raised: list[BaseException] = []

        async def produce() -> None:
            for task in range(total // 4):
                await queue.enqueue(wanted(task, 4))
            assert sorted(await ended(queue, total)) == list(range(total))

        async def run(name: str) -> None:
            while (await queue.statistics())["succeeded"] < total:
                for got in await queue.claim(name, 3, 0.2):
                    await queue.record_turn(got.attempt_id, turn(seed=got.attempt_id.rollout))
                    assert await queue.finish(got.attempt_id, DONE)

        def in_its_loop(story: Callable[[], Awaitable[None]]) -> None:
            try:
                asyncio.run(asyncio.wait_for(story(), 60))  # type: ignore[arg-type]
            except BaseException as error:
                raised.append(error)

        stories = [produce, lambda: run("a"), lambda: run("b")]
        threads = [Thread(target=in_its_loop, args=(story,)) for story in stories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(queue.close())
        assert raised == []
        assert all(len(state.attempts) == 1 for state in journal.rollouts()) and len(journal.rollouts()) == total


def test_an_abandoned_claim_takes_nothing() -> None:
    """Cancelled while it waits, or at the moment it is answered: the rollout goes to another claim."""

    async def story(queue: LocalRolloutQueue) -> None:
        waiting = asyncio.create_task(queue.claim("gone", 4, 20))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await queue.enqueue(wanted(0, 2))
        answered = asyncio.create_task(queue.claim("gone", 4, 20))
        queueing = asyncio.create_task(queue.enqueue(wanted(1, 2)))
        await asyncio.sleep(0)
        # The answer is on its way, and this loop does not receive it meanwhile.
        blocked_until(lambda: any(state.attempts for state in queue.journal.rollouts()))
        answered.cancel()
        for claiming in (waiting, answered):
            with pytest.raises(asyncio.CancelledError):
                await claiming
        await queueing
        claims = await claim(queue, 4, "here")
        assert {got.attempt_id.rollout for got in claims} == {0, 1, 2, 3}
        assert max(got.attempt_id.attempt for got in claims) == 1, "some had been assigned"
        assert all([await queue.finish(got.attempt_id, DONE) for got in claims])

    with_queue(open_store(), story)


def test_an_event_loop_that_ends_during_a_call_harms_no_other() -> None:
    journal = open_store()
    queue = LocalRolloutQueue(journal)

    async def leave() -> None:
        waiting = asyncio.ensure_future(queue.wait(0, 30))
        await asyncio.sleep(0.05)
        assert not waiting.done()

    asyncio.run(leave())

    async def stay() -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        assert await queue.finish(got.attempt_id, DONE)
        assert await ended(queue, 1) == [0]
        await queue.close()

    asyncio.run(stay())


def test_a_closed_queue_refuses_calls_and_ends_every_wait() -> None:
    journal = open_store()

    async def story() -> None:
        queue = LocalRolloutQueue(journal)
        waiting = [asyncio.create_task(queue.claim("runner", 1, 30)), asyncio.create_task(queue.wait(0, 30))]
        await asyncio.sleep(0.05)
        acknowledged = asyncio.create_task(queue.put_resource("prompt", "Think."))
        await asyncio.sleep(0)
        await queue.close()
        assert await acknowledged == 1, "what was asked before is done"
        for task in waiting:
            with pytest.raises(StoreError, match="The rollout queue is closed"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(StoreError, match="The rollout queue is closed"):
            await queue.enqueue(wanted(1))
        await queue.close()

    asyncio.run(story())


def test_a_reward_that_is_no_number_is_named() -> None:
    async def story(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        (got,) = await claim(queue)
        bad: Any
        for bad in ("good", None, {"right": "yes"}, [1.0]):
            with pytest.raises(RewardError, match=r"Attempt 0 of rollout 0: its reward is .*; it must be a number"):
                await queue.record_reward(got.attempt_id, bad)
        with pytest.raises(RewardError, match=r"its reward is beyond ±.*, so it cannot be added up"):
            await queue.record_reward(got.attempt_id, 10**400)
        with pytest.raises(RewardError, match="its reward of turn 3 has no parts"):
            await queue.record_reward(got.attempt_id, {}, turn=3)

    with_queue(open_store(), story)


def test_calls_while_a_queue_closes_are_executed_or_refused() -> None:
    """Many threads call at that moment: every call returns, and acknowledged ones are written."""
    for _ in range(4):
        journal = open_store()
        queue, results = LocalRolloutQueue(journal), list[int | StoreError]()

        async def ask(queue: LocalRolloutQueue = queue, results: list[int | StoreError] = results) -> None:
            while not (results and isinstance(results[-1], StoreError)):
                try:
                    results.append(await asyncio.wait_for(queue.put_resource("prompt", "?"), 20))
                except StoreError as error:
                    results.append(error)

        threads = [Thread(target=lambda ask=ask: asyncio.run(ask())) for _ in range(3)]
        for thread in threads:
            thread.start()
        asyncio.run(queue.close())
        for thread in threads:
            thread.join()
        assert len([result for result in results if isinstance(result, int)]) == journal.position


# -- the owner --------------------------------------------------------------------------------------------------------


def test_a_reopened_queue_knows_the_epoch_of_each_rollout(tmp_path: Path) -> None:
    """A store that is killed between a trainer's start and its first step assigns nothing of the earlier epoch;
    attempts of the present epoch continue."""
    run, path = QueueOwner("run", "here"), tmp_path / "journal.db"

    async def before(queue: LocalRolloutQueue) -> None:
        await queue.acquire_lease(run, None, 60.0)
        await queue.enqueue(wanted(0, 3))
        await queue.acquire_lease(run, None, 60.0)
        await queue.enqueue(wanted(0, 2))
        await claim(queue)

    async def after(queue: LocalRolloutQueue) -> None:
        assert await queue.heartbeat("runner", [AttemptId(0, 0)]) == []
        assert await queue.claim("runner", 3, 0.1) == [], "its run was not heard here yet, and may have gone"
        await queue.acquire_lease(run, 2, 60.0)
        assert await queue.heartbeat("runner", [AttemptId(0, 0)]) == []
        (second,) = await queue.claim("runner", 3, 0.1)
        assert second.attempt_id == AttemptId(1, 0) and (await queue.statistics())["queued"] == 1
        await queue.enqueue(wanted(0, 3))
        assert [got.attempt_id for got in await claim(queue)] == [AttemptId(2, 0)]

    async def elsewhere(queue: LocalRolloutQueue) -> None:
        await queue.release_owner()
        assert await queue.claim("runner", 3, 0.0) == []
        with pytest.raises(IllegalTransitionError, match="from epoch 2"):
            await queue.acquire_lease(run, 2)
        with pytest.raises(IllegalTransitionError, match="another run"):
            await queue.acquire_lease(QueueOwner("other", "there"))
        assert await queue.acquire_lease(QueueOwner("run", "there"), None, 60.0) == 4
        with pytest.raises(IllegalTransitionError, match="already active in there"):
            await queue.acquire_lease(run)

    for story in (before, after, elsewhere):
        with closing(open_store(path)) as journal:
            with_queue(journal, story)
            assert journal.replay() == {("task", 0): journal.task(0), **_expected_states(journal)}


def _expected_states(journal: Journal) -> dict[tuple[str, int], Any]:
    """Return the rollouts and the owner, as expected without a replay."""
    owner = journal.resource("owner")
    assert owner is not None
    return {("rollout", state.id): state for state in journal.rollouts()} | {("resource", owner.id): owner}


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_queue_resumes_the_work_of_an_earlier_one(tmp_path: Path) -> None:
    path, keyring = tmp_path / "journal.db", Keyring("0123456789abcdef")

    async def before(queue: LocalRolloutQueue) -> tuple[int, AttemptId]:
        await queue.put_resource("endpoint", {"model": "policy"})
        await queue.enqueue(wanted(0, 4, RolloutLimits(unresponsive_s=30.0)))
        finished, failed, running = await claim(queue, 3)
        await queue.record_turn(running.attempt_id, turn())
        await queue.finish(failed.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        await queue.finish(finished.attempt_id, DONE)
        cursor, _ = await queue.wait(0, 10)
        return cursor, running.attempt_id

    async def after(queue: LocalRolloutQueue) -> None:
        assert await queue.heartbeat("runner", [running]) == [], "its runner has it still"
        assert await queue.record_turn(running, turn()) == 1
        assert await queue.finish(running, DONE)
        claims = await claim(queue, 2, "new")
        assert [got.attempt_id for got in claims] == [AttemptId(1, 1), AttemptId(3, 0)]
        assert [dict(got.resources) for got in claims] == [{"endpoint": {"model": "policy"}}] * 2
        assert keyring.read(claims[0].reward_key) == Grant("reward", AttemptId(1, 1))
        assert await queue.put_resource("endpoint", {"model": "other"}) == 2
        assert await queue.enqueue([RolloutRequest(Task(9, {}))]) == [4]
        for got in claims:
            await queue.finish(got.attempt_id, DONE)
        assert await ended(queue, 3, cursor) == [2, 1, 3], "the cursor is good still"
        assert await ended(queue, 4) == [0, 2, 1, 3]
        statistics = await queue.statistics()
        assert (statistics["succeeded"], statistics["retries"], statistics["queued"]) == (4, 1, 1)

    with closing(open_store(path)) as journal:
        cursor, running = with_queue(journal, before, keyring)
    with closing(open_store(path)) as journal:
        with_queue(journal, after, keyring)


def test_evaluations_are_first_after_a_restart_and_in_a_later_epoch() -> None:
    journal, run = open_store(), QueueOwner("run", "/runs/mine")
    queued = [*wanted(0, 2), *wanted(1, 2, use="val")]

    async def before(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(queued)

    async def after(queue: LocalRolloutQueue) -> None:
        (first,) = await claim(queue)
        assert first.attempt_id == AttemptId(2, 0)
        epoch = await queue.acquire_lease(run, None, 60.0)
        await queue.enqueue(queued)
        second, third, _ = await claim(queue, 3)
        assert [second.attempt_id, third.attempt_id] == [AttemptId(2, 1), AttemptId(3, 0)]
        for failed in (second, third):
            await queue.finish(failed.attempt_id, AttemptReport(Outcome.INFRA_ERROR, "no endpoint"))
        await queue.acquire_lease(run, epoch, 60.0)
        last = [got.attempt_id for got in await claim(queue, 3)]
        assert last == [AttemptId(2, 2), AttemptId(3, 1), AttemptId(1, 0)]

    with_queue(journal, before)
    with_queue(journal, after)


def test_a_runner_that_does_not_return_after_a_restart_loses_its_work(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def before(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(wanted(0, 2, RolloutLimits(unresponsive_s=0.3, max_attempts=1)))
        await claim(queue, 2)

    async def after(queue: LocalRolloutQueue) -> None:
        _, states = await queue.wait(0, 20)
        assert {state.status for state in states} == {Status.UNRESPONSIVE}

    with closing(open_store(path)) as journal:
        with_queue(journal, before)
        assert len(journal.rollouts(Phase.RUNNING)) == 2
    with closing(open_store(path)) as journal:
        with_queue(journal, after)


def killed_while_working(path: Path, seconds: float) -> set[str]:
    """Start a process that works on a queue, kill it, and return its acknowledged calls."""
    code = [sys.executable, "-m", "tests.store.queue.working", str(path)]
    worker = subprocess.Popen(code, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert worker.stdout is not None
    with worker.stdout:
        first = worker.stdout.readline()
        time.sleep(seconds)
        worker.kill()
        lines = [first, *worker.stdout]
    assert worker.wait() == -signal.SIGKILL
    return {line.strip() for line in lines if line.endswith("\n")}


def acknowledged_is_there(journal: Journal, lines: set[str]) -> None:
    """Assert that each acknowledged call is written."""
    kinds = Counter(line.split()[0] for line in lines)
    assert kinds["queued"] > 0
    states = {state.id: state for state in journal.rollouts()}
    for line in lines:
        what, where, *rest = line.split()
        rollout, _, number = where.partition(".")
        state = states[int(rollout)]
        if what == "queued":
            continue
        attempt = state.attempts[int(number)]
        if what == "turn":
            assert len(journal.turns(state.id, int(number))) > int(rest[0])
        elif what == "paid":
            assert attempt.paid == 0.5
        elif what == "finished":
            failed = state.id % 5 == 0 and number == "0"
            assert attempt.status is (Status.FAILED if failed else Status.SUCCEEDED)
            assert attempt.reward == (None if failed else float(state.id))
    assert [state for (kind, _), state in sorted(journal.replay().items()) if kind == "rollout"] == [*states.values()]


def killed_again_and_again(path: Path, times: int) -> None:
    chance, lines = random.Random(times), set[str]()
    for _ in range(times):
        lines |= killed_while_working(path, chance.uniform(0.1, 0.6))
        with closing(open_store(path)) as journal:
            acknowledged_is_there(journal, lines)

    async def finish_all(queue: LocalRolloutQueue) -> None:
        """Finish running rollouts and play queued ones; nothing hangs."""
        page = await queue.find(RolloutQuery(statuses=(Status.RUNNING,), limit=10_000))
        for state in page.rollouts:
            assert await queue.finish(
                AttemptId(state.id, len(state.attempts) - 1), AttemptReport(Outcome.CANCELLED, "over")
            )
        while claims := await queue.claim("last", 100, 0):
            await asyncio.gather(*(queue.finish(got.attempt_id, DONE) for got in claims))
        statistics = await queue.statistics()
        assert statistics["queued"] == statistics["running"] == 0

    with closing(open_store(path)) as journal:
        with_queue(journal, finish_all)
        assert journal.rollouts(Phase.QUEUED, Phase.RUNNING) == []


@pytest.mark.integration
def test_nothing_acknowledged_is_lost_by_kill_9_under_load(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path / "journal.db", 2)


@pytest.mark.soak
def test_nothing_acknowledged_is_lost_by_kill_9_under_load_twenty_times(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path / "journal.db", 20)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_fails_the_call_and_the_queue_continues(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.db")) as journal:
        assert isinstance(journal, sql.SqlJournal)
        ask = journal._connection.exec_driver_sql

        async def story(queue: LocalRolloutQueue) -> None:
            await queue.enqueue(wanted(0, 3))
            first, second = await claim(queue, 2)
            ask(f"PRAGMA max_page_count={ask('PRAGMA page_count').scalar()}")  # SQLite then meets its own full disk
            for size in (4000, 400, 40, 4):
                with pytest.raises(StoreError, match="the disk is full: free some space and try again"):
                    while True:
                        await queue.record_note(first.attempt_id, "seen", "x" * size)
            with pytest.raises(StoreError, match="the disk is full"):
                await queue.claim("runner", 1, 10)
            with pytest.raises(StoreError, match="the disk is full"):
                await queue.enqueue([RolloutRequest(Task(5, {"prompt": "x" * 9000}), 0, 50)])
            ask("PRAGMA max_page_count=1000000")
            assert await queue.heartbeat("runner", [first.attempt_id, second.attempt_id]) == []
            assert await queue.finish(first.attempt_id, DONE)
            assert [got.attempt_id for got in await queue.claim("runner", 3, 10)] == [AttemptId(2, 0)]
            assert await queue.enqueue([RolloutRequest(Task(5, {"prompt": "x" * 9000}), 0, 50)]) == [50]

        with_queue(journal, story)
        assert journal.rollout(0).status is Status.SUCCEEDED


def test_a_lost_journal_stops_the_queue_with_a_sentence(tmp_path: Path) -> None:
    journal = open_store(tmp_path / "journal.db")

    async def story(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(wanted(0))
        journal.close()
        with pytest.raises(StoreError, match="it is closed"):
            await queue.enqueue(wanted(1))
        for ask in (queue.enqueue(wanted(2)), queue.claim("runner", 1, 10), queue.statistics()):
            with pytest.raises(StoreError, match=r"The rollout queue stopped: .*it is closed"):
                await ask

    with_queue(journal, story)


@pytest.mark.integration
def test_silence_does_not_count_while_the_process_was_suspended(tmp_path: Path) -> None:
    """The process is stopped for longer than a runner may be silent, and continued. The runner, which is in that
    process too, sent no heartbeat, and keeps its work."""
    code = f"""
import asyncio, sys, time
from pathlib import Path
from etude.store import open_store
from etude.store.queue.rollout_queue import RolloutLimits
from etude.store.queue.local_queue import LocalRolloutQueue
from tests.contracts.rollout_queues import claim, wanted
async def story():
    journal = open_store(Path({str(tmp_path / "journal.db")!r}))
    queue = LocalRolloutQueue(journal)
    await queue.enqueue(wanted(0, 1, RolloutLimits(unresponsive_s=2.5, max_attempts=1)))
    (got,) = await claim(queue)
    print("claimed", flush=True)
    while time.monotonic() < float(sys.stdin.readline()): pass
    stood = await asyncio.to_thread(time.sleep, 0.5)
    print(await queue.heartbeat("runner", [got.attempt_id]), (await queue.statistics())["running"], flush=True)
    await queue.close()
asyncio.run(story())
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert worker.stdout is not None and worker.stdin is not None
    with worker.stdout, worker.stdin:
        assert worker.stdout.readline() == "claimed\n"
        worker.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        worker.send_signal(signal.SIGCONT)
        worker.stdin.write("0\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "[] 1.0\n"
    assert worker.wait(30) == 0


# -- long runs --------------------------------------------------------------------------------------------------------


def test_a_queue_keeps_only_open_work_in_memory(tmp_path: Path) -> None:
    """After hundreds of ended rollouts, with settled tasks or not, the memory in use is as before."""

    async def story(queue: LocalRolloutQueue) -> None:
        sizes = []
        for step in range(3):
            tasks = range(step * 15, (step + 1) * 15)
            await queue.enqueue([request for task in tasks for request in wanted(task, 8)])
            while claims := await queue.claim("runner", 100, 0):
                await asyncio.gather(*(queue.finish(got.attempt_id, DONE) for got in claims))
            if step == 1:
                journal.append([RolloutsAdmitted(step, tuple(range(step * 120, (step + 1) * 120)), end=0, version=0)])
            gc.collect()
            sizes.append((len(journal._open), len(queue._state._work.leases), queue._state._work.num_queued))
        assert sizes == [(0, 0, 0)] * 3

    with closing(open_store(tmp_path / "journal.db")) as journal:
        with_queue(journal, story)


@pytest.mark.soak
def test_old_ended_rollouts_are_read_from_the_journal(tmp_path: Path) -> None:
    total = MAX_RECENT_ENDS + 500

    async def story(queue: LocalRolloutQueue) -> None:
        for task in range(total // 50 + 1):
            await queue.enqueue(wanted(task, 50))
            claims = await claim(queue, 50)
            await asyncio.gather(*(queue.finish(got.attempt_id, DONE) for got in claims))
        assert len(queue._state.ends.recent._ends) == MAX_RECENT_ENDS
        ids = await ended(queue, total)
        assert len(set(ids)) == len(ids) >= total

    with closing(open_store(tmp_path / "journal.db")) as journal:
        with_queue(journal, story)
