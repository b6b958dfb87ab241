"""Small pictures as PNG files, and as the `data:` URLs in which a task has them."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int, height: int, colour: tuple[int, int, int] = (32, 128, 224)) -> bytes:
    """Return a picture of one colour that grows darker downwards."""
    rows = (b"\0" + width * bytes(channel * (height - y) // height for channel in colour) for y in range(height))
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(b"".join(rows)),
        b"IEND": b"",
    }
    written = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def data_url(content: bytes, kind: str = "png") -> str:
    """Return the URL of a picture that has its content."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
