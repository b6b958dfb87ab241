"""A server in a thread of this process. It listens when `start_server` returns, and ends soon after `stop`."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any, Self, cast

import uvicorn

from etude.errors import StoreError
from etude.observe import get_logger
from etude.running_time import running_time
from etude.store.http.connection import KEPT_ALIVE_S, HttpConnection, HttpServerConfig
from etude.store.http.listener import bind

START_S, STOP_S = 30.0, 10.0
"""Seconds that the server may take to start, and to stop before requests are cut off."""
GRACEFUL_SHUTDOWN_S = 2
"""Seconds that requests under way get when the server stops."""
WILDCARD_URLS = ("http://0.0.0.0:", "http://[::]:")
UNROUTED_ADDRESS = "192.0.2.1"
"""An address of no machine (TEST-NET-1). A socket towards it shows the address by which this machine reaches others."""


class ServerThread:
    """A running server."""

    def __init__(self, server: _StoreServer, thread: threading.Thread, url: str, admin: str) -> None:
        self._server = server
        self._thread = thread
        self.url = url
        self.admin_key = admin
        """The admin key."""

    def stop(self) -> None:
        """Accept no more connections, answer the requests under way, and end. Requests that take too long are cut
        off."""
        self._server.should_exit = True
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise StoreError(
                f"The server at {self.url} did not stop within {2 * STOP_S:g} seconds; its thread still runs."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


def start_server(app: Any, host: str, port: int, admin: str, closing: asyncio.Event) -> ServerThread:
    """Serve an app from a thread. The event `closing` is set when the server stops, to end waiting requests."""
    listener = bind(host, port)
    config = HttpServerConfig(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEPT_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    server = _StoreServer(config, closing)
    thread = threading.Thread(target=server.run, args=([listener],), name="etude-store", daemon=True)
    thread.start()
    until = time.monotonic() + START_S
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.005)
    address = f"[{host}]" if ":" in host else host
    handle = ServerThread(
        server, thread, f"http://{address}:{listener.getsockname()[1] if server.started else port}", admin
    )
    if not server.started:
        handle.stop()
        listener.close()
        raise StoreError(f"The server at {handle.url} did not start within {START_S:g} seconds; the log says more.")
    get_logger("store").info("The store is served at %s.", handle.url)
    return handle


def reachable_url(url: str, towards: str = UNROUTED_ADDRESS) -> str:
    """Return the URL by which other machines reach a server here. If it listens on every interface, use the address of
    this machine on the route to `towards`."""
    prefix = next((wildcard for wildcard in WILDCARD_URLS if url.startswith(wildcard)), None)
    if prefix is None:
        return url
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # nothing is sent
            address = probe.getsockname()[0]
    except OSError:
        address = socket.gethostname()
    return f"http://{address}:{url.removeprefix(prefix)}"


class _StoreServer(uvicorn.Server):
    """A server that ends waiting requests before it shuts down, and checks its connections once a second."""

    def __init__(self, config: HttpServerConfig, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing
        self._limiter = config.limiter

    async def on_tick(self, counter: int) -> bool:
        """Run ten times a second. Once a second, enforce the timeouts and the limits of the connections."""
        if counter % 10 == 0:
            now = running_time()
            for connection in list(self.server_state.connections):
                cast(HttpConnection, connection).check_timeouts(now)
            self._limiter.enforce_limits()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End waiting requests and stop."""
        self._closing.set()
        await super().shutdown(sockets)
