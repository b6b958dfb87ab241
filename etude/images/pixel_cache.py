"""The images that were used last, in the size that a tower takes. Each is read once for all that ask for it together.

An image of 1024 × 1024 takes 3 MB of the cache. Its pixels take 24, and are computed from it each time: that takes a
fifth of the time of decoding and resizing.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

from etude.images.decoding import open_image
from etude.images.pixels import PixelReader, Pixels, ResizedImage
from etude.images.shared_cache import SharedCache

T = TypeVar("T")
Content: TypeAlias = bytes | Callable[[], bytes]
"""The bytes of an image, or a function that returns them, which is called if the image is not kept."""

THREADS = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
"""The most images that are read at a time. One of 50 million pixels takes 200 MB while it is decoded."""
MAX_BYTES = 2**29
"""The most bytes of images that are kept: 512 MiB."""
MAX_PNG_BYTES = 2**28
"""The most bytes of images as PNG that are kept: 256 MiB."""


class PixelCache:
    """Resized images by digest. Any thread may call it."""

    def __init__(self, reader: PixelReader, max_bytes: int = MAX_BYTES) -> None:
        self.reader = reader
        self._resized: SharedCache[ResizedImage] = SharedCache(lambda image: image.parts.nbytes, max_bytes)
        self._pngs: SharedCache[bytes] = SharedCache(len, MAX_PNG_BYTES)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="etude-images")

    @classmethod
    def load(cls, directory: Path, max_pixels: int | None = None) -> PixelCache:
        """Return a cache for the model in a directory. max_pixels: as for `PixelReader.load`."""
        return cls(PixelReader.load(directory, max_pixels))

    def close(self) -> None:
        """End the threads. No image is read after this."""
        self._threads.shutdown(cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Run something that reads images on one of the threads for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def begin_resize(self, digest: str, content: Content, owner: str) -> Future[ResizedImage]:
        """Begin to read an image on one of the threads for it; see `resize`."""
        return self._threads.submit(self.resize, digest, content, owner)

    def read_all(self, contents: Mapping[str, Content]) -> list[Pixels]:
        """Return the pixels of images, read side by side. contents: by digest."""
        return list(self._threads.map(self.read, contents.keys(), contents.values()))

    def read(self, digest: str, content: Content, owner: str = "The image") -> Pixels:
        """Return the pixels of an image; see `resize`."""
        return self.reader.compute(self.resize(digest, content, owner))

    def resize(self, digest: str, content: Content, owner: str = "The image") -> ResizedImage:
        """Return an image as the tower takes it. Raises `ImageError`, with the owner's name, if it cannot be read."""
        return self._resized.get(
            digest,
            lambda: self.reader.resize(open_image(content if isinstance(content, bytes) else content(), owner)),
        )

    def as_png(self, digest: str, content: bytes) -> bytes:
        """Return the picture that `read` takes the pixels of, upright and in RGB, as a file."""

        def encode() -> bytes:
            file = io.BytesIO()
            open_image(content).save(file, "PNG", compress_level=1)
            return file.getvalue()

        return self._pngs.get(digest, encode)
