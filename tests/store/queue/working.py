"""A process that works on a rollout queue and prints its acknowledged calls, until it is killed.

It is started as `python -m tests.store.queue.working PATH`, and continues the work of an earlier one. Each line it
prints is one acknowledged call: `queued 12`, `turn 12.0 1`, `rewarded 12.0 0.5`, `noted 12.0`, `finished 12.0`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from etude.records import Outcome, Task
from etude.store import open_store
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, Claim, RolloutLimits, RolloutRequest
from tests.store.made import turn

LIMITS = RolloutLimits(unresponsive_s=3600.0, max_attempts=2)


def say(line: str) -> None:
    """Print one acknowledged call, in one write."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def produce(queue: LocalRolloutQueue, task: int) -> None:
    """Queue group after group, each for a different task."""
    while True:
        issued = Task(task, {"prompt": "?" * 100})
        for id in await queue.enqueue([RolloutRequest(issued, sample, limits=LIMITS) for sample in range(4)]):
            say(f"queued {id}")
        task += 2


async def play(queue: LocalRolloutQueue, got: Claim) -> None:
    """Play a rollout to its end; some fail."""
    where = f"{got.attempt_id.rollout}.{got.attempt_id.attempt}"
    for _ in range(2):
        index = await queue.record_turn(got.attempt_id, turn(seed=got.attempt_id.rollout))
        say(f"turn {where} {index}")
    await queue.record_reward(got.attempt_id, 0.5, turn=1)
    say(f"paid {where}")
    await queue.record_note(got.attempt_id, "seen", [got.attempt_id.rollout])
    say(f"noted {where}")
    if got.attempt_id.rollout % 5 == 0 and got.attempt_id.attempt == 0:
        await queue.finish(got.attempt_id, AttemptReport(Outcome.FAILED, "as it happens"))
    else:
        await queue.finish(got.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=float(got.attempt_id.rollout)))
    say(f"finished {where}")


async def work(path: Path) -> None:
    """Queue and play at the same time."""
    journal = open_store(path)
    first = 2 * len(journal.tasks())
    queue = LocalRolloutQueue(journal)

    async def run(name: str) -> None:
        while True:
            for got in await queue.claim(name, 2, 10):
                await play(queue, got)

    await asyncio.gather(produce(queue, first), produce(queue, first + 1), *(run(f"runner {n}") for n in range(16)))


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
