"""The one decoder: four formats, upright, on white; large, damaged and foreign files are refused with a sentence."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from etude.errors import ImageError
from etude.images import ImageRef, image_digest
from etude.images.addresses import media_type
from etude.images.decoding import ImageLimits, inspect_image, measure_image, open_image
from tests.images.processors import picture

LIMITS = ImageLimits(max_bytes=2**20)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def encode(image: Image.Image, kind: str, **settings: object) -> bytes:
    """Return the bytes of an image in a format."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def large_png(width: int, height: int) -> bytes:
    """Return a small file whose header says that it is large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_four_formats_are_taken(kind: str) -> None:
    image = picture(0, 31, 17)
    content = encode(image, kind)
    assert media_type(content) == f"image/{kind.lower()}"
    assert inspect_image(content, LIMITS) == ImageRef(image_digest(content), 31, 17)
    opened = open_image(content)
    assert (opened.mode, opened.size) == ("RGB", (31, 17))
    if kind == "PNG":
        assert opened.tobytes() == image.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_as_its_file_says(orientation: int) -> None:
    upright = Image.new("RGB", (48, 32), "white")
    upright.paste("red", (0, 0, 24, 16))
    # The transposition that undoes each rotation gives the pixels as a camera stores them.
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP"):
        content = encode(stored, kind, exif=exif, quality=95)
        assert inspect_image(content, LIMITS) == ImageRef(image_digest(content), 48, 32)
        opened = open_image(content)
        assert opened.size == (48, 32)
        assert np.abs(np.asarray(opened, int) - np.asarray(upright)).mean() < 4, f"{kind} {orientation}"


@pytest.mark.parametrize("compressed", [False, True])
def test_a_header_gives_the_size_of_an_image_that_its_xmp_turns(compressed: bool) -> None:
    notes = PngInfo()
    notes.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>', zip=compressed)
    content = encode(picture(0, 48, 32), "PNG", pnginfo=notes)
    assert measure_image(content) == inspect_image(content, LIMITS) == ImageRef(image_digest(content), 32, 48)
    assert open_image(content).size == (32, 48)


def test_a_jpeg_of_many_scans_is_refused_before_it_takes_time() -> None:
    content = encode(picture(0, 48, 32), "JPEG", progressive=True)
    head, last = content[: content.rindex(b"\xff\xda")], content[content.rindex(b"\xff\xda") : -2]
    assert inspect_image(head + last * 90 + content[-2:], LIMITS).width == 48
    with pytest.raises(ImageError, match=r"^The image has 10\d\d scans; this run takes 100\. Save it with fewer\.$"):
        inspect_image(head + last * 1000 + content[-2:], LIMITS)


def test_an_orientation_that_does_not_exist_is_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    content = encode(picture(0, 48, 32), "JPEG", exif=exif)
    assert inspect_image(content, LIMITS) == ImageRef(image_digest(content), 48, 32)
    assert open_image(content).size == (48, 32), "the size that gives the tokens is that of the pixels"


def test_transparency_is_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    clear.putpixel((0, 0), (0, 0, 255, 255))
    clear.putpixel((1, 0), (0, 0, 0, 128))
    for kind in ("PNG", "WEBP"):
        colours = open_image(encode(clear, kind, lossless=True))
        assert [colours.getpixel((x, 0)) for x in range(3)] == [(0, 0, 255), (127, 127, 127), (255, 255, 255)]
    assert open_image(encode(clear, "GIF")).getpixel((3, 3)) == (255, 255, 255)
    grey = Image.new("LA", (2, 2), (0, 0))
    assert open_image(encode(grey, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_other_colours_become_rgb() -> None:
    deep = Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))
    assert np.asarray(open_image(encode(deep, "PNG")))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert open_image(encode(Image.new("1", (2, 2), 1), "PNG")).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(encode(Image.new("CMYK", (8, 8)), "JPEG")).getpixel((0, 0)) == (255, 255, 255)


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        content = encode(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert open_image(content).getpixel((4, 4)) == (255, 0, 0), kind


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_file_is_refused(kind: str) -> None:
    content = encode(picture(0, 64, 48), kind)
    sentence = r"^Image 2 of message 0 cannot be read: .+\. Send a whole PNG, JPEG, WebP or GIF\.$"
    for length in (20, len(content) // 2, len(content) - 40):
        with pytest.raises(ImageError, match=sentence):
            inspect_image(content[:length], LIMITS, "Image 2 of message 0")
        with pytest.raises(ImageError, match="cannot be read"):
            open_image(content[:length])


def test_a_small_file_of_many_pixels_is_refused_by_its_header() -> None:
    with pytest.raises(ImageError, match=r"^Image 1 .* has 60000 × 60000 pixels; this run takes 50,000,000\. Make it"):
        inspect_image(large_png(60000, 60000), LIMITS, "Image 1 of message 0")
    with pytest.raises(ImageError, match="has 9000 × 9000 pixels"):
        inspect_image(large_png(9000, 9000), LIMITS)
    with pytest.raises(ImageError, match="image file is truncated"):
        inspect_image(large_png(6000, 6000), LIMITS)
    extended = bytearray(encode(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"))
    assert extended[12:16] == b"VP8X"
    extended[24:30] = b"\xff\xff\xff" * 2
    with pytest.raises(ImageError, match="has 16777216 × 16777216 pixels"):
        inspect_image(bytes(extended), LIMITS)
    flat = encode(picture(0, 10, 10), "GIF")
    with pytest.raises(ImageError, match="has 65535 × 65535 pixels"):
        inspect_image(flat[:6] + b"\xff" * 4 + flat[10:], LIMITS)
    with pytest.raises(ImageError, match="has 10 × 10 pixels; this run takes 99"):
        inspect_image(flat, ImageLimits(2**20, 99))


def test_a_large_file_is_refused_before_it_is_read() -> None:
    with pytest.raises(ImageError, match=r"^The image has 1,048,577 bytes; this run takes 1,048,576\. Send a smaller"):
        inspect_image(b"\0" * (2**20 + 1), LIMITS)


def test_other_files_are_refused() -> None:
    files = {
        b"": "an empty file",
        b"hello\nyou": "no image but text: 'hello you'",
        b"\n<svg xmlns='http://www.w3.org/2000/svg'/>": "an SVG file",
        encode(picture(0, 4, 4), "BMP"): "a BMP file",
        encode(picture(0, 4, 4), "TIFF"): "a TIFF file",
        b"\0\0\0\x1cftypavif\0": "a file of the kind avif, such as AVIF, HEIC or MP4",
        b"\xff" * 99: "a file of an unknown kind, which begins with the bytes ff ff ff ff ff ff ff ff",
    }
    for content, kind in files.items():
        assert media_type(content) == ""
        with pytest.raises(
            ImageError, match=rf"^The image is {re.escape(kind)}\. Send a whole PNG, JPEG, WebP or GIF\.$"
        ):
            inspect_image(content, LIMITS)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_note_of_the_camera_leaves_the_picture() -> None:
    content = encode(picture(0, 16, 8), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\0\0")
    assert inspect_image(content, LIMITS).width == open_image(content).width == 16
