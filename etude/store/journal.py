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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from heapq import merge
from operator import itemgetter
from threading import RLock
from typing import NamedTuple

from etude.errors import NotFoundError, StoreError
from etude.records import Turn
from etude.store.blobs import Blobs
from etude.store.deferred_signals import defer_signals
from etude.store.event_records import (
    EVENTS,
    ChainedRecord,
    EventRecord,
    JournalMark,
    chain_records,
    checksum,
    decode,
    encode,
)
from etude.store.events import AttemptRewarded, Event, RolloutsAdmitted, TurnRecorded, TurnRewarded
from etude.store.json_values import to_json
from etude.store.states import STATES, AttemptState, Phase, ResourceState, RolloutState, S, State, TaskState
from etude.store.transitions import EventFold

__all__ = ["Journal", "StateRow", "Transaction", "encode_state", "state_digest"]

PAGE_EVENTS = 64
"""How many events a reader holds at once: few, as each may have a payload of megabytes."""


class StateRow(NamedTuple):
    """A state as it is written."""

    kind: str
    id: int
    phase: str
    body: str
    """JSON."""
    digest: int
    """A checksum of all that."""


class Transaction:
    """What is about to be written: batches that were taken, and where everything stands because of them."""

    def __init__(self, start: int, fold: EventFold) -> None:
        self.start, self.fold = start, fold
        self.records: list[EventRecord] = []

    def append(self, events: Sequence[Event]) -> int:
        """Take these, all or none, and return the position that the last one will have. An event that may not follow
        what is recorded, and was taken, is an `IllegalTransitionError`, and then it is as if these had not been
        given."""
        records = [encode(event) for event in events]
        self.fold.extend(events)
        self.records += records
        return self.start + len(self.records)

    def state(self, kind: type[S], id: int) -> S | None:
        """Where one stands because of what was taken, if it is known."""
        return self.fold.get(kind, id)


class Journal(ABC):
    """A run's journal. Every method may be called from any thread; a write waits for the one before it."""

    blobs: Blobs
    name = "in memory"
    """As it is called in sentences."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._open: dict[tuple[str, int], State] = {}
        """The states that are soon asked for again: open rollouts, and their tasks."""
        self._largest_ids: dict[str, int] = {}
        """By kind, the greatest id there is."""

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[Event]) -> int:
        """Write these events, all or none, and return the position of the last one.

        When it returns, they survive the death of the process. An event that may not follow what is recorded is an
        `IllegalTransitionError`, and then nothing of the batch is written.
        """
        with self.transaction() as txn:
            return txn.append(events)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Several batches in one transaction: each is taken whole or refused, and what was taken is written at the end,
        all or none. Nobody else writes meanwhile."""
        with defer_signals(), self._lock:
            txn = Transaction(self.position, EventFold(self._load_cached))
            yield txn
            if txn.records:
                self._commit(txn)

    def _commit(self, txn: Transaction) -> None:
        changed = txn.fold.changed.values()
        numbered = dict(chain_records(self.end_mark, txn.records))
        try:
            with self._storage_transaction():
                self.blobs.put(
                    {position: entry.record.payload for position, entry in numbered.items() if entry.record.payload}
                )
                self._write(numbered, [encode_state(state) for state in changed])
            self._update_cache(changed)
        except BaseException:  # whatever was interrupted: what is not remembered is read
            self._open.clear()
            self._largest_ids.clear()
            raise

    @abstractmethod
    def flush(self) -> JournalMark:
        """Make all that is written survive the loss of power too, and say how far that is: a checkpoint keeps it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Nothing may be asked afterwards."""

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def end_mark(self) -> JournalMark:
        """How far it has come."""

    @property
    def position(self) -> int:
        """The position of the newest event; 0 where there is none."""
        return self.end_mark.position

    def verify_mark(self, mark: JournalMark, since: int | None = None) -> None:
        """Refuse a journal that this mark was not taken of, or of which an event after it is missing or changed; or
        after `since`, where that is an earlier position."""
        newest = self.position
        if newest < mark.position:
            raise StoreError(
                f"The journal {self.name} holds {newest} events, and held {mark.position} when the checkpoint beside "
                "it was written: it is older, or another run's, or its end is lost. Bring back the one that belongs to "
                "the checkpoint, with its -wal file."
            )
        if self._chain(mark.position) != mark.chain:
            raise StoreError(
                f"The journal {self.name} is not the one beside which the checkpoint was written: up to position "
                f"{mark.position} they differ. Bring back the one that belongs to the checkpoint, with its -wal file."
            )
        first = mark.position if since is None else min(since, mark.position)
        for _ in self._pages(first, newest, None, None):
            pass

    def read(
        self, position: int = 0, kinds: Sequence[type[Event]] = (), rollout: int | None = None
    ) -> Iterator[tuple[int, Event]]:
        """The events after a position in order, to the newest there is now: all, or of these kinds, or of one rollout.

        The cost is that of the answer: where both are given, all events of the rollout are looked through.
        """
        newest = self.position
        if rollout is not None or not kinds:
            records = self._pages(position, newest, None, rollout)
        else:
            records = merge(*(self._pages(position, newest, kind.kind, None) for kind in set(kinds)), key=itemgetter(0))
        wanted = {kind.kind for kind in kinds} or EVENTS.keys()
        return ((at, decode(record)) for at, record in records if record.kind in wanted)

    def _pages(
        self, after: int, until: int, kind: str | None, rollout: int | None
    ) -> Iterator[tuple[int, EventRecord]]:
        while after < until:
            with self._lock:
                page = self._records(after, until, kind, rollout, PAGE_EVENTS)
            yield from page
            after = page[-1][0] if len(page) == PAGE_EVENTS else until

    def rollout(self, id: int) -> RolloutState:
        """How far one rollout has come."""
        return self._load_one(RolloutState, id)

    def rollouts(self, *phases: Phase) -> list[RolloutState]:
        """The rollouts in these phases, or all, by id: `QUEUED` and `RUNNING` is open work; `FINISHED` is not used."""
        return self._load_in_phases(RolloutState, phases)

    def task(self, ordinal: int) -> TaskState:
        """What was asked, and which rollouts were tries at it."""
        return self._load_one(TaskState, ordinal)

    def tasks(self, *phases: Phase) -> list[TaskState]:
        """The tasks in these phases, or all, by ordinal: `OPEN` ones are neither admitted nor dropped."""
        return self._load_in_phases(TaskState, phases)

    def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt in order, each with what it was paid; by default of the last one, which counts."""
        attempts = self.rollout(rollout).attempts
        wanted = len(attempts) - 1 if attempt is None else attempt
        turns: list[Turn] = []
        paid: dict[int, float] = {}
        total = 0.0
        for _, event in self.read(kinds=(TurnRecorded, TurnRewarded, AttemptRewarded), rollout=rollout):
            if isinstance(event, TurnRecorded) and event.attempt == wanted:
                turns.append(event.turn)
            elif isinstance(event, TurnRewarded) and event.attempt == wanted:
                paid[event.turn] = paid.get(event.turn, 0.0) + event.reward
                total += event.reward
            elif isinstance(event, AttemptRewarded) and event.attempt == wanted:
                total += event.paid
        if 0 <= wanted < len(attempts):
            self._check_attempt_events(attempts[wanted], len(turns), total, f"attempt {wanted} of rollout {rollout}")
        for index, reward in paid.items():
            turns[index] = replace(turns[index], reward=(turns[index].reward or 0.0) + reward)
        return turns

    def _check_attempt_events(self, state: AttemptState, turns: int, paid: float, subject: str) -> None:
        """Refuse events of an attempt that are not those from which its state was derived: added up in the same order,
        what was paid is the same to the last bit."""
        if (turns, paid) != (state.turns, state.paid):
            raise StoreError(
                f"The journal {self.name} has {turns} turns of {subject}, paid {paid:g} in all, and {state.turns} "
                f"turns, paid {state.paid:g}, were written: it is damaged. Go on from a copy of it that is whole."
            )

    def resource(self, name: str) -> ResourceState | None:
        """The newest version of what rollouts share, if there is one."""
        return self.load_states(ResourceState, [ResourceState.id_of(name)]).get(ResourceState.id_of(name))

    def load_states(self, kind: type[S], ids: Sequence[int]) -> dict[int, S]:
        """The states of a kind with these ids, those that are there."""
        with self._lock:
            return dict(self._load(kind, ids))

    def iter_states(self, kind: type[S], after: int | None = None, *, backwards: bool = False) -> Iterator[S]:
        """The states of a kind in the order of their ids, or against it, behind this one; read a page at a time."""
        while True:
            with self._lock:
                bodies = self._state_page(kind.kind, after, PAGE_EVENTS, backwards)
            for body in bodies:
                state = _decode_state(kind, body)
                after = state.id
                yield state
            if len(bodies) < PAGE_EVENTS:
                return

    def admitted(self, position: int = 0) -> dict[int, tuple[int, ...]]:
        """Which rollouts each step trained on, for the steps that were admitted after a position."""
        admissions = (event for _, event in self.read(position, kinds=(RolloutsAdmitted,)))
        return {event.step: event.rollouts for event in admissions if isinstance(event, RolloutsAdmitted)}

    # -- the states ---------------------------------------------------------------------------------------------------

    def replay(self) -> dict[tuple[str, int], State]:
        """All states, derived anew from the events: what is kept is equal to it."""
        fold = EventFold(_load_nothing)
        for _, event in self.read():
            fold.extend([event])
        return fold.changed

    def _load_cached(self, kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
        """As `_load`, without reading what was remembered. It is never handed out: nobody may change it."""
        states: dict[int, S] = {}
        missing = []
        largest = self._largest_id(kind)
        for id in ids:
            state = self._open.get((kind.kind, id))
            if isinstance(state, kind):
                states[id] = state
            elif id <= largest:
                missing.append(id)
        return {**states, **self._load(kind, missing)} if missing else states

    def _largest_id(self, kind: type[S]) -> int:
        """The greatest id of a kind, beyond which nothing need be looked for; -1 if there is none."""
        if kind.kind not in self._largest_ids:
            self._largest_ids[kind.kind] = max(
                (_decode_state(kind, body).id for body in self._state_page(kind.kind, None, 1, True)), default=-1
            )
        return self._largest_ids[kind.kind]

    def _update_cache(self, changed: Iterable[State]) -> None:
        """Keep at hand what is open, and let go of what is not."""
        tasks = set()
        for state in changed:
            if state.id > self._largest_ids.get(state.kind, state.id):
                self._largest_ids[state.kind] = state.id
            if isinstance(state, RolloutState):
                tasks.add(state.task)
                if state.phase in (Phase.QUEUED, Phase.RUNNING):
                    self._open["rollout", state.id] = state
                else:
                    self._open.pop(("rollout", state.id), None)
            elif isinstance(state, TaskState):
                tasks.add(state.id)
                self._open["task", state.id] = state
        for id in tasks:
            task = self._open.get(("task", id))
            if isinstance(task, TaskState) and not any(("rollout", rollout) in self._open for rollout in task.rollouts):
                del self._open["task", id]

    def _load(self, kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
        bodies = self._states(kind.kind, list(ids))
        return {id: _decode_state(kind, body) for id, body in bodies.items()}

    def _load_one(self, kind: type[S], id: int) -> S:
        with self._lock:
            states = self._load(kind, [id])
        if id not in states:
            raise NotFoundError(f"The journal has no {kind.kind} {id}.")
        return states[id]

    def _load_in_phases(self, kind: type[S], phases: Sequence[Phase]) -> list[S]:
        with self._lock:
            bodies = self._states_in_phases(kind.kind, [str(phase) for phase in phases or Phase])
        return [_decode_state(kind, body) for body in bodies]

    # -- what a keeper provides: called by one thread at a time -------------------------------------------------------

    @abstractmethod
    def _storage_transaction(self) -> AbstractContextManager[None]:
        """What is written inside is written together, or not at all where an exception leaves it."""

    @abstractmethod
    def _write(self, events: Mapping[int, ChainedRecord], states: Sequence[StateRow]) -> None:
        """Keep these events at these positions, without their payloads, and these states in place of older ones."""

    @abstractmethod
    def _chain(self, position: int) -> int:
        """The chain of the event at a position; 0 at 0."""

    @abstractmethod
    def _records(
        self, after: int, until: int, kind: str | None, rollout: int | None, limit: int
    ) -> list[tuple[int, EventRecord]]:
        """The first events between two positions, of a kind or of a rollout or all, with their payloads. What is not
        what was written is refused; where all were asked for, so is a gap."""

    @abstractmethod
    def _states(self, kind: str, ids: Sequence[int]) -> dict[int, str]:
        """The states with these ids, those that are there."""

    @abstractmethod
    def _states_in_phases(self, kind: str, phases: Sequence[str]) -> list[str]:
        """The states in these phases, by id."""

    @abstractmethod
    def _state_page(self, kind: str, after: int | None, limit: int, backwards: bool) -> list[str]:
        """The first states behind this id, by id, or against that order."""


def _load_nothing(kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:  # noqa: ARG001
    return {}


def encode_state(state: State) -> StateRow:
    """The written form of a state."""
    phase, body = str(state.phase), to_json(state.to_dict())
    return StateRow(state.kind, state.id, phase, body, state_digest(state.kind, state.id, phase, body))


def state_digest(kind: str, id: int, phase: str, body: str) -> int:
    """The checksum of a state as it is written."""
    return checksum(f"{kind} {id} {phase} {body}".encode())


def _decode_state(kind: type[S], body: str) -> S:
    state = STATES[kind.kind].from_dict(json.loads(body))
    assert isinstance(state, kind)
    return state
