"""The JSON messages between a store's server and its clients. The arrays of a turn travel as the bytes that the journal
stores.

Both ends import this module, so it imports neither a web framework nor a database. `requests` defines the message of
each request.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from etude.errors import DataError, StoreError
from etude.records import Completion, Task, Turn
from etude.store.blobs import pack_turn, unpack_turn
from etude.store.event_records import EventRecord, decode, encode
from etude.store.events import Event
from etude.store.json_values import check_finite, to_json_value
from etude.store.json_values import to_json as to_json_text
from etude.store.rollout_limits import RolloutLimits
from etude.store.rollout_queue import AttemptId, AttemptReport, Claim, Reward, RolloutRequest, RunnerState

REQUEST_ID = "x-request-id"
"""Header with the id of a request. The server takes it as given or creates it, sends it back, and logs it."""
IDEMPOTENCY_KEY = "idempotency-key"
"""Header of a request that must run once: the server executes requests with the same key once, and answers each."""
STORE_INSTANCE = "x-store-instance"
"""Header of a reply with the instance of the server process. The process forgets its replies when it ends."""
SENT_TO = "x-sent-to"
"""Header of a repeated request: the instance that it was sent to before."""
OWNER_EPOCH = "x-owner-epoch"
"""Header with the epoch of the run that owns the store. The server accepts the request only while that epoch lasts."""


def to_json(document: Any) -> bytes:
    """Encode a document. NaN and infinities, which JSON does not have, are written as Python reads them."""
    return to_json_text(document).encode()


# -- ids ---------------------------------------------------------------------------------------------------------------


def encode_attempt_id(key: AttemptId) -> dict[str, Any]:
    """Encode the id of an attempt."""
    return {"rollout": key.rollout, "attempt": key.attempt}


def decode_attempt_id(document: Mapping[str, Any]) -> AttemptId:
    """Decode the id of an attempt."""
    return AttemptId(document["rollout"], document["attempt"])


# -- tasks, rollouts and claims ----------------------------------------------------------------------------------------


def _encode_task(task: Task) -> dict[str, Any]:
    return {"ordinal": task.ordinal, "fields": to_json_value(task.fields, "fields"), "source": task.source}


def decode_task(document: Mapping[str, Any]) -> Task:
    """Decode a task."""
    return Task(document["ordinal"], document["fields"], document["source"])


def encode_rollout_request(request: RolloutRequest) -> dict[str, Any]:
    """Encode a rollout to enqueue."""
    return {
        "task": _encode_task(request.task),
        "sample": request.sample,
        "id": request.id,
        "use": request.use,
        "limits": request.limits.to_dict(),
    }


def encode_claim(claim: Claim) -> dict[str, Any]:
    """Encode a claimed rollout, with its keys."""
    return {
        **encode_attempt_id(claim.attempt_id),
        "task": _encode_task(claim.task),
        "use": claim.use,
        "limits": claim.limits.to_dict(),
        "resources": dict(claim.resources),
        "model_key": claim.model_key,
        "reward_key": claim.reward_key,
    }


def decode_claim(document: Mapping[str, Any]) -> Claim:
    """Decode a claimed rollout."""
    return Claim(
        decode_attempt_id(document),
        decode_task(document["task"]),
        document["use"],
        RolloutLimits.from_dict(document["limits"]),
        document["resources"],
        document["model_key"],
        document["reward_key"],
    )


# -- results -----------------------------------------------------------------------------------------------------------


def encode_reward(reward: Reward) -> float | dict[str, float]:
    """Return a reward as plain numbers; all must be finite."""
    if isinstance(reward, Mapping):
        return {str(name): check_finite(value, f"The part '{name}' of a reward") for name, value in reward.items()}
    return check_finite(reward, "A reward")


def encode_report(report: AttemptReport) -> dict[str, Any]:
    """Encode the end of an attempt."""
    reward = None if report.reward is None else encode_reward(report.reward)
    return {"outcome": report.outcome, "error": report.error, "reward": reward}


def encode_turn(turn: Turn) -> dict[str, Any]:
    """Encode a model call. Its arrays are packed as in the journal (see `blobs`), in base64."""
    names = ("index", "model", "tags", "reward", "anchor", "observed", "opened")
    fields = {name: getattr(turn, name) for name in names}
    completion = turn.completion
    return fields | {
        "finish": completion.finish_reason,
        "text": completion.text,
        "arrays": base64.b64encode(pack_turn(turn)).decode(),
    }


def decode_turn(document: Mapping[str, Any]) -> Turn:
    """Decode a model call; raise `DataError` if it is malformed."""
    try:
        payload = base64.b64decode(document["arrays"], validate=True)
        prompt, columns = unpack_turn(payload)
        completion = Completion(finish_reason=document["finish"], text=document["text"], **columns)
        fields = {name: document[name] for name in ("index", "model", "reward", "anchor", "observed", "opened")}
        turn = Turn(prompt, completion, tags=tuple(document["tags"]), **fields)
        if len(pack_turn(turn)) != len(payload):
            raise ValueError(f"its arrays end before their {len(payload)} bytes do")
        return turn
    except (binascii.Error, StoreError, ValueError, OverflowError) as error:
        raise DataError(f"The turn is malformed: {str(error).rstrip('.')}.") from error


def encode_event(event: Event) -> dict[str, Any]:
    """Encode an event as the journal stores it, its payload in base64."""
    record = encode(event)
    document = {"kind": record.kind, "rollout": record.rollout, "body": json.loads(record.body)}
    return document | {"payload": base64.b64encode(record.payload).decode()}


def decode_event(document: Mapping[str, Any]) -> Event:
    """Decode an event."""
    payload = base64.b64decode(document["payload"], validate=True)
    return decode(EventRecord(document["kind"], document["rollout"], to_json_text(document["body"]), payload))


def encode_runner(runner: RunnerState) -> dict[str, Any]:
    """Encode the state of a runner."""
    running = [encode_attempt_id(key) for key in runner.running]
    return {"name": runner.name, "running": running, "silent_s": runner.silent_s, "told": dict(runner.info)}


def decode_runner(document: Mapping[str, Any]) -> RunnerState:
    """Decode the state of a runner."""
    running = tuple(decode_attempt_id(key) for key in document["running"])
    return RunnerState(document["name"], running, document["silent_s"], document["told"])
