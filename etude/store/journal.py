"""The one store: an append-only journal of events, and the states derived from them.

Whoever keeps it (`memory`, `sql`) provides a transaction, records and states; what may be written and what it means is
here and in `transitions`, once. A batch is written whole or not at all, and events and states together, so that
the states are at every moment what a replay of the events gives.

Positions are dense integers from 1: `read(position)` gives what came after it, so that a reader which remembers the
last position it saw misses nothing and sees nothing twice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from heapq import merge
from operator import itemgetter
from threading import RLock
from typing import NamedTuple

from etude.errors import StoreError
from etude.records import Turn
from etude.store.blobs import Blobs
from etude.store.events import EVENTS, Admitted, Event, Record, TurnRecorded, decode, encode
from etude.store.states import STATES, Phase, RolloutState, S, State, TaskState
from etude.store.transitions import Fold

__all__ = ["Journal", "Written", "written"]

PAGE = 64
"""How many events a reader holds at once: few, as each may have a payload of megabytes."""


class Written(NamedTuple):
    """A state as it is written."""

    kind: str
    id: int
    phase: str
    body: str
    """JSON."""


class Journal(ABC):
    """A run's journal. Every method may be called from any thread; a write waits for the one before it."""

    blobs: Blobs

    def __init__(self) -> None:
        self._lock = RLock()

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[Event]) -> int:
        """Write these events, all or none, and return the position of the last one.

        When it returns, they survive the death of the process. An event that may not follow what is recorded is an
        `IllegalMoveError`, and then nothing of the batch is written.
        """
        records = [encode(event) for event in events]
        with self._lock, self._transaction():
            start = self.position
            fold = Fold(self._load)
            fold.extend(events)
            numbered = dict(enumerate(records, start + 1))
            self.blobs.put({position: record.payload for position, record in numbered.items() if record.payload})
            self._write(numbered, [written(state) for state in fold.changed.values()])
            return start + len(records)

    @abstractmethod
    def flush(self) -> None:
        """Make all that is written survive the loss of power too. A checkpoint calls it before it names a position."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Nothing may be asked afterwards."""

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def position(self) -> int:
        """The position of the newest event; 0 where there is none."""

    def read(
        self, position: int = 0, kinds: Sequence[type[Event]] = (), rollout: int | None = None
    ) -> Iterator[tuple[int, Event]]:
        """The events after a position in order, to the newest there is now: all, or of these kinds, or of one rollout.

        The cost is that of the answer: where both are given, all events of the rollout are looked through.
        """
        newest = self.position
        if rollout is not None or not kinds:
            found = self._pages(position, newest, None, rollout)
        else:
            found = merge(*(self._pages(position, newest, kind.kind, None) for kind in set(kinds)), key=itemgetter(0))
        wanted = {kind.kind for kind in kinds} or EVENTS.keys()
        return ((at, decode(record)) for at, record in found if record.kind in wanted)

    def _pages(self, after: int, until: int, kind: str | None, rollout: int | None) -> Iterator[tuple[int, Record]]:
        while after < until:
            with self._lock:
                page = self._records(after, until, kind, rollout, PAGE)
            yield from page
            after = page[-1][0] if len(page) == PAGE else until

    def rollout(self, id: int) -> RolloutState:
        """How far one rollout has come."""
        return self._one(RolloutState, id)

    def rollouts(self, *phases: Phase) -> list[RolloutState]:
        """The rollouts in these phases, or all, by id: `QUEUED` and `RUNNING` is open work; `FINISHED` is not used."""
        return self._in(RolloutState, phases)

    def task(self, ordinal: int) -> TaskState:
        """What was asked, and which rollouts were tries at it."""
        return self._one(TaskState, ordinal)

    def tasks(self, *phases: Phase) -> list[TaskState]:
        """The tasks in these phases, or all, by ordinal: `OPEN` ones are neither admitted nor dropped."""
        return self._in(TaskState, phases)

    def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt in order; by default of the last one, the one that counts."""
        wanted = len(self.rollout(rollout).attempts) - 1 if attempt is None else attempt
        recorded = (event for _, event in self.read(kinds=(TurnRecorded,), rollout=rollout))
        return [event.turn for event in recorded if isinstance(event, TurnRecorded) and event.attempt == wanted]

    def admitted(self, position: int = 0) -> dict[int, tuple[int, ...]]:
        """Which rollouts each step trained on, for the steps that were admitted after a position."""
        admissions = (event for _, event in self.read(position, kinds=(Admitted,)))
        return {event.step: event.rollouts for event in admissions if isinstance(event, Admitted)}

    # -- the states ---------------------------------------------------------------------------------------------------

    def replay(self) -> dict[tuple[str, int], State]:
        """All states, derived anew from the events: what is kept is equal to it."""
        fold = Fold(_nothing)
        for _, event in self.read():
            fold.extend([event])
        return fold.changed

    def _load(self, kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
        bodies = self._states(kind.kind, list(ids))
        return {id: _restored(kind, body) for id, body in bodies.items()}

    def _one(self, kind: type[S], id: int) -> S:
        with self._lock:
            found = self._load(kind, [id])
        if id not in found:
            raise StoreError(f"The journal has no {kind.kind} {id}.")
        return found[id]

    def _in(self, kind: type[S], phases: Sequence[Phase]) -> list[S]:
        with self._lock:
            bodies = self._found(kind.kind, [str(phase) for phase in phases or Phase])
        return [_restored(kind, body) for body in bodies]

    # -- what a keeper provides: called by one thread at a time -------------------------------------------------------

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[None]:
        """What is written inside is written together, or not at all where an exception leaves it."""

    @abstractmethod
    def _write(self, records: Mapping[int, Record], states: Sequence[Written]) -> None:
        """Keep these events at these positions, without their payloads, and these states in place of older ones."""

    @abstractmethod
    def _records(
        self, after: int, until: int, kind: str | None, rollout: int | None, limit: int
    ) -> list[tuple[int, Record]]:
        """The first events between two positions, of a kind or of a rollout or all, with their payloads."""

    @abstractmethod
    def _states(self, kind: str, ids: Sequence[int]) -> dict[int, str]:
        """The states with these ids, those that are there."""

    @abstractmethod
    def _found(self, kind: str, phases: Sequence[str]) -> list[str]:
        """The states in these phases, by id."""


def _nothing(kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:  # noqa: ARG001
    return {}


def written(state: State) -> Written:
    """The written form of a state."""
    return Written(state.kind, state.id, str(state.phase), json.dumps(state.document(), separators=(",", ":")))


def _restored(kind: type[S], body: str) -> S:
    state = STATES[kind.kind].restored(json.loads(body))
    assert isinstance(state, kind)
    return state
