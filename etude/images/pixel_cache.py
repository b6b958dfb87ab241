"""The pixels of the images that were used last. Each image is read once for all that ask for it at the same time."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from etude.images.decoding import open_image
from etude.images.pixels import PixelReader, Pixels

MAX_BYTES = 2**29
"""The most bytes of pixels that are kept: 512 MiB."""


class PixelCache:
    """Pixels by digest, the longest unused first. Any thread may call it."""

    def __init__(self, reader: PixelReader, max_bytes: int = MAX_BYTES) -> None:
        self.reader = reader
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._pixels: OrderedDict[str, Future[Pixels]] = OrderedDict()

    @classmethod
    def load(cls, directory: Path, max_pixels: int | None = None) -> PixelCache:
        """Return a cache for the model in a directory. max_pixels: as for `PixelReader.load`."""
        return cls(PixelReader.load(directory, max_pixels))

    def read(self, digest: str, content: bytes | Callable[[], bytes], owner: str = "The image") -> Pixels:
        """Return the pixels of an image. Raises `ImageError`, with the owner's name, if it cannot be read.

        content: its bytes, or a function that returns them, which is called if the pixels are not kept.
        """
        with self._lock:
            known = self._pixels.get(digest)
            future = self._pixels.setdefault(digest, Future())
            self._pixels.move_to_end(digest)
        if known is None:
            self._read(digest, content, owner, future)
        return future.result()

    def as_png(self, content: bytes) -> bytes:
        """Return the picture that `read` takes the pixels of, upright and in RGB, as a file."""
        file = io.BytesIO()
        open_image(content).save(file, "PNG", compress_level=1)
        return file.getvalue()

    def _read(self, digest: str, content: bytes | Callable[[], bytes], owner: str, future: Future[Pixels]) -> None:
        try:
            pixels = self.reader.read(open_image(content if isinstance(content, bytes) else content(), owner))
        except BaseException as error:
            with self._lock:
                del self._pixels[digest]
            future.set_exception(error)
            return
        future.set_result(pixels)
        with self._lock:
            self._bytes += pixels.num_bytes
            while self._bytes > self._max_bytes:
                others = (other for other, each in self._pixels.items() if each.done() and other != digest)
                if (oldest := next(others, None)) is None:
                    break
                self._bytes -= self._pixels.pop(oldest).result().num_bytes
