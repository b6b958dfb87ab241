"""The events that a client reads from a server's stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

from etude.rollout.server_client import HttpClient

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


async def read_events(parts: Sequence[bytes]) -> list[int]:
    """Return the sizes of the events of a server that sends these parts, each in its own packet."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in (HEAD, *parts):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        try:
            return [len(event["text"]) async for _, event in client.stream_events("/", {})]
        finally:
            await client.close()


def test_a_separator_that_comes_in_parts_ends_an_event() -> None:
    event = b"data: " + json.dumps({"text": "abc"}).encode() + b"\r\n\r\n"
    parts = [(event * 2)[at : at + 1] for at in range(2 * len(event))]
    assert asyncio.run(read_events(parts)) == [3, 3]


def test_a_long_event_is_searched_once() -> None:
    """The routes of one answer are megabytes, and all servers of a pool share one event loop."""
    size = 8 << 20
    began = time.thread_time()
    assert asyncio.run(read_events([b'data: {"text": "' + b"x" * size, b'"}\n\n'])) == [size]
    assert time.thread_time() - began < 1.0
