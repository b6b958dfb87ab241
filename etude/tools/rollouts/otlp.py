"""A rollout as an OpenTelemetry trace: a span for the rollout, each attempt and each turn, and the agent's own spans.

The format is OTLP/JSON, one export a line. Collectors read it from files (`otlpjsonfile`), or take it by POST at
`/v1/traces`. Ids are derived from the run and the rollout, so that a second export gives the same trace.

The journal has the time at which a turn was recorded, and not the start of its request. A turn's span therefore begins
at the end of the previous one, and includes the agent's own work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from etude.records import Turn
from etude.store import AttemptState, NoteRecorded
from etude.support import Support
from etude.tools.rollout_reader import AttemptRecord, RolloutRecord

Span = dict[str, Any]
SPAN, SCOPE = "span", "etude"
"""The name of a note that is a span, and the scope of the spans that are created here."""
_FIELDS = {
    **dict.fromkeys(("trace_id", "span_id", "parent_span_id", "name", "scope"), str),
    **dict.fromkeys(("kind", "start_ns", "end_ns"), int),
    **dict.fromkeys(("attributes", "status"), Mapping),
    "events": list,
}
"""The fields of a span that are exported."""
_EVENT_FIELDS = {"name": str, "time_ns": int, "attributes": Mapping}
INTERNAL = 1
CLIENT = 3
OK = 1
ERROR = 2
SECOND = 10**9
NONFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Non-finite numbers in the JSON of protobuf."""


def rollout_to_otlp(rollout: RolloutRecord, run: str) -> dict[str, Any]:
    """Return one export: the spans of a rollout."""
    resource = {"service.name": "etude", "etude.run": run, "etude.rollout": rollout.state.id}
    own_scope = {"scope": {"name": SCOPE}, "spans": list(_spans(rollout, f"{run}/{rollout.state.id}"))}
    agent_spans = filter(is_span, (note for record in rollout.attempts for note in record.notes))
    scopes = [own_scope, *map(_agent_scope, agent_spans)]
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": scopes}]}


def _spans(rollout: RolloutRecord, trace: str) -> Iterator[Span]:
    state, task = rollout.state, rollout.task
    began = min((record.began for record in rollout.attempts), default=0.0)
    ended = max((record.ended for record in rollout.attempts), default=0.0)
    attributes: dict[str, Any] = {
        "etude.rollout": state.id,
        "etude.task": task.id,
        "etude.sample": state.sample,
        "etude.split": state.use,
        "etude.status": str(state.status),
        "etude.reward": rollout.reward,
        "etude.step": task.step,
        "etude.data_source": task.source or None,
        "etude.fields": json.dumps(dict(task.fields)),
    }
    error = state.why or (state.last.error if state.last is not None else "")
    yield _span(trace, (), "rollout", began, ended, attributes, _status(str(state.status), error))
    for index, (attempt, record) in enumerate(zip(state.attempts, rollout.attempts, strict=True)):
        yield from _attempt_spans(index, attempt, record, trace)


def _attempt_spans(index: int, attempt: AttemptState, record: AttemptRecord, trace: str) -> Iterator[Span]:
    status = str(attempt.status)
    attributes = {"etude.attempt": index, "etude.status": status, "etude.reward": attempt.reward}
    attributes |= {"etude.paid": attempt.paid, "etude.runner": attempt.runner or None}
    attributes |= {f"etude.reward.{name}": value for name, value in attempt.parts.items()}
    at = _time(record.ended)
    events = [
        {"name": note.name, "timeUnixNano": at, "attributes": _attributes({"data": json.dumps(note.data)})}
        for note in record.notes
        if not is_span(note)
    ]
    began, path = record.began, (index,)
    span = _span(trace, path, "attempt", began, record.ended, attributes, _status(status, attempt.error))
    yield span | {"events": events}
    for turn, recorded_at in zip(record.turns, record.times, strict=True):
        name = f"chat {turn.model}"
        yield _span(trace, (*path, turn.index), name, began, recorded_at, _turn_attributes(turn), {}, CLIENT)
        began = max(began, recorded_at)


def _turn_attributes(turn: Turn) -> dict[str, Any]:
    """Return a turn's attributes, in OpenTelemetry's conventions for generative AI, and others under `etude.`."""
    completion = turn.completion
    versions = {"etude.version.min": int(completion.version.min()), "etude.version.max": int(completion.version.max())}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "etude",
        "gen_ai.request.model": turn.model,
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "gen_ai.usage.input_tokens": len(turn.prompt),
        "gen_ai.usage.output_tokens": len(completion.ids),
        "etude.turn": turn.index,
        "etude.text": completion.text,
        "etude.tags": list(turn.tags) or None,
        "etude.reward": turn.reward,
        **(versions if len(completion.version) else {}),
        **({} if completion.support is None else _support_attributes(completion.support)),
        "etude.alternatives": None if completion.alternative_ids is None else completion.alternative_ids.shape[1],
    }


def _support_attributes(support: Support) -> dict[str, Any]:
    """Return how far the sets that tokens were drawn from bound a turn; the sets themselves are too large for a span.

    The shares are of the turn's tokens. A set is stored by the tokens in it, of which `size` is the mean number, or by
    those that it leaves out, of which `left_out` is.
    """
    sizes = support.signed_sizes()
    if not len(sizes):
        return {}
    some, most = sizes[sizes > 0], sizes[sizes < 0]
    return {
        "etude.support.bound_share": float(np.mean(sizes != 0)),
        "etude.support.forced_share": float(np.mean(sizes == 1)),
        "etude.support.size": float(some.mean()) if len(some) else None,
        "etude.support.left_out": float(-most.mean()) if len(most) else None,
    }


def _agent_scope(note: NoteRecorded) -> dict[str, Any]:
    """Return one of the agent's own spans in its scope."""
    data = note.data
    events = [
        {"name": event["name"], "timeUnixNano": str(event["time_ns"]), "attributes": _attributes(event["attributes"])}
        for event in data["events"]
        if _has_fields(event, _EVENT_FIELDS)
    ]
    span = {
        "traceId": data["trace_id"],
        "spanId": data["span_id"],
        "parentSpanId": data["parent_span_id"],
        "name": data["name"],
        "kind": data["kind"],
        "startTimeUnixNano": str(data["start_ns"]),
        "endTimeUnixNano": str(data["end_ns"]),
        "attributes": _attributes(data["attributes"]),
        "events": events,
        "status": data["status"],
    }
    return {"scope": {"name": data["scope"]}, "spans": [span]}


def is_span(note: NoteRecorded) -> bool:
    """Return whether a note is a span of the store. An agent may record any event under the same name."""
    return note.name == SPAN and _has_fields(note.data, _FIELDS)


def _has_fields(data: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether data has fields of these types; its times are unsigned integers of 64 bits."""
    return isinstance(data, Mapping) and all(
        isinstance(value := data.get(name), kind)
        and (not name.endswith("_ns") or (type(value) is int and 0 <= value < 2**64))
        for name, kind in fields.items()
    )


def _span(
    trace: str,
    path: tuple[int, ...],
    name: str,
    began: float,
    ended: float,
    attributes: Mapping[str, Any],
    status: Mapping[str, Any],
    kind: int = INTERNAL,
) -> Span:
    """Return a span. path: its attempt and its turn, of which its ids and its parent follow."""
    return {
        "traceId": blake2b(trace.encode(), digest_size=16).hexdigest(),
        "spanId": _span_id(trace, path),
        "parentSpanId": _span_id(trace, path[:-1]) if path else "",
        "name": name,
        "kind": kind,
        "status": dict(status),
        "startTimeUnixNano": _time(began),
        "endTimeUnixNano": _time(max(began, ended)),
        "attributes": _attributes(attributes),
    }


def _span_id(trace: str, path: tuple[int, ...]) -> str:
    return blake2b(f"{trace}/{path}".encode(), digest_size=8).hexdigest()


def _status(status: str, message: str) -> dict[str, Any]:
    if status == "succeeded":
        return {"code": OK}
    return {} if status in ("queued", "preparing", "running") else {"code": ERROR, "message": message or status}


def _time(seconds: float) -> str:
    """Return nanoseconds as text: OTLP/JSON writes 64-bit integers as strings."""
    whole = math.floor(seconds)
    return str(whole * SECOND + round((seconds - whole) * SECOND))


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)} if -(2**63) <= value < 2**63 else {"stringValue": str(value)}
        case float():
            return {"doubleValue": value if math.isfinite(value) else NONFINITE[str(value)]}
        case str():
            return {"stringValue": value}
        case Mapping():
            return {"kvlistValue": {"values": _attributes(value)}}
        case Sequence():
            return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": ""}
