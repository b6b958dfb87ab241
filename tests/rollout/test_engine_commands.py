"""The command queue: each caller gets a result, an error, or a refusal, and none waits forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from etude.errors import EngineError
from etude.rollout import engine_thread as module
from etude.rollout.engine_thread import EngineCommands


@contextmanager
def worked(inbox: EngineCommands) -> Iterator[None]:
    """Start a thread that executes commands until the queue is closed."""

    def loop() -> None:
        while inbox.run_pending(lambda: False, lambda: None, lambda: None):
            pass

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        inbox.close()
        thread.join(10)
        assert not thread.is_alive()


def leave() -> None:
    raise SystemExit("no mere Exception")


def test_an_error_of_a_command_reaches_its_caller_and_not_the_thread() -> None:
    inbox = EngineCommands()
    with worked(inbox):
        for _ in range(2):
            with pytest.raises(SystemExit, match="no mere Exception"):
                inbox.call(leave)
        inbox.submit(leave)
        assert inbox.call(lambda: 7) == 7
        assert asyncio.run(inbox.call_async(lambda: 8)) == 8


def test_after_the_end_waiting_callers_get_an_error_and_later_ones_are_refused() -> None:
    inbox = EngineCommands()
    errors: list[str] = []

    def asks() -> None:
        try:
            inbox.call(lambda: 7)
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=asks)
    thread.start()
    while not inbox._commands:
        thread.join(0.001)
    inbox.fail_pending(EngineError("The device is lost."))
    thread.join(10)
    asks()
    assert errors == ["The device is lost."] * 2


def test_the_wait_for_a_result_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_TIMEOUT", 0.02)
    inbox = EngineCommands()
    with pytest.raises(EngineError, match=r"has not answered for 0.02 s"):
        inbox.call(lambda: 7)
    with pytest.raises(EngineError, match=r"has not answered for 0.02 s"):
        asyncio.run(inbox.call_async(lambda: 7))


def test_a_timeout_inside_a_command_is_its_own_error() -> None:
    def slow() -> None:
        raise TimeoutError("of the act itself")

    inbox = EngineCommands()
    with worked(inbox):
        with pytest.raises(TimeoutError, match="of the act itself"):
            inbox.call(slow)
        with pytest.raises(TimeoutError, match="of the act itself"):
            asyncio.run(inbox.call_async(slow))
