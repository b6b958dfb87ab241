"""What every reward is: a frozen object that holds its own options and is called with a task and the text of an answer.

A reward reads text and nothing else: no logits, no token ids. It returns a number, or named parts (`parse_score` says
what becomes of those). A new one is a subclass with its fields and `__call__`, chosen by its name in `REWARDS`, or from
outside as `module:Name`; a function that has no options is chosen by `function` instead.
"""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from etude.config import Config
from etude.errors import DataError, RewardError
from etude.observe import Metrics
from etude.records import Task

__all__ = ["RewardFunction", "Score", "describe_task", "parse_score", "read_ground_truths"]

MAX_VALUE_CHARS = 100
"""Characters that are shown of a value which is no reward."""
Score: TypeAlias = float | Mapping[str, float]


class RewardFunction(Config, ABC):
    """What an answer earns."""

    quick: ClassVar[bool] = False
    """Whether it surely ends at once, whatever it reads: it is then called where it is, without a limit."""
    default_workers: ClassVar[int] = 0
    """In how many processes of its own it is computed, unless the run says otherwise."""
    scores_answers: ClassVar[bool] = True
    """Whether it says anything of an answer, and does not leave all to the environment."""

    in_place: ClassVar[bool] = False
    """Whether it is a coroutine that must run where the run is, because it keeps order among its own calls."""

    @property
    def title(self) -> str:
        """How sentences name it."""
        return type(self).__name__.lower()

    @property
    def is_async(self) -> bool:
        """Whether calling it makes a coroutine: it waits for others more than it computes."""
        return inspect.iscoroutinefunction(type(self).__call__)

    @property
    def max_seconds(self) -> float:
        """Seconds within which it surely ends, with a reward also for an answer that takes too long; 0 where it makes
        no such promise, and `judging.timeout` alone ends it."""
        return 0.0

    @property
    def max_batch_size(self) -> int:
        """How many answers it computes as one, at most: none is there before all are, so each has the time of all."""
        return 1

    def throttle(self) -> AbstractAsyncContextManager[Any]:
        """Where a call in place waits for its turn, for as long as that takes: it is not judging yet."""
        return nullcontext()

    def pop_metrics(self) -> Metrics:
        """What its calls have cost since this was last asked, as metrics."""
        return Metrics()

    def with_absolute_paths(self, absolute: Callable[[Path], Path]) -> Self:  # noqa: ARG002
        """The same reward, with the paths of its files as they are seen from anywhere."""
        return self

    def files(self) -> list[Path]:
        """The files that say how it judges."""
        return []

    def prepare(self) -> None:
        """Load what it loads only once: what goes wrong here is the fault of no answer."""

    def check(self, task: Task) -> None:
        """Refuse a task to which it could judge no answer."""

    @abstractmethod
    def __call__(self, task: Task, answer: str) -> Score | Awaitable[Score]:
        """What this answer to this task earns."""

    def extract(self, answer: str) -> str | None:  # noqa: ARG002
        """What it reads in a text as the answer, the same for texts that say the same: majorities are counted by it.
        None where it reads nothing, or is no reward that looks for an answer."""
        return None


def parse_score(result: Any) -> tuple[float, dict[str, float]]:
    """The reward and its named parts, from what a reward function returned.

    A number (int, float, bool, a numpy scalar) is the reward. A mapping holds named parts: where one of them is called
    `score`, that is the reward and the others are its parts (what is no number beside it, such as the text that was
    extracted, is left out); where none is, each must be a number, and their sum is the reward.
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
    """The answers that count as right: the task's `ground_truth`, which may be a list of them."""
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
    """How sentences name a task."""
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
    """A value as it is shown in a sentence: not all of what may be a whole answer."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _unwrap_scalar(value: Any) -> Any:
    """What a scalar of numpy, or of another library of arrays, holds; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value
