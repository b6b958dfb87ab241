"""Messages on a pipe: four bytes of length, then JSON."""

from __future__ import annotations

import json
import os
from typing import Any

HEAD = 4
MAX_MESSAGE_BYTES = 256 << 20
"""The most bytes of a message with tests. A longer message ends the connection."""
MAX_PROGRAM_MESSAGE_BYTES = 16 << 20
"""The most bytes of a message from a program."""


def pack_message(message: Any) -> bytes:
    """Encode a message as bytes."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(HEAD, "big") + text


def unpack_message(text: bytes) -> Any:
    """Decode the bytes after the length. Raises `ValueError` if they are not a message."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def send(descriptor: int, message: Any) -> None:
    """Write one whole message."""
    rest = memoryview(pack_message(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Read one message and not a byte more. Raises `EOFError` if the other end is closed."""
    length = int.from_bytes(_exactly(descriptor, HEAD), "big")
    if length > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message of {length} bytes")
    return unpack_message(_exactly(descriptor, length))


def _exactly(descriptor: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError("the pipe ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
