"""Damaged files of all formats: refused with a sentence, or read as the sampler will read them; never anything else."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from PIL import Image

from etude.errors import ImageError
from etude.images import image_digest
from etude.images.decoding import ImageLimits, inspect_image, open_image
from tests.images.processors import picture
from tests.images.test_decoding import encode

LIMITS = ImageLimits(max_bytes=2**20)
SECONDS = 10.0
"""Of the processor, for one file: a header may promise 50 million pixels of which none come."""
MEMORY = 2**30
"""The most bytes that the process may grow by: 50 million pixels take 200 MB, and a turn or a change of colours as
much again."""

Damage = Callable[[random.Random, bytearray], bytes]


def whole_files() -> list[bytes]:
    """Return files of the four formats, in the kinds that have decoders of their own."""
    noise = picture(0, 61, 47)
    clear = noise.convert("RGBA")
    clear.putalpha(Image.fromarray(np.random.default_rng(1).integers(0, 256, (47, 61), dtype=np.uint8)))
    exif = Image.Exif()
    exif[0x0112] = 6
    more = {"save_all": True, "append_images": [picture(1, 61, 47)]}
    return [
        encode(noise, "PNG"),
        encode(clear, "PNG", exif=exif),
        encode(noise.convert("P"), "PNG", transparency=3),
        encode(Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)), "PNG"),
        encode(noise, "PNG", **more),
        encode(noise, "JPEG", exif=exif),
        encode(noise, "JPEG", progressive=True),
        encode(noise.convert("L"), "JPEG"),
        encode(noise.convert("CMYK"), "JPEG"),
        encode(noise, "WEBP", exif=exif),
        encode(clear, "WEBP", lossless=True),
        encode(noise, "WEBP", **more),
        encode(noise, "GIF"),
        encode(clear, "GIF", interlace=True),
        encode(noise, "GIF", **more),
    ]


def change_bytes(draw: random.Random, file: bytearray) -> bytes:
    """Change some bytes, as often in the header as elsewhere."""
    for _ in range(draw.choice((1, 2, 5, 20))):
        place = draw.randrange(min(64, len(file)) if draw.random() < 0.5 else len(file))
        file[place] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    return bytes(file)


def cut(draw: random.Random, file: bytearray) -> bytes:
    """Cut the end, or a part within."""
    start = draw.randrange(len(file))
    return bytes(file[:start]) if draw.random() < 0.5 else bytes(file[:start] + file[start + draw.randrange(1, 99) :])


def repeat(draw: random.Random, file: bytearray) -> bytes:
    """Put a part in a second time."""
    start = draw.randrange(len(file))
    part = file[start : start + draw.randrange(1, 400)]
    place = draw.randrange(len(file))
    return bytes(file[:place] + part * draw.choice((1, 3)) + file[place:])


def fill(draw: random.Random, file: bytearray) -> bytes:
    """Fill a part with one byte."""
    start = draw.randrange(len(file))
    length = min(draw.randrange(1, 200), len(file) - start)
    file[start : start + length] = bytes([draw.choice((0, 255))]) * length
    return bytes(file)


DAMAGES: Mapping[str, Damage] = {"change": change_bytes, "cut": cut, "repeat": repeat, "fill": fill}


def read(content: bytes) -> bool:
    """Return whether a file is taken. Anything but an `ImageError` is an error of the test."""
    try:
        ref = inspect_image(content, LIMITS)
    except ImageError as error:
        text = str(error)
        assert text.startswith("The image ") and text.endswith(".") and "0x" not in text and len(text) < 250, text
        return False
    image = open_image(content)
    assert (ref.digest, ref.width, ref.height) == (image_digest(content), *image.size)
    assert image.mode == "RGB" and ref.width * ref.height <= LIMITS.max_pixels
    return True


def damage(files: int) -> dict[bool, int]:
    """Read damaged files, and return how many were refused and taken."""
    draw = random.Random(0)
    whole = whole_files()
    counts = {False: 0, True: 0}
    for number in range(files):
        content = DAMAGES[draw.choice(sorted(DAMAGES))](draw, bytearray(whole[number % len(whole)]))
        began = time.process_time()
        counts[read(content)] += 1
        assert time.process_time() - began < SECONDS, f"file {number}"
    return counts


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_refused_or_read() -> None:
    assert all(map(read, whole_files()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = damage(450)
    assert min(counts.values()) > 50, counts
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY, f"{grown:,} bytes"
