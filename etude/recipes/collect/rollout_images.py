"""The images of the rollouts that an engine plays: stored once each, and given to the engine with each prompt."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from etude.chat import RenderedPrompt
from etude.chat.transcript import ObservationContent
from etude.errors import ChatError, ImageError, StoreError
from etude.images import ImageRef, PromptImages
from etude.images.addresses import DATA_URL, from_data_url
from etude.records import ContentPart, Message
from etude.store import MemoryJournal
from etude.store.queue.rollout_queue import RolloutQueue
from etude.store.queue.stored_images import store_images

MOST_BYTES = 256 * 2**20
"""Bytes of images that are kept in memory. Others are read from the store again."""


def check_image_count(prompt: RenderedPrompt, max_images: int | None) -> None:
    """Refuse a prompt with more images than this."""
    count = sum(span.first == 0 for span in prompt.images)
    if max_images is not None and count > max_images:
        raise ChatError(
            f"The prompt has {count} images, and `vision.max_images` is {max_images}. Send fewer, or raise it."
        )


class RolloutImages:
    """Stores images of observations, and finds those of prompts. Lives in one event loop at a time."""

    def __init__(self, queue: RolloutQueue | None = None, max_images: int | None = None) -> None:
        """queue: of the run, whose store has the images; with None they end with this object. max_images: the most in
        one prompt."""
        self._queue = queue
        self._max_images = max_images
        self._own = MemoryJournal()
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    async def put(self, contents: Sequence[bytes]) -> list[ImageRef]:
        """Store images that are not stored yet."""
        if self._queue is not None:
            refs = await self._queue.put_images(contents)
        else:
            refs = await asyncio.to_thread(store_images, self._own, contents)
        for ref, content in zip(refs, contents, strict=True):
            self._keep(ref.digest, content)
        return refs

    async def store(self, content: ObservationContent) -> ObservationContent:
        """Return an observation with each image that came as a data URL in the store."""
        if isinstance(content, str):
            return content
        return tuple([await self._store_message(message, place) for place, message in enumerate(content)])

    async def find(self, prompt: RenderedPrompt) -> PromptImages | None:
        """Return the images of a prompt with their bytes; None if it has none."""
        if not prompt.images:
            return None
        check_image_count(prompt, self._max_images)
        digests = list(dict.fromkeys(span.digest for span in prompt.images))
        found = await self.get_images(digests)
        missing = [digest for digest in digests if digest not in found]
        if missing:
            raise StoreError(
                f"A prompt shows the image {missing[0]}, and the journal does not have it. Restore the journal from a "
                "copy, with its -wal file."
            )
        return PromptImages(prompt.images, found)

    async def get_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of the images with these hashes that are stored, by hash."""
        found = {digest: self._recent[digest] for digest in digests if digest in self._recent}
        lacked = [digest for digest in digests if digest not in found]
        if lacked and self._queue is not None:
            found |= await self._queue.get_images(lacked)
        elif lacked:
            found |= {digest: image.content for digest, image in self._own.images(lacked).items()}
        for digest, content in found.items():
            self._keep(digest, content)
        return found

    async def _store_message(self, message: Message, place: int) -> Message:
        if isinstance(message.content, str):
            return message
        parts: list[ContentPart] = []
        for part in message.content:
            number = 1 + sum(each.kind == "image" for each in parts)
            is_new = part.kind == "image" and part.image is None and part.url.startswith(DATA_URL)
            parts.append(await self._store_part(part, f"Image {number} of message {place}") if is_new else part)
        return replace(message, content=tuple(parts))

    async def _store_part(self, part: ContentPart, owner: str) -> ContentPart:
        try:
            (ref,) = await self.put([from_data_url(part.url)])
        except ImageError as error:
            raise ImageError(f"{owner} cannot be taken. {error}") from error
        return ContentPart("image", image=ref)

    def _keep(self, digest: str, content: bytes) -> None:
        """Keep the bytes of an image in memory, and drop those that were used longest ago."""
        if digest not in self._recent:
            self._bytes += len(content)
        self._recent[digest] = content
        self._recent.move_to_end(digest)
        while self._bytes > MOST_BYTES and len(self._recent) > 1:
            _, dropped = self._recent.popitem(last=False)
            self._bytes -= len(dropped)
