"""Environments and tools for tests of runs: valid ones, and those that break their contract."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any, ClassVar

from etude.envs import Observation, TextEnv
from etude.records import Message, Task

NOBODY = 3
stop = threading.Event()
"""Ends calls that hang."""


class Echo(TextEnv):
    """An environment that repeats the answer, and pays for digits, for a number of turns."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def begin(self) -> str:
        self.turns_taken = 0
        return f"{self.task.fields['prompt']}"

    def play(self, answer: str) -> Observation:
        self.turns_taken += 1
        paid = sum(letter.isdigit() for letter in answer) / 8
        return Observation(f"{answer[:3]}:", reward=paid, done=self.turns_taken == self.turns)


class Commas(TextEnv):
    """An environment that pays for commas, for two turns."""

    def begin(self) -> str:
        self.turns_taken = 0
        return f"{self.task.fields['prompt']}"

    def play(self, answer: str) -> Observation:
        self.turns_taken += 1
        return Observation(",:", reward=float(answer == ","), done=self.turns_taken == 2)


def make_echo() -> Echo:
    """Create an environment by a function."""
    return Echo(1)


class Deaf:
    """An environment without `step`."""

    def reset(self, task: Task) -> Observation:
        """Begin an episode."""
        return Observation("hm")


class Picky(Echo):
    """An environment whose constructor takes an argument."""

    def __init__(self, taste: str) -> None:
        super().__init__()


class Odd:
    """An environment that does the task's action at the task's step, and records its closing."""

    closed: ClassVar[list[int]] = []
    threads: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, task: Task) -> Any:
        """Begin, or do the action of step 0."""
        self.task = task
        return self._act(task.fields.get("at") == 0) or Observation("go")

    def step(self, answer: Message) -> Any:
        """Continue, or do the action of this step."""
        self.steps += 1
        return self._act(task_step(self.task) == self.steps) or Observation(f"step {self.steps}", reward=0.25)

    def close(self) -> None:
        """Record the closing."""
        Odd.closed.append(self.task.ordinal)
        Odd.threads.append(threading.get_ident())

    def _act(self, now: bool) -> Any:
        Odd.threads.append(threading.get_ident())
        if not now:
            return None
        return getattr(self, str(self.task.fields["act"]))()

    def end(self) -> Observation:
        """End with a reward in parts."""
        return Observation(done=True, reward={"won": 1.0, "style": 0.5})

    def cut(self) -> Observation:
        """End by truncation."""
        return Observation("over", truncated=True)

    def hang(self) -> None:
        """Hang."""
        stop.wait(30)

    def late(self) -> Any:
        """Hang in a coroutine."""
        return asyncio.sleep(30)

    async def stubborn(self) -> None:
        """Hang in a coroutine that ignores its cancellation."""
        while True:
            try:
                await asyncio.sleep(30)
            except:  # noqa: E722
                continue

    def crash(self) -> None:
        """Raise an exception."""
        raise KeyError("board")

    def leave(self) -> None:
        """Raise SystemExit."""
        raise SystemExit(3)

    def text(self) -> str:
        """Return a string, which is no observation."""
        return "well done"

    def none(self) -> Observation:
        """Return an observation without content."""
        return Observation()

    def unpaid(self) -> Observation:
        """Return a reward that is not a number."""
        return Observation("go", reward=float("nan"))

    def typo(self) -> Observation:
        """Return content of a wrong type."""
        return Observation(3)  # type: ignore[arg-type]

    def half(self) -> Observation:
        """Return content with half a character."""
        return Observation("\ud800")

    def chat(self) -> Observation:
        """Return messages after text."""
        return Observation([Message("user", "?")])

    def wrong(self) -> Observation:
        """Return an unknown role."""
        return Observation("go", role="white")  # type: ignore[arg-type]


class OddlyClosed(Odd):
    """The same, closed by a coroutine function."""

    async def close(self) -> None:  # type: ignore[override]
        """Record the closing."""
        await asyncio.sleep(0)
        super().close()


def task_step(task: Task) -> object:
    """Return the step at which a task wants its action."""
    return task.fields.get("at")


class Waits:
    """The same game with coroutine functions."""

    def __init__(self) -> None:
        self.echo = Echo(2)

    async def reset(self, task: Task) -> Observation:
        """Begin an episode."""
        await asyncio.sleep(0.001)
        return self.echo.reset(task)

    async def step(self, answer: Message) -> Observation:
        """Continue the episode."""
        await asyncio.sleep(0.001)
        return self.echo.step(answer)


class Blocks(Echo):
    """The same game, which sleeps on its thread."""

    def play(self, answer: str) -> Observation:
        time.sleep(0.05)
        return super().play(answer)


class Sides(Echo):
    """The same game, in which the model plays one of two roles."""

    def reset(self, task: Task) -> Observation:
        return replace(super().reset(task), role=1 + task.ordinal % 2, anchor="same")


class Talks:
    """An environment that shows messages, and pays for a five, for two turns."""

    def reset(self, task: Task) -> Observation:
        """Begin with the task's own prompt."""
        self.left = 2
        return Observation()

    def step(self, answer: Message) -> Observation:
        """Ask again."""
        self.left -= 1
        messages = [{"role": "user", "content": "more"}]
        return Observation(messages, reward=float(answer.content == "5"), done=self.left == 0)


class Offers:
    """An environment that offers its own tools."""

    def reset(self, task: Task) -> Observation:
        """Begin an episode."""
        return Observation([Message("user", "?")], tools=[{"type": "function", "function": {"name": "f"}}])

    def step(self, answer: Message) -> Observation:
        """End the episode."""
        return Observation(done=True)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def untold(a: int) -> int:
    return a
