"""Rewards that agents emit: from any code within an attempt, and from no other."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

import etude
from etude.agents.attempt_context import parse_reward
from etude.agents.runner import Runner
from etude.errors import AgentError, ConfigError
from etude.records import Completion, Task, Turn
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId
from tests.agents.rollout_queues import ends, played, wanted
from tests.waits import until


def test_functions_and_coroutines_emit_rewards() -> None:
    @etude.agent
    def threaded(task: Task) -> None:
        etude.emit.reward({"right": 1.0, "short": 0.5})

    @etude.agent
    async def waits(task: Task) -> None:
        async def deeper() -> None:
            etude.emit.reward(np.float64(1.5))

        await asyncio.create_task(deeper())
        await asyncio.to_thread(etude.emit.event, "looked", {"at": [1, 2]})

    assert played(threaded, wanted(2)).rewards == [1.5, 1.5]
    result = played(waits, wanted(1))
    assert result.rewards == [1.5] and result.events[0][0]["data"] == {"at": [1, 2]}


def test_rewards_of_turns_add_up() -> None:
    key: list[AttemptId] = []
    recorded = threading.Event()

    @etude.agent
    def agent(rollout: Any) -> float:
        key.append(AttemptId(rollout.id, rollout.attempt))
        assert recorded.wait(10)
        for value in (0.25, 0.5):
            etude.emit.reward(value, turn=0)
        return 1.0

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        while not key:
            await asyncio.sleep(0.01)
        await queue.record_turn(key[0], Turn([1], Completion([2], [0.0], [0], "stop"), 0))
        recorded.set()

    result = played(agent, wanted(1), meanwhile=meanwhile)
    assert result.only.status is Status.SUCCEEDED, result.error
    assert result.rewards == [1.75] and result.only.last is not None and result.only.last.paid == 0.75


def test_concurrent_attempts_keep_their_own_rewards() -> None:
    @etude.agent
    def agent(task: Task) -> None:
        with ThreadPoolExecutor(2) as pool:
            context = copy_context()
            pool.submit(context.run, etude.emit.event, "n", task["n"]).result()
        etude.emit.reward(task["n"])

    result = played(agent, wanted(30), max_concurrency=10)
    assert result.rewards == [float(n) for n in range(30)]
    assert [[event["data"] for event in events] for events in result.events] == [[n] for n in range(30)]


def test_a_thread_of_an_agent_belongs_to_the_only_active_attempt() -> None:
    errors: list[str] = []
    together = threading.Barrier(2)

    def says(task: Task) -> None:
        try:
            etude.emit.reward(task["n"])
        except AgentError as error:
            errors.append(str(error))

    @etude.agent
    def agent(task: Task) -> None:
        if task["n"] > 0:
            together.wait(10)
        thread = threading.Thread(target=says, args=(task,))
        thread.start()
        thread.join()
        if task["n"] > 0:
            together.wait(10)

    assert played(agent, wanted(1)).rewards == [0.0] and not errors
    result = played(agent, wanted(3), max_concurrency=3)
    assert result.rewards[1:] == [None, None]
    assert "attempts are active" in errors[-1] and "copy_context" in errors[-1]


def test_a_thread_that_outlives_its_attempt_rewards_no_other_attempt() -> None:
    errors: list[str] = []
    go, gone = threading.Event(), threading.Event()

    def says() -> None:
        go.wait(10)
        try:
            etude.emit.reward(100.0)
        except AgentError as error:
            errors.append(str(error))
        gone.set()

    @etude.agent
    def agent(task: Task) -> float:
        if task["n"] == 0:
            threading.Thread(target=says).start()
        else:
            go.set()
            gone.wait(10)
        return 0.5

    assert played(agent, wanted(2), max_concurrency=1).rewards == [0.5, 0.5]
    assert "older than the active attempt" in errors[0] and "copy_context" in errors[0]


def test_a_number_too_large_for_a_float_is_no_reward() -> None:
    with pytest.raises(AgentError, match="it returned inf; a reward is finite"):
        parse_reward(10**400, "it returned")


def test_a_final_reward_is_emitted_once() -> None:
    @etude.agent
    async def twice(task: Task) -> None:
        etude.emit.reward(1.0)
        etude.emit.reward(1.0)

    @etude.agent
    async def both(task: Task) -> float:
        etude.emit.reward(0.5)
        return 1.0

    assert "has its final reward already" in played(twice, wanted(1)).error
    result = played(both, wanted(1))
    assert result.only.status is Status.FAILED and "gave its final reward twice" in result.error


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda: etude.emit.reward(float("nan")), "got nan; a reward is finite"),
        (lambda: etude.emit.reward(1.0, turn=-1), "turns are counted from 0"),
        (lambda: etude.emit.event("e", object()), "cannot be written as JSON"),
        (lambda: etude.emit.event("e", float("nan")), "cannot be written as JSON"),
        (lambda: etude.emit.event("e", "x" * (1 << 20)), "is too large"),
        (lambda: etude.emit.event("", 1), "a name is a string"),
    ],
)
def test_an_invalid_emission_is_refused_at_the_call(say: Any, message: str) -> None:
    @etude.agent
    async def agent(task: Task) -> None:
        say()

    result = played(agent, wanted(1))
    assert result.only.status is Status.FAILED and message in result.error


def test_a_reward_for_an_unknown_turn_fails_the_attempt() -> None:
    @etude.agent
    async def agent(task: Task) -> None:
        etude.emit.reward(1.0, turn=7)

    result = played(agent, wanted(1))
    assert result.only.status is Status.FAILED and "were not stored" in result.error, result.error


def test_an_emission_outside_of_any_attempt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentError, match="not part of an attempt"):
        etude.emit.reward(1.0)
    monkeypatch.setenv("ETUDE_STORE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("ETUDE_REWARD_KEY", "key")
    with pytest.raises(ConfigError, match="ETUDE_ROLLOUT is ''"):
        etude.emit.reward(1.0)


def test_an_ended_attempt_takes_no_more_rewards() -> None:
    errors: list[str] = []

    ended = threading.Event()

    @etude.agent(timeout_s=0.1)
    def agent(task: Task) -> None:
        assert ended.wait(20)
        try:
            etude.emit.reward(1.0)
        except AgentError as error:
            errors.append(str(error))

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        await ends(queue, 1)
        ended.set()
        await until(lambda: errors)

    result = played(agent, wanted(1), meanwhile=meanwhile)
    assert result.only.status is Status.TIMED_OUT and "has ended" in errors[0]
