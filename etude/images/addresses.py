"""Images as text, where a value can only be JSON: an address in the store, or a data URL with the bytes.

    image:9f86d0…;640x480          an image whose bytes are in the store, by their hash, with its size
    data:image/png;base64,iVBO…    an image with its bytes

A task in the journal has addresses. What comes from outside may have data URLs.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from etude.errors import ImageError
from etude.images.spans import ImageRef

DATA_URL = "data:image/"
"""The beginning of an image with its bytes."""
_ADDRESS = re.compile(r"image:([0-9a-f]{64});([1-9][0-9]*)x([1-9][0-9]*)")


def image_address(ref: ImageRef) -> str:
    """Return the address of an image in the store."""
    return f"image:{ref.digest};{ref.width}x{ref.height}"


def find_address(text: str) -> ImageRef | None:
    """Return the image that an address names; None if the text is none."""
    found = _ADDRESS.fullmatch(text)
    return None if found is None else ImageRef(found[1], int(found[2]), int(found[3]))


def find_refs(value: Any) -> Iterator[ImageRef]:
    """Yield the images whose addresses are in a JSON value, in order."""
    if isinstance(value, str):
        ref = find_address(value)
        if ref is not None:
            yield ref
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from find_refs(item)


def find_data_urls(value: Any) -> Iterator[str]:
    """Yield the images whose bytes are in a JSON value, as data URLs, in order."""
    if isinstance(value, str):
        if value.startswith("data:"):
            yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from find_data_urls(item)


def media_type(content: bytes) -> str:
    """Return the media type of an encoded image, by its first bytes; an empty text for any other file."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return ""


def to_data_url(content: bytes, media_type: str) -> str:
    """Return an image with its bytes as text."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def from_data_url(url: str, owner: str = "The image") -> bytes:
    """Return the bytes in a data URL. owner: the image's name in an error."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{owner} is a data URL without base64: '{url[:40]}'. Write data:image/png;base64,…")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(
            f"{owner} is a data URL whose data are not base64: {error}. Encode its bytes again."
        ) from error
