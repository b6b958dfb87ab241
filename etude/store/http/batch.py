"""A batch: many writes of attempts in one request, each with its own reply or error."""

from __future__ import annotations

from functools import cache
from typing import Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from etude.store.http.checks import VERBS, Call, annotated, list_of, make_call, object_type, read_body, request_type
from etude.store.http.forms import union_of

MAX_WRITES = 1000
TEXT = (
    "Send many writes in one request. Writes of one attempt run in order, those of several attempts concurrently. Each "
    "succeeds or fails on its own."
)
WRITES = tuple(verb for verb in VERBS.values() if verb.rules.is_batched)
SCOPES = frozenset(scope for verb in WRITES for scope in verb.rules.scopes)


class ErrorDetail(TypedDict):
    """The kind of an error, its message, and the id of the request."""

    kind: str
    message: str
    request: NotRequired[str]


class ErrorReply(TypedDict):
    """The error of a request that was refused or failed."""

    error: ErrorDetail


class WriteDone(TypedDict):
    """The reply to a write that succeeded."""

    reply: Any


class WriteFailed(TypedDict):
    """The status and the error of a write that failed."""

    status: int
    error: ErrorDetail


class BatchReply(TypedDict):
    """The reply to each write, in order: its own reply, or its error."""

    replies: list[WriteDone | WriteFailed]


@cache
def batch_type() -> Any:
    """Return the type of the body of a batch."""
    write = annotated(union_of([request_type(verb, in_batch=True) for verb in WRITES]), Field(discriminator="verb"))
    writes = annotated(list_of(write), Field(max_length=MAX_WRITES))
    return object_type("batch_request", TEXT, {"writes": writes}, strict=True)


def read_batch(body: bytes) -> list[Call]:
    """Return the calls in the body of a batch."""
    return [make_call(VERBS[fields.pop("verb")], fields) for fields in read_body(batch_type(), body)["writes"]]
