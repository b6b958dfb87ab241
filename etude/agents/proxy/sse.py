"""Server-sent events, as they come over a connection.

A line ends at a line feed alone: text in an event may hold other characters that Python's `splitlines` takes for ends.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

__all__ = ["event_data", "iter_events"]

_BETWEEN = re.compile(rb"\r?\n\r?\n")
LONGEST_END = 4
"""Bytes between two events at most. What was looked through holds none, but for the beginning of one."""


async def iter_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Each event, without the empty line after it."""
    held, seen = bytearray(), 0
    async for chunk in chunks:
        held += chunk
        begin, at = 0, max(seen - LONGEST_END + 1, 0)
        while (end := _BETWEEN.search(held, at)) is not None:
            yield bytes(held[begin : end.start()])
            begin = at = end.end()
        del held[:begin]
        seen = len(held)
    if held.strip():
        yield bytes(held)


def event_data(event: bytes) -> str:
    """What an event says."""
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")).decode(errors="replace")
