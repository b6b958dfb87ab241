"""What the server of a store answers: a status and a body, compressed where that is worth it; and which error is which
status."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response

from etude.errors import (
    ConfigError,
    DataError,
    EtudeError,
    IllegalMoveError,
    KeyRefusedError,
    StoreError,
    UnknownError,
)
from etude.store.gate import problem
from etude.store.once import Answer
from etude.store.otlp import JSON

__all__ = ["OtherKeyError", "RestartedError", "UnreadableError", "answered", "status_of", "trouble"]

COMPRESSED = 32 * 1024
"""Bytes from which on an answer is compressed, for those who read that."""


class OtherKeyError(KeyRefusedError):
    """A key that is good, for something else."""


class RestartedError(StoreError):
    """Requests that must not be done twice, and may have been done."""


class UnreadableError(DataError):
    """A body that is no JSON at all, or no spans."""


STATUSES: tuple[tuple[type[EtudeError], int], ...] = (
    (OtherKeyError, 403),
    (KeyRefusedError, 401),
    (UnknownError, 404),
    (IllegalMoveError, 409),
    (RestartedError, 412),
    (UnreadableError, 400),
    (DataError, 422),
    (ConfigError, 422),
    (StoreError, 503),
)


def status_of(error: EtudeError) -> tuple[int, str]:
    """The status of an error, and its public name."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            public = next(base for base in type(error).__mro__ if base.__module__ == EtudeError.__module__)
            return status, public.__name__
    raise error


async def answered(request: Request, work: Awaitable[Answer], form: str = JSON) -> Response:
    """A response, compressed where that is worth it."""
    try:
        status, body = await work
    except EtudeError as error:
        status, kind = status_of(error)
        body = trouble(request, kind, str(error))
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if len(body) >= COMPRESSED and "gzip" in request.headers.get("accept-encoding", ""):
        body = await request.scope["state"]["aside"].run(len(body), _packed, body)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers, media_type=form if status == 200 else JSON)


def trouble(request: Request, kind: str, why: str) -> bytes:
    """The body of a refusal, with the id of its request."""
    return problem(kind, why, request.scope["state"]["request"])


def _packed(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(body) + packer.flush()
