"""Spans in OpenTelemetry's OTLP/HTTP format, protobuf or JSON, parsed into notes.

Training never depends on a span; the store keeps it for people to inspect beside the turns.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor
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
from etude.store.http.request_limits import RequestRefusedError, check_json_size
from etude.store.journal.json_values import json_size
from etude.store.queue.records import AttemptId

JSON, PROTOBUF = "application/json", "application/x-protobuf"
ROLLOUT, ATTEMPT = "etude.rollout", "etude.attempt"
"""Resource attributes that name the attempt of the spans."""
_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_MAX_DEPTH = 64
MAX_EXPORT_BYTES, MAX_EXPORT_SPANS = 4 * 2**20, 4096
"""Limits of one export. Exporters send some hundreds of spans at once."""
MAX_REPEATED_BYTES = 16 * 2**20
"""Bytes of resources and scopes, which an export holds once and the store keeps with each span."""
MAX_PARTS = 100_000
"""Messages in a protobuf export (spans, attributes, events and their parts), or values in a JSON export. It limits also
the values of resources, each counted once per span."""
MAX_FIELDS = 2**18
"""Fields of all these messages, unknown ones included."""


class ParsedSpan(NamedTuple):
    """A span, and the attempt that its resource names."""

    attempt_id: AttemptId | None
    data: dict[str, Any]
    size: int
    """About how many bytes of JSON it takes."""
    why: str
    """Reason for which it is not stored; empty if it is."""


def parse_spans(body: bytes, media_type: str) -> list[ParsedSpan]:
    """Return the spans of one export. A malformed body raises `DataError`, one that is too large
    `RequestRefusedError`."""
    if len(body) > MAX_EXPORT_BYTES:
        raise RequestRefusedError(413, f"This export has {len(body)} bytes; send at most {MAX_EXPORT_BYTES} at once.")
    try:
        if media_type == PROTOBUF:
            _check_counts(body)
            request = ExportTraceServiceRequest.FromString(body)
        else:
            check_json_size(body, MAX_PARTS, _MAX_DEPTH)
            document = json.loads(body.decode())
            if not isinstance(document, dict):
                raise ValueError("it is not an object")
            request = ParseDict(_with_base64_ids(document), ExportTraceServiceRequest(), ignore_unknown_fields=True)
        _check_repeated(request)
        return list(_spans(request))
    except (DecodeError, ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"This is not an export of spans in the format of OTLP/HTTP ({media_type}): {error}."
        ) from error


def _check_counts(body: bytes) -> None:
    """Refuse a protobuf export with too many spans, messages or fields, before it is parsed, by the lengths in it."""
    fields = parts = spans = 0
    stack = [(0, len(body), ExportTraceServiceRequest.DESCRIPTOR)]
    while stack:
        at, end, kind = stack.pop()
        for message, start, stop in _fields(body, at, end, kind):
            fields += 1
            if message is not None:
                parts += 1
                spans += message is Span.DESCRIPTOR
                stack.append((start, stop, message))
            if fields > MAX_FIELDS or parts > MAX_PARTS or spans > MAX_EXPORT_SPANS:
                raise RequestRefusedError(
                    413,
                    f"This export has more than {MAX_EXPORT_SPANS} spans, {MAX_PARTS} parts or {MAX_FIELDS} fields; "
                    "send less at once.",
                )


def _fields(body: bytes, at: int, end: int, kind: Descriptor) -> Iterator[tuple[Descriptor | None, int, int]]:
    """Yield the fields of a message: the type of a nested message or None, and the start and end of the value.

    Malformed data ends the iteration; the parser reports it later.
    """
    known = kind.fields_by_number
    while at < end:
        tag, at = _varint(body, at, end)
        message, start = None, at
        if tag & 7 == 2:
            length, start = _varint(body, at, end)
            at = start + length
            if at > end:
                return
            field = known.get(tag >> 3)
            message = None if field is None else field.message_type
        elif tag & 7 == 0:
            _, at = _varint(body, at, end)
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError("it has a protobuf group, which OTLP does not use")
        yield message, start, at


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and the position after it; without a complete one, 0 and `end`."""
    if at < end and body[at] < 128:
        return body[at], at + 1
    value = shift = 0
    while at < end and shift < 70:
        value |= (body[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if body[at - 1] < 128:
            return value, at
    return 0, end


def _check_repeated(request: ExportTraceServiceRequest) -> None:
    """Refuse an export with too many spans, or with resources too large to be stored with each span."""
    count = size = values = 0
    for resource in request.resource_spans:
        scopes = [scope for scope in resource.scope_spans if len(scope.spans)]
        if scopes:
            resource_bytes, parts = resource.resource.ByteSize(), _values(resource.resource.attributes)
        for scope in scopes:
            count += len(scope.spans)
            size += len(scope.spans) * (resource_bytes + scope.scope.ByteSize())
            values += len(scope.spans) * parts
    if count > MAX_EXPORT_SPANS:
        raise RequestRefusedError(413, f"This export has {count} spans; send at most {MAX_EXPORT_SPANS} at once.")
    if size > MAX_REPEATED_BYTES or values > MAX_PARTS:
        raise RequestRefusedError(
            413,
            f"The resource of these {count} spans is stored with each of them, which would take {size} bytes and "
            f"{values} values; at most {MAX_REPEATED_BYTES} and {MAX_PARTS} are stored. Send a smaller resource, or "
            "fewer spans at once.",
        )


def _values(pairs: Iterable[KeyValue]) -> int:
    """Return the number of values in attributes, nested ones included."""
    stack, count = [pair.value for pair in pairs], 0
    while stack:
        value = stack.pop()
        count += 1
        stack += value.array_value.values
        stack += [pair.value for pair in value.kvlist_value.values]
    return count


def encode_reply(media_type: str, refused: int, why: str) -> bytes:
    """Encode the reply: the number of spans that were not stored, and the reason."""
    reply = ExportTraceServiceResponse()
    if refused:
        reply.partial_success.CopyFrom(ExportTracePartialSuccess(rejected_spans=refused, error_message=why))
    return reply.SerializeToString() if media_type == PROTOBUF else json.dumps(MessageToDict(reply)).encode()


def _with_base64_ids(document: Any, depth: int = 0) -> Any:
    """Return the document with its ids in base64, as protobuf's JSON expects them; OTLP writes them in hexadecimal."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is more than {_MAX_DEPTH} levels deep")
    if isinstance(document, list):
        return [_with_base64_ids(one, depth + 1) for one in document]
    if not isinstance(document, dict):
        return document
    return {
        name: base64.b64encode(bytes.fromhex(value)).decode()
        if name in _IDS and isinstance(value, str)
        else _with_base64_ids(value, depth + 1)
        for name, value in document.items()
    }


def _spans(request: ExportTraceServiceRequest) -> Iterator[ParsedSpan]:
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        key = _key(resource)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                data = _data(span) | {"scope": of_scope.scope.name, "resource": resource}
                try:
                    yield ParsedSpan(key, data, json_size(data, "A span"), "")
                except DataError as error:
                    yield ParsedSpan(key, {}, 0, str(error))


def _key(resource: Mapping[str, Any]) -> AttemptId | None:
    """Return the attempt that a resource names, or None. The values may be text, since some exporters send only
    text."""
    try:
        key = AttemptId(int(resource[ROLLOUT]), int(resource[ATTEMPT]))
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
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    """Convert a value to JSON: bytes to base64, NaN and infinities to their names."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    field = getattr(value, kind)
    if isinstance(field, bytes):
        return base64.b64encode(field).decode()
    return str(field) if isinstance(field, float) and not math.isfinite(field) else field
