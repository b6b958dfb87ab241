"""The replies of a server: the events of its stream, and those that make no sense."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest

from etude.rollout.health_check import HealthCheck
from etude.rollout.server_client import HttpClient
from etude.rollout.server_engine import ServerEngine
from etude.rollout.vllm import VllmBackend
from tests.rollout.late_server import SHAPE

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


@pytest.mark.parametrize("reply", ["[]", "null", '"ready"', '{"is_sleepy": 1}'])
def test_an_engine_whose_reply_makes_no_sense_is_not_taken_for_hanging(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.rollout.health_check.MAX_SILENCE", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + reply.encode())
        writer.close()

    async def check() -> bool:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            server = ServerEngine(url, VllmBackend(), SHAPE)
            health = HealthCheck(server)
            health.is_hung()
            assert health._probe_task is not None, "the first look sends a probe"
            await asyncio.wait({health._probe_task})
            await asyncio.sleep(0.25)
            is_hung = health.is_hung()
            health.reset()
            await server.close()
            return is_hung

    assert not asyncio.run(check())
