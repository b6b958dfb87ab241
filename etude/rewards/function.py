"""A user's reward function, from a file, from a module, or as a Python object.

    def my_reward(task, answer): ...                                            # Etude's signature
    def compute_score(data_source, solution_str, ground_truth, extra_info): ... # verl's

The names of its parameters decide between the two signatures. Either may be a coroutine function. Either may return a
number or named parts (`parse_score`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from etude.config import load_object
from etude.config.plugin import with_file
from etude.errors import PluginError
from etude.records import Task
from etude.rewards.base import RewardFunction, read_ground_truths

ETUDE_PARAMETERS = ("task", "answer")
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_REQUIRED = frozenset({"solution_str", "ground_truth"})
"""The parameters that identify verl's signature. A function may omit the other two."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class FunctionAdapter:
    """Calls a user's function with the arguments of its signature."""

    quick: ClassVar[bool] = False
    default_workers: ClassVar[int] = 0

    def __init__(self, function: Callable[..., Any], title: str = "") -> None:
        self.function = function
        kind = type(function)
        self.title = title or str(getattr(function, "__qualname__", kind.__qualname__))
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(kind.__call__)
        self._argument_names = _match_signature(function, self.title)

    def prepare(self) -> None:
        """Do nothing: the function is loaded already."""

    def check(self, task: Task) -> None:
        """Refuse a task without a right answer if the function takes `ground_truth`."""
        if "ground_truth" in self._argument_names:
            _read_ground_truth(task)

    def __call__(self, task: Task, answer: str) -> Any:
        """Return the function's result, which may be an awaitable."""
        arguments = (
            _make_verl_arguments(task, answer)
            if "solution_str" in self._argument_names
            else {"task": task, "answer": answer}
        )
        return self.function(**{name: arguments[name] for name in self._argument_names})


class FunctionReward(RewardFunction):
    """A user's reward function. `etude.rewards.function` describes its signatures.

    A coroutine function is awaited in the run's process, many calls at a time. Any other function is called on a
    thread, one call at a time unless one hangs. With `judging.workers` above 0 it is called in worker processes, where
    it cannot slow the run.
    """

    path: str = Field(description="the function, as path/to/file.py:name or module:name")

    @property
    def title(self) -> str:
        return self.path

    @property
    def is_async(self) -> bool:
        return _load_function(self.path).is_async

    def with_absolute_paths(self, absolute: Callable[[Path], Path]) -> Self:
        return self.model_copy(update={"path": with_file(self.path, absolute)})

    def files(self) -> list[Path]:
        return [Path(file)] if (file := self.path.rpartition(":")[0]).endswith(".py") else []

    def prepare(self) -> None:
        _load_function(self.path)

    def check(self, task: Task) -> None:
        _load_function(self.path).check(task)

    def __call__(self, task: Task, answer: str) -> Any:
        return _load_function(self.path)(task, answer)


@cache
def _load_function(path: str) -> FunctionAdapter:
    """Load the function that a path names, once in each process."""
    function = load_object(path, "reward function", "reward.path=my_reward.py:score")
    if not callable(function):
        raise PluginError(f"The reward function '{path}' is of type {type(function).__name__}, which cannot be called.")
    return FunctionAdapter(function, path)


def _match_signature(function: Callable[..., Any], title: str) -> tuple[str, ...]:
    """Return the names of the arguments that a function takes from Etude's signature or verl's."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"The reward function {title} does not say what its parameters are: {error}.") from error
    arguments: tuple[str, ...]
    named = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    if named.issuperset(ETUDE_PARAMETERS):
        arguments = ETUDE_PARAMETERS
    elif named >= VERL_REQUIRED:
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        arguments = tuple(name for name in VERL_PARAMETERS if name in named or takes_any)
    else:
        taken = ", ".join(_STARS.get(parameter.kind, "") + parameter.name for parameter in parameters)
        trl = " TRL's functions judge a list of completions; Etude judges one answer at a time."
        raise PluginError(
            f"The reward function {title} takes ({taken}), which is neither (task, answer) "
            f"nor verl's ({', '.join(VERL_PARAMETERS)}).{trl * ('completions' in named)} Name its parameters as in one "
            "of the two."
        )
    required = [
        parameter
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _STARS
    ]
    missing = [parameter.name for parameter in required if parameter.name not in arguments]
    if missing:
        raise PluginError(
            f"The reward function {title} also takes {', '.join(missing)}, which Etude does not pass. Give each a "
            f"default, or leave it out."
        )
    return arguments


def _read_ground_truth(task: Task) -> Any:
    """Return the right answer in the form that the data has. Refuse a task without one."""
    value = task.fields.get("ground_truth")
    return read_ground_truths(task) if value is None else value


def _make_verl_arguments(task: Task, answer: str) -> Mapping[str, Any]:
    return {
        "data_source": task.source,
        "solution_str": answer,
        "ground_truth": _read_ground_truth(task),
        "extra_info": task.fields.get("extra_info"),
    }
