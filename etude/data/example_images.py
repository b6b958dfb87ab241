"""The bytes of the images of supervised examples, which are read whenever a pass needs them.

An image is found again by its hash: in its file, or among the data URLs of its row. Neither tokenizes the row again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from etude.data.table import RowTable
from etude.data.task_images import TaskImages
from etude.errors import DataError, ImageError
from etude.images import image_digest
from etude.images.addresses import find_data_urls, from_data_url


class ExampleImages:
    """The images of the rows of a table. Any thread may read them."""

    def __init__(self, name: str, table: RowTable) -> None:
        """name: the option that names the files, for errors."""
        self._name = name
        self._table = table
        self._paths: dict[int, Mapping[str, str]] = {}
        self._lock = threading.Lock()
        self._last_row = -1
        self._last: Mapping[str, bytes] = {}
        """The images with their bytes in the row that was read last: its others are read next."""

    def note_paths(self, row: int, paths: Mapping[str, str]) -> None:
        """Note the images of a row that are files. paths: by digest."""
        if paths:
            self._paths[row] = paths

    def read(self, row: int, digest: str) -> bytes:
        """Return the bytes of an image; raise if the row has it no longer."""
        path = self._paths.get(row, {}).get(digest)
        if path is None:
            found = self._read_row(row)
        else:
            content = TaskImages(self._table.location(row), self._table.directory(row)).read_file(path)
            found = {image_digest(content): content}
        if digest not in found:
            raise DataError(
                f"Row {row} of {self._name} no longer has the image {digest[:12]}, which it had when the run began. "
                "Leave the files of a run as they are, or start the run again."
            )
        return found[digest]

    def _read_row(self, row: int) -> Mapping[str, bytes]:
        """Return the images whose bytes are in a row, by digest."""
        with self._lock:
            if row != self._last_row:
                found: dict[str, bytes] = {}
                for url in find_data_urls(self._table.row(row)):
                    with suppress(ImageError):  # a text that is no image
                        content = from_data_url(url)
                        found[image_digest(content)] = content
                self._last = found
                self._last_row = row
            return self._last


@dataclass(frozen=True, slots=True)
class ExampleImage:
    """A handle to the bytes of an image, as a batch has it."""

    images: ExampleImages
    row: int
    digest: str

    def read(self) -> bytes:
        """Return the bytes."""
        return self.images.read(self.row, self.digest)
