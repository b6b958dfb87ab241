"""The images of a run: those in its journal, by the hash of their bytes, and those in the fields of a task.

A field has an image as the address of one in the journal, or as a `data:` URL. Only formats are shown that are pictures
and nothing else. SVG is not one of them, because it is a document that may have scripts.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from etude.errors import NotFoundError
from etude.images.addresses import media_type
from etude.store import Journal, TaskState

_IMAGE = re.compile(r"data:(image/(?:png|jpeg|webp|gif));base64,([A-Za-z0-9+/]+={0,2})")
_STORED = re.compile(r"image:([0-9a-f]{64})(?:;[0-9]+x[0-9]+)?")


def split_images(task: TaskState) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a task with `image 1`, `image 2` and so on in place of its images, and their URLs."""
    images: list[str] = []

    def without_images(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: without_images(item) for name, item in value.items()}
        if isinstance(value, list):
            return [without_images(item) for item in value]
        if not isinstance(value, str) or not _is_image(value):
            return value
        images.append(value)
        return f"image {len(images)}"

    return without_images(task.fields), images


def _is_image(value: str) -> bool:
    found = _IMAGE.fullmatch(value)
    return _STORED.fullmatch(value) is not None or (found is not None and len(found[2]) % 4 == 0)


def image_addresses(run: str, task: int, images: Sequence[str]) -> list[str]:
    """Return the addresses of the images of a task, relative to the key. images: their URLs in the task."""
    return [
        stored_address(run, stored[1])
        if (stored := _STORED.fullmatch(image))
        else f"api/image?{urlencode({'run': run, 'task': task, 'image': place})}"
        for place, image in enumerate(images)
    ]


def stored_address(run: str, digest: str) -> str:
    """Return the address of an image of the journal, relative to the key."""
    return f"api/image?{urlencode({'run': run, 'digest': digest})}"


def stored_addresses(run: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the addresses of the images that messages name, by their hashes."""
    digests = [digest for message in messages for digest in message.get("images", "").split()]
    return {digest: stored_address(run, digest) for digest in digests}


def read_image(journal: Journal, task: int, images: Sequence[str], place: int) -> tuple[bytes, str]:
    """Return one of the images in a task's fields, and its media type."""
    image = images[place] if place in range(len(images)) else ""
    if (stored := _STORED.fullmatch(image)) is not None:
        return read_stored(journal, stored[1])
    if (found := _IMAGE.fullmatch(image)) is None:
        raise NotFoundError(f"Task {task} has {len(images)} images, and no image {place}.")
    return base64.b64decode(found[2]), found[1]


def read_stored(journal: Journal, digest: str) -> tuple[bytes, str]:
    """Return an image of the journal, and its media type, which its bytes tell."""
    image = journal.images([digest]).get(digest)
    kind = "" if image is None else media_type(image.content)
    if image is None or not kind:
        raise NotFoundError(f"The journal has no image {digest[:64]} that a page can show.")
    return image.content, kind


def stored_url(journal: Journal, digest: str) -> str:
    """Return an image of the journal as a URL that contains it; an empty text for one that cannot be shown."""
    try:
        content, kind = read_stored(journal, digest)
    except NotFoundError:
        return ""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
