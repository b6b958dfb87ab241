"""The clerk: one thread that does what many ask, in order, and writes what follows from it in one transaction.

    coroutines of any loop ─ask─► inbox ─► [do, do, do, …] ─► one commit ─► answers, one wake-up for each loop

It consumes asks. It produces events and answers, each answer after what it speaks of is committed. It waits for an ask,
or for the next time that its duty has something to look after. It is unblocked by either, and by `close`.

Why a thread that owns everything, and not locks: a commit takes as long as many asks, so asks that come meanwhile are
written together; no event loop ever waits for a disk; and what the duty keeps is touched by one thread alone, in the
order in which it is written.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol, TypeAlias, TypeVar

from etude.errors import StoreError
from etude.observe import get_logger
from etude.store.journal import Journal, Transaction

__all__ = ["DEFERRED", "TICK_S", "PendingResult", "WriterHooks", "WriterThread"]

T = TypeVar("T")
DEFERRED: Any = object()
"""What is returned by something asked that will be answered in a later round."""
CLOSED = "The desk is closed, and nothing is done there any more: open another over its journal."
TICK_S = 1.0
"""How long the clerk sleeps at most."""


class PendingResult:
    """Somebody's wait for an answer, in their event loop."""

    __slots__ = ("answered", "future", "loop")

    def __init__(self) -> None:
        self.answered = False
        """Whether the clerk has an answer on its way."""
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


Operation: TypeAlias = Callable[[Transaction, "PendingResult | None"], Any]
Reply: TypeAlias = "tuple[PendingResult, Any, Exception | None]"


class WriterHooks(Protocol):
    """What the clerk looks after. All of it is called by the clerk's thread."""

    def before_commit(self, txn: Transaction, now: float, reply: Callable[[PendingResult, Any], None]) -> None:
        """After all that was asked in a round, before it is committed: what time or circumstances demand."""
        ...

    def after_commit(self) -> None:
        """The round is committed."""
        ...

    def next_deadline(self) -> float | None:
        """When to attend again, if nobody asks before."""
        ...

    def pending_promises(self) -> list[PendingResult]:
        """Who was told that it will be answered later."""
        ...

    def reload(self) -> None:
        """A round could not be written: stand where the journal stands."""
        ...


class WriterThread:
    """The thread. Anything may be asked from any thread that runs an event loop."""

    def __init__(self, journal: Journal, hooks: WriterHooks) -> None:
        self._journal, self._hooks = journal, hooks
        self._inbox: SimpleQueue[tuple[PendingResult | None, Operation]] = SimpleQueue()
        self._replies: list[Reply] = []
        self._inbox_lock = Lock()
        """Nothing comes in behind the one that closes it."""
        self._closed = False
        self._broken: Exception | None = None
        self._thread = Thread(target=self._work, name="etude desk", daemon=True)
        self._thread.start()

    async def call(self, operation: Callable[[Transaction, PendingResult], T]) -> T:
        """Have this done, and wait until it is committed. Who stops waiting does not undo it."""
        promise = PendingResult()
        self.submit(operation, promise)  # type: ignore[arg-type]  # with a promise it is given one
        result: T = await promise.future
        return result

    def submit(self, operation: Operation, promise: PendingResult | None = None) -> None:
        """Have this done, answered to this promise if there is one."""
        with self._inbox_lock:
            if self._closed:
                raise StoreError(CLOSED)
            self._inbox.put((promise, operation))

    async def close(self) -> None:
        """Do what was asked so far, and stop. What is still waited for is told that the desk is closed."""
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
                self._fail_all(calls, self._broken)
            if self._broken is not None:  # nothing will ever come of what is waited for
                self._replies += [(promise, None, self._broken) for promise in self._unanswered_promises()]
            self._deliver()
            if closing and self._inbox.empty():
                self._replies = [(promise, None, StoreError(CLOSED)) for promise in self._unanswered_promises()]
                self._deliver()
                return

    def _next(self) -> list[tuple[PendingResult | None, Operation]]:
        """All that was asked, after something was or it is time to attend."""
        deadline = self._hooks.next_deadline()
        sleep = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - time.monotonic()))
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
                self._hooks.before_commit(txn, time.monotonic(), self._add_reply)
        except Exception as error:
            replied = [promise for promise, _, _ in self._replies]
            promises = dict.fromkeys([*replied, *(promise for promise, _ in calls if promise is not None)])
            self._replies = [(promise, None, error) for promise in promises]
            get_logger("store").warning("Nothing of %d things asked at the desk was written: %s", len(calls), error)
            self._start_over()
        else:
            self._hooks.after_commit()

    def _run_operation(self, txn: Transaction, promise: PendingResult | None, operation: Operation) -> None:
        """One thing that was asked. What goes wrong with it is told to who asked, and spoils nothing else."""
        try:
            result = operation(txn, promise)
        except Exception as error:
            if promise is not None:
                self._replies.append((promise, None, error))
        else:
            if promise is not None and result is not DEFERRED:
                self._replies.append((promise, result, None))

    def _add_reply(self, promise: PendingResult, result: Any) -> None:
        self._replies.append((promise, result, None))

    def _start_over(self) -> None:
        try:
            self._hooks.reload()
        except Exception as error:
            self._broken = StoreError(f"The desk stopped, as its journal can neither be written nor read: {error}")
            get_logger("store").error("%s", self._broken)

    def _fail_all(self, calls: list[tuple[PendingResult | None, Operation]], error: Exception) -> None:
        self._replies += [(promise, None, error) for promise, _ in calls if promise is not None]

    def _unanswered_promises(self) -> list[PendingResult]:
        """Who was told that it will be answered later, and has no answer on its way."""
        replied = {id(promise) for promise, _, _ in self._replies}
        return [
            promise for promise in self._hooks.pending_promises() if not promise.answered and id(promise) not in replied
        ]

    def _deliver(self) -> None:
        """Wake every loop once, with all its answers."""
        replies_by_loop: defaultdict[asyncio.AbstractEventLoop, list[Reply]] = defaultdict(list)
        for reply in self._replies:
            reply[0].answered = True
            replies_by_loop[reply[0].loop].append(reply)
        self._replies = []
        for loop, replies in replies_by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, replies)
            except RuntimeError:  # the loop is closed, and nobody waits there any more
                continue


def _resolve(replies: list[Reply]) -> None:
    for promise, result, error in replies:
        if promise.future.done():
            continue
        if error is None:
            promise.future.set_result(result)
        else:
            promise.future.set_exception(error)
