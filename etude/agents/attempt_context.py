"""The attempt that code is a part of, wherever in this process it runs, and what it says to the desk on the way.

    agent's code, on any thread or task ──say──► Scope ──pump──► queue.record_reward, queue.record_note

A scope is found by a context variable, which tasks inherit, and functions called by `asyncio.to_thread` or by a copied
context. A thread that an agent began by itself inherits nothing; where one attempt alone is under way in the process,
and the thread began after it did, there is no doubt whose it is. Saying something never waits: the desk is told on the
runner's loop, in order, and has been told all of it before the attempt is handed in.

consumes       what agents say, from any thread
produces       calls to the desk, one after the other
waits for      the desk
unblocked by   its answers; `close` gives up after its bound
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias
from weakref import WeakSet

from etude.errors import AgentError
from etude.store.rollout_queue import AttemptId, RolloutQueue

__all__ = ["AttemptContext", "current_attempt"]

Emission: TypeAlias = Callable[[RolloutQueue, AttemptId], Awaitable[None]]

MAX_PENDING = 10_000
"""Things said that may wait for the desk, before saying more is refused."""

_CURRENT: ContextVar[AttemptContext | None] = ContextVar("etude_attempt", default=None)
_open: set[AttemptContext] = set()
_lock = threading.Lock()


def current_attempt() -> AttemptContext | None:
    """The attempt that the caller is a part of; None where no attempt is under way in this process."""
    context = _CURRENT.get()
    if context is not None:
        return context
    with _lock:
        if len(_open) > 1:
            raise AgentError(
                f"{len(_open)} attempts are under way in this process, and nothing tells to which of them this thread "
                "belongs. Begin threads with `asyncio.to_thread`, or have them call "
                "`contextvars.copy_context().run(function)` with a copy made in the agent."
            )
        only = next(iter(_open), None)
    if only is not None and threading.current_thread() in only.older_threads:
        raise AgentError(
            "This thread began before the attempt that is under way, so it may belong to another, which is over. Begin "
            "a thread in each attempt, or have older ones call `contextvars.copy_context().run(function)` with a copy "
            "made in the agent."
        )
    return only


class AttemptContext:
    """One attempt that is under way, as the code that plays it sees it."""

    def __init__(self, queue: RolloutQueue, attempt_id: AttemptId) -> None:
        self.attempt_id = attempt_id
        self.has_final_reward = False
        """Whether its final reward was given."""
        self.older_threads: WeakSet[threading.Thread] = WeakSet()
        """The threads that there were when it began."""
        self._queue, self._loop = queue, asyncio.get_running_loop()
        self._pending: deque[Emission] = deque()
        self._is_closed = False
        self._sender: asyncio.Task[None] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """The attempt of whatever is called within, and of the tasks begun there."""
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
        """Have the desk told something, soon. Any thread may call it. `final` is the attempt's whole reward."""
        with self._lock:
            title = f"Attempt {self.attempt_id.attempt} at rollout {self.attempt_id.rollout}"
            if self._is_closed:
                raise AgentError(f"{title} is over: nothing is added to it any more.")
            if final and self.has_final_reward:
                raise AgentError(
                    f"{title} was given its final reward already. Give it once; what single turns earned goes with "
                    "`turn=`, any number of times."
                )
            if len(self._pending) >= MAX_PENDING:
                raise AgentError(
                    f"{title} has said {MAX_PENDING} things that the desk has not been told yet. Say less, or more "
                    "slowly."
                )
            self.has_final_reward |= final
            was_idle = not self._pending
            self._pending.append(emission)
        if was_idle:
            self._loop.call_soon_threadsafe(self._start_sender)

    async def close(self, timeout_s: float) -> Exception | None:
        """Take nothing more, and have told the desk all of it; the error, where it would not hear it in time."""
        with self._lock:
            self._is_closed = True
        with _lock:  # though a thread that was left still goes on in it
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
        """What waits, in the order it was said; after an error the rest is kept from the desk, so that none of it is
        told out of order."""
        while self._pending:
            await self._pending[0](self._queue, self.attempt_id)
            with self._lock:
                self._pending.popleft()
