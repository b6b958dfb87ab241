"""Tests of a program's functions: the program performs a test's operations, and cannot falsify their result."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from datetime import UTC
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.sandbox.guest.json_values import MAX_DEPTH, NotEncodableError, decode, encode
from etude.rewards.sandbox.guest.pipe_messages import MAX_MESSAGE_BYTES, pack_message, receive, send
from etude.rewards.sandbox.sandbox import ProgramTestResults, Sandbox, SandboxLimits

scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    *(st.complex_numbers(allow_nan=False), st.binary().map(bytearray), st.fractions(), st.decimals(allow_nan=False)),
    *(st.dates(), st.datetimes(), st.datetimes(timezones=st.just(UTC)), st.times(), st.timedeltas()),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=20,
)


def nothing(value: Any) -> Any:
    raise NotEncodableError("not plain")


def kinds(value: Any) -> Any:
    """Return the type of a value and of everything in it."""
    if isinstance(value, dict):
        return dict, sorted((repr(key), kinds(item)) for key, item in value.items())
    return (type(value), [kinds(item) for item in value]) if isinstance(value, list | tuple) else type(value)


@given(values)
def test_plain_values_are_transferred_unchanged(value: Any) -> None:
    crossed = decode(encode(value, nothing), nothing)
    assert crossed == value and kinds(crossed) == kinds(value)


def test_nearly_plain_values_are_transferred_by_their_meaning() -> None:
    class Mine(int):
        def __eq__(self, other: object) -> bool:
            return True

    crossed = decode(encode([Mine(3), range(1, 9, 2), slice(1, None), 2**80], nothing), nothing)
    assert crossed[0] != 4 and type(crossed[0]) is int and crossed[1:] == [range(1, 9, 2), slice(1, None), 2**80]


@pytest.mark.parametrize(
    "message",
    [
        {"int": "x"},
        {"set": [[]]},
        {"dict": [1]},
        {"a": 1, "b": 2},
        {"range": []},
        {"decimal": "x"},
        {"fraction": [1, 0]},
        {"date": 5},
    ],
)
def test_other_objects_are_refused(message: Any) -> None:
    with pytest.raises(NotEncodableError):
        decode(message, nothing)


def test_too_deeply_nested_values_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(2 * MAX_DEPTH):
        deep = [deep]
    with pytest.raises(NotEncodableError, match="nested more than"):
        encode(deep, nothing)
    with pytest.raises(NotEncodableError, match="nested too deeply"):
        decode([deep], nothing)


def test_messages_pass_a_pipe_one_by_one() -> None:
    reads, writes = os.pipe()
    send(writes, {"a": "é"})
    send(writes, [1, 2])
    os.write(writes, (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    assert receive(reads) == {"a": "é"} and receive(reads) == [1, 2]
    with pytest.raises(EOFError, match=f"a message of {MAX_MESSAGE_BYTES + 1} bytes"):
        receive(reads)
    os.write(writes, pack_message("cut")[:-1])
    os.close(writes)
    with pytest.raises(EOFError, match="ended"):
        receive(reads)
    os.close(reads)


PROGRAM = """
import math
from collections import Counter, namedtuple

LIMIT = 10
Point = namedtuple("Point", "x y")

def add(a, b=1, *rest, scale=1):
    return (a + b + sum(rest)) * scale if rest else a + b

def sort(items):
    items.sort()

def fill(table, into, *, more):
    table["new"] = 1; into.add(3); more.append(into)

def each(function, items):
    return [function(item) for item in items]

def count():
    n = 0
    while True:
        yield n
        n += 1

def fails(kind):
    raise {"value": ValueError, "key": KeyError, "mine": Mine}[kind]("no luck")

class Mine(LookupError):
    pass

class Stack:
    shared = "yes"
    def __init__(self, *items): self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def __setitem__(self, place, item): self.items[place] = item
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __str__(self): return "a stack"
    __repr__ = __str__

class Taller(Stack):
    pass

class Taker:
    def __contains__(self, item): return True

def top(stack): return stack.items[-1]
"""

PASSING = [
    "assert add(1) == 2 and add(1, 2, 3, scale=2) == 12 and add(b=5, a=1) == 6",
    "assert add('a', 'b') == 'ab' and add([1], [2]) == [1, 2] and add((1,), (2,)) == (1, 2)",
    "assert type(add([1], [2])) is list and add(0.1, 0.2) == 0.1 + 0.2",
    "items = [3, 1, 2]; sort(items); assert items == [1, 2, 3]",
    "table, into, more = {}, {1}, []; fill(table, into, more=more); assert table == {'new': 1} and into == {1, 3}",
    "more = []; fill({}, {1}, more=more); assert more == [{1, 3}]",
    "assert each(lambda item: item * 2, [1, 2]) == [2, 4] and each(len, ['ab']) == [2] and each(int, ['7']) == [7]",
    "assert each(str.upper, ['a']) == ['A']",
    "found = count(); assert [next(iter(found)) for _ in range(3)] == [0, 1, 2]",
    "import itertools; assert list(itertools.islice(count(), 3)) == [0, 1, 2]",
    "assert LIMIT == 10 and Point(1, 2) == (1, 2)",
    "assert math.floor(2.5) == 2 and Counter('aab') == {'a': 2, 'b': 1}",
    "try:\n    fails('value')\nexcept ValueError as e:\n    assert str(e) == 'no luck'\nelse:\n    assert False",
    "try:\n    fails('mine')\nexcept LookupError:\n    pass\nelse:\n    assert False",
    "stack = Stack(1, 2).push(3); assert len(stack) == 3 and stack[0] == 1 and 3 in stack and 4 not in stack",
    "stack = Stack(1); stack[0] = 5; assert stack.items == [5] and [each for each in stack] == [5]",
    "stack = Stack(); stack.items = [7]; assert top(stack) == 7 and Stack.shared == 'yes'",
    "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and str(Stack()) == f'{Stack()!r}' == 'a stack'",
    "assert isinstance(Taller(), Stack) and not isinstance(Stack(), Taller) and not isinstance([], Stack)",
    "assert Stack(1) and not Stack()",
    "assert top(Stack(Stack(4)))[0] == 4",
    "assert Stack(1, 2, 3)[:2] == [1, 2] and Stack(1, 2, 3)[::-1] == [3, 2, 1]",
    "from fractions import Fraction as F; assert add(F(1, 3), F(1, 6)) == F(1, 2)",
    "from decimal import Decimal as D; assert add(D('0.1'), D('0.2')) == D('0.3')",
    "from datetime import *; assert add(date(2024, 2, 28), timedelta(1)) == date(2024, 2, 29)",
    "from collections import deque; held = deque([3, 1], 5); add(held, held); assert held == deque([3, 1], 5)",
    "def helper(n): return add(n, n)\nassert helper(2) == 4",
    "assert abs(add(1.5, -4.5)) == 3.0 and all(add(n, 0) == n for n in range(50))",
]
FAILING = [
    "assert add(1) == 3",
    "assert Stack(1) == [1]",
    "assert Stack(1) == 1 or Stack(1) in [1, [1]]",
    "assert absent(1) == 1",
    "assert fails('key')",
    "assert Stack(1) + 1",
    "assert Stack(1) < 2",
    "assert 7 in Taker()",
    "assert [1] == sort([1])",
]


def put(statements: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Return statements as they are sent to a program that has these names."""
    cut = [(statement, True) for statement in statements]
    return {"names": [(name, name) for name in names], "modules": {}, "statements": cut, "seconds": 20.0}


def examined(code: str, statements: Sequence[str], names: list[str]) -> ProgramTestResults:
    """Return the verdict on a program that these statements about its names give."""

    async def tried() -> ProgramTestResults:
        async with Sandbox(code, SandboxLimits()) as sandbox:
            return await sandbox.run_tests(put(statements, names), len(statements), 10.0)

    return asyncio.run(tried())


def passed(code: str, statement: str, names: list[str]) -> bool:
    """Return True if a statement about a program's names passes."""
    return examined(code, [statement], names) == ProgramTestResults((True,), "")


NAMES = [
    "add",
    "sort",
    "fill",
    "each",
    "count",
    "fails",
    "Stack",
    "Taller",
    "Taker",
    "top",
    "LIMIT",
    "Point",
    "math",
    "Counter",
]


def test_tests_pass_as_within_the_programs_process() -> None:
    for statement in PASSING:
        names: dict[str, Any] = {}
        exec(PROGRAM, names)
        exec(statement, names)  # it passes if both are one process
    results = examined(PROGRAM, PASSING, NAMES)
    assert results == ProgramTestResults((True,) * len(PASSING), ""), dict(zip(PASSING, results.passed, strict=False))


def test_wrong_programs_fail_their_tests() -> None:
    passed = examined(PROGRAM, [*FAILING, PASSING[0]], NAMES).passed
    assert passed == (*[False] * len(FAILING), True), dict(zip(FAILING, passed, strict=False))


def test_a_program_named_like_a_builtin_is_tested() -> None:
    assert passed("def sum(a, b): return a * b", "assert sum(2, 3) == 6", ["sum"])
    assert not passed("def abs(n): return 0\ndef add(a, b): return 9", "assert abs(add(1, 2) - 3) == 0", ["add"])


def test_numbers_and_arrays_of_numpy_are_plain() -> None:
    async def tried() -> ProgramTestResults:
        code = "import numpy\ndef table(n): return numpy.arange(n)\ndef mean(x): return numpy.mean(x)"
        async with Sandbox(code, SandboxLimits(packages=True, memory_mb=2048)) as sandbox:
            tests = put(["assert table(3) == [0, 1, 2]", "assert mean([1, 2]) == 1.5"], ["table", "mean"])
            return await sandbox.run_tests(tests, 2, 20.0)

    assert asyncio.run(tried()) == ProgramTestResults((True, True), "")
