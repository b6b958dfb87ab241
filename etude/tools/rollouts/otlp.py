"""A rollout as a trace of OpenTelemetry's: a span for it, one for each attempt, one for each turn, and the spans that
an agent sent of its own.

The form is that of OTLP in JSON, an export a line, which collectors read from files (`otlpjsonfile`) and take by POST
at `/v1/traces`. Ids follow from the run and the rollout, so that what is exported twice is the same trace.

A journal says when a turn was written down, and not when its call began: a turn's span begins where the one before it
ended, and has the agent's own work in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from etude.records import Turn
from etude.store import AttemptState, NoteRecorded
from etude.tools.rollouts.reader import AttemptRecord, RolloutRecord

__all__ = ["Span", "rollout_to_otlp"]

Span = dict[str, Any]
SPAN, SCOPE = "span", "etude"
"""What a note is called that is a span; and who made the spans that are made here."""
INTERNAL, CLIENT, OK, ERROR = 1, 3, 1, 2
SECOND = 10**9
NONFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""How the JSON of protobuf writes what JSON has no number for."""


def rollout_to_otlp(story: RolloutRecord, run: str) -> dict[str, Any]:
    """One export: the spans of a rollout."""
    resource = {"service.name": "etude", "etude.run": run, "etude.rollout": story.state.id}
    ours = {"scope": {"name": SCOPE}, "spans": list(_spans(story, run))}
    sent = _agent_scopes(note for tried in story.attempts for note in tried.notes)
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [ours, *sent]}]}


def _spans(story: RolloutRecord, run: str) -> Iterator[Span]:
    state, task = story.state, story.task
    whole = _span_ids(run, state.id)
    began = min((tried.began for tried in story.attempts), default=0.0)
    ended = max((tried.ended for tried in story.attempts), default=0.0)
    told: dict[str, Any] = {
        "etude.rollout": state.id,
        "etude.task": task.id,
        "etude.sample": state.sample,
        "etude.split": state.use,
    }
    told |= {"etude.status": str(state.status), "etude.reward": story.reward, "etude.step": task.step}
    told |= {"etude.data_source": task.source or None, "etude.fields": json.dumps(dict(task.fields))}
    failed = state.why or (state.last.error if state.last is not None else "")
    yield whole | _span("rollout", whole["spanId"], "", began, ended, told, _status(str(state.status), failed))
    for index, (attempt, tried) in enumerate(zip(state.attempts, story.attempts, strict=True)):
        yield from _of_attempt(index, attempt, tried, run, state.id)


def _of_attempt(index: int, attempt: AttemptState, tried: AttemptRecord, run: str, rollout: int) -> Iterator[Span]:
    named = _span_ids(run, rollout, index)
    told = {"etude.attempt": index, "etude.status": str(attempt.status), "etude.reward": attempt.reward}
    told |= {"etude.paid": attempt.paid, "etude.runner": attempt.runner or None}
    told |= {f"etude.reward.{name}": value for name, value in attempt.parts.items()}
    parent = _span_ids(run, rollout)["spanId"]
    status = _status(str(attempt.status), attempt.error)
    events = [
        {
            "name": note.name,
            "timeUnixNano": _time(tried.ended),
            "attributes": _attributes({"data": json.dumps(note.data)}),
        }
        for note in tried.notes
        if not _is_span(note)
    ]
    span = _span("attempt", named["spanId"], parent, tried.began, tried.ended, told, status)
    yield named | span | {"events": events}
    since = tried.began
    for turn, at in zip(tried.turns, tried.times, strict=True):
        of_turn = _span_ids(run, rollout, index, turn.index)
        name = f"chat {turn.model}"
        yield of_turn | _span(name, of_turn["spanId"], named["spanId"], since, at, _turn_attributes(turn), {}, CLIENT)
        since = max(since, at)


def _turn_attributes(turn: Turn) -> dict[str, Any]:
    """A turn in the words of OpenTelemetry's conventions for models, and what those have no word for."""
    said = turn.completion
    versions = {"etude.version.min": int(said.version.min()), "etude.version.max": int(said.version.max())}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "etude",
        "gen_ai.request.model": turn.model,
        "gen_ai.response.finish_reasons": [said.finish_reason],
        "gen_ai.usage.input_tokens": len(turn.prompt),
        "gen_ai.usage.output_tokens": len(said.ids),
        "etude.turn": turn.index,
        "etude.text": said.text,
        "etude.tags": list(turn.tags) or None,
        "etude.reward": turn.reward,
        **(versions if len(said.version) else {}),
    }


def _agent_scopes(notes: Iterable[NoteRecorded]) -> Iterator[dict[str, Any]]:
    """The spans that an agent sent, as it sent them."""
    for note in notes:
        if _is_span(note):
            data = note.data
            events = [
                {"name": e["name"], "timeUnixNano": str(e["time_ns"]), "attributes": _attributes(e["attributes"])}
                for e in data["events"]
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
            yield {"scope": {"name": data["scope"]}, "spans": [span]}


def _is_span(note: NoteRecorded) -> bool:
    return (
        note.name == SPAN and isinstance(note.data, Mapping) and {"trace_id", "span_id", "start_ns"} <= note.data.keys()
    )


def _span_ids(run: str, rollout: int, *place: int) -> Span:
    """The ids of a trace, and of a span in it."""
    of_trace = blake2b(f"{run}/{rollout}".encode(), digest_size=16).hexdigest()
    of_span = blake2b(f"{run}/{rollout}/{place}".encode(), digest_size=8).hexdigest()
    return {"traceId": of_trace, "spanId": of_span}


def _span(
    name: str,
    id: str,
    parent: str,
    began: float,
    ended: float,
    told: Mapping[str, Any],
    status: Mapping[str, Any],
    kind: int = INTERNAL,
) -> Span:
    span = {"spanId": id, "parentSpanId": parent, "name": name, "kind": kind, "status": dict(status)}
    span |= {"startTimeUnixNano": _time(began), "endTimeUnixNano": _time(max(began, ended))}
    return span | {"attributes": _attributes(told)}


def _status(status: str, why: str) -> dict[str, Any]:
    if status == "succeeded":
        return {"code": OK}
    return {} if status in ("queued", "preparing", "running") else {"code": ERROR, "message": why or status}


def _time(seconds: float) -> str:
    """Nanoseconds, as text, which is how JSON has numbers of 64 bits there."""
    whole = math.floor(seconds)
    return str(whole * SECOND + round((seconds - whole) * SECOND))


def _attributes(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in told.items() if value is not None]


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
            return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": ""}
