"""The pixels of waiting requests: those of the first ones are read, and dropped once a prompt is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from etude.errors import ImageError
from etude.images import PromptImages
from etude.images.pixel_cache import PixelCache
from etude.records import SamplingParams
from etude.rollout.image_reader import ImageReader
from etude.rollout.prompt_pixels import PromptPixels
from etude.rollout.request import Request
from tests.rollout.shown import png, shown_to

SHOWN = shown_to("qwen3_vl")
READER = ImageReader(SHOWN.reader)
IMAGES = [png(seed, 50, 40) for seed in range(4)]


def request(*images: bytes, damage: int | None = None) -> Request:
    """Return a request that shows these images. damage: the number of bytes of each that are left."""
    ids, shown = SHOWN.prompt("look ", *images, "\n")
    if shown is not None:
        contents = {digest: content[:damage] for digest, content in shown.contents.items()}
        shown = PromptImages(shown.spans, contents)
    placed = None if shown is None else READER.read(len(ids), shown)
    return Request(ids, SamplingParams(max_tokens=4), limit=512, vocab_size=9999, tokenizer=None, images=placed)


class Queue:
    """The pixels of requests, and a wait for the reads that were begun."""

    def __init__(self, cache: PixelCache, max_bytes: int) -> None:
        self._read = threading.Semaphore(0)
        self.pixels = PromptPixels(cache, self._read.release, max_bytes)

    def look(self, running: Sequence[Request], waiting: Sequence[Request], reads: int) -> list[BaseException]:
        """Read ahead, and wait for so many reads. Return the errors that are known then."""
        self.pixels.read_ahead(running, waiting, 99)
        for _ in range(reads):
            assert self._read.acquire(timeout=20)
        assert not self._read.acquire(blocking=False), "more images were read"
        return [error for _, error in self.pixels.read_ahead(running, waiting, 99)]


@contextmanager
def queue_of(max_bytes: int) -> Iterator[Queue]:
    """Make a queue, and end its threads afterwards."""
    cache = PixelCache(SHOWN.reader)
    yield Queue(cache, max_bytes)
    cache.close()


def test_so_many_images_of_the_queue_are_read_as_there_is_room_for() -> None:
    text, same = request(), request(IMAGES[0])
    first, second, third = (request(image) for image in IMAGES[:3])
    assert first.images is not None
    with queue_of(2 * first.images.pixel_bytes[0]) as queue:
        waiting = [first, text, same, second, third]
        assert not queue.look([], waiting, 2)
        assert [queue.pixels.is_ready(each) for each in waiting] == [True, True, True, True, False]
        first.computed = first.prompt_length - 1
        assert not queue.look([first], waiting[1:], 0), "a prompt that is read takes room"
        first.computed = first.prompt_length
        assert not queue.look([first, text, same], [second, third], 0)
        same.computed = same.prompt_length
        assert not queue.look([first, text, same], [second, third], 1)
        assert queue.pixels.is_ready(third) and not queue.pixels.is_ready(first)
        assert not queue.look([], [first, third, second], 1), "a preempted request is the first of the queue"
        assert [queue.pixels.is_ready(each) for each in (first, third, second)] == [True, True, False]


def test_the_first_request_gets_its_images_even_if_they_need_more_room() -> None:
    large, small = request(*IMAGES), request(IMAGES[0])
    with queue_of(1) as queue:
        assert not queue.look([], [large, small], len(IMAGES))
        assert queue.pixels.is_ready(large)
        assert queue.pixels.compute(large.images.digests[1] if large.images else "").features > 0


def test_a_damaged_image_is_an_error_of_its_requests_alone() -> None:
    damaged, whole = request(png(9, 50, 40), damage=99), request(IMAGES[0])
    with queue_of(10**6) as queue:
        (error,) = queue.look([], [damaged, whole], 2)
        assert isinstance(error, ImageError) and "Image 1 of the prompt" in str(error)
        assert queue.pixels.is_ready(whole) and not queue.pixels.is_ready(damaged)
        with pytest.raises(ImageError):
            queue.pixels.compute(damaged.images.digests[0] if damaged.images else "")
