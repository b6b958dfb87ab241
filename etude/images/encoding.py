"""Images of programs, such as a tool returns: Pillow's images, and encoded bytes."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from etude.errors import ImageError
from etude.images.addresses import media_type, to_data_url
from etude.images.spans import MAX_PIXELS

if TYPE_CHECKING:
    from PIL import Image

_PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})


def is_pillow_image(value: Any) -> TypeGuard[Image.Image]:
    """Return True for an image of Pillow. Pillow is not loaded to answer: without it there is none."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def encode_png(image: Image.Image) -> bytes:
    """Return an image as PNG. Equal pixels give equal bytes, so that they are stored once."""
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise ImageError(
            f"An image of {width} × {height} pixels was given, and one has from 1 to {MAX_PIXELS:,}. Crop or resize "
            "it to a size between."
        )
    plain = image if image.mode in _PNG_MODES else image.convert("RGB")
    stream = io.BytesIO()
    plain.save(stream, "PNG", compress_level=3, exif=b"", icc_profile=b"")
    return stream.getvalue()


def is_image(value: Any) -> bool:
    """Return True for an image of Pillow, and for the bytes of one in a format that Etude takes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return media_type(bytes(value[:12])) != ""
    return is_pillow_image(value)


def find_data_url(value: Any) -> str | None:
    """Return an image of a program as a data URL; None for any other value."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        kind = media_type(content)
        return to_data_url(content, kind) if kind else None
    return to_data_url(encode_png(value), "image/png") if is_pillow_image(value) else None
