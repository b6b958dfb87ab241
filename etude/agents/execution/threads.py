"""Runners on threads of this process, each with its own event loop, over one rollout queue: the strategy `shm`.

    with ThreadRunners(queue, agent, runners=2) as runners:
        …                                   # the consumer of rollouts calls `runners.check()` while it waits

consumes       queued rollouts
produces       reported attempts
waits for      the runners, when it is stopped
unblocked by   their end; the runners' timeouts bound the stop, which asks, cancels, and then abandons with a warning

A thread cannot be killed. An agent that may hang forever is safer in a process, or as a command.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Self

from etude.agents.agent import Agent
from etude.agents.execution.backoff import RestartBackoff
from etude.agents.execution.shutdown import run_bounded
from etude.agents.runner import Runner, RunnerTimeouts
from etude.errors import AgentError, EtudeError
from etude.observe.log import get_logger
from etude.store.queue.rollout_queue import RolloutQueue

log = get_logger("agents")

MARGIN = 2.0
"""Seconds that a runner may take in addition to its timeouts."""


class ThreadRunners:
    """Several runners that start and stop together."""

    def __init__(
        self,
        queue: RolloutQueue,
        agent: Agent,
        runners: int = 1,
        *,
        max_concurrency: int = 8,
        timeouts: RunnerTimeouts | None = None,
        store_url: str = "",
    ) -> None:
        """queue: one that several event loops may use, such as `LocalRolloutQueue`. Each runner gets a shallow copy of
        the agent. The other arguments are those of `Runner`."""
        if runners < 1:
            raise AgentError(f"{runners} runners were requested; request 1 or more.")
        self._timeouts = timeouts or RunnerTimeouts()
        self._queue = queue
        self._agent = agent
        self._max_concurrency = max_concurrency
        self._store_url = store_url
        self._runners = runners
        self._threads: list[_RunnerThread] = []
        self._stopping = threading.Event()
        self._errors: list[Exception] = []

    def __enter__(self) -> Self:
        self._threads = [
            _RunnerThread(f"etude-runner-{number}", self._make_runner(), self._run_with_restarts)
            for number in range(self._runners)
        ]
        for runner_thread in self._threads:
            runner_thread.start()
        return self

    def check(self) -> None:
        """Raise the error that ended the last runner, if none is left."""
        if len(self._errors) == self._runners:
            raise self._errors[-1]

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """End every runner. Without an error active attempts may end first. Then they are cancelled, and finally
        abandoned."""
        self._stopping.set()
        timeouts = self._timeouts
        try:
            self._stop_all()
            self._join(timeouts.drain_s + MARGIN if kind is None else 0.0)
        finally:  # also where a second Ctrl-C interrupts the wait
            self._stop_all()
            self._join(4 * timeouts.cancel_s + self._agent.grace_s + MARGIN)
            unfinished = [runner_thread.name for runner_thread in self._threads if runner_thread.is_alive()]
            if unfinished:
                log.warning("%s did not stop; it ends with the process.", ", ".join(unfinished))

    def _make_runner(self) -> Runner:
        return Runner(
            self._queue,
            copy.copy(self._agent),
            max_concurrency=self._max_concurrency,
            timeouts=self._timeouts,
            store_url=self._store_url,
        )

    def _stop_all(self) -> None:
        for runner_thread in self._threads:
            runner_thread.runner.stop()

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for runner_thread in self._threads:
            runner_thread.join(max(0.0, deadline - time.monotonic()))

    def _run_with_restarts(self, runner_thread: _RunnerThread) -> None:
        """Run a runner, and restart it after an error, with a backoff."""
        while True:
            runner_thread.backoff.started(time.monotonic())
            try:
                run_bounded(runner_thread.runner.run(), self._timeouts.cancel_s)
                return
            except Exception as error:  # the only place that reports it
                delay = runner_thread.backoff.next_delay(time.monotonic())
                if self._stopping.is_set():
                    log.warning("%s ended by an error: %s", runner_thread.name, error)
                    return
                if delay is None:
                    log.error("%s failed too often and is not restarted: %s", runner_thread.name, error)
                    typed = isinstance(error, EtudeError)
                    self._errors.append(
                        error if typed else AgentError(f"A runner ended by {type(error).__name__}: {error}")
                    )
                    return
                log.warning("%s failed and restarts in %.1f s: %s", runner_thread.name, delay, error)
            if self._stopping.wait(delay):
                return
            runner_thread.runner = self._make_runner()
            if self._stopping.is_set():
                runner_thread.runner.stop()


class _RunnerThread(threading.Thread):
    """A thread, and its current runner."""

    def __init__(self, name: str, runner: Runner, work: Callable[[_RunnerThread], None]) -> None:
        super().__init__(name=name, target=work, args=(self,), daemon=True)
        self.runner = runner
        self.backoff = RestartBackoff()
