"""A rollout queue holds only the open work in memory, for any number of finished rollouts."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path

from etude.records import Outcome, Task
from etude.store import Journal, RolloutsAdmitted, open_store
from etude.store.queue import waiters as waiting
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, RolloutRequest
from tests.alone import alone
from tests.store.made import turn

FIRST, MORE, AT_ONCE = 1_000, 2_000, 50
SAID = turn(seed=0)


async def play(queue: LocalRolloutQueue, journal: Journal, first: int, count: int) -> None:
    """Play this many rollouts to their end, with a turn and a note each, and train on them."""
    cursor = journal.position
    for start in range(first, first + count, AT_ONCE):
        ids = await queue.enqueue(
            [RolloutRequest(Task(n, {"prompt": "?" * 100})) for n in range(start, start + AT_ONCE)]
        )
        claims = await queue.claim("runner", AT_ONCE, 10.0)
        await asyncio.gather(*(queue.record_turn(got.attempt_id, SAID) for got in claims))
        await asyncio.gather(*(queue.record_note(got.attempt_id, "seen", "!" * 100) for got in claims))
        await asyncio.gather(
            *(queue.finish(got.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)) for got in claims)
        )
        ended = 0
        while ended < AT_ONCE:
            cursor, states = await queue.wait(cursor, 10.0)
            ended += len(states)
        journal.append([RolloutsAdmitted(start, tuple(ids), end=0, version=0)])


def at_hand() -> int:
    """Return the bytes of objects that were allocated since tracing began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _grown(directory: Path) -> int:
    journal = open_store(directory / "journal.sqlite")
    queue = LocalRolloutQueue(journal)
    tracemalloc.start()
    try:
        await play(queue, journal, 0, FIRST)
        before = at_hand()
        await play(queue, journal, FIRST, MORE)
        return at_hand() - before
    finally:
        tracemalloc.stop()
        await queue.close()
        journal.close()


def grown(directory: Path) -> int:
    """Return the bytes by which a queue grows while it sees many more rollouts."""
    waiting.MAX_RECENT_ENDS = 64  # so that these are kept before the measurement
    return asyncio.run(_grown(directory))


def test_memory_does_not_grow_with_the_number_of_ended_rollouts(tmp_path: Path) -> None:
    assert alone(grown, tmp_path) / MORE < 32, "bytes for each rollout that ended, of whose words there are hundreds"
