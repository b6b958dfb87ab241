"""Agents that runner processes load by name, and a program that has such processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import etude
from etude.agents.agent import load_agent
from etude.agents.execution.processes import ProcessRunners
from etude.records import Task
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits
from tests.agents.rollout_queues import QUICK, ends, wanted


def note(path: str, text: str) -> None:
    """Add to a file."""
    with Path(path).open("a") as file:
        file.write(text)


@etude.agent
async def who(task: Task) -> float:
    """Return the id of the process that plays it, as the reward."""
    await asyncio.sleep(0.02)
    return float(os.getpid())


@etude.agent
def starts(task: Task) -> None:
    """Start a program in the runner's process group, and wait."""
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    note(task["pids"], f"{child}\n{os.getpid()}\n")
    time.sleep(60)


@etude.agent
async def waits(task: Task) -> None:
    """Run until cancelled, and write that down."""
    note(task["log"], "began\n")
    try:
        await asyncio.sleep(60)
    finally:
        note(task["log"], "cancelled\n")


@etude.agent
async def slow(task: Task) -> float:
    """Take half a second."""
    Path(task["log"]).write_text("began")
    await asyncio.sleep(0.5)
    return 1.0


@etude.agent
def stops(task: Task) -> None:
    """Stop its own process, so that only a kill ends it."""
    note(task["log"], "began\n")
    os.kill(os.getpid(), 19)


@etude.agent
def forks(task: Task) -> None:
    """Fork a process that runs no other program, and wait."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    note(task["pids"], f"{child}\n{os.getpid()}\n")
    time.sleep(60)


@etude.agent
async def stubborn(task: Task) -> None:
    """Continue when cancelled."""
    note(task["log"], "began\n")
    for _ in range(1000):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


@etude.agent
async def hangs_in_a_thread(task: Task) -> None:
    """Wait for a thread that Python waits for too."""
    note(task["log"], "began\n")
    await asyncio.to_thread(time.sleep, 60)


@etude.agent
async def waits_for_a_file(task: Task) -> float:
    """Wait until a file is there."""
    note(task["log"], "began\n")
    while not Path(task["file"]).exists():
        await asyncio.sleep(0.05)
    return 1.0


class Broken(etude.Agent):
    """An agent whose setup fails."""

    def setup(self) -> None:
        raise OSError("no index here")

    def run(self, task: Task) -> None: ...


class Made(etude.Agent):
    """An agent that holds the value it was created with."""

    def __init__(self, value: float) -> None:
        self.value = value

    def run(self, task: Task) -> float:
        return self.value


def serve_one_rollout(logs: Path, timeout_s: float) -> None:
    """Serve a rollout to a runner in a process, and print how it ended: a program that tests stop meanwhile."""
    queue = LocalRolloutQueue(open_store())
    limits = RolloutLimits(timeout_s=timeout_s, max_attempts=1)
    requests = wanted(1, limits, {"log": str(logs / "log"), "file": str(logs / "file")})
    with serve(queue, queue.keyring) as server:
        asyncio.run(queue.enqueue(requests))
        with ProcessRunners(waits_for_a_file, server.url, queue.keyring.runner, logs=logs, timeouts=QUICK):
            (state,) = asyncio.run(ends(queue, 1))
    print(state.status.value, flush=True)
    asyncio.run(queue.close())


if __name__ == "__main__":  # a program that has runners; tests kill or interrupt it
    url, key, logs, *named = sys.argv[1:]

    agent: etude.Agent = etude.command(
        "echo $$ >> $PIDS; sleep 60 & echo $! >> $PIDS; wait", environment={"PIDS": f"{logs}/pids"}
    )
    if named:
        agent = load_agent(f"tests.agents.execution.played:{named[0]}")
    with ProcessRunners(agent, url, key, 2, logs=Path(logs), timeouts=QUICK) as runners:
        Path(logs, "runners").write_text("")
        while True:
            Path(logs, "runners").write_text(" ".join(map(str, runners.pids)))
            time.sleep(0.05)
