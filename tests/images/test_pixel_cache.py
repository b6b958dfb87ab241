"""The cache of pixels: one reading an image at a time, and a bound on its bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from etude.errors import ImageError
from etude.images import image_digest
from etude.images.decoding import open_image
from etude.images.pixel_cache import PixelCache
from etude.images.pixels import PixelReader, ResizedImage
from tests.rollout.shown import png
from tests.vlms import make_vlm


class Counted(PixelReader):
    """A reader that counts the images that it reads."""

    read_images = 0

    def resize(self, image: Image.Image) -> ResizedImage:
        """Resize an image."""
        Counted.read_images += 1
        return super().resize(image)


def test_an_image_is_read_once_for_all_threads_and_again_after_it_was_dropped() -> None:
    reader = Counted.load(make_vlm("qwen3_vl"))
    Counted.read_images = 0
    images = {image_digest(content): content for content in (png(seed, 40, 40) for seed in range(3))}
    one, *others = images
    cache = PixelCache(reader, max_bytes=2 * bytes_of(images[one]))
    with ThreadPoolExecutor(8) as threads:
        assert len({id(image) for image in threads.map(lambda _: cache.resize(one, images[one]), range(16))}) == 1
    assert Counted.read_images == 1
    for digest in (*others, *others, one):
        cache.read(digest, images[digest])
    assert Counted.read_images == 4, "the third image took the place of the first"


def bytes_of(content: bytes) -> int:
    """Return the bytes that an image takes: one for each colour of a pixel, and none for its pixels."""
    cache = PixelCache(PixelReader.load(make_vlm("qwen3_vl")))
    pixels = cache.read(image_digest(content), content)
    return sum(array.nbytes for array in pixels.arrays.values() if array.dtype == np.float32) // 8


def test_an_image_that_cannot_be_read_fails_each_time() -> None:
    cache = PixelCache(PixelReader.load(make_vlm("qwen3_vl")))
    for _ in range(2):
        with pytest.raises(ImageError, match="Image 3 cannot be read"):
            cache.read("00", png(0, 40, 40)[:500], "Image 3")


def test_a_picture_is_encoded_once() -> None:
    cache = PixelCache(PixelReader.load(make_vlm("qwen3_vl")))
    content = png(0, 40, 40)
    first = cache.as_png("00", content)
    assert cache.as_png("00", content) is first
    assert open_image(first).tobytes() == open_image(content).tobytes()
