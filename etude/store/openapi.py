"""What the server answers to, as OpenAPI describes it: written from the forms that check what comes in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from etude.store.messages import IDEMPOTENCY_KEY, OWNER_EPOCH, to_json
from etude.store.otlp import JSON, PROTOBUF
from etude.store.request_models import ErrorReply, StoreRequest
from etude.store.requests import REQUESTS, BatchRequest

__all__ = ["ERROR_RESPONSES", "build_openapi", "docs_page", "openapi_route", "openapi_schema"]

_SCHEMA = "#/components/schemas/{model}"
ERROR_RESPONSES = {
    "400": "the body is no JSON, or not compressed as it says",
    "401": "no key, or one that is wrong or has expired",
    "403": "a key that opens other things, or another attempt's",
    "404": "something the store has never heard of",
    "408": "the body did not arrive in time",
    "409": "a move that may not follow what is recorded; the message names both states",
    "412": "sent again after a restart, and it must not be done twice",
    "413": "the body is too large",
    "415": "compressed in a way that is not read here",
    "422": "the body does not say what it must",
    "429": "this key has too much under way; send it again in a moment",
    "431": "the head of the request is too large",
    "500": "the server failed; its log says more",
    "503": "the journal cannot be read or written",
}


def build_openapi() -> tuple[dict[str, Any], dict[str, Any]]:
    """The paths, and the components they speak of."""
    asked: list[type[BaseModel]] = [*REQUESTS, BatchRequest]
    replied: set[type[BaseModel]] = {*(verb.reply for verb in REQUESTS), BatchRequest.BatchReply, ErrorReply}
    in_ways: list[tuple[Any, Literal["validation", "serialization"]]] = [
        *((form, "validation") for form in asked),
        *((form, "serialization") for form in sorted(replied, key=lambda form: form.__name__)),
    ]
    named, schemas = models_json_schema(in_ways, ref_template=_SCHEMA)
    problem = _json(named[ErrorReply, "serialization"])
    paths = {
        f"/v1/store/{verb.name}": _operation(
            verb.name,
            verb,
            _json(named[verb, "validation"]),
            _json(named[verb.reply, "serialization"]),
            problem,
        )
        for verb in REQUESTS
    }
    batch = _json(named[BatchRequest, "validation"]), _json(named[BatchRequest.BatchReply, "serialization"])
    paths["/v1/store/batch"] = _operation("batch", BatchRequest, *batch, problem)
    paths["/v1/traces"] = _traces(problem)
    paths["/healthz"] = _health()
    key = {"type": "http", "scheme": "bearer", "description": "the admin key, a runner's, or an attempt's reward key"}
    return paths, {"schemas": schemas["$defs"], "securitySchemes": {"key": key}}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(
    name: str, form: type[BaseModel], asked: dict[str, Any], replied: dict[str, Any], problem: dict[str, Any]
) -> dict[str, Any]:
    words = (form.__doc__ or "").split(". ", 1)
    told: dict[str, Any] = {
        "operationId": name,
        "tags": ["store"],
        "summary": words[0].rstrip("."),
        "description": " ".join((form.__doc__ or "").split()),
        "security": [{"key": []}],
        "requestBody": {"required": True, "content": asked},
        "responses": {"200": {"description": "done", "content": replied}} | _refusals(problem),
    }
    told["parameters"] = [
        {
            "name": OWNER_EPOCH,
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": "^[0-9]{1,19}$"},
            "description": "the life of the run that keeps the store in which this is said; in another, what would "
            "change something is refused",
        }
    ]
    if form is BatchRequest or (issubclass(form, StoreRequest) and form.caches_reply):
        told["parameters"] += [
            {
                "name": IDEMPOTENCY_KEY,
                "in": "header",
                "required": False,
                "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
                "description": "any text of one's own; what is sent again under it is done once",
            }
        ]
    return {"post": told}


def _traces(problem: dict[str, Any]) -> dict[str, Any]:
    told = {
        JSON: {"schema": {"type": "object", "description": "ExportTraceServiceRequest"}},
        PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
    }
    return {
        "post": {
            "operationId": "traces",
            "tags": ["spans"],
            "summary": "Spans, as OTLP/HTTP has them",
            "description": "With a reward key they are noted on its attempt; with the admin key, on the one that the "
            "attributes etude.rollout and etude.attempt of their resource name. What is not kept is counted in the "
            "answer, with the reason.",
            "security": [{"key": []}],
            "requestBody": {"required": True, "content": told},
            "responses": {"200": {"description": "taken", "content": told}} | _refusals(problem),
        }
    }


def _health() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    answered = {"200": {"description": "it is there", "content": {JSON: {"schema": schema}}}}
    return {"get": {"operationId": "healthz", "summary": "Whether the server is there", "responses": answered}}


def _refusals(problem: dict[str, Any]) -> dict[str, Any]:
    return {status: {"description": why, "content": problem} for status, why in ERROR_RESPONSES.items()}


async def docs_page(_: Request) -> Response:
    """Answer with a page that shows the description."""
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Etude's store")


def openapi_route(served: FastAPI) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the handler that answers with the description, as bytes made once."""
    body = cache(lambda: to_json(served.openapi()))  # made where it is first asked for, after all routes are there

    async def described(_: Request) -> Response:
        return Response(body(), media_type=JSON)

    return described


def openapi_schema(served: FastAPI) -> dict[str, Any]:
    """Return the app's description, made once."""
    if served.openapi_schema is None:
        told = get_openapi(title=served.title, version=served.version, routes=served.routes)
        paths, components = build_openapi()
        told["paths"] |= paths
        for name, parts in components.items():
            told.setdefault("components", {}).setdefault(name, {}).update(parts)
        served.openapi_schema = told
    return served.openapi_schema
