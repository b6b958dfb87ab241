"""Runners on threads of this process, each with an event loop of its own, over one desk: the strategy `shm`.

    with ThreadRunners(desk, agent, runners=2) as runners:
        …                                   # whoever wants rollouts calls `runners.check()` while waiting for them

consumes       what the desk has queued
produces       attempts that are handed in
waits for      the runners, when it is stopped
unblocked by   their end; `stop` is bounded by the pace: it asks, it cancels, and what goes on then is left, and told

A thread cannot be killed: an agent that may hang for good is safer in processes, or as a command.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import Self

from etude.agents.agent import Agent
from etude.agents.execution.again import Again
from etude.agents.execution.ending import ran
from etude.agents.runner import Pace, Runner
from etude.errors import AgentError, EtudeError
from etude.observe.log import get_log
from etude.store.desk import Desk

__all__ = ["ThreadRunners"]

log = get_log("agents")

MARGIN = 2.0
"""Seconds that a runner may take beyond what its pace allows."""


class ThreadRunners:
    """Several runners, begun and stopped as one."""

    def __init__(
        self,
        desk: Desk,
        agent: Agent,
        runners: int = 1,
        *,
        max_concurrency: int = 8,
        pace: Pace | None = None,
        store_url: str = "",
    ) -> None:
        """desk: one that may be used from several loops, as a `LocalDesk` may. The others: see `Runner`; each runner
        has a shallow copy of the agent for its own."""
        if runners < 1:
            raise AgentError(f"{runners} runners were asked for; ask for 1 or more.")
        self._pace = pace or Pace()
        self._desk, self._agent, self._max_concurrency, self._store_url = desk, agent, max_concurrency, store_url
        self._seats = [_Seat(f"etude-runner-{number}") for number in range(runners)]
        self._stopping = threading.Event()
        self._errors: list[Exception] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.stop(hurried=kind is not None)

    def start(self) -> None:
        """Begin."""
        for seat in self._seats:
            seat.runner = self._make()
            seat.thread = threading.Thread(target=self._keep, args=(seat,), name=seat.name, daemon=True)
            seat.thread.start()

    def check(self) -> None:
        """Raise what ended the last runner, if none is left."""
        if len(self._errors) == len(self._seats):
            raise self._errors[-1]

    def stop(self, hurried: bool = False) -> None:
        """Have every runner end: what is under way may, unless it is hurried; then it is cancelled, then it is left."""
        self._stopping.set()
        pace = self._pace
        try:
            self._ask_all()
            self._join(0.0 if hurried else pace.drain_s + MARGIN)
        finally:  # also where a second Ctrl-C interrupts the wait
            self._ask_all()
            self._join(4 * pace.cancel_s + self._agent.grace_s + MARGIN)
            late = [seat.name for seat in self._seats if seat.thread is not None and seat.thread.is_alive()]
            if late:
                log.warning("%s did not stop, and ends with the process.", ", ".join(late))

    @property
    def left(self) -> int:
        """Attempts that were left to themselves and still go on."""
        return sum(seat.runner.left for seat in self._seats if seat.runner is not None)

    def _make(self) -> Runner:
        return Runner(
            self._desk,
            copy.copy(self._agent),
            max_concurrency=self._max_concurrency,
            pace=self._pace,
            store_url=self._store_url,
        )

    def _ask_all(self) -> None:
        for seat in self._seats:
            if seat.runner is not None:
                seat.runner.stop()

    def _join(self, within: float) -> None:
        until = time.monotonic() + within
        for seat in self._seats:
            if seat.thread is not None:
                seat.thread.join(max(0.0, until - time.monotonic()))

    def _keep(self, seat: _Seat) -> None:
        """Run a runner, and another where it ends by an error, within bounds."""
        while True:
            assert seat.runner is not None
            seat.again.began(time.monotonic())
            try:
                ran(seat.runner.run(), self._pace.cancel_s)
                return
            except Exception as error:  # the one place where it is told
                wait = seat.again.ended(time.monotonic())
                if self._stopping.is_set():
                    log.warning("%s ended by an error: %s", seat.name, error)
                    return
                if wait is None:
                    log.error("%s is given up, as it ended again and again: %s", seat.name, error)
                    self._errors.append(_told(error))
                    return
                log.warning("%s ended, and begins again in %.1f s: %s", seat.name, wait, error)
            if self._stopping.wait(wait):
                return
            seat.runner = self._make()
            if self._stopping.is_set():
                seat.runner.stop()


class _Seat:
    """A thread, and the runner that is on it now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.again = Again()
        self.runner: Runner | None = None
        self.thread: threading.Thread | None = None


def _told(error: Exception) -> Exception:
    return error if isinstance(error, EtudeError) else AgentError(f"A runner ended by {type(error).__name__}: {error}")
