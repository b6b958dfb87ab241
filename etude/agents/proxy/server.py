"""An OpenAI-compatible server that speaks of token ids, as an upstream: vLLM, or whatever answers like it.

It is asked at its /completions, with ids for a prompt, `return_token_ids` and `logprobs`. What it has to be started
with for training is that its log-probs are those that it sampled by (vLLM: `--logprobs-mode processed_logprobs`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray

from etude.agents.proxy.events import data_of, events
from etude.chat.tokenizer import Ids
from etude.errors import DataError, EngineError
from etude.records import Completion, SamplingParams

__all__ = ["TokenServer"]

AS_ID = "token_id:"
"""How a server names a token by its id, where it is asked to."""
CONNECT = 10.0
"""Seconds to reach a server."""
SHOWN = 300
"""Characters of what a server says that an error repeats."""


@dataclass(frozen=True, slots=True, eq=False)
class _Gained:
    """What a streamed answer has gained."""

    ids: Ids
    logp: NDArray[np.float32]
    version: Ids
    completion: Completion | None = None


class TokenServer:
    """Samples by a server. Used on one event loop."""

    def __init__(self, url: str, model: str, *, key: str = "", version: int = 0, timeout_s: float = 600.0) -> None:
        """url: up to and with /v1. timeout_s: how long it may be silent."""
        self.version = version
        """Of the weights that it samples with, which whoever publishes to it keeps up to date. An answer that was begun
        with older ones is taken to be all theirs; a streamed one is told token by token."""
        self._url, self._model, self._timeout = url.rstrip("/"), model, timeout_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        """Let go of its connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def generate(self, prompt: Ids, sampling: SamplingParams) -> Completion:
        """Sample one continuation."""
        version = self.version
        async with self._asked(self._body(prompt, sampling, stream=False)) as response:
            told = self._read(await response.aread())
        whole = _Whole(sampling.top_logprobs)
        whole.add(self._choice(told), version)
        return whole.completion()

    async def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[_Gained, None]:
        """The same, as it comes."""
        whole = _Whole(sampling.top_logprobs)
        async with self._asked(self._body(prompt, sampling, stream=True)) as response:
            try:
                async for event in events(response.aiter_bytes()):
                    data = data_of(event)
                    if not data or data == "[DONE]":
                        continue
                    told = self._read(data)
                    if told.get("choices"):
                        gained = whole.add(self._choice(told), self.version)
                        yield replace(gained, completion=whole.completion()) if whole.finish else gained
            except httpx2.HTTPError as error:
                raise self._away(error) from error
        if not whole.finish:
            raise EngineError(f"The server at {self._url} ended an answer without saying how it finished.")

    @asynccontextmanager
    async def _asked(self, body: Mapping[str, Any]) -> AsyncIterator[httpx2.Response]:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
            timeout = httpx2.Timeout(self._timeout, connect=CONNECT)
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)
        request = self._client.build_request("POST", f"{self._url}/completions", json=dict(body))
        try:
            response = await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise self._away(error) from error
        try:
            if response.status_code != httpx2.codes.OK:
                said = (await response.aread())[:SHOWN].decode(errors="replace")
                told = f"The server at {self._url} answered {response.status_code}: {said}"
                refused = response.status_code in (400, 413, 422)
                raise DataError(told) if refused else EngineError(told)
            yield response
        finally:
            await asyncio.shield(response.aclose())

    def _body(self, prompt: Ids, sampling: SamplingParams, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt.tolist(),
            "stream": stream,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.stop_ids:
            body["stop_token_ids"] = list(sampling.stop_ids)
        if sampling.logit_bias:
            body["logit_bias"] = {str(id): max(bias, -100.0) for id, bias in sampling.logit_bias.items()}
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    def _read(self, data: str | bytes) -> dict[str, Any]:
        try:
            told = json.loads(data)
        except ValueError as error:
            raise EngineError(f"The server at {self._url} answered what is not JSON: {data[:SHOWN]!r}") from error
        if not isinstance(told, dict) or "error" in told:
            raise EngineError(f"The server at {self._url} says: {str(told)[:SHOWN]}")
        return told

    def _choice(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        choice: Mapping[str, Any] = told["choices"][0]
        ids, scores = choice.get("token_ids"), choice.get("logprobs") or {}
        logp = scores.get("token_logprobs") or []
        if ids is None or len(ids) != len(logp):
            raise EngineError(
                f"The server at {self._url} does not tell the ids of its tokens with a log-prob each (it told "
                f"{'no ids' if ids is None else len(ids)}, and {len(logp)} log-probs). Use one that knows "
                "`return_token_ids`, such as vLLM 0.10.2 and later."
            )
        return choice

    def _away(self, error: Exception) -> EngineError:
        return EngineError(f"The server at {self._url} could not be asked: {str(error) or type(error).__name__}")


class _Whole:
    """An answer as it comes together."""

    def __init__(self, top: int) -> None:
        self.finish = ""
        self._top = top
        self._parts: list[_Gained] = []
        self._text = ""
        self._tops: list[list[tuple[float, int]]] = []

    def add(self, choice: Mapping[str, Any], version: int) -> _Gained:
        """What came."""
        scores = choice.get("logprobs") or {}
        ids = np.array(choice["token_ids"], np.int32)
        logp = np.array(scores.get("token_logprobs") or [], np.float32)
        gained = _Gained(ids, logp, np.full(len(ids), version, np.int32))
        self._parts.append(gained)
        self._text += choice.get("text") or ""
        self.finish = choice.get("finish_reason") or self.finish
        for likely in scores.get("top_logprobs") or [] if self._top else []:
            named = [(float(logp), int(name.removeprefix(AS_ID))) for name, logp in likely.items()]
            if not named:
                raise EngineError("The server does not tell the likeliest tokens beside those it sampled.")
            best = sorted(named, reverse=True)[: self._top]
            self._tops.append(best + [(-math.inf, best[-1][1])] * (self._top - len(best)))
        return gained

    def completion(self) -> Completion:
        """All of it."""
        finish = self.finish if self.finish in ("stop", "length") else "abort"
        tops = np.array(self._tops, np.float64).reshape(-1, self._top, 2) if self._top else None
        return Completion(
            ids=np.concatenate([each.ids for each in self._parts]),
            logp=np.concatenate([each.logp for each in self._parts]),
            version=np.concatenate([each.version for each in self._parts]),
            finish=finish,
            text=self._text,
            top_ids=None if tops is None else tops[..., 1].astype(np.int32),
            top_logp=None if tops is None else tops[..., 0].astype(np.float32),
        )
