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
    request_models: list[type[BaseModel]] = [*REQUESTS, BatchRequest]
    reply_models: set[type[BaseModel]] = {
        *(request_type.reply for request_type in REQUESTS),
        BatchRequest.BatchReply,
        ErrorReply,
    }
    modes: list[tuple[Any, Literal["validation", "serialization"]]] = [
        *((model, "validation") for model in request_models),
        *((model, "serialization") for model in sorted(reply_models, key=lambda model: model.__name__)),
    ]
    refs, schemas = models_json_schema(modes, ref_template=_SCHEMA)
    error_content = _json(refs[ErrorReply, "serialization"])
    paths = {
        f"/v1/store/{request_type.name}": _operation(
            request_type.name,
            request_type,
            _json(refs[request_type, "validation"]),
            _json(refs[request_type.reply, "serialization"]),
            error_content,
        )
        for request_type in REQUESTS
    }
    batch_content = _json(refs[BatchRequest, "validation"]), _json(refs[BatchRequest.BatchReply, "serialization"])
    paths["/v1/store/batch"] = _operation("batch", BatchRequest, *batch_content, error_content)
    paths["/v1/traces"] = _traces(error_content)
    paths["/healthz"] = _health()
    key = {"type": "http", "scheme": "bearer", "description": "the admin key, a runner's, or an attempt's reward key"}
    return paths, {"schemas": schemas["$defs"], "securitySchemes": {"key": key}}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(
    name: str,
    model: type[BaseModel],
    request_content: dict[str, Any],
    reply_content: dict[str, Any],
    error_content: dict[str, Any],
) -> dict[str, Any]:
    sentences = (model.__doc__ or "").split(". ", 1)
    operation: dict[str, Any] = {
        "operationId": name,
        "tags": ["store"],
        "summary": sentences[0].rstrip("."),
        "description": " ".join((model.__doc__ or "").split()),
        "security": [{"key": []}],
        "requestBody": {"required": True, "content": request_content},
        "responses": {"200": {"description": "done", "content": reply_content}} | _refusals(error_content),
    }
    operation["parameters"] = [
        {
            "name": OWNER_EPOCH,
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": "^[0-9]{1,19}$"},
            "description": "the life of the run that keeps the store in which this is said; in another, what would "
            "change something is refused",
        }
    ]
    if model is BatchRequest or (issubclass(model, StoreRequest) and model.caches_reply):
        operation["parameters"] += [
            {
                "name": IDEMPOTENCY_KEY,
                "in": "header",
                "required": False,
                "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
                "description": "any text of one's own; what is sent again under it is done once",
            }
        ]
    return {"post": operation}


def _traces(error_content: dict[str, Any]) -> dict[str, Any]:
    content = {
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
            "requestBody": {"required": True, "content": content},
            "responses": {"200": {"description": "taken", "content": content}} | _refusals(error_content),
        }
    }


def _health() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    responses = {"200": {"description": "it is there", "content": {JSON: {"schema": schema}}}}
    return {"get": {"operationId": "healthz", "summary": "Whether the server is there", "responses": responses}}


def _refusals(error_content: dict[str, Any]) -> dict[str, Any]:
    return {status: {"description": why, "content": error_content} for status, why in ERROR_RESPONSES.items()}


async def docs_page(_: Request) -> Response:
    """Answer with a page that shows the description."""
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Etude's store")


def openapi_route(app: FastAPI) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the handler that answers with the description, as bytes made once."""
    body = cache(lambda: to_json(app.openapi()))  # made where it is first asked for, after all routes are there

    async def serve_schema(_: Request) -> Response:
        return Response(body(), media_type=JSON)

    return serve_schema


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Return the app's description, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        paths, components = build_openapi()
        schema["paths"] |= paths
        for name, parts in components.items():
            schema.setdefault("components", {}).setdefault(name, {}).update(parts)
        app.openapi_schema = schema
    return app.openapi_schema
