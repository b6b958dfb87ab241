"""The responses of the store's server: status and body, compressed if that is smaller; and the status of each error."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response

from etude.errors import (
    ConfigError,
    DataError,
    EtudeError,
    IllegalTransitionError,
    InvalidKeyError,
    NotFoundError,
    StoreError,
)
from etude.store.http.otlp import JSON
from etude.store.http.reply_cache import HttpReply
from etude.store.http.request_middleware import encode_error

COMPRESS_BYTES = 32 * 1024
"""Size in bytes from which on a response is compressed for clients that accept gzip."""


class WrongScopeError(InvalidKeyError):
    """A valid key whose scope does not allow the request."""


class ServerRestartedError(StoreError):
    """A request that must run once, and that an earlier instance of the server may have executed."""


class UnreadableError(DataError):
    """A body that is not JSON, or not an export of spans."""


STATUSES: tuple[tuple[type[EtudeError], int], ...] = (
    (WrongScopeError, 403),
    (InvalidKeyError, 401),
    (NotFoundError, 404),
    (IllegalTransitionError, 409),
    (ServerRestartedError, 412),
    (UnreadableError, 400),
    (DataError, 422),
    (ConfigError, 422),
    (StoreError, 503),
)


def status_of(error: EtudeError) -> tuple[int, str]:
    """Return the HTTP status of an error, and the name of its public class."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            public = next(base for base in type(error).__mro__ if base.__module__ == EtudeError.__module__)
            return status, public.__name__
    raise error


async def respond(request: Request, work: Awaitable[HttpReply], media_type: str = JSON) -> Response:
    """Return the response, compressed if that is smaller."""
    try:
        status, body = await work
    except EtudeError as error:
        status, kind = status_of(error)
        body = error_body(request, kind, str(error))
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if len(body) >= COMPRESS_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body = await request.state.aside.run(len(body), _compress, body)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers, media_type=media_type if status == 200 else JSON)


def error_body(request: Request, kind: str, why: str) -> bytes:
    """Return the body of an error response, with the id of the request."""
    return encode_error(kind, why, request.state.request)


def _compress(body: bytes) -> bytes:
    compressor = zlib.compressobj(level=1, wbits=31)
    return compressor.compress(body) + compressor.flush()
