"""What a desk speaks of, as it goes over HTTP: plain JSON, and the arrays of a turn as the bytes the journal keeps.

Both ends use these, so they import neither a web framework nor a database. `verbs` says which document goes where.
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
from etude.store.desk import Claim, Ended, Key, Reward, RunnerState, Wanted
from etude.store.events import Event
from etude.store.limits import Limits
from etude.store.plain import finite, plain
from etude.store.plain import to_json as plain_json
from etude.store.record import Record, decode, encode

__all__ = [
    "AGAIN",
    "KEEPERS_LIFE",
    "LIFE",
    "ONCE",
    "REQUEST",
    "claim_document",
    "claim_of",
    "ended_document",
    "event_document",
    "event_of",
    "key_document",
    "key_of",
    "reward_document",
    "runner_document",
    "runner_of",
    "task_of",
    "to_json",
    "turn_document",
    "turn_of",
    "wanted_document",
]

REQUEST = "x-request-id"
"""The name of a request: taken as it is given, else made, sent back, and in the log."""
ONCE = "idempotency-key"
"""What is sent twice under the same one is done once, and answered twice."""
LIFE = "x-store-life"
"""Which life of the server answers; it remembers what it answered until it ends."""
AGAIN = "x-sent-to"
"""On what is sent again: the life it was sent to before."""
KEEPERS_LIFE = "x-keeper-life"
"""In which life of the run that keeps the store something is said; it counts only while that lasts."""


def to_json(document: Any) -> bytes:
    """A document as bytes. A number that is none, which JSON does not have, is written as Python reads it."""
    return plain_json(document).encode()


# -- whose -------------------------------------------------------------------------------------------------------------


def key_document(key: Key) -> dict[str, Any]:
    """The attempt that is meant."""
    return {"rollout": key.rollout, "attempt": key.attempt}


def key_of(document: Mapping[str, Any]) -> Key:
    """The attempt that is meant."""
    return Key(document["rollout"], document["attempt"])


# -- what is asked -----------------------------------------------------------------------------------------------------


def _task_document(task: Task) -> dict[str, Any]:
    return {"ordinal": task.ordinal, "fields": plain(task.fields, "fields"), "source": task.source}


def task_of(document: Mapping[str, Any]) -> Task:
    """The task that was written so."""
    return Task(document["ordinal"], document["fields"], document["source"])


def wanted_document(wanted: Wanted) -> dict[str, Any]:
    """A rollout that somebody wants."""
    return {
        "task": _task_document(wanted.task),
        "sample": wanted.sample,
        "id": wanted.id,
        "use": wanted.use,
        "limits": wanted.limits.document(),
    }


def claim_document(claim: Claim) -> dict[str, Any]:
    """A rollout that a runner is to play, with its keys."""
    return {
        **key_document(claim.key),
        "task": _task_document(claim.task),
        "use": claim.use,
        "limits": claim.limits.document(),
        "resources": dict(claim.resources),
        "model_key": claim.model_key,
        "reward_key": claim.reward_key,
    }


def claim_of(document: Mapping[str, Any]) -> Claim:
    """The claim that was written so."""
    return Claim(
        key_of(document),
        task_of(document["task"]),
        document["use"],
        Limits.restored(document["limits"]),
        document["resources"],
        document["model_key"],
        document["reward_key"],
    )


# -- what came of it ---------------------------------------------------------------------------------------------------


def reward_document(reward: Reward) -> float | dict[str, float]:
    """A reward as plain numbers, all of them finite."""
    if isinstance(reward, Mapping):
        return {str(name): finite(value, f"The part '{name}' of a reward") for name, value in reward.items()}
    return finite(reward, "A reward")


def ended_document(ended: Ended) -> dict[str, Any]:
    """How an attempt ended."""
    reward = None if ended.reward is None else reward_document(ended.reward)
    return {"outcome": ended.outcome, "error": ended.error, "reward": reward}


def turn_document(turn: Turn) -> dict[str, Any]:
    """A call to the model, its arrays as the journal keeps them (see `blobs`), in base64."""
    names = ("index", "model", "tags", "reward", "anchor", "observed", "opened")
    told = {name: getattr(turn, name) for name in names}
    said = turn.completion
    return told | {"finish": said.finish, "text": said.text, "arrays": base64.b64encode(pack_turn(turn)).decode()}


def turn_of(document: Mapping[str, Any]) -> Turn:
    """The turn that was written so; `DataError` where it cannot have been one."""
    try:
        payload = base64.b64decode(document["arrays"], validate=True)
        prompt, columns = unpack_turn(payload)
        said = Completion(finish=document["finish"], text=document["text"], **columns)
        told = {name: document[name] for name in ("index", "model", "reward", "anchor", "observed", "opened")}
        turn = Turn(prompt, said, tags=tuple(document["tags"]), **told)
        if len(pack_turn(turn)) != len(payload):
            raise ValueError(f"its arrays end before their {len(payload)} bytes do")
        return turn
    except (binascii.Error, StoreError, ValueError, OverflowError) as error:
        raise DataError(f"This is no turn: {str(error).rstrip('.')}.") from error


def event_document(event: Event) -> dict[str, Any]:
    """Something that happened, as the journal keeps it; its payload in base64."""
    record = encode(event)
    told = {"kind": record.kind, "rollout": record.rollout, "body": json.loads(record.body)}
    return told | {"payload": base64.b64encode(record.payload).decode()}


def event_of(document: Mapping[str, Any]) -> Event:
    """The event that was written so."""
    payload = base64.b64decode(document["payload"], validate=True)
    return decode(Record(document["kind"], document["rollout"], plain_json(document["body"]), payload))


def runner_document(runner: RunnerState) -> dict[str, Any]:
    """A runner as it last spoke."""
    running = [key_document(key) for key in runner.running]
    return {"name": runner.name, "running": running, "silent_s": runner.silent_s, "told": dict(runner.told)}


def runner_of(document: Mapping[str, Any]) -> RunnerState:
    """The runner that was written so."""
    running = tuple(key_of(key) for key in document["running"])
    return RunnerState(document["name"], running, document["silent_s"], document["told"])
