"""The HTTP client of a model judge, for an OpenAI-compatible endpoint: it retries, limits its rate and counts the cost.

The client retries a failed connection, a status of 408, 409, 425, 429 or 5xx, and a reply that cannot be used. Between
tries it waits as long as the server's `Retry-After` says. Without that header each wait doubles, and half of it is
random, so that many callers do not return at once. Until `Retry-After` has passed, no call is sent. A `Retry-After`
over `MAX_RETRY_AFTER_S` fails at once.

Connections stay open while calls run in their event loop. The last call closes them, so the client has no `close`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Any, TypeVar

import httpx2

from etude.config.secrets import MASK, mask_text
from etude.errors import RewardError
from etude.observe import Metrics, Sum, get_logger
from etude.rewards.base import CapacityLimiter

RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""The HTTP statuses after which another try may succeed."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Seconds of the first wait between two tries, and of the longest wait without a `Retry-After`."""
MAX_RETRY_AFTER_S = 300.0
"""Seconds of the longest `Retry-After` that the client waits for."""
MAX_QUOTED_CHARS = 200
"""The most characters that an error quotes from a server's reply."""
USAGE = ("requests", "retries", "prompt_tokens", "completion_tokens")
"""The counts of the calls, as metrics."""
R = TypeVar("R")


class UnusableReplyError(Exception):
    """A failed try. The message is the end of a sentence about the endpoint."""


@dataclass
class JudgeClient:
    """The client of one endpoint. Any number of calls may run at once, in any event loop."""

    url: str
    key: str | None = field(repr=False)
    max_concurrency: int
    retries: int
    timeout: float
    """Seconds of one try."""
    requests_per_minute: float | None
    tokens_per_minute: float | None

    def __post_init__(self) -> None:
        self._limiter = CapacityLimiter(self.max_concurrency)
        self._ssl_context = httpx2.create_ssl_context() if self.url.startswith("https") else False
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx2.AsyncClient, int]] = {}
        self._lock = Lock()
        self._usage = Counter[str]()
        self._random = random.Random()
        self._next_start = self._blocked_until = 0.0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot and for the request rate. The connections stay open while a call waits."""
        async with self._client(), self._limiter.slot():
            await self._wait_for_rate()
            yield

    async def complete(self, body: Mapping[str, Any], read: Callable[[str], R]) -> R:
        """Complete a chat within a `slot`, and return what `read` makes of the reply.

        `read` raises `UnusableReplyError` for a reply that needs another try. Raises `RewardError` if the server
        refuses the request, or after the last try.
        """
        async with self._client() as client:
            for attempt in range(self.retries + 1):
                if attempt:
                    self._add_usage(retries=1)
                    await asyncio.sleep(self._backoff_seconds(attempt))
                    await self._wait_for_rate()
                try:
                    return read(await self._send_request(client, body))
                except UnusableReplyError as error:
                    failure = error
        message = f"{mask_text(self.url)} gave no judgement in {self.retries + 1} tries; the last time {failure}"
        raise RewardError(f"{message.rstrip('.')}.")

    def pop_metrics(self, prices: tuple[float, float]) -> Metrics:
        """Return the cost since the last `pop_metrics`. prices: of a million prompt tokens and completion tokens."""
        with self._lock:
            usage = self._usage
            self._usage = Counter[str]()
        if not usage["requests"]:
            return Metrics()
        cost = (usage["prompt_tokens"] * prices[0] + usage["completion_tokens"] * prices[1]) / 1e6
        counts = {f"judge/{name}": Sum.of(usage[name]) for name in USAGE}
        return Metrics(counts | ({"judge/cost": Sum.of(cost)} if any(prices) else {}))

    # -- one try ------------------------------------------------------------------------------------------------------

    async def _send_request(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> str:
        """Send one request and return the text of the reply."""
        self._add_usage(requests=1)
        try:
            async with asyncio.timeout(self.timeout):
                response = await client.post("chat/completions", json=dict(body))
        except TimeoutError as error:
            raise UnusableReplyError(f"it did not answer within {self.timeout:g} seconds") from error
        except httpx2.HTTPError as error:
            raise UnusableReplyError(
                f"it could not be reached: {self._quote(str(error) or type(error).__name__)}"
            ) from error
        if response.status_code in RETRYABLE_STATUSES:
            self._apply_retry_after(response.headers.get("retry-after"))
            raise UnusableReplyError(f"it answered {response.status_code}: {self._quote(response.text)}")
        if response.status_code != httpx2.codes.OK:
            raise RewardError(
                f"{mask_text(self.url)} refuses the request with {response.status_code}: "
                f"{self._quote(response.text)}. Check `base_url`, `model` and `api_key`."
            )
        return self._read_reply(response)

    def _read_reply(self, response: httpx2.Response) -> str:
        try:
            reply = response.json()
            text = reply["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UnusableReplyError(f"its reply is not a chat completion: {self._quote(response.text)}") from error
        usage = reply.get("usage")
        used = [_count_of(usage, name) for name in ("prompt_tokens", "completion_tokens")]
        self._add_usage(prompt_tokens=used[0], completion_tokens=used[1])
        if self.tokens_per_minute:
            self._next_start = max(self._next_start, time.monotonic()) + 60.0 * sum(used) / self.tokens_per_minute
        if not isinstance(text, str):
            raise UnusableReplyError("its reply has no text")
        return text

    def _quote(self, text: str) -> str:
        """Return a server's text for a message, shortened and without secrets."""
        plain = " ".join(text.split())
        plain = plain.replace(self.key, MASK) if self.key else plain
        return (
            mask_text(plain if len(plain) <= MAX_QUOTED_CHARS else f"{plain[:MAX_QUOTED_CHARS]}…", yaml=False)
            or "nothing"
        )

    def _add_usage(self, **counts: int) -> None:
        with self._lock:
            self._usage.update(counts)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _wait_for_rate(self) -> None:
        """Wait until the rate limits and `Retry-After` allow this request."""
        now = time.monotonic()
        start = max(now, self._next_start, self._blocked_until)
        if self.requests_per_minute:
            self._next_start = start + 60.0 / self.requests_per_minute
        while (remaining := max(start, self._blocked_until) - time.monotonic()) > 0:
            await asyncio.sleep(remaining)

    def _backoff_seconds(self, attempt: int) -> float:
        """Return the seconds before another try, half of which are random."""
        longest: float = min(FIRST_BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S)
        return longest * (0.5 + self._random.random() / 2)

    def _apply_retry_after(self, header: str | None) -> None:
        """Block all requests until the server's `Retry-After` has passed, which is a number of seconds or a date."""
        if header is None:
            return
        try:
            seconds = float(header)
        except ValueError:
            try:
                seconds = parsedate_to_datetime(header).timestamp() - time.time()
            except (ValueError, OverflowError):
                return
        if not math.isfinite(seconds):
            return
        if seconds > MAX_RETRY_AFTER_S:
            raise RewardError(
                f"{mask_text(self.url)} asks for a wait of {seconds:.0f} seconds, and {MAX_RETRY_AFTER_S:.0f} is the "
                "most that a judge waits. Lower `requests_per_minute` or `tokens_per_minute`, or resume the run later."
            )
        until = time.monotonic() + max(seconds, 0.0)
        if until > self._blocked_until + 1.0 and seconds > 1.0:  # many calls get the same `Retry-After`
            get_logger("rewards").warning("%s asks all clients to wait for %.0f seconds.", mask_text(self.url), seconds)
        self._blocked_until = max(self._blocked_until, until)

    # -- connections --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Open the HTTP client of this event loop for the first call, and close it after the last one."""
        loop = asyncio.get_running_loop()
        client, users = self._clients.get(loop) or (self._open_client(), 0)
        self._clients[loop] = client, users + 1
        try:
            yield client
        finally:
            client, users = self._clients.pop(loop)
            if users > 1:
                self._clients[loop] = client, users - 1
            else:
                await client.aclose()

    def _open_client(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(
            base_url=self.url.rstrip("/") + "/",
            headers=headers,
            timeout=None,
            limits=limits,
            verify=self._ssl_context,
        )


def _count_of(usage: Any, name: str) -> int:
    """Return a token count of a server's `usage`, or 0 if the server does not count."""
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and value >= 0 else 0
