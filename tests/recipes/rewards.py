"""Reward functions for tests of runs: valid ones, invalid ones, and some with planned events."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from etude.records import Task

signals: dict[int, signal.Signals] = {}
"""The signals that this process gets, by the number of the call of `digits`."""
broken: set[str] = set()
"""The judges that fail now."""
_calls = 0
_over = threading.Event()


@contextmanager
def planned(plan: dict[int, signal.Signals]) -> Iterator[None]:
    """Send this process these signals, at these calls of `digits` from now on.

    A second signal ends the run at once. Its call waits for that: else the step could go on until the main thread
    handles the signal.
    """
    global _calls
    _calls = 0
    signals.update(plan)
    _over.clear()
    try:
        yield
    finally:
        signals.clear()
        _over.set()


def digits(task: Task, answer: str) -> float:
    """Return the share of digits in an answer: it differs within most groups."""
    global _calls
    _calls += 1
    if _calls in signals:
        os.kill(os.getpid(), signals[_calls])
        if len(signals) > 1 and _calls == max(signals):
            _over.wait(60)
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


def others(task: Task, answer: str) -> float:
    """Return the share of other characters."""
    return sum(not letter.isdigit() for letter in answer) / max(len(answer), 1)


def fragile(task: Task, answer: str) -> float:
    """Return the same, or raise from the second task on while it is in `broken`."""
    if "fragile" in broken and task.ordinal > 3:
        raise ConnectionError("the judge does not answer")
    return digits(task, answer)


def strict(task: Task, answer: str) -> float:
    """Return 1 for some answers, and raise on the others."""
    return 1.0 if len(answer) % 2 else float(task.fields["missing"])  # type: ignore[arg-type]


def in_parts(task: Task, answer: str) -> dict[str, float]:
    """Return named parts."""
    return {"digits": digits(task, answer), "short": -len(answer) / 100}


def moody(task: Task, answer: str) -> dict[str, float]:
    """Return parts that depend on the answer."""
    return {"long": 1.0} if sum(map(ord, answer)) % 2 else {"short": 0.5}


def nan(task: Task, answer: str) -> float:
    """Return NaN."""
    return math.nan


def nothing(task: Task, answer: str) -> None:
    """Return None."""


def text(task: Task, answer: str) -> str:
    """Return a string."""
    return "good"


def level(task: Task, answer: str) -> float:
    """Return the same reward for all."""
    return 0.5


def choosy(task: Task, answer: str) -> float:
    """Raise for tasks that are only scored, which are known by their ordinals."""
    if task.ordinal == task.fields["row"]:
        raise ValueError("not one of mine")
    return digits(task, answer)


gate = asyncio.Semaphore(2)


async def gated(task: Task, answer: str) -> float:
    """Judge with a semaphore, which belongs to one event loop."""
    async with gate:
        await asyncio.sleep(0.001)
        return digits(task, answer)


def mixed(task: Task, answer: str) -> dict[str, float]:
    """Return two parts, neither below 0; for every third task all answers have the same reward."""
    if task.ordinal % 3 == 0:
        return {"digits": 0.25, "length": 0.25}
    return {"digits": digits(task, answer), "length": len(answer) / 20}
