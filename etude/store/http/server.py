"""The HTTP server of a rollout queue, with any other routes that share its port.

    with serve(queue, keyring, port=8700) as server:
        remote = RemoteRolloutQueue(server.url, keyring.admin)

Each verb of a queue is `POST /v1/store/NAME` with a JSON body (`checks`); `batch` takes many writes. `/openapi.json`
describes them all.

The admin key opens every route. A runner key claims rollouts, sends heartbeats and writes the results of attempts. The
reward key of an attempt writes its rewards and notes. A model key opens nothing here. `/v1/traces` takes spans in the
format of OTLP/HTTP. `/healthz`, the description and its page need no key: they reveal nothing of a run.

A request that must run once carries an `idempotency-key`. The server caches its reply (`reply_cache`), so that a client
that lost the reply can ask again. If a runner disconnects before it receives its claims, they return to the queue.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
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
from etude.store.http.batch import SCOPES, read_batch
from etude.store.http.checks import VERBS, Call, read_call
from etude.store.http.forms import decode_reply, encode_reply
from etude.store.http.headers import IDEMPOTENCY_KEY, OWNER_EPOCH, SENT_TO
from etude.store.http.openapi import docs_page, openapi_route
from etude.store.http.reply_cache import ATTEMPT_QUOTA, SHARED_QUOTA, CacheQuota, HttpReply, ReplyCache
from etude.store.http.request_limits import RequestRefusedError, WriteQuota
from etude.store.http.request_middleware import RequestMiddleware, wait_for_disconnect, work_slot
from etude.store.http.responses import (
    ServerRestartedError,
    UnreadableError,
    WrongScopeError,
    error_body,
    respond,
    status_of,
)
from etude.store.http.server_thread import ServerThread, start_server
from etude.store.journal.blobs import pack_turn
from etude.store.journal.json_values import json_size, to_json
from etude.store.queue.keys import Grant, Keyring, Scope, keys_from_headers
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, RolloutQueue
from etude.store.queue.verbs import Verb

T = TypeVar("T")
MAX_CONCURRENT_NOTES = 64
"""Spans of one export that are written concurrently."""
RESTARTED_MESSAGE = (
    "This was sent before the store was restarted, and the store cannot tell whether it was written. Writing it again "
    "might count it twice. Check whether the store has it, and send it again if not."
)
SPANS_INFLATION = 16
"""Parsing an export of spans takes as long as parsing a JSON body of this many times its bytes."""
CLAIM, NOTE, REWARD, TURN = (VERBS[name] for name in ("claim", "record_note", "record_reward", "record_turn"))
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
    for kind in (*map(_kind_of, VERBS.values()), _BATCH):
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


@dataclass(frozen=True)
class _Kind:
    """A kind of request: one verb, or a batch of writes."""

    name: str
    scopes: frozenset[Scope]
    max_bytes: int
    once: bool
    """True if the reply is cached for repeated requests."""
    read: Callable[[bytes], list[Call]]
    verb: Verb | None
    """None for a batch."""


_BATCH = _Kind("batch", SCOPES, bounds.BODY_BYTES, True, read_batch, None)


def _kind_of(verb: Verb) -> _Kind:
    rules = verb.rules
    max_bytes = bounds.BODY_BYTES if rules.max_bytes is None else rules.max_bytes
    return _Kind(verb.name, rules.scopes, max_bytes, rules.once, lambda body: [read_call(verb, body)], verb)


@dataclass(frozen=True)
class _Context:
    """The queue, the key and the size that the calls of one request share."""

    queue: RolloutQueue
    grant: Grant
    size: int
    """Bytes of the body."""
    is_stale: bool
    """True if an earlier instance of the server may have executed the request."""


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

    def handler_for(self, kind: _Kind) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of one kind of request."""

        async def answer(request: Request) -> Response:
            return await respond(request, self._answer(kind, request))

        return answer

    async def _answer(self, kind: _Kind, request: Request) -> HttpReply:
        grant = self._grant(request, kind.scopes)
        body = await request.body()
        if len(body) > kind.max_bytes:
            why = f"The body of '{kind.name}' has {len(body)} bytes; at most {kind.max_bytes} are read."
            raise RequestRefusedError(413, why)
        background: BackgroundThread = request.state.aside
        async with work_slot(background, grant, len(body)):
            calls, cache_key = await background.run(len(body), _read_request, kind, request, body, grant)
            # whether another instance of the server may have executed the request before
            sent_to = self.instance if cache_key is None else request.headers.get(SENT_TO, self.instance)
            is_stale = sent_to != self.instance and not self._reply_cache.contains(cache_key)
            context = _Context(self._queue_for(request), grant, len(body), is_stale)
            if kind.verb is not None:
                _check_attempt(grant, calls[0])
                work = partial(self._reply, calls[0], context)
            else:
                work = partial(self._write, calls, context)
            reply: HttpReply | None
            if kind.verb is CLAIM:
                reply = await self._claim(request, grant, cache_key or object(), work)
            elif kind.once and cache_key is not None:
                reply = await self._reply_cache.get_or_run(cache_key, work, *_cache_owner(grant))
            elif kind.verb is not None and kind.verb.rules.wait:
                reply = await self._while_connected(request, work())
            else:
                reply = await work()
        return reply or _encode(calls[0].verb, calls[0].verb.rules.empty(calls[0].arguments))

    async def _reply(self, call: Call, context: _Context) -> HttpReply:
        result = await self._execute(call, context)
        if call.verb.rules.has_long_reply:
            return await asyncio.to_thread(_encode, call.verb, result)
        return _encode(call.verb, result)

    async def _execute(self, call: Call, context: _Context) -> Any:
        """Call a verb, and return its result."""
        verb, arguments = call
        if context.grant.scope == "reward" and verb is NOTE:
            self._notes.take(arguments["attempt"], context.size)
        elif context.grant.scope == "reward" and verb is REWARD and arguments["turn"] is not None:
            self._rewards.take(arguments["attempt"], len(to_json({"reward": arguments["reward"]})))
        if context.is_stale and verb.rules.counts_twice(arguments):
            return await _execute_after_restart(call, context.queue)
        return await getattr(context.queue, verb.name)(**arguments)

    def _queue_for(self, request: Request) -> RolloutQueue:
        """Return the queue, bound to the epoch that the request names, if it names one."""
        epoch = request.headers.get(OWNER_EPOCH)
        if epoch is None:
            return self._queue
        if not (epoch.isascii() and epoch.isdecimal() and len(epoch) < 20):
            raise DataError(f"The header {OWNER_EPOCH} is {epoch!r}; it must be the number of an epoch.")
        return self._queue.with_epoch(int(epoch))

    async def _write(self, calls: Sequence[Call], context: _Context) -> HttpReply:
        """Execute a batch: the writes of one attempt in order, attempts concurrently."""
        notes = sum(call.verb is NOTE for call in calls)
        shared = replace(context, size=context.size // max(1, notes))  # all of the batch counts as notes
        indexes_of: dict[AttemptId, list[int]] = {}
        for index, call in enumerate(calls):
            indexes_of.setdefault(call.arguments["attempt"], []).append(index)
        replies: list[dict[str, Any]] = [{}] * len(calls)

        async def write_attempt(indexes: list[int]) -> None:
            for index in indexes:
                call = calls[index]
                try:
                    _check_scope(shared.grant, call.verb.rules.scopes)
                    _check_attempt(shared.grant, call)
                    replies[index] = encode_reply(call.verb, await self._execute(call, shared))
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
        for claim in decode_reply(CLAIM, json.loads(reply[1])):
            _LOG.warning("Rollout %d returns to the queue: %s.", claim.attempt_id.rollout, why)
            await self._queue.finish(claim.attempt_id, AttemptReport(Outcome.INFRA_ERROR, why))

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


def _check_attempt(grant: Grant, call: Call) -> None:
    """Refuse a reward key for anything but writes of the attempt that it belongs to."""
    if grant.scope == "reward" and call.arguments.get("attempt") != grant.attempt_id:
        raise WrongScopeError("This key belongs to another attempt; each attempt has its own, in ETUDE_REWARD_KEY.")


def _read_request(kind: _Kind, request: Request, body: bytes, grant: Grant) -> tuple[list[Call], bytes | None]:
    """Check a body; return its calls, with the cache key of the reply, if the client sent an idempotency key. The cache
    key includes the client's grant, so that no other client can name it."""
    token = request.headers.get(IDEMPOTENCY_KEY)
    if token and not _TOKEN.fullmatch(token):
        raise DataError(f"The header {IDEMPOTENCY_KEY} must be 1 to 200 visible ASCII characters without a space.")
    calls = kind.read(body)
    if grant.scope != "admin":
        for call in calls:
            if call.verb is NOTE:
                json_size(call.arguments["data"], f"The note '{call.arguments['name']}'")
    if not token:
        return calls, None
    digest = blake2b("\n".join((repr(grant), kind.name, token, "")).encode(), digest_size=16)
    digest.update(body)
    return calls, digest.digest()


async def _execute_after_restart(call: Call, queue: RolloutQueue) -> Any:
    """Execute a call that must run once, and that another instance of the server may have executed.

    A turn is found by its tokens and log-probs, and written if it is missing. Two turns with the same bits count as
    one. Of other calls it cannot be known.
    """
    if call.verb is not TURN:
        raise ServerRestartedError(RESTARTED_MESSAGE)
    attempt, sent = call.arguments["attempt"], call.arguments["turn"]
    payload = pack_turn(sent)
    for turn in reversed(await queue.turns(*attempt)):
        if turn.model == sent.model and pack_turn(turn) == payload:
            return turn.index
    return await queue.record_turn(attempt, sent, call.arguments["began"])


def _cache_owner(grant: Grant) -> tuple[Grant, CacheQuota]:
    return grant, SHARED_QUOTA if grant.attempt_id is None else ATTEMPT_QUOTA


def _encode(verb: Verb, result: Any) -> HttpReply:
    """Encode a reply. NaN and infinities, which JSON does not have, are written as Python reads them."""
    return 200, to_json(encode_reply(verb, result)).encode()


async def _health(_: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type=otlp.JSON)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists the routes."
    return Response(error_body(request, "Refused", why), error.status_code, error.headers, media_type=otlp.JSON)
