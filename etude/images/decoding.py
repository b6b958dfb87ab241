"""Encoded images: what may come in, and the one decoder.

Bytes of strangers are read in steps. The size that the header says is compared with the limit before a decoder sees
the file, so that a small file of many pixels costs nothing. Then all pixels are decoded, so that a damaged file is
refused where it comes in and not in the middle of a step.

Etude takes PNG, JPEG, WebP and GIF. Of an animation it takes the first frame.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.errors import ImageError
from etude.images.addresses import media_type
from etude.images.spans import MAX_PIXELS, ImageRef, image_digest
from etude.lazy import LazyModule

if TYPE_CHECKING:
    from PIL import ExifTags, Image, ImageFile
else:  # a run without images never loads Pillow
    ExifTags = LazyModule("PIL.ExifTags")
    Image = LazyModule("PIL.Image")

MAX_SCANS = 100
"""The most scans of a JPEG: each of them takes time for all pixels, and as few as 75 bytes. Encoders write some ten."""
KNOWN_FORMATS = "PNG, JPEG, WebP or GIF"

_OPENERS: dict[str, tuple[Any, str]] = {
    "image/png": (LazyModule("PIL.PngImagePlugin"), "PngImageFile"),
    "image/jpeg": (LazyModule("PIL.JpegImagePlugin"), "JpegImageFile"),
    "image/webp": (LazyModule("PIL.WebPImagePlugin"), "WebPImageFile"),
    "image/gif": (LazyModule("PIL.GifImagePlugin"), "GifImageFile"),
}
"""The module and the class that reads each format."""
_OTHER_FILES = {
    b"BM": "a BMP file",
    b"II*\0": "a TIFF file",
    b"MM\0*": "a TIFF file",
    b"%PDF": "a PDF file",
    b"PK\x03\x04": "a ZIP file",
    b"\x1f\x8b": "a gzip file",
    b"<svg": "an SVG file",
    b"version https://git-lfs": "a pointer of Git LFS, and not the file itself",
}
"""The names of other files, by their beginning."""
_ROTATIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The turn that makes an image upright, by the orientation that its file gives."""
_SWAPS_SIDES = 5  # from this orientation on
_PNG_NOTES = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""The words of which a PNG has one if it gives an orientation."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest image that is taken."""

    max_bytes: int
    max_pixels: int = MAX_PIXELS


def inspect_image(content: bytes, limits: ImageLimits, owner: str = "The image") -> ImageRef:
    """Return the hash and the size of an image that can be read whole; raise an `ImageError` for any other.

    owner: the image's name in an error. Example: `Image 2 of message 0`.
    """
    if len(content) > limits.max_bytes:
        raise ImageError(
            f"{owner} has {len(content):,} bytes; this run takes {limits.max_bytes:,}. Send a smaller one."
        )
    return _describe(content, _load(content, limits.max_pixels, owner))


def measure_image(content: bytes, owner: str = "The image") -> ImageRef:
    """Return the hash and the size of an image by its header, as `inspect_image` gives them.

    The pixels are not read, so damaged ones are not found. It takes a small part of the time.
    """
    image = _open(content, MAX_PIXELS, owner)
    if media_type(content) == "image/png" and not any(note in content for note in _PNG_NOTES):
        return ImageRef(image_digest(content), *image.size)  # looking for an orientation would read the pixels
    return _describe(content, image)


def open_image(content: bytes, owner: str = "The image") -> Image.Image:
    """Return an image upright and in RGB, on white where it is transparent; of an animation the first frame."""
    image = _load(content, MAX_PIXELS, owner)
    rotation = _ROTATIONS.get(_orientation(image))
    colours = _to_rgb(image)
    return colours if rotation is None else colours.transpose(Image.Transpose[rotation])


def plain_png(width: int, height: int) -> bytes:
    """Return an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def _describe(content: bytes, image: ImageFile.ImageFile) -> ImageRef:
    width, height = image.size
    if _orientation(image) >= _SWAPS_SIDES:
        width, height = height, width
    return ImageRef(image_digest(content), width, height)


def _load(content: bytes, max_pixels: int, owner: str) -> ImageFile.ImageFile:
    """Return an image with its pixels decoded."""
    image = _open(content, max_pixels, owner)
    with _explained(owner):
        image.load()
        _check_pixels(image.size, max_pixels, owner)
    return image


def _open(content: bytes, max_pixels: int, owner: str) -> ImageFile.ImageFile:
    """Return an image of which the header is read."""
    kind = media_type(content)
    if kind not in _OPENERS:
        raise ImageError(f"{owner} is {_name_kind(content)}. Send a whole {KNOWN_FORMATS}.")
    _check_pixels(_webp_size(content), max_pixels, owner)
    scans = content.count(b"\xff\xda") if kind == "image/jpeg" else 0
    if scans > MAX_SCANS:
        raise ImageError(f"{owner} has {scans} scans; this run takes {MAX_SCANS}. Save it with fewer.")
    with _explained(owner):
        # The formats' own classes: `Image.open` has another limit, for the whole process.
        module, name = _OPENERS[kind]
        opener: Callable[[io.BytesIO], ImageFile.ImageFile] = getattr(module, name)
        image = opener(io.BytesIO(content))
    _check_pixels(image.size, max_pixels, owner)
    return image


def _name_kind(content: bytes) -> str:
    """Return what a file is that is none of the formats, by its beginning."""
    begins = content[:512].lstrip()
    for beginning, kind in _OTHER_FILES.items():
        if begins.startswith(beginning):
            return kind
    if not content:
        return "an empty file"
    if content[4:8] == b"ftyp":
        return f"a file of the kind {content[8:12].decode('ascii', 'replace').strip()}, such as AVIF, HEIC or MP4"
    try:
        text = content[:80].decode()
    except UnicodeDecodeError:
        return f"a file of an unknown kind, which begins with the bytes {content[:8].hex(' ')}"
    return f"no image but text: {' '.join(text.split())[:40]!r}"


@contextmanager
def _explained(owner: str) -> Iterator[None]:
    """Raise an error of a decoder as a sentence."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # damaged bytes raise errors of a dozen types
        reason = str(error).split(" (")[0].strip().rstrip(".")[:120] or type(error).__name__
        raise ImageError(f"{owner} cannot be read: {reason}. Send a whole {KNOWN_FORMATS}.") from error


def _check_pixels(size: tuple[int, int], max_pixels: int, owner: str) -> None:
    if size[0] * size[1] > max_pixels:
        raise ImageError(f"{owner} has {size[0]} × {size[1]} pixels; this run takes {max_pixels:,}. Make it smaller.")


def _webp_size(content: bytes) -> tuple[int, int]:
    """Return the size that a WebP's header says, before its decoder takes memory for it; no pixels for others."""
    kind = content[12:16] if content[:4] == b"RIFF" else b""
    if kind == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    return 0, 0  # the two other kinds have at most 16,383 pixels a side, and their decoder takes no memory yet


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the orientation that the file gives; 1, which is upright, if it says nothing that can be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # notes of cameras are damaged often, and the pixels are whole
        return 1
    return found if isinstance(found, int) and found in _ROTATIONS else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGB", layer.size, "white")
    white.paste(layer, mask=layer.getchannel("A"))
    return white
