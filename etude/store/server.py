"""A desk behind HTTP: any desk, for whoever has a key, and beside it whatever else is served from the same port.

    with serve(desk, keyring, port=8700) as serving:
        desk_elsewhere = RemoteDesk(serving.url, keyring.admin)

Every verb of a desk is `POST /v1/store/NAME` with a JSON body (`verbs`); `/openapi.json` describes them all. The admin
key opens everything. A runner's key claims, says that it is alive and writes what became of its attempts. An attempt's
reward key writes rewards and notes of that attempt. A model key opens nothing here. Spans are taken at `/v1/traces` as
OTLP/HTTP has them. `/healthz`, the description and its page need no key: they tell nothing of a run.

What must not be done twice carries an `idempotency-key`, and its answer is kept (`once`), so that who lost it can ask
again. A claim whose runner has gone before the answer was there is handed back to the queue.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache, partial
from hashlib import blake2b
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.errors import (
    ConfigError,
    DataError,
    EtudeError,
    IllegalMoveError,
    UnknownError,
)
from etude.observe import get_log
from etude.records import Outcome
from etude.store import bounds, otlp, wire
from etude.store.answers import OtherKeyError, RestartedError, UnreadableError, answered, status_of, trouble
from etude.store.aside import Aside
from etude.store.bounds import RefusedError, small
from etude.store.budget import Budget
from etude.store.described import description
from etude.store.desk import Desk, Ended, Key
from etude.store.forms import Form, Verb
from etude.store.gate import Gate, turn
from etude.store.keys import Grant, Keyring, Scope, keys_in
from etude.store.once import FEW, MANY, Answer, Once, Share
from etude.store.serving import Serving, listen
from etude.store.verbs import VERBS, Batch, ClaimForm, Note, RewardForm, Writing

__all__ = ["app", "serve"]

T = TypeVar("T")
F = TypeVar("F", bound=Form)
AT_ONCE = 64
"""Spans of one export that are noted beside each other."""
RESTARTED = (
    "This was sent before the store was restarted, and nobody can tell whether it was written; to write it again might "
    "count it twice. Look at what is there, and send it anew if it is not."
)
SPANS_GROW = 16
"""How many times as long as its bytes say an export of spans takes."""
_TOKEN = re.compile(r"[!-~]{1,200}")
_LOG = get_log("store")


def app(
    desk: Desk,
    keyring: Keyring,
    *,
    routers: Sequence[APIRouter] = (),
    mounts: Mapping[str, ASGIApp] | None = None,
    beside: Sequence[AbstractAsyncContextManager[Any]] = (),
    most_bytes: int = bounds.BODY_BYTES,
) -> FastAPI:
    """The app that serves a desk, and beside it these routers, and these apps under their paths. beside: what is
    entered on the server's loop for as long as it runs."""
    door = _Door(desk, keyring)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in beside:
                await stack.enter_async_context(each)
            yield

    made = FastAPI(
        title="Etude's store",
        version="1",
        exception_handlers={HTTPException: _no_such_page},
        lifespan=lifespan,
        openapi_url=None,  # it is served below, as bytes that are made once
    )
    made.state.closing = door.closing
    for router in routers:  # before the rest, as an agent's calls are the most frequent
        made.include_router(router)
    for verb in VERBS:
        made.router.routes.append(Route(f"/v1/store/{verb.name}", door.to(verb), methods=["POST"]))
    made.router.routes.append(Route("/v1/store/batch", door.batch, methods=["POST"]))
    made.router.routes.append(Route("/v1/traces", door.traces, methods=["POST"]))
    made.router.routes.append(Route("/healthz", _health, methods=["GET"]))
    made.router.routes.append(Route("/openapi.json", _description_of(made), methods=["GET"]))
    made.router.routes.append(Route("/docs", _shown, methods=["GET"]))
    for path, other in (mounts or {}).items():
        made.mount(path, other)
    made.add_middleware(Gate, life=door.life, most_bytes=most_bytes, whose=keyring.brought)
    made.openapi = lambda: _described(made)  # type: ignore[method-assign]  # as FastAPI's documents say to extend it
    return made


def serve(
    desk: Desk,
    keyring: Keyring | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    routers: Sequence[APIRouter] = (),
    mounts: Mapping[str, ASGIApp] | None = None,
    beside: Sequence[AbstractAsyncContextManager[Any]] = (),
    most_bytes: int = bounds.BODY_BYTES,
    start_s: float = 10.0,
    show: Callable[[str], None] | None = None,
) -> Serving:
    """Serve a desk from a thread of this process, until the result is stopped; it listens when this returns.

    Port 0 is any that is free. Without a keyring one is made, and `show` is told its admin key, once; that is refused
    where other machines can reach the server, since nobody would know the key who should.
    """
    if keyring is None:
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"A store that listens on {host} can be reached from other machines, so it needs a key that you give "
                "it. Give one, or listen on 127.0.0.1."
            )
        keyring = Keyring(secrets.token_bytes(32))
        if show is not None:
            show(f"The admin key of this store, made for it and shown this once: {keyring.admin}")
    served = app(desk, keyring, routers=routers, mounts=mounts, beside=beside, most_bytes=most_bytes)
    return listen(served, host, port, keyring.admin, served.state.closing, start_s)


class _Door:
    """Who comes in, what they may do, and what they are told."""

    def __init__(self, desk: Desk, keyring: Keyring) -> None:
        self._desk, self._keyring, self._once = desk, keyring, Once()
        self._notes = Budget("notes and spans", bounds.NOTES, bounds.NOTES_BYTES)
        self._rewards = Budget("rewards of turns", bounds.REWARDS, bounds.REWARDS_WRITTEN_BYTES)
        self.life = secrets.token_hex(8)
        self.closing = asyncio.Event()
        """Set when the server stops: who waits for something to happen is told that nothing has."""

    # -- verbs --------------------------------------------------------------------------------------------------------

    def to(self, verb: type[Verb]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers requests for a verb."""

        async def answer(request: Request) -> Response:
            return await answered(request, self._verb(verb, request))

        return answer

    async def batch(self, request: Request) -> Response:
        """Answer many writings."""
        return await answered(request, self._batch(request))

    async def _verb(self, verb: type[Verb], request: Request) -> Answer:
        grant = self._grant(request, verb.opens)
        body = await request.body()
        if len(body) > verb.most:
            raise RefusedError(413, f"The body of '{verb.name}' has {len(body)} bytes; at most {verb.most} are read.")
        async with turn(_aside(request), grant, len(body)):
            form, name = await _aside(request).run(len(body), _understood, verb, verb.name, request, body, grant)
            _own(grant, form)
            if verb is ClaimForm:
                return await self._claim(request, grant, name or object(), form)
            desk = self._desk_of(request)
            if form.kept and name is not None:
                stale = self._stale(request, name)
                work = partial(self._done, form, desk, grant, len(body), stale)
                return await self._once.answer(name, work, *_share(grant))
            work = partial(self._done, form, desk, grant, len(body))
            if verb.waits:
                return await self._while_there(request, work()) or _nothing(form)
            return await work()

    async def _done(self, form: Verb, desk: Desk, grant: Grant, size: int, stale: bool = False) -> Answer:
        """Do it; the answer."""
        said = await self._said(form, desk, grant, size, stale)
        return 200, await asyncio.to_thread(wire.to_json, said) if form.long else wire.to_json(said)

    async def _said(self, form: Verb, desk: Desk, grant: Grant, size: int, stale: bool) -> dict[str, Any]:
        """Do it; what is answered. size: bytes that it came in. stale: whether an earlier life of the server may have
        done it."""
        if grant.scope == "reward" and isinstance(form, Note):
            self._notes.take(form.key, size)
        elif grant.scope == "reward" and isinstance(form, RewardForm) and form.turn is not None:
            self._rewards.take(form.key, len(wire.to_json({"reward": form.reward})))
        if not (stale and form.adds):
            return await form.at(desk)
        answer = await form.again(desk)
        if answer is None:
            raise RestartedError(RESTARTED)
        return answer

    def _desk_of(self, request: Request) -> Desk:
        """The desk as whoever asks has it: where a life of its keeper is named, in that."""
        life = request.headers.get(wire.KEEPERS_LIFE)
        if life is None:
            return self._desk
        if not (life.isascii() and life.isdecimal() and len(life) < 20):
            raise DataError(f"The header {wire.KEEPERS_LIFE} is the number of a life, and {life!r} is none.")
        return self._desk.in_life(int(life))

    async def _batch(self, request: Request) -> Answer:
        grant = self._grant(request, frozenset({"admin", "runner", "reward"}))
        desk = self._desk_of(request)
        body = await request.body()
        async with turn(_aside(request), grant, len(body)):
            form, name = await _aside(request).run(len(body), _understood, Batch, "batch", request, body, grant)
            writings: list[Writing] = list(form.writings)
            size = len(body) // max(1, sum(isinstance(each, Note) for each in writings))  # all of it is that of notes
            work = partial(self._write, desk, grant, writings, size)
            if name is None:
                return await work(False)
            stale = self._stale(request, name)
            return await self._once.answer(name, lambda: work(stale), *_share(grant))

    async def _write(self, desk: Desk, grant: Grant, writings: Sequence[Writing], size: int, stale: bool) -> Answer:
        """Those of an attempt in order, attempts beside each other. size: bytes that a note came in."""
        places: dict[Key, list[int]] = {}
        for place, writing in enumerate(writings):
            places.setdefault(writing.key, []).append(place)
        replies: list[dict[str, Any]] = [{}] * len(writings)

        async def of_attempt(its: list[int]) -> None:
            for place in its:
                try:
                    _opens(grant, writings[place].opens)
                    _own(grant, writings[place])
                    replies[place] = {"done": await self._said(writings[place], desk, grant, size, stale)}
                except EtudeError as error:
                    status, kind = status_of(error)
                    replies[place] = {"status": status, "error": {"kind": kind, "message": str(error)}}

        await asyncio.gather(*(of_attempt(its) for its in places.values()))
        return 200, wire.to_json({"replies": replies})

    # -- those who wait -----------------------------------------------------------------------------------------------

    async def _claim(self, request: Request, grant: Grant, name: Hashable, form: Verb) -> Answer:
        """Claim, unless the runner goes away: then nothing is claimed for it, or it is handed back."""
        try:
            desk = self._desk_of(request)
            answer = await self._while_there(
                request, self._once.answer(name, partial(self._done, form, desk, grant, 0), *_share(grant))
            )
        except asyncio.CancelledError:
            await self._once.abandon(name, self._hand_back)
            raise
        if answer is None:
            await self._once.abandon(name, self._hand_back)
        return answer or _nothing(form)

    async def _hand_back(self, answer: Answer) -> None:
        why = "the runner that claimed it went away before it was told so"
        for claim in ClaimForm.ClaimReply.model_validate_json(answer[1]).claims:
            _LOG.warning("Rollout %d goes back into the queue: %s.", claim.rollout, why)
            await self._desk.finish(Key(claim.rollout, claim.attempt), Ended(Outcome.INFRA_ERROR, why))

    async def _while_there(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of it; None where who asked goes away, or the server stops, before it does."""
        task = asyncio.create_task(work)
        others = [asyncio.create_task(_gone(request)), asyncio.create_task(self.closing.wait())]
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() and not others[0].done() else None
        finally:
            for other in (task, *others):
                other.cancel()
            await asyncio.wait({task, *others})

    # -- spans --------------------------------------------------------------------------------------------------------

    async def traces(self, request: Request) -> Response:
        """Take spans."""
        form = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return await answered(request, self._traces(request, form), form)

    async def _traces(self, request: Request, form: str) -> Answer:
        grant = self._grant(request, frozenset({"admin", "reward"}))
        if form not in (otlp.JSON, otlp.PROTOBUF):
            why = f"Spans come as {otlp.PROTOBUF} or {otlp.JSON}, and this says that it is {form!r}."
            return 415, trouble(request, "Refused", why)
        body = await request.body()
        async with turn(_aside(request), grant, SPANS_GROW * len(body)):
            try:
                spans = await _aside(request).run(SPANS_GROW * len(body), otlp.spans, body, form)
            except DataError as error:
                raise UnreadableError(str(error)) from error
            refused = await self._noted(grant, spans)
        return 200, otlp.answer(form, len(refused), refused[0] if refused else "")

    async def _noted(self, grant: Grant, spans: Sequence[otlp.Spanned]) -> list[str]:
        """Note spans; why those were refused that were."""
        refused: list[str] = []

        async def note(span: otlp.Spanned) -> None:
            key = grant.key if grant.scope == "reward" else span.key
            try:
                if key is None:
                    raise UnknownError(f"A span's resource must have {otlp.ROLLOUT} and {otlp.ATTEMPT}, as integers.")
                if span.why:
                    raise DataError(span.why)
                if grant.scope == "reward":
                    self._notes.take(key, span.size)
                await self._desk.note(key, "span", span.data)
            except (UnknownError, IllegalMoveError, DataError) as error:
                refused.append(str(error))

        for start in range(0, len(spans), AT_ONCE):
            await asyncio.gather(*(note(span) for span in spans[start : start + AT_ONCE]))
        return refused

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _grant(self, request: Request, opens: frozenset[Scope]) -> Grant:
        """What the key of a request opens, if that is enough."""
        grant = self._keyring.first(keys_in(*map(request.headers.get, ("authorization", "x-api-key"))))
        _opens(grant, opens)
        return grant

    def _stale(self, request: Request, name: Hashable) -> bool:
        """Whether this was sent to another life of the server before, which may have done it."""
        return request.headers.get(wire.AGAIN, self.life) != self.life and not self._once.knows(name)


def _opens(grant: Grant, opens: frozenset[Scope]) -> None:
    if grant.scope not in opens:
        raise OtherKeyError(
            f"This key is {grant.scope} and does not open this; what does: {', '.join(sorted(opens))}. Ask whoever "
            "runs the store for one."
        )


def _own(grant: Grant, form: Form) -> None:
    """A reward key is good for its own attempt."""
    if grant.scope == "reward" and (not isinstance(form, Writing) or form.key != grant.key):
        raise OtherKeyError("This key belongs to another attempt; each attempt has its own, in ETUDE_REWARD_KEY.")


def _read(form: type[F], body: bytes) -> F:
    """What a body says, if it says what it must."""
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        if wrong[0]["type"] == "json_invalid":
            raise UnreadableError(f"The body is no JSON: {wrong[0]['msg']}.") from None
        told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}" for one in wrong[:5])
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise DataError(f"The body does not say what it must: {told}{more}.") from None


def _understood(form: type[F], verb: str, request: Request, body: bytes, grant: Grant) -> tuple[F, bytes | None]:
    """What a body says; and what names a request that must not be done twice: nobody with another key can name it."""
    token = request.headers.get(wire.ONCE)
    if token and not _TOKEN.fullmatch(token):
        raise DataError(f"The header {wire.ONCE} is 1 to 200 visible characters without a space, and this one is not.")
    read = _read(form, body)
    if grant.scope != "admin":
        for one in read.writings if isinstance(read, Batch) else [read]:
            if isinstance(one, Note):
                small(one.data, f"The note '{one.event}'")
    if not token:
        return read, None
    name = blake2b("\n".join((repr(grant), verb, token, "")).encode(), digest_size=16)
    name.update(body)
    return read, name.digest()


def _share(grant: Grant) -> tuple[Grant, Share]:
    """The owners whose answers are kept, and how many."""
    return grant, MANY if grant.key is None else FEW


def _aside(request: Request) -> Aside:
    found: Aside = request.scope["state"]["aside"]
    return found


def _nothing(form: Verb) -> Answer:
    """What is said to those who waited for what did not happen."""
    return 200, wire.to_json(form.nothing())


async def _gone(request: Request) -> None:
    """Until whoever asked has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _health(_: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type=otlp.JSON)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}; /openapi.json says what there is."
    return Response(trouble(request, "Refused", why), error.status_code, error.headers, media_type=otlp.JSON)


async def _shown(_: Request) -> Response:
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Etude's store")


def _description_of(served: FastAPI) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    body = cache(lambda: wire.to_json(served.openapi()))  # made where it is first asked for, after all routes are there

    async def described(_: Request) -> Response:
        return Response(body(), media_type=otlp.JSON)

    return described


def _described(served: FastAPI) -> dict[str, Any]:
    """The description, made once."""
    if served.openapi_schema is None:
        told = get_openapi(title=served.title, version=served.version, routes=served.routes)
        paths, components = description()
        told["paths"] |= paths
        for name, parts in components.items():
            told.setdefault("components", {}).setdefault(name, {}).update(parts)
        served.openapi_schema = told
    return served.openapi_schema
