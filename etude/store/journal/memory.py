"""The journal in memory, for tests and for runs that need not survive."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

from etude.images import ImageRef
from etude.store.journal.blobs import ReadSlice
from etude.store.journal.event_records import ChainedRecord, EventRecord, JournalMark, stored_names
from etude.store.journal.events import TurnRecorded
from etude.store.journal.images import IN_TURN, StoredImage
from etude.store.journal.journal import Journal
from etude.store.journal.state_rows import StateRow


class MemoryJournal(Journal):
    """A journal that ends with the process. It stores events in encoded form, so that it shares no object with a
    caller."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[EventRecord] = []
        self._chains = [0]
        self._sets: dict[bytes, bytes] = {}
        """The large sets and the grammars that events name."""
        self._stored_images: dict[str, StoredImage] = {}
        self._of_kind: defaultdict[str, list[int]] = defaultdict(list)
        self._of_rollout: defaultdict[int, list[int]] = defaultdict(list)
        self._state_rows: dict[tuple[str, int], StateRow] = {}
        self._ids: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
        """The ids of each kind and use; and of each kind, of any use."""
        self._in_phase: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    def flush(self) -> JournalMark:
        """Return the mark of the newest event. Nothing here survives a loss of power."""
        return self.end_mark

    def close(self) -> None:
        """Do nothing."""

    @property
    def end_mark(self) -> JournalMark:
        return JournalMark(len(self._events), self._chains[-1])

    @contextmanager
    def _storage_transaction(self) -> Iterator[None]:
        """Do nothing: illegal events are refused before the first change."""
        yield

    def _write(self, events: Mapping[int, ChainedRecord], states: Sequence[StateRow]) -> None:
        for position, (record, _, chain) in events.items():
            self._chains.append(chain)
            self._sets.update(record.sets)
            self._events.append(record._replace(sets=()) if record.sets else record)
            self._of_kind[record.kind].append(position)
            if record.rollout is not None:
                self._of_rollout[record.rollout].append(position)
        for state in states:
            key = (state.kind, state.id)
            if key in self._state_rows:
                self._in_phase[state.kind, self._state_rows[key].phase].discard(state.id)
            else:
                for use in (None, state.use):
                    insort(self._ids[state.kind, use], state.id)
            self._in_phase[state.kind, state.phase].add(state.id)
            self._state_rows[key] = state

    def _write_images(self, images: Sequence[StoredImage]) -> None:
        for image in images:
            self._stored_images.setdefault(image.ref.digest, image)

    def _images(self, digests: Sequence[str]) -> list[StoredImage]:
        return [self._stored_images[digest] for digest in digests if digest in self._stored_images]

    def _image_refs(self, digests: Sequence[str]) -> list[ImageRef]:
        return [image.ref for image in self._images(digests)]

    def _chain(self, position: int) -> int:
        return self._chains[position]

    def _records(
        self, after: int, until: int, kind: str | None, rollout: int | None, limit: int
    ) -> list[tuple[int, EventRecord]]:
        positions: Sequence[int] = range(1, until + 1)
        if rollout is not None:
            positions = self._of_rollout.get(rollout, [])
        elif kind is not None:
            positions = self._of_kind.get(kind, [])
        first, last = bisect_right(positions, after), bisect_right(positions, until)
        return [(position, self._event(position)) for position in positions[first : min(last, first + limit)]]

    def _rollout_sizes(self, rollouts: Sequence[int]) -> dict[int, int]:
        sizes = dict.fromkeys(rollouts, 0)
        for id, position, _ in self._event_kinds(rollouts):
            event = self._events[position - 1]
            sizes[id] += len(event.body) + len(event.payload)
        return sizes

    def _rollout_records(self, rollouts: Sequence[int]) -> list[EventRecord]:
        return [self._event(position) for _, position, _ in self._event_kinds(rollouts)]

    def _event(self, position: int) -> EventRecord:
        """Return an event with the sets and the grammar that it names."""
        record = self._events[position - 1]
        names = stored_names(record)
        return record._replace(sets=tuple((name, self._sets[name]) for name in names)) if names else record

    def _payload_slicer(self, position: int) -> ReadSlice:
        payload = self._events[position - 1].payload
        return lambda offset, size: payload[offset : offset + size]

    def _event_kinds(self, rollouts: Sequence[int]) -> list[tuple[int, int, str]]:
        positions = sorted((position, id) for id in set(rollouts) for position in self._of_rollout.get(id, []))
        return [(id, position, self._events[position - 1].kind) for position, id in positions]

    def _image_turns(self, after: int, limit: int) -> list[tuple[int, int, str]]:
        positions = self._of_kind.get(TurnRecorded.kind, [])
        turns = ((position, self._events[position - 1]) for position in positions[bisect_right(positions, after) :])
        shown = ((at, event.rollout, event.body) for at, event in turns if IN_TURN in event.body)
        return [(at, rollout, body) for at, rollout, body in islice(shown, limit) if rollout is not None]

    def _turn_bodies(self, rollouts: Sequence[int]) -> list[tuple[int, str]]:
        turns = self._event_kinds(rollouts)
        return [(id, self._events[at - 1].body) for id, at, kind in turns if kind == TurnRecorded.kind]

    def _states(self, kind: str, ids: Sequence[int]) -> dict[int, str]:
        return {id: self._state_rows[kind, id].body for id in ids if (kind, id) in self._state_rows}

    def _states_in_phases(self, kind: str, phases: Sequence[str]) -> list[str]:
        ids = sorted(set().union(*(self._in_phase[kind, phase] for phase in phases)))
        return [self._state_rows[kind, id].body for id in ids]

    def _state_page(self, kind: str, after: int | None, limit: int, backwards: bool, use: str | None) -> list[str]:
        ids = self._ids[kind, use]
        if backwards:
            last = len(ids) if after is None else bisect_left(ids, after)
            page = ids[max(0, last - limit) : last][::-1]
        else:
            first = 0 if after is None else bisect_right(ids, after)
            page = ids[first : first + limit]
        return [self._state_rows[kind, id].body for id in page]
