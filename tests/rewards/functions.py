"""Reward functions as users write them, good and bad. Processes that judge import them from here."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.records import Task
from etude.rewards import Math
from etude.rewards.maths import is_equal

NO_FUNCTION = 3


class LoadedMath(Math):
    """The reward of mathematics, which loads its library before the first answer, as the limit is for the answer."""

    def prepare(self) -> None:
        """Load it."""
        assert is_equal("4", "4")


def length(task: Task, answer: str) -> float:
    return float(len(answer))


async def waited(task: Task, answer: str) -> float:
    await asyncio.sleep(float(answer))
    return 1.0


async def stubborn(task: Task, answer: str) -> float:
    """Try again after every error, its cancellation included."""
    while True:
        try:
            await asyncio.sleep(60)
        except:  # noqa: E722
            continue


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """verl's signature, with verl's mixture of values in the result."""
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "seen": bool(extra_info), "pred": solution_str + data_source}


def many(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """TRL's signature."""
    return [0.0 for _ in completions]


def process(task: Task, answer: str) -> int:
    return os.getpid()


def returned(task: Task, answer: str) -> Any:
    """Return the value that the answer names."""
    values: Mapping[str, Any] = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "0.5",
        "array": np.ones(3),
        "true": True,
        "numpy": np.float32(0.5),
        "no dimensions": np.array(0.25),
        "parts": {"right": 1, "short": np.int64(2)},
        "empty": {},
        "nan part": {"right": float("nan")},
        "text part": {"right": "yes"},
        "number name": {1: 1.0},
        "nan beside a score": {"score": 1.0, "acc": float("nan")},
        "nan score": {"score": float("nan")},
    }
    return values[answer]


def misbehaves(task: Task, answer: str) -> float:
    """Misbehave as the answer says."""
    match answer.split():
        case ["raise"]:
            raise ValueError("no such luck")
        case ["exit"]:
            sys.exit("enough")
        case ["die"]:
            os._exit(3)
        case ["crash"]:
            os.abort()
        case ["loop"]:
            while True:
                pass
        case ["hold"]:  # this match never ends, and holds the interpreter lock
            re.match(r"(a+)+$", "a" * 60 + "b")
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["print"]:
            print("a word on standard output")
        case ["child", path]:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(path, "w") as file:  # noqa: PTH123
                file.write(str(child.pid))
            while True:
                pass
    return 1.0


def announced(task: Task, answer: str) -> float:
    """Print the number of its process, then misbehave as the answer says."""
    print(os.getpid(), flush=True)
    return misbehaves(task, answer)


def no_known_names(question: str, reply: str) -> float:
    return 0.0


def owes_more(task: Task, answer: str, tokenizer: Any) -> float:
    return 0.0


def takes_any(solution_str: str, ground_truth: str, **others: Any) -> float:
    return float(len(others))


def lacks(task: Task, answer: str) -> float:
    """Access a missing field, in the way that the answer names."""
    match answer:
        case "field":
            return float(task.fields["anser"])  # type: ignore[arg-type]
        case "item":
            return float(task["anser"])
        case "attribute":
            return float(task.anser)  # type: ignore[attr-defined]
        case "other":
            return float(dict[str, float]()["anser"])
        case _:
            raise ValueError("no such luck")


def of_verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return float(extra_info[solution_str])


class Unshown(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Broken:
    """A value that raises at every inspection."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)

    def __repr__(self) -> str:
        raise RuntimeError("not even this")


def strange(task: Task, answer: str) -> Any:
    """Return a value that is hard to inspect."""
    if answer == "unshown":
        raise Unshown
    values = {"huge": 10**400, "minus": -(10**400), "long": "x" * 100_000, "broken": Broken()}
    return values.get(answer, 1.0)


class Holder:
    """A callable object, which is a reward function too, also as a coroutine function."""

    def __init__(self, value: float) -> None:
        self.value = value

    async def __call__(self, task: Task, answer: str) -> float:
        return self.value
