"""The stored form of events: the kind, the fields as JSON, and the payload as bytes. The payload holds large data: the
token arrays of a turn, the samples of an evaluation. Large sets of tokens are stored apart from it (`large_sets`), as
are the texts of grammars (`grammar_texts`).

Each event has two checksums. Its *digest* covers everything written of it, its position included, so that a damaged or
moved event is refused. Its *chain* covers its digest and the chain of the event before. A missing or replaced event
thus changes the chain of all that follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from etude.errors import StoreError
from etude.store.journal.events import EVENTS, Event, RolloutEvent, TurnRecorded
from etude.store.journal.grammar_texts import grammar_name, move_grammar_out, put_grammar_back
from etude.store.journal.json_values import to_json
from etude.store.journal.large_sets import NamedSet, move_sets_out, names_in, put_sets_back


class EventRecord(NamedTuple):
    """An event in its stored form."""

    kind: str
    rollout: int | None
    """The rollout of the event, if it has one."""
    body: str
    """JSON."""
    payload: bytes
    sets: tuple[NamedSet, ...] = ()
    """The large sets and the grammar that the payload and the body only name."""


class JournalMark(NamedTuple):
    """A point in a journal."""

    position: int
    """Position of its newest event; 0 if there is none."""
    chain: int
    """Chain checksum of that event; 0 if there is none."""


class ChainedRecord(NamedTuple):
    """An event with its checksums."""

    record: EventRecord
    digest: int
    chain: int


def checksum(*parts: bytes) -> int:
    """Return a 64-bit checksum of these bytes, as a signed number that every database can store."""
    hashed = blake2b(digest_size=8)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "big", signed=True)


def digest_of(position: int, record: EventRecord) -> int:
    """Return the digest of an event at a position."""
    body = record.body.encode()
    return checksum(f"{position} {record.kind} {record.rollout} {len(body)} ".encode(), body, record.payload)


def chain_checksum(before: int, digest: int) -> int:
    """Return the chain checksum of an event with this digest, after an event with that chain."""
    return checksum(b"%d %d" % (before, digest))


def chain_records(mark: JournalMark, records: Sequence[EventRecord]) -> Iterator[tuple[int, ChainedRecord]]:
    """Yield these events after the mark, each with its position."""
    chain = mark.chain
    for position, record in enumerate(records, mark.position + 1):
        digest = digest_of(position, record)
        chain = chain_checksum(chain, digest)
        yield position, ChainedRecord(record, digest, chain)


def encode(event: Event) -> EventRecord:
    """Return the form of an event in which a journal stores it: large sets and its grammar are apart."""
    if not isinstance(event, TurnRecorded):
        return encode_whole(event)
    payload, sets = move_sets_out(event.payload())
    fields = event.to_dict()
    grammar = move_grammar_out(fields)
    return EventRecord(event.kind, event.rollout, to_json(fields), payload, (*sets, *grammar))


def encode_whole(event: Event) -> EventRecord:
    """Return the stored form of an event with everything in its payload."""
    rollout = event.rollout if isinstance(event, RolloutEvent) else None
    return EventRecord(event.kind, rollout, to_json(event.to_dict()), event.payload())


def decode(row: EventRecord) -> Event:
    """Return the event of a stored form. It must have the sets and the grammar that it names."""
    if row.kind not in EVENTS:
        raise StoreError(
            f"This version of Etude does not know the event kind '{row.kind}'; a newer version wrote it. Read the "
            "journal with that version."
        )
    fields = json.loads(row.body)
    named = dict(row.sets)
    if row.kind == TurnRecorded.kind:
        put_grammar_back(fields, named)
    return EVENTS[row.kind].from_dict(fields, put_sets_back(row.payload, named))


def stored_names(record: EventRecord) -> list[bytes]:
    """Return the names of what a stored event does not hold: large sets, and a grammar."""
    if record.kind != TurnRecorded.kind:
        return []
    grammar = grammar_name(record.body)
    return names_in(record.payload) + ([] if grammar is None else [grammar])
