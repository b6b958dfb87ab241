"""Bounds of every request to a server of ours, in one place: of its head, its body, what it holds, and its time.

`connection` holds heads to them, `request_middleware` bodies, both before anything is parsed, and whoever sends them.
`check_json_size` looks at the bytes of JSON and says how much parsing would make of them, at a small part of the cost
of parsing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from etude.errors import DataError

__all__ = ["RequestRefusedError", "check_count", "check_json_size", "check_seconds", "check_size", "json_size"]

# -- a head ------------------------------------------------------------------------------------------------------------

HEAD_BYTES = 32 * 2**10
"""Of the request line and the headers together."""
HEADERS = 100
"""Lines of headers."""
HEAD_S = 20.0
"""Seconds that a head may take to arrive, and a new connection to send one."""
PIPELINED = 16
"""Requests that may wait on one connection behind the one that is answered."""

# -- a body ------------------------------------------------------------------------------------------------------------

BODY_BYTES = 32 * 2**20
"""As it came, and inflated."""
REWARDS_BYTES = 8 * 2**20
"""Of a request by the key with which one attempt writes."""
ANONYMOUS_BYTES, ANONYMOUS_S = 64 * 2**10, 10.0
"""Of a request without a key: its body, and the seconds that it may take."""
ANONYMOUS_UNREAD = 64 * 2**20
"""Bytes of answers that connections without a key leave unread, all together."""
BODY_S = 60.0
"""Seconds that a body may take to arrive."""
HELD_BYTES, HELD_BY_KEY = 512 * 2**20, 128 * 2**20
"""Of all bodies that are being read or answered at once; and of those of the admin key, or of the runners'. Attempts
together hold half of all at most. Bodies up to `SHORT_BYTES` by the admin's and the runners' keys are always read."""
HELD_BY_ATTEMPT, HELD_BY_ANONYMOUS = 48 * 2**20, 32 * 2**20
"""Of those by both keys of one attempt; and of all that come without a key."""
DRAINED_BYTES, DRAINED_S = 256 * 2**20, 5.0
"""What is still read of a request that is refused, so that its sender hears why rather than a broken connection."""

# -- what a body holds -------------------------------------------------------------------------------------------------

VALUES = 2**18
"""Values in a body of JSON: each in a list, each entry of an object."""
DEPTH = 100
"""Lists and objects within each other."""
NOTE_BYTES, NOTE_VALUES = 2**20, 20_000
"""Of what one note holds that an agent or a runner writes."""
NOTES, NOTES_BYTES = 10_000, 64 * 2**20
"""Of the notes and spans that one attempt writes with its own key."""
REWARDS, REWARDS_WRITTEN_BYTES = 100_000, 64 * 2**20
"""Of what one attempt pays its turns with its own key."""
WRITERS = 2**16
"""Attempts that are remembered with what they have written: those that wrote last."""
RUNNER_INFO = (4096, 200)
"""Bytes and values of what one runner says of itself."""
RUNNERS = 1024
"""Runners that are remembered at once."""
SHORT_BYTES = 2**17
"""Of a request that holds ids and little else."""
INLINE_BYTES = 16 * 2**10
"""A body up to here is parsed on the event loop, a longer one beside it."""

# -- connections -------------------------------------------------------------------------------------------------------

CONNECTIONS = 2**16
"""At once, where the system allows so many; else three quarters of the files that a process may open."""

_PIECE = 64 * 2**10
_STRUCTURE = b"[]{},"
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


def check_seconds(seconds: float, name: str) -> float:
    """How long somebody waits at most."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise DataError(f"{name} is {seconds}; every wait is bounded: give a number of seconds, 0 or more.")
    return seconds


def check_count(count: int, name: str) -> int:
    """How many somebody wants at most."""
    if count < 1:
        raise DataError(f"{name} is {count}; it must be 1 or more.")
    return count


class RequestRefusedError(Exception):
    """A request that is not read: the status of the answer, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_json_size(body: bytes, values: int = VALUES, depth: int = DEPTH) -> None:
    """Refuse JSON of more values, or more levels, than these.

    It counts the commas and brackets outside of texts, a piece at a time. What is not JSON may pass: a parser stops at
    its first error, and has made no more of what stands before it than was counted.
    """
    if len(body) <= _PIECE and body.count(b"[") + body.count(b"{") <= depth:
        return
    brackets, count, quote_count = [], 0, 0
    for outside, quotes in _outside(body):
        structure = outside.translate(None, _OTHERS)
        brackets.append(structure.translate(_AS_LISTS, b","))
        count, quote_count = (
            count + len(structure) - structure.count(b"]") - structure.count(b"}"),
            quote_count + quotes,
        )
        if count > values or quote_count > 4 * values + 4:
            raise RequestRefusedError(
                413, f"The body has more than {values} values, in lists and objects; send less at once."
            )
    nesting = b"".join(brackets)
    for _ in range(depth):  # a level each: what is left of a body that ends too early is no pair
        if b"[]" not in nesting:
            break
        nesting = nesting.replace(b"[]", b"")
    if b"[]" in nesting or nesting.count(b"[") > depth:
        raise RequestRefusedError(
            400, f"The body is nested too deeply: more than {depth} lists and objects in each other."
        )


def _outside(body: bytes) -> Iterator[tuple[bytes, int]]:
    """What stands outside of the texts of a body, a piece at a time, and how many quotation marks each piece has."""
    inside, escape = False, b""
    for start in range(0, len(body), _PIECE):
        piece = (escape + body[start : start + _PIECE]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""  # what it escapes stands in the next piece
        parts = piece.removesuffix(escape).replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2]), len(parts) - 1
        inside ^= len(parts) % 2 == 0


def check_size(value: Any, name: str, max_bytes: int = NOTE_BYTES, max_values: int = NOTE_VALUES) -> Any:
    """A value of JSON that is kept for people to look at, if it holds no more than this."""
    json_size(value, name, max_bytes, max_values)
    return value


def json_size(value: Any, name: str, max_bytes: int = NOTE_BYTES, max_values: int = NOTE_VALUES) -> int:
    """About how many bytes of JSON a value is; `DataError` where it holds more than this."""
    stack, size, count = [value], 0, 0
    while stack:
        item = stack.pop()
        count, size = count + 1, size + _size(item)
        if isinstance(item, Mapping):
            size += sum(map(_size, item))
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        if size > max_bytes or count + len(stack) > max_values:
            raise DataError(
                f"{name} holds more than is kept for looking at: at most {max_bytes} bytes as JSON, and {max_values} "
                "values in lists and objects. Say less, or in several."
            )
    return size


def _size(value: Any) -> int:
    """About how many bytes of JSON a value is, without what is in it."""
    if isinstance(value, str):
        return len(value) + 2 if value.isascii() else len(value.encode(errors="replace")) + 2
    return 1 + value.bit_length() // 4 if isinstance(value, int) else 2
