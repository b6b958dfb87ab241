"""Images in a rendered conversation: the tokens that stand for each one, and their places.

A template writes one placeholder for an image. It is replaced in the text, before that is tokenized, by the tokens of
the image's layout (see `etude.images.layouts`), as transformers' processors do. The number of placeholders must be that
of the images: a template may drop an image, and a user may write the placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import ChatError, ConfigError
from etude.images import ImageLayout, ImageRef, ImageSpan, read_image_layout
from etude.records import ContentPart, Message

TEXT_ALONE = "The conversation has an image, and this model takes text alone. Give a vision-language model."


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompt:
    """The ids of a prompt, and the images among them."""

    ids: Ids
    images: tuple[ImageSpan, ...] = ()


class PromptEncoder(Protocol):
    """Texts with placeholders of images to ids."""

    @property
    def refusal(self) -> str:
        """The reason that the model takes no images; empty if it takes them."""
        ...

    def find(self, messages: Sequence[Message]) -> list[ImageRef]:
        """Return the images of messages, in order. Refuse those that the model does not take."""
        ...

    def expand(self, text: str, images: Sequence[ImageRef]) -> str:
        """Return the text with each placeholder replaced by the tokens of its image."""
        ...

    def encode(self, text: str, images: Sequence[ImageRef], start: int = 0) -> RenderedPrompt:
        """Return the ids of a text with these images. start: the number of ids before it."""
        ...


class TextEncoder:
    """The encoder of a model that takes text alone."""

    def __init__(self, tokenizer: Tokenizer, refusal: str = TEXT_ALONE) -> None:
        """refusal: the error about a conversation with an image."""
        self._tokenizer = tokenizer
        self.refusal = refusal

    def find(self, messages: Sequence[Message]) -> list[ImageRef]:
        """Return none; refuse images."""
        if find_images(messages):
            raise ChatError(self.refusal)
        return []

    def expand(self, text: str, images: Sequence[ImageRef]) -> str:
        """Return the text."""
        assert not images, "`find` refuses them"
        return text

    def encode(self, text: str, images: Sequence[ImageRef], start: int = 0) -> RenderedPrompt:
        """Return the ids of a text."""
        del start
        return RenderedPrompt(self._tokenizer.encode(self.expand(text, images)))


class ImageEncoder:
    """The encoder of a model that takes images."""

    refusal = ""

    def __init__(self, layout: ImageLayout, tokenizer: Tokenizer, image_id: int) -> None:
        """image_id: the id of the layout's image token."""
        self.layout = layout
        self.image_id = image_id
        self._tokenizer = tokenizer

    def find(self, messages: Sequence[Message]) -> list[ImageRef]:
        """Return the images of messages, in order."""
        return find_images(messages)

    def expand(self, text: str, images: Sequence[ImageRef]) -> str:
        """Return the text with each placeholder replaced by the tokens of its image."""
        word = self.layout.placeholder
        pieces = text.split(word)
        if len(pieces) != len(images) + 1:
            plural = "" if len(images) == 1 else "s"
            raise ChatError(
                f"The conversation has {len(pieces) - 1} times `{word}`, which stands for an image, and {len(images)} "
                f"image{plural}. Take that word out of the text, or give another template."
            )
        expanded = (self.layout.expand(image.width, image.height) for image in images)
        return pieces[0] + "".join(tokens + piece for tokens, piece in zip(expanded, pieces[1:], strict=True))

    def encode(self, text: str, images: Sequence[ImageRef], start: int = 0) -> RenderedPrompt:
        """Return the ids of a text with these images, and the places of its image tokens."""
        ids = self._tokenizer.encode(self.expand(text, images))
        counts = [self.layout.count(image.width, image.height) for image in images]
        places = np.flatnonzero(ids == self.image_id) + start
        if len(places) != sum(counts):
            raise ChatError(
                f"The conversation has {len(places)} tokens of images, and its images need {sum(counts)}. Take "
                f"`{self.layout.image_token}` out of the text."
            )
        spans = list[ImageSpan]()
        for image, own in zip(images, np.split(places, np.cumsum(counts)[:-1]), strict=False):
            spans += _find_runs(image.digest, own)
        return RenderedPrompt(ids, tuple(spans))


def load_image_encoder(
    directory: Path, tokenizer: Tokenizer, max_pixels: int | None = None, *, tower: bool = False
) -> PromptEncoder:
    """Return the encoder of the model in a directory. max_pixels, tower: as for `read_image_layout`.

    A model whose family is unknown is a model of text: an image in a conversation raises the error that says so.
    """
    try:
        layout = read_image_layout(directory, max_pixels, tower=tower)
    except ConfigError as error:
        if max_pixels is not None:
            raise
        return TextEncoder(tokenizer, str(error))
    if layout is None:
        return TextEncoder(tokenizer)
    image_id = tokenizer.token_to_id(layout.image_token)
    if image_id is None:
        raise ConfigError(
            f"The model in {directory} has the image token `{layout.image_token}`, and the tokenizer in "
            f"{tokenizer.directory} does not. Set `model.tokenizer` to the model's own."
        )
    return ImageEncoder(layout, tokenizer, image_id)


def find_images(messages: Sequence[Message]) -> list[ImageRef]:
    """Return the images of messages, in order. Refuse parts that are neither text nor an image in the store."""
    parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
    return [_image_of(part) for part in parts if part.kind != "text"]


def _image_of(part: ContentPart) -> ImageRef:
    if part.kind != "image":
        raise ChatError(
            f"The conversation has a part of type '{part.kind}' that no model here takes. Give its frames as images."
            if part.kind == "video"
            else f"The conversation has a part of type '{part.kind}' that no model here takes. Leave it out."
        )
    if part.image is None:
        raise ChatError(
            f"The conversation has an image that was not read: '{part.url[:60]}'. Give its bytes, a data URL, or a "
            "file."
        )
    return part.image


def _find_runs(digest: str, places: NDArray[np.intp]) -> list[ImageSpan]:
    """Return the spans of one image, whose tokens are at these places."""
    spans = list[ImageSpan]()
    first = 0
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
        spans.append(ImageSpan(digest, int(run[0]), int(run[-1]) + 1, first))
        first += len(run)
    return spans
