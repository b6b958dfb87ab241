"""The form of each record in a request or a reply, as plain JSON values.

Both ends use it. A runner imports it at its start, so it imports no library that checks values: the server does that,
by the models of `request_models`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from etude.errors import DataError, StoreError
from etude.records import Completion, Task, Turn
from etude.store.journal.blobs import pack_turn, unpack_turn
from etude.store.journal.event_records import EventRecord, decode, encode
from etude.store.journal.events import TURN_FIELDS, Event
from etude.store.journal.json_values import check_finite, to_json, to_json_value
from etude.store.journal.states import AttemptState, RolloutState
from etude.store.queue.records import AttemptId, Claim, Reward, RolloutRequest, RunnerState
from etude.store.queue.rollout_limits import RolloutLimits

_CLAIM_FIELDS = ("use", "resources", "model_key", "reward_key")


def _known(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a record has. A reply of a newer server may have more."""
    return {name: document[name] for name in kind.__slots__ if name in document}  # type: ignore[attr-defined]


def decode_attempt_id(document: Mapping[str, Any]) -> AttemptId:
    """Return the id of an attempt, among other fields."""
    return AttemptId(document["rollout"], document["attempt"])


def decode_state(document: Mapping[str, Any]) -> RolloutState:
    """Return the state of a rollout."""
    attempts = [_known(AttemptState, attempt) for attempt in document["attempts"]]
    limits = document["limits"] and _known(RolloutLimits, document["limits"])
    return RolloutState.from_dict(_known(RolloutState, document) | {"attempts": attempts, "limits": limits})


def encode_rollout_request(request: RolloutRequest) -> dict[str, Any]:
    """Return the fields of a rollout to enqueue."""
    fields = {name: getattr(request, name) for name in ("sample", "id", "use")}
    return fields | {"task": _encode_task(request.task), "limits": request.limits.to_dict()}


def _encode_task(task: Task) -> dict[str, Any]:
    return {"ordinal": task.ordinal, "fields": to_json_value(task.fields, "fields"), "source": task.source}


def encode_claim(claim: Claim) -> dict[str, Any]:
    """Return the fields of a claim."""
    fields = {name: getattr(claim, name) for name in _CLAIM_FIELDS} | claim.attempt_id._asdict()
    return fields | {"task": _encode_task(claim.task), "limits": claim.limits.to_dict()}


def decode_claim(document: Mapping[str, Any]) -> Claim:
    """Return a claim."""
    key, limits = decode_attempt_id(document), RolloutLimits.from_dict(_known(RolloutLimits, document["limits"]))
    task = Task(*(document["task"][name] for name in ("ordinal", "fields", "source")))
    return Claim(key, task, limits=limits, **{name: document[name] for name in _CLAIM_FIELDS})


def encode_runner(state: RunnerState) -> dict[str, Any]:
    """Return the fields of a runner's state."""
    running = [key._asdict() for key in state.running]
    return {"name": state.name, "running": running, "silent_s": state.silent_s, "info": dict(state.info)}


def decode_runner(document: Mapping[str, Any]) -> RunnerState:
    """Return a runner's state."""
    running = tuple(map(decode_attempt_id, document["running"]))
    return RunnerState(document["name"], running, document["silent_s"], document["info"])


def encode_turn(turn: Turn) -> dict[str, Any]:
    """Return the fields of a model call. Its arrays are packed as in the journal (see `blobs`), in base64."""
    fields = {name: getattr(turn, name) for name in TURN_FIELDS}
    arrays = base64.b64encode(pack_turn(turn)).decode()
    tags, completion = list(turn.tags), turn.completion
    return fields | {"tags": tags, "finish_reason": completion.finish_reason, "text": completion.text, "arrays": arrays}


def decode_turn(document: Mapping[str, Any]) -> Turn:
    """Return a model call; raise `DataError` if it is malformed."""
    try:
        payload = base64.b64decode(document["arrays"], validate=True)
        prompt, columns = unpack_turn(payload)
        completion = Completion(finish_reason=document["finish_reason"], text=document["text"], **columns)
        fields = {name: document[name] for name in TURN_FIELDS}
        turn = Turn(prompt, completion, **fields | {"tags": tuple(document["tags"])})
        if len(pack_turn(turn)) != len(payload):
            raise ValueError(f"its arrays end before their {len(payload)} bytes do")
        return turn
    except (binascii.Error, StoreError, ValueError, OverflowError) as error:
        raise DataError(f"The turn is malformed: {str(error).rstrip('.')}.") from error


def encode_reward(reward: Reward) -> float | dict[str, float]:
    """Return a reward as plain numbers; all must be finite."""
    if isinstance(reward, Mapping):
        return {str(name): check_finite(value, f"The part '{name}' of a reward") for name, value in reward.items()}
    return check_finite(reward, "A reward")


def encode_event(event: Event) -> dict[str, Any]:
    """Return the fields of an event, as the journal stores it, with its payload in base64."""
    kind, rollout, body, payload = encode(event)
    document = {"kind": kind, "rollout": rollout, "body": json.loads(body)}
    return document | {"payload": base64.b64encode(payload).decode()}


def decode_event(document: Mapping[str, Any]) -> Event:
    """Return an event."""
    payload = base64.b64decode(document["payload"], validate=True)
    return decode(EventRecord(document["kind"], document["rollout"], to_json(document["body"]), payload))
