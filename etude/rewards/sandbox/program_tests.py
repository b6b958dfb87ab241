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
        for given, wanted in zip(self.inputs, self.outputs, strict=True):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            yield await sandbox.check_output(given, wanted, min(timeout, left))


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
        found = await sandbox.run_tests(tests, self.count, max(deadline - time.monotonic(), 0.0))
        for passed in found.passed:
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
        return sum(counts for _, counts in self.statements)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        tests = {"statements": self.statements, "names": self.names, "modules": self.modules, "seconds": timeout}
        found = await sandbox.run_tests(tests, len(self.statements), max(deadline - time.monotonic(), 0.0))
        last = max(place for place, (_, counts) in enumerate(self.statements) if counts)
        for place, passed in enumerate(found.passed[:last]):
            if self.statements[place][1]:
                yield passed
        if found.invalid_reason:
            raise RewardError(f"its tests cannot be put to a program: {found.invalid_reason}.")
        if len(found.passed) > last:  # what stands behind the last test belongs to it
            yield all(found.passed[last:]) and len(found.passed) == len(self.statements)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_tests(task: Task) -> ProgramTests:
    """The tests of a task; `DataError` where it has none that can be read."""
    held: Any = task.fields.get("ground_truth")
    columns = {name: task.fields[name] for name in _COLUMNS if task.fields.get(name) is not None}
    solved = held == task.fields.get("solution") and any(name in columns for name in _TESTS)
    if held is None or solved:  # what a column `solution` holds beside tests is a program, and no test
        held = columns
    try:
        return _parse_tests(held if isinstance(held, str) else json.dumps(held), str(columns.get("entry_point", "")))
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


def _tests_from_data(held: Any, entry: str) -> ProgramTests:
    """A trial from plain data in one of the known forms; `entry` is the function that it is about, where it does not
    say so itself."""
    if isinstance(held, str):
        inner = from_json(held)
        return _tests_from_data(inner, entry) if isinstance(inner, list | dict) else _tests_from_code(held, entry)
    if isinstance(held, list) and held:
        if all(isinstance(each, str) for each in held):
            return _tests_from_code("\n".join(held), entry)
        if all(isinstance(each, dict) and {"input", "output"} <= each.keys() for each in held):
            name = held[0].get("fn_name") or entry
            if not name and str(held[0].get("testtype", held[0].get("type", ""))).startswith("func"):
                _refuse("they call a function and do not name it; give its name as `fn_name`")
            return _tests_from_pairs([each["input"] for each in held], [each["output"] for each in held], name)
    if isinstance(held, dict) and held:
        entry = str(held.get("entry_point") or entry)
        if {"inputs", "outputs"} <= held.keys():
            return _tests_from_pairs(held["inputs"], held["outputs"], str(held.get("fn_name") or ""))
        setup = [str(line) for name in _SETUPS for line in _as_list(held.get(name) or [])]
        for name in _LISTS:
            if held.get(name):
                return _tests_from_code("\n".join([*setup, *map(str, _as_list(held[name]))]), entry)
        if held.get("test"):
            return _tests_from_code("\n".join([*setup, str(held["test"])]), entry)
        for name in _NESTED:
            if held.get(name):
                return _tests_from_data(held[name], entry)
        _refuse(f"there are none among {', '.join(sorted(map(str, held)))}")
    _refuse(f"what was found is of type {type(held).__name__}" if held else "nothing was found")


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


def _parse_arguments(given: Any) -> Sequence[Any]:
    """The arguments of one call: a list of them, or text with one in JSON on each line."""
    if isinstance(given, str):
        return [from_json(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        _refuse(f"the arguments of a call are a list, and these are of type {type(given).__name__}")
    return given


def _join_lines(value: Any) -> str:
    """What is read or printed: text, or lines of it."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _tests_from_code(code: str, entry: str) -> StatementTests:
    try:
        return StatementTests(*parse_tests(code, entry))
    except ValueError as error:
        _refuse(str(error))


def _refuse(why: str) -> NoReturn:
    raise _UnreadableTestsError(why)
