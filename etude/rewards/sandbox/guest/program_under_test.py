"""The process of the program under test: it runs as a script, or is loaded and serves one request at a time.

The test runner trusts none of its replies. It compares a script's output itself. From a loaded program it receives
plain values. Any other object stays in this process, and messages refer to it by number (`json_values`, `test_runner`).
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import operator
import sys
from collections.abc import Callable
from functools import reduce
from itertools import islice
from threading import current_thread
from threading import enumerate as list_threads
from types import ModuleType
from typing import Any

from etude.rewards.sandbox.guest.json_values import decode, encode
from etude.rewards.sandbox.guest.pipe_messages import receive, send

PROGRAM_FILE = "answer.py"
MAX_TEXT_CHARS = 10_000
"""The most characters of an exception's text in a reply."""


def run_script(code: str) -> int:
    """Run a program as Python runs a script, and return its exit code.

    Of Python's shutdown it does only the steps with visible effects: a full shutdown takes longer than most programs.
    """
    status = 0
    try:
        _execute(code, "__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
    try:
        _run_exit_handlers()
    except BaseException:
        status = status or 1
    return status & 0xFF


def serve(code: str, request_fd: int, reply_fd: int) -> int:
    """Load a program and serve the requests of one pipe until it closes. Replies go to the other pipe."""
    _ProgramServer(request_fd, reply_fd, vars(_execute(code, "answer"))).run()
    return 0


def _run_exit_handlers() -> None:
    """Join the threads, run the exit handlers, and flush all output."""
    for thread in list_threads():
        if thread is not current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # this closes files that only the module refers to
    sys.stdout.flush()


def _execute(code: str, name: str) -> ModuleType:
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site` would define them, and is not loaded
    module = ModuleType(name)
    module.__dict__["__file__"] = PROGRAM_FILE
    sys.modules[name] = module
    exec(compile(code, PROGRAM_FILE, "exec"), module.__dict__)
    return module


class _ProgramServer:
    """Serves requests on the objects of a program. The program can reach its memory, so it holds no secret."""

    def __init__(self, request_fd: int, reply_fd: int, names: dict[str, Any]) -> None:
        self._request_fd = request_fd
        self._reply_fd = reply_fd
        self._names = names
        self._objects: list[Any] = []

    def run(self) -> None:
        """Serve requests until the pipe closes."""
        while True:
            try:
                request = receive(self._request_fd)
            except EOFError:
                return
            send(self._reply_fd, self._handle(request))

    def _handle(self, request: Any) -> Any:
        try:
            if "name" in request:
                return self._look_up(request["name"])
            operands = [decode(operand, self._decode_reference) for operand in request["on"]]
            result = _OPERATIONS[request["do"]](*operands)
            reply = {"value": encode(result, self._encode_reference)}
            after = [encode(operand, self._encode_reference) for operand in operands]
            return reply if after == request["on"] else reply | {"after": after}
        except BaseException as error:  # it fails one test, and the next test sends a new request
            return _encode_exception(error)

    def _look_up(self, name: str) -> Any:
        if name not in self._names:
            return {"absent": name}
        value = self._names[name]
        return (
            {"module": value.__name__}
            if isinstance(value, ModuleType)
            else {"value": encode(value, self._encode_reference)}
        )

    def _encode_reference(self, value: Any) -> Any:
        """Encode a value that is not plain: numpy's scalars and arrays as lists, any other object by its number."""
        if hasattr(value, "tolist") and not isinstance(value, type):
            return encode(value.tolist(), self._encode_reference)
        for number, known in enumerate(self._objects):
            if known is value:
                return {"thing": number}
        self._objects.append(value)
        return {"thing": len(self._objects) - 1}

    def _decode_reference(self, message: Any) -> Any:
        if "thing" in message:
            return self._objects[message["thing"]]
        if "known" in message:
            module, _, name = message["known"].partition(":")
            return reduce(getattr, name.split("."), importlib.import_module(module))
        return self._make_callback(message["callback"])

    def _make_callback(self, number: int) -> Callable[..., Any]:
        """Return a function that calls a function of the test runner."""

        def callback(*arguments: Any) -> Any:
            send(
                self._reply_fd,
                {"callback": number, "given": [encode(argument, self._encode_reference) for argument in arguments]},
            )
            reply = receive(self._request_fd)
            if "raised" in reply:
                raise ValueError(reply["raised"])
            return decode(reply["value"], self._decode_reference)

        return callback


def _encode_exception(error: BaseException) -> Any:
    """Encode an exception by its nearest builtin class and its text. Its `__str__` may raise as well."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = str(error)[:MAX_TEXT_CHARS]
    except BaseException:
        text = ""
    return {"raised": kinds[0], "text": text}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "iter": iter,
    "next": lambda iterator: list(islice(iterator, 1)),
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "equal": lambda target, other: bool(target == other),
    "isinstance": isinstance,
}
