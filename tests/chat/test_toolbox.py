"""The model gets the error of any function in time, and the run continues."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from etude.chat import CallThread, Toolbox, toolbox
from etude.errors import EnvError, PluginError
from etude.records import Message, Task, ToolCall

stop = threading.Event()
"""Ends what would otherwise hang for long after its test."""


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    stop.clear()
    yield
    stop.set()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fails(why: str) -> None:
    """Fail."""
    raise ValueError(why)


def leaves() -> None:
    """End the program."""
    sys.exit(3)


def hangs(seconds: float) -> str:
    """Take long."""
    stop.wait(seconds)
    return "there"


async def awaits(seconds: float) -> str:
    """Take long, and let others go on meanwhile."""
    await asyncio.sleep(seconds)
    return "there"


def which(task: Task) -> int:
    """Say which task it is."""
    return task.ordinal


FUNCTIONS: list[Callable[..., Any]] = [add, fails, leaves, hangs, awaits, which]


def run_calls(*calls: tuple[str, str], timeout: float = 5.0, parallel: bool = True) -> list[str]:
    """The results of some calls, as the model gets them."""
    wanted = [ToolCall(f"call_{place}", name, arguments) for place, (name, arguments) in enumerate(calls)]
    results = asyncio.run(Toolbox(FUNCTIONS, timeout, parallel=parallel).run_calls(wanted, Task(7, {})))
    assert [(message.role, message.tool_call_id, message.name) for message in results] == [
        ("tool", call.id, call.name) for call in wanted
    ]
    return [str(message.content) for message in results]


def test_calls_are_answered_in_order() -> None:
    assert run_calls(("add", '{"a": 2, "b": 3}'), ("which", ""), ("add", '{"a": 1, "b": "4"}')) == ["5", "7", "5"]


def test_errors_are_reported_to_the_model() -> None:
    assert run_calls(("fails", '{"why": "no luck"}')) == ["Error: `fails` raised ValueError: no luck"]
    assert run_calls(("leaves", "{}"))[0].startswith("Error: `leaves` raised RuntimeError: SystemExit")
    assert run_calls(("add", '{"a": 2}')) == ['Error: `add` cannot be called with {"a": 2}: b: Field required']
    assert run_calls(("subtract", "{}"))[0].startswith("Error: there is no tool `subtract`. The tools are: add, fails")


@pytest.mark.parametrize("name", ["hangs", "awaits"])
def test_a_call_that_takes_too_long_is_given_up(name: str) -> None:
    began = time.monotonic()
    (text,) = run_calls((name, '{"seconds": 20}'), timeout=0.2)
    assert text == f"Error: `{name}` took longer than 0.2 s and was cancelled." and time.monotonic() - began < 15


@pytest.mark.parametrize("name", ["hangs", "awaits"])
def test_calls_run_at_once_or_one_after_the_other(name: str) -> None:
    calls = [(name, '{"seconds": 0.2}')] * 4
    began = time.monotonic()
    assert run_calls(*calls) == ["there"] * 4
    at_once = time.monotonic() - began
    began = time.monotonic()
    assert run_calls(*calls, parallel=False) == ["there"] * 4
    assert max(at_once, 0.8) <= time.monotonic() - began


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(PluginError, match="Two tools have the name `add`"):
        Toolbox([add, add], 1.0)


def in_a_loop(act: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(act())


def test_one_thread_makes_all_calls_of_a_rollout_without_blocking_the_loop() -> None:
    async def act() -> None:
        with CallThread() as one, CallThread() as other:
            threads = [await one.call(threading.get_ident) for _ in range(3)]
            assert len(set(threads)) == 1 and threads[0] != await other.call(threading.get_ident)
            asyncio.get_running_loop().call_later(0.02, stop.set)
            assert await one.call(stop.wait, 20), "the loop was blocked"
            with pytest.raises(ZeroDivisionError):
                await one.call(lambda: 1 / 0)
            assert await one.call(add, 1, b=2) == 3

    in_a_loop(act)


def test_an_abandoned_thread_makes_its_last_call_and_ends() -> None:
    closed: list[str] = []

    async def act() -> threading.Thread:
        aside = CallThread()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await aside.call(hangs, 20)
        thread = aside._thread
        aside.close(lambda: closed.append("closed"))
        assert thread is not None and thread.is_alive()
        return thread

    thread = in_a_loop(act)
    stop.set()
    thread.join(5.0)
    assert closed == ["closed"] and not thread.is_alive()


def test_too_many_threads_that_hang_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "MAX_ABANDONED_THREADS", 3)
    calls = [("hangs", '{"seconds": 20}')] * 4
    with pytest.raises(EnvError, match=r"calls of environments or tools took too long"):
        for _ in range(2):
            run_calls(*calls, timeout=0.05)
    stop.set()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in toolbox._abandoned) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run_calls(("add", '{"a": 2, "b": 3}')) == ["5"], "threads that have ended do not count"


def test_a_result_is_a_message_by_the_tool() -> None:
    (message,) = asyncio.run(Toolbox([add], 1.0).run_calls([ToolCall("x", "add", '{"a": 2, "b": 3}')]))
    assert message == Message("tool", "5", tool_call_id="x", name="add")
