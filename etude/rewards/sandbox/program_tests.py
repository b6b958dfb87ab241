"""The tests of a task that asks for a program: what they look like in data, and how a program is put to them.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                     a script, by its standard input and output
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}         a function, by its arguments and result
    ["assert add(1, 2) == 3"]                                      a program's names, by statements

These are the forms of APPS, TACO, LiveCodeBench, MBPP and HumanEval, as mappings, lists or JSON text, in the ground
truth or, where there is none, in columns of those names. Nothing that a program printed or returned is looked at here:
it is compared in the sandbox, by a process of its own (`etude.rewards.sandbox.guest.test_runner`), and a verdict comes
back.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

from etude.errors import DataError, RewardError
from etude.records import Task
from etude.rewards.base import describe_task
from etude.rewards.sandbox.guest.compare import from_json
from etude.rewards.sandbox.parse_tests import parse_tests
from etude.rewards.sandbox.sandbox import Sandbox

__all__ = ["CallTests", "ProgramTests", "ScriptTests", "StatementTests", "read_tests"]

_SETUPS = ("test_setup_code", "test_imports", "setup_code")
_LISTS = ("test_list", "assert_case", "asserts")
_NESTED = ("tests", "input_output")
_TESTS = ("inputs", "test", *_LISTS, *_NESTED)
_COLUMNS = (*_TESTS, "outputs", "fn_name", "entry_point", *_SETUPS)
"""Columns in which tests may lie, and what belongs to them."""


class ProgramTests(ABC):
    """The tests of one task."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many they are."""

    @abstractmethod
    def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        """Whether the program in a box passes, test by test, as far as it comes.

        each: seconds of one test. until: when, by `time.monotonic`, all must be over.
        """


@dataclass(frozen=True)
class ScriptTests(ProgramTests):
    """A script that reads what is asked and prints the answer."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.inputs)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        for text, expected in zip(self.inputs, self.outputs, strict=True):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            yield await sandbox.check_output(text, expected, min(timeout, remaining))


@dataclass(frozen=True)
class CallTests(ProgramTests):
    """A function, or a method of a class `Solution`, that returns the answer."""

    name: str
    inputs: tuple[Sequence[Any], ...]
    outputs: tuple[Any, ...]

    @property
    def count(self) -> int:
        return len(self.inputs)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        tests = {"call": self.name, "given": self.inputs, "wanted": self.outputs, "seconds": timeout}
        results = await sandbox.run_tests(tests, self.count, max(deadline - time.monotonic(), 0.0))
        for passed in results.passed:
            yield passed


@dataclass(frozen=True)
class StatementTests(ProgramTests):
    """Statements about a program's names, some of which are tests: they pass where they raise nothing. The others must
    not raise either: the tests behind one that does are not passed."""

    statements: tuple[tuple[str, bool], ...]
    """Each with whether it is a test."""
    names: tuple[tuple[str, str], ...]
    """The names that they use and do not define: what they call it, and what the program does."""
    modules: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict, hash=False)
    """Of these, the modules, which are never the program's: each with its path, and what is used of it."""

    @property
    def count(self) -> int:
        return sum(is_test for _, is_test in self.statements)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        tests = {"statements": self.statements, "names": self.names, "modules": self.modules, "seconds": timeout}
        results = await sandbox.run_tests(tests, len(self.statements), max(deadline - time.monotonic(), 0.0))
        last = max(index for index, (_, is_test) in enumerate(self.statements) if is_test)
        for index, passed in enumerate(results.passed[:last]):
            if self.statements[index][1]:
                yield passed
        if results.invalid_reason:
            raise RewardError(f"its tests cannot be put to a program: {results.invalid_reason}.")
        if len(results.passed) > last:  # what stands behind the last test belongs to it
            yield all(results.passed[last:]) and len(results.passed) == len(self.statements)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_tests(task: Task) -> ProgramTests:
    """The tests of a task; `DataError` where it has none that can be read."""
    content: Any = task.fields.get("ground_truth")
    columns = {name: task.fields[name] for name in _COLUMNS if task.fields.get(name) is not None}
    holds_solution = content == task.fields.get("solution") and any(name in columns for name in _TESTS)
    if content is None or holds_solution:  # what a column `solution` holds beside tests is a program, and no test
        content = columns
    try:
        return _parse_tests(
            content if isinstance(content, str) else json.dumps(content), str(columns.get("entry_point", ""))
        )
    except _UnreadableTestsError as error:
        raise DataError(
            f"The tests of {describe_task(task)} cannot be used: {error}. They are inputs with outputs, or statements "
            f"in Python, in the right answer or in columns of their own; `data.columns.answer=…` names the column."
        ) from None


class _UnreadableTestsError(Exception):
    """Why something is no trial, as a sentence ends."""


@lru_cache(maxsize=1024)
def _parse_tests(text: str, entry: str) -> ProgramTests:
    """The same tests are read for every answer to a task."""
    return _tests_from_data(from_json(text), entry)


def _tests_from_data(content: Any, entry: str) -> ProgramTests:
    """A trial from plain data in one of the known forms; `entry` is the function that it is about, where it does not
    say so itself."""
    if isinstance(content, str):
        parsed = from_json(content)
        return _tests_from_data(parsed, entry) if isinstance(parsed, list | dict) else _tests_from_code(content, entry)
    if isinstance(content, list) and content:
        if all(isinstance(item, str) for item in content):
            return _tests_from_code("\n".join(content), entry)
        if all(isinstance(item, dict) and {"input", "output"} <= item.keys() for item in content):
            name = content[0].get("fn_name") or entry
            if not name and str(content[0].get("testtype", content[0].get("type", ""))).startswith("func"):
                _refuse("they call a function and do not name it; give its name as `fn_name`")
            return _tests_from_pairs([item["input"] for item in content], [item["output"] for item in content], name)
    if isinstance(content, dict) and content:
        entry = str(content.get("entry_point") or entry)
        if {"inputs", "outputs"} <= content.keys():
            return _tests_from_pairs(content["inputs"], content["outputs"], str(content.get("fn_name") or ""))
        setup = [str(line) for name in _SETUPS for line in _as_list(content.get(name) or [])]
        for name in _LISTS:
            if content.get(name):
                return _tests_from_code("\n".join([*setup, *map(str, _as_list(content[name]))]), entry)
        if content.get("test"):
            return _tests_from_code("\n".join([*setup, str(content["test"])]), entry)
        for name in _NESTED:
            if content.get(name):
                return _tests_from_data(content[name], entry)
        _refuse(f"there are none among {', '.join(sorted(map(str, content)))}")
    _refuse(f"what was found is of type {type(content).__name__}" if content else "nothing was found")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tests_from_pairs(inputs: Any, outputs: Any, name: str) -> ProgramTests:
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs):
        _refuse("`inputs` and `outputs` must be lists that hold something")
    if len(inputs) != len(outputs):
        _refuse(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        return CallTests(name, tuple(map(_parse_arguments, inputs)), tuple(outputs))
    return ScriptTests(tuple(map(_join_lines, inputs)), tuple(map(_join_lines, outputs)))


def _parse_arguments(arguments: Any) -> Sequence[Any]:
    """The arguments of one call: a list of them, or text with one in JSON on each line."""
    if isinstance(arguments, str):
        return [from_json(line) for line in arguments.splitlines() if line.strip()]
    if not isinstance(arguments, list):
        _refuse(f"the arguments of a call are a list, and these are of type {type(arguments).__name__}")
    return arguments


def _join_lines(value: Any) -> str:
    """What is read or printed: text, or lines of it."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _tests_from_code(code: str, entry: str) -> StatementTests:
    try:
        return StatementTests(*parse_tests(code, entry))
    except ValueError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    raise _UnreadableTestsError(reason)
