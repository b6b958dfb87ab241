"""Test code as statements: the tests, the called functions, and code that is refused because it tests nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etude.errors import DataError
from etude.records import Task
from etude.rewards import Code, Judge
from etude.rewards.sandbox.parse_tests import parse_tests
from tests.rewards.tasks import task
from tests.sweeps import later

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return 3\n"
BOTH = "    assert add(1, 2) == 3\n    assert add(3, 4) == 7\n"
FORMS: dict[str, Any] = {
    "pytest": f"def test_add():\n{BOTH}",
    "pytest, importing the program": f"from solution import add as plus\ndef test_add():\n{BOTH}".replace(
        "add(", "plus("
    ),
    "pytest, in a class": "class TestAdd:\n    def test_one(self):\n        assert add(1, 2) == 3\n"
    "    def test_two(self):\n        assert add(3, 4) == 7\n",
    "unittest": "import unittest\nclass Sums(unittest.TestCase):\n"
    "    @classmethod\n    def setUpClass(cls): cls.more = 1\n"
    "    def setUp(self): self.n = 3 * self.more\n    def test_one(self): self.assertEqual(add(1, 2), self.n)\n"
    "    def test_two(self): self.assertEqual(add(3, 4), 7)\n"
    "if __name__ == '__main__':\n    unittest.main()\n",
    "unittest, derived": "import unittest\nclass Base(unittest.TestCase):\n    def setUp(self): self.n = 7\n"
    "class Sums(Base):\n    def test_one(self): self.assertEqual(add(3, 4), self.n)\n",
    "run as a script": "def ok():\n" + BOTH + 'if __name__ == "__main__":\n    ok()\n',
    "a check": {
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3 and candidate(3, 4) == 7",
        "entry_point": "add",
    },
    "a loop behind an assert": "assert add(1, 2) == 3\nfor n in range(5):\n    assert add(n, n) == 2 * n",
    "a list of functions": f"def a():\n{BOTH}for each in [a]:\n    each()",
    "raises": "if add(1, 2) != 3 or add(3, 4) != 7:\n    raise Exception",
    "what follows the last test": "assert add(1, 2) == 3\ntable = {3: 4, 7: 8}\n{7: 1}[add(3, 4)]",
}


def scored(code: str, truth: Any, **fields: Any) -> float:
    with Judge(Code()) as judge:
        return asyncio.run(judge.judge(task(truth, **fields), f"```python\n{code}\n```")).reward


@pytest.mark.parametrize("truth", later(FORMS.values(), every=3), ids=FORMS)
def test_right_programs_pass_and_wrong_ones_do_not(truth: Any) -> None:
    assert scored(RIGHT, truth) == 1
    assert scored(WRONG, truth) == scored("x = 1", truth) == 0


def test_each_test_of_a_runner_counts() -> None:
    calls = [text for text, counts in parse_tests(FORMS["unittest"], "")[0] if counts]
    assert len(calls) == 2 and "test_two" in calls[1]
    assert parse_tests("def test_a():\n    assert f()\ndef test_b():\n    assert f()", "")[0][2:] == (
        ("test_a()", True),
        ("test_b()", True),
    )


def test_the_entry_point_may_lie_in_a_column_beside_the_check() -> None:
    check = "def check(candidate):\n    assert candidate(3, 4) == 7"
    assert scored(RIGHT, check, entry_point="add") == 1 and scored(WRONG, check, entry_point="add") == 0


def test_a_reference_solution_is_no_test() -> None:
    """A dataset uses a column `solution` for the right answer; the program must pass the tests beside it."""
    fields = {"solution": RIGHT, "test": "assert add(3, 4) == 7"}
    assert scored(RIGHT, RIGHT, **fields) == 1 and scored("pass", RIGHT, **fields) == 0
    with pytest.raises(DataError, match="every program would pass"):
        Code().check(Task(0, {"ground_truth": RIGHT + "print(add(one, 2))", "solution": RIGHT}))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("f(1)", "every program would pass: they have no `assert`, and call no function"),
        ("def run():\n    f(1)\nrun()", "every program would pass"),
        ("def check(candidate):\n    assert candidate(1) == g", "a column `entry_point` names"),
        ("assert abs(sum([0.1]) - 0.1) < 1", "they use only Python's builtins (abs, sum)"),
        ("if True:\n    def inner():\n        assert f(1)", "every program would pass"),
        ("def test_f(fixture):\n    assert f(fixture)", "`test_f` takes arguments"),
        ("async def test_f():\n    assert await f()", "is a coroutine function"),
        ("class TestF:\n    def setup_method(self): ...\n    def test_f(self): assert f()", "has a setup for pytest"),
    ],
)
def test_code_that_tests_nothing_is_refused(code: str, message: str) -> None:
    with pytest.raises(DataError, match="The tests of task 7 of sums cannot be used") as error:
        Code().check(task(code))
    assert message in str(error.value)
