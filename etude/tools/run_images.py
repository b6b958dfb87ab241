"""The images that the journal of a run names: those that it lacks, and copies of the others as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from etude.errors import ConfigError
from etude.images.addresses import find_refs
from etude.records import Turn
from etude.store import Journal, TaskState

SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif"}


def missing_images(store: Journal) -> dict[str, str]:
    """Return the images that turns and tasks name and the journal lacks: by digest, the first place that names it."""
    named: dict[str, str] = {}
    for digest, place in _named_images(store):
        named.setdefault(digest, place)
    stored = store.image_refs(list(named))
    return {digest: place for digest, place in named.items() if digest not in stored}


def _named_images(store: Journal) -> Iterator[tuple[str, str]]:
    for rollout, body in store.image_turns():
        yield from ((span[0], f"rollout {rollout}") for span in json.loads(body)["turn"]["images"])
    for task in store.iter_states(TaskState):
        yield from ((ref.digest, f"task {task.id}") for ref in find_refs(task.fields))


class ImageFiles:
    """Copies of a journal's images as files, each written once, in the directory `images` beside a file."""

    def __init__(self, store: Journal, beside: Path) -> None:
        self._store = store
        self._directory = beside.parent / "images"
        self._names: dict[str, str | None] = {}

    def write(self, digests: Iterable[str]) -> dict[str, str | None]:
        """Write images that were not written, and return the path of each, relative to the file; None for one that the
        journal lacks."""
        wanted = list(dict.fromkeys(digests))
        new = [digest for digest in wanted if digest not in self._names]
        stored = self._store.images(new) if new else {}
        for digest in new:
            image = stored.get(digest)
            self._names[digest] = None
            if image is not None:
                name = f"{digest}{SUFFIXES[image.media_type]}"
                self._write_file(self._directory / name, image.content)
                self._names[digest] = f"images/{name}"
        return {digest: self._names[digest] for digest in wanted}

    def _write_file(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"The image {path} cannot be written: {error}. Name another file.") from error


def has_images(turns: Iterable[Turn]) -> bool:
    """Return True if the prompt of a turn has images."""
    return any(turn.images for turn in turns)
