"""Messages about failed rollouts: the error, and the notes on the attempt that explain it.

Agents often do not report why one of their calls was refused. The endpoint notes that on the attempt, so that the cause
is shown together with the failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from etude.store import Journal, NoteRecorded, RolloutState


def describe_failure(store: Journal, state: RolloutState) -> str:
    """Return the cause of a failure, as far as the journal has it; empty where a rollout has none."""
    error = state.why or (state.last.error if state.last is not None else "")
    return "\n".join([error] * bool(error) + endpoint_errors(last_attempt_notes(store, state)))


def last_attempt_notes(store: Journal, state: RolloutState) -> list[dict[str, Any]]:
    """Return the notes of a rollout's last attempt, as `RolloutQueue.notes` gives them."""
    last = len(state.attempts) - 1
    notes = (event for _, event in store.read(kinds=(NoteRecorded,), rollout=state.id))
    return [
        {"name": note.name, "data": note.data}
        for note in notes
        if isinstance(note, NoteRecorded) and note.attempt == last
    ]


def endpoint_errors(notes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a message for each note of the endpoint that may be a cause. Agents may have notes of the same names."""
    errors = []
    for note in notes:
        data = note["data"] if isinstance(note["data"], Mapping) else {}
        match note["name"], data:
            case "refused", {"path": path, "status": status, "error": error}:
                errors.append(f"The endpoint refused a call to {path} ({status}): {error}")
            case "context_length_exceeded", {"context": context}:
                errors.append(f"The endpoint refused a prompt that was longer than the model's {context} tokens.")
            case "upstream_failed", {"error": error}:
                errors.append(f"The engine failed on a call: {error}")
    return errors
