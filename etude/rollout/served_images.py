"""The images of requests to servers: what is sent to a run's servers, and what each of them has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.errors import DataError
from etude.images import ImageSpan, PromptImages, check_features

if TYPE_CHECKING:  # they load Pillow, which the options of servers do not need
    from etude.images.pixel_cache import PixelCache
    from etude.images.pixels import ResizedImage

TEXT_ALONE = "The conversation has an image, and this model takes text alone. Give a vision-language model."
MAX_SENT = 4096
"""The most images of which a client remembers that a server has them."""


@dataclass(frozen=True)
class ImageOptions:
    """The options of a run for the images of its servers."""

    max_pixels: int | None = None
    """The most pixels that an image is resized to; None is the processor's own."""
    max_images: int = 16
    """The most images of a request."""
    tower: bool = True
    """True if the run computes images; see `read_image_layout`."""
    trains_tower: bool = False
    """True if features change with each version of the weights."""


@dataclass(frozen=True)
class ImageSupport:
    """The images that a run's servers take."""

    pixels: PixelCache
    dtype: str
    """The type of the servers' weights, in which they get pixels."""
    options: ImageOptions
    is_joined: bool
    """True if others have started the servers, so that their settings must be read."""


class SentImages:
    """The images that one server was sent and may still have."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[str]) -> None:
        """Note that the server has these images."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_SENT:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them: the server has dropped some, or is another process."""
        self._keys.clear()


@dataclass(frozen=True, eq=False)
class ServedImages:
    """The images of one request to one server."""

    prompt: PromptImages
    support: ImageSupport
    weights: str
    """A text for the weights of the tower, if they are trained; else an empty one."""
    sent: SentImages

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """The places of the images in the prompt."""
        return self.prompt.spans

    def key(self, digest: str) -> str:
        """Return the name of an image's features at the server."""
        return digest + self.weights

    def resize(self, digest: str, place: int) -> ResizedImage:
        """Return an image, which is at this place in the prompt, from 1, as the tower takes it."""
        if digest not in self.prompt.contents:
            raise DataError(f"The bytes of image {place} of the prompt are missing. Pass them in `contents`.")
        return self.support.pixels.resize(digest, self.prompt.contents[digest], f"Image {place} of the prompt")

    def resize_all(self) -> dict[str, ResizedImage]:
        """Return all images by digest; raise if an image has more or fewer features than tokens."""
        digests = dict.fromkeys(span.digest for span in self.spans)
        resized = {digest: self.resize(digest, place) for place, digest in enumerate(digests, start=1)}
        check_features(self.spans, {digest: each.features for digest, each in resized.items()})
        return resized
