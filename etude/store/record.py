"""The form in which events are written: kind, JSON of the fields, and bytes for what is large (the token arrays of a
turn, the samples of an evaluation)."""

from __future__ import annotations

import json
from typing import NamedTuple

from etude.errors import StoreError
from etude.store.events import (
    Admitted,
    AttemptEnded,
    AttemptReady,
    AttemptStarted,
    Evaluated,
    Event,
    LateEnd,
    Noted,
    Published,
    ResourcePut,
    Rewarded,
    RolloutAsked,
    RolloutCancelled,
    RolloutEvent,
    RolloutExpired,
    RolloutQueued,
    RolloutSealed,
    TaskDropped,
    TaskIssued,
    TurnPaid,
    TurnRecorded,
)
from etude.store.plain import to_json

__all__ = ["EVENTS", "Record", "decode", "encode"]

EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        *(TaskIssued, TaskDropped),
        *(RolloutQueued, RolloutAsked, RolloutCancelled, RolloutExpired, RolloutSealed),
        *(AttemptStarted, AttemptReady, TurnRecorded, TurnPaid, Rewarded, Noted, AttemptEnded, LateEnd),
        *(Admitted, Evaluated, Published, ResourcePut),
    )
}


class Record(NamedTuple):
    """An event as it is written."""

    kind: str
    rollout: int | None
    """The rollout it speaks of, where it speaks of one."""
    body: str
    """JSON."""
    payload: bytes


def encode(event: Event) -> Record:
    """The written form of an event."""
    rollout = event.rollout if isinstance(event, RolloutEvent) else None
    return Record(event.kind, rollout, to_json(event.document()), event.payload())


def decode(row: Record) -> Event:
    """The event that was written so."""
    if row.kind not in EVENTS:
        raise StoreError(
            f"An event of the kind '{row.kind}' was read, which this version of Etude does not know: a newer one wrote "
            "it. Read the journal with that version."
        )
    return EVENTS[row.kind].restored(json.loads(row.body), row.payload)
