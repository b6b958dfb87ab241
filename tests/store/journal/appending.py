"""A process that writes a journal and prints each acknowledged position, until it is killed.

It is started as `python -m tests.store.journal.appending PATH`. Each batch is a task and as many rollouts as its row
says; every line it prints is the position that `append` returned.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from etude.store import Event, Journal, RolloutQueued, TaskIssued, open_store
from tests.store.made import tried

MOST = 12


def batch(task: int, chance: random.Random) -> list[Event]:
    """Return a task, between one and `MAX_ABANDONED_THREADS` rollouts of it, and a complete attempt at the first."""
    size = chance.randint(1, MOST)
    ids = range(task * MOST, task * MOST + size)
    queued = [RolloutQueued(id, task, id % MOST) for id in ids]
    return [TaskIssued(task, size, "s", {"prompt": "?" * 200}), *queued, *tried(task * MOST)]


def append_forever(store: Journal) -> None:
    """Write one batch after the other, and print the position after each."""
    chance = random.Random(os.getpid())
    task = len(store.tasks())
    while True:
        sys.stdout.write(f"{store.append(batch(task, chance))}\n")
        sys.stdout.flush()
        task += 1


if __name__ == "__main__":
    append_forever(open_store(Path(sys.argv[1])))
