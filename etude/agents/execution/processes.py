"""Runners in processes of their own, joined to the desk by its server: the strategy `cs`.

    with ProcessRunners(agent, url, key, runners=2, logs=directory) as runners:
        …                                   # whoever wants rollouts calls `runners.check()` while waiting for them

Runners on other machines join the same server by `etude runner`, with the same key.

consumes       nothing but the processes' ends
produces       processes, and others in their place where they end although they should not
waits for      the processes, when it is stopped
unblocked by   their end; `stop` is a ladder, each step of it bounded: it asks, it asks again (which cancels), it
               terminates, it kills

One thread, the keeper, starts and watches the processes. However this process ends, they end too: with their standard
input, on Linux by the system as well; and what they started ends by their guard.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from types import FunctionType
from typing import Any, Self

from etude.agents.agent import Agent, place_of
from etude.agents.execution.again import Again
from etude.agents.execution.worker import STOP, UNFIT, Appointment
from etude.agents.runner import Pace
from etude.config.env import for_a_runner
from etude.config.plugin import load_named, of_a_file
from etude.errors import AgentError
from etude.observe.log import get_log

__all__ = ["ProcessRunners"]

log = get_log("agents")

TICK = 0.1
"""Seconds between two looks at the processes."""
MARGIN = 2.0
"""Seconds that a process may take beyond what its pace allows, and to end once it is terminated."""
_LINES, _WIDTH = 5, 300
# First of all, on Linux, the process asks to be killed when the thread that started it ends: PR_SET_PDEATHSIG, SIGKILL.
_BOOT = (
    "import ctypes, json, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from etude.agents.execution.worker import main; main()"
)


class ProcessRunners:
    """Several runner processes on this machine, begun and stopped as one."""

    def __init__(
        self,
        agent: Agent,
        url: str,
        key: str,
        runners: int = 1,
        *,
        logs: Path,
        max_concurrency: int = 8,
        pace: Pace | None = None,
    ) -> None:
        """agent: one that other processes can load, because it stands at the top level of a file, or is plain data as
        a command is. url, key: of the desk's server. logs: where each process writes what it says."""
        if runners < 1:
            raise AgentError(f"{runners} runners were asked for; ask for 1 or more.")
        self._pace, self._grace_s = pace or Pace(), agent.grace_s
        asked = Appointment(agent, url, key, "", max_concurrency, self._pace)
        host = f"{os.uname().nodename}-{os.getpid()}"
        self._members = [
            _Member(f"runner-{number}", logs, _packed(replace(asked, name=f"{host}-{number}")))
            for number in range(runners)
        ]
        self._stopping, self._hurried = threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="etude-runners", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.stop(hurried=kind is not None)

    @property
    def pids(self) -> list[int]:
        """The processes that there are now."""
        return [member.process.pid for member in self._members if member.process is not None]

    def start(self) -> None:
        """Begin."""
        self._keeper.start()

    def check(self) -> None:
        """Raise what ended the last process, if none is left."""
        lost = [member.lost for member in self._members if member.lost]
        if len(lost) == len(self._members):
            raise AgentError(lost[-1])

    def stop(self, hurried: bool = False) -> None:
        """Have every process end. Hurried, or interrupted by Ctrl-C, it does not wait for what is under way."""
        if hurried:
            self._hurried.set()
        self._stopping.set()
        if not self._keeper.is_alive():
            return
        try:
            self._keeper.join()
        except BaseException:
            self._hurried.set()
            self._keeper.join()
            raise

    # -- the keeper ----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Start the processes, begin again what ends, until it is to stop; then go down the ladder."""
        try:
            while not self._stopping.wait(TICK):
                for member in self._members:
                    member.look_after(time.monotonic())
            self._end()
        except Exception:
            log.exception("The runners' processes could not be looked after, and are ended.")
        finally:
            for member in self._members:
                member.kill()

    def _end(self) -> None:
        """Each step gives those that are left its time. All are asked at once."""
        pace = self._pace
        steps: list[tuple[Callable[[_Member], None], float]] = [
            (_Member.ask_to_stop, pace.drain_s + MARGIN),
            (_Member.ask_to_stop, 4 * pace.cancel_s + self._grace_s + MARGIN),
            (_Member.terminate, MARGIN),
        ]
        for number, (step, seconds) in enumerate(steps):
            for member in self._members:
                step(member)
            until = time.monotonic() + seconds
            while any(member.runs for member in self._members):
                if time.monotonic() > until or (number == 0 and self._hurried.is_set()):
                    break
                time.sleep(TICK / 4)
            else:
                return
        late = [member.name for member in self._members if member.runs]
        log.warning("%s did not end when terminated, and is killed.", ", ".join(late))


class _Member:
    """A runner's process, and the one in its place."""

    def __init__(self, name: str, logs: Path, body: bytes) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        self.process: Popen[bytes] | None = None
        self.lost = ""
        """Why there is none, and will be none."""
        self._body, self._again, self._due = body, Again(), 0.0
        self._first = True
        self._from = 0  # where its log begins, behind those of the processes before it

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look_after(self, now: float) -> None:
        """Start it where there is none and there should be."""
        if self.process is not None and self.process.poll() is not None:
            self._ended(now)
        if self.process is None and not self.lost and now >= self._due:
            self._start(now)

    def ask_to_stop(self) -> None:
        self._send(STOP)

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """End it, and all it started, now."""
        if self.process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(TimeoutExpired):
            self.process.wait(MARGIN)
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process = None

    def _start(self, now: float) -> None:
        self._again.began(now)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self._from = file.tell()
            # In a session of its own: Ctrl-C is this process's to answer, and killing it ends what it started.
            self.process = Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
                stdin=PIPE,
                stdout=file,
                stderr=STDOUT,
                start_new_session=True,
                env=for_a_runner(),
                bufsize=0,
            )
        self._send(len(self._body).to_bytes(8, "big") + self._body)

    def _send(self, what: bytes) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):  # it has ended, which is noticed elsewhere
                self.process.stdin.write(what)

    def _ended(self, now: float) -> None:
        """It should not have: tell it, and begin again in a while, or give it up."""
        assert self.process is not None
        code = self.process.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        told = f"The process of {self.name} ({self.process.pid}) ended ({how}). {self._last_words()}"
        self.kill()
        # One whose agent was understood before may meet a file that is being written, or a hub that is away.
        unfit = code == UNFIT and self._first
        self._first = False
        wait = None if unfit else self._again.ended(now)
        if wait is None:
            self.lost = told if unfit else f"{told} It ended again and again, and is given up."
            log.error("%s", self.lost)
        else:
            self._due = now + wait
            log.warning("%s Another begins in %.1f s.", told, wait)

    def _last_words(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._from, self.log.stat().st_size - 2 * _LINES * _WIDTH))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        told = [line.strip()[:_WIDTH] for line in lines if line.strip()][-_LINES:]
        return f"Its last lines, in {self.log}: " + " | ".join(told) if told else f"It wrote nothing to {self.log}."


class _Pickler(pickle.Pickler):
    """Takes what was defined in the file that this process was started with, or in one that was named by its path,
    along by that file's name: another process has another `__main__`, and no module of the other kind."""

    def reducer_override(self, found: Any) -> Any:
        if not isinstance(found, type | FunctionType):
            return NotImplemented
        if found.__module__ == "__main__" or of_a_file(found.__module__):
            file = place_of(found.__module__)
            if file is None:
                raise AgentError(f"{found.__qualname__} was written at a prompt. Define the agent in a file.")
            return load_named, (f"{file}:{found.__qualname__}", "part of an agent", "my_agent.py:agent")
        return NotImplemented


def _packed(asked: Appointment) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file).dump(asked)
    except AgentError:
        raise
    except Exception as error:  # whatever an agent holds may refuse to be pickled, in whatever way
        raise AgentError(
            f"The agent {asked.agent.title} cannot be sent to other processes: {type(error).__name__}: {error}. Define "
            "it at the top level of a file, and load what it needs in its `setup`."
        ) from error
    return file.getvalue()
