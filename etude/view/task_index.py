"""The tasks of a run's journal by the row of the data that each was made from; the journal may grow meanwhile."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

import numpy as np

from etude.store import Journal, TaskIssued, TaskState
from etude.store.journal.journal import DamagedJournalError


class TaskIndex:
    """The ordinal, the row and the use of each task. Tasks that score the model have rows of other data."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._position = 0
        """All tasks up to here are read."""
        self._ordinals = array("q")
        self._rows = array("q")
        self._scores = array("b")
        """1 for a task that scores the model."""

    def refresh(self, seconds: float) -> bool:
        """Read the tasks that were issued since the last call, for at most some seconds; return True if all are
        read."""
        newest, end = self._journal.position, time.monotonic() + seconds
        for position, event in self._read(self._position, newest):
            if event is not None:
                self._ordinals.append(event.task)
                self._rows.append(event.row)
                self._scores.append(event.use == "val")
            self._position = position
            if time.monotonic() > end:
                return False
        self._position = newest
        return True

    def _read(self, after: int, until: int) -> Iterator[tuple[int, TaskIssued | None]]:
        """Yield the events between two positions. Halving the distance finds a damaged one, which is None."""
        position = after
        try:
            for position, event in self._journal.read(after, kinds=(TaskIssued,), until=until):
                assert isinstance(event, TaskIssued)
                yield position, event
        except DamagedJournalError:
            if until - position == 1:
                yield until, None
                return
            middle = (position + until) // 2
            yield from self._read(position, middle)
            yield from self._read(middle, until)

    def of_same_row(self, task: TaskState) -> list[int]:
        """Return the ordinals of all tasks that were made from the same row as this one, in their order."""
        if not self._ordinals:
            return []
        columns = (self._ordinals, self._rows, self._scores)
        ordinals, rows, scores = (np.array(column, np.int64) for column in columns)
        same = (rows == task.row) & (scores == (task.use == "val"))
        return sorted(ordinals[same].tolist())
