"""The routes of the model endpoint: a standalone app, or a router for another app.

    with serve(queue, keyring, routers=[create_router(endpoint)], lifespans=[endpoint]): ...    # on a store's server

Requests pass the store's `RequestMiddleware`, which bounds the size and the contents of a body. Its refusals are
formatted in each dialect here. Long bodies are parsed on a background thread.
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

from etude.agents.proxy.anthropic import AnthropicDialect
from etude.agents.proxy.chat_completions import ChatCompletionsDialect
from etude.agents.proxy.completions import CompletionsDialect, merge_responses, split_prompts
from etude.agents.proxy.endpoint import ModelEndpoint, unknown_model_error
from etude.agents.proxy.external import ExternalCall
from etude.agents.proxy.openai import error_body, json_line, sse_event
from etude.agents.proxy.request import APIDialect, APIError, ErrorKind, JSONObject
from etude.agents.proxy.responses import ResponsesDialect
from etude.agents.proxy.turn_recorder import ModelCall
from etude.observe import get_logger
from etude.store.http.background_thread import BackgroundThread
from etude.store.http.request_limits import RequestRefusedError
from etude.store.http.request_middleware import RequestMiddleware, wait_for_disconnect
from etude.store.queue.rollout_queue import AttemptId

T = TypeVar("T")
_Work = Callable[[Callable[[], Awaitable[None]], Callable[[bytes], Awaitable[None]]], Coroutine[Any, Any, None]]
PASSTHROUGH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The routes that pass calls to external models on."""
TOKEN_COUNTING = AnthropicDialect(counting=True)
ROUTES: dict[str, APIDialect] = {
    "/v1/chat/completions": ChatCompletionsDialect(),
    "/v1/completions": CompletionsDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": AnthropicDialect(),
    "/v1/messages/count_tokens": TOKEN_COUNTING,
}
MISTAKEN_PATHS = (
    "/v1/{rest:no_store}",
    "/chat/completions",
    "/completions",
    "/models",
    "/models/{model:path}",
    "/responses",
    "/responses/{rest:path}",
    "/messages",
    "/messages/{rest:path}",
)
"""Paths that agents request by mistake, most often because a base URL lacks /v1 or has it twice."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
ERROR_KINDS: dict[int, ErrorKind] = {401: "unauthorized", 408: "timeout", 413: "too_large", 429: "busy"}
"""The kind of a refusal of the middleware, by its status; any other is invalid."""
WRITE_TIMEOUT_S = 60.0
"""Seconds that a client may take to read a part of a stream."""


class _NoStore(PathConvertor):
    """A path that does not belong to the store, whose server may have these routes too."""

    regex = r"(?!store/|traces$).*"


register_url_convertor("no_store", _NoStore())


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


def create_app(endpoint: ModelEndpoint) -> FastAPI:
    """Return an app of the endpoint alone, which runs the endpoint's background work."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with endpoint:
            yield

    app = FastAPI(title="Etude's model endpoint", lifespan=lifespan)
    app.include_router(create_router(endpoint))
    app.add_middleware(RequestMiddleware, instance=secrets.token_hex(8), read_grant=endpoint.keyring.read_headers)
    return app


def create_router(endpoint: ModelEndpoint) -> APIRouter:
    """Return the endpoint's routes. The caller enters the endpoint (`async with endpoint`) while they are served.

    FastAPI does not describe these routes: OpenAI and Anthropic define their requests and responses, and the dialects
    parse them.
    """
    routes = APIRouter()
    for path, dialect in ROUTES.items():
        name = path.removeprefix("/v1/").replace("/", "_")
        routes.add_route(path, _answer_route(endpoint, path, dialect), methods=["POST"], name=name)

    async def models(request: Request) -> Response:
        """List the models."""
        try:
            endpoint.authorize(request.headers)
            requested = request.path_params.get("model")
            if requested is not None and requested not in endpoint.models:
                raise unknown_model_error(requested, endpoint.models)
        except APIError as refusal:
            return _error_response(_used_dialect(request), refusal)
        if requested is not None:
            return _json(_model(requested))
        listed = [_model(name) for name in endpoint.models]
        first_and_last = {"first_id": endpoint.models[0], "last_id": endpoint.models[-1]}
        return _json({"object": "list", "data": listed, "has_more": False, **first_and_last})

    routes.add_route("/v1/models", models, methods=["GET"])
    routes.add_route("/v1/models/{model}", models, methods=["GET"], name="model")
    methods_by_path = {
        route.path: sorted((route.methods or set()) - {"HEAD"}) for route in routes.routes if isinstance(route, Route)
    }
    for path in MISTAKEN_PATHS:
        routes.add_route(
            path, _unknown_route(methods_by_path), methods=METHODS, name="unknown", include_in_schema=False
        )
    return routes


def _unknown_route(methods_by_path: Mapping[str, Sequence[str]]) -> Callable[[Request], Awaitable[Response]]:
    async def unknown(request: Request) -> Response:
        """Name the existing routes, in the dialect that the request seems to use."""
        path = request.url.path
        routes = ", ".join(f"{' '.join(methods)} {path}" for path, methods in methods_by_path.items())
        message = f"This endpoint has no route {request.method} {path[:200]}. Its routes are: {routes}."
        refusal = APIError(message, "not_found", status=405 if path in methods_by_path else None)
        response = _error_response(_used_dialect(request), refusal)
        if path in methods_by_path:
            response.headers["allow"] = ", ".join(methods_by_path[path])
        return response

    return unknown


def _used_dialect(request: Request) -> APIDialect:
    """Return the dialect that a request seems to use, if its route does not say it."""
    is_anthropic = "anthropic-version" in request.headers or "/messages" in request.url.path
    return ROUTES["/v1/messages" if is_anthropic else "/v1/chat/completions"]


def _answer_route(endpoint: ModelEndpoint, path: str, dialect: APIDialect) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        """Answer one call, and record it."""
        began = time.perf_counter()
        attempt_id = None
        try:
            attempt_id = endpoint.authorize(request.headers)
            background: BackgroundThread = request.state.aside  # set by the middleware, for a store too
            body, size = await _read_body(endpoint, attempt_id, background, request)
            if dialect is TOKEN_COUNTING:
                count = await endpoint.count_tokens(background, dialect, attempt_id, body, size)
                return _json({"input_tokens": count})
            tags = [tag for part in request.headers.get("x-etude-tags", "").split(",") if (tag := part.strip())]
            if path in PASSTHROUGH_PATHS:
                external_call = await endpoint.prepare_external_call(
                    path.removeprefix("/v1"), attempt_id, body, tags, began
                )
                if external_call is not None:
                    return await _pass_through(endpoint, dialect, external_call, request)
            state = request.headers.get("x-etude-state", "")
            bodies = split_prompts(body) if path == "/v1/completions" and endpoint.runner.scores_prompts else [body]
            calls = [
                await endpoint.prepare_call(
                    background, dialect, attempt_id, each, size, tags=tags, began=began, state=state
                )
                for each in bodies
            ]
            call = calls[0]
            if call.request.stream:
                format_failure = dialect.writer(call.reply_header(endpoint.chat.tokenizer)).fail
                on_refusal = partial(endpoint.record_refusal, attempt_id, path)
                return _EventStreamResponse(
                    dialect, partial(endpoint.runner.stream, call), format_failure, on_refusal, _headers(call)
                )
            answers = await _cancel_on_disconnect(request.receive, endpoint.runner.answer_all(calls))
            return _json(merge_responses(answers), headers=_headers(call))
        except ClientDisconnectedError:
            return Response(status_code=499)
        except Exception as error:
            refusal = error if isinstance(error, APIError) else _internal_error(error)
            await endpoint.record_refusal(attempt_id, path, refusal)
            return _error_response(dialect, refusal)

    return answer


async def _pass_through(endpoint: ModelEndpoint, dialect: APIDialect, call: ExternalCall, request: Request) -> Response:
    if call.body.get("stream") is True:
        on_refusal = partial(endpoint.record_refusal, call.session.attempt_id, f"/v1{call.path}")
        work = partial(endpoint.passthrough.stream, call)
        return _EventStreamResponse(dialect, work, lambda refusal: sse_event(error_body(refusal)), on_refusal, {})
    data = await _cancel_on_disconnect(request.receive, endpoint.passthrough.answer(call))
    return Response(data, media_type="application/json")


class _EventStreamResponse(Response):
    """A stream of events, or a plain error response if the call fails before the first event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        dialect: APIDialect,
        work: _Work,
        format_failure: Callable[[APIError], bytes],
        on_refusal: Callable[[APIError], Awaitable[None]],
        headers: dict[str, str],
    ) -> None:
        """work: writes the events. format_failure: formats an error within the stream. on_refusal: called if the call
        gets no answer."""
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._dialect = dialect
        self._work = work
        self._format_failure = format_failure
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write_lock = asyncio.Lock()
        started = client_stalled = False
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

        async def start() -> None:
            nonlocal started
            started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def send_chunk(data: bytes, more: bool = True) -> bool:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                return False
            return True

        async def write(data: bytes) -> None:
            nonlocal client_stalled
            async with write_lock:
                if client_stalled or not await send_chunk(data):
                    client_stalled = True
                    raise asyncio.CancelledError  # as if the client had disconnected

        try:
            await _cancel_on_disconnect(receive, self._work(start, write))
        except ClientDisconnectedError:
            return
        except Exception as error:
            if client_stalled:
                return
            refusal = error if isinstance(error, APIError) else _internal_error(error)
            if not started:
                await self._on_refusal(refusal)
                await _error_response(self._dialect, refusal)(scope, receive, send)
                return
            if not await send_chunk(self._format_failure(refusal)):
                return
        await send_chunk(b"", more=False)


async def _cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine. If the client disconnects, cancel it and raise `ClientDisconnectedError`."""
    task, disconnected = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect(receive))
    disconnected.add_done_callback(lambda _: task.cancel())
    caller = asyncio.current_task()
    assert caller is not None, "calls are answered on an event loop"
    try:
        return await task
    except asyncio.CancelledError:
        if caller.cancelling():
            raise
        if disconnected.done():
            raise ClientDisconnectedError from None
        raise APIError("The attempt that made this call has ended.", "forbidden", code="attempt_over") from None
    finally:
        disconnected.cancel()


async def _read_body(
    endpoint: ModelEndpoint, attempt_id: AttemptId, background: BackgroundThread, request: Request
) -> tuple[JSONObject, int]:
    """Return the JSON object of the body, and its size in bytes."""
    try:
        data = await request.body()
    except RequestRefusedError as error:
        kind = ERROR_KINDS.get(error.status, "invalid")
        raise APIError(str(error), kind, status=error.status, retry_after=int(kind == "busy")) from error
    if len(data) > endpoint.config.max_body_mib * 2**20:
        message = f"The request is larger than {endpoint.config.max_body_mib:g} MiB, the limit of this endpoint."
        raise APIError(message, "too_large")
    async with background.slot(attempt_id, len(data)):
        return await background.run(len(data), _parse_json, data), len(data)


def _parse_json(data: bytes) -> JSONObject:
    try:
        text = data.decode()
        body = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise APIError(f"The body is not valid UTF-8 (at byte {error.start}).") from error
    except UnicodeEncodeError as error:
        raise APIError(f"A string in the body has an unpaired surrogate ({error.reason}). Remove it.") from error
    except RecursionError as error:
        raise APIError("The body is nested too deeply.") from error
    except ValueError as error:
        raise APIError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise APIError("The body must be a JSON object.")
    return body


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _json(body: JSONObject, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_line(body).encode(), status, headers, "application/json")


def _error_response(dialect: APIDialect, refusal: APIError) -> Response:
    headers = {"retry-after": str(refusal.retry_after)} if refusal.retry_after else None
    return _json(dialect.format_error(refusal), refusal.status, headers)


def _internal_error(error: Exception) -> APIError:
    """Log an unexpected error, such as a defect or a store that cannot be written, and return what the client sees of
    it."""
    get_logger("agents").error("A call to the model endpoint failed", exc_info=error)
    return APIError(f"The endpoint failed to answer ({type(error).__name__}). Its log has the details.", "failed")


def _headers(call: ModelCall) -> dict[str, str]:
    """Return the headers that name the attempt, and the agent's parameters that were not followed."""
    attempt_id = call.session.attempt_id
    headers = {"x-etude-rollout": str(attempt_id.rollout), "x-etude-attempt": str(attempt_id.attempt)}
    return headers | ({"x-etude-ignored": ", ".join(call.ignored)} if call.ignored else {})


def _model(name: str) -> dict[str, Any]:
    """Return a model in a form that both dialects read."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "etude",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
