"""A server of OpenEnv for tests, in a Python of its own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.rollout.python_environments import PackagePins
from tests.components import require_hub
from tests.waits import blocked_until

__all__ = ["echo_server"]

SERVER = PackagePins("openenv-server", ("openenv==0.10.0",))
"""The packages of the server."""


@contextmanager
def echo_server(directory: Path) -> Iterator[str]:
    """Serve the environment that `openenv init` makes, which repeats a message; it takes one session at a time."""
    python = require_hub("openenv", SERVER).parent
    made = subprocess.run([python / "openenv", "init", "echo_demo"], cwd=directory, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python / "uvicorn"), "server.app:app", "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, cwd=directory / "echo_demo") as server:
        try:
            blocked_until(lambda: server.poll() is None and answers(port), 120)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
