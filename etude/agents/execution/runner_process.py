"""What runs in a process that was started to play rollouts: one runner, joined to a desk by its server.

consumes       orders on standard input (first of all, what to play and where), and rollouts that it claims
produces       attempts that are handed in; what it says, on standard error
waits for      the desk
unblocked by   the order to stop, or SIGTERM: once to let what is under way end, twice to cancel it; and by the end of
               standard input, or of the process that started it, which end it at once, with all that it started
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from etude.agents import connect_queue
from etude.agents.agent import Agent, load_agent
from etude.agents.command import reaper
from etude.agents.execution.shutdown import bounded_exit, run_bounded
from etude.agents.runner import Runner, RunnerTimeouts
from etude.config.env import store_address
from etude.errors import ConfigError, EtudeError
from etude.observe.log import get_logger

__all__ = ["REFUSED", "STOP", "RunnerSpec", "join_store", "main", "resolve_store", "run_spec"]

log = get_logger("agents")

REFUSED = 2
"""The exit code of a process that had something to say against what it was asked, in the last line it wrote."""
EXIT_CANNOT_LOAD = 113
"""That of one which cannot play its agent at all, because it cannot be loaded."""
STOP = b"stop\n"


@dataclass(frozen=True)
class RunnerSpec:
    """What a runner's process is to do."""

    agent: Agent
    url: str
    key: str
    name: str
    max_concurrency: int
    timeouts: RunnerTimeouts


def join_store(
    agent: str,
    url: str = "",
    key: str = "",
    *,
    name: str = "",
    max_concurrency: int = 8,
    timeouts: RunnerTimeouts | None = None,
) -> None:
    """Be a runner of a desk that is served elsewhere, until SIGINT or SIGTERM: what `etude runner` does.

    agent: `module:name` or `path/to/file.py:name`. url, key: of the server, by default `ETUDE_STORE_URL` and
    `ETUDE_STORE_KEY`.
    """
    url, key = resolve_store(agent, url, key)
    run_spec(RunnerSpec(load_agent(agent), url, key, name, max_concurrency, timeouts or RunnerTimeouts()))


def resolve_store(agent: str, url: str = "", key: str = "") -> tuple[str, str]:
    """Where the store is whose rollouts are to be played, and the key to it; by default as the environment says."""
    default_url, default_key = store_address()
    url, key = url or default_url, key or default_key
    missing = [name for name, value in (("ETUDE_STORE_URL", url), ("ETUDE_STORE_KEY", key)) if not value]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"A runner was asked to play {agent}, and {' and '.join(missing)} {verb} not set: where the store is, and "
            "the key to it. `etude store`, and a run that waits for runners, say both when they start."
        )
    return url, key


def run_spec(spec: RunnerSpec, control: BinaryIO | None = None) -> None:
    """Play rollouts on this thread, the main one of its process, until it is told to stop."""
    with bounded_exit(spec.timeouts.cancel_s, REFUSED):
        run_bounded(_run(spec, control), spec.timeouts.cancel_s)


async def _run(spec: RunnerSpec, control: BinaryIO | None) -> None:
    queue = connect_queue(spec.url, spec.key)
    try:
        runner = Runner(
            queue,
            spec.agent,
            spec.name or None,
            max_concurrency=spec.max_concurrency,
            timeouts=spec.timeouts,
            store_url=spec.url,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, runner.stop)
        if control is not None:
            threading.Thread(
                target=_receive_control_messages, args=(control, runner), name="etude-orders", daemon=True
            ).start()
        log.info(
            "Plays %s for the store at %s, up to %d attempts at once. Ctrl-C lets what is under way end.",
            *(spec.agent.title, spec.url, spec.max_concurrency),
        )
        await runner.run()
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in sorted(runner.outcomes.items())) or "none"
        log.info("Stopped. Attempts played: %s.", counts)
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(spec.timeouts.cancel_s):
                await queue.close()


def main() -> None:
    """Be the runner that the first order on standard input speaks of."""
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s runner[{os.getpid()}] %(levelname)-5s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what an agent reads is not what this process is told
    reaper.add(os.getpgrp())
    try:
        spec = _load_spec(_read(control, int.from_bytes(_read(control, 8), "big")))
        run_spec(spec, control)
    except EtudeError as error:
        log.error("%s", error)
        sys.exit(REFUSED)
    finally:
        reaper.remove(os.getpgrp())  # whoever started this process ends what is left of it, and hears how it ended


def _load_spec(body: bytes) -> RunnerSpec:
    """What is asked; where it cannot be understood, as another try would not either, this process ends."""
    try:
        spec: RunnerSpec = pickle.loads(body)
    except Exception as error:  # an agent's file may raise anything while it is run
        log.error("%s", error if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}")
        sys.exit(EXIT_CANNOT_LOAD)
    return spec


def _read(control: BinaryIO, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = control.read(length - len(data))
        if not chunk:
            _kill_process_group()
        data += chunk
    return data


def _receive_control_messages(control: BinaryIO, runner: Runner) -> None:
    """Take orders while there is somebody to give them."""
    while message := control.readline():
        if message == STOP:
            runner.stop()
    _kill_process_group()


def _kill_process_group() -> None:
    """Nobody is there to play for: end this process and all that it started. Commands are the guard's to end."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
