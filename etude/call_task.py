"""Calls of a user's coroutines in a task of their own, each within a time limit.

A coroutine may ignore its cancellation: a bare `except` in a loop of retries catches that too. Nothing can end it from
outside. So it is abandoned, as a thread that hangs is.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from etude.observe import get_logger

T = TypeVar("T")

CANCEL_S = 5.0
"""Seconds that a cancelled call may take to end, before it is abandoned."""
_abandoned: Counter[str] = Counter()
"""The number of abandoned calls, by whose they were."""


class TimeLimitError(Exception):
    """A call took longer than its limit."""


class CallTask:
    """A task that makes calls one after the other; it starts with the first call.

    Consumes coroutine functions; produces their results. A call that takes too long is cancelled, and so is one whose
    caller is cancelled. All calls run in the same task, so that one may leave a scope that another one entered.
    """

    def __init__(self, owner: str) -> None:
        """owner: whose calls they are, to begin a sentence with."""
        self._owner = owner
        self._calls: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelling = False
        self.is_abandoned = False
        """True if a call still runs after it was cancelled. No other call may follow."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def call(self, function: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Call a function in the task; return its result or raise its error. Raises `TimeLimitError`."""
        assert not self.is_abandoned, "its task is in another call"
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((function, outcome))
        ends: set[asyncio.Future[Any]] = {outcome, self._task}
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the caller is cancelled
            is_late = not any(end.done() for end in ends)
            if is_late:
                await self._cancel(self._task, ends)
        if is_late:
            raise TimeLimitError
        if not outcome.done():
            raise RuntimeError("it cancelled itself")
        result, error = outcome.result()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # it is the function's

    def close(self) -> None:
        """Let the task end, after its current call."""
        self._calls.put_nowait(None)

    async def _serve(self) -> None:
        while (call := await self._calls.get()) is not None:
            function, outcome = call
            try:
                ended: tuple[Any, BaseException | None] = await function(), None
            except (Exception, SystemExit) as error:  # sys.exit() in a user function is a failure of that function
                ended = None, error
            except asyncio.CancelledError as error:
                if not self._is_cancelling:  # the event loop ends, or the function cancelled itself
                    raise
                ended = None, error
            outcome.set_result(ended)

    async def _cancel(self, task: asyncio.Task[None], ends: set[asyncio.Future[Any]]) -> None:
        """Cancel the current call, and wait until it ends; abandon it if it does not."""
        self._is_cancelling = True
        task.cancel()
        done, _ = await asyncio.wait(ends, timeout=CANCEL_S, return_when=asyncio.FIRST_COMPLETED)
        self._is_cancelling = False
        if done:
            task.uncancel()
            return
        self.is_abandoned = True
        asyncio.tasks._unregister_task(task)  # an event loop waits for its tasks when it ends, and not for this one
        # It must never be collected: that would run the coroutine once more, which may then loop without an end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
        _abandoned[self._owner] += 1
        if _abandoned[self._owner].bit_count() == 1:  # 1, 2, 4, 8 …
            get_logger("calls").warning(
                "%s was cancelled, still runs %g seconds later, and is left behind; so far this happened %d times. Its "
                "code must let `asyncio.CancelledError` pass, which a bare `except:` catches.",
                self._owner,
                CANCEL_S,
                _abandoned[self._owner],
            )
