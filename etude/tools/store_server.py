"""`etude store`: a rollout store as a separate server, for runners and a trainer on any machine.

consumes       HTTP requests
produces       a journal: a file in a directory, or a PostgreSQL database
waits for      SIGINT or SIGTERM
unblocked by   a signal: the server takes no new requests, answers and journals the running ones, and ends. Runners
               keep their claims when the store is served again.
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

from etude.config.address import parse_address
from etude.config.env import etude_command, store_address
from etude.config.secrets import mask_text
from etude.errors import ConfigError
from etude.observe import configure_logging, make_console
from etude.store import open_store
from etude.store.http.listener import check_address
from etude.store.http.server import serve
from etude.store.http.server_thread import reachable_url
from etude.store.queue.keys import ADMIN_KEY, RUNNER_KEY, Keyring
from etude.store.queue.local_queue import LocalRolloutQueue

JOURNAL = "journal.sqlite"
POLL_S = 1.0
"""Seconds between two checks for the end; a signal interrupts the wait."""
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


def serve_store(where: str, listen: str, *, keys: bool = False, release_owner: bool = False) -> None:
    """Serve the store of a directory, or of a PostgreSQL database, until a signal.

    keys: print the keys of the trainer and of runners. release_owner: release the lease of the run's owner, so that the
    run can resume in another place.
    """
    configure_logging("info", mask=mask_text)
    host, port = parse_free_address(listen)
    _, key = store_address()
    directory = None if "://" in where else Path(where).expanduser()
    if directory is not None and directory.is_file():
        raise ConfigError(f"{directory} is a file; a store needs its own directory: `etude store stores/mine`.")
    has_key = bool(key) or (directory is not None and (directory / ADMIN_KEY).exists())
    if host not in LOOPBACK_HOSTS and not has_key:
        raise ConfigError(
            f"A store that listens on {host} can be reached from other machines, and needs an admin key of yours: "
            "ETUDE_STORE_KEY=$(python -c 'import secrets; print(secrets.token_urlsafe(32))'). Or listen on 127.0.0.1."
        )
    console = make_console()
    with ExitStack() as stack:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        journal = stack.enter_context(closing(open_store(where if directory is None else directory / JOURNAL)))
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


def parse_free_address(listen: str) -> tuple[str, int]:
    """Parse the address and the port of `--listen`; refuse those that are taken."""
    address = parse_address(listen, "--listen ")
    check_address(*address, "--listen ")
    return address


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second signal interrupts the running requests."""
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
    """Print the address, and the commands of runners and a trainer. New keys are printed once, old ones with `keys`."""
    command = etude_command()
    lines = [f"The store in {mask_text(source)} is served at {address}. Ctrl-C ends it; acknowledged writes stay."]
    if directory is None:
        admin = runner = "ETUDE_STORE_KEY=…"
        if keys or not has_key:
            admin, runner = (f"ETUDE_STORE_KEY={key}" for key in (keyring.admin, keyring.runner))
        if not has_key:
            lines.append(f"Its admin key is new, and is printed only now. Use it again with {admin}.")
        elif not keys:
            lines.append(
                "Its admin key is the one in ETUDE_STORE_KEY; runners' key is derived from it. `--keys` prints both."
            )
    else:
        admin, runner = (
            f"ETUDE_STORE_KEY=$(cat {shlex.quote(str(directory / name))})" for name in (ADMIN_KEY, RUNNER_KEY)
        )
        if not has_key:
            path = directory / ADMIN_KEY
            lines.append(f"Its admin key is new, is printed only now, and is stored in {path}: {keyring.admin}")
        elif keys:
            lines.append(f"Its admin key is {keyring.admin}, and the key of runners {keyring.runner}.")
    lines += [
        f"Runners:       {runner} {command} runner my_agent.py:solve --url {address}",
        f"A trainer:     {admin} {command} train … agent.path=my_agent.py:solve agent.runners=0 agent.store={address}",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
