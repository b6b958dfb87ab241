"""A runner: claims rollouts from a rollout queue, has its agent play them, and reports how they ended.

consumes       queued rollouts
produces       attempts, each reported once; and heartbeats
waits for      the rollout queue, while it has nothing to claim; the agent
unblocked by   a claim, an attempt's end, `stop`; and by `RunnerTimeouts`, which bounds each wait

After one `stop` the runner claims no more, and lets active attempts end. A second `stop` cancels them. An attempt that
is cancelled because the runner stops counts as an infrastructure error, so another runner tries it again.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from etude.agents.agent import Agent
from etude.agents.hooks import find_hooks
from etude.agents.running_attempt import RunningAttempt
from etude.agents.source_agents import refuse_other_agents
from etude.agents.worker_threads import WorkerThreads
from etude.errors import AgentError, EtudeError, IllegalTransitionError, NotFoundError, StoreError
from etude.observe.log import get_logger
from etude.records import Outcome
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, Claim, RolloutQueue

R = TypeVar("R")

log = get_logger("agents")

MAX_ABANDONED = 32
"""Abandoned attempts that still run, at which a runner gives up: each holds resources."""
HEARTBEATS_PER_TIMEOUT = 4
"""Heartbeats within the silence that makes an attempt unresponsive."""
MAX_LOOP_DELAY = 1.0
"""Seconds by which the event loop may be late, before a warning is logged."""
MAX_REPLY_S = 1.0
"""Seconds that the reply to a heartbeat may take. A longer time, until a reply comes, does not count against the limits
of attempts. The queue may be stopped, and the model endpoint with it, as by Ctrl-Z in the terminal of the run."""
STOPPED = "The runner was stopped."
_runner_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RunnerTimeouts:
    """The bounds of a runner's waits."""

    heartbeat_s: float = 5.0
    """Between two heartbeats, or less where a rollout needs it. A runner learns by a heartbeat which attempts to
    stop."""
    poll_s: float = 20.0
    """For one claim to return a rollout; `stop` ends the wait."""
    drain_s: float = 30.0
    """After `stop`, for active attempts to end."""
    cancel_s: float = 5.0
    """For a cancelled coroutine to end; then it is abandoned."""
    patience_s: float = 300.0
    """For a rollout queue that does not reply."""
    setup_s: float = 300.0
    """For the agent's set-up, and for its tear-down."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            lowest = 0 if name in ("drain_s", "patience_s") else 1e-3
            if not lowest <= value < float("inf"):
                raise AgentError(f"RunnerTimeouts.{name} is {value!r}; it must be {lowest:g} s or more, and finite.")


class Runner:
    """Plays rollouts of a queue, several at once, on the event loop that `run` is called on."""

    def __init__(
        self,
        queue: RolloutQueue,
        agent: Agent,
        name: str | None = None,
        *,
        max_concurrency: int = 8,
        timeouts: RunnerTimeouts | None = None,
        store_url: str = "",
    ) -> None:
        """queue: where rollouts are claimed. agent: its own `max_concurrency` bounds this one. store_url: the address
        of the store's server, for commands that send rewards."""
        if max_concurrency < 1:
            raise AgentError(f"A runner has max_concurrency={max_concurrency}; it must be 1 or more.")
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{next(_runner_numbers)}"
        self.outcomes: Counter[Outcome] = Counter()
        """The number of attempts that were reported, by outcome."""
        self._queue = queue
        self._agent = agent
        self._hooks = {id(member): find_hooks(member) for member in agent.members()}
        self._store_url = store_url
        self._timeouts = timeouts or RunnerTimeouts()
        self._cancel_s = self._timeouts.cancel_s + agent.grace_s
        self._slots = min(max_concurrency, agent.max_concurrency or max_concurrency)
        self._running: dict[AttemptId, RunningAttempt] = {}
        self._abandoned: set[RunningAttempt] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_requests = 0
        self._interval = self._timeouts.heartbeat_s
        self._unanswered = 0.0
        """Seconds for which earlier heartbeats were not answered, beyond `MAX_REPLY_S`."""
        self._asked_at: float | None = None
        """The time of the first heartbeat that has no answer; None if there is none."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._claim_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._heartbeat_now = asyncio.Event()
        self._cancel_now = asyncio.Event()

    @property
    def abandoned(self) -> int:
        """Attempts that were abandoned and still run."""
        return len(self._abandoned) + (self._threads.abandoned if self._loop else 0)

    def stop(self) -> None:
        """Claim no more, and end when the active attempts have ended; a second call cancels them. Any thread may call
        it."""
        if self._loop is None:
            self._stop_requests += 1
        else:
            with suppress(RuntimeError):  # the loop is closed: it has stopped
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stop_requests += 1
        if self._claim_task is not None:
            self._claim_task.cancel()  # the queue keeps the rollouts that it was about to assign
        if self._stop_requests > 1:
            self._cancel_now.set()

    async def run(self) -> None:
        """Play until stopped. Raise `StoreError` if the queue stays unreachable. Raise `AgentError` if the agent cannot
        be set up, or abandons too many attempts."""
        self._threads = WorkerThreads(f"etude-{self.name}")
        self._loop = asyncio.get_running_loop()
        try:
            async with AsyncExitStack() as stack:
                for member in self._agent.members():
                    await self._call_hook(member, "set up", member.setup)
                    stack.push_async_callback(self._call_hook, member, "torn down", member.teardown)
                await self._play()
        finally:
            self._threads.close()
        assert self._claim_task is not None, "it has played"
        if not self._claim_task.cancelled():
            self._claim_task.result()  # raise the error that ended it, if one did
        if self.abandoned >= MAX_ABANDONED:
            raise AgentError(
                f"The runner {self.name} gives up: {self.abandoned} cancelled attempts of the agent "
                f"{self._agent.title} did not end. Give the agent's waits timeouts, or run it as a command, which can "
                "be killed."
            )

    # -- claiming and playing ------------------------------------------------------------------------------------------

    async def _play(self) -> None:
        """Claim and play until stopped, and let the active attempts end."""
        heartbeats = asyncio.create_task(self._send_heartbeats(), name=f"{self.name} beats")
        self._claim_task = asyncio.create_task(self._claim(), name=f"{self.name} claims")
        try:
            await asyncio.wait({self._claim_task})
            await self._drain()
        finally:
            self._claim_task.cancel()
            await self._cancel_all()
            heartbeats.cancel()

    async def _claim(self) -> None:
        """Claim as many rollouts as there are free slots, until this is cancelled or too many attempts were
        abandoned."""
        while not self._stop_requests and self.abandoned < MAX_ABANDONED:
            free = self._slots - len(self._running)
            if free < 1:
                await self._changed.wait()
                self._changed.clear()
                continue
            claims = await self._retry(partial(self._queue.claim, self.name, free, self._timeouts.poll_s), "claim")
            await self._refuse_other_mix(claims)
            for claim in claims:
                self._start_attempt(claim)

    async def _refuse_other_mix(self, claims: Sequence[Claim]) -> None:
        """Give claims of a run back that has agents which this runner lacks, and end with the reason."""
        try:
            for claim in claims:
                refuse_other_agents(self._agent, claim.resources)
        except AgentError as refusal:
            report = AttemptReport(Outcome.INFRA_ERROR, str(refusal))
            for claim in claims:
                await self._retry(partial(self._queue.finish, claim.attempt_id, report), "finish")
            raise

    def _start_attempt(self, claim: Claim) -> None:
        agent = self._agent.of_task(claim.task)
        attempt = RunningAttempt(
            agent,
            claim,
            self._queue,
            self._threads,
            self._hooks[id(agent)],
            cancel_s=self._timeouts.cancel_s + agent.grace_s,
            uncounted_s=self._unanswered_seconds,
            store_url=self._store_url,
        )
        self._running[claim.attempt_id] = attempt
        if claim.limits.unresponsive_s / HEARTBEATS_PER_TIMEOUT < self._interval:
            self._heartbeat_now.set()
        task = asyncio.create_task(self._run_attempt(attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_attempt(self, attempt: RunningAttempt) -> None:
        """Play one attempt and report it. Its slot is free once the queue has acknowledged the report."""
        attempt_id = attempt.claim.attempt_id
        try:
            report = await attempt.run()
            if attempt.is_abandoned:
                self._abandoned.add(attempt)
                attempt.on_late_end(lambda: self._abandoned.discard(attempt))
            # The queue accepts no report of an attempt that ended before, or that it does not know.
            if await self._retry(partial(self._queue.finish, attempt_id, report), "report an attempt"):
                self.outcomes[report.outcome] += 1
        except EtudeError as error:
            log.warning(
                "Attempt %d at rollout %d could not be reported: %s", attempt_id.attempt, attempt_id.rollout, error
            )
        finally:
            del self._running[attempt_id]
            self._changed.set()

    async def _retry(self, call: Callable[[], Awaitable[R]], action: str) -> R:
        """Repeat a call to the queue until it replies; a refusal is a reply."""
        failing_since: float | None = None
        delay = 0.1
        while True:
            try:
                return await call()
            except (IllegalTransitionError, NotFoundError):
                raise
            except StoreError as error:
                now = asyncio.get_running_loop().time()
                failing_since = now if failing_since is None else failing_since
                if now - failing_since + delay > self._timeouts.patience_s or self._cancel_now.is_set():
                    message = f"The runner {self.name} could not {action} for {now - failing_since:.0f} s: {error}"
                    raise StoreError(message) from error
                log.log(logging.WARNING if delay == 0.1 else logging.DEBUG, "%s: %s Trying again.", self.name, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, 5.0)

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        """Report the active attempts to the queue, and stop those that it wants stopped."""
        loop = asyncio.get_running_loop()
        while True:
            self._heartbeat_now.clear()
            timeouts = [attempt.claim.limits.unresponsive_s for attempt in self._running.values()]
            self._interval = min(
                [self._timeouts.heartbeat_s, *(timeout_s / HEARTBEATS_PER_TIMEOUT for timeout_s in timeouts)]
            )
            self._asked_at = loop.time() if self._asked_at is None else self._asked_at
            try:
                async with asyncio.timeout(max(self._interval, 10.0)):
                    to_stop = await self._queue.heartbeat(self.name, tuple(self._running), self._status())
                self._unanswered = self._unanswered_seconds()
                self._asked_at = None
            except (EtudeError, TimeoutError) as error:
                log.debug("%s: its heartbeat failed: %s", self.name, error)
                to_stop = []
            for attempt_id, reason in to_stop:
                if attempt_id in self._running:
                    self._running[attempt_id].stop(AttemptReport(Outcome.CANCELLED, reason))
            deadline = loop.time() + self._interval
            with suppress(TimeoutError):
                await asyncio.wait_for(self._heartbeat_now.wait(), self._interval)
            if loop.time() - deadline > MAX_LOOP_DELAY:
                self._warn_blocked(loop.time() - deadline)

    def _unanswered_seconds(self) -> float:
        """Return for how many seconds the queue has not answered heartbeats so far. After the patience, it
        counts as gone for good."""
        if self._asked_at is None:
            return self._unanswered
        waited = asyncio.get_running_loop().time() - self._asked_at - MAX_REPLY_S
        return self._unanswered + min(max(0.0, waited), self._timeouts.patience_s)

    def _warn_blocked(self, seconds: float) -> None:
        """Log for how long the event loop was blocked, and the likely cause."""
        if self._agent.call_signature().is_async:
            message = (
                "%s: its event loop was blocked for %.1f s. Either this machine is overloaded, or %s is a coroutine "
                "that computes or waits without `await`: make it a plain function, which runs on a thread."
            )
            log.warning(message, self.name, seconds, self._agent.title)
        else:
            log.warning("%s: its event loop was blocked for %.1f s: this machine is overloaded.", self.name, seconds)

    def _status(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "agent": self._agent.title,
            "max_concurrency": self._slots,
            "ended": {outcome.value: count for outcome, count in self.outcomes.items()},
            "left": self.abandoned,
        }

    # -- set-up and shutdown -------------------------------------------------------------------------------------------

    async def _call_hook(self, agent: Agent, action: str, hook: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(self._timeouts.setup_s):
                if inspect.iscoroutinefunction(hook):
                    await hook()
                elif inspect.isawaitable(result := await self._threads.call(hook)):
                    await result
        except TimeoutError as error:
            reason = f"it took longer than {self._timeouts.setup_s:g} s"
            raise AgentError(f"The agent {agent.title} could not be {action}: {reason}.") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise AgentError(f"The agent {agent.title} could not be {action}: {reason}") from error

    async def _drain(self) -> None:
        """Let active attempts end, until the timeout or a second `stop`."""
        cancel_requested = asyncio.create_task(self._cancel_now.wait())
        deadline = asyncio.get_running_loop().time() + self._timeouts.drain_s
        while self._tasks and not cancel_requested.done():
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                break
            await asyncio.wait({cancel_requested, *self._tasks}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        cancel_requested.cancel()

    async def _cancel_all(self) -> None:
        """Cancel the attempts that are still active. The queue misses those that cannot be reported."""
        if not self._tasks:
            return
        self._stop_requests = max(self._stop_requests, 2)
        self._cancel_now.set()
        for attempt in list(self._running.values()):
            attempt.stop(AttemptReport(Outcome.INFRA_ERROR, STOPPED))
        with suppress(asyncio.CancelledError):
            _, unfinished = await asyncio.wait(self._tasks, timeout=self._cancel_s + self._timeouts.cancel_s)
            for task in unfinished:
                task.cancel()
