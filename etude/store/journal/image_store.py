"""The part of a journal that stores the images of turns and tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from threading import RLock

from etude.images import ImageRef
from etude.store.journal.images import StoredImage

PAGE_TURNS = 64
"""Turns with images that are read at once."""


class ImageStore(ABC):
    """A store of images, and of turns that show them."""

    def __init__(self) -> None:
        self._lock = RLock()

    def put_images(self, images: Sequence[StoredImage]) -> None:
        """Store the images that are not stored yet, all or none."""
        if images:
            with self._lock, self._storage_transaction():
                self._write_images(images)

    def images(self, digests: Sequence[str]) -> dict[str, StoredImage]:
        """Return the images with these digests that are stored, with their bytes."""
        with self._lock:
            return {image.ref.digest: image for image in self._images(digests)}

    def image_refs(self, digests: Sequence[str]) -> dict[str, ImageRef]:
        """Return the images with these digests that are stored. Their bytes are not read."""
        with self._lock:
            return {ref.digest: ref for ref in self._image_refs(digests)}

    def image_turns(self) -> Iterator[tuple[int, str]]:
        """Yield the rollout and the JSON of each turn with images, in order. The others are not read.

        It is not compared with the turns' checksums.
        """
        after: int | None = 0
        while after is not None:
            with self._lock:
                page = self._image_turns(after, PAGE_TURNS)
            yield from ((rollout, body) for _, rollout, body in page)
            after = page[-1][0] if len(page) == PAGE_TURNS else None

    # -- the backend's part, called by one thread at a time -----------------------------------------------------------

    @abstractmethod
    def _storage_transaction(self) -> AbstractContextManager[None]:
        """A transaction of the backend: everything written inside is written, or nothing if an exception leaves it."""

    @abstractmethod
    def _write_images(self, images: Sequence[StoredImage]) -> None:
        """Store the images that are not stored yet."""

    @abstractmethod
    def _images(self, digests: Sequence[str]) -> list[StoredImage]:
        """Return the stored images with these digests. One that was changed after it was written is refused."""

    @abstractmethod
    def _image_refs(self, digests: Sequence[str]) -> list[ImageRef]:
        """Return the stored images with these digests, without their bytes."""

    @abstractmethod
    def _image_turns(self, after: int, limit: int) -> list[tuple[int, int, str]]:
        """Return position, rollout and body of the first turns with images after a position."""
