"""External models: calls to other providers are passed on unchanged, and so are their answers.

An agent may need another model beside the one that is trained: a simulated user, a judge, a summarizer. It calls that
model here, by a name that the run defines, with the key of its attempt. So the agent needs no provider's key, and the
call is recorded with the attempt. The record is an event, `external`, and no turn: without token ids and log-probs
there is nothing to train on.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import yaml
from pydantic import Field

from etude.agents.proxy.external_answer import ExternalAnswer, event_data, iter_events
from etude.agents.proxy.metrics import EndpointMetrics
from etude.agents.proxy.request import APIError, ErrorKind, JSONObject
from etude.agents.proxy.session import AttemptSession
from etude.agents.proxy.slot_queue import SlotQueue
from etude.agents.proxy.turn_recorder import TurnRecorder
from etude.config import Config
from etude.config.env import read_api_key
from etude.errors import ConfigError
from etude.running_time import time_limit

CONNECT_TIMEOUT = 10.0
"""Seconds to connect to a provider."""
MAX_LOGGED_CHARACTERS = 200_000
"""The most characters of a request that are recorded."""
MAX_ERROR_CHARACTERS = 500
"""The most characters of a provider's error that are repeated."""
MAX_ANSWER_MIB = 64
"""The most MiB of an answer."""
CLIENT_ERRORS: dict[int, ErrorKind] = {400: "invalid", 404: "not_found", 413: "too_large", 422: "invalid"}
"""The errors that the agent's request causes, by the provider's status."""
Write = Callable[[bytes], Awaitable[None]]


class ExternalModel(Config):
    """A model of another provider."""

    url: str = Field(pattern=r"^https?://\S+$", description="base URL of the provider, including /v1")
    model: str | None = Field(
        None, min_length=1, description="model name at the provider; null uses the name of this entry"
    )
    api_key_env: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="the environment variable that holds the provider's key"
    )


def external_models(path: Path | None) -> dict[str, ExternalModel]:
    """Return the models that a YAML file defines, by the name that agents use."""
    if path is None:
        return {}
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The models of `agent.external` cannot be read from {path}: {error}") from error
    if not isinstance(sections, Mapping) or not all(
        isinstance(name, str) and isinstance(sections[name], Mapping) for name in sections
    ):
        raise ConfigError(
            f"{path} must have a section for each model: its name, and under it `url`, `model`, `api_key_env`."
        )
    return {name: ExternalModel.model_validate(dict(sections[name])) for name in sections}


@dataclass(eq=False)
class ExternalCall:
    """One call to an external model."""

    name: str
    path: str
    """Without /v1: `/chat/completions`."""
    body: JSONObject
    session: AttemptSession
    tags: tuple[str, ...]
    began: float
    answer: ExternalAnswer = field(default_factory=ExternalAnswer)
    """The answer so far."""


class Passthrough:
    """Passes calls on. Used on one event loop.

    Waits for a slot, of which there are as many as for the trained model, and for the provider. `timeout_s` bounds
    both.
    """

    def __init__(
        self,
        models: Mapping[str, ExternalModel],
        slots: SlotQueue,
        metrics: EndpointMetrics,
        recorder: TurnRecorder,
        timeout_s: float,
    ) -> None:
        self.models = dict(models)
        self._keys = {name: read_api_key(model.api_key_env, f"the model '{name}'") for name, model in models.items()}
        self._slots = slots
        self._metrics = metrics
        self._recorder = recorder
        self._timeout = timeout_s
        self._client: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        """Close its connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def answer(self, call: ExternalCall) -> bytes:
        """Return the answer to a call as one response."""
        async with self._under_way(call), self._request(call) as response:
            data = await _read(response, call.name)
            call.answer.read_response(data)
        return data

    async def stream(self, call: ExternalCall, start: Callable[[], Awaitable[None]], write: Write) -> None:
        """Write the answer's events as they come, after `start`. An error before `start` is raised. The event that ends
        the answer is written once the call is recorded."""
        final_events: list[bytes] = []
        async with self._under_way(call), self._request(call) as response:
            await start()
            async for event in iter_events(_bounded(response, call.name)):
                if call.answer.read_event(event_data(event)) or final_events:
                    final_events.append(event)
                else:
                    await write(event + b"\n\n")
        for event in final_events:
            await write(event + b"\n\n")

    @asynccontextmanager
    async def _under_way(self, call: ExternalCall) -> AsyncIterator[None]:
        """Bound a call by its timeout and by the end of its attempt, and record it in any case."""
        task = asyncio.current_task()
        assert task is not None, "calls are answered on an event loop"
        counts, record = self._metrics.counts, partial(self._recorder.note, call.session.attempt_id, "external")
        counts["external_calls"] += 1
        call.session.under_way.add(task)
        try:
            async with time_limit(self._timeout):
                yield
        except (TimeoutError, httpx2.HTTPError, APIError) as error:
            refusal = self._to_api_error(call, error)
            counts["external_failed"] += 1
            await record(self._describe(call, "failed") | {"error": refusal.message})
            raise refusal from error
        except (asyncio.CancelledError, Exception):  # the client has disconnected
            counts["external_aborted"] += 1
            self._recorder.note_later(call.session.attempt_id, "external", self._describe(call, "aborted"))
            raise
        finally:
            call.session.under_way.discard(task)
        counts["external_answered"] += 1
        counts["external_prompt_tokens"] += call.answer.prompt_tokens
        counts["external_completion_tokens"] += call.answer.completion_tokens
        await record(self._describe(call, "answered"))
        self._metrics.record("external_latency", time.perf_counter() - call.began)

    @asynccontextmanager
    async def _request(self, call: ExternalCall) -> AsyncIterator[httpx2.Response]:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            timeout = httpx2.Timeout(self._timeout, connect=min(CONNECT_TIMEOUT, self._timeout))
            self._client = httpx2.AsyncClient(limits=limits, timeout=timeout)
        model, key = self.models[call.name], self._keys[call.name]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {**call.body, "model": model.model or call.name}
        request = self._client.build_request(
            "POST", model.url.rstrip("/") + call.path, json=body, headers={**headers, "accept-encoding": "identity"}
        )
        async with self._slots.acquire(1):
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != httpx2.codes.OK:
                    raise self._provider_error(call, response, await _read(response, call.name))
                yield response
            finally:
                await asyncio.shield(response.aclose())

    def _provider_error(self, call: ExternalCall, response: httpx2.Response, data: bytes) -> APIError:
        """Return the refusal for a provider's error response. It never contains the provider's key."""
        status, model = response.status_code, self.models[call.name]
        if status in (401, 403):
            credential = (
                f"the key in {model.api_key_env}"
                if model.api_key_env
                else "a call without a key, as `api_key_env` is not set"
            )
            return APIError(f"The provider of '{call.name}' refused {credential} ({status}).", "failed", status=502)
        message = f"The provider of '{call.name}' answered {status}: {self._error_text(call, data)}"
        if status == httpx2.codes.TOO_MANY_REQUESTS:
            return APIError(message, "busy", retry_after=_retry_after_seconds(response.headers.get("retry-after", "")))
        if status in CLIENT_ERRORS:
            return APIError(message, CLIENT_ERRORS[status])
        return APIError(message, "failed", status=status if status >= 500 else 502)

    def _error_text(self, call: ExternalCall, data: bytes) -> str:
        text = data[:MAX_LOGGED_CHARACTERS].decode(errors="replace")
        try:
            body = json.loads(text)
            text = str(body["error"]["message"])
        except (ValueError, KeyError, TypeError):
            pass
        key = self._keys[call.name]
        return (text.replace(key, "***") if key else text)[:MAX_ERROR_CHARACTERS]

    def _to_api_error(self, call: ExternalCall, error: Exception) -> APIError:
        if isinstance(error, APIError):
            return error
        if isinstance(error, TimeoutError | httpx2.TimeoutException):
            message = f"The provider of '{call.name}' did not answer within {self._timeout:g} s."
            return APIError(message, "timeout")
        reason = str(error) or type(error).__name__
        return APIError(f"The provider of '{call.name}' could not be reached: {reason}", "failed", status=502)

    def _describe(self, call: ExternalCall, outcome: str) -> dict[str, Any]:
        conversation = {
            name: call.body[name] for name in ("messages", "input", "prompt", "instructions") if name in call.body
        }
        text = json.dumps(conversation, ensure_ascii=False)
        return {
            "model": call.name,
            "served_as": self.models[call.name].model or call.name,
            "path": call.path,
            "outcome": outcome,
            "asked": text[:MAX_LOGGED_CHARACTERS],
            "said": call.answer.text,
            "finish": call.answer.finish_reason,
            "usage": call.answer.usage,
            "seconds": round(time.perf_counter() - call.began, 3),
            "tags": list(call.tags),
        }


async def _read(response: httpx2.Response, name: str) -> bytes:
    data = bytearray()
    async for chunk in _bounded(response, name):
        data += chunk
    return bytes(data)


async def _bounded(response: httpx2.Response, name: str) -> AsyncIterator[bytes]:
    """Yield an answer as it comes, up to the maximum size."""
    read = 0
    async for chunk in response.aiter_bytes():
        read += len(chunk)
        if read > MAX_ANSWER_MIB * 2**20:
            raise APIError(f"The provider of '{name}' sent more than {MAX_ANSWER_MIB} MiB.", "failed", status=502)
        yield chunk


def _retry_after_seconds(text: str) -> int:
    """Return the seconds that a provider wants the client to wait; 1 for a date or for nothing."""
    try:
        return min(max(1, math.ceil(float(text))), 3600)
    except (ValueError, OverflowError):
        return 1
