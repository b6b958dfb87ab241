"""The program of a runner process: one runner, which joins a rollout queue by its server.

consumes       control messages on standard input (first the agent and the server's address), and claimed rollouts
produces       reported attempts; log lines on standard error
waits for      the rollout queue
unblocked by   a stop message or SIGTERM: the first lets active attempts end, the second cancels them; and by the end of
               standard input or of the parent process, which kill this process and all that it started
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from etude.agents.agent import Agent
from etude.agents.execution.shutdown import bounded_exit, run_bounded
from etude.agents.runner import Runner, RunnerTimeouts
from etude.agents.source_agents import load_agents, split_names
from etude.child_process import reaper
from etude.config.env import read_role, store_address
from etude.errors import ConfigError, EtudeError
from etude.observe.log import get_logger
from etude.store.http.remote_queue import RemoteRolloutQueue

log = get_logger("agents")

REFUSED = 2
"""The exit code of a process that refused its task; the last line of its log says why."""
EXIT_CANNOT_LOAD = 113
"""The exit code of a process that cannot load its agent."""
STOP = b"stop\n"


@dataclass(frozen=True)
class RunnerSpec:
    """The task of a runner process."""

    agent: Agent
    url: str
    key: str
    name: str
    max_concurrency: int
    timeouts: RunnerTimeouts


def join_store(
    agent: str | Sequence[str],
    url: str = "",
    key: str = "",
    *,
    name: str = "",
    max_concurrency: int = 8,
    timeouts: RunnerTimeouts | None = None,
) -> None:
    """Run a runner for a store that is served elsewhere, until SIGINT or SIGTERM: the command `etude runner`.

    agent: `module:name` or `path/to/file.py:name`; in a mix several, each after its data source: `shop=module:name`.
    url, key: of the server, by default `ETUDE_STORE_URL` and `ETUDE_STORE_KEY`.
    """
    names = [agent] if isinstance(agent, str) else agent
    url, key = resolve_store(" ".join(names), url, key)
    loaded = load_agents(*split_names(names))
    assert loaded is not None, "there is a name"
    run_spec(RunnerSpec(loaded, url, key, name, max_concurrency, timeouts or RunnerTimeouts()))


def serve_if_runner(agent: Agent, max_concurrency: int) -> bool:
    """Run this process as a runner if ETUDE_ROLE=runner, until its trainer stops it; return True if it was one.

    Several processes of one program share a training. ETUDE_ROLE=train serves the store and the model, and runs no
    agent. ETUDE_ROLE=runner, with ETUDE_STORE_URL and ETUDE_STORE_KEY, executes its rollouts.
    """
    role = read_role()
    if role == "store":
        raise ConfigError(
            "ETUDE_ROLE=store was given to a program that trains. A store is served by `etude store DIRECTORY`, and "
            "joined with `agent.store`."
        )
    if role != "runner":
        return False
    url, key = resolve_store(agent.title)
    run_spec(RunnerSpec(agent, url, key, "", max_concurrency, RunnerTimeouts()))
    return True


def resolve_store(agent: str, url: str = "", key: str = "") -> tuple[str, str]:
    """Return the address and the key of the store, by default from the environment."""
    default_url, default_key = store_address()
    url, key = url or default_url, key or default_key
    missing = [name for name, value in (("ETUDE_STORE_URL", url), ("ETUDE_STORE_KEY", key)) if not value]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"A runner of {agent} needs the store's address and key, but {' and '.join(missing)} {verb} not set. "
            "`etude store`, and a run that waits for runners, print both when they start."
        )
    return url, key


def run_spec(spec: RunnerSpec, control: BinaryIO | None = None) -> None:
    """Play rollouts on this thread, the main one of its process, until stopped."""
    with bounded_exit(spec.timeouts.cancel_s, REFUSED):
        run_bounded(_run(spec, control), spec.timeouts.cancel_s)


async def _run(spec: RunnerSpec, control: BinaryIO | None) -> None:
    queue = RemoteRolloutQueue(spec.url, spec.key)
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
            "Plays %s for the store at %s, up to %d attempts at once. Ctrl-C lets active attempts end.",
            spec.agent.title,
            spec.url,
            spec.max_concurrency,
        )
        await runner.run()
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in sorted(runner.outcomes.items())) or "none"
        log.info("Stopped. Attempts played: %s.", counts)
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(spec.timeouts.cancel_s):
                await queue.close()


def main() -> None:
    """Run the runner that the first control message on standard input describes."""
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s runner[{os.getpid()}] %(levelname)-5s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # an agent that reads standard input must not read control messages
    reaper.add(os.getpgrp())
    try:
        spec = _load_spec(_read(control, int.from_bytes(_read(control, 8), "big")))
        run_spec(spec, control)
    except EtudeError as error:
        log.error("%s", error)
        sys.exit(REFUSED)
    finally:
        reaper.remove(os.getpgrp())  # the parent kills the rest of the group, and sees the exit code


def _load_spec(body: bytes) -> RunnerSpec:
    """Unpickle the task. If that fails, exit: another try would fail too."""
    try:
        spec: RunnerSpec = pickle.loads(body)
    except Exception as error:  # an agent's file may raise any error when it is imported
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
    """Handle control messages until the parent closes the pipe."""
    while message := control.readline():
        if message == STOP:
            runner.stop()
    _kill_process_group()


def _kill_process_group() -> None:
    """Kill this process and all that it started, because its parent has ended. The reaper kills commands."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
