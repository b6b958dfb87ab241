"""The images of a task for agents and environments: data URLs, as every client of a model knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from etude.errors import StoreError
from etude.images.addresses import find_address, find_refs, media_type, to_data_url
from etude.records import Json, Task


class ImageSource(Protocol):
    """A store of images, such as a rollout queue."""

    async def get_images(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """Return the bytes of the images with these hashes that are stored, by hash."""
        ...


async def load_task_images(task: Task, source: ImageSource) -> Task:
    """Return a task with a data URL in place of the address of each image in the store."""
    wanted = {ref.digest for ref in find_refs(task.fields)}
    if not wanted:
        return task
    contents = await source.get_images(sorted(wanted))
    missing = sorted(wanted - set(contents))
    if missing:
        raise StoreError(
            f"Task {task.ordinal} shows the image {missing[0]}, and the store does not have it. Restore its journal "
            "from a copy, with its -wal file."
        )
    urls = {digest: to_data_url(content, media_type(content)) for digest, content in contents.items()}
    fields: dict[str, Json] = {name: _replaced(value, urls) for name, value in task.fields.items()}
    return Task(task.ordinal, fields, task.source)


def _replaced(value: Any, urls: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        ref = find_address(value)
        return value if ref is None else urls[ref.digest]
    if isinstance(value, Mapping):
        return {name: _replaced(item, urls) for name, item in value.items()}
    return [_replaced(item, urls) for item in value] if isinstance(value, list) else value
