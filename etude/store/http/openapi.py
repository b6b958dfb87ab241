"""The OpenAPI document of the server, made from the types that check the requests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import Response

from etude.store.http.batch import TEXT, BatchReply, ErrorReply, batch_type
from etude.store.http.checks import VERBS, reply_type, request_type
from etude.store.http.headers import IDEMPOTENCY_KEY, OWNER_EPOCH
from etude.store.http.otlp import JSON, PROTOBUF
from etude.store.journal.json_values import to_json

_SCHEMA = "#/components/schemas/{model}"
ERROR_RESPONSES = {
    "400": "the body is not JSON, or not compressed as its header says",
    "401": "the key is missing, wrong or expired",
    "403": "the scope of the key does not allow this, or it is the key of another attempt",
    "404": "the rollout, attempt or resource does not exist",
    "408": "the body did not arrive in time",
    "409": "an illegal transition; the message names both states",
    "412": "repeated after a restart of the server, and it must not run twice",
    "413": "the body is too large",
    "415": "the content encoding is not supported",
    "422": "a field of the body is missing or wrong",
    "429": "too many bytes of this key are under way; send it again in a moment",
    "431": "the headers of the request are too large",
    "500": "the server failed; its log says more",
    "503": "the journal cannot be read or written",
}


def build_openapi() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the paths and the components of the document."""
    bodies = {name: (request_type(verb), reply_type(verb)) for name, verb in VERBS.items()}
    bodies["batch"] = batch_type(), BatchReply
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        ("error", "serialization", TypeAdapter(ErrorReply)),
        *((name, "validation", TypeAdapter(body)) for name, (body, _) in bodies.items()),
        *((name, "serialization", TypeAdapter(reply)) for name, (_, reply) in bodies.items()),
    ]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMA)
    errors = _refusals(_json(schemas["error", "serialization"]))
    paths = {}
    for name in bodies:
        body, reply = _json(schemas[name, "validation"]), _json(schemas[name, "serialization"])
        text, once = (VERBS[name].text, VERBS[name].rules.once) if name in VERBS else (TEXT, True)
        paths[f"/v1/store/{name}"] = {"post": _operation(name, text, once, body, {"200": _done(reply)} | errors)}
    paths["/v1/traces"] = _traces(errors)
    paths["/healthz"] = _health()
    key = {
        "type": "http",
        "scheme": "bearer",
        "description": "the admin key, a runner key, or the reward key of an attempt",
    }
    return paths, {"schemas": definitions["$defs"], "securitySchemes": {"key": key}}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(name: str, text: str, once: bool, body: dict[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
    epoch = {"type": "string", "pattern": "^[0-9]{1,19}$"}
    about_epoch = (
        "epoch of the run that owns the store; if it is over, the server refuses requests that change something"
    )
    parameters = [_header(OWNER_EPOCH, epoch, about_epoch)]
    if once:
        token = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
        about_token = "any text that the client chooses; requests with the same key run once"
        parameters.append(_header(IDEMPOTENCY_KEY, token, about_token))
    return {
        "operationId": name,
        "tags": ["store"],
        "summary": " ".join(text.split()).split(". ", 1)[0].rstrip("."),
        "description": " ".join(text.split()),
        "security": [{"key": []}],
        "requestBody": {"required": True, "content": body},
        "responses": responses,
        "parameters": parameters,
    }


def _done(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "done", "content": content}


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def _traces(errors: dict[str, Any]) -> dict[str, Any]:
    content = {
        JSON: {"schema": {"type": "object", "description": "ExportTraceServiceRequest"}},
        PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
    }
    return {
        "post": {
            "operationId": "traces",
            "tags": ["spans"],
            "summary": "Record spans in the format of OTLP/HTTP",
            "description": "With a reward key the spans are recorded as notes of its attempt. With the admin key, the "
            "resource attributes etude.rollout and etude.attempt name the attempt. The reply counts the spans that "
            "were not stored, with the reason.",
            "security": [{"key": []}],
            "requestBody": {"required": True, "content": content},
            "responses": {"200": {"description": "recorded", "content": content}} | errors,
        }
    }


def _health() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    responses = {"200": {"description": "the server runs", "content": {JSON: {"schema": schema}}}}
    return {"get": {"operationId": "healthz", "summary": "Check that the server runs", "responses": responses}}


def _refusals(error_content: dict[str, Any]) -> dict[str, Any]:
    return {status: {"description": why, "content": error_content} for status, why in ERROR_RESPONSES.items()}


async def docs_page(_: Request) -> Response:
    """Answer with a page that shows the document."""
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Etude's store")


def openapi_route(app: FastAPI) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the handler that serves the document of the app. It is made at the first request, after all routes
    exist."""

    @cache
    def encode_document() -> bytes:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        paths, components = build_openapi()
        document["paths"] |= paths
        for name, parts in components.items():
            document.setdefault("components", {}).setdefault(name, {}).update(parts)
        return to_json(document).encode()

    async def serve_document(_: Request) -> Response:
        return Response(encode_document(), media_type=JSON)

    return serve_document
