"""Server-sent events, as they come over a connection.

A line ends at a line feed alone: text in an event may hold other characters that Python's `splitlines` takes for ends.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

__all__ = ["data_of", "events"]

_BETWEEN = re.compile(rb"\r?\n\r?\n")


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Each event, without the empty line after it."""
    held = b""
    async for chunk in chunks:
        *whole, held = _BETWEEN.split(held + chunk)
        for event in whole:
            yield event
    if held.strip():
        yield held


def data_of(event: bytes) -> str:
    """What an event says."""
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")).decode(errors="replace")
