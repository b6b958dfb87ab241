"""A PostgreSQL server for tests: the one in the package `pgserver`, started as a user who is not root."""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.components import require

ROOM_S = 60.0
"""Seconds that a server may take to start or to end on a busy machine."""
_numbers = itertools.count()
_running: dict[str, subprocess.Popen[bytes]] = {}
"""Server processes by their folders."""


def new_database() -> str:
    """Return the address of an empty database on the one server of this process; skip the test without a server."""
    require("postgres")
    return made_database(_host(), f"journal_{next(_numbers)}")


@cache
def _host() -> str:
    """Start the server of this process, which ends with it."""
    running = ExitStack()
    atexit.register(running.close)
    return running.enter_context(server())


@cache
def _programs() -> Path:
    """Return the directory of the server's programs: in the package, or a copy if its user may not read the package."""
    spec = find_spec("pgserver")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    if _server_user() and not all(place.stat().st_mode & 0o001 for place in package.parents):
        place = Path(tempfile.mkdtemp(prefix="etude-pgserver-"))
        atexit.register(shutil.rmtree, place)
        place.chmod(0o755)
        for folder in package.parent.glob("pgserver*"):  # its libraries are in a folder beside it
            if folder.is_dir() and folder.suffix != ".dist-info":
                shutil.copytree(folder, place / folder.name, symlinks=True)
        package = place / package.name
    return package / "pginstall" / "bin"


def _server_user() -> dict[str, Any]:
    """Return the user that runs the server, because root may not."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@contextmanager
def server() -> Iterator[str]:
    """Start a server on a socket in a new folder, which is removed at its end; yield the folder, which is its host."""
    directory = Path(tempfile.mkdtemp(prefix="etude-postgres-"))
    programs = _programs()
    who, environment = _server_user(), _environment()
    if who:
        os.chown(directory, who["user"], who["group"])
    try:
        making = [
            programs / "initdb",
            "-D",
            directory / "data",
            "-A",
            "trust",
            "-U",
            "etude",
            "-E",
            "utf8",
            "--no-sync",
        ]
        subprocess.run(making, check=True, capture_output=True, cwd=directory, env=environment, timeout=ROOM_S, **who)
        try:
            start_server(str(directory))
            yield str(directory)
        finally:
            ended(str(directory), signal.SIGINT)  # at once, even with clients connected
    finally:
        shutil.rmtree(directory)


def start_server(host: str) -> None:
    """Start the server of this folder."""
    directory = Path(host)
    serving = [_programs() / "postgres", "-D", directory / "data", "-k", directory, "-c", "listen_addresses=", "-F"]
    with (directory / "log").open("ab") as log:
        running = subprocess.Popen(serving, cwd=directory, env=_environment(), stdout=log, stderr=log, **_server_user())
    _running[host] = running
    _ready(directory, running)


def ended(host: str, how: signal.Signals) -> None:
    """End the server of this folder: with SIGQUIT as in a crash."""
    running = _running[host]
    running.send_signal(how)
    try:
        running.wait(ROOM_S)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def _environment() -> dict[str, str]:
    return {"PATH": str(_programs()), "LC_ALL": "C"}


def _ready(directory: Path, running: subprocess.Popen[bytes]) -> None:
    import psycopg

    deadline = time.monotonic() + ROOM_S
    while True:
        try:
            psycopg.connect(host=str(directory), user="etude", dbname="postgres").close()
        except psycopg.OperationalError:
            assert running.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.05)
        else:
            return


def made_database(host: str, name: str) -> str:
    """Return the address of a database; create it if needed."""
    import psycopg

    with closing(psycopg.connect(host=host, user="etude", dbname="postgres", autocommit=True)) as ask:
        if ask.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
            ask.execute(f'CREATE DATABASE "{name}"')
    return f"postgresql://etude@/{name}?host={host}"
