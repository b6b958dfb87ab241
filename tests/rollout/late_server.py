"""A server with vLLM's HTTP interface that runs in the test's own process and sends what the test tells it to.

It has no model. The test decides which tokens come, in which piece, and when: also after newer weights have come.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_engine import ModelShape, ServerEngine
from etude.rollout.vllm import VllmBackend

__all__ = ["LateServer", "late_server", "serving"]

SHAPE = ModelShape(vocab_size=97, context_length=64, kv_values_per_token=1)


class LateServer:
    """The server, and the engine that sends requests to it."""

    def __init__(self) -> None:
        self.engine: ServerEngine
        self.requests: list[dict[str, Any]] = []
        """The bodies of the requests for answers so far."""
        self.answers: dict[str, tuple[int, str]] = {}
        """The status and the body of the answer to any other request, by path; 200 and nothing where it is not set."""
        self.posts: list[str] = []
        """The paths of all other requests so far, with the mode of a pause."""
        self._replies: list[asyncio.StreamWriter] = []

    async def requested(self, count: int = 1) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(10):
            while len(self._replies) < count:
                await asyncio.sleep(0.001)

    async def send(self, *pieces: Sequence[int], request: int = 0, finish: str | None = None, **more: Any) -> None:
        """Send these pieces of tokens in one write, and wait until the engine has read them."""
        before = self.engine.new_tokens
        events = [
            _event(piece, finish if index == len(pieces) - 1 else None, more) for index, piece in enumerate(pieces)
        ]
        data = b"".join(events)
        writer = self._replies[request]
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        if finish is not None:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        async with asyncio.timeout(10):
            while self.engine.new_tokens < before + sum(map(len, pieces)):
                await asyncio.sleep(0.001)

    def end(self, request: int = 0) -> None:
        """End a reply that has no tokens."""
        self._replies[request].write(b"0\r\n\r\n")

    def publish(self, version: int) -> None:
        """Give the server other weights, as the weight sender does."""
        self.engine.withdraw()
        self.engine.record_version(version)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin the reply to a request for an answer; reply to any other at once."""
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(headers.partition("content-length:")[2].partition("\r\n")[0] or 0)
        body, path = await reader.readexactly(length), headers.split()[1].partition("?")[0]
        if not path.endswith("/generate"):
            message = json.loads(body or b"{}")
            mode = message.get("mode") if path == "/pause_generation" else None
            self.posts.append(path if mode is None else f"{path} {mode}")
            status, text = self.reply(path, message)
            writer.write(
                f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode()
            )
            writer.close()
            return
        self.requests.append(json.loads(body))
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        await writer.drain()
        self._replies.append(writer)

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return the status and the body of the reply to any request but one for an answer."""
        return self.answers.get(path, (200, ""))

    def close(self) -> None:
        """Close the connections."""
        for reply in self._replies:
            reply.close()


S = TypeVar("S", bound=LateServer)


@asynccontextmanager
async def late_server(backend: ServerBackend | None = None) -> AsyncGenerator[LateServer, None]:
    """Start a server, with the weights of version 0. backend: vLLM's unless it is given."""
    async with serving(LateServer(), backend) as server:
        yield server


@asynccontextmanager
async def serving(server: S, backend: ServerBackend | None = None) -> AsyncGenerator[S, None]:
    """Start this server, and give it its engine."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server.engine = ServerEngine(f"http://127.0.0.1:{port}", backend or VllmBackend(), SHAPE)
    try:
        yield server
    finally:
        await server.engine.close()
        server.close()
        listener.close()


def _event(tokens: Sequence[int], finish: str | None, more: dict[str, Any]) -> bytes:
    content = [{"token_id": token, "logprob": -1.0, "top_logprobs": []} for token in tokens]
    choice = {"token_ids": list(tokens), "finish_reason": finish, "logprobs": {"content": content}}
    return f"data: {json.dumps({'choices': [choice | (more if finish else {})]})}\n\n".encode()
