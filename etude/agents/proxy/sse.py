"""A parser of server-sent events.

Only a line feed ends a line: text in an event may hold other characters at which Python's `splitlines` splits.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

_SEPARATOR = re.compile(rb"\r?\n\r?\n")
MAX_SEPARATOR = 4
"""The most bytes between two events. The searched part of the buffer may end with the beginning of a separator."""


async def iter_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield each event, without the empty line after it."""
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
    """Return the data of an event."""
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")).decode(errors="replace")
