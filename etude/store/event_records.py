"""The form in which events are written: kind, JSON of the fields, and bytes for what is large (the token arrays of a
turn, the samples of an evaluation).

Each has two checksums beside it. Its *digest* covers all that is written of it, its position included: what was
damaged or moved is not read. Its *chain* covers its digest and the chain of the event before: an event that is missing,
or another in its place, changes the chain of all that follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from etude.errors import StoreError
from etude.store.events import (
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    Event,
    LateResultRecorded,
    NoteRecorded,
    PolicyEvaluated,
    PolicyPublished,
    ResourcePut,
    RolloutCancelled,
    RolloutEvent,
    RolloutExpired,
    RolloutQueued,
    RolloutResumed,
    RolloutsAdmitted,
    RolloutSealed,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.json_values import to_json

__all__ = [
    "EVENTS",
    "ChainedRecord",
    "EventRecord",
    "JournalMark",
    "chain_checksum",
    "chain_records",
    "checksum",
    "decode",
    "digest_of",
    "encode",
]

EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        *(TaskIssued, TaskDropped),
        *(RolloutQueued, RolloutResumed, RolloutCancelled, RolloutExpired, RolloutSealed),
        *(
            AttemptStarted,
            AttemptReady,
            TurnRecorded,
            TurnRewarded,
            AttemptRewarded,
            NoteRecorded,
            AttemptEnded,
            LateResultRecorded,
        ),
        *(RolloutsAdmitted, PolicyEvaluated, PolicyPublished, ResourcePut),
    )
}


class EventRecord(NamedTuple):
    """An event as it is written."""

    kind: str
    rollout: int | None
    """The rollout it speaks of, where it speaks of one."""
    body: str
    """JSON."""
    payload: bytes


class JournalMark(NamedTuple):
    """How far a journal had come."""

    position: int
    """Of its newest event; 0 where there was none."""
    chain: int
    """The chain of that event; 0 where there was none."""


class ChainedRecord(NamedTuple):
    """An event with its checksums."""

    record: EventRecord
    digest: int
    chain: int


def checksum(*parts: bytes) -> int:
    """64 bits that change where any of these does, as a number that every database holds."""
    hashed = blake2b(digest_size=8)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "big", signed=True)


def digest_of(position: int, record: EventRecord) -> int:
    """The digest of an event at a position."""
    body = record.body.encode()
    return checksum(f"{position} {record.kind} {record.rollout} {len(body)} ".encode(), body, record.payload)


def chain_checksum(before: int, digest: int) -> int:
    """The chain of an event with this digest, behind one with that chain."""
    return checksum(b"%d %d" % (before, digest))


def chain_records(mark: JournalMark, records: Sequence[EventRecord]) -> Iterator[tuple[int, ChainedRecord]]:
    """These events behind that mark, each with its position."""
    chain = mark.chain
    for position, record in enumerate(records, mark.position + 1):
        digest = digest_of(position, record)
        chain = chain_checksum(chain, digest)
        yield position, ChainedRecord(record, digest, chain)


def encode(event: Event) -> EventRecord:
    """The written form of an event."""
    rollout = event.rollout if isinstance(event, RolloutEvent) else None
    return EventRecord(event.kind, rollout, to_json(event.to_dict()), event.payload())


def decode(row: EventRecord) -> Event:
    """The event that was written so."""
    if row.kind not in EVENTS:
        raise StoreError(
            f"An event of the kind '{row.kind}' was read, which this version of Etude does not know: a newer one wrote "
            "it. Read the journal with that version."
        )
    return EVENTS[row.kind].from_dict(json.loads(row.body), row.payload)
