"""Environments and tools of the runs that are tested: good ones, and those that break their word."""

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
"""Ends what hangs."""


class Echo(TextEnv):
    """Says what was said, and pays for digits, until so many turns were taken."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def begin(self) -> str:
        self.taken = 0
        return f"{self.task.fields['prompt']}"

    def play(self, answer: str) -> Observation:
        self.taken += 1
        paid = sum(letter.isdigit() for letter in answer) / 8
        return Observation(f"{answer[:3]}:", reward=paid, done=self.taken == self.turns)


def make_echo() -> Echo:
    """An environment from a function."""
    return Echo(1)


class Deaf:
    """It does not listen."""

    def reset(self, task: Task) -> Observation:
        """Begin."""
        return Observation("hm")


class Picky(Echo):
    """It wants to be asked."""

    def __init__(self, taste: str) -> None:
        super().__init__()


class Odd:
    """Does what its task says at the step that it says, and is closed in the end."""

    closed: ClassVar[list[int]] = []
    threads: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, task: Task) -> Any:
        """Begin, or do what is to be done at step 0."""
        self.task = task
        return self._act(task.fields.get("at") == 0) or Observation("go")

    def step(self, answer: Message) -> Any:
        """Go on, or do what is to be done now."""
        self.steps += 1
        return self._act(task_step(self.task) == self.steps) or Observation(f"step {self.steps}", reward=0.25)

    def close(self) -> None:
        """Be closed."""
        Odd.closed.append(self.task.ordinal)
        Odd.threads.append(threading.get_ident())

    def _act(self, now: bool) -> Any:
        Odd.threads.append(threading.get_ident())
        if not now:
            return None
        return getattr(self, str(self.task.fields["act"]))()

    def end(self) -> Observation:
        """The end."""
        return Observation(done=True, reward={"won": 1.0, "style": 0.5})

    def cut(self) -> Observation:
        """Another end."""
        return Observation("over", truncated=True)

    def hang(self) -> None:
        """For long."""
        stop.wait(30)

    def late(self) -> Any:
        """In a coroutine, for long."""
        return asyncio.sleep(30)

    def crash(self) -> None:
        """A mistake."""
        raise KeyError("board")

    def leave(self) -> None:
        """A rude end."""
        raise SystemExit(3)

    def text(self) -> str:
        """No observation."""
        return "well done"

    def none(self) -> Observation:
        """Nothing shown."""
        return Observation()

    def unpaid(self) -> Observation:
        """A reward that is none."""
        return Observation("go", reward=float("nan"))

    def typo(self) -> Observation:
        """Shown what cannot be shown."""
        return Observation(3)  # type: ignore[arg-type]

    def half(self) -> Observation:
        """Shown half a character."""
        return Observation("\ud800")

    def chat(self) -> Observation:
        """Messages where text was begun."""
        return Observation([Message("user", "?")])

    def wrong(self) -> Observation:
        """No such role."""
        return Observation("go", role="white")  # type: ignore[arg-type]


class OddlyClosed(Odd):
    """The same, closed by a coroutine function."""

    async def close(self) -> None:  # type: ignore[override]
        """Be closed."""
        await asyncio.sleep(0)
        super().close()


def task_step(task: Task) -> object:
    """At which step a task wants something done."""
    return task.fields.get("at")


class Waits:
    """The same game, awaited."""

    def __init__(self) -> None:
        self.echo = Echo(2)

    async def reset(self, task: Task) -> Observation:
        """Begin."""
        await asyncio.sleep(0.001)
        return self.echo.reset(task)

    async def step(self, answer: Message) -> Observation:
        """Go on."""
        await asyncio.sleep(0.001)
        return self.echo.step(answer)


class Blocks(Echo):
    """The same game, and it sleeps on its thread."""

    def play(self, answer: str) -> Observation:
        time.sleep(0.05)
        return super().play(answer)


class Sides(Echo):
    """The same game, in which the model is one player or another."""

    def reset(self, task: Task) -> Observation:
        return replace(super().reset(task), role=1 + task.ordinal % 2, anchor="same")


class Talks:
    """It shows messages, and pays for a five, twice."""

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
    """It offers tools of its own."""

    def reset(self, task: Task) -> Observation:
        """Begin."""
        return Observation([Message("user", "?")], tools=[{"type": "function", "function": {"name": "f"}}])

    def step(self, answer: Message) -> Observation:
        """The end."""
        return Observation(done=True)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def untold(a: int) -> int:
    return a
