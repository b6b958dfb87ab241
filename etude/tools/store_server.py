"""`etude store`: a store on its own, which runners and a trainer join from wherever they are.

consumes       what is asked of it over HTTP
produces       a journal: a file in a directory, or a PostgreSQL database
waits for      SIGINT or SIGTERM
unblocked by   one of these: it hears nobody new, answers those it heard, writes that down, and ends. Who was told of a
               rollout has it still when the store is served again.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.config.env import etude_command, store_address
from etude.config.secrets import mask_text
from etude.errors import ConfigError
from etude.observe import configure_logging, make_console
from etude.store import open_store
from etude.store.keys import ADMIN_KEY, RUNNER_KEY, Keyring
from etude.store.local_queue import LocalRolloutQueue
from etude.store.server import serve
from etude.store.server_thread import reachable_url

__all__ = ["POLL_S", "parse_address", "serve_store", "stop_on_signal"]

JOURNAL = "journal.sqlite"
POLL_S = 1.0
"""Seconds between two looks at whether it is to stop; a signal is heard at once."""
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


def serve_store(where: str, listen: str, *, keys: bool = False, release_owner: bool = False) -> None:
    """Serve the store in a directory, or in the PostgreSQL database of an address, until it is told to stop. keys:
    show those that let others in. release_owner: let the run that it keeps be taken up in another place."""
    configure_logging("info", mask=mask_text)
    host, port = parse_address(listen)
    _, key = store_address()
    directory = None if "://" in where else Path(where).expanduser()
    if directory is not None and directory.is_file():
        raise ConfigError(f"{directory} is a file; a store wants a directory of its own: `etude store stores/mine`.")
    has_key = bool(key) or (directory is not None and (directory / ADMIN_KEY).exists())
    if host not in LOOPBACK_HOSTS and not has_key:
        raise ConfigError(
            f"A store that listens on {host} can be reached from other machines, so its admin key is yours to give: "
            "ETUDE_STORE_KEY=$(python -c 'import secrets; print(secrets.token_urlsafe(32))'). Or listen on 127.0.0.1."
        )
    console = make_console()
    with ExitStack() as stack:
        journal = stack.enter_context(closing(open_store(where if directory is None else _file_in(directory))))
        keyring = Keyring(admin=key) if directory is None else Keyring.load_or_create(directory, key)
        queue = LocalRolloutQueue(journal, keyring)
        stack.callback(lambda: asyncio.run(queue.close()))
        if release_owner:
            asyncio.run(queue.release_owner())
        stopping = stack.enter_context(stop_on_signal())
        serving = stack.enter_context(serve(queue, keyring, host=host, port=port))
        address = reachable_url(serving.url)
        _introduce(
            console,
            where if directory is None else str(directory),
            address,
            keyring,
            directory,
            has_key=has_key,
            keys=keys,
        )
        while not stopping.wait(POLL_S):
            pass
        serving.stop()
        statistics = asyncio.run(queue.statistics())
    message = (
        f"Stopped. {statistics['queued']:.0f} rollouts are queued and {statistics['running']:.0f} under way; all of it "
        "is written."
    )
    console.print(Text(message), soft_wrap=True)


def parse_address(listen: str) -> tuple[str, int]:
    """The address and the port that `--listen` names."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen takes an address and a port, such as 127.0.0.1:8700, and '{listen}' is none.")
    return host.strip("[]"), int(port)


def _file_in(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory / JOURNAL


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Set by the first SIGINT or SIGTERM; the second ends the wait for whoever is still being answered."""
    stopping = threading.Event()

    def stop(number: int, frame: object) -> None:  # noqa: ARG001
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _introduce(
    console: Console, source: str, address: str, keyring: Keyring, directory: Path | None, *, has_key: bool, keys: bool
) -> None:
    """Where it is, and how others join it. Keys that were made now are shown, and later where they are asked for."""
    command = etude_command()
    lines = [f"The store in {mask_text(source)} is served at {address}. Ctrl-C ends it; what it acknowledged stays."]
    if directory is None:
        admin = runner = "ETUDE_STORE_KEY=…"
        if keys or not has_key:
            admin, runner = (f"ETUDE_STORE_KEY={key}" for key in (keyring.admin, keyring.runner))
        if not has_key:
            lines.append(f"Its admin key was made now and is shown this once. To keep it, start it with {admin}.")
        elif not keys:
            lines.append(
                "Its admin key is the one in ETUDE_STORE_KEY, and that of runners follows from it: `--keys` shows both."
            )
    else:
        admin, runner = (
            f"ETUDE_STORE_KEY=$(cat {shlex.quote(str(directory / name))})" for name in (ADMIN_KEY, RUNNER_KEY)
        )
        if not has_key:
            path = directory / ADMIN_KEY
            lines.append(f"Its admin key was made now, is shown this once, and lies in {path}: {keyring.admin}")
        elif keys:
            lines.append(f"Its admin key is {keyring.admin}, and that of runners {keyring.runner}.")
    lines += [
        f"Runners join:  {runner} {command} runner my_agent.py:solve --url {address}",
        f"A trainer:     {admin} {command} train … agent.path=my_agent.py:solve agent.runners=0 agent.store={address}",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
