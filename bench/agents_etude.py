"""Etude's side of `bench.agents`, in its own process: it plays the number of rollouts of each input line.

    python -m bench.agents_etude STRATEGY DIRECTORY AT_ONCE

AT_ONCE is the number of concurrent attempts of each runner. `shm` is one runner on a thread, over a journal in memory.
`cs` is two runner processes that connect to a server, over a journal in a file of that directory. Every acknowledgement
follows its commit.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import etude
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.threads import ThreadRunners
from etude.records import Outcome, Task
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutRequest

RUNNERS = {"shm": 1, "cs": 2}
WARMING = 200
"""Rollouts of the warm-up."""


@etude.agent
async def trivial(task: Task) -> float:  # noqa: ARG001
    """Return one."""
    return 1.0


@contextmanager
def at_work(strategy: str, directory: Path, max_concurrency: int) -> Iterator[LocalRolloutQueue]:
    """Yield a rollout queue with runners at work."""
    keyring = Keyring()
    queue = LocalRolloutQueue(open_store(directory / "journal.sqlite" if strategy == "cs" else None), keyring)
    try:
        if strategy == "shm":
            with ThreadRunners(queue, trivial, RUNNERS[strategy], max_concurrency=max_concurrency):
                yield queue
        else:
            with (
                serve(queue, keyring) as serving,
                ProcessRunners(
                    trivial,
                    serving.url,
                    keyring.runner,
                    RUNNERS[strategy],
                    logs=directory,
                    max_concurrency=max_concurrency,
                ),
            ):
                yield queue
    finally:
        asyncio.run(queue.close())
        queue.journal.close()


class Player:
    """Enqueues rollouts, and waits until all have succeeded."""

    def __init__(self, queue: LocalRolloutQueue) -> None:
        self.queue, self.cursor, self.next = queue, 0, 0

    async def play(self, count: int) -> None:
        """Play this number of rollouts."""
        await self.queue.enqueue([RolloutRequest(Task(self.next + n, {"n": n})) for n in range(count)])
        self.next += count
        left = count
        while left:
            self.cursor, ended = await self.queue.wait(self.cursor, 60.0)
            assert ended and all(str(state.status) == Outcome.SUCCEEDED for state in ended), "a rollout did not succeed"
            left -= len(ended)


async def answer(queue: LocalRolloutQueue) -> None:
    """Run until the input ends."""
    await queue.put_resource("endpoint", {"base_url": "http://127.0.0.1:8000/v1", "model": "policy"})
    player = Player(queue)
    await player.play(WARMING)
    print(json.dumps({"etude": etude.__version__}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        began = time.perf_counter()
        await player.play(int(line))
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    with at_work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])) as queue:
        asyncio.run(answer(queue))
