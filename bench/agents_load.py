"""The load of `bench.agents` on a model endpoint: conversations of four calls over persistent connections.

Each call continues the one before. Requests are built as bytes once, so the client costs little next to the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from urllib.parse import urlsplit

from bench.agents_server import SAID

__all__ = ["TURNS", "Load", "answered", "body_of"]

TURNS = 4
"""Calls of an attempt."""
SYSTEM = "You guide travellers through the old town. Be short, be kind, and name the way from where they stand. " * 3


class Load:
    """Calls of many attempts."""

    def __init__(self, url: str, keys: Sequence[str]) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname, place.port
        self._bodies = [body_of(turn) for turn in range(TURNS)]
        self._calls = self._of(keys)

    def _of(self, keys: Sequence[str]) -> Iterator[tuple[bytes, ...]]:
        """Return the calls of each attempt, as bytes on the wire."""
        for key in keys:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nauthorization: Bearer {key}"
                "\r\ncontent-type: application/json\r\ncontent-length: "
            )
            yield tuple(f"{head}{len(body)}\r\n\r\n".encode() + body for body in self._bodies)

    async def closed(self, connections: int, seconds: float, warming: float) -> float:
        """Return answers a second; every connection sends its next request after its answer."""
        counted = 0
        began = time.perf_counter() + warming
        until = began + seconds

        async def ask() -> None:
            nonlocal counted
            reader, writer = await asyncio.open_connection(self._host, self._port)
            for calls in self._calls:
                for call in calls:
                    await answered(reader, writer, call)
                    counted += began < time.perf_counter() < until
                if time.perf_counter() > until:
                    break
            else:
                raise RuntimeError("There were too few attempts for so many seconds.")
            writer.close()

        await asyncio.gather(*(ask() for _ in range(connections)))
        return counted / seconds

    async def opened(self, rate: float, seconds: float, connections: int = 32) -> list[float]:
        """Return the seconds of each call from its due time; calls are due at this rate, regardless of earlier ones."""
        took: list[float] = []
        began = time.perf_counter() + 0.1
        pause, count = connections / rate, max(1, int(rate * seconds / connections / TURNS))

        async def ask(number: int) -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            due = began + number / rate
            for _ in range(count):
                for call in next(self._calls):
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    await answered(reader, writer, call)
                    took.append(time.perf_counter() - due)
                    due += pause
            writer.close()

        await asyncio.gather(*(ask(number) for number in range(connections)))
        return took


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: bytes) -> None:
    """Send a request, and read the whole answer, which must be a success."""
    writer.write(call)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head.decode()
    length = head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]
    await reader.readexactly(int(length))


def body_of(turn: int) -> bytes:
    """Return the request of a turn: the conversation so far, and one more question."""
    question = (
        f"{word} way is it to the gate, and what shall I see on the way there?" for word in cycle(("Which", "What"))
    )
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": next(question)}]
    for _ in range(turn):
        messages += [{"role": "assistant", "content": SAID}, {"role": "user", "content": next(question)}]
    return json.dumps({"model": "policy", "messages": messages}).encode()
