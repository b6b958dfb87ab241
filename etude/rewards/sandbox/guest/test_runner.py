"""The test runner: a process that holds a program's tests, out of the program's reach, and compares its results.

A script's output is in a file that no process still writes. A program's functions are tested while its process
runs. In a test, a name of the program is a `RemoteObject`. Operations on it are sent over a pipe, and the result is a
plain value or another `RemoteObject`. So a test's `assert` compares values of this process by the rules of this
process. A program that redefines `==`, replaces builtins or ends itself changes only its own replies. A `RemoteObject`
equals another `RemoteObject` if the program says so, and never equals a plain value.

A value that raises or hangs here, when it is compared, hashed or shown, fails its test and nothing else. So does a
value that cannot be sent to the program after the program has replied: the program may have chosen its type. The test
runner writes one letter for each test, and the init process reads them when all has ended.
"""

from __future__ import annotations

import builtins
import importlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

from etude.rewards.sandbox.guest.compare import outputs_match, values_match
from etude.rewards.sandbox.guest.json_values import NotEncodableError, decode, encode
from etude.rewards.sandbox.guest.pipe_messages import HEAD, MAX_PROGRAM_MESSAGE_BYTES, pack_message, unpack_message

PASSED = "1"
FAILED = "0"
INVALID = "?"
"""The letters of a test's result. After `INVALID` comes the reason why the test cannot run against any program."""
MAX_REASON_BYTES = 400
"""The most bytes of that reason."""
SHARED_MODULES = ("builtins", "math", "operator", "_operator")
"""Modules whose functions a test may send to a program by name."""
_USUAL = (Exception, SystemExit, KeyboardInterrupt)
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)


class InvalidTestError(BaseException):
    """A test does something that is impossible with a program in another process.

    It passes a test's `except Exception`, as `ProgramLostError` does.
    """


class AbortedTestError(BaseException):
    """A test fails, and must not catch the failure as something else.

    The program raised an exception that ends loops, or replied with a value that cannot be sent back to it.
    """


class ProgramLostError(BaseException):
    """The program has ended, sent an invalid message, or took too long, so that no later test can pass.

    Like an interrupt it passes a test's `except Exception`.
    """


def check_output(output_fd: int, result_fd: int, expected: str) -> int:
    """Compare the output of a script, which is in a file, with the expected output."""

    def matches() -> bool:
        with open(output_fd, "rb", closefd=False) as file:
            file.seek(0)
            return outputs_match(expected, file.read().decode(errors="replace"))

    _write(result_fd, PASSED if _passes(matches) else FAILED)
    return 0


def run_tests(reply_fd: int, request_fd: int, result_fd: int, tests: Any) -> int:
    """Run the tests against the program at the other ends of two pipes, and write the results to a third descriptor."""
    program = ProgramConnection(reply_fd, request_fd, tests["seconds"])
    with suppress(ProgramLostError):
        if "call" in tests:
            _run_calls(program, result_fd, tests)
        else:
            _run_statements(program, result_fd, tests)
    return 0


def _run_calls(program: ProgramConnection, result_fd: int, tests: Any) -> None:
    """Call one function with each list of arguments, and compare its results."""
    for arguments, expected in zip(tests["given"], tests["wanted"], strict=True):
        program.begin_test()
        passed = _passes(lambda: values_match(expected, program.look_up_function(tests["call"])(*arguments)))  # noqa: B023
        _write(result_fd, PASSED if passed else FAILED)


def _run_statements(program: ProgramConnection, result_fd: int, tests: Any) -> None:
    """Run statements in order and write their results. Stop after a statement that is not a test and fails."""
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        modules = {name: _module(name, *used) for name, used in tests["modules"].items()}
    except ImportError as error:
        _write(result_fd, INVALID + _describe_import_error(error))
        return
    names |= {name: module for name, module in modules.items() if module is not None}
    program_names = [(name, known_as) for name, known_as in tests["names"] if name not in names]
    if not program_names:
        _write(result_fd, f"{INVALID}they use no name that a program could define")
        return
    program.begin_test()
    for name, known_as in program_names:
        with suppress(LookupError):
            names[name] = program.look_up(known_as)
    for text, is_test in tests["statements"]:
        program.begin_test()
        passed = _passes(lambda: _run_statement(text, names, program, is_setup=not is_test)) and not program.is_aborted  # noqa: B023
        if program.is_lost:
            return
        if program.invalid_reason:
            _write(result_fd, INVALID + program.invalid_reason)
            return
        _write(result_fd, PASSED if passed else FAILED)
        if not (passed or is_test):
            return


def _run_statement(text: str, names: dict[str, Any], program: ProgramConnection, *, is_setup: bool) -> bool:
    """Run a statement. is_setup: True if it is not a test; a failed import is then the tests' fault."""
    try:
        exec(compile(text, "tests", "exec"), names)
    except ImportError as error:
        if is_setup and text.startswith(("import ", "from ")):
            program.invalid_reason = _describe_import_error(error)
        return False
    return True


def _module(name: str, path: str, attributes: list[str]) -> ModuleType | None:
    """Import a module that a test uses without importing it.

    None if the standard library's module lacks a used attribute: then the test means the program's object of that name.
    """
    if name not in sys.stdlib_module_names:
        return importlib.import_module(path)
    try:
        module = importlib.import_module(path)
        for attribute in attributes:
            if not hasattr(module, attribute):
                importlib.import_module(f"{path}.{attribute}")
    except ImportError:
        return None
    return module


def _describe_import_error(error: ImportError) -> str:
    return f"they import a module that is not in the sandbox ({error}; see `reward.packages`)"


def _passes(test: Callable[[], bool]) -> bool:
    """Return True if a test passes. An exception fails it; only `ProgramLostError` is raised again."""
    try:
        return test()
    except ProgramLostError:
        raise
    except BaseException:
        return False


def _write(result_fd: int, text: str) -> None:
    os.write(result_fd, text.encode("ascii", "replace")[:MAX_REASON_BYTES])


class ProgramConnection:
    """The requests to a program. `seconds` limit all requests of one test together."""

    def __init__(self, reply_fd: int, request_fd: int, seconds: float) -> None:
        self._reply_fd = reply_fd
        self._request_fd = request_fd
        self._seconds = seconds
        for end in (reply_fd, request_fd):
            os.set_blocking(end, False)
        self._deadline = time.monotonic() + seconds
        self._callbacks: list[Any] = []
        self.is_lost = False
        """True after the program's last reply, also if a test caught the exception."""
        self.invalid_reason = ""
        """The reason why a test cannot run against any program, also if the test caught the exception."""
        self.is_aborted = False
        """True if this test raised an `AbortedTestError`, also if the test caught it."""
        self._answered = False
        """True after the first reply whose value the program could choose."""

    def begin_test(self) -> None:
        """Begin a test."""
        self.is_aborted = False
        self._deadline = time.monotonic() + self._seconds

    def look_up(self, name: str) -> Any:
        """Return the program's object of a name. Raises `LookupError` if there is none."""
        reply = self._request({"name": name})
        if "absent" in reply:
            raise LookupError(name)
        if "module" in reply:
            module = str(reply["module"])
            if module != name or name not in sys.stdlib_module_names:
                raise LookupError(name)
            return importlib.import_module(module)
        value = self._reply_value(reply)
        self._answered |= not isinstance(value, RemoteObject)
        return value

    def look_up_function(self, name: str) -> Any:
        """Return the function of a name, or the method of that name of the class `Solution`."""
        try:
            return self.look_up(name)
        except LookupError:
            return getattr(self.look_up("Solution")(), name)

    def perform(self, operation: str, *operands: Any) -> Any:
        """Perform one operation in the program, and copy its changes back to the plain operands."""
        try:
            request = {"do": operation, "on": [encode(operand, self._encode_reference) for operand in operands]}
        except InvalidTestError as error:
            if self._answered:
                self.is_aborted = True
                raise AbortedTestError(str(error)) from error
            self.invalid_reason = str(error)
            raise
        reply = self._request(request)
        value = self._reply_value(reply)
        for before, after in zip(operands, self._decode(reply.get("after", [])), strict=False):
            _copy_changes(before, after)
        return value

    # -- messages -----------------------------------------------------------------------------------------------------

    def _reply_value(self, reply: Any) -> Any:
        if "raised" in reply:
            raise self._make_exception(str(reply["raised"]), str(reply.get("text", "")))
        return self._decode(reply.get("value"))

    def _make_exception(self, name: str, text: str) -> BaseException:
        """Create an exception of this process for the program's exception."""
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = Exception
        if issubclass(kind, _ENDS_LOOPS) or not issubclass(kind, _USUAL):
            self.is_aborted = True
            return AbortedTestError(text)
        try:
            return kind(text)
        except TypeError:  # its constructor takes more than a text
            error = kind.__new__(kind)
            error.args = (text,)
            return error

    def _decode(self, message: Any) -> Any:
        try:
            return decode(message, self._decode_reference)
        except NotEncodableError as error:
            raise self._mark_lost(str(error)) from error

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        while True:
            reply = self._receive()
            if "name" not in request:
                self._answered = True
            if "callback" not in reply:
                return reply
            self._send(self._run_callback(reply))

    def _run_callback(self, request: Any) -> Any:
        try:
            function = self._callbacks[request["callback"]]
            return {"value": encode(function(*self._decode(request["given"])), self._encode_reference)}
        except (Exception, InvalidTestError) as error:
            return {"raised": f"{type(error).__name__}: {error}"}

    def _encode_reference(self, value: Any) -> Any:
        """Encode a value that is not plain: a program's object by its number, a builtin by its name, and a function by
        the number of its callback."""
        if isinstance(value, RemoteObject):
            return {"thing": value._etude_number}
        if isinstance(value, type | BuiltinFunctionType | MethodDescriptorType):
            module = getattr(value, "__objclass__", value).__module__
            if module in SHARED_MODULES:
                return {"known": f"{module}:{value.__qualname__}"}
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        raise InvalidTestError(f"a `{kind}` cannot be sent to the program, which takes plain values and functions")

    def _decode_reference(self, message: Any) -> Any:
        if not isinstance(number := message.get("thing"), int):
            raise NotEncodableError("a message is not a value")
        return RemoteObject(self, number)

    def _send(self, message: Any) -> None:
        rest = memoryview(pack_message(message))
        while rest:
            select.select([], [self._request_fd], [], self._seconds_left())
            try:
                rest = rest[os.write(self._request_fd, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._mark_lost(str(error)) from error

    def _receive(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(HEAD), "big")
        if length > MAX_PROGRAM_MESSAGE_BYTES:
            raise self._mark_lost(f"a message of {length} bytes")
        try:
            reply = unpack_message(self._exactly(length))
        except ValueError as error:
            raise self._mark_lost(str(error)) from error
        if not isinstance(reply, dict):
            raise self._mark_lost("a message is not a reply")
        return reply

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            select.select([self._reply_fd], [], [], self._seconds_left())
            try:
                part = os.read(self._reply_fd, min(count - len(parts), 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise self._mark_lost("it ended")
            parts += part
        return bytes(parts)

    def _mark_lost(self, reason: str) -> ProgramLostError:
        self.is_lost = True
        return ProgramLostError(reason)

    def _seconds_left(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise self._mark_lost("it took too long")
        return remaining


class RemoteObject:
    """An object of the program that is not a plain value: a function, a class, or an instance."""

    __slots__ = ("_etude_connection", "_etude_number")
    _etude_connection: ProgramConnection
    _etude_number: int

    def __init__(self, connection: ProgramConnection, number: int) -> None:
        object.__setattr__(self, "_etude_connection", connection)
        object.__setattr__(self, "_etude_number", number)

    def _etude_do(self, operation: str, *operands: Any) -> Any:
        return self._etude_connection.perform(operation, self, *operands)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._etude_do("call", _PositionalArguments(arguments), _KeywordArguments(keywords))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):
            raise AttributeError(name)  # numpy would read this process's memory at the program's address
        return self._etude_do("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._etude_do("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._etude_do("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._etude_do("setitem", key, value)

    def __contains__(self, item: Any) -> bool:
        return any(element == item for element in self)  # sending the item would reveal it to the program

    def __iter__(self) -> Iterator[Any]:
        items = self._etude_do("iter")
        while item := self._etude_connection.perform("next", items):
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
        return isinstance(other, RemoteObject) and self._etude_do("equal", other) is True

    def __hash__(self) -> int:
        return self._etude_number

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._etude_connection.perform("isinstance", value, self) is True


class _PositionalArguments(list[Any]):
    """The positional arguments of a call. The items are the test's, and the list is not."""


class _KeywordArguments(dict[str, Any]):
    """The keyword arguments of a call. The values are the test's, and the mapping is not."""


def _copy_changes(before: Any, after: Any) -> None:
    """Apply the changes of a copy to the original value."""
    if isinstance(before, _PositionalArguments) and isinstance(after, list):
        for before_item, after_item in zip(before, after, strict=False):
            _copy_changes(before_item, after_item)
    elif isinstance(before, _KeywordArguments) and isinstance(after, dict):
        for name in before.keys() & after.keys():
            _copy_changes(before[name], after[name])
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
