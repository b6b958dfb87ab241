"""The images in the fields of a task: `data:` URLs of the formats that are pictures and nothing else.

SVG is not one of them, because it is a document that may have scripts.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from etude.errors import NotFoundError
from etude.store import TaskState

_IMAGE = re.compile(r"data:(image/(?:png|jpeg|webp|gif));base64,([A-Za-z0-9+/]+={0,2})")


def split_images(task: TaskState) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a task with `image 1`, `image 2` and so on in place of its images, and their URLs."""
    images: list[str] = []

    def without_images(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: without_images(item) for name, item in value.items()}
        if isinstance(value, list):
            return [without_images(item) for item in value]
        found = _IMAGE.fullmatch(value) if isinstance(value, str) else None
        if found is None or len(found[2]) % 4:
            return value
        images.append(value)
        return f"image {len(images)}"

    return without_images(task.fields), images


def image_addresses(run: str, task: int, count: int) -> list[str]:
    """Return the addresses of the images of a task, relative to the key."""
    return [f"api/image?{urlencode({'run': run, 'task': task, 'image': place})}" for place in range(count)]


def decode_image(task: int, images: Sequence[str], place: int) -> tuple[bytes, str]:
    """Return one of a task's images, and its media type."""
    if place not in range(len(images)):
        raise NotFoundError(f"Task {task} has {len(images)} images, and no image {place}.")
    media_type, _, content = images[place].removeprefix("data:").partition(";base64,")
    return base64.b64decode(content), media_type
