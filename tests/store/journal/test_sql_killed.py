"""Acknowledged events are kept after the writer was killed, and no batch is there in part."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from etude.store import Journal, Phase, RolloutQueued, TaskIssued, open_store
from etude.store.journal.event_records import encode
from tests.store.journal.appending import MOST, batch

ROOT = Path(__file__).parents[3]


def written_until_killed(path: Path, seconds: float) -> int:
    """Start a writer, kill it this long after its first acknowledgement, and return the last acknowledged position."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.store.journal.appending", str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert writer.stdout is not None
    with writer.stdout:
        first = writer.stdout.readline()
        time.sleep(seconds)
        writer.kill()
        lines = [first, *writer.stdout]
    writer.wait()
    return int([line for line in lines if line.endswith("\n")][-1])


def check_whole(store: Journal) -> None:
    """Check that every batch is complete, with its payloads, and that the states follow from the events."""
    events = [event for _, event in store.read()]
    assert len(events) == store.position
    sizes = {event.task: event.row for event in events if isinstance(event, TaskIssued)}
    queued = [event.rollout for event in events if isinstance(event, RolloutQueued)]
    assert queued == [task * MOST + sample for task, size in sizes.items() for sample in range(size)]
    assert len(events) == sum(1 + size + 4 for size in sizes.values())
    assert [state.id for state in store.rollouts(Phase.FINISHED)] == [task * MOST for task in sizes]
    assert [state for (kind, _), state in sorted(store.replay().items()) if kind == "rollout"] == store.rollouts()


def killed_again_and_again(path: Path, times: int) -> None:
    chance = random.Random(times)
    for _ in range(times):
        acknowledged = written_until_killed(path, chance.uniform(0, 0.2))
        with closing(open_store(path)) as store:
            assert store.position >= acknowledged > 0
            check_whole(store)


def test_acknowledged_events_survive_kill_9(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path / "journal.db", 4)


@pytest.mark.soak
def test_acknowledged_events_survive_kill_9_fifty_times(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path / "journal.db", 50)


def test_a_log_cut_anywhere_is_a_journal_of_whole_batches(tmp_path: Path) -> None:
    """As after a loss of power: the write-ahead log is short, or its last page has other bytes."""
    live, chance = tmp_path / "live.db", random.Random(0)
    with closing(open_store(live)) as store:
        for task in range(30):
            store.append(batch(task, chance))
        for name in ("live.db", "live.db-wal"):
            shutil.copy(tmp_path / name, tmp_path / name.replace("live", "whole"))
        all_events = [encode(event) for _, event in store.read()]
    log = (tmp_path / "whole.db-wal").read_bytes()
    lengths = set()
    for number in range(12):
        cut = tmp_path / f"cut{number}.db"
        shutil.copy(tmp_path / "whole.db", cut)
        keep = chance.randint(len(log) // 3, len(log))
        cut.with_name(f"{cut.name}-wal").write_bytes(log[:keep] + bytes(chance.choice([0, 1, 5000])))
        with closing(open_store(cut)) as store:
            check_whole(store)
            assert [encode(event) for _, event in store.read()] == all_events[: store.position]
            lengths.add(store.position)
            store.append(batch(len(store.tasks()), chance))
            check_whole(store)
    assert len(lengths) > 4, "the cuts fell in different batches"
