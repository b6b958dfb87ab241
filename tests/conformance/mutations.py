"""Does the suite bite? A mutation breaks one formula in one place, and a named check has to notice.

A function is mutated by exact text: `old` must occur in its source exactly once, so that a mutation cannot silently
stop applying when the code changes. What is compiled from the changed source takes the place of the function's own
code, wherever the function has been imported to, and is taken out again when the check has spoken.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType

import pytest


@dataclass(frozen=True)
class Mutation:
    """One mistake, and the check that must find it."""

    kind: str
    """The sort of mistake: sign flip, wrong normaliser, detached ratio …"""
    function: Callable[..., object]
    """The function or method that is broken."""
    old: str
    """The text that is replaced; it stands in the function's source exactly once."""
    new: str
    check: Callable[[], None]
    """A test that passes on the function as it is, and must fail on the broken one."""

    @property
    def name(self) -> str:
        return f"{self.function.__qualname__}: {self.kind}"

    @property
    def check_name(self) -> str:
        """The check's name, with the arguments it is run with."""
        if isinstance(self.check, partial):
            given = ", ".join(map(repr, self.check.args))
            return f"{self.check.func.__name__}({given})" if given else self.check.func.__name__
        return self.check.__name__

    @property
    def check_key(self) -> object:
        """The identity of the check: its function and its arguments."""
        if isinstance(self.check, partial):
            return self.check.func, self.check.args, tuple(sorted(self.check.keywords.items()))
        return self.check


def mutated(mutation: Mutation) -> CodeType:
    """The code of the broken function."""
    function = plain(mutation.function)
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(mutation.old)
    assert count == 1, f"`{mutation.old}` stands {count} times in {function.__qualname__}; a mutation needs exactly one"
    changed = source.replace(mutation.old, mutation.new)
    assert function.__closure__ is None, f"{function.__qualname__} is a closure: its code cannot be exchanged"
    flags = __future__.annotations.compiler_flag
    space = dict(function.__globals__)
    exec(compile(changed, f"<mutation of {function.__qualname__}>", "exec", flags, dont_inherit=True), space)
    return plain(space[function.__name__]).__code__


def plain(function: object) -> FunctionType:
    """The function itself, without what decorates it."""
    if isinstance(function, property):
        function = function.fget
    elif isinstance(function, cached_property):
        function = function.func
    found = inspect.unwrap(function) if callable(function) else function
    assert isinstance(found, FunctionType)
    return found


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The broken function in the place of the sound one."""
    function = plain(mutation.function)
    sound = function.__code__
    function.__code__ = mutated(mutation)
    try:
        yield
    finally:
        function.__code__ = sound


def bites(mutation: Mutation) -> None:
    """The check passes, and fails by an assertion while the function is broken."""
    if mutation.check_key not in PASSED:
        mutation.check()
        PASSED.add(mutation.check_key)
    with applied(mutation), pytest.raises(AssertionError):
        mutation.check()


PASSED: set[object] = set()
"""The checks that passed on sound functions: once for all mutations that name them."""
