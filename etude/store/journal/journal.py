"""The journal: an append-only log of events, and the states derived from them.

A backend (`memory`, `sql`) provides transactions and stores records and states. The rules of legal events and their
effects are here and in `transitions`. A batch is written whole or not at all. Events and states are written together,
so that the states always equal a replay of the events.

Positions are dense integers from 1. `read(position)` returns the events after it. A reader that remembers its last
position misses no event and sees none twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from heapq import merge
from operator import itemgetter

from etude.errors import NotFoundError, StoreError
from etude.records import Turn
from etude.store.journal.blobs import ReadSlice, TurnShape, read_turn_shape
from etude.store.journal.deferred_signals import defer_signals
from etude.store.journal.event_records import (
    ChainedRecord,
    EventRecord,
    JournalMark,
    chain_records,
    decode,
    encode,
)
from etude.store.journal.events import (
    EVENTS,
    AttemptRewarded,
    AttemptStarted,
    Event,
    RolloutsAdmitted,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.journal.image_store import ImageStore
from etude.store.journal.images import ImageCheck
from etude.store.journal.state_rows import StateRow, decode_state, encode_state
from etude.store.journal.states import AttemptState, Phase, ResourceState, RolloutState, S, State, TaskState
from etude.store.journal.transitions import EventFold
from etude.store.queue.rollout_limits import RolloutPurpose

PAGE_EVENTS = 64
"""Events that a reader holds at once. They are few, since each may have a payload of megabytes."""
PAGE_BYTES = 2**23
"""Bytes of the rollouts whose events a reader holds at once, if it is more than one rollout."""


class Transaction:
    """The batches that a transaction has accepted, and the states that follow from them."""

    def __init__(self, start: int, fold: EventFold, check_images: ImageCheck) -> None:
        self.start = start
        self.fold = fold
        self._check_images = check_images
        self.records: list[EventRecord] = []

    def append(self, events: Sequence[Event]) -> int:
        """Accept these events, all or none, and return the position of the last one.

        An illegal event raises `IllegalTransitionError`, and the transaction is as before the call.
        """
        records = [encode(event) for event in events]
        self._check_images(events)
        self.fold.extend(events)
        self.records += records
        return self.start + len(self.records)

    def state(self, kind: type[S], id: int) -> S | None:
        """Return a state as it follows from the accepted events, or None."""
        return self.fold.get(kind, id)


class DamagedJournalError(StoreError):
    """The content of the journal has changed since it was written."""


class Journal(ImageStore):
    """The journal of a run. Every method may be called from any thread; writes wait for each other."""

    name = "in memory"
    """Its name in messages."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[tuple[str, int], State] = {}
        """States that will be needed again soon: open rollouts and their tasks."""
        self._largest_ids: dict[str, int] = {}
        """The largest id of each kind of state."""
        self._check_images = ImageCheck(self.image_refs)

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[Event]) -> int:
        """Write these events, all or none, and return the position of the last one.

        When it returns, the events survive the death of the process. An illegal event raises `IllegalTransitionError`,
        and none of the batch is written.
        """
        with self.transaction() as txn:
            return txn.append(events)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Write several batches in one transaction. Each batch is accepted whole or refused; the accepted ones are
        written at the end, all or none. Other writers wait meanwhile."""
        with defer_signals(), self._lock:
            txn = Transaction(self.position, EventFold(self._load_cached), self._check_images)
            yield txn
            if txn.records:
                self._commit(txn)

    def _commit(self, txn: Transaction) -> None:
        changed = txn.fold.changed.values()
        numbered = dict(chain_records(self.end_mark, txn.records))
        try:
            with self._storage_transaction():
                self._write(numbered, [encode_state(state) for state in changed])
            self._update_cache(changed)
        except BaseException:  # the cache may be wrong after any interruption: drop it
            self._open.clear()
            self._largest_ids.clear()
            raise

    @abstractmethod
    def flush(self) -> JournalMark:
        """Make everything written survive a loss of power, and return its mark for a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Close the journal. No method may be called afterwards."""

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def end_mark(self) -> JournalMark:
        """The position and the chain checksum of the newest event."""

    @property
    def position(self) -> int:
        """The position of the newest event; 0 if there is none."""
        return self.end_mark.position

    def verify_mark(self, mark: JournalMark, since: int | None = None) -> None:
        """Refuse the journal if it does not contain this mark, or if an event after it is missing or changed.

        With an earlier position `since`, the events after that position are checked too.
        """
        newest = self.position
        if newest < mark.position:
            raise StoreError(
                f"The journal {self.name} has {newest} events, and had {mark.position} when the checkpoint beside it "
                "was written. It is older, of another run, or truncated. Restore the one that belongs to the "
                "checkpoint, with its -wal file."
            )
        if self._chain(mark.position) != mark.chain:
            raise StoreError(
                f"The journal {self.name} does not belong to the checkpoint: up to position {mark.position} their "
                "checksums differ. Restore the one that belongs to the checkpoint, with its -wal file."
            )
        first = mark.position if since is None else min(since, mark.position)
        for _ in self._pages(first, newest, None, None):
            pass

    def read(
        self, position: int = 0, kinds: Sequence[type[Event]] = (), rollout: int | None = None, until: int | None = None
    ) -> Iterator[tuple[int, Event]]:
        """Yield the events after a position up to `until` (by default the newest one now), in order: all, of some
        kinds, or of one rollout.

        The cost is that of the result. With both kinds and a rollout, all events of the rollout are read.
        """
        newest = self.position if until is None else min(until, self.position)
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

    def read_rollouts(self, rollouts: Sequence[int]) -> Iterator[list[Event]]:
        """Yield the events of each of these rollouts, in order. Those of many small rollouts are read at once."""
        with self._lock:
            sizes = self._rollout_sizes(rollouts)
        page: list[int] = []
        page_bytes = 0
        for id in rollouts:
            page_bytes += sizes.get(id, 0)
            if page and page_bytes > PAGE_BYTES:
                yield from self._events_of(page)
                page = []
                page_bytes = sizes.get(id, 0)
            page.append(id)
        yield from self._events_of(page)

    def _events_of(self, rollouts: Sequence[int]) -> list[list[Event]]:
        with self._lock:
            records = self._rollout_records(rollouts)
        events: dict[int | None, list[Event]] = {id: [] for id in rollouts}
        for record in records:
            events[record.rollout].append(decode(record))
        return [events[id] for id in rollouts]

    def rollout(self, id: int) -> RolloutState:
        """Return the state of one rollout."""
        return self._load_one(RolloutState, id)

    def rollouts(self, *phases: Phase) -> list[RolloutState]:
        """Return the rollouts in these phases, or all, by id. `QUEUED` and `RUNNING` are open work; `FINISHED` awaits
        training."""
        return self._load_in_phases(RolloutState, phases)

    def task(self, ordinal: int) -> TaskState:
        """Return the state of one task, with its rollouts."""
        return self._load_one(TaskState, ordinal)

    def tasks(self, *phases: Phase) -> list[TaskState]:
        """Return the tasks in these phases, or all, by ordinal. `OPEN` tasks are neither admitted nor dropped."""
        return self._load_in_phases(TaskState, phases)

    def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """Return the turns of an attempt in order, each with its reward; by default of the last attempt, which
        counts."""
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

    def turn_shapes(self, rollouts: Sequence[int]) -> dict[int, list[TurnShape]]:
        """Return the shapes of the turns of each rollout's last attempt.

        Only a few bytes of each turn are read. They are not compared with the turn's checksum.
        """
        shapes: dict[int, list[TurnShape]] = {id: [] for id in rollouts}
        with self._lock:
            for rollout, position, kind in self._event_kinds(rollouts):
                if kind == AttemptStarted.kind:
                    shapes[rollout].clear()
                elif kind == TurnRecorded.kind:
                    shapes[rollout].append(read_turn_shape(self._payload_slicer(position)))
        return shapes

    def first_turns(self, rollouts: Sequence[int]) -> dict[int, Turn]:
        """Return the first turn of each rollout's last attempt, where there is one. A damaged one is left out."""
        places: dict[int, int] = {}
        turns: dict[int, Turn] = {}
        with self._lock:
            for rollout, position, kind in self._event_kinds(rollouts):
                if kind == AttemptStarted.kind:
                    places.pop(rollout, None)
                elif kind == TurnRecorded.kind:
                    places.setdefault(rollout, position)
            for rollout, position in places.items():
                with suppress(DamagedJournalError):
                    (_, record), *_ = self._records(position - 1, position, TurnRecorded.kind, None, 1)
                    event = decode(record)
                    assert isinstance(event, TurnRecorded)
                    turns[rollout] = event.turn
        return turns

    def turn_bodies(self, rollouts: Sequence[int]) -> dict[int, list[str]]:
        """Return the JSON of the turns of all attempts of each rollout, without their tokens.

        It is not compared with the turns' checksums.
        """
        bodies: dict[int, list[str]] = {id: [] for id in rollouts}
        with self._lock:
            for rollout, body in self._turn_bodies(rollouts):
                bodies[rollout].append(body)
        return bodies

    def _check_attempt_events(self, state: AttemptState, turns: int, paid: float, subject: str) -> None:
        """Refuse events of an attempt that do not match its state. Rewards added up in the same order are equal to the
        last bit."""
        if (turns, paid) != (state.turns, state.paid):
            raise StoreError(
                f"The journal {self.name} has {turns} turns of {subject} with rewards of {paid:g}, but {state.turns} "
                f"turns with rewards of {state.paid:g} were written: it is damaged. Continue from an intact copy."
            )

    def resource(self, name: str) -> ResourceState | None:
        """Return the newest version of a resource, or None."""
        return self.load_states(ResourceState, [ResourceState.id_of(name)]).get(ResourceState.id_of(name))

    def load_states(self, kind: type[S], ids: Sequence[int]) -> dict[int, S]:
        """Return the existing states of a kind with these ids."""
        with self._lock:
            return dict(self._load(kind, ids))

    def iter_states(
        self,
        kind: type[S],
        after: int | None = None,
        *,
        backwards: bool = False,
        use: RolloutPurpose | None = None,
    ) -> Iterator[S]:
        """Yield the states of a kind behind an id, by ascending or descending id, a page at a time. use: only tasks or
        rollouts of this use."""
        while True:
            with self._lock:
                bodies = self._state_page(kind.kind, after, PAGE_EVENTS, backwards, use)
            for body in bodies:
                state = decode_state(kind, body)
                after = state.id
                yield state
            if len(bodies) < PAGE_EVENTS:
                return

    def admitted(self, position: int = 0) -> dict[int, tuple[int, ...]]:
        """Return the rollouts that each step trained on, for steps admitted after a position."""
        admissions = (event for _, event in self.read(position, kinds=(RolloutsAdmitted,)))
        return {event.step: event.rollouts for event in admissions if isinstance(event, RolloutsAdmitted)}

    # -- the states ---------------------------------------------------------------------------------------------------

    def replay(self) -> dict[tuple[str, int], State]:
        """Derive all states from the events again. The stored states are equal to them."""
        fold = EventFold(_load_nothing)
        for _, event in self.read():
            fold.extend([event])
        return fold.changed

    def _load_cached(self, kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
        """Like `_load`, but without reading cached states. The result is never handed out, since nothing may change
        it."""
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
        """Return the largest id of a kind, -1 if there is none. States beyond it need not be searched."""
        if kind.kind not in self._largest_ids:
            self._largest_ids[kind.kind] = max(
                (decode_state(kind, body).id for body in self._state_page(kind.kind, None, 1, True, None)), default=-1
            )
        return self._largest_ids[kind.kind]

    def _update_cache(self, changed: Iterable[State]) -> None:
        """Add the open states to the cache, and drop those that are not open."""
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
        return {id: decode_state(kind, body) for id, body in bodies.items()}

    def _load_one(self, kind: type[S], id: int) -> S:
        with self._lock:
            states = self._load(kind, [id])
        if id not in states:
            raise NotFoundError(f"The journal has no {kind.kind} {id}.")
        return states[id]

    def _load_in_phases(self, kind: type[S], phases: Sequence[Phase]) -> list[S]:
        with self._lock:
            bodies = self._states_in_phases(kind.kind, [str(phase) for phase in phases or Phase])
        return [decode_state(kind, body) for body in bodies]

    # -- the backend's part, called by one thread at a time -----------------------------------------------------------

    @abstractmethod
    def _write(self, events: Mapping[int, ChainedRecord], states: Sequence[StateRow]) -> None:
        """Store these events at these positions, and replace these states."""

    @abstractmethod
    def _chain(self, position: int) -> int:
        """Return the chain checksum of the event at a position; 0 at position 0."""

    @abstractmethod
    def _records(
        self, after: int, until: int, kind: str | None, rollout: int | None, limit: int
    ) -> list[tuple[int, EventRecord]]:
        """Return the first events between two positions, of a kind, of a rollout, or all, with their payloads.

        An event that was changed after it was written is refused. If all events are read, so is a gap.
        """

    @abstractmethod
    def _rollout_sizes(self, rollouts: Sequence[int]) -> dict[int, int]:
        """Return about how many bytes the events of each of these rollouts have."""

    @abstractmethod
    def _rollout_records(self, rollouts: Sequence[int]) -> list[EventRecord]:
        """Return the events of these rollouts by position, with their payloads. A changed one is refused."""

    @abstractmethod
    def _payload_slicer(self, position: int) -> ReadSlice:
        """Return a function that reads parts of the payload of an event."""

    @abstractmethod
    def _event_kinds(self, rollouts: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return the rollout, the position and the kind of each event of these rollouts, by position."""

    @abstractmethod
    def _turn_bodies(self, rollouts: Sequence[int]) -> list[tuple[int, str]]:
        """Return the rollout and the JSON of each recorded turn of these rollouts, by position."""

    @abstractmethod
    def _states(self, kind: str, ids: Sequence[int]) -> dict[int, str]:
        """Return the bodies of the existing states with these ids."""

    @abstractmethod
    def _states_in_phases(self, kind: str, phases: Sequence[str]) -> list[str]:
        """Return the bodies of the states in these phases, by id."""

    @abstractmethod
    def _state_page(self, kind: str, after: int | None, limit: int, backwards: bool, use: str | None) -> list[str]:
        """Return the bodies of the first states behind an id, in ascending or descending order; with a use, only
        those of this use."""


def _load_nothing(kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:  # noqa: ARG001
    return {}
