"""Server-sent events, as they come over a connection.

A line ends at a line feed alone: text in an event may hold other characters that Python's `splitlines` takes for ends.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

__all__ = ["event_data", "iter_events"]

_SEPARATOR = re.compile(rb"\r?\n\r?\n")
MAX_SEPARATOR = 4
"""Bytes between two events at most. What was looked through holds none, but for the beginning of one."""


async def iter_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Each event, without the empty line after it."""
    buffer, searched = bytearray(), 0
    async for chunk in chunks:
        buffer += chunk
        begin, search_from = 0, max(searched - MAX_SEPARATOR + 1, 0)
        while (end := _SEPARATOR.search(buffer, search_from)) is not None:
            yield bytes(buffer[begin : end.start()])
            begin = search_from = end.end()
        del buffer[:begin]
        searched = len(buffer)
    if buffer.strip():
        yield bytes(buffer)


def event_data(event: bytes) -> str:
    """What an event says."""
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")).decode(errors="replace")
