"""Runners: every attempt ends and is reported, whether its agent fails, hangs or is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

import etude
from etude.agents.agent import LLM, RolloutInfo
from etude.agents.runner import Runner, RunnerTimeouts
from etude.errors import AgentError, EngineError
from etude.records import Task
from etude.store import RolloutState, open_store
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits
from tests.agents.rollout_queues import ONCE, QUICK, ends, play, played, wanted
from tests.waits import skip_time, until


def last_error(state: RolloutState) -> str:
    assert state.last is not None
    return state.last.error


def test_a_crash_is_a_traceback_of_the_agents_own_frames() -> None:
    @etude.agent
    def agent(task: Task, llm: LLM) -> None:
        raise ValueError(f"no luck with {llm.api_key}")

    result = played(agent, wanted(1))
    assert result.only.status is Status.FAILED
    assert "ValueError: no luck with …" in result.error and "test_runner.py" in result.error
    assert "running_attempt.py" not in result.error and "worker_threads.py" not in result.error


@pytest.mark.parametrize("how", [SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()])
def test_nothing_that_an_agent_raises_reaches_the_runner(how: BaseException) -> None:
    @etude.agent
    def threaded(task: Task) -> None:
        raise how

    @etude.agent
    async def waits(task: Task) -> None:
        raise how

    for agent in (threaded, waits):
        result = played(agent, wanted(2))
        assert [state.status for state in result.states] == [Status.FAILED] * 2


def test_a_failure_of_the_machine_is_not_the_agents_failure() -> None:
    tries = []

    @etude.agent
    async def agent(task: Task) -> float:
        tries.append(task)
        if len(tries) == 1:
            try:
                raise EngineError("the engine died")
            except EngineError as error:
                raise RuntimeError("my own words") from error
        return 1.0

    result = played(agent, wanted(1))
    assert result.only.status is Status.SUCCEEDED and len(tries) == 2
    assert [attempt.status for attempt in result.only.attempts] == [Status.INFRA_ERROR, Status.SUCCEEDED]


@pytest.mark.parametrize("waits", [False, True])
def test_a_model_that_cannot_be_reached_is_not_the_agents_failure(waits: bool) -> None:
    request = {"model": "policy", "messages": [{"role": "user", "content": "2+2?"}]}

    @etude.agent
    def calls(llm: LLM, rollout: RolloutInfo) -> None:
        if rollout.attempt == 0:
            llm.client.with_options(max_retries=0).chat.completions.create(**request)  # type: ignore[call-overload]

    @etude.agent
    async def asks(llm: LLM, rollout: RolloutInfo) -> None:
        if rollout.attempt == 0:
            client = llm.async_client.with_options(max_retries=0)
            await client.chat.completions.create(**request)  # type: ignore[call-overload]

    result = played(asks if waits else calls, wanted(1))
    assert [attempt.status for attempt in result.only.attempts] == [Status.INFRA_ERROR, Status.SUCCEEDED]
    assert "APIConnectionError" in result.only.attempts[0].error


def test_an_agent_that_wants_a_model_waits_for_an_endpoint_and_does_not_fail() -> None:
    @etude.agent
    async def agent(llm: LLM) -> None: ...

    async def scene() -> RolloutState:
        queue = LocalRolloutQueue(open_store())
        await queue.enqueue(wanted(1))
        runner = Runner(queue, agent, timeouts=QUICK)
        running = asyncio.create_task(runner.run())
        (state,) = await ends(queue, 1)
        runner.stop()
        await running
        await queue.close()
        return state

    state = asyncio.run(scene())
    assert state.status is Status.INFRA_ERROR and "no resource named `endpoint`" in last_error(state)


@pytest.mark.parametrize("threaded", [False, True])
def test_an_agent_that_takes_too_long_is_timed_out(threaded: bool) -> None:
    release = threading.Event()

    @etude.agent(timeout_s=15)
    def hangs(task: Task) -> None:
        if task["n"] == 0:
            release.wait(60)

    @etude.agent(timeout_s=15)
    async def sleeps(task: Task) -> None:
        if task["n"] == 0:
            await asyncio.get_running_loop().create_future()

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        await until(lambda: any(each.status is Status.RUNNING for each in queue.journal.rollout(0).attempts))
        await until(lambda: runner._asked_at is None)  # the time of a reply would not count
        skip_time(15)

    result = played(hangs if threaded else sleeps, wanted(3), max_concurrency=1, meanwhile=meanwhile)
    release.set()
    assert [state.status for state in result.states] == [Status.TIMED_OUT, Status.SUCCEEDED, Status.SUCCEEDED]
    message = last_error(result.states[0])
    assert "15 s" in message
    assert threaded or (f"It was at {__file__}:" in message and message.endswith(", in sleeps."))


def test_a_coroutine_that_will_not_be_cancelled_is_abandoned_and_counted() -> None:
    release = threading.Event()

    @etude.agent(timeout_s=0.1)
    async def stubborn(task: Task) -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        await ends(queue, 1)
        await until(lambda: runner.abandoned == 1)
        release.set()
        await until(lambda: runner.abandoned == 0)

    result = played(stubborn, wanted(1), pace=replace(QUICK, cancel_s=0.1), meanwhile=meanwhile)
    assert result.only.status is Status.TIMED_OUT


def test_a_runner_with_too_many_abandoned_attempts_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.agents.runner.MAX_ABANDONED", 2)
    release = threading.Event()

    @etude.agent(timeout_s=0.1)
    def hangs(task: Task) -> None:
        release.wait(20)

    async def scene() -> None:
        queue = LocalRolloutQueue(open_store())
        await queue.enqueue(wanted(4))
        try:
            async with asyncio.timeout(10):
                await Runner(queue, hangs, timeouts=QUICK, max_concurrency=2).run()
        finally:
            await queue.close()

    with pytest.raises(AgentError, match=r"2 cancelled attempts of the agent hangs did not end"):
        asyncio.run(scene())
    release.set()


def test_a_cancelled_rollout_stops_its_agent() -> None:
    seen: list[str] = []

    @etude.agent
    async def sleeps(task: Task) -> None:
        seen.append("began")
        try:
            await asyncio.sleep(20)
        finally:
            seen.append("cancelled")

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        while not seen:
            await asyncio.sleep(0.02)
        (runs,) = (await queue.runners())[0].running
        await queue.cancel([runs.rollout], "not needed")
        while len(seen) < 2:
            await asyncio.sleep(0.02)

    result = played(sleeps, wanted(1), meanwhile=meanwhile)
    assert result.only.status is Status.CANCELLED and result.only.why == "not needed"


def test_a_runner_with_a_blocked_loop_falls_silent_and_another_retries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.agents.runner.MAX_LOOP_DELAY", 0.2)
    tried, retried = threading.Event(), threading.Event()

    @etude.agent
    async def blocks(task: Task) -> float:
        if not tried.is_set():
            tried.set()
            assert retried.wait(20)
        retried.set()
        return 1.0

    limits = RolloutLimits(timeout_s=20, unresponsive_s=0.5, max_attempts=2)

    async def scene() -> list[RolloutState]:
        queue = LocalRolloutQueue(open_store())
        await queue.enqueue(wanted(1, limits))
        runners = [Runner(queue, blocks, timeouts=QUICK, max_concurrency=1) for _ in range(2)]
        threads = [threading.Thread(target=lambda runner=runner: asyncio.run(runner.run())) for runner in runners]
        for thread in threads:
            thread.start()
        result = await ends(queue, 1)
        for runner in runners:
            runner.stop()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        await queue.close()
        return result

    (state,) = asyncio.run(scene())
    assert [attempt.status for attempt in state.attempts] == [Status.UNRESPONSIVE, Status.SUCCEEDED]
    assert "its event loop was blocked" in caplog.text


@pytest.mark.parametrize("stops", [1, 2])
def test_a_stopped_runner_lets_attempts_end_unless_it_is_stopped_twice(stops: int) -> None:
    async def scene() -> RolloutState:
        began, may_end = asyncio.Event(), asyncio.Event()

        @etude.agent
        async def takes(task: Task) -> float:
            began.set()
            await may_end.wait()
            return 1.0

        queue = LocalRolloutQueue(open_store())
        (id,) = await queue.enqueue(wanted(1))
        runner = Runner(queue, takes, timeouts=QUICK)
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(began.wait(), 10)
        for _ in range(stops):
            runner.stop()
        if stops == 1:
            await asyncio.sleep(0.05)  # one that cancels its attempts does it now
            may_end.set()
        await running
        state = queue.journal.rollout(id)
        await queue.close()
        return state

    state = asyncio.run(scene())
    if stops == 1:
        assert state.status is Status.SUCCEEDED
    else:
        assert state.status is Status.QUEUED and state.attempts[0].status is Status.INFRA_ERROR
        assert "stopped" in state.attempts[0].error


def test_a_runner_plays_at_most_its_limit_at_once() -> None:
    now, most = [0], [0]
    lock, three = threading.Lock(), threading.Barrier(3)

    @etude.agent(max_concurrency=3)
    def agent(task: Task) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        three.wait(20)
        time.sleep(0.02)  # more would begin now
        with lock:
            now[0] -= 1

    played(agent, wanted(12), max_concurrency=5)
    assert most == [3]


def test_a_set_up_that_fails_or_hangs_is_reported() -> None:
    class Fails(etude.Agent):
        def setup(self) -> None:
            raise OSError("no index")

        def run(self, task: Task) -> None: ...

    class Hangs(Fails):
        async def setup(self) -> None:
            await asyncio.sleep(20)

    async def scene(agent: etude.Agent, timeouts: RunnerTimeouts = QUICK) -> None:
        queue = LocalRolloutQueue(open_store())
        try:
            await Runner(queue, agent, timeouts=timeouts).run()
        finally:
            await queue.close()

    with pytest.raises(AgentError, match="The agent Fails could not be set up: OSError: no index"):
        asyncio.run(scene(Fails()))
    with pytest.raises(AgentError, match=r"longer than 0\.1 s"):
        asyncio.run(scene(Hangs(), replace(QUICK, setup_s=0.1)))


def test_runners_share_the_work() -> None:
    who: set[str] = set()
    together = threading.Barrier(3)

    @etude.agent
    def agent(task: Task) -> None:
        who.add(threading.current_thread().name)
        together.wait(20)

    async def scene() -> None:
        queue = LocalRolloutQueue(open_store())
        await queue.enqueue(wanted(39))
        runners = [Runner(queue, agent, f"r{number}", timeouts=QUICK, max_concurrency=1) for number in range(3)]
        running = [asyncio.create_task(runner.run()) for runner in runners]
        result = await ends(queue, 39)
        assert {state.status for state in result} == {Status.SUCCEEDED}
        assert sorted(runner.name for runner in await queue.runners()) == ["r0", "r1", "r2"]
        for runner in runners:
            runner.stop()
        await asyncio.gather(*running)
        assert [sum(runner.outcomes.values()) for runner in runners] == [13] * 3
        await queue.close()

    asyncio.run(scene())
    assert who == {"etude-r0", "etude-r1", "etude-r2"}


def test_invalid_timeouts_are_refused() -> None:
    with pytest.raises(AgentError, match=r"RunnerTimeouts\.heartbeat_s is 0"):
        RunnerTimeouts(heartbeat_s=0)


def test_many_attempts_of_one_task_are_tried_again_as_its_limits_say() -> None:
    tries: list[Any] = []

    @etude.agent
    async def agent(rollout: Any) -> float:
        tries.append(rollout.attempt)
        assert rollout.attempt > 0, "not at first"
        return 1.0

    result = asyncio.run(play(agent, wanted(1, replace(ONCE, max_attempts=2))))
    assert result.only.status is Status.SUCCEEDED and tries == [0, 1]
