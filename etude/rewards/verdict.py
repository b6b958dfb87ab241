"""The result of judging one answer: a reward, or the error message that explains why there is none."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from etude.errors import EtudeError, RewardError
from etude.records import Outcome, Task
from etude.rewards.base import RewardFunction, describe_task, parse_score

PACKAGE_PREFIX = f"{Path(__file__).parents[1]}{os.sep}"
MAX_MESSAGE_CHARS = 300
"""The most characters quoted from the message of a user function's exception."""
MAX_NAMES = 30
"""The most field names that an error lists."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of judging one answer."""

    reward: float
    """The reward, or NaN if there is none, so that a missing reward is never used as a number."""
    parts: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.SUCCEEDED
    """`SUCCEEDED` where `reward` is valid; otherwise the way in which judging failed."""
    error: str = ""
    """The error message, which names the reward and the task. It stays where a fixed score replaces the reward."""
    seconds: float = 0.0
    """The seconds that judging took, without the wait for a free worker."""
    extracted_answer: str | None = None
    """The final answer that the reward extracts from the text, if it extracts one."""
    failed_part: str = ""
    """The name of the part of a combined reward that failed, if one did."""
    cause: str = ""
    """The reward that failed and the way or the line in which it did: equal for failures that are alike."""

    @classmethod
    def failure(cls, outcome: Outcome, error: str, seconds: float = 0.0, cause: str = "") -> Self:
        """Create a verdict without a reward."""
        return cls(math.nan, {}, outcome, error, seconds, cause=cause)


def run_reward(
    reward: Callable[[Task, str], Any], title: str, task: Task, answer: str, runner: asyncio.Runner
) -> Verdict:
    """Call a reward function in a thread or a worker process, and return its verdict. It never raises."""
    began = time.perf_counter()
    try:
        result = reward(task, answer)
        if inspect.isawaitable(result):
            result = runner.run(_await_result(result))
        extracted = extract_answer(reward, answer)
    except BaseException as error:  # sys.exit() in a user's function is a failure of that function too
        return make_failed_verdict(error, title, task, time.perf_counter() - began)
    return make_verdict(result, title, task, time.perf_counter() - began, extracted)


def extract_answer(reward: Callable[[Task, str], Any], answer: str) -> str | None:
    """Return the final answer that a reward extracts from a text; None for a bare function."""
    return reward.extract(answer) if isinstance(reward, RewardFunction) else None


def make_verdict(result: Any, title: str, task: Task, seconds: float, extracted: str | None = None) -> Verdict:
    """Create the verdict from the result of a reward function. A result may raise when it is inspected."""
    try:
        reward, parts = parse_score(result)
    except RewardError as error:
        sentence = f"The reward {title} cannot be used on {describe_task(task)}: {error}."
        return Verdict.failure(Outcome.FAILED, sentence, seconds, f"{title} returned no reward")
    except Exception as error:
        return make_failed_verdict(error, title, task, seconds)
    return Verdict(reward, parts, seconds=seconds, extracted_answer=extracted)


def make_failed_verdict(error: BaseException, title: str, task: Task, seconds: float) -> Verdict:
    """Create the verdict for a reward function that raised."""
    failure = f"{describe_exception(error)}{_describe_fields(error, task)}"
    sentence = f"The reward {title} failed on {describe_task(task)}: {failure}"
    cause = f"{title} raised {type(error).__name__}{_describe_location(error)}"
    return Verdict.failure(Outcome.FAILED, sentence, seconds, cause)


def describe_exception(error: BaseException) -> str:
    """Describe an exception of a user's code, with the file and line that raised it."""
    if isinstance(error, EtudeError):
        return str(error)
    return f"{type(error).__name__}{_exception_message(error)}{_describe_location(error)}."


def _describe_location(error: BaseException) -> str:
    """Return the file and the line of the user's code that raised an exception."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(PACKAGE_PREFIX)] or stack
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _exception_message(error: BaseException) -> str:
    """Return the message of an exception, on one line and shortened. Its `__str__` may raise as well."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        return ""
    message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    return f": {message}" if message else ""


def _describe_fields(error: BaseException, task: Task) -> str:
    """Return a sentence with the fields of a task, if the error is a function's access to a missing field."""
    is_missing_field = isinstance(error, KeyError) or (
        isinstance(error, AttributeError) and isinstance(error.obj, Task)
    )
    if not is_missing_field or "has no field" in _exception_message(error):  # a task says so itself
        return ""
    extra = task.fields.get("extra_info")
    nested_fields = f", and its `extra_info` has {_join_names(extra)}" if isinstance(extra, Mapping) else ""
    return f" The task has the fields {_join_names(task.fields)}{nested_fields}."


def _join_names(names: Iterable[str]) -> str:
    listed = [*names]
    remainder = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return (", ".join(listed[:MAX_NAMES]) or "none") + remainder


def describe_timeout(limit: float, batch_size: int = 1) -> str:
    """Return the end of a sentence about a reward function that exceeded its limit, for a batch of answers or one."""
    per_batch = f" for each of {batch_size} answers at once" if batch_size > 1 else ""
    return f"took longer than `judging.timeout` = {limit:g} seconds{per_batch}"


async def _await_result(result: Any) -> Any:
    return await result
