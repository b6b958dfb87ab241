"""The cases of `bench.agents` for Etude alone: the endpoint, a start, a large store, and kills."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from bench.agents_load import Load
from bench.workers import ROOT, Worker
from etude.errors import StoreError
from etude.records import Outcome, Task
from etude.store import RolloutState, Status, open_store
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, RolloutLimits, RolloutQueue, RolloutRequest

__all__ = ["Acknowledged", "endpoint", "grown", "killed", "started"]

ATTEMPTS = 4000
"""Open attempts at the endpoint, of four calls each: more calls than are made."""
CONNECTIONS = 16
OPENED_S = 6.0
"""Seconds of calls at half the load."""
PATIENT = RolloutLimits(timeout_s=None, unresponsive_s=3600.0)
SMALL, LARGE = 1_000, 100_000
"""Rollouts in the store."""


@contextmanager
def server(folder: Path, attempts: int = 0, core: int | None = None) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """Start a store and an endpoint in their own process, and yield the process and its addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.agents_server", str(folder), str(attempts)]
    worker = Worker("the server", [*command, *([] if core is None else [str(core)])], folder / "server.log")
    try:
        yield worker, worker.hear()
    finally:
        worker.close()


# -- the endpoint ------------------------------------------------------------------------------------------------------


def endpoint(folder: Path, windows: int, say: Callable[[], None]) -> dict[str, float]:
    """Time answers on one core, as the median of several windows, and the seconds of calls at half that load.

    The client runs on the other cores, if there are any.
    """
    cores = sorted(os.sched_getaffinity(0))
    with server(folder, ATTEMPTS, cores[-1]) as (_, server_info):
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:-1])
        try:
            return asyncio.run(_asked(Load(server_info["url"], server_info["keys"]), windows, say))
        finally:
            os.sched_setaffinity(0, cores)


async def _asked(load: Load, windows: int, say: Callable[[], None]) -> dict[str, float]:
    rates = []
    for _ in range(windows):
        rates.append(await load.closed(CONNECTIONS, 1.0, 0.2))
        say()
    rate = median(rates)
    took = sorted(await load.opened(rate / 2, OPENED_S))
    say()
    half, last = took[len(took) // 2], took[int(0.99 * len(took))]
    return {"rate": rate, "asked": rate / 2, "p50": half, "p99": last}


# -- the start ---------------------------------------------------------------------------------------------------------


def started(folder: Path, times: int, say: Callable[[], None]) -> float:
    """Return the median seconds from `import etude.agents` in a new process to its first claim."""
    took = []
    with server(folder) as (_, server_info):
        asyncio.run(_queued(server_info, times))
        for _ in range(times):
            command = [sys.executable, "-m", "bench.agents_start", server_info["url"], server_info["key"]]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
            took.append(float(done.stdout))
            say()
    return median(took)


async def _queued(server_info: dict[str, Any], count: int) -> None:
    queue = RemoteRolloutQueue(server_info["url"], server_info["key"])
    await queue.enqueue([RolloutRequest(Task(n, {"n": n})) for n in range(count)])
    await queue.close()


# -- a large store -----------------------------------------------------------------------------------------------------


def grown(folder: Path, rounds: int, say: Callable[[], None]) -> dict[str, float]:
    """Time a rollout at a rollout queue over a small journal file and over a large one, in turns.

    A rollout is enqueued, claimed, finished and awaited. The result is in seconds, with the median of the rounds'
    ratios.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_grown(folder, rounds, say))


async def _grown(folder: Path, rounds: int, say: Callable[[], None]) -> dict[str, float]:
    queues = {count: LocalRolloutQueue(open_store(folder / f"{count}.sqlite")) for count in (SMALL, LARGE)}
    cursors, stored = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0)

    async def play(count: int, many: int) -> float:
        queue, began = queues[count], time.perf_counter()
        first = stored[count]
        await queue.enqueue([RolloutRequest(Task(n, {"n": n}), limits=PATIENT) for n in range(first, first + many)])
        claims = await queue.claim("bench", many, 10.0)
        assert len(claims) == many, "every rollout that was queued is claimed"
        await asyncio.gather(
            *(queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)) for claim in claims)
        )
        while stored[count] < first + many:
            cursors[count], ended = await queue.wait(cursors[count], 10.0)
            stored[count] += len(ended)
        return (time.perf_counter() - began) / many

    for count in queues:
        while stored[count] < count:
            await play(count, min(1000, count - stored[count]))
            say()
    took = [{count: await play(count, 200) for count in queues} for _ in range(rounds)]
    for queue in queues.values():
        await queue.close()
        queue.journal.close()
    ratio = median(durations[LARGE] / durations[SMALL] for durations in took)
    small, large = (median(durations[count] for durations in took) for count in (SMALL, LARGE))
    return {"small": small, "large": large, "ratio": ratio}


# -- kills -------------------------------------------------------------------------------------------------------------


def killed(folder: Path, times: int, say: Callable[[], None]) -> dict[str, int]:
    """Kill a store by SIGKILL under load, this number of times.

    Returns the number of acknowledged ends, and the number of acknowledged writes that are missing.
    """
    acknowledged = Acknowledged()
    for number in range(times):
        with server(folder) as (worker, server_info):
            asyncio.run(_loaded(server_info, acknowledged, worker, 1.0 + 0.1 * number))
        say()
    journal = open_store(folder / "journal.sqlite")
    try:
        lost = acknowledged.lost({state.id: state for state in journal.rollouts()})
    finally:
        journal.close()
    return {"kills": times, "acknowledged": len(acknowledged.finished), "lost": lost}


class Acknowledged:
    """The writes that a store has acknowledged."""

    def __init__(self) -> None:
        self.queued: set[int] = set()
        self.finished: dict[AttemptId, float] = {}

    def lost(self, states: dict[int, RolloutState]) -> int:
        """Return the number of acknowledged writes that are missing."""
        lost = len(self.queued - states.keys())
        for key, reward in self.finished.items():
            attempts = states[key.rollout].attempts if key.rollout in states else ()
            ends = [attempt for attempt in attempts[key.attempt :][:1] if attempt.status == Status.SUCCEEDED]
            lost += not (ends and ends[0].total == reward)
        return lost


async def _loaded(server_info: dict[str, Any], acknowledged: Acknowledged, worker: Worker, seconds: float) -> None:
    """Enqueue and play at full speed until the server is killed."""
    queue = RemoteRolloutQueue(server_info["url"], server_info["key"], patience_s=0.2)

    async def enqueue() -> None:
        while True:
            first = len(acknowledged.queued)
            wanted = [RolloutRequest(Task(n, {"n": n}), id=n, limits=PATIENT) for n in range(first, first + 64)]
            acknowledged.queued.update(await queue.enqueue(wanted))

    async def play(name: str) -> None:
        while True:
            for claim in await queue.claim(name, 8, 10.0):
                await _handed_in(queue, claim.attempt_id, acknowledged)

    work = [asyncio.create_task(coroutine) for coroutine in (enqueue(), *(play(f"runner {n}") for n in range(16)))]
    await asyncio.sleep(seconds)
    worker.process.kill()
    for task in work:
        task.cancel()
        with suppress(StoreError, asyncio.CancelledError):
            await task
    await queue.close()


async def _handed_in(queue: RolloutQueue, key: AttemptId, acknowledged: Acknowledged) -> None:
    reward = float(key.rollout)
    if await queue.finish(key, AttemptReport(Outcome.SUCCEEDED, reward=reward)):
        acknowledged.finished[key] = reward
