"""Whoever tries a program's functions, in a process of its own that holds the tests, out of the program's reach.

The tests are run here. A name of the program is a `Thing` in them: what is done with it is asked for over a pipe, and
what comes back is plain, or a `Thing` again. So a test's `assert` compares values of this process by the rules of this
process; a program that redefines `==`, replaces builtins or ends itself changes nothing but its own answers. A `Thing`
equals another `Thing` where the program says so, and never a plain value.

What was found is written down test by test, for the keeper to read when all has ended.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

from etude.rewards.inside.frames import HEAD, LARGEST, packed, unpacked
from etude.rewards.inside.plain import NotPlainError, decode, encode

__all__ = ["GoneError", "Line", "Thing", "UnfitError", "examine"]

KNOWN = ("builtins", "math", "operator", "_operator")
"""Modules whose functions a test may hand to a program by name."""


class UnfitError(BaseException):
    """A test does what cannot be done with a program that is elsewhere. It goes the same way as `GoneError`."""


class GoneError(BaseException):
    """The program has ended, says what makes no sense, or took too long: nothing more can be asked, and no test passes
    any more. Like an interrupt it goes through a test's `except Exception`."""


def examine(told: int, asks: int, found: int, tests: Any) -> int:
    """Run the tests against the program at the other ends of two pipes, and write what comes of each to a third
    descriptor."""
    asking = Line(told, asks, tests["seconds"])
    with suppress(GoneError):
        if "call" in tests:
            _calls(asking, found, tests)
        else:
            _statements(asking, found, tests)
    return 0


def _calls(asking: Line, found: int, tests: Any) -> None:
    """Call one function with each list of arguments, and write down what it returns."""
    for given in tests["given"]:
        asking.begin()
        try:
            value = asking.function(tests["call"])(*given)
            result = {"value": encode(value, _nothing)}
        except (Exception, NotPlainError) as error:
            result = {"raised": f"{type(error).__name__}: {error}"}
        _write(found, result)


def _statements(asking: Line, found: int, tests: Any) -> None:
    """Run statements in their order, and write down whether they passed; none behind one that is no test and did
    not."""
    names: dict[str, Any] = {"__name__": "tests"}
    asking.begin()
    for name, known_as in tests["names"]:
        with suppress(LookupError):
            names[name] = asking.named(known_as)
    for text, counts in tests["statements"]:
        asking.begin()
        passed = True
        try:
            exec(compile(text, "tests", "exec"), names)
        except ImportError as error:
            passed = False
            if not counts and text.startswith(("import ", "from ")):  # it imports what is there: no program has a part
                asking.unfit = f"they import what is not in the box ({error}; see `reward.packages`)"
        except (Exception, UnfitError):
            passed = False
        if asking.gone:
            return
        if asking.unfit:
            _write(found, {"unfit": asking.unfit})
            return
        _write(found, {"passed": passed})
        if not (passed or counts):
            return


def _write(found: int, result: Any) -> None:
    os.write(found, json.dumps(result).encode() + b"\n")


def _nothing(value: Any) -> Any:
    raise NotPlainError(f"a {type(value).__name__} is no plain value")


class Line:
    """The questions that can be put to a program. Each test has so many seconds for all of its questions."""

    def __init__(self, told: int, asks: int, seconds: float) -> None:
        self._told, self._asks, self._seconds = told, asks, seconds
        for end in (told, asks):
            os.set_blocking(end, False)
        self._until = time.monotonic() + seconds
        self._lent: list[Any] = []
        self.gone = False
        """Whether it said its last; also where a test took no notice."""
        self.unfit = ""
        """Why no program can be put to a test; also where that took no notice."""

    def begin(self) -> None:
        """Begin a test."""
        self._until = time.monotonic() + self._seconds

    def named(self, name: str) -> Any:
        """What the program calls by a name; `LookupError` where there is no such name."""
        answer = self._ask({"name": name})
        if "absent" in answer:
            raise LookupError(name)
        if "module" in answer:
            module = str(answer["module"])
            if module != name or name not in sys.stdlib_module_names:
                raise LookupError(name)
            return importlib.import_module(module)
        return self._value(answer)

    def function(self, name: str) -> Any:
        """A function by its name, or a method of the class `Solution`."""
        try:
            return self.named(name)
        except LookupError:
            return getattr(self.named("Solution")(), name)

    def do(self, what: str, *on: Any) -> Any:
        """Have one operation done on values and things, and change the plain ones that it changed."""
        try:
            question = {"do": what, "on": [encode(each, self._refer) for each in on]}
        except UnfitError as error:
            self.unfit = str(error)
            raise
        answer = self._ask(question)
        value = self._value(answer)
        for before, after in zip(on, self._decoded(answer.get("after", [])), strict=False):
            _become(before, after)
        return value

    # -- small parts --------------------------------------------------------------------------------------------------

    def _value(self, answer: Any) -> Any:
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), None)
            usual = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if usual else Exception)(str(answer.get("text", "")))  # type: ignore[misc]
        return self._decoded(answer.get("value"))

    def _decoded(self, message: Any) -> Any:
        try:
            return decode(message, self._found)
        except NotPlainError as error:
            raise self._lost(str(error)) from error

    def _ask(self, question: Any) -> dict[str, Any]:
        self._send(question)
        while True:
            answer = self._receive()
            if "callback" not in answer:
                return answer
            self._send(self._called_back(answer))

    def _called_back(self, asked: Any) -> Any:
        try:
            function = self._lent[asked["callback"]]
            return {"value": encode(function(*self._decoded(asked["given"])), self._refer)}
        except (Exception, UnfitError) as error:
            return {"raised": f"{type(error).__name__}: {error}"}

    def _refer(self, value: Any) -> Any:
        """Stands for what is not plain: a thing by its number, what Python itself has by its name, functions by the
        number at which they are called back."""
        if isinstance(value, Thing):
            return {"thing": _number(value)}
        if isinstance(value, type | BuiltinFunctionType | MethodDescriptorType):
            module = getattr(value, "__objclass__", value).__module__
            if module in KNOWN:
                return {"known": f"{module}:{value.__qualname__}"}
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
            self._lent.append(value)
            return {"callback": len(self._lent) - 1}
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        raise UnfitError(f"a `{kind}` cannot be handed to the program, which takes plain values and functions")

    def _found(self, message: Any) -> Any:
        if not isinstance(number := message.get("thing"), int):
            raise NotPlainError("a message is no value")
        return Thing(self, number)

    def _send(self, message: Any) -> None:
        rest = memoryview(packed(message))
        while rest:
            select.select([], [self._asks], [], self._left())
            try:
                rest = rest[os.write(self._asks, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(str(error)) from error

    def _receive(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(HEAD), "big")
        if length > LARGEST:
            raise self._lost(f"a message of {length} bytes")
        try:
            answer = unpacked(self._exactly(length))
        except ValueError as error:
            raise self._lost(str(error)) from error
        if not isinstance(answer, dict):
            raise self._lost("a message is no answer")
        return answer

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            select.select([self._told], [], [], self._left())
            try:
                part = os.read(self._told, min(count - len(parts), 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise self._lost("it ended")
            parts += part
        return bytes(parts)

    def _lost(self, why: str) -> GoneError:
        self.gone = True
        return GoneError(why)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise self._lost("it took too long")
        return left


class Thing:
    """Something that a program made and that is not plain: a function, a class, an object of one."""

    __slots__ = ("_etude_line", "_etude_number")
    _etude_line: Line
    _etude_number: int

    def __init__(self, line: Line, number: int) -> None:
        object.__setattr__(self, "_etude_line", line)
        object.__setattr__(self, "_etude_number", number)

    def _etude_do(self, what: str, *on: Any) -> Any:
        return self._etude_line.do(what, self, *on)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._etude_do("call", _Given(given), _Named(named))

    def __getattr__(self, name: str) -> Any:
        return self._etude_do("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._etude_do("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._etude_do("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._etude_do("setitem", key, value)

    def __contains__(self, item: Any) -> bool:
        return any(each == item for each in self)  # a program that were asked would be told what is looked for

    def __iter__(self) -> Iterator[Any]:
        items = self._etude_do("iter")
        while item := self._etude_line.do("next", items):
            yield item[0]

    def __len__(self) -> int:
        length = self._etude_do("len")
        return length if isinstance(length, int) else 0

    def __bool__(self) -> bool:
        return self._etude_do("bool") is True

    def __str__(self) -> str:
        return str(self._etude_do("str"))

    def __repr__(self) -> str:
        return str(self._etude_do("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self._etude_do("equal", other) is True

    def __hash__(self) -> int:
        return self._etude_number

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Thing) and self._etude_line.do("isinstance", value, self) is True


class _Given(list[Any]):
    """The arguments of a call: a list of what is the test's, and itself nobody's."""


class _Named(dict[str, Any]):
    """The same of those that are given by name."""


def _number(thing: Thing) -> int:
    return thing._etude_number


def _become(before: Any, after: Any) -> None:
    """Do to a value what was done to its copy."""
    if isinstance(before, _Given) and isinstance(after, list):
        for one, other in zip(before, after, strict=False):
            _become(one, other)
    elif isinstance(before, _Named) and isinstance(after, dict):
        for name in before.keys() & after.keys():
            _become(before[name], after[name])
    elif type(before) is not type(after) or before == after:
        return
    elif isinstance(before, list | bytearray):
        before[:] = after
    elif isinstance(before, deque):
        before.clear()
        before.extend(after)
    elif isinstance(before, set | dict):
        before.clear()
        before.update(after)
