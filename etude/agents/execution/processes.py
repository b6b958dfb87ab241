"""Runners in their own processes, which join the rollout queue by its server: the strategy `cs`.

    with ProcessRunners(agent, url, key, runners=2, logs=directory) as runners:
        …                                   # the consumer of rollouts calls `runners.check()` while it waits

Runners on other machines join the same server by `etude runner`, with the same key.

consumes       the ends of processes
produces       processes, and replacements for those that end unexpectedly
waits for      the processes, when it is stopped
unblocked by   their end; each step of the stop is bounded: it asks, asks again (which cancels), terminates, kills

One supervisor thread starts and watches the processes. They end whenever this process ends: because their standard
input closes, and on Linux by a signal of the system. Their reaper ends the programs that they started.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from types import FunctionType
from typing import Any, Self

from etude.agents.agent import Agent, locate_module
from etude.agents.execution import runner_process
from etude.agents.execution.backoff import RestartBackoff
from etude.agents.execution.runner_process import EXIT_CANNOT_LOAD, STOP, RunnerSpec
from etude.agents.runner import RunnerTimeouts
from etude.child_process import boot_command, describe_exit, kill_group, read_log_tail
from etude.config.env import build_runner_env
from etude.config.plugin import is_file_module, load_object
from etude.errors import AgentError
from etude.observe.log import get_logger

log = get_logger("agents")

POLL_INTERVAL = 0.1
"""Seconds between two checks of the processes."""
MARGIN = 2.0
"""Seconds that a process may take in addition to its timeouts, and to end after SIGTERM."""


class ProcessRunners:
    """Several runner processes on this machine that start and stop together."""

    def __init__(
        self,
        agent: Agent,
        url: str,
        key: str,
        runners: int = 1,
        *,
        logs: Path,
        max_concurrency: int = 8,
        timeouts: RunnerTimeouts | None = None,
    ) -> None:
        """agent: one that other processes can load: it is at the top level of a file, or is plain data, as a command
        is. url, key: of the store's server. logs: the directory of the processes' log files."""
        if runners < 1:
            raise AgentError(f"{runners} runners were requested; request 1 or more.")
        self._timeouts = timeouts or RunnerTimeouts()
        self._grace_s = agent.grace_s
        spec = RunnerSpec(agent, url, key, "", max_concurrency, self._timeouts)
        host = f"{os.uname().nodename}-{os.getpid()}"
        self._runners = [
            _RunnerProcess(f"runner-{number}", logs, _pickle_spec(replace(spec, name=f"{host}-{number}")))
            for number in range(runners)
        ]
        self._stopping = threading.Event()
        self._immediate = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="etude-runners", daemon=True)

    def __enter__(self) -> Self:
        self._supervisor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """End every process. After an error, or interrupted by Ctrl-C, it does not wait for active attempts."""
        if kind is not None:
            self._immediate.set()
        self._stopping.set()
        try:
            self._supervisor.join()
        except BaseException:
            self._immediate.set()
            self._supervisor.join()
            raise

    @property
    def pids(self) -> list[int]:
        """The current processes' ids."""
        return [runner.process.pid for runner in self._runners if runner.process is not None]

    def check(self) -> None:
        """Raise the error that ended the last process, if none is left."""
        failures = [runner.failure for runner in self._runners if runner.failure]
        if len(failures) == len(self._runners):
            raise AgentError(failures[-1])

    # -- the supervisor thread -----------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Start the processes, and restart those that end, until the stop; then shut them down."""
        try:
            while not self._stopping.wait(POLL_INTERVAL):
                for runner in self._runners:
                    runner.ensure_running(time.monotonic())
            self._shut_down()
        except Exception as error:
            log.exception("The supervisor of the runner processes failed; the processes are killed.")
            for runner in self._runners:
                runner.failure = runner.failure or f"The supervisor of the runner processes failed: {error}"
        finally:
            for runner in self._runners:
                runner.kill()

    def _shut_down(self) -> None:
        """Take the steps of the shutdown: each gives the remaining processes some time. All processes take a step
        together."""
        timeouts = self._timeouts
        steps: list[tuple[Callable[[_RunnerProcess], None], float]] = [
            (_RunnerProcess.ask_to_stop, timeouts.drain_s + MARGIN),
            (_RunnerProcess.ask_to_stop, 4 * timeouts.cancel_s + self._grace_s + MARGIN),
            (_RunnerProcess.terminate, MARGIN),
        ]
        for number, (step, seconds) in enumerate(steps):
            for runner in self._runners:
                step(runner)
            deadline = time.monotonic() + seconds
            while any(runner.is_running for runner in self._runners):
                if time.monotonic() > deadline or (number == 0 and self._immediate.is_set()):
                    break
                time.sleep(POLL_INTERVAL / 4)
            else:
                return
        unfinished = [runner.name for runner in self._runners if runner.is_running]
        log.warning("%s did not end after SIGTERM, and is killed.", ", ".join(unfinished))


class _RunnerProcess:
    """A runner's current process."""

    def __init__(self, name: str, logs: Path, body: bytes) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self.process: Popen[bytes] | None = None
        self.failure = ""
        """The reason that the process is no longer restarted; empty while it is."""
        self._body = body
        self._backoff = RestartBackoff()
        self._restart_at = 0.0
        self._never_started = True
        self._log_start = 0  # offset of this process's log, after those of its predecessors

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ensure_running(self, now: float) -> None:
        """Start the process if it should run and does not."""
        if self.process is not None and self.process.poll() is not None:
            self._handle_exit(now)
        if self.process is None and not self.failure and now >= self._restart_at:
            self._start(now)

    def ask_to_stop(self) -> None:
        self._send(STOP)

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the process, and all that it started."""
        if self.process is None:
            return
        kill_group(self.process.pid)
        with suppress(TimeoutExpired):
            self.process.wait(MARGIN)
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process = None

    def _start(self, now: float) -> None:
        self._backoff.started(now)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self._log_start = file.tell()
            # In a new session: this process handles Ctrl-C, and killing the group ends all that the runner started.
            self.process = Popen(
                boot_command(runner_process.__name__, dies_with_parent=True),
                stdin=PIPE,
                stdout=file,
                stderr=STDOUT,
                start_new_session=True,
                env=build_runner_env(),
                bufsize=0,
            )
        self._send(len(self._body).to_bytes(8, "big") + self._body)

    def _send(self, data: bytes) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):  # it has ended; `ensure_running` handles that
                self.process.stdin.write(data)

    def _handle_exit(self, now: float) -> None:
        """Report an unexpected exit, and schedule the restart or give up."""
        assert self.process is not None
        code = self.process.returncode
        tail = read_log_tail(self.log, self._log_start)
        message = f"The process of {self.name} ({self.process.pid}) ended ({describe_exit(code)}). {tail}"
        self.kill()
        # If the agent loaded before, the failure may be temporary: a file being written, a hub that is unreachable.
        cannot_load = code == EXIT_CANNOT_LOAD and self._never_started
        self._never_started = False
        delay = None if cannot_load else self._backoff.next_delay(now)
        if delay is None:
            self.failure = message if cannot_load else f"{message} It failed too often and is not restarted."
            log.error("%s", self.failure)
        else:
            self._restart_at = now + delay
            log.warning("%s It restarts in %.1f s.", message, delay)


class _AgentPickler(pickle.Pickler):
    """Pickles classes and functions of the main file, or of a file that was named by path, by that file's path. Another
    process has another `__main__`, and no module for such a file."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | FunctionType):
            return NotImplemented
        if obj.__module__ == "__main__" or is_file_module(obj.__module__):
            file = locate_module(obj.__module__)
            if file is None:
                raise AgentError(f"{obj.__qualname__} was defined at a prompt. Define the agent in a file.")
            return load_object, (f"{file}:{obj.__qualname__}", "part of an agent", "my_agent.py:agent")
        return NotImplemented


def _pickle_spec(spec: RunnerSpec) -> bytes:
    file = io.BytesIO()
    try:
        _AgentPickler(file).dump(spec)
    except AgentError:
        raise
    except Exception as error:  # an agent's attributes may raise any error when pickled
        raise AgentError(
            f"The agent {spec.agent.title} cannot be sent to other processes: {type(error).__name__}: {error}. Define "
            "it at the top level of a file, and load what it needs in its `setup`."
        ) from error
    return file.getvalue()
