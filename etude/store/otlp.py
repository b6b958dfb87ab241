"""Spans as OpenTelemetry sends them over HTTP, in both its forms, as notes that a desk keeps.

Training never depends on a span; it is kept to be looked at beside the turns.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from etude.errors import DataError
from etude.store.desk import Key

__all__ = ["ATTEMPT", "JSON", "PROTOBUF", "ROLLOUT", "Spanned", "TooManyError", "answer", "spans"]

JSON, PROTOBUF = "application/json", "application/x-protobuf"
ROLLOUT, ATTEMPT = "etude.rollout", "etude.attempt"
"""The attributes of a resource that say whose its spans are."""
_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_DEEPEST = 64
MOST_BYTES, MOST_SPANS = 4 * 2**20, 4096
"""Of one export: exporters send some hundreds of spans at once."""


class TooManyError(DataError):
    """An export of more than is read at once."""


class Spanned(NamedTuple):
    """A span, and whose it says it is."""

    key: Key | None
    data: dict[str, Any]


def spans(body: bytes, form: str) -> list[Spanned]:
    """The spans of one export; `DataError` where the body is none, `TooManyError` where it is too large."""
    if len(body) > MOST_BYTES:
        raise TooManyError(f"This export has {len(body)} bytes; send at most {MOST_BYTES} at once.")
    try:
        if form == PROTOBUF:
            request = ExportTraceServiceRequest.FromString(body)
        else:
            document = json.loads(body)
            if not isinstance(document, dict):
                raise ValueError("it is no object")
            request = ParseDict(_with_ids(document), ExportTraceServiceRequest(), ignore_unknown_fields=True)
        count = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        if count > MOST_SPANS:
            raise TooManyError(f"This export has {count} spans; send at most {MOST_SPANS} at once.")
        return list(_spans(request))
    except TooManyError:
        raise
    except (DecodeError, ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"This is no export of spans as OTLP/HTTP has it ({form}): {error}.") from error


def answer(form: str, refused: int, why: str) -> bytes:
    """What a client is told: how many spans were not kept, and why."""
    told = ExportTraceServiceResponse()
    if refused:
        told.partial_success.CopyFrom(ExportTracePartialSuccess(rejected_spans=refused, error_message=why))
    return told.SerializeToString() if form == PROTOBUF else json.dumps(MessageToDict(told)).encode()


def _with_ids(document: Any, depth: int = 0) -> Any:
    """The same with its ids as protobuf's own JSON has them: OTLP writes them in hexadecimal, protobuf in base64."""
    if depth > _DEEPEST:
        raise ValueError(f"it is more than {_DEEPEST} levels deep")
    if isinstance(document, list):
        return [_with_ids(one, depth + 1) for one in document]
    if not isinstance(document, dict):
        return document
    return {
        name: base64.b64encode(bytes.fromhex(value)).decode()
        if name in _IDS and isinstance(value, str)
        else _with_ids(value, depth + 1)
        for name, value in document.items()
    }


def _spans(request: ExportTraceServiceRequest) -> Iterator[Spanned]:
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        key = _key(resource)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Spanned(key, _data(span) | {"scope": of_scope.scope.name, "resource": resource})


def _key(resource: Mapping[str, Any]) -> Key | None:
    """The attempt that a resource names; some exporters can send text only."""
    try:
        key = Key(int(resource[ROLLOUT]), int(resource[ATTEMPT]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return key if all(0 <= part < 2**63 for part in key) else None


def _data(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_span_id": span.parent_span_id.hex(),
        "kind": span.kind,
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": _attributes(span.attributes),
        "events": [
            {"name": event.name, "time_ns": event.time_unix_nano, "attributes": _attributes(event.attributes)}
            for event in span.events
        ],
        "status": {"code": span.status.code, "message": span.status.message},
    }


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in pairs}


def _value(value: AnyValue) -> Any:
    """As JSON has it: bytes in base64, and a number that is none as its name."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    plain = getattr(value, kind)
    if isinstance(plain, bytes):
        return base64.b64encode(plain).decode()
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain
