"""The images in a row of data: read where they are, and put into the prompt.

A row names an image by its bytes or a path (`{"bytes": …, "path": …}`, as `datasets` has it), or by a data URL. It is a
part of a message, or an entry of the column `images` (or `image`). Then the prompt has a place for it: `<image>` in its
text, or a part `{"type": "image"}`. Without places, the images come before the text of the first user message.

A task has the address of each image in its place (`etude.images.addresses`), and the bytes apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import DataError, ImageError
from etude.images.addresses import DATA_URL, find_address, from_data_url, image_address
from etude.images.decoding import measure_image

IMAGE_COLUMNS = ("images", "image")
"""Columns with the images of a prompt, of which the first is taken that has any."""
PLACE = "<image>"
"""The place of an image in the text of a prompt, as verl has it."""
FILE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")
"""A text of an image column with such an end is the path of an image, also if the prompt has no place for it."""
SHOWN = 60
"""The most characters of a row's value that an error shows."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of a message's parts that are images."""


def find_image_column(row: Mapping[str, Any]) -> str:
    """Return the name of a row's column with images; that of the first one if there is none."""
    return next((name for name in IMAGE_COLUMNS if row.get(name)), IMAGE_COLUMNS[0])


def image_part(address: str) -> dict[str, Any]:
    """Return the part of a message that shows an image."""
    return {"type": "image_url", "image_url": {"url": address}}


class TaskImages:
    """The images of one row."""

    def __init__(self, where: str, directory: Path | None) -> None:
        """directory: of the row's file; a path may lead into it alone. where: the row's name in errors."""
        self._where = where
        self._directory = directory
        self.contents: dict[str, bytes] = {}
        """The bytes of the images that were read, by digest."""
        self.paths: dict[str, str] = {}
        """The paths of those that are files, by digest."""

    def read_all(self, value: Any) -> Any:
        """Return a value with the address of each image in its place. A text is only an image if it is a data URL."""
        if isinstance(value, str):
            return self._read(value) if value.startswith(DATA_URL) else value
        if _is_struct(value) and any(isinstance(item, str) for item in value.values()):
            return self._read(value)
        if isinstance(value, Mapping):
            return {key: self.read_all(item) for key, item in value.items()}
        return [self.read_all(item) for item in value] if isinstance(value, list) else value

    def place(self, prompt: Any, column: Any, *, as_messages: bool = True) -> tuple[Any, Any]:
        """Return a prompt with its images, and those of the column as addresses.

        column: the value of the row's image column. as_messages: give a text prompt with images the form of messages.
        """
        sources = self._listed(column)
        if isinstance(column, list) and not sources and (places := _count_places(prompt)):
            raise self._wrong_count(places, 0)
        certain = any(map(_is_surely_image, sources))
        if isinstance(prompt, str) and not (as_messages and sources and (certain or PLACE in prompt)):
            return prompt, self.read_all(column)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list):
            return prompt, self.read_all(column)
        filled = _PlaceFiller(self, sources)
        placed = [filled.message(message) for message in messages]
        if not filled.used and not certain:
            return (prompt if isinstance(prompt, str) else placed), column
        addresses = [self._read(source) for source in sources]
        if not filled.used and sources:
            _show_first(placed, addresses)
        elif filled.used != len(sources):
            raise self._wrong_count(filled.used, len(sources))
        return placed, addresses if isinstance(column, list) else addresses[0] if addresses else column

    def place_in(self, row: Mapping[str, Any], prompt: Any) -> Any:
        """Return a prompt with its images, which may be in the image column of its row."""
        placed, _ = self.place(prompt, row.get(find_image_column(row)))
        return placed

    def refuse_in(self, row: Mapping[str, Any], form: str) -> None:
        """Refuse images in the image column of a row whose form has no places for them."""
        column = find_image_column(row)
        if any(map(_is_surely_image, self._listed(row.get(column)))):
            raise DataError(
                f"{self._where} has images in `{column}`, and {form} has no places for them. Give `messages`, or a "
                "prompt of messages with its answer."
            )

    def _listed(self, column: Any) -> list[Any]:
        """Return the images of a column: structs, data URLs, and texts that may be paths; nothing for other values."""
        values = [value for value in (column if isinstance(column, list) else [column]) if value is not None]
        known = [value for value in values if _is_struct(value) or (isinstance(value, str) and value)]
        if any(map(_is_surely_image, known)) and len(known) < len(values):
            other = repr(next(value for value in values if value not in known))
            raise DataError(
                f"{self._where} has {other[:SHOWN]} among its images, which is no image. Give bytes, a path or a data "
                "URL, or leave it out."
            )
        return known if len(known) == len(values) else []

    def _wrong_count(self, places: int, images: int) -> DataError:
        return DataError(
            f"{self._where} has {places} places for images in its prompt, and the number of its images is {images}. "
            f"Write `{PLACE}` once for each image, and give the images in `{IMAGE_COLUMNS[0]}`."
        )

    def _read(self, source: Any) -> str:
        """Return the address of an image, whose bytes are read if they were not."""
        if isinstance(source, str) and find_address(source) is not None:
            return source
        try:
            content, name, path = self._content(source)
            ref = measure_image(content, name)
        except ImageError as error:
            raise DataError(f"{self._where}: {error}") from error
        self.contents[ref.digest] = content
        if path:
            self.paths[ref.digest] = path
        return image_address(ref)

    def _content(self, source: Any) -> tuple[bytes, str, str]:
        """Return the bytes of an image, its name in errors, and its path if it is a file."""
        if isinstance(source, Mapping):
            source = source.get("bytes") or source.get("path")
        if not isinstance(source, str) or not source:
            raise DataError(f"{self._where} has an image without bytes and without a path. Give it one of them.")
        if source.startswith("data:"):
            return from_data_url(source, "An image"), "An image", ""
        name = source if len(source) <= SHOWN else source[:SHOWN] + "…"
        return self.read_file(source), f"The image `{name}`", source

    def read_file(self, source: str) -> bytes:
        """Return the bytes of an image by its path."""
        name = source if len(source) <= SHOWN else source[:SHOWN] + "…"
        if "://" in source:
            raise DataError(
                f"{self._where} names the image `{name}`, and no data are fetched from addresses. Save the image "
                "beside the file of the row, and give its path."
            )
        if self._directory is None:
            raise DataError(
                f"{self._where} names the image `{name}` by a path, and these data are no file that it could be "
                "beside. Give its bytes or a Pillow image."
            )
        root = self._directory.resolve()
        path = (root / source).resolve()
        if not path.is_relative_to(root):
            raise DataError(
                f"{self._where} names the image `{name}`, which is outside of {root}, the directory of its file. Move "
                "it there."
            )
        try:
            return path.read_bytes()
        except OSError as error:
            remedy = (
                "Give its path, or write data:image/png;base64, before base64." if name != source else "Put it there."
            )
            raise DataError(
                f"{self._where} names the image `{name}`, which cannot be read: {error.strerror}. {remedy}"
            ) from error


class _PlaceFiller:
    """Puts images into the places of a prompt, one after the other."""

    def __init__(self, images: TaskImages, sources: Sequence[Any]) -> None:
        self._images = images
        self._sources = sources
        self.used = 0
        """The places of images of the column."""

    def message(self, message: Any) -> Any:
        """Return a message with its images."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and self._sources and PLACE in content:
            return {**message, "content": self._text(content)}
        if isinstance(content, list):
            return {**message, "content": [filled for part in content for filled in self._part(part)]}
        return message

    def _part(self, part: Any) -> list[Any]:
        if not isinstance(part, Mapping):
            return [part]
        kind = part.get("type")
        if kind in IMAGE_PARTS:
            source = next((part[key] for key in (*IMAGE_PARTS, "url", "path", "bytes") if part.get(key)), None)
            if isinstance(source, Mapping) and source.get("url"):
                source = source["url"]
            return [self._next() if source is None else image_part(self._images._read(source))]
        text = part.get("text")
        return self._text(text) if isinstance(text, str) and self._sources and PLACE in text else [part]

    def _text(self, text: str) -> list[Any]:
        """Return the parts of a text with places."""
        first, *others = text.split(PLACE)
        parts: list[Any] = [{"type": "text", "text": first}] if first else []
        for other in others:
            parts.append(self._next())
            parts += [{"type": "text", "text": other}] if other else []
        return parts

    def _next(self) -> dict[str, Any]:
        self.used += 1
        if self.used > len(self._sources):
            return {}  # the count is refused at the end
        return image_part(self._images._read(self._sources[self.used - 1]))


def _is_struct(value: Any) -> bool:
    """Return True for an image of `datasets`: its bytes, a path, or both."""
    return isinstance(value, Mapping) and value.keys() <= {"bytes", "path"} and "bytes" in value


def _is_surely_image(source: Any) -> bool:
    """Return True for bytes, a data URL, and the path of an image; other texts may be captions."""
    return (
        _is_struct(source)
        or (isinstance(source, str) and source.lower().startswith(DATA_URL))
        or (isinstance(source, str) and source.lower().endswith(FILE_ENDINGS))
    )


def _count_places(prompt: Any) -> int:
    """Return the number of places for images in the texts of a prompt."""
    if isinstance(prompt, str):
        return prompt.count(PLACE)
    messages = prompt if isinstance(prompt, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return sum(content.count(PLACE) for content in contents if isinstance(content, str))


def _show_first(messages: list[Any], addresses: Sequence[str]) -> None:
    """Put images before the text of the first user message."""
    for place, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
            messages[place] = {**message, "content": [*map(image_part, addresses), *text]}
            return
