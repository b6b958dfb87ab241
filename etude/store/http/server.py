"""The HTTP server of a rollout queue, with any other routes that share its port.

    with serve(queue, keyring, port=8700) as server:
        remote = RemoteRolloutQueue(server.url, keyring.admin)

Each operation of a queue is `POST /v1/store/NAME` with a JSON body (`requests`). `/openapi.json` describes them all.

The admin key opens every route. A runner key claims rollouts, sends heartbeats and writes the results of attempts. The
reward key of an attempt writes its rewards and notes. A model key opens nothing here. `/v1/traces` takes spans in the
format of OTLP/HTTP. `/healthz`, the description and its page need no key: they reveal nothing of a run.

A request that must run once carries an `idempotency-key`. The server caches its reply (`reply_cache`), so that a client
that lost the reply can ask again. If a runner disconnects before it receives its claims, they return to the queue.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.errors import ConfigError, DataError, EtudeError, IllegalTransitionError, NotFoundError
from etude.observe import get_logger
from etude.records import Outcome
from etude.store.http import otlp
from etude.store.http import request_limits as bounds
from etude.store.http.background_thread import BackgroundThread
from etude.store.http.headers import IDEMPOTENCY_KEY, OWNER_EPOCH, SENT_TO
from etude.store.http.openapi import docs_page, openapi_route
from etude.store.http.reply_cache import ATTEMPT_QUOTA, SHARED_QUOTA, CacheQuota, HttpReply, ReplyCache
from etude.store.http.request_limits import RequestRefusedError, WriteQuota, json_size
from etude.store.http.request_middleware import RequestMiddleware, wait_for_disconnect, work_slot
from etude.store.http.request_models import StoreRequest, validation_message
from etude.store.http.requests import REQUESTS, ClaimReply, ClaimRequest
from etude.store.http.responses import (
    ServerRestartedError,
    UnreadableError,
    WrongScopeError,
    error_body,
    respond,
    status_of,
)
from etude.store.http.server_thread import ServerThread, start_server
from etude.store.http.write_requests import BatchRequest, RecordNoteRequest, RecordRewardRequest, WriteRequest
from etude.store.journal.json_values import to_json
from etude.store.queue.keys import Grant, Keyring, Scope, keys_from_headers
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, RolloutQueue

T = TypeVar("T")
MAX_CONCURRENT_NOTES = 64
"""Spans of one export that are written concurrently."""
RESTARTED_MESSAGE = (
    "This was sent before the store was restarted, and the store cannot tell whether it was written. Writing it again "
    "might count it twice. Check whether the store has it, and send it again if not."
)
SPANS_INFLATION = 16
"""Parsing an export of spans takes as long as parsing a JSON body of this many times its bytes."""
_TOKEN = re.compile(r"[!-~]{1,200}")
_LOG = get_logger("store")


def create_app(
    queue: RolloutQueue,
    keyring: Keyring,
    *,
    routers: Sequence[APIRouter] = (),
    mounts: Mapping[str, ASGIApp] | None = None,
    lifespans: Sequence[AbstractAsyncContextManager[Any]] = (),
    max_body_bytes: int = bounds.BODY_BYTES,
) -> FastAPI:
    """Return the app that serves a queue, with further routers, and apps mounted at their paths. The server enters
    `lifespans` when it starts, and exits them when it stops."""
    api = _StoreApi(queue, keyring)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for context in lifespans:
                await stack.enter_async_context(context)
            yield

    app = FastAPI(
        title="Etude's store",
        version="1",
        exception_handlers={HTTPException: _not_found},
        lifespan=lifespan,
        openapi_url=None,  # a route below serves it, encoded once
    )
    app.state.closing = api.closing
    for router in routers:  # before the rest, since agents' calls are the most frequent
        app.include_router(router)
    requests: list[type[StoreRequest]] = [*REQUESTS, BatchRequest]
    for kind in requests:
        app.router.routes.append(Route(f"/v1/store/{kind.name}", api.handler_for(kind), methods=["POST"]))
    app.router.routes.append(Route("/v1/traces", api.traces, methods=["POST"]))
    app.router.routes.append(Route("/healthz", _health, methods=["GET"]))
    app.router.routes.append(Route("/openapi.json", openapi_route(app), methods=["GET"]))
    app.router.routes.append(Route("/docs", docs_page, methods=["GET"]))
    for path, mounted in (mounts or {}).items():
        app.mount(path, mounted)
    read_grant = keyring.read_headers
    app.add_middleware(RequestMiddleware, instance=api.instance, max_bytes=max_body_bytes, read_grant=read_grant)
    return app


def serve(
    queue: RolloutQueue,
    keyring: Keyring | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    routers: Sequence[APIRouter] = (),
    mounts: Mapping[str, ASGIApp] | None = None,
    lifespans: Sequence[AbstractAsyncContextManager[Any]] = (),
    max_body_bytes: int = bounds.BODY_BYTES,
    show: Callable[[str], None] | None = None,
) -> ServerThread:
    """Serve a queue from a thread of this process until the result is stopped. It listens when this returns.

    Port 0 chooses a free port. Without a keyring, one is made and `show` receives its admin key. This is refused if
    other machines can reach the server, since their users would not know the key.
    """
    if keyring is None:
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"A store that listens on {host} can be reached from other machines, so it needs a key that you give. "
                "Give one, or listen on 127.0.0.1."
            )
        keyring = Keyring()
        if show is not None:
            show(f"The admin key of this store, shown only once: {keyring.admin}")
    app = create_app(queue, keyring, routers=routers, mounts=mounts, lifespans=lifespans, max_body_bytes=max_body_bytes)
    return start_server(app, host, port, keyring.admin, app.state.closing)


class _StoreApi:
    """The handlers of the routes, with access checks and cached replies."""

    def __init__(self, queue: RolloutQueue, keyring: Keyring) -> None:
        self._queue = queue
        self._keyring = keyring
        self._reply_cache = ReplyCache()
        self._notes = WriteQuota("notes and spans", bounds.NOTES, bounds.NOTES_BYTES)
        self._rewards = WriteQuota("rewards of turns", bounds.REWARDS, bounds.REWARDS_WRITTEN_BYTES)
        self.instance = secrets.token_hex(8)
        self.closing = asyncio.Event()
        """Set when the server stops, so that waiting requests end at once."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def handler_for(self, kind: type[StoreRequest]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of one kind of request."""

        async def answer(request: Request) -> Response:
            return await respond(request, self._answer(kind, request))

        return answer

    async def _answer(self, kind: type[StoreRequest], request: Request) -> HttpReply:
        grant = self._grant(request, kind.scopes)
        body = await request.body()
        if len(body) > kind.max_bytes:
            why = f"The body of '{kind.name}' has {len(body)} bytes; at most {kind.max_bytes} are read."
            raise RequestRefusedError(413, why)
        background: BackgroundThread = request.state.aside
        async with work_slot(background, grant, len(body)):
            parsed, cache_key = await background.run(len(body), _parse_request, kind, request, body, grant)
            if not isinstance(parsed, BatchRequest):
                _check_attempt(grant, parsed)
            # whether another instance of the server may have executed the request before
            sent_to = self.instance if cache_key is None else request.headers.get(SENT_TO, self.instance)
            stale = sent_to != self.instance and not self._reply_cache.contains(cache_key)
            work = partial(self._reply, parsed, self._queue_for(request), grant, len(body), stale)
            reply: HttpReply | None
            if kind is ClaimRequest:
                reply = await self._claim(request, grant, cache_key or object(), work)
            elif parsed.is_reply_cached and cache_key is not None:
                reply = await self._reply_cache.get_or_run(cache_key, work, *_cache_owner(grant))
            elif kind.wait_field:
                reply = await self._while_connected(request, work())
            else:
                reply = await work()
        return reply or _encode(parsed.empty_reply())

    async def _reply(
        self, parsed: StoreRequest, queue: RolloutQueue, grant: Grant, size: int, stale: bool
    ) -> HttpReply:
        if isinstance(parsed, BatchRequest):
            return await self._write(queue, grant, parsed.writings, size, stale)
        reply = await self._execute(parsed, queue, grant, size, stale)
        return await asyncio.to_thread(_encode, reply) if parsed.has_long_reply else _encode(reply)

    async def _execute(
        self, parsed: StoreRequest, queue: RolloutQueue, grant: Grant, size: int, stale: bool
    ) -> BaseModel:
        """Execute a request. size: bytes of its body. stale: whether an earlier instance may have executed it."""
        if grant.scope == "reward" and isinstance(parsed, RecordNoteRequest):
            self._notes.take(parsed.attempt_id, size)
        elif grant.scope == "reward" and isinstance(parsed, RecordRewardRequest) and parsed.turn is not None:
            self._rewards.take(parsed.attempt_id, len(to_json({"reward": parsed.reward})))
        if not (stale and parsed.must_run_once):
            return await parsed.execute(queue)
        reply = await parsed.execute_after_restart(queue)
        if reply is None:
            raise ServerRestartedError(RESTARTED_MESSAGE)
        return reply

    def _queue_for(self, request: Request) -> RolloutQueue:
        """Return the queue, bound to the epoch that the request names, if it names one."""
        epoch = request.headers.get(OWNER_EPOCH)
        if epoch is None:
            return self._queue
        if not (epoch.isascii() and epoch.isdecimal() and len(epoch) < 20):
            raise DataError(f"The header {OWNER_EPOCH} is {epoch!r}; it must be the number of an epoch.")
        return self._queue.with_epoch(int(epoch))

    async def _write(
        self, queue: RolloutQueue, grant: Grant, writes: Sequence[WriteRequest], size: int, stale: bool
    ) -> HttpReply:
        """Execute a batch: the writes of one attempt in order, attempts concurrently. size: bytes of the batch."""
        size //= max(1, sum(isinstance(write, RecordNoteRequest) for write in writes))  # all of it counts as notes
        indexes_of: dict[AttemptId, list[int]] = {}
        for index, write in enumerate(writes):
            indexes_of.setdefault(write.attempt_id, []).append(index)
        replies: list[dict[str, Any]] = [{}] * len(writes)

        async def write_attempt(indexes: list[int]) -> None:
            for index in indexes:
                try:
                    _check_scope(grant, writes[index].scopes)
                    _check_attempt(grant, writes[index])
                    reply = await self._execute(writes[index], queue, grant, size, stale)
                    replies[index] = {"done": reply.model_dump()}
                except EtudeError as error:
                    status, kind = status_of(error)
                    replies[index] = {"status": status, "error": {"kind": kind, "message": str(error)}}

        await asyncio.gather(*(write_attempt(indexes) for indexes in indexes_of.values()))
        return 200, to_json({"replies": replies}).encode()

    # -- waiting requests ---------------------------------------------------------------------------------------------

    async def _claim(
        self, request: Request, grant: Grant, cache_key: Hashable, work: Callable[[], Coroutine[Any, Any, HttpReply]]
    ) -> HttpReply | None:
        """Claim rollouts. If the runner disconnects, the claim is cancelled, or its rollouts return to the queue."""
        try:
            cached = self._reply_cache.get_or_run(cache_key, work, *_cache_owner(grant))
            reply = await self._while_connected(request, cached)
        except asyncio.CancelledError:
            await self._reply_cache.abandon(cache_key, self._hand_back)
            raise
        if reply is None:
            await self._reply_cache.abandon(cache_key, self._hand_back)
        return reply

    async def _hand_back(self, reply: HttpReply) -> None:
        why = "the runner that claimed it disconnected before the reply"
        for claim in ClaimReply.model_validate_json(reply[1]).claims:
            _LOG.warning("Rollout %d returns to the queue: %s.", claim.rollout, why)
            await self._queue.finish(AttemptId(claim.rollout, claim.attempt), AttemptReport(Outcome.INFRA_ERROR, why))

    async def _while_connected(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """Await `work`. Return None if the client disconnects or the server stops first."""
        task = asyncio.create_task(work)
        others = [asyncio.create_task(wait_for_disconnect(request.receive)), asyncio.create_task(self.closing.wait())]
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() and not others[0].done() else None
        finally:
            for other in (task, *others):
                other.cancel()
            await asyncio.wait({task, *others})

    # -- spans --------------------------------------------------------------------------------------------------------

    async def traces(self, request: Request) -> Response:
        """Record an export of spans."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return await respond(request, self._answer_traces(request, media_type), media_type)

    async def _answer_traces(self, request: Request, media_type: str) -> HttpReply:
        grant = self._grant(request, frozenset({"admin", "reward"}))
        if media_type not in (otlp.JSON, otlp.PROTOBUF):
            why = f"The content type is {media_type!r}; spans must be sent as {otlp.PROTOBUF} or {otlp.JSON}."
            return 415, error_body(request, "Refused", why)
        body, background = await request.body(), request.state.aside
        async with work_slot(background, grant, SPANS_INFLATION * len(body)):
            try:
                spans = await background.run(SPANS_INFLATION * len(body), otlp.parse_spans, body, media_type)
            except DataError as error:
                raise UnreadableError(str(error)) from error
            refused = await self._record_spans(grant, spans)
        return 200, otlp.encode_reply(media_type, len(refused), refused[0] if refused else "")

    async def _record_spans(self, grant: Grant, spans: Sequence[otlp.ParsedSpan]) -> list[str]:
        """Record spans as notes; return the reasons for refused ones."""
        refused: list[str] = []

        async def note(span: otlp.ParsedSpan) -> None:
            key = grant.attempt_id if grant.scope == "reward" else span.attempt_id
            try:
                if key is None:
                    raise NotFoundError(f"A span's resource must have {otlp.ROLLOUT} and {otlp.ATTEMPT}, as integers.")
                if span.why:
                    raise DataError(span.why)
                if grant.scope == "reward":
                    self._notes.take(key, span.size)
                await self._queue.record_note(key, "span", span.data)
            except (NotFoundError, IllegalTransitionError, DataError) as error:
                refused.append(str(error))

        for start in range(0, len(spans), MAX_CONCURRENT_NOTES):
            await asyncio.gather(*(note(span) for span in spans[start : start + MAX_CONCURRENT_NOTES]))
        return refused

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _grant(self, request: Request, scopes: frozenset[Scope]) -> Grant:
        """Return the grant of the request's key, if its scope allows the request."""
        grant = self._keyring.read_first(keys_from_headers(*map(request.headers.get, ("authorization", "x-api-key"))))
        _check_scope(grant, scopes)
        return grant


def _check_scope(grant: Grant, scopes: frozenset[Scope]) -> None:
    if grant.scope not in scopes:
        raise WrongScopeError(
            f"The scope of this key is {grant.scope}; this request needs one of: {', '.join(sorted(scopes))}. Ask the "
            "operator of the store for such a key."
        )


def _check_attempt(grant: Grant, parsed: StoreRequest) -> None:
    """Refuse a reward key for anything but writes of the attempt that it belongs to."""
    if grant.scope == "reward" and (not isinstance(parsed, WriteRequest) or parsed.attempt_id != grant.attempt_id):
        raise WrongScopeError("This key belongs to another attempt; each attempt has its own, in ETUDE_REWARD_KEY.")


def _parse_request(
    model: type[StoreRequest], request: Request, body: bytes, grant: Grant
) -> tuple[StoreRequest, bytes | None]:
    """Validate a body; return it with the cache key of its reply, if the client sent an idempotency key. The cache key
    includes the client's grant, so that no other client can name it."""
    token = request.headers.get(IDEMPOTENCY_KEY)
    if token and not _TOKEN.fullmatch(token):
        raise DataError(f"The header {IDEMPOTENCY_KEY} must be 1 to 200 visible ASCII characters without a space.")
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if problem["type"] == "json_invalid":
            hint = " Remove or replace an unpaired surrogate in its text." if "hex escape" in problem["msg"] else ""
            raise UnreadableError(f"The body is not JSON: {problem['msg']}.{hint}") from None
        raise DataError(validation_message(error)) from None
    if grant.scope != "admin":
        for write in parsed.writings if isinstance(parsed, BatchRequest) else [parsed]:
            if isinstance(write, RecordNoteRequest):
                json_size(write.data, f"The note '{write.event}'")
    if not token:
        return parsed, None
    digest = blake2b("\n".join((repr(grant), model.name, token, "")).encode(), digest_size=16)
    digest.update(body)
    return parsed, digest.digest()


def _cache_owner(grant: Grant) -> tuple[Grant, CacheQuota]:
    return grant, SHARED_QUOTA if grant.attempt_id is None else ATTEMPT_QUOTA


def _encode(reply: BaseModel) -> HttpReply:
    """Encode a reply. NaN and infinities, which JSON does not have, are written as Python reads them."""
    return 200, to_json(reply.model_dump()).encode()


async def _health(_: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type=otlp.JSON)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists the routes."
    return Response(error_body(request, "Refused", why), error.status_code, error.headers, media_type=otlp.JSON)
