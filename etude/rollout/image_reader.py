"""The images of a request to the embedded engine: measured, checked and numbered before the request is queued."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError, DataError
from etude.images import ImageSpan, PromptImages, check_features, check_spans
from etude.images.decoding import measure_image
from etude.images.pixel_cache import PixelCache
from etude.images.pixels import PixelReader, ResizedShape
from etude.models import Model
from etude.models.vision import axes_positions
from etude.models.vision_types import ImageAttention
from etude.rollout.request import RequestImages, refuse_images

MAX_NUMBERS = 2**16
"""The most images whose numbers are remembered. One that comes back later gets another number."""


class ImageReader:
    """Places the images of prompts for one model. Any thread may call it."""

    def __init__(self, reader: PixelReader) -> None:
        self.pixels = PixelCache(reader)
        self._numbers = _ImageNumbers()

    @classmethod
    def of(cls, model: Model, directory: Path | None, max_pixels: int | None = None) -> ImageReader | None:
        """Return the reader of a model from a directory; None if the model takes text alone.

        max_pixels: as for `PixelReader.load`.
        """
        if not model.has_vision or directory is None:
            return None
        return cls(PixelReader.load(directory, max_pixels))

    def read(self, length: int, images: PromptImages, attention: ImageAttention = "causal") -> RequestImages:
        """Return the images of a prompt of this length; raise if one is no image or does not fit its tokens.

        Only their headers are read. attention: as the model's `image_attention`.
        """
        spans = check_spans("The prompt", images.spans, length)
        digests = tuple(dict.fromkeys(span.digest for span in spans))
        shapes: list[ResizedShape] = []
        for place, digest in enumerate(digests, start=1):
            if digest not in images.contents:
                raise DataError(f"The bytes of image {place} of the prompt are missing. Pass them in `contents`.")
            size = measure_image(images.contents[digest], f"Image {place} of the prompt")
            shapes.append(self.pixels.reader.measure(size.width, size.height))
        check_features(spans, {digest: shape.features for digest, shape in zip(digests, shapes, strict=True)})
        image = np.full(length, -1, np.int64)
        feature = np.zeros(length, np.int64)
        for span in spans:
            image[span.start : span.stop] = digests.index(span.digest)
            feature[span.start : span.stop] = np.arange(span.first, span.first + span.stop - span.start)
        grids = [shape.grid for shape in shapes if shape.grid is not None]
        axes = axes_positions(image, feature, grids) if grids else None
        return RequestImages(
            digests,
            tuple(images.contents[digest] for digest in digests),
            tuple(shape.nbytes for shape in shapes),
            image,
            feature,
            np.array([self._numbers.find(digest) for digest in digests], np.int32),
            axes,
            0 if axes is None else int(axes.max()) + 1 - length,
            None if attention == "causal" else _reach(length, spans),
            attention == "in windows",
        )


async def read_images(
    reader: ImageReader | None, model: Model, length: int, images: PromptImages | None
) -> RequestImages | None:
    """Place the images of a prompt of this length, on a thread for images; None without images.

    Raises if they are no images, do not fit the prompt, or the model takes none. reader: the model's.
    """
    if images is None or not images.spans:
        return None
    if not model.has_vision:
        refuse_images(images)
    if reader is None:
        raise ConfigError("This engine was made without a reader of images: make it with `images=`.")
    return await reader.pixels.run(partial(reader.read, length, images, model.image_attention))


def _reach(length: int, spans: Sequence[ImageSpan]) -> NDArray[np.int64]:
    """[P]: return the number of tokens that each token of a prompt sees, if images attend both ways."""
    reach = np.arange(1, length + 1)
    for span in spans:
        reach[span.start : span.stop] = span.stop
    return reach


class _ImageNumbers:
    """A number below 0 for each image, which no other image has had. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def find(self, digest: str) -> int:
        """Return the number of an image."""
        with self._lock:
            if digest not in self._numbers:
                self._last -= 1
                self._numbers[digest] = self._last
                if len(self._numbers) > MAX_NUMBERS:
                    self._numbers.popitem(last=False)
            self._numbers.move_to_end(digest)
            return self._numbers[digest]
