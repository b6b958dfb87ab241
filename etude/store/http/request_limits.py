"""Limits of all requests to the servers, in one place: of heads, bodies, memory and time.

`connection` enforces those of heads and `request_middleware` those of bodies, before anything is parsed and for
every client. `check_json_size` reads the bytes of JSON and tells how much parsing would create. It costs a small part
of the parsing.
"""

from __future__ import annotations

from collections.abc import Iterator

from etude.errors import DataError
from etude.store.queue.records import AttemptId
from etude.store.queue.verbs import SHORT_BYTES as SHORT_BYTES

# -- a head ------------------------------------------------------------------------------------------------------------

HEAD_BYTES = 32 * 2**10
"""Bytes of the request line and the headers together."""
HEADERS = 100
"""Number of headers."""
HEAD_S = 20.0
"""Seconds that a head may take to arrive, and that a new connection may take to send one."""
PIPELINED = 16
"""Requests that may wait on a connection behind the one being answered."""

# -- a body ------------------------------------------------------------------------------------------------------------

BODY_BYTES = 32 * 2**20
"""Bytes of a body, both as sent and as inflated."""
REWARDS_BYTES = 8 * 2**20
"""Bytes of a body that is sent with the reward key of an attempt."""
ANONYMOUS_BYTES, ANONYMOUS_S = 64 * 2**10, 10.0
"""Bytes of a body without a key, and the seconds that it may take."""
ANONYMOUS_UNREAD = 64 * 2**20
"""Bytes of responses that all anonymous connections together may leave unread."""
BODY_S = 60.0
"""Seconds that a body may take to arrive."""
HELD_BYTES, HELD_BY_KEY = 512 * 2**20, 128 * 2**20
"""Bytes of all bodies being read or answered at once; and of those of one shared key (the admin key or the runner key).

Attempts together may take half of the total. Bodies up to `SHORT_BYTES` with a shared key are always read.
"""
HELD_BY_ATTEMPT, HELD_BY_ANONYMOUS = 48 * 2**20, 32 * 2**20
"""Bytes of the bodies of both keys of one attempt; and of all bodies without a key."""
DRAINED_BYTES, DRAINED_S = 256 * 2**20, 5.0
"""Bytes and seconds that a refused request is still read. Its client then receives the reason, and not a broken
connection."""

# -- the contents of a body --------------------------------------------------------------------------------------------

VALUES = 2**18
"""Values in a JSON body: each list item and each object entry counts."""
DEPTH = 100
"""Levels of nested lists and objects."""
NOTES, NOTES_BYTES = 10_000, 64 * 2**20
"""Notes and spans that one attempt may write with its own key, and their bytes."""
REWARDS, REWARDS_WRITTEN_BYTES = 100_000, 64 * 2**20
"""Rewards of turns that one attempt may write with its own key, and their bytes."""
WRITERS = 2**16
"""Attempts whose writes are counted: those that wrote last."""
INLINE_BYTES = 16 * 2**10
"""Bytes up to which a body is parsed on the event loop. A longer one is parsed in a background thread."""

# -- connections -------------------------------------------------------------------------------------------------------

CONNECTIONS = 2**16
"""Connections at once, if the system allows as many; else three quarters of the files that the process may open."""

_PIECE = 64 * 2**10
_STRUCTURE = b"[]{},"
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


class RequestRefusedError(Exception):
    """A request that is refused before it is read: the status of the response, and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_json_size(body: bytes, values: int = VALUES, depth: int = DEPTH) -> None:
    """Refuse JSON with more values or levels than these.

    The check counts the commas and brackets outside of strings, piece by piece. Malformed JSON may pass: a parser stops
    at its first error, and has created no more until there than was counted.
    """
    if len(body) <= _PIECE and body.count(b"[") + body.count(b"{") <= depth:
        return
    brackets = []
    count = 0
    quote_count = 0
    for outside, quotes in _outside(body):
        structure = outside.translate(None, _OTHERS)
        brackets.append(structure.translate(_AS_LISTS, b","))
        count += len(structure) - structure.count(b"]") - structure.count(b"}")
        quote_count += quotes
        if count > values or quote_count > 4 * values + 4:
            raise RequestRefusedError(
                413, f"The body has more than {values} values, in lists and objects; send less at once."
            )
    nesting = b"".join(brackets)
    for _ in range(depth):  # removes one level each; brackets of a truncated body are left
        if b"[]" not in nesting:
            break
        nesting = nesting.replace(b"[]", b"")
    if b"[]" in nesting or nesting.count(b"[") > depth:
        raise RequestRefusedError(
            400, f"The body is nested too deeply: lists and objects have more than {depth} levels."
        )


def _outside(body: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the parts of a body outside of strings, piece by piece, with the number of quotation marks in each."""
    inside, escape = False, b""
    for start in range(0, len(body), _PIECE):
        piece = (escape + body[start : start + _PIECE]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""  # the escaped character is in the next piece
        parts = piece.removesuffix(escape).replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2]), len(parts) - 1
        inside ^= len(parts) % 2 == 0


class WriteQuota:
    """Counts one kind of write of each attempt with its own key, so that no attempt fills the disk.

    It is used on one event loop. The counts are in memory and start again with the server. An attempt that is over may
    use the rest of its quota, since spans and events arrive after its end.
    """

    def __init__(self, kind: str, max_count: int, max_bytes: int) -> None:
        self._kind = kind
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._written: dict[AttemptId, tuple[int, int]] = {}
        """Number and bytes of the writes of each attempt; the attempt that wrote last is the last."""

    def take(self, key: AttemptId, size: int) -> None:
        """Count one more write of an attempt; raise `DataError` if it exceeds the quota."""
        count, written = self._written.pop(key, (0, 0))
        fits = count < self._max_count and written + size <= self._max_bytes
        self._written[key] = (count + 1, written + size) if fits else (count, written)
        if len(self._written) > WRITERS:
            del self._written[next(iter(self._written))]
        if not fits:
            raise DataError(
                f"Attempt {key.attempt} of rollout {key.rollout} has written {count} {self._kind} of {written} bytes "
                f"with its own key, and one of {size} bytes would exceed the quota. The quota is {self._max_count} of "
                f"{self._max_bytes} bytes. Write fewer, or write them to a file."
            )
