"""The writer thread: one thread that executes operations in order, and writes their events in one transaction.

    coroutines of any loop ─call─► inbox ─► [operation, operation, …] ─► one commit ─► replies, one wake-up per loop

It consumes operations. It produces events and replies, each reply after the commit of its events. It waits for an
operation, or for the next deadline of the state. It is unblocked by either, and by `close`.

A thread that owns the state is used instead of locks, for three reasons. A commit takes as long as many operations, so
operations that arrive meanwhile are written together. No event loop ever waits for a disk. And only one thread touches
the state, in the order in which it is written.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from etude.errors import EtudeError, StoreError
from etude.observe import get_logger
from etude.running_time import running_time
from etude.store.journal.journal import Journal, Transaction

if TYPE_CHECKING:
    from etude.store.queue.queue_state import QueueState

T = TypeVar("T")
DEFERRED: Any = object()
"""Returned by an operation whose reply comes in a later round."""
CLOSED = "The rollout queue is closed: open another over its journal."
TICK_S = 1.0
"""Longest sleep of the thread, in seconds."""


class PendingResult:
    """The wait of a caller for a reply, in its event loop."""

    __slots__ = ("answered", "future", "loop")

    def __init__(self) -> None:
        self.answered = False
        """Whether a reply is on its way."""
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


Operation: TypeAlias = Callable[[Transaction, "PendingResult | None"], Any]
Reply: TypeAlias = "tuple[PendingResult, Any, Exception | None]"


class WriterThread:
    """The thread. Operations may come from any thread that runs an event loop."""

    def __init__(self, journal: Journal, state: QueueState) -> None:
        self._journal = journal
        self._state = state
        self._inbox: SimpleQueue[tuple[PendingResult | None, Operation]] = SimpleQueue()
        self._replies: list[Reply] = []
        self._inbox_lock = Lock()
        """Ensures that no operation follows the one that closes the inbox."""
        self._closed = False
        self._broken: Exception | None = None
        self._thread = Thread(target=self._work, name="etude store writer", daemon=True)
        self._thread.start()

    async def call(self, operation: Callable[[Transaction, PendingResult], T]) -> T:
        """Execute an operation and wait for its commit. A caller that stops waiting does not undo it."""
        promise = PendingResult()
        self.submit(operation, promise)  # type: ignore[arg-type]  # the promise is not None here
        result: T = await promise.future
        return result

    def submit(self, operation: Operation, promise: PendingResult | None = None) -> None:
        """Execute an operation, and reply to this promise if there is one."""
        with self._inbox_lock:
            if self._closed:
                raise StoreError(CLOSED)
            self._inbox.put((promise, operation))

    async def close(self) -> None:
        """Execute the pending operations, and stop. Calls that still wait then fail, since the queue is closed."""
        with self._inbox_lock:
            if not self._closed:
                self._closed = True
                self._inbox.put((None, lambda _writing, _promise: None))
        await asyncio.to_thread(self._thread.join)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            calls = self._next()
            closing = self._closed
            if self._broken is None:
                self._run_round(calls)
            else:
                self._replies += [(promise, None, self._broken) for promise, _ in calls if promise is not None]
            if self._broken is not None:  # no pending call can still succeed
                self._replies += [(promise, None, self._broken) for promise in self._unanswered_promises()]
            self._deliver()
            if closing and self._inbox.empty():
                self._replies = [(promise, None, StoreError(CLOSED)) for promise in self._unanswered_promises()]
                self._deliver()
                return

    def _next(self) -> list[tuple[PendingResult | None, Operation]]:
        """Return all pending operations, after one has come or the next round is due."""
        deadline = self._state.next_deadline()
        sleep = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - running_time()))
        try:
            first = self._inbox.get(timeout=sleep)
        except Empty:
            return []
        return [first, *(self._inbox.get() for _ in range(self._inbox.qsize()))]

    def _run_round(self, calls: list[tuple[PendingResult | None, Operation]]) -> None:
        try:
            with self._journal.transaction() as txn:
                for promise, operation in calls:
                    self._run_operation(txn, promise, operation)
                self._state.before_commit(txn, running_time(), self._replies)
        except Exception as error:
            replied = [promise for promise, _, _ in self._replies]
            promises = dict.fromkeys([*replied, *(promise for promise, _ in calls if promise is not None)])
            self._replies = [(promise, None, error) for promise in promises]
            details = None if isinstance(error, EtudeError) else error  # an error of Etude's own code
            get_logger("store").warning(
                "A round of %d operations was not written: %s", len(calls), error, exc_info=details
            )
            self._start_over()
        else:
            self._state.after_commit()

    def _run_operation(self, txn: Transaction, promise: PendingResult | None, operation: Operation) -> None:
        """Execute one operation. Its error goes to its caller, and affects no other operation."""
        try:
            result = operation(txn, promise)
        except Exception as error:
            if promise is not None:
                self._replies.append((promise, None, error))
            else:
                get_logger("store").warning("A call without a caller failed: %s", error, exc_info=error)
        else:
            if promise is not None and result is not DEFERRED:
                self._replies.append((promise, result, None))

    def _start_over(self) -> None:
        try:
            self._state.reload()
        except Exception as error:
            self._broken = StoreError(
                f"The rollout queue stopped: its journal can be neither written nor read: {error}"
            )
            get_logger("store").error("%s", self._broken)

    def _unanswered_promises(self) -> list[PendingResult]:
        """Return the promises that await a later round and have no reply on its way."""
        replied = {id(promise) for promise, _, _ in self._replies}
        return [
            promise for promise in self._state.pending_promises() if not promise.answered and id(promise) not in replied
        ]

    def _deliver(self) -> None:
        """Wake each event loop once, with all its replies."""
        replies_by_loop: defaultdict[asyncio.AbstractEventLoop, list[Reply]] = defaultdict(list)
        for reply in self._replies:
            reply[0].answered = True
            replies_by_loop[reply[0].loop].append(reply)
        self._replies = []
        for loop, replies in replies_by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, replies)
            except RuntimeError:  # the loop is closed, so no caller waits there
                continue


def _resolve(replies: list[Reply]) -> None:
    for promise, result, error in replies:
        if promise.future.done():
            continue
        if error is None:
            promise.future.set_result(result)
        else:
            promise.future.set_exception(error)
