"""A small OpenAI-compatible endpoint on loopback: it replies as a test wants, and records the requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """The reply to one request."""

    text: str | None = "Fine.\nScore: 5"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """Instead of a completion of `text`."""
    seconds: float = 0.0
    """The seconds until the reply."""
    usage: Any = None


@dataclass
class Served:
    """The endpoint as a test sees it."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The requests' bodies, in order."""
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    max_concurrency: int = 0
    """The most requests at the same time."""
    connections: set[tuple[str, int]] = field(default_factory=set)


@contextmanager
def serving(answer: Callable[[int, dict[str, Any]], Reply]) -> Iterator[Served]:
    """Serve while the block runs. `answer` returns the reply to the n-th request, with this body."""
    lock, under_way = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                under_way[0] += 1
                served.max_concurrency = max(served.max_concurrency, under_way[0])
                served.requests.append({**body, "path": self.path})
                served.headers.append({name.lower(): value for name, value in self.headers.items()})
                served.times.append(time.monotonic())
                served.connections.add(self.client_address)
                n = len(served.requests)
            reply = answer(n, body)
            time.sleep(reply.seconds)
            completion = {"choices": [{"message": {"role": "assistant", "content": reply.text}}], "usage": reply.usage}
            text = json.dumps(completion).encode() if reply.body is None else reply.body
            with lock:
                under_way[0] -= 1
            try:
                self.send_response(reply.status)
                for name, value in {"content-length": str(len(text)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)
            except ConnectionError:
                pass  # the client no longer waits

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
