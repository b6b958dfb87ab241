"""Calls of somebody else's functions, beside the event loop and bounded: nothing that they do can stop a run.

Code that may block is called on a thread. No thread can be ended from outside, so one whose call is no longer waited
for is left to itself and ends with its call; there may be `MOST` of those before it is said that something is wrong.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from etude.chat.functions import Tool, WrongCallError, shown
from etude.errors import EnvError, PlugInError
from etude.records import Message, Task, ToolCall

__all__ = ["FAILED", "Aside", "Toolbox"]

MOST = 64
"""How many threads may be left to themselves in a process, all still in their calls."""
FAILED = "Error: "
"""How what the model is told of a call that failed begins."""

_left: list[threading.Thread] = []


class Aside:
    """A thread on which calls are made one after the other; it begins with the first of them.

    Consumes functions; produces what they return. Whoever waits may be cancelled at any time: the thread then makes no
    further call but the `last`, once the one that is under way has ended.
    """

    def __init__(self, name: str = "etude-aside") -> None:
        _left[:] = [thread for thread in _left if thread.is_alive()]
        if len(_left) >= MOST:
            raise EnvError(
                f"{len(_left)} calls of environments or tools were given up for taking too long, and none of them has "
                f"ended: each holds a thread, which nothing can end. Have that code give up by itself, as by timeouts "
                f"of its own, and start the run again: it goes on from here."
            )
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.idle = True
        """Whether no call is under way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a function returns, or raises."""
        assert self.idle, "one call at a time"
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name=self._name)
            self._thread.start()
        call = _Call(function, given, named)
        self.idle = False
        self._calls.put(call)
        result, error = await call.ended
        self.idle = True
        if error is not None:
            raise error
        return result

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Let the thread end, after the call that is under way and a `last` one that nobody waits for."""
        if self._thread is None:
            return
        if not self.idle:
            _left.append(self._thread)
        if last is not None:
            self._calls.put(_Call(last, (), {}))
        self._calls.put(None)
        self._thread = None

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()


class _Call:
    """One call, made on a thread and waited for in an event loop."""

    def __init__(self, function: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._function, self._given, self._named = function, given, named
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[tuple[Any, Exception | None]] = self._loop.create_future()

    def make(self) -> None:
        """Make it."""
        try:
            told: tuple[Any, Exception | None] = self._function(*self._given, **self._named), None
        except Exception as error:
            told = None, error
        except BaseException as error:  # sys.exit() in somebody's function is a failure of that function
            raised = RuntimeError(f"{type(error).__name__} was raised")
            told = None, raised.with_traceback(error.__traceback__)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, told)

    def _tell(self, told: tuple[Any, Exception | None]) -> None:
        if not self.ended.done():
            self.ended.set_result(told)


class Toolbox:
    """Functions that a model may call, each call bounded by `timeout` seconds.

    Whatever goes wrong with a call is told to the model and raises nothing. Coroutine functions are awaited here, any
    other is called on a thread of its own. The calls of one answer are made at once where they are `parallel`, else one
    after the other.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout: float, *, parallel: bool = True) -> None:
        self._timeout, self._parallel = timeout, parallel
        self._tools: dict[str, Tool] = {}
        for function in functions:
            tool = Tool(function)
            if tool.name in self._tools:
                raise PlugInError(f"Two tools are called `{tool.name}`. Name them apart: the model calls them by name.")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told of them."""
        return tuple(tool.schema for tool in self._tools.values())

    async def answer(self, calls: Sequence[ToolCall], task: Task | None = None) -> tuple[Message, ...]:
        """What came of some calls, one message each, in their order."""
        if self._parallel:
            texts = list(await asyncio.gather(*(self._made(call, task) for call in calls)))
        else:
            texts = [await self._made(call, task) for call in calls]
        return tuple(
            Message("tool", text, tool_call_id=call.id, name=call.name) for call, text in zip(calls, texts, strict=True)
        )

    async def _made(self, call: ToolCall, task: Task | None) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            return f"{FAILED}there is no tool `{call.name}`; there are: {', '.join(self._tools)}."
        bound = asyncio.timeout(self._timeout)
        try:
            given = tool.arguments(call.arguments, task)
            async with bound:
                return shown(await self._called(tool, given))
        except WrongCallError as error:
            return f"{FAILED}{error}"
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            if bound.expired():
                return f"{FAILED}`{tool.name}` took longer than {self._timeout:g} seconds, and was given up."
            return f"{FAILED}`{tool.name}` raised {type(error).__name__}: {error}"

    async def _called(self, tool: Tool, given: Mapping[str, Any]) -> Any:
        if tool.waits:
            return await tool.function(**given)
        with Aside(f"etude-tool-{tool.name}") as aside:
            return await aside.call(tool.function, **given)
