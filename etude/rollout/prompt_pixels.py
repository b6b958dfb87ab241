"""The pixels of prompts in the embedded engine: read on worker threads shortly before a request begins.

A request brings its images as they were encoded. Resized, those of many waiting requests would fill the memory: 16
screenshots are 50 MB. So only the first requests of the queue have theirs read. Each keeps them until its prompt is in
the cache, and a request that was preempted gets them again.

    consumes       the requests of the scheduler, in their order
    produces       resized images, until no prompt needs them
    waits for      nothing: a request that is not ready begins in a later step
    unblocked by   each image that was read, which wakes the engine's thread
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice

from etude.images.pixel_cache import PixelCache
from etude.images.pixels import Pixels, ResizedImage
from etude.rollout.request import Request

MAX_BYTES = 2**28
"""The most bytes of resized images that requests hold: 256 MiB. The first waiting one gets all of its own anyway."""

Reads = dict[str, Future[ResizedImage]]
"""The images that were read or are being read, by digest."""


class PromptPixels:
    """The resized images of prompts. Only the engine's thread uses it."""

    def __init__(self, cache: PixelCache, on_read: Callable[[], None], max_bytes: int = MAX_BYTES) -> None:
        """on_read: called on any thread after an image was read, or could not be."""
        self._cache = cache
        self._on_read = on_read
        self._max_bytes = max_bytes
        self._reads: Reads = {}

    def read_ahead(
        self, running: Iterable[Request], waiting: Iterable[Request], most: int
    ) -> Sequence[tuple[Request, BaseException]]:
        """Begin to read the images of the next requests, and drop those that none of them needs.

        Returns the requests whose images cannot be read, each with the error. most: the most requests to look at.
        """
        kept: Reads = {}
        held = sum(self._keep(request, kept) for request in running if request.reads_images)
        failed: list[tuple[Request, BaseException]] = []
        is_first = True
        for request in islice(waiting, most):
            if request.images is None:
                continue
            if not is_first and held + _missing_bytes(request, kept) > self._max_bytes:
                break
            is_first = False
            held += self._keep(request, kept)
            error = _find_error(request, kept)
            if error is not None:
                failed.append((request, error))
        for digest, read in self._reads.items():
            if digest not in kept:
                read.cancel()
        self._reads = kept
        return failed

    def is_ready(self, request: Request) -> bool:
        """Return True if all images of a request were read."""
        if request.images is None:
            return True
        reads = [self._reads.get(digest) for digest in request.images.digests]
        return all(read is not None and read.done() and read.exception() is None for read in reads)

    def compute(self, digest: str) -> Pixels:
        """Return the pixels of an image of a request that was ready when it began."""
        return self._cache.reader.compute(self._reads[digest].result())

    def _keep(self, request: Request, kept: Reads) -> int:
        """Keep the images of a request, or begin to read them. Return the bytes of those that are new in `kept`."""
        assert request.images is not None, "only requests with images have some to keep"
        added = _missing_bytes(request, kept)
        for place, digest in enumerate(request.images.digests):
            if digest in kept:
                continue
            read = self._reads.get(digest)
            if read is None:
                owner = f"Image {place + 1} of the prompt"
                read = self._cache.begin_resize(digest, request.images.contents[place], owner)
                read.add_done_callback(lambda _: self._on_read())
            kept[digest] = read
        return added


def _missing_bytes(request: Request, kept: Reads) -> int:
    """Return the bytes of a request's resized images that are not kept."""
    assert request.images is not None, "only requests with images have bytes of images"
    pairs = zip(request.images.digests, request.images.pixel_bytes, strict=True)
    return sum(size for digest, size in pairs if digest not in kept)


def _find_error(request: Request, reads: Reads) -> BaseException | None:
    """Return the error of an image of a request that could not be read."""
    assert request.images is not None, "only requests with images have such errors"
    done = [reads[digest] for digest in request.images.digests if reads[digest].done()]
    return next((error for read in done if (error := read.exception()) is not None), None)
