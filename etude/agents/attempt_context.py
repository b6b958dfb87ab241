"""The attempt that code belongs to, anywhere in this process, and the rewards and events that it sends.

    agent's code, on any thread or task ──emit──► AttemptContext ──sender──► queue.record_reward, queue.record_note

A context is found by a context variable. Tasks inherit it, and so do functions called by `asyncio.to_thread` or in a
copied context. A thread that an agent starts by itself inherits nothing. It belongs to the attempt if only one attempt
is active in the process, and the thread is younger than the attempt. `emit` never waits. The runner's loop sends the
emissions to the queue in order, and sends all of them before it reports the attempt.

consumes       emissions of agents, from any thread
produces       calls to the rollout queue, one after the other
waits for      the rollout queue
unblocked by   its replies; `close` gives up after its timeout
"""

from __future__ import annotations

import asyncio
import math
import numbers
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import WeakSet

from etude.errors import AgentError
from etude.store.queue.rollout_queue import AttemptId, Reward, RolloutQueue

Emission: TypeAlias = Callable[[RolloutQueue, AttemptId], Coroutine[Any, Any, None]]

MAX_PENDING = 10_000
"""Emissions that may wait for the rollout queue, before `emit` raises."""

_CURRENT: ContextVar[AttemptContext | None] = ContextVar("etude_attempt", default=None)
_open: set[AttemptContext] = set()
_lock = threading.Lock()


def current_attempt() -> AttemptContext | None:
    """Return the attempt that the caller belongs to; None if no attempt is active in this process."""
    context = _CURRENT.get()
    if context is not None:
        return context
    with _lock:
        if len(_open) > 1:
            raise AgentError(
                f"{len(_open)} attempts are active in this process, and it is unknown to which of them this thread "
                "belongs. Start threads with `asyncio.to_thread`, or have them call "
                "`contextvars.copy_context().run(function)` with a copy made in the agent."
            )
        only = next(iter(_open), None)
    if only is not None and threading.current_thread() in only.older_threads:
        raise AgentError(
            "This thread is older than the active attempt, so it may belong to an earlier one. Start a thread in each "
            "attempt, or have older ones call `contextvars.copy_context().run(function)` with a copy made in the "
            "agent."
        )
    return only


class AttemptContext:
    """One active attempt, as the agent's code sees it."""

    def __init__(self, queue: RolloutQueue, attempt_id: AttemptId) -> None:
        self.attempt_id = attempt_id
        self.has_final_reward = False
        """True once the final reward was emitted."""
        self.older_threads: WeakSet[threading.Thread] = WeakSet()
        """The threads that existed when the attempt began."""
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Emission] = deque()
        self._is_closed = False
        self._sender: asyncio.Task[None] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the attempt of the code within, and of the tasks that it starts."""
        token = _CURRENT.set(self)
        with _lock:
            if self not in _open:
                self.older_threads = WeakSet(threading.enumerate())
            _open.add(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with _lock:
                _open.discard(self)

    def emit(self, emission: Emission, final: bool = False) -> None:
        """Send something to the rollout queue soon. Any thread may call it. `final` marks the attempt's whole
        reward."""
        with self._lock:
            title = f"Attempt {self.attempt_id.attempt} at rollout {self.attempt_id.rollout}"
            if self._is_closed:
                raise AgentError(f"{title} has ended, and accepts no more rewards or events.")
            if final and self.has_final_reward:
                raise AgentError(
                    f"{title} has its final reward already. Emit it once; emit the rewards of single turns with "
                    "`turn=`, any number of times."
                )
            if len(self._pending) >= MAX_PENDING:
                raise AgentError(
                    f"{title} has {MAX_PENDING} emissions that are not sent to the rollout queue yet. Emit less, or "
                    "more slowly."
                )
            self.has_final_reward |= final
            was_idle = not self._pending
            self._pending.append(emission)
        if was_idle:
            self._loop.call_soon_threadsafe(self._start_sender)

    async def close(self, timeout_s: float) -> Exception | None:
        """Accept no more emissions, and wait until all are sent. Return the error if that fails or takes longer than
        `timeout_s`."""
        with self._lock:
            self._is_closed = True
        with _lock:  # even if an abandoned thread still runs in it
            _open.discard(self)
        if self._pending:
            self._start_sender()
        if self._sender is None:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                await self._sender
        except Exception as error:
            return error
        return None

    def _start_sender(self) -> None:
        if self._pending and (self._sender is None or (self._sender.done() and self._sender.exception() is None)):
            self._sender = self._loop.create_task(self._send_pending())

    async def _send_pending(self) -> None:
        """Send the pending emissions in order. After an error the rest is not sent, so that nothing arrives out of
        order."""
        while self._pending:
            await self._pending[0](self._queue, self.attempt_id)
            with self._lock:
                self._pending.popleft()


def parse_reward(value: Any, subject: str) -> Reward:
    """Return a reward in the form that the rollout queue takes. `subject` begins the sentence of an error, such as `it
    returned`."""
    if not isinstance(value, Mapping):
        return _number(value, subject)
    if not value:
        raise AgentError(f"{subject} an empty mapping. Give a number, or at least one named part.")
    for name in value:
        if not isinstance(name, str):
            raise AgentError(f"{subject} a part named {name!r}; the name of a part is a string.")
    parts = {name: _number(part, f"{subject} the part `{name}`,") for name, part in value.items()}
    _number(sum(parts.values()), f"{subject} parts that add up to")
    return parts


def _number(value: Any, subject: str) -> float:
    scalar = value.item() if getattr(value, "shape", None) == () else value  # a scalar of numpy or torch
    if not isinstance(scalar, numbers.Real):
        raise AgentError(
            f"{subject} {scalar!r} of type {type(value).__name__}; a reward is a number, or named numbers."
        )
    try:
        number = float(scalar)
    except OverflowError:  # an integer that is too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise AgentError(f"{subject} {number}; a reward is finite.")
    return number
