"""A rollout queue with tasks, and a runner that plays them: used by most tests of agents."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from etude.agents.agent import Agent
from etude.agents.runner import Runner, RunnerTimeouts
from etude.records import Task
from etude.running_time import EventLoop
from etude.store import RolloutState, open_store
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits, RolloutRequest

QUICK = RunnerTimeouts(heartbeat_s=0.05, poll_s=1.0, drain_s=5.0, cancel_s=0.5, patience_s=5.0, setup_s=5.0)
ONCE = RolloutLimits(timeout_s=20.0, max_attempts=1)
AWAY = {"base_url": "http://127.0.0.1:1/v1", "model": "policy"}
"""An endpoint without a server."""


def _listened_to() -> str:
    """Return an address that accepts and closes connections until the tests end."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            listening.accept()[0].close()

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


ENDPOINT = {"base_url": _listened_to(), "model": "policy"}


def wanted(count: int, limits: RolloutLimits = ONCE, fields: Mapping[str, Any] | None = None) -> list[RolloutRequest]:
    """Return this many rollout requests, each with a different task."""
    return [RolloutRequest(Task(ordinal, {"n": ordinal, **(fields or {})}), limits=limits) for ordinal in range(count)]


async def ends(queue: LocalRolloutQueue, count: int, timeout_s: float = 20.0) -> list[RolloutState]:
    """Wait for this many rollouts to end; return them by id."""
    states: list[RolloutState] = []
    cursor = 0
    async with asyncio.timeout(timeout_s):
        while len(states) < count:
            cursor, more = await queue.wait(cursor, 1.0)
            states += more
    return sorted(states, key=lambda state: state.id)


class Played:
    """The results of rollouts that a runner played."""

    def __init__(self) -> None:
        self.states: list[RolloutState] = []
        self.events: list[list[dict[str, Any]]] = []

    @property
    def only(self) -> RolloutState:
        (state,) = self.states
        return state

    @property
    def error(self) -> str:
        last = self.only.last
        assert last is not None
        return last.error

    @property
    def rewards(self) -> list[float | None]:
        return [state.last.total if state.last else None for state in self.states]


async def play(
    agent: Agent,
    rollouts: Sequence[RolloutRequest],
    *,
    pace: RunnerTimeouts = QUICK,
    endpoint: Mapping[str, str] = ENDPOINT,
    meanwhile: Callable[[LocalRolloutQueue, Runner], Awaitable[None]] | None = None,
    **options: Any,
) -> Played:
    """Have a runner play these rollouts over a journal in memory until all have ended."""
    played = Played()
    queue = LocalRolloutQueue(open_store())
    await queue.put_resource("endpoint", endpoint)
    ids = await queue.enqueue(rollouts)
    runner = Runner(queue, agent, timeouts=pace, **options)
    running = asyncio.create_task(runner.run())
    try:
        if meanwhile is not None:
            await meanwhile(queue, runner)
        waiting = asyncio.create_task(ends(queue, len(ids)))
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            waiting.cancel()
            await running
        played.states = await waiting
        played.events = [await queue.notes(state.id) if state.attempts else [] for state in played.states]
    finally:
        runner.stop()
        try:
            await running
        finally:
            await queue.close()
    return played


def played(agent: Agent, rollouts: Sequence[RolloutRequest], **options: Any) -> Played:
    """Run `play` from a test that is no coroutine."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(play(agent, rollouts, **options))
