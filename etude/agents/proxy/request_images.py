"""The images of requests: read where they come in, stored once, and kept for the sampler.

A dialect leaves an image as a part with its address, and the name of its field as text. Here the bytes are taken from
it and stored, and the part then names the image by its hash. An agent sends the same images with each call, so those
that were read are known by their bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from etude.agents.proxy.image_addresses import ImageFetcher
from etude.agents.proxy.request import APIError, ModelRequest
from etude.errors import DataError
from etude.images import ImageRef, ImageSpan, PromptImages, image_digest
from etude.images.addresses import from_data_url
from etude.records import ContentPart, Message
from etude.store.queue.rollout_queue import RolloutQueue

READ_AT_ONCE = 2
"""Images that are read at once: one of 50 million pixels takes 200 MB while it is decoded."""
MAX_ATTEMPT_IMAGES = 4096
"""The most different images that one attempt may send."""
MAX_ATTEMPT_BYTES = 512 * 2**20
"""The most bytes of these images: the store keeps them for the whole run."""
MAX_KEPT_BYTES = 256 * 2**20
"""The most bytes of images that are kept in memory; the store has all of them."""
DIGEST = re.compile(r"[0-9a-f]{64}")


class ImageQuota:
    """The images that one attempt has sent, but for those that the endpoint had in memory."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._bytes = 0

    def take(self, digest: str, size: int) -> None:
        """Count an image of so many bytes, once; raise `APIError` for one too many."""
        if digest in self._digests:
            return
        if len(self._digests) >= MAX_ATTEMPT_IMAGES or self._bytes + size > MAX_ATTEMPT_BYTES:
            raise APIError(
                f"This attempt has sent {len(self._digests):,} different images of {self._bytes / 2**20:.0f} MiB in "
                f"all, and one may send {MAX_ATTEMPT_IMAGES:,} of {MAX_ATTEMPT_BYTES / 2**20:.0f} MiB. Send smaller "
                "or fewer ones, or the same again.",
                param="messages",
                code="too_many_images",
            )
        self._digests.add(digest)
        self._bytes += size


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a request that has an image."""

    part: ContentPart
    owner: str
    """Its name in errors about the image. Example: `Image 2 of message 0`."""

    @property
    def field(self) -> str:
        """The name of its field."""
        return self.part.text


class RequestImages:
    """Reads the images of requests. Used on one event loop; any number of requests at once."""

    def __init__(
        self,
        queue: RolloutQueue,
        fetcher: ImageFetcher,
        threads: Executor,
        *,
        refusal: str,
        max_images: int,
    ) -> None:
        """threads: where images are decoded. refusal: the reason that the model takes no images; empty if it does.
        max_images: the most images of a request."""
        self._queue = queue
        self._fetcher = fetcher
        self._threads = threads
        self._refusal = refusal
        self._max_images = max_images
        self._reading = asyncio.Semaphore(READ_AT_ONCE)
        self._kept: OrderedDict[str, tuple[ImageRef, bytes]] = OrderedDict()  # by digest, the oldest first
        self._kept_bytes = 0

    async def read(self, request: ModelRequest, quota: ImageQuota) -> ModelRequest:
        """Return a request whose images are in the store. Raise `APIError` for one that cannot be taken.

        quota: of the attempt.
        """
        places = _find_images(request.messages)
        if not places:
            return request
        if self._refusal:
            raise APIError(self._refusal, param="messages", code="unsupported_content")
        if len(places) > self._max_images:
            raise APIError(
                f"The request has {len(places)} images, and `vision.max_images` is {self._max_images}. Send fewer, or "
                "raise it.",
                param="messages",
            )
        stored = iter([await self._store(place, quota) for place in places])
        messages = tuple(
            _with_images(message, [next(stored) for _ in _images_of(message)]) for message in request.messages
        )
        return replace(request, messages=messages)

    async def of_prompt(self, spans: Sequence[ImageSpan]) -> PromptImages | None:
        """Return the images of a prompt with their bytes; None without any."""
        if not spans:
            return None
        digests = dict.fromkeys(span.digest for span in spans)
        contents = {digest: kept[1] for digest in digests if (kept := self._kept.get(digest)) is not None}
        missing = [digest for digest in digests if digest not in contents]
        if missing:
            contents |= await self._queue.get_images(missing)
        lost = next((digest for digest in digests if digest not in contents), None)
        if lost is not None:
            raise APIError(f"The store does not have the image {lost} any more. Send it again.", "failed")
        return PromptImages(tuple(spans), contents)

    async def _store(self, place: _Place, quota: ImageQuota) -> ImageRef:
        """Store an image, unless it is known, and return its reference."""
        if place.part.image is not None:  # of an earlier request, which this one continues
            return place.part.image
        try:
            content = await self._content(place)
            digest = image_digest(content)
            kept = self._kept.get(digest)
            if kept is not None:
                self._kept.move_to_end(digest)
                return kept[0]
            if not place.part.url.startswith("image:"):
                quota.take(digest, len(content))
            async with self._reading:
                (image,) = await self._queue.put_images([content])
        except DataError as error:
            sentence = str(error).replace("The image", place.owner, 1)
            raise APIError(sentence, param=place.field, code="invalid_image") from error
        self._keep(image, content)
        return image

    async def _content(self, place: _Place) -> bytes:
        """Return the bytes of an image, from the request or from the place that it names."""
        address = place.part.url
        if address.startswith("data:"):
            work = partial(from_data_url, address, place.owner)
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        if not address.startswith("image:"):
            return await self._fetcher.fetch(address, place.field)
        digest = address.removeprefix("image:").partition(";")[0]
        kept = self._kept.get(digest)
        if kept is not None:
            return kept[1]
        found = await self._queue.get_images([digest]) if DIGEST.fullmatch(digest) else {}
        if digest not in found:
            raise APIError(
                f"'{place.field}' names the image {digest[:64]}, which the store does not have. Send its bytes as a "
                "data URL.",
                "not_found",
                param=place.field,
                code="image_not_found",
            )
        return found[digest]

    def _keep(self, image: ImageRef, content: bytes) -> None:
        if image.digest in self._kept:
            return
        self._kept[image.digest] = (image, content)
        self._kept_bytes += len(content)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1][1])


def _images_of(message: Message) -> list[ContentPart]:
    parts = () if isinstance(message.content, str) else message.content
    return [part for part in parts if part.kind == "image"]


def _find_images(messages: Sequence[Message]) -> list[_Place]:
    return [
        _Place(part, f"Image {number} of message {index}")
        for index, message in enumerate(messages)
        for number, part in enumerate(_images_of(message), 1)
    ]


def _with_images(message: Message, images: Sequence[ImageRef]) -> Message:
    """Return the message with its images by their references."""
    if not images:
        return message
    left = iter(images)
    parts = (
        ContentPart("image", image=next(left)) if isinstance(part, ContentPart) and part.kind == "image" else part
        for part in message.content
    )
    return replace(message, content=tuple(part for part in parts if isinstance(part, ContentPart)))
