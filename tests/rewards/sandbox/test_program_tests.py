"""Tests in the forms of datasets, and the comparison of outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.records import Json, Task
from etude.rewards.sandbox.guest.compare import outputs_match, values_match
from etude.rewards.sandbox.parse_tests import ParsedTests
from etude.rewards.sandbox.program_tests import CallTests, ScriptTests, StatementTests, read_tests
from tests.rewards.tasks import task

PAIR = {"inputs": ["1\n", "2\n"], "outputs": ["a\n", "b\n"]}


@pytest.mark.parametrize(
    "truth",
    [
        PAIR,
        json.dumps(PAIR),
        {"input_output": json.dumps(PAIR)},
        {"tests": PAIR},
        [{"input": "1\n", "output": "a\n", "testtype": "stdin"}, {"input": "2\n", "output": "b\n"}],
        PAIR | {"fn_name": None},
        {"inputs": [["1", ""], "2\n"], "outputs": [["a", ""], "b\n"]},
    ],
)
def test_tests_of_scripts_are_read(truth: Any) -> None:
    assert read_tests(task(truth)) == ScriptTests(("1\n", "2\n"), ("a\n", "b\n"))


@pytest.mark.parametrize(
    "truth",
    [
        {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]},
        {"fn_name": "f", "inputs": ["1\n[2]\n"], "outputs": ["3"]},
        json.dumps([{"input": "1\n[2]", "output": "3", "testtype": "functional", "fn_name": "f"}]),
    ],
)
def test_tests_of_calls_are_read(truth: Any) -> None:
    tests = read_tests(task(truth))
    assert isinstance(tests, CallTests) and (tests.name, tests.inputs) == ("f", ([1, [2]],))
    assert values_match(tests.outputs[0], 3)


@pytest.mark.parametrize(
    "truth",
    [
        ["assert f(1) == 2", "assert f(2) == 3"],
        "assert f(1) == 2\nassert f(2) == 3",
        {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "challenge_test_list": []},
        {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]},
        {"test": "assert f(1) == 2\nassert f(2) == 3"},
    ],
)
def test_tests_of_statements_are_read(truth: Any) -> None:
    statements = (("assert f(1) == 2", True), ("assert f(2) == 3", True))
    assert read_tests(task(truth)) == StatementTests(ParsedTests(statements, (("f", "f"),), {}))


def test_separate_columns_are_read_if_there_is_no_right_answer() -> None:
    row: dict[str, Json] = {
        "prompt": "p",
        "ground_truth": None,
        "text": "t",
        "code": "c",
        "test_list": ["assert f(1) == 2"],
    }
    tests = read_tests(Task(0, {**row, "test_setup_code": "import math", "row": 3}))
    assert isinstance(tests, StatementTests) and tests.count == 1
    assert tests.parsed.statements == (("import math", False), ("assert f(1) == 2", True))


@pytest.mark.parametrize(
    ("code", "counts", "names"),
    [
        ("x = f(1)\nassert x == 1", [False, True], ["f"]),
        ("def test_a():\n    assert f(1) == g(2)\ntest_a()", [False, True], ["f", "g"]),
        ("for n in range(3):\n    assert f(n) == n", [True], ["f"]),
        ("import math\nassert math.isclose(f(1), 1)", [False, True], ["f"]),
        ("assert sum(1, 2) == 3", [True], ["sum"]),
        ("assert abs(f(1)) == max(1, 0)", [True], ["f"]),
        ("def check(f):\n    assert f(1) == 1\ncheck(f)", [False, True], ["f"]),
        ("f = Solution().f\nassert f(1) == [n for n in range(1)]", [False, True], ["Solution"]),
        ("assert (lambda a: a + K)(1) == f(1)", [True], ["K", "f"]),
        ("try:\n    sum(1)\nexcept TypeError:\n    assert True", [True], ["sum"]),
        ("from solution import sum\nassert abs(sum([0.5])) < 1", [True], ["sum"]),
    ],
)
def test_tests_are_distinguished_from_code_of_the_program(code: str, counts: list[bool], names: list[str]) -> None:
    tests = read_tests(task(code))
    assert isinstance(tests, StatementTests)
    assert [counted for _, counted in tests.parsed.statements] == counts
    assert [name for name, _ in tests.parsed.names] == names


def test_the_entry_point_is_the_candidate_of_check() -> None:
    tests = read_tests(task({"test": "def check(c):\n    assert c(1) == 1", "entry_point": "f"}))
    assert isinstance(tests, StatementTests) and tests.parsed.statements[-1] == ("check(f)", True) and tests.count == 1
    called = read_tests(task({"test": "def check(c):\n    assert c(1)\ncheck(f)", "entry_point": "f"}))
    assert called.count == 1
    alias = read_tests(task({"test": "assert candidate(1) == 1", "entry_point": "f"}))
    assert isinstance(alias, StatementTests) and alias.parsed.names == (("candidate", "f"),)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("3\n", "3", True),
        ("3", "3  \n\n\n", True),
        ("a b\nc", "a b \nc\n", True),
        ("a b", "a  b", True),
        ("a\nb", "a b", False),
        ("3", "3.0", False),
        ("3.0", "3", True),
        ("0.333333", "0.3333333333", True),
        ("0.33", "0.34", False),
        ("1e3", "1000", True),
        ("1.5 x", "1.5000001 x", True),
        ("1.5", "nan", False),
        ("1.5", "x", False),
        ("YES", "Yes", False),
        ("", "\n", True),
        ("", "x", False),
        (" indented", "indented", False),
        ("flush", " flush", True),
        ("  *\n ***\n*****", "  *\n ***  \n*****\n", True),
        ("  *\n ***\n*****", "*\n***\n*****", False),
        ("  *\n ***\n*****", "  *\n ***\n  *****", False),
        ("  1.0  2", "  1 2", True),
    ],
)
def test_outputs_are_compared_like_judges_do(expected: str, actual: str, same: bool) -> None:
    assert outputs_match(expected, actual) is same


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (3, 4, False),
        (0.1, 0.1 + 1e-9, True),
        (0.1, 0.2, False),
        (float("nan"), float("nan"), True),
        (True, True, True),
        (True, 1, False),
        (1.0, True, False),
        ([0.0], [False], False),
        (1, True, False),
        ("a", "a", True),
        ([1, [2]], (1, (2,)), True),
        ([3], 3, True),
        ([3], [3], True),
        ([3, 4], 3, False),
        ({"1": [2]}, {1: (2,)}, True),
        ({"1": 2}, {"1": 3}, False),
        ({"1": 2}, [], False),
        (None, None, True),
        (0, None, False),
        (1.5, 10**400, False),
        ("101", "101", True),
        ("101", 101, True),
        ("101", "11", False),
        ("[1]", 1, True),
        ("[1]", [1], True),
        ("a", "b", False),
        ('"a"', "a", True),
        (["101"], "101", True),
        (["101"], 101, False),
        ([1, 2], {1, 2}, False),
    ],
)
def test_values_are_compared_like_judges_do(expected: Any, actual: Any, same: bool) -> None:
    assert values_match(expected, actual) is same
