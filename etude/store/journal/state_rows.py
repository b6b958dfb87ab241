"""The stored form of states."""

from __future__ import annotations

import json
from typing import NamedTuple

from etude.store.journal.event_records import checksum
from etude.store.journal.json_values import to_json
from etude.store.journal.states import STATES, S, State


class StateRow(NamedTuple):
    """A state in its stored form."""

    kind: str
    id: int
    phase: str
    use: str
    body: str
    """JSON."""
    digest: int
    """A checksum of the fields above."""


def encode_state(state: State) -> StateRow:
    """Return the stored form of a state."""
    phase = str(state.phase)
    body = to_json(state.to_dict())
    digest = state_digest(state.kind, state.id, phase, state.use, body)
    return StateRow(state.kind, state.id, phase, state.use, body, digest)


def state_digest(kind: str, id: int, phase: str, use: str, body: str) -> int:
    """Return the checksum of a state in its stored form."""
    return checksum(f"{kind} {id} {phase} {use} {body}".encode())


def decode_state(kind: type[S], body: str) -> S:
    """Return the state of a stored body."""
    state = STATES[kind.kind].from_dict(json.loads(body))
    assert isinstance(state, kind)
    return state
