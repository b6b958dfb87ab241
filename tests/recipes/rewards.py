"""Reward functions of the runs that are tested: good ones, bad ones, and some that do what a test has planned."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from etude.records import Task

signals: dict[int, signal.Signals] = {}
"""At which call of `digits` this process gets a signal, and which."""
broken: set[str] = set()
"""Which judges are out of order."""
_calls = 0


@contextmanager
def planned(plan: dict[int, signal.Signals]) -> Iterator[None]:
    """Send this process these signals, at these calls of `digits` from now on."""
    global _calls
    _calls = 0
    signals.update(plan)
    try:
        yield
    finally:
        signals.clear()


def digits(task: Task, answer: str) -> float:
    """The share of digits in an answer: it differs within most groups."""
    global _calls
    _calls += 1
    if _calls in signals:
        os.kill(os.getpid(), signals[_calls])
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


def fragile(task: Task, answer: str) -> float:
    """The same, by a judge that can be out of order; then it fails from its second task on."""
    if "fragile" in broken and task.ordinal > 3:
        raise ConnectionError("the judge does not answer")
    return digits(task, answer)


def strict(task: Task, answer: str) -> float:
    """Pays for answers that it can read, and raises on the others."""
    return 1.0 if len(answer) % 2 else float(task.fields["missing"])  # type: ignore[arg-type]


def in_parts(task: Task, answer: str) -> dict[str, float]:
    """Named parts."""
    return {"digits": digits(task, answer), "short": -len(answer) / 100}


def moody(task: Task, answer: str) -> dict[str, float]:
    """Parts that depend on the answer."""
    return {"long": 1.0} if sum(map(ord, answer)) % 2 else {"short": 0.5}


def nan(task: Task, answer: str) -> float:
    """No number."""
    return math.nan


def nothing(task: Task, answer: str) -> None:
    """Nothing at all."""


def text(task: Task, answer: str) -> str:
    """A word."""
    return "good"


def level(task: Task, answer: str) -> float:
    """The same for everybody."""
    return 0.5


def choosy(task: Task, answer: str) -> float:
    """No judge of tasks that are only scored: of those the first five rows are known by their ordinals."""
    if task.ordinal == task.fields["row"]:
        raise ValueError("not one of mine")
    return digits(task, answer)


gate = asyncio.Semaphore(2)


async def gated(task: Task, answer: str) -> float:
    """A judge with something of its own that lives in one event loop."""
    async with gate:
        await asyncio.sleep(0.001)
        return digits(task, answer)


def mixed(task: Task, answer: str) -> dict[str, float]:
    """Two parts, neither below 0; of every third task all answers earn the same."""
    if task.ordinal % 3 == 0:
        return {"digits": 0.25, "length": 0.25}
    return {"digits": digits(task, answer), "length": len(answer) / 20}
