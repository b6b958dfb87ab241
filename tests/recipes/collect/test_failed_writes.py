"""Writes of the journal that fail once, each in its turn, as on a disk that is full for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Any

import pytest

from etude.errors import StoreError
from etude.store import Journal, open_store
from etude.store.queue.rollout_queue import RolloutRequest
from tests.recipes.collect.test_sources import sourced
from tests.recipes.test_replays import Saved, saved
from tests.recipes.test_stale_rollouts import GIVEN, STEPS, Versioned, judged

DISK_FULL = "the disk is full"


class FailingWrites:
    """Lets one write of a journal fail. Nothing of it is written, and the next one succeeds."""

    def __init__(self, store: Journal, failing: int) -> None:
        """failing: the number of the write that fails, from 1."""
        self._write, self._numbers, self._failing = store._write, count(1), failing
        self.failed = False
        store._write = self  # type: ignore[method-assign]

    def __call__(self, *written: Any) -> None:
        """Write a batch, or fail."""
        if next(self._numbers) == self._failing:
            self.failed = True
            raise StoreError(DISK_FULL)
        self._write(*written)


def run_and_save(store: Journal, checkpoints: list[Saved], **options: Any) -> None:
    """Continue the run from its last checkpoint to its end, and save after each step, as the loop does."""
    engine, resumed = Versioned(), checkpoints[-1]
    with sourced(engine, store, judged, **options, **resumed._asdict()) as source:
        engine.version = resumed.step
        source.published(resumed.step)
        for step in range(resumed.step + 1, STEPS + 1):
            source.next(step)
            engine.version = step
            source.published(step)
            time.sleep(0.003)  # the scores of the step, during which the next tasks are issued
            checkpoints.append(saved(source, step))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_run_whose_write_fails_once_ends_with_that_error_and_loses_no_task(bound: int) -> None:
    options = GIVEN | {"max_staleness": bound, "refill": 1, "sampler": "curriculum"}
    with closing(open_store()) as store:
        run_and_save(store, [Saved()], **options)
        whole, last = store.admitted(), len(store.tasks())
    for failing in count(1 + bound % 2, 2):
        with closing(open_store()) as store:
            checkpoints, writes = [Saved()], FailingWrites(store, failing)
            try:
                run_and_save(store, checkpoints, **options)
            except StoreError as error:
                assert str(error) == DISK_FULL
                run_and_save(store, checkpoints, **options)
            else:
                assert not writes.failed, f"the run went on after write {failing} had failed"
                break
            issued = [task.id for task in store.tasks()]
            assert issued == list(range(last)), f"after write {failing} a task was left out"
            assert store.admitted() == whole, f"after write {failing} a step trained on other tasks"
    assert failing > 3 * STEPS, "many writes failed in their turn"


def test_a_save_that_waits_until_tasks_are_issued_fails_with_them() -> None:
    """A store of agents is slow to fail. Answers of the next step are being drawn, and must be cancelled first."""
    engine = Versioned(lambda request: 0 if request <= 4 else 60)
    with closing(open_store()) as store, sourced(engine, store, judged, max_staleness=1, **GIVEN) as source:

        async def start_slowly(_: Sequence[RolloutRequest]) -> None:
            await asyncio.sleep(0.05)
            raise StoreError(DISK_FULL)

        source.next(1)
        source._requested.start = start_slowly  # type: ignore[method-assign]
        source.published(1)
        with pytest.raises(StoreError, match=DISK_FULL):
            source.mark()
        with pytest.raises(StoreError, match=DISK_FULL):
            source.published(2)
