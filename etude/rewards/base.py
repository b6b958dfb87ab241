"""The base class of rewards: a frozen object that holds its own options and is called with a task and an answer.

A reward reads text only: no logits, no token ids. It returns a number or named parts; `parse_score` interprets them.
A new reward is a subclass with its fields and `__call__`. A run chooses it by its name in `REWARDS`, or from outside
as `module:Name`. A function without options is chosen by `function` instead.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias
from weakref import WeakKeyDictionary

from etude.config import Config
from etude.errors import DataError, RewardError
from etude.observe import Metrics
from etude.records import Task

MAX_VALUE_CHARS = 100
"""The most characters that an error shows of a value which is not a number."""
Score: TypeAlias = float | Mapping[str, float]


class CapacityLimiter:
    """At most `limit` calls at a time, in order of arrival. Each event loop has its own limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def slot(self) -> asyncio.Semaphore:
        """Return the context that waits for a free slot and holds it."""
        return self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))


class RewardFunction(Config, ABC):
    """A score for the text of an answer."""

    quick: ClassVar[bool] = False
    """True where every call ends at once. The judge then calls it in the event loop, without a time limit."""
    default_workers: ClassVar[int] = 0
    """The number of processes that compute it, unless the run sets `judging.workers`."""
    in_place: ClassVar[bool] = False
    """True for a coroutine that must run in the run's own process, because it orders its own calls."""

    @property
    def title(self) -> str:
        """The name of this reward in messages: its class's, in lower case with underscores."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def scores_answers(self) -> bool:
        """False where all reward comes from the environment and none from the answer's text."""
        return True

    @property
    def is_async(self) -> bool:
        """True where a call returns a coroutine, which waits more than it computes."""
        return inspect.iscoroutinefunction(type(self).__call__)

    @property
    def max_seconds(self) -> float:
        """The seconds within which a call ends and gives a reward, also for an answer that takes too long.

        0 promises nothing: then only `judging.timeout` ends a call.
        """
        return 0.0

    @property
    def max_batch_size(self) -> int:
        """The most answers that it computes as one batch. All end together, so each has the time of the whole batch."""
        return 1

    def throttle(self) -> AbstractAsyncContextManager[Any]:
        """Wait until an in-place call may start. This wait does not count as judging time."""
        return nullcontext()

    def pop_metrics(self) -> Metrics:
        """Return the cost of its calls since the last `pop_metrics`."""
        return Metrics()

    def members(self) -> Mapping[str, RewardFunction]:
        """Return the rewards that it consists of, by name."""
        return {}

    def with_members(self, members: Mapping[str, RewardFunction]) -> Self:  # noqa: ARG002
        """Return the same reward with other members under the same names."""
        return self

    def of_task(self, task: Task) -> RewardFunction:  # noqa: ARG002
        """Return the reward that judges a task: this one, or one of its members."""
        return self

    def with_absolute_paths(self, absolute: Callable[[Path], Path]) -> Self:
        """Return the same reward with absolute paths to its files."""
        return self.with_members({name: part.with_absolute_paths(absolute) for name, part in self.members().items()})

    def files(self) -> list[Path]:
        """Return the files that define how it judges."""
        return [file for part in self.members().values() for file in part.files()]

    def prepare(self) -> None:
        """Load what is loaded only once. An error here is the fault of no answer."""
        for part in self.members().values():
            part.prepare()

    def check(self, task: Task) -> None:
        """Refuse a task whose answers it could not judge."""

    @abstractmethod
    def __call__(self, task: Task, answer: str) -> Score | Awaitable[Score]:
        """Score an answer to a task."""

    def extract(self, answer: str) -> str | None:  # noqa: ARG002
        """Return the final answer that a text gives, equal for texts that mean the same. Majority votes count it.

        None where the text gives no answer, or where this reward does not look for one.
        """
        return None


def parse_score(result: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and its named parts, from the result of a reward function.

    A number (int, float, bool, a numpy scalar) is the reward. A mapping holds named parts. If one of them is called
    `score`, it is the reward, and the other numbers are the parts. Other values, such as extracted text, are left out
    then. Without `score` each part must be a number, and their sum is the reward.
    """
    if not isinstance(result, Mapping):
        return _parse_number(result, "it returned"), {}
    for name in result:
        if not isinstance(name, str):
            raise RewardError(f"it returned a part named {name!r}; the names of parts are text")
    if "score" in result:
        parts = {name: value for name, value in result.items() if name != "score" and _is_number(_unwrap_scalar(value))}
        return _parse_number(result["score"], "its `score` is"), {
            name: _parse_part(name, parts[name]) for name in parts
        }
    if not result:
        raise RewardError("it returned an empty mapping; return a number, or at least one named part")
    named_parts = {name: _parse_part(name, value) for name, value in result.items()}
    return _parse_number(sum(named_parts.values()), "its parts sum to"), named_parts


def read_ground_truths(task: Task) -> list[str]:
    """Return the accepted answers: the task's `ground_truth`, which is one value or a list of values."""
    value = task.fields.get("ground_truth")
    accepted = value if isinstance(value, list) else [value]
    if not accepted or any(not isinstance(truth, str | int | float) for truth in accepted):
        actual = "has none" if value is None else f"has {value!r}"
        field_names = [name for name, content in task.fields.items() if content not in (None, {}) and name != "row"]
        description = describe_task(task)
        raise DataError(
            f"{description[0].upper()}{description[1:]} needs a right answer (text, a number or a list of them), "
            f"and {actual}; it has {', '.join(field_names)}. If another column holds it, name that: "
            "`data.columns.answer=…`."
        )
    return [str(truth) for truth in accepted]


def describe_task(task: Task) -> str:
    """Return the name of a task in messages."""
    return f"task {task.ordinal}" + (f" of {task.source}" if task.source else "")


def _parse_part(name: str, value: Any) -> float:
    return _parse_number(value, f"its part `{name}` is")


def _parse_number(value: Any, subject: str) -> float:
    scalar = _unwrap_scalar(value)
    if not _is_number(scalar):
        raise RewardError(f"{subject} {_format_value(scalar)} of type {type(value).__name__}; a number is needed")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf if scalar > 0 else -math.inf
    if not math.isfinite(number):
        raise RewardError(f"{subject} {number}; a finite number is needed")
    return number


def _format_value(value: Any) -> str:
    """Return the text of a value for a message, shortened: a value can be a whole answer."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _unwrap_scalar(value: Any) -> Any:
    """Return the Python number of a scalar of numpy or another array library. Other values are returned unchanged."""
    return value.item() if getattr(value, "shape", None) == () else value
