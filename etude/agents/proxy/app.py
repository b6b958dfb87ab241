"""The routes of the model endpoint: an app of its own, or a router on another's.

    with serve(desk, keyring, routers=[router(endpoint)], beside=[endpoint]): ...     # on a store's server

Bodies come through the store's `Gate`, which bounds what is read and what may be in it; what it refuses is said here in
the words of each dialect. What is long is parsed beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etude.agents.proxy.anthropic import Anthropic
from etude.agents.proxy.asked import Body, Dialect, Kind, Refusal
from etude.agents.proxy.chat_completions import ChatCompletions
from etude.agents.proxy.completions import Completions
from etude.agents.proxy.endpoint import Endpoint, no_model
from etude.agents.proxy.external import Foreign
from etude.agents.proxy.notary import Call
from etude.agents.proxy.openai import error, event
from etude.agents.proxy.responses import Responses
from etude.observe import get_log
from etude.store.aside import Aside
from etude.store.bounds import RefusedError
from etude.store.desk import Key
from etude.store.gate import Gate

__all__ = ["app", "router"]

T = TypeVar("T")
_Work = Callable[[Callable[[], Awaitable[None]], Callable[[bytes], Awaitable[None]]], Coroutine[Any, Any, None]]
OF_OTHERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Where calls to models of somebody else's are passed on."""
ROUTES: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Anthropic(),
}
COUNTING = Anthropic(counting=True)
UNKNOWN = (
    "/v1/{rest:no_store}",
    *("/chat/completions", "/completions", "/models", "/models/{model:path}"),
    *("/responses", "/responses/{rest:path}", "/messages", "/messages/{rest:path}"),
)
"""Paths that agents ask for by mistake, most often by a base URL that lacks /v1 or has it twice."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
KINDS: dict[int, Kind] = {401: "unauthorized", 408: "timeout", 413: "too_large", 429: "busy"}
"""Of what the gate refuses, by its status; anything else is invalid."""
UNREAD_S = 60.0
"""Seconds for which a client may read nothing of a stream."""


class _NoStore(PathConvertor):
    """A path that is none of the store's, beside whose routes these may be served."""

    regex = r"(?!store/|traces$).*"


register_url_convertor("no_store", _NoStore())


class GoneError(Exception):
    """The client is not there any more."""


def app(endpoint: Endpoint) -> FastAPI:
    """The endpoint alone, as an app that tends to it while it runs."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with endpoint:
            yield

    made = FastAPI(title="Etude's model endpoint", lifespan=lifespan)
    made.include_router(router(endpoint))
    made.add_middleware(Gate, life=secrets.token_hex(8), whose=endpoint.keyring.brought)
    return made


def router(endpoint: Endpoint) -> APIRouter:
    """Its routes. Whoever includes them enters the endpoint (`async with endpoint`) for as long as they are served.

    They are plain: what they take and answer is described by OpenAI and Anthropic, and read by the dialects."""
    routes = APIRouter()
    for path, dialect in ROUTES.items():
        name = path.removeprefix("/v1/").replace("/", "_")
        routes.add_route(path, _answering(endpoint, path, dialect), methods=["POST"], name=name)

    async def count_tokens(request: Request) -> Response:
        """How many tokens a request to /v1/messages would show the model."""
        key = None
        try:
            key = _entitled(endpoint, request)
            body, size = await _body(endpoint, key, request)
            return _json({"input_tokens": await endpoint.count(_aside(request), COUNTING, key, body, size)})
        except GoneError:
            return Response(status_code=499)
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else _broken(error)
            await endpoint.refused(key, request.url.path, refusal)
            return _refused(COUNTING, refusal)

    async def models(request: Request) -> Response:
        """The models there are."""
        dialect: Dialect = COUNTING if "anthropic-version" in request.headers else ROUTES["/v1/chat/completions"]
        try:
            _entitled(endpoint, request)
            wanted = request.path_params.get("model")
            if wanted is not None and wanted not in endpoint.models:
                raise no_model(wanted, endpoint.models)
        except Refusal as refusal:
            return _refused(dialect, refusal)
        if wanted is not None:
            return _json(_model(wanted))
        found = [_model(name) for name in endpoint.models]
        ends = {"first_id": endpoint.models[0], "last_id": endpoint.models[-1]}
        return _json({"object": "list", "data": found, "has_more": False, **ends})

    routes.add_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    routes.add_route("/v1/models", models, methods=["GET"])
    routes.add_route("/v1/models/{model}", models, methods=["GET"], name="model")
    known = {each.path: sorted((each.methods or set()) - {"HEAD"}) for each in routes.routes if isinstance(each, Route)}
    for path in UNKNOWN:
        routes.add_route(path, _unknown(known), methods=METHODS, name="unknown", include_in_schema=False)
    return routes


def _unknown(known: Mapping[str, Sequence[str]]) -> Callable[[Request], Awaitable[Response]]:
    async def unknown(request: Request) -> Response:
        """Name the routes that there are, in the words of the dialect that a request seems to speak."""
        path = request.url.path
        claude = "anthropic-version" in request.headers or "/messages" in path
        there = ", ".join(f"{' '.join(methods)} {path}" for path, methods in known.items())
        why = f"There is no {request.method} {path[:200]} at this endpoint. There are: {there}."
        refusal = Refusal(why, "not_found", status=405 if path in known else None)
        response = _refused(COUNTING if claude else ROUTES["/v1/chat/completions"], refusal)
        if path in known:
            response.headers["allow"] = ", ".join(known[path])
        return response

    return unknown


def _answering(endpoint: Endpoint, path: str, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        """Answer one call, and record it."""
        began = time.perf_counter()
        key = None
        try:
            key = _entitled(endpoint, request)
            body, size = await _body(endpoint, key, request)
            tags = [tag for each in request.headers.get("x-etude-tags", "").split(",") if (tag := each.strip())]
            if path in OF_OTHERS:
                foreign = await endpoint.foreign(path.removeprefix("/v1"), key, body, tags, began)
                if foreign is not None:
                    return await _passed_on(endpoint, dialect, foreign, request)
            state = request.headers.get("x-etude-state", "")
            call = await endpoint.open(_aside(request), dialect, key, body, tags, began, state, size)
            if call.asked.stream:
                failed = dialect.writer(call.reply(endpoint.chat.tokenizer)).failed
                refused = partial(endpoint.refused, key, path)
                return _Streamed(dialect, partial(endpoint.stream, call), failed, refused, _headers(call))
            told = await _unless_gone(request.receive, endpoint.answer(call))
            return _json(told, headers=_headers(call))
        except GoneError:
            return Response(status_code=499)
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else _broken(error)
            await endpoint.refused(key, path, refusal)
            return _refused(dialect, refusal)

    return answer


async def _passed_on(endpoint: Endpoint, dialect: Dialect, call: Foreign, request: Request) -> Response:
    """What another's model answers."""
    if call.body.get("stream") is True:
        refused = partial(endpoint.refused, call.sitting.key, f"/v1{call.path}")
        work = partial(endpoint.elsewhere.stream, call)
        return _Streamed(dialect, work, lambda refusal: event(error(refusal)), refused, {})
    data = await _unless_gone(request.receive, endpoint.elsewhere.whole(call))
    return Response(data, media_type="application/json")


class _Streamed(Response):
    """Events as they come; an error as any other response, as long as nothing has come."""

    media_type = "text/event-stream"

    def __init__(
        self,
        dialect: Dialect,
        work: _Work,
        failed: Callable[[Refusal], bytes],
        refused: Callable[[Refusal], Awaitable[None]],
        headers: dict[str, str],
    ) -> None:
        """work: writes the events. failed: what is written where it cannot go on. refused: is told of a call that got
        no answer."""
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._dialect, self._work, self._failed, self._refused = dialect, work, failed, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        one = asyncio.Lock()
        started = unread = False
        raw = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

        async def start() -> None:
            nonlocal started
            started = True
            await send({"type": "http.response.start", "status": 200, "headers": raw})

        async def given(data: bytes, more: bool = True) -> bool:
            try:
                async with asyncio.timeout(UNREAD_S):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                return False
            return True

        async def write(data: bytes) -> None:
            nonlocal unread
            async with one:
                if unread or not await given(data):
                    unread = True
                    raise asyncio.CancelledError  # as where the client has gone

        try:
            await _unless_gone(receive, self._work(start, write))
        except GoneError:
            return
        except Exception as error:
            if unread:
                return
            refusal = error if isinstance(error, Refusal) else _broken(error)
            if not started:
                await self._refused(refusal)
                await _refused(self._dialect, refusal)(scope, receive, send)
                return
            if not await given(self._failed(refusal)):
                return
        await given(b"", more=False)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work, which is cancelled when the client goes. `GoneError` if it has."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    gone.add_done_callback(lambda _: task.cancel())
    asking = asyncio.current_task()
    assert asking is not None, "calls are answered on an event loop"
    try:
        return await task
    except asyncio.CancelledError:
        if asking.cancelling():
            raise
        if gone.done():
            raise GoneError from None
        raise Refusal("The attempt that asked has ended.", "forbidden", code="attempt_over") from None
    finally:
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _entitled(endpoint: Endpoint, request: Request) -> Key:
    return endpoint.entitled(request.headers.get("authorization"), request.headers.get("x-api-key"))


async def _body(endpoint: Endpoint, key: Key, request: Request) -> tuple[Body, int]:
    """The JSON object that came, and how many bytes it was."""
    try:
        data = await request.body()
    except RefusedError as refused:
        kind = KINDS.get(refused.status, "invalid")
        raise Refusal(str(refused), kind, status=refused.status, wait=int(kind == "busy")) from refused
    if len(data) > endpoint.config.max_body_mib * 2**20:
        told = f"The request is larger than {endpoint.config.max_body_mib:g} MiB, the most that is read here."
        raise Refusal(told, "too_large")
    aside = _aside(request)
    async with aside.turn(key, len(data)):
        return await aside.run(len(data), _parsed, data), len(data)


def _aside(request: Request) -> Aside:
    """Where what is long is read: the gate's, which is shared with the store where both are served."""
    found: Aside = request.scope["state"]["aside"]
    return found


def _parsed(data: bytes) -> Body:
    try:
        text = data.decode()
        body = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise Refusal(f"The body is not valid UTF-8 (at byte {error.start}).") from error
    except UnicodeEncodeError as error:
        raise Refusal(f"A text in the body has half a character in it ({error.reason}). Leave it out.") from error
    except RecursionError as error:
        raise Refusal("The body is nested too deeply.") from error
    except ValueError as error:
        raise Refusal(f"The body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise Refusal("The body must be a JSON object.")
    return body


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _json(body: Body, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(data, status, headers, "application/json")


def _refused(dialect: Dialect, refusal: Refusal) -> Response:
    headers = {"retry-after": str(refusal.wait)} if refusal.wait else None
    return _json(dialect.error(refusal), refusal.status, headers)


def _broken(error: Exception) -> Refusal:
    """Something that nobody foresaw: a mistake of ours, or a store that cannot be written."""
    get_log("agents").error("A call to the model endpoint failed", exc_info=error)
    return Refusal(f"The endpoint could not answer ({type(error).__name__}); its log says more.", "failed")


def _headers(call: Call) -> dict[str, str]:
    """What an agent may like to know: its attempt, and which of its parameters were not followed."""
    key = call.sitting.key
    told = {"x-etude-rollout": str(key.rollout), "x-etude-attempt": str(key.attempt)}
    return told | ({"x-etude-ignored": ", ".join(call.ignored)} if call.ignored else {})


def _model(name: str) -> dict[str, Any]:
    """A model, as both dialects read it."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "etude",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
