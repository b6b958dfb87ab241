"""Images on their way into a journal: read whole, unless their hash is known."""

from __future__ import annotations

from collections.abc import Sequence

from etude.images import ImageRef, image_digest
from etude.images.addresses import media_type
from etude.images.decoding import ImageLimits, inspect_image
from etude.store.journal.images import StoredImage
from etude.store.journal.journal import Journal

MAX_IMAGE_BYTES = 64 * 2**20
"""Bytes of the largest image that is stored. Requests have smaller limits of their own."""


def store_images(journal: Journal, contents: Sequence[bytes]) -> list[ImageRef]:
    """Store the images that are not stored yet, all or none, and return them in the order given. It may take long.

    One that cannot be read whole raises `ImageError`.
    """
    digests = [image_digest(content) for content in contents]
    known = journal.image_refs(digests)
    new: dict[str, StoredImage] = {}
    for place, (digest, content) in enumerate(zip(digests, contents, strict=True)):
        if digest not in known:
            owner = "The image" if len(contents) == 1 else f"Image {place}"
            known[digest] = inspect_image(content, ImageLimits(MAX_IMAGE_BYTES), owner)
            new[digest] = StoredImage(known[digest], media_type(content), content)
    journal.put_images(list(new.values()))
    return [known[digest] for digest in digests]
