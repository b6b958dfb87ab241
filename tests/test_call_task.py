"""Calls of coroutines end in time, whatever the coroutines do with their cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from etude import call_task
from etude.call_task import CallTask, TimeLimitError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_task, "CANCEL_S", 0.02)


def stubborn(ends: asyncio.Event) -> Callable[[], Awaitable[str]]:
    """Return a function that goes on after it is cancelled, until this event."""

    async def function() -> str:
        while not ends.is_set():
            try:
                await ends.wait()
            except BaseException:  # as in a loop of retries
                continue
        return "ended"

    return function


async def call(function: Callable[[], Awaitable[Any]], seconds: float = 5.0) -> Any:
    with CallTask("The test") as calls:
        return await calls.call(function, seconds)


async def exits() -> None:
    raise SystemExit("enough")


async def cancels_itself() -> None:
    raise asyncio.CancelledError


def test_a_result_or_an_error_is_passed_on() -> None:
    async def act() -> None:
        assert await call(lambda: asyncio.sleep(0, "there")) == "there"
        with pytest.raises(SystemExit, match="enough"):
            await call(exits)
        with pytest.raises(RuntimeError, match="it cancelled itself"):
            await call(cancels_itself)

    asyncio.run(act())


def test_a_call_that_is_late_is_cancelled_and_the_next_one_runs_in_the_same_task() -> None:
    tasks: list[Any] = []

    async def late() -> None:
        tasks.append(asyncio.current_task())
        await asyncio.sleep(60)

    async def quick() -> None:
        tasks.append(asyncio.current_task())
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    async def act() -> None:
        with CallTask("The test") as calls:
            with pytest.raises(TimeLimitError):
                await calls.call(late, 0.01)
            await calls.call(quick, 5.0)
            assert tasks[0] is tasks[1] and not calls.is_abandoned

    asyncio.run(act())


def test_a_caller_that_is_cancelled_as_its_call_ends_makes_the_next_one_in_the_same_task() -> None:
    tasks: list[Any] = []

    async def note() -> None:
        tasks.append(asyncio.current_task())

    async def act() -> None:
        with CallTask("The test") as calls:

            async def ends_beside_its_caller() -> None:
                await note()
                asyncio.get_running_loop().call_soon(caller.cancel)

            async def calls_twice() -> None:
                try:
                    await calls.call(ends_beside_its_caller, 5.0)
                finally:
                    await calls.call(note, 5.0)

            caller = asyncio.create_task(calls_twice())
            with pytest.raises(asyncio.CancelledError):
                await caller
            assert len(tasks) == 2 and tasks[0] is tasks[1]

    asyncio.run(act())


def test_a_result_that_a_cancelled_call_returns_is_late() -> None:
    async def act() -> None:
        ends = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, ends.set)
        with pytest.raises(TimeLimitError):
            await call(stubborn(ends), 0.01)

    asyncio.run(act())


@pytest.mark.parametrize("cause", ["limit", "caller"])
def test_a_call_that_ignores_its_cancellation_holds_neither_its_caller_nor_the_loop(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act() -> None:
        calling = asyncio.create_task(call(stubborn(asyncio.Event()), 0.01 if cause == "limit" else 60))
        await asyncio.sleep(0)
        if cause == "caller":
            calling.cancel()
        with pytest.raises(TimeLimitError if cause == "limit" else asyncio.CancelledError):
            await calling

    call_task._abandoned.clear()
    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(act(), 10))
    assert "The test was cancelled, still runs 0.02 seconds later, and is left behind" in caplog.text
