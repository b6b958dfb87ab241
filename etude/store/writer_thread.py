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

    def before_commit(self, writing: Transaction, now: float, answer: Callable[[PendingResult, Any], None]) -> None:
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
        self._answers: list[Reply] = []
        self._inbox_lock = Lock()
        """Nothing comes in behind the one that closes it."""
        self._closed = False
        self._broken: Exception | None = None
        self._thread = Thread(target=self._work, name="etude desk", daemon=True)
        self._thread.start()

    async def call(self, do: Callable[[Transaction, PendingResult], T]) -> T:
        """Have this done, and wait until it is committed. Who stops waiting does not undo it."""
        promise = PendingResult()
        self.submit(do, promise)  # type: ignore[arg-type]  # with a promise it is given one
        answer: T = await promise.future
        return answer

    def submit(self, do: Operation, promise: PendingResult | None = None) -> None:
        """Have this done, answered to this promise if there is one."""
        with self._inbox_lock:
            if self._closed:
                raise StoreError(CLOSED)
            self._inbox.put((promise, do))

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
            asks = self._next()
            closing = self._closed
            if self._broken is None:
                self._run_batch(asks)
            else:
                self._refuse(asks, self._broken)
            if self._broken is not None:  # nothing will ever come of what is waited for
                self._answers += [(promise, None, self._broken) for promise in self._waiting()]
            self._deliver()
            if closing and self._inbox.empty():
                self._answers = [(promise, None, StoreError(CLOSED)) for promise in self._waiting()]
                self._deliver()
                return

    def _next(self) -> list[tuple[PendingResult | None, Operation]]:
        """All that was asked, after something was or it is time to attend."""
        due = self._hooks.next_deadline()
        sleep = TICK_S if due is None else min(TICK_S, max(0.0, due - time.monotonic()))
        try:
            first = self._inbox.get(timeout=sleep)
        except Empty:
            return []
        return [first, *(self._inbox.get() for _ in range(self._inbox.qsize()))]

    def _run_batch(self, asks: list[tuple[PendingResult | None, Operation]]) -> None:
        try:
            with self._journal.transaction() as writing:
                for promise, do in asks:
                    self._run_operation(writing, promise, do)
                self._hooks.before_commit(writing, time.monotonic(), self._answer)
        except Exception as error:
            told = [promise for promise, _, _ in self._answers]
            promises = dict.fromkeys([*told, *(promise for promise, _ in asks if promise is not None)])
            self._answers = [(promise, None, error) for promise in promises]
            get_logger("store").warning("Nothing of %d things asked at the desk was written: %s", len(asks), error)
            self._start_over()
        else:
            self._hooks.after_commit()

    def _run_operation(self, writing: Transaction, promise: PendingResult | None, do: Operation) -> None:
        """One thing that was asked. What goes wrong with it is told to who asked, and spoils nothing else."""
        try:
            done = do(writing, promise)
        except Exception as error:
            if promise is not None:
                self._answers.append((promise, None, error))
        else:
            if promise is not None and done is not DEFERRED:
                self._answers.append((promise, done, None))

    def _answer(self, promise: PendingResult, answer: Any) -> None:
        self._answers.append((promise, answer, None))

    def _start_over(self) -> None:
        try:
            self._hooks.reload()
        except Exception as error:
            self._broken = StoreError(f"The desk stopped, as its journal can neither be written nor read: {error}")
            get_logger("store").error("%s", self._broken)

    def _refuse(self, asks: list[tuple[PendingResult | None, Operation]], why: Exception) -> None:
        self._answers += [(promise, None, why) for promise, _ in asks if promise is not None]

    def _waiting(self) -> list[PendingResult]:
        """Who was told that it will be answered later, and has no answer on its way."""
        told = {id(promise) for promise, _, _ in self._answers}
        return [each for each in self._hooks.pending_promises() if not each.answered and id(each) not in told]

    def _deliver(self) -> None:
        """Wake every loop once, with all its answers."""
        of_loop: defaultdict[asyncio.AbstractEventLoop, list[Reply]] = defaultdict(list)
        for answer in self._answers:
            answer[0].answered = True
            of_loop[answer[0].loop].append(answer)
        self._answers = []
        for loop, answers in of_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, answers)
            except RuntimeError:  # the loop is closed, and nobody waits there any more
                continue


def _resolve(answers: list[Reply]) -> None:
    for promise, answer, error in answers:
        if promise.future.done():
            continue
        if error is None:
            promise.future.set_result(answer)
        else:
            promise.future.set_exception(error)
