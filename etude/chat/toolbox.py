"""Calls of user functions, outside of the event loop and bounded: no function can stop a run.

Code that may block is called on a thread. A thread cannot be ended from outside. If its caller stops waiting, the
thread is abandoned and ends with its call. More than `MAX_ABANDONED_THREADS` such threads are an error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Self

from etude.call_task import CallTask, TimeLimitError
from etude.chat.function_tools import FunctionTool, InvalidToolCallError, format_result
from etude.errors import EnvError, PluginError
from etude.records import ContentPart, Message, Task, ToolCall

MAX_ABANDONED_THREADS = 64
"""The most abandoned threads of a process that are still in their calls."""
ERROR_PREFIX = "Error: "
"""The prefix of the tool result for a call that failed."""

_abandoned: list[threading.Thread] = []


class CallThread:
    """A thread that makes calls one after the other; it starts with the first call.

    Consumes functions; produces their results. The caller may be cancelled at any time. Then the thread only makes the
    `last` call, once its current call has ended.
    """

    def __init__(self, name: str = "etude-aside") -> None:
        _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
        if len(_abandoned) >= MAX_ABANDONED_THREADS:
            raise EnvError(
                f"{len(_abandoned)} calls of environments or tools took too long and still run. Each holds a thread, "
                "which cannot be ended from outside. Give that code timeouts, and start the run again: it resumes "
                f"from here."
            )
        self._name = name
        self._calls: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_idle = True
        """True if no call is active."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on the thread; return its result or raise its error."""
        assert self.is_idle, "one call at a time"
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name=self._name)
            self._thread.start()
        call = _ThreadCall(function, args, kwargs)
        self.is_idle = False
        self._calls.put(call)
        result, error = await call.result
        self.is_idle = True
        if error is not None:
            raise error
        return result

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Let the thread end, after its current call and a `last` call, for which this does not wait."""
        if self._thread is None:
            return
        if not self.is_idle:
            _abandoned.append(self._thread)
        if last is not None:
            self._calls.put(_ThreadCall(last, (), {}))
        self._calls.put(None)
        self._thread = None

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()


class _ThreadCall:
    """One call on a thread, awaited on an event loop."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[tuple[Any, Exception | None]] = self._loop.create_future()

    def run(self) -> None:
        """Make the call."""
        try:
            outcome: tuple[Any, Exception | None] = self._function(*self._args, **self._kwargs), None
        except Exception as error:
            outcome = None, error
        except BaseException as error:  # sys.exit() in a user function is a failure of that function
            raised = RuntimeError(f"{type(error).__name__} was raised")
            outcome = None, raised.with_traceback(error.__traceback__)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._set_result, outcome)

    def _set_result(self, result: tuple[Any, Exception | None]) -> None:
        if not self.result.done():
            self.result.set_result(result)


class Toolbox:
    """Functions that a model may call, each call bounded by `timeout` seconds.

    An error of a call is reported to the model and raises nothing. Coroutine functions are awaited here; others
    are called on their own thread. The calls of one answer run concurrently if `parallel`, else one after the other.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout: float, *, parallel: bool = True) -> None:
        self._timeout = timeout
        self._parallel = parallel
        self._tools: dict[str, FunctionTool] = {}
        for function in functions:
            tool = FunctionTool(function)
            if tool.name in self._tools:
                raise PluginError(
                    f"Two tools have the name `{tool.name}`. Give each its own name: the model calls tools by name."
                )
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools' schemas for the model."""
        return tuple(tool.schema for tool in self._tools.values())

    async def run_calls(self, calls: Sequence[ToolCall], task: Task | None = None) -> tuple[Message, ...]:
        """Return the results of calls, one message each, in order."""
        if self._parallel:
            results = list(await asyncio.gather(*(self._run_call(call, task) for call in calls)))
        else:
            results = [await self._run_call(call, task) for call in calls]
        return tuple(
            Message("tool", result, tool_call_id=call.id, name=call.name)
            for call, result in zip(calls, results, strict=True)
        )

    async def _run_call(self, call: ToolCall, task: Task | None) -> str | tuple[ContentPart, ...]:
        tool = self._tools.get(call.name)
        if tool is None:
            return f"{ERROR_PREFIX}there is no tool `{call.name}`. The tools are: {', '.join(self._tools)}."
        try:
            arguments = tool.parse_arguments(call.arguments, task)
            with CallTask(f"The tool `{tool.name}`") as calls:
                return format_result(await calls.call(partial(self._invoke, tool, arguments), self._timeout))
        except InvalidToolCallError as error:
            return f"{ERROR_PREFIX}{error}"
        except EnvError:
            raise
        except TimeLimitError:
            return f"{ERROR_PREFIX}`{tool.name}` took longer than {self._timeout:g} s and was cancelled."
        except (Exception, SystemExit) as error:
            return f"{ERROR_PREFIX}`{tool.name}` raised {type(error).__name__}: {error}"

    async def _invoke(self, tool: FunctionTool, arguments: Mapping[str, Any]) -> Any:
        if tool.is_async:
            return await tool.function(**arguments)
        with CallThread(f"etude-tool-{tool.name}") as call_thread:
            return await call_thread.call(tool.function, **arguments)
