"""The spans that an agent sent during an attempt, in OpenTelemetry's format, by the time at which they began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.store import NoteRecorded
from etude.tools.rollouts.otlp import ERROR, OK, SECOND, is_span
from etude.view.replies import Table

MOST_SPANS = 1000
"""Spans in the table of an attempt: the first ones."""
MOST_DEPTH = 20


def read_spans(notes: Sequence[NoteRecorded], began: float) -> tuple[Table, int]:
    """Return the first spans of an attempt, and the number of all.

    An exporter that retries sends a span twice; it is shown once.
    `start` counts seconds from `began`, and `depth` the known spans around a span.
    """
    by_id = {(note.data["trace_id"], note.data["span_id"]): note.data for note in notes if is_span(note)}
    spans = sorted(by_id.values(), key=lambda span: span["start_ns"])[:MOST_SPANS]
    origin = round(began * SECOND) or min((span["start_ns"] for span in spans), default=0)
    parents = {span["span_id"]: span["parent_span_id"] for span in spans}
    table = Table(
        {
            "span": [f"{span['trace_id']} {span['span_id']}" for span in spans],
            "name": [span["name"] for span in spans],
            "depth": [_depth(span["span_id"], parents) for span in spans],
            "start": [(span["start_ns"] - origin) / SECOND for span in spans],
            "seconds": [max(0, span["end_ns"] - span["start_ns"]) / SECOND for span in spans],
            "status": [_status(span["status"]) for span in spans],
            "details": [{name: span[name] for name in ("scope", "attributes", "events")} for span in spans],
        }
    )
    return table, len(by_id)


def _depth(span: str, parents: Mapping[str, str]) -> int:
    """Return the number of known spans around a span, at most `MOST_DEPTH`: a foreign exporter may send a circle."""
    depth = 0
    while parents[span] in parents and depth < MOST_DEPTH:
        depth, span = depth + 1, parents[span]
    return depth


def _status(status: Mapping[str, Any]) -> str:
    if status.get("code") == ERROR:
        return f"error: {status['message']}" if status.get("message") else "error"
    return "ok" if status.get("code") == OK else ""
