"""Proof that the suite finds mistakes. A mutation breaks one formula in one place, and a named check must fail.

A mutation replaces exact text. `old` must occur in the function's source exactly once, so that a mutation cannot
silently stop applying when the code changes. The changed source is compiled, and replaces the code object of the
function. So every module that imported the function runs the broken code. After the check the code is restored.
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
    """The kind of mistake: sign flip, wrong normalizer, detached ratio …"""
    function: Callable[..., object]
    """The function or method that is broken."""
    old: str
    """The replaced text, which occurs in the function's source exactly once."""
    new: str
    check: Callable[[], None]
    """A test that passes with the function, and must fail with the broken one."""

    @property
    def name(self) -> str:
        return f"{self.function.__qualname__}: {self.kind}"

    @property
    def check_name(self) -> str:
        """Return the check's name, with its arguments."""
        if isinstance(self.check, partial):
            arguments = ", ".join(map(repr, self.check.args))
            return f"{self.check.func.__name__}({arguments})" if arguments else self.check.func.__name__
        return self.check.__name__

    @property
    def check_key(self) -> object:
        """Return the identity of the check: its function and its arguments."""
        if isinstance(self.check, partial):
            return self.check.func, self.check.args, tuple(sorted(self.check.keywords.items()))
        return self.check


def broken_code(mutation: Mutation) -> CodeType:
    """Return the code of the broken function."""
    function = unwrapped(mutation.function)
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(mutation.old)
    assert count == 1, f"`{mutation.old}` occurs {count} times in {function.__qualname__}; a mutation needs exactly one"
    changed = source.replace(mutation.old, mutation.new)
    assert function.__closure__ is None, f"{function.__qualname__} is a closure: its code cannot be exchanged"
    flags = __future__.annotations.compiler_flag
    namespace = dict(function.__globals__)
    exec(compile(changed, f"<mutation of {function.__qualname__}>", "exec", flags, dont_inherit=True), namespace)
    return unwrapped(namespace[function.__name__]).__code__


def unwrapped(function: object) -> FunctionType:
    """Return the function without its decorators."""
    if isinstance(function, property):
        function = function.fget
    elif isinstance(function, cached_property):
        function = function.func
    unwrapped_function = inspect.unwrap(function) if callable(function) else function
    assert isinstance(unwrapped_function, FunctionType)
    return unwrapped_function


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Replace a function by the broken one, within this context."""
    function = unwrapped(mutation.function)
    intact = function.__code__
    function.__code__ = broken_code(mutation)
    try:
        yield
    finally:
        function.__code__ = intact


def assert_found(mutation: Mutation) -> None:
    """Assert that the check passes, and that an assertion of it fails while the function is broken."""
    if mutation.check_key not in PASSED:
        mutation.check()
        PASSED.add(mutation.check_key)
    with applied(mutation), pytest.raises(AssertionError):
        mutation.check()


PASSED: set[object] = set()
"""The checks that passed on intact functions. Each runs once, for all mutations that name it."""
