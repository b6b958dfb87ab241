"""The tests of a task that asks for a program: their forms in data, and how they run against a program.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                     a script, by its standard input and output
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}         a function, by its arguments and result
    ["assert add(1, 2) == 3"]                                      a program's names, by statements

These are the forms of APPS, TACO, LiveCodeBench, MBPP and HumanEval, as mappings, lists or JSON text. They are in the
ground truth or, without one, in columns of those names. This module never reads a program's output or results. A test
runner in the sandbox compares them (`etude.rewards.sandbox.guest.test_runner`) and returns only verdicts.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from etude.errors import DataError, RewardError
from etude.records import Task
from etude.rewards.base import describe_task
from etude.rewards.sandbox.guest.compare import from_json
from etude.rewards.sandbox.parse_tests import ParsedTests, parse_tests
from etude.rewards.sandbox.sandbox import Sandbox
from etude.running_time import running_time

_SETUPS = ("test_setup_code", "test_imports", "setup_code")
_LISTS = ("test_list", "assert_case", "asserts")
_NESTED = ("tests", "input_output")
_TESTS = ("inputs", "test", *_LISTS, *_NESTED)
_COLUMNS = (*_TESTS, "outputs", "fn_name", "entry_point", *_SETUPS)
"""The columns of tests and of their settings."""


class ProgramTests(ABC):
    """The tests of one task."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of tests."""

    @abstractmethod
    def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        """Run the tests against the program in a sandbox, and yield True or False for each test that was run.

        timeout: seconds of one test. deadline: the time by `running_time` at which all tests end.
        """


@dataclass(frozen=True)
class ScriptTests(ProgramTests):
    """Tests of a script, which reads its standard input and prints the answer."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.inputs)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        for text, expected in zip(self.inputs, self.outputs, strict=True):
            remaining = deadline - running_time()
            if remaining <= 0:
                return
            yield await sandbox.check_output(text, expected, min(timeout, remaining))


@dataclass(frozen=True)
class CallTests(ProgramTests):
    """Tests of a function, or of a method of a class `Solution`, which returns the answer."""

    name: str
    inputs: tuple[Sequence[Any], ...]
    outputs: tuple[Any, ...]

    @property
    def count(self) -> int:
        return len(self.inputs)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        tests = {"call": self.name, "given": self.inputs, "wanted": self.outputs, "seconds": timeout}
        results = await sandbox.run_tests(tests, self.count, max(deadline - running_time(), 0.0))
        for passed in results.passed:
            yield passed


@dataclass(frozen=True)
class StatementTests(ProgramTests):
    """Statements about a program's names, some of which are tests. A test passes if it raises nothing.

    The other statements must not raise either: after one that does, the following tests are not passed.
    """

    parsed: ParsedTests

    @property
    def count(self) -> int:
        return sum(is_test for _, is_test in self.parsed.statements)

    async def run(self, sandbox: Sandbox, timeout: float, deadline: float) -> AsyncGenerator[bool, None]:
        statements, tests = self.parsed.statements, {**self.parsed._asdict(), "seconds": timeout}
        results = await sandbox.run_tests(tests, len(statements), max(deadline - running_time(), 0.0))
        last = max(index for index, (_, is_test) in enumerate(statements) if is_test)
        for passed, (_, is_test) in zip(results.passed[:last], statements, strict=False):
            if is_test:
                yield passed
        if results.invalid_reason:
            raise RewardError(f"its tests cannot run against a program: {results.invalid_reason}.")
        if len(results.passed) > last:  # the statements after the last test belong to it
            yield all(results.passed[last:]) and len(results.passed) == len(statements)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_tests(task: Task) -> ProgramTests:
    """Return the tests of a task. Raises `DataError` if it has none that can be read."""
    content: Any = task.fields.get("ground_truth")
    columns = {name: task.fields[name] for name in _COLUMNS if task.fields.get(name) is not None}
    holds_solution = content == task.fields.get("solution") and any(name in columns for name in _TESTS)
    if content is None or holds_solution:  # beside columns of tests, a column `solution` holds a program, not tests
        content = columns
    try:
        return _parse_tests(
            content if isinstance(content, str) else json.dumps(content), str(columns.get("entry_point", ""))
        )
    except ValueError as error:
        raise DataError(
            f"The tests of {describe_task(task)} cannot be used: {error}. Tests are inputs with outputs, or Python "
            f"statements, in the right answer or in columns such as `test_list`; `data.columns.answer=…` names the "
            f"column of the right answer."
        ) from None


@lru_cache(maxsize=1024)
def _parse_tests(text: str, entry: str) -> ProgramTests:
    """Parse the tests in a JSON text. The cache serves all answers to one task."""
    return _tests_from_data(from_json(text), entry)


def _tests_from_data(content: Any, entry: str) -> ProgramTests:
    """Create the tests from JSON data in one of the known forms. Raises a `ValueError` whose message ends a sentence.

    entry: the name of the tested function, for data that does not name it.
    """
    if isinstance(content, str):
        parsed = from_json(content)
        if isinstance(parsed, list | dict):
            return _tests_from_data(parsed, entry)
        return StatementTests(parse_tests(content, entry))
    if isinstance(content, list) and content:
        if all(isinstance(item, str) for item in content):
            return StatementTests(parse_tests("\n".join(content), entry))
        if all(isinstance(item, dict) and {"input", "output"} <= item.keys() for item in content):
            name = content[0].get("fn_name") or entry
            if not name and str(content[0].get("testtype", content[0].get("type", ""))).startswith("func"):
                raise ValueError("they call a function without its name; give the name as `fn_name`")
            return _tests_from_pairs([item["input"] for item in content], [item["output"] for item in content], name)
    if isinstance(content, dict) and content:
        entry = str(content.get("entry_point") or entry)
        if {"inputs", "outputs"} <= content.keys():
            return _tests_from_pairs(content["inputs"], content["outputs"], str(content.get("fn_name") or ""))
        setup = [str(line) for name in _SETUPS for line in _as_list(content.get(name) or [])]
        for name in _LISTS:
            if content.get(name):
                return StatementTests(parse_tests("\n".join([*setup, *map(str, _as_list(content[name]))]), entry))
        if content.get("test"):
            return StatementTests(parse_tests("\n".join([*setup, str(content["test"])]), entry))
        for name in _NESTED:
            if content.get(name):
                return _tests_from_data(content[name], entry)
        raise ValueError(f"there are none in the fields {', '.join(sorted(map(str, content)))}")
    raise ValueError(f"the value is of type {type(content).__name__}" if content else "there are none")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tests_from_pairs(inputs: Any, outputs: Any, name: str) -> ProgramTests:
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs):
        raise ValueError("`inputs` and `outputs` must be lists, and not empty")
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        return CallTests(name, tuple(map(_parse_arguments, inputs)), tuple(outputs))
    return ScriptTests(tuple(map(_join_lines, inputs)), tuple(map(_join_lines, outputs)))


def _parse_arguments(arguments: Any) -> Sequence[Any]:
    """Return the arguments of one call, from a list or from text with one JSON value on each line."""
    if isinstance(arguments, str):
        return [from_json(line) for line in arguments.splitlines() if line.strip()]
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of a call are a list, and these are of type {type(arguments).__name__}")
    return arguments


def _join_lines(value: Any) -> str:
    """Return an input or an output as text, from text or from a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
