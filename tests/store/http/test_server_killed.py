"""A server is killed under load, again and again: acknowledged calls are kept, and the load goes on."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from etude.errors import IllegalTransitionError
from etude.records import Outcome, Task
from etude.store import Status, open_store
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.queue.keys import Keyring
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, Claim, RolloutLimits, RolloutQueue, RolloutRequest
from tests.store.http.served import SECRET
from tests.store.made import turn

ROOT = Path(__file__).parents[3]
PATIENT = RolloutLimits(unresponsive_s=1.5)
"""Limits by which a claim whose reply was lost in a kill is queued again soon."""


def started(journal: Path, port: int) -> subprocess.Popen[str]:
    """Start a server, and wait until it listens."""
    command = [sys.executable, "-m", "tests.store.http.serving", str(journal), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return server


def ended(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()
    assert server.stdout is not None
    server.stdout.close()


class Load:
    """Runners that play as fast as they can, and remember their acknowledged calls."""

    def __init__(self, remote: RolloutQueue) -> None:
        self.remote = remote
        self.finished: dict[AttemptId, float] = {}
        self.turned: dict[AttemptId, int] = {}
        self.queued: set[int] = set()
        self.playing: set[AttemptId] = set()
        self.over = False

    async def queue(self) -> None:
        """Keep a few rollouts queued."""
        for first in range(0, 100_000, 8):
            ids = await self.remote.enqueue(
                [RolloutRequest(Task(id, {}), id=id, limits=PATIENT) for id in range(first, first + 8)]
            )
            self.queued.update(ids)
            if self.over:
                return
            await asyncio.sleep(0.02)

    async def play(self, claim: Claim) -> None:
        """Record one turn and finish. An attempt takes no turn after a server came back so late that it fell silent."""
        self.playing.add(claim.attempt_id)
        with suppress(IllegalTransitionError):
            self.turned[claim.attempt_id] = await self.remote.record_turn(claim.attempt_id, turn())
        reward = float(claim.attempt_id.rollout)
        if await self.remote.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=reward)):
            self.finished[claim.attempt_id] = reward
        self.playing.discard(claim.attempt_id)

    async def run(self, name: str) -> None:
        while not self.over:
            claims = await self.remote.claim(name, 8, 0.2)
            await asyncio.gather(*(self.play(claim) for claim in claims))

    async def beat(self, name: str) -> None:
        while not self.over:
            await self.remote.heartbeat(name, list(self.playing))
            await asyncio.sleep(0.3)


async def loaded(load: Load, kills: int, journal: Path, port: int) -> None:
    chance = random.Random(kills)
    server = started(journal, port)
    works = [load.queue(), *(load.run(name) for name in "ab"), *(load.beat(name) for name in "ab")]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        for _ in range(kills):
            reported = len(load.finished)
            while len(load.finished) < reported + 10:
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
            await asyncio.sleep(chance.uniform(0, 0.2))
            ended(server)
            server = await asyncio.to_thread(started, journal, port)
        load.over = True
        await asyncio.gather(*tasks)
        await load.remote.close()
    finally:
        ended(server)


def killed_again_and_again(directory: Path, kills: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    load = Load(RemoteRolloutQueue(f"http://127.0.0.1:{port}", Keyring(SECRET).admin))
    asyncio.run(loaded(load, kills, directory / "journal.db", port))
    with closing(open_store(directory / "journal.db")) as store:
        states = {state.id: state for state in store.rollouts()}
        assert load.queued <= set(states)
        assert len(load.finished) >= 10 * kills
        for key, reward in load.finished.items():
            attempt = states[key.rollout].attempts[key.attempt]
            assert (attempt.status, attempt.reward) == (Status.SUCCEEDED, reward)
        for key, index in load.turned.items():
            assert index == 0 and states[key.rollout].attempts[key.attempt].turns == 1, "a turn is written once"


def test_acknowledged_calls_survive_kill_9_of_the_server(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, 2)


@pytest.mark.soak
def test_acknowledged_calls_survive_kill_9_of_the_server_twenty_times(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, 20)
