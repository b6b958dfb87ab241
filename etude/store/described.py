"""What the server answers to, as OpenAPI describes it: written from the forms that check what comes in."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from etude.store.forms import Problem, Verb
from etude.store.otlp import JSON, PROTOBUF
from etude.store.verbs import VERBS, Batch
from etude.store.wire import KEEPERS_LIFE, ONCE

__all__ = ["REFUSED", "description"]

_SCHEMA = "#/components/schemas/{model}"
REFUSED = {
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


def description() -> tuple[dict[str, Any], dict[str, Any]]:
    """The paths, and the components they speak of."""
    asked: list[type[BaseModel]] = [*VERBS, Batch]
    replied: set[type[BaseModel]] = {*(verb.reply for verb in VERBS), Batch.BatchReply, Problem}
    in_ways: list[tuple[Any, Literal["validation", "serialization"]]] = [
        *((form, "validation") for form in asked),
        *((form, "serialization") for form in sorted(replied, key=lambda form: form.__name__)),
    ]
    named, schemas = models_json_schema(in_ways, ref_template=_SCHEMA)
    problem = _json(named[Problem, "serialization"])
    paths = {
        f"/v1/store/{verb.name}": _operation(
            verb.name,
            verb,
            _json(named[verb, "validation"]),
            _json(named[verb.reply, "serialization"]),
            problem,
        )
        for verb in VERBS
    }
    batch = _json(named[Batch, "validation"]), _json(named[Batch.BatchReply, "serialization"])
    paths["/v1/store/batch"] = _operation("batch", Batch, *batch, problem)
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
            "name": KEEPERS_LIFE,
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": "^[0-9]{1,19}$"},
            "description": "the life of the run that keeps the store in which this is said; in another, what would "
            "change something is refused",
        }
    ]
    if form is Batch or (issubclass(form, Verb) and form.once):
        told["parameters"] += [
            {
                "name": ONCE,
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
    return {status: {"description": why, "content": problem} for status, why in REFUSED.items()}
