"""Spans arrive from OpenTelemetry's own exporter, in both formats, and are noted on their attempt."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from etude.store.http import otlp
from etude.store.http.server import serve
from etude.store.journal.json_values import NOTE_BYTES
from etude.store.queue.rollout_queue import Claim
from tests.store.http.served import Served, served
from tests.sweeps import later

JSON, PROTOBUF = "application/json", "application/x-protobuf"
TRACE, SPAN = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"


@pytest.fixture(scope="module")
def store() -> Iterator[Served]:
    with served() as made:
        yield made


def document(claim: Claim | None, spans: int = 1) -> dict[str, Any]:
    """Return an export in OTLP's JSON format; of an attempt, if one is given."""
    named = (
        {} if claim is None else {"etude.rollout": claim.attempt_id.rollout, "etude.attempt": claim.attempt_id.attempt}
    )
    attributes = [{"key": name, "value": {"intValue": str(value)}} for name, value in named.items()]
    span = {
        "traceId": TRACE,
        "spanId": SPAN,
        "name": "call a tool",
        "kind": 2,
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661000000000",
        "attributes": [
            {"key": "tool", "value": {"stringValue": "calculator"}},
            {"key": "odd", "value": {"doubleValue": "NaN"}},
            {"key": "many", "value": {"arrayValue": {"values": [{"boolValue": True}, {"bytesValue": "AAE="}]}}},
        ],
        "status": {"code": 1},
        "aNewField": 1,
    }
    scope = {"scope": {"name": "mine"}, "spans": [span] * spans}
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [scope]}]}


def notes(store: Served, claim: Claim) -> list[dict[str, Any]]:
    return asyncio.run(store.queue.notes(claim.attempt_id.rollout))


def test_json_and_protobuf_give_the_same_notes(store: Served) -> None:
    (claim,) = store.claimed()
    export = document(claim)
    assert (
        store.ask("/v1/traces", export, store.keyring.admin, content_type="application/json; charset=utf-8").json()
        == {}
    )
    (noted,) = notes(store, claim)
    assert noted["name"] == "span" and noted["attempt"] == claim.attempt_id.attempt
    data = noted["data"]
    assert (data["name"], data["trace_id"], data["span_id"], data["scope"]) == ("call a tool", TRACE, SPAN, "mine")
    assert data["attributes"] == {"tool": "calculator", "odd": "nan", "many": [True, "AAE="]}
    assert data["end_ns"] - data["start_ns"] == 10**9 and data["status"] == {"code": 1, "message": ""}

    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    for name, value in (("etude.rollout", claim.attempt_id.rollout), ("etude.attempt", claim.attempt_id.attempt)):
        attribute = of_resource.resource.attributes.add(key=name)
        attribute.value.int_value = value
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name = "mine"
    span = of_scope.spans.add(name="call a tool", kind=2, trace_id=bytes.fromhex(TRACE), span_id=bytes.fromhex(SPAN))
    span.start_time_unix_nano, span.end_time_unix_nano = data["start_ns"], data["end_ns"]
    span.attributes.add(key="tool").value.string_value = "calculator"
    span.attributes.add(key="odd").value.double_value = float("nan")
    values = span.attributes.add(key="many").value.array_value.values
    values.add().bool_value = True
    values.add().bytes_value = b"\0\1"
    span.status.code = 1
    body = gzip.compress(request.SerializeToString())
    answer = store.ask("/v1/traces", body, store.keyring.admin, content_type=PROTOBUF, content_encoding="gzip")
    assert answer.status_code == 200 and answer.headers["content-type"] == PROTOBUF
    assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert notes(store, claim) == [noted, noted]


def test_a_reward_key_writes_only_on_its_own_attempt(store: Served) -> None:
    own, other = store.claimed(2)
    store.ask("/v1/traces", document(other), own.reward_key, content_type=JSON)
    store.ask("/v1/traces", document(None), own.reward_key, content_type=JSON)
    assert len(notes(store, own)) == 2 and notes(store, other) == []


def test_spans_without_an_attempt_are_counted_and_the_others_stored(store: Served) -> None:
    (claim,) = store.claimed()
    export = document(claim, 3)
    export["resourceSpans"] += document(None, 2)["resourceSpans"]
    answer = store.ask("/v1/traces", export, store.keyring.admin, content_type=JSON).json()["partialSuccess"]
    assert answer["rejectedSpans"] == "2" and "etude.rollout" in answer["errorMessage"]
    assert len(notes(store, claim)) == 3


def test_too_many_spans_are_refused_before_they_are_created(store: Served) -> None:
    empty = b"\x12\x00" * 5000  # 5000 spans in 10 kB
    scope = b"\x12" + varint(len(empty)) + empty
    body = b"\x0a" + varint(len(scope)) + scope
    answer = store.ask("/v1/traces", body, store.keyring.admin, content_type=PROTOBUF)
    assert answer.status_code == 413 and "more than 4096 spans" in answer.json()["error"]["message"]
    answer = store.ask("/v1/traces", bytes(5 * 2**20), store.keyring.admin, content_type=PROTOBUF)
    assert answer.status_code == 413


def varint(number: int) -> bytes:
    """Return a length in protobuf's encoding."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def within(*numbers: int, inner: bytes) -> bytes:
    """Return a message within messages, each the field of this number, the outermost first."""
    for number in reversed(numbers):
        inner = varint(number << 3 | 2) + varint(len(inner)) + inner
    return inner


HUGE = {
    "spans": within(1, 2, inner=b"\x12\x00" * 300_000),
    "attributes": within(1, 2, 2, inner=b"\x4a\x00" * 300_000),
    "scopes": within(1, inner=b"\x12\x00" * 300_000),
    "resources": b"\x0a\x00" * 300_000,
    "listed": within(1, 1, 1, 2, 5, inner=b"\x0a\x00" * 300_000),
    "unknown": b"\x78\x00" * 300_000,
    "numbers": within(1, 2, 2, inner=b"\x30\x02" * 300_000),
    "values": within(
        1,
        inner=within(1, inner=within(1, inner=within(2, inner=b"\x10\x01")) * 350)
        + within(2, inner=b"\x12\x00" * 4000),
    ),
    "repeated": within(1, inner=within(1, 1, 1, inner=b"a" * 100_000) + within(2, inner=b"\x12\x00" * 4000)),
}


@pytest.mark.parametrize("name", later(HUGE))
def test_an_export_of_hundreds_of_thousands_of_parts_is_refused_before_it_is_parsed(store: Served, name: str) -> None:
    answer = store.ask("/v1/traces", HUGE[name], store.keyring.admin, content_type=PROTOBUF)
    assert answer.status_code == 413, answer.text


def test_a_resource_is_parsed_once_for_all_its_scopes() -> None:
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    of_resource.resource.attributes.add(key="a").value.string_value = "x" * 1000
    for _ in range(1000):
        of_resource.scope_spans.add()
    of_resource.scope_spans[500].spans.add(name="one")
    looked: list[str] = []

    def seen(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "ByteSize":
            looked.append(called.__name__)

    sys.setprofile(seen)
    try:
        spans = otlp.parse_spans(request.SerializeToString(), PROTOBUF)
    finally:
        sys.setprofile(None)
    assert len(looked) <= 2, "its own bytes, and those of the one scope that has spans"
    assert [span.data["name"] for span in spans] == ["one"] and spans[0].size > 1000


def test_an_export_of_usual_size_is_stored_completely(store: Served) -> None:
    (claim,) = store.claimed()
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    for number in range(30):
        of_resource.resource.attributes.add(key=f"about.{number}").value.string_value = "x" * 40
    of_scope = of_resource.scope_spans.add()
    for _ in range(512):
        span = of_scope.spans.add(name="step", trace_id=bytes(16), span_id=bytes(8), kind=1, start_time_unix_nano=1)
        for number in range(30):
            span.attributes.add(key=f"llm.{number}").value.string_value = "y"
    answer = store.ask("/v1/traces", request.SerializeToString(), claim.reward_key, content_type=PROTOBUF)
    assert answer.status_code == 200, answer.text
    assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert len(notes(store, claim)) == 512


def test_a_span_that_is_too_large_is_counted_and_the_others_kept(store: Served) -> None:
    (claim,) = store.claimed()
    export = document(claim, 2)
    large = export["resourceSpans"][0]["scopeSpans"][0]["spans"][0] | {"name": "x" * (NOTE_BYTES + 1)}
    export["resourceSpans"][0]["scopeSpans"][0]["spans"].append(large)
    answer = store.ask("/v1/traces", export, claim.reward_key, content_type=JSON).json()["partialSuccess"]
    assert answer["rejectedSpans"] == "1" and "Send less" in answer["errorMessage"]
    assert len(notes(store, claim)) == 2


def test_encodings_that_hide_parts_from_the_count_are_refused(store: Served) -> None:
    groups = within(1, 2, inner=b"\x9b\x06\x9c\x06" + b"\x12\x00" * 1_900_000)
    answer = store.ask("/v1/traces", groups, store.keyring.admin, content_type=PROTOBUF)
    assert answer.status_code == 400 and "group" in answer.json()["error"]["message"]
    wide = '{"resourceSpans":[]}'.encode("utf-16")
    assert store.ask("/v1/traces", wide, store.keyring.admin, content_type=JSON).status_code == 400
    many = b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b"{}," * 120_000 + b"{}]}]}]}"
    assert store.ask("/v1/traces", many, store.keyring.admin, content_type=JSON).status_code == 413


@pytest.mark.parametrize(
    ("body", "form", "status"),
    [
        (b"{", JSON, 400),
        (b"\xff", JSON, 400),
        (b'"text"', JSON, 400),
        (json.dumps({"resourceSpans": 1}).encode(), JSON, 400),
        (json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}).encode(), JSON, 400),
        (b"[" * 500 + b"]" * 500, JSON, 400),
        (b"\xff\xff\xff", PROTOBUF, 400),
        (b"", PROTOBUF, 200),
        (b"{}", "text/plain", 415),
    ],
)
def test_an_invalid_export_is_refused(store: Served, body: bytes, form: str, status: int) -> None:
    answer = store.ask("/v1/traces", body, store.keyring.admin, content_type=form)
    assert answer.status_code == status, answer.text


def test_the_exporter_of_opentelemetry_is_understood() -> None:
    with served() as store, serve(store.queue, store.keyring) as serving:
        (claim,) = store.claimed()
        exporter = OTLPSpanExporter(
            f"{serving.url}/v1/traces",
            headers={"authorization": f"Bearer {claim.reward_key}"},
            compression=Compression.Gzip,
        )
        provider = TracerProvider(resource=Resource.create({"service.name": "agent"}))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        with provider.get_tracer("mine").start_as_current_span("plan") as span:
            span.set_attribute("steps", 3)
        provider.shutdown()
        (noted,) = notes(store, claim)
        assert noted["data"]["name"] == "plan" and noted["data"]["attributes"] == {"steps": 3}
        assert noted["data"]["resource"]["service.name"] == "agent"
