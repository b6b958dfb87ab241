"""Images of prompts: bytes with a hash, and the tokens that take their features.

    digest       SHA-256 of the encoded bytes (PNG, JPEG, WebP, GIF), in hex
    feature      what a model's vision tower computes for a part of an image; the model reads it in place of a token's
                 embedding
    image token  a token that takes a feature
    span         consecutive image tokens of one image

A prompt keeps the ids that the model saw. Its images are beside them, as spans. Two prompts may have equal ids and
other images: `keyed_ids` tells them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.errors import ImageError

Ids = NDArray[np.int32]

MAX_PIXELS = 50_000_000
"""The most pixels of an image: a decoded one takes three bytes for each."""
_KEY_BITS = np.int64(2**31 - 1)
_PLACE_STEP = np.int64(0x5851F42D)  # odd, so that the keys of consecutive places differ


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image by the hash of its bytes, which are in the store. Example: `ImageRef("9f86…", 640, 480)`."""

    digest: str
    width: int
    """In pixels, after the rotation that its file asks for; so is the height."""
    height: int


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Consecutive tokens that take features of an image, one each, in order."""

    digest: str
    start: int
    stop: int
    first: int = 0
    """The index, among the image's features, of the one at `start`."""

    def shifted(self, tokens: int) -> ImageSpan:
        """Return the same span so many tokens later."""
        return ImageSpan(self.digest, self.start + tokens, self.stop + tokens, self.first)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt for a sampler: their places, and their bytes by digest."""

    spans: tuple[ImageSpan, ...]
    contents: Mapping[str, bytes]


def image_digest(content: bytes) -> str:
    """Return the hash by which an image is stored."""
    return hashlib.sha256(content).hexdigest()


def check_spans(owner: str, spans: Sequence[ImageSpan], tokens: int) -> tuple[ImageSpan, ...]:
    """Return spans as a tuple; refuse empty ones, and those that overlap, are not sorted, or leave the tokens."""
    end = 0
    for span in spans:
        if not end <= span.start < span.stop <= tokens or span.first < 0:
            raise ValueError(
                f"{owner} has the tokens {span.start} to {span.stop} of an image, after token {end} and among "
                f"{tokens} tokens. Spans of images must be sorted, apart from each other, and inside."
            )
        end = span.stop
    return tuple(spans)


def cut_spans(spans: Sequence[ImageSpan], tokens: int) -> tuple[int, tuple[ImageSpan, ...]]:
    """Return the number of tokens that are left of at most `tokens`, and their spans. No image is cut: the tokens end
    before the first one that has no room."""
    begin = 0
    for span in spans:
        if span.first == 0:
            begin = span.start
        if span.stop > tokens:
            tokens = min(tokens, begin)
            break
    return tokens, tuple(span for span in spans if span.start < tokens)


def check_features(spans: Sequence[ImageSpan], features: Mapping[str, int]) -> None:
    """Refuse spans that are not all features of one image after another. features: the number of each image's."""
    place = 0
    for span, following in zip(spans, (*spans[1:], None), strict=True):
        begins = span.first == place
        place += span.stop - span.start
        ends = following is None or following.digest != span.digest or following.first == 0
        if not begins or place > features[span.digest] or (ends and place < features[span.digest]):
            raise ImageError(
                f"The prompt has the tokens {span.start} to {span.stop} for features of an image from number "
                f"{span.first} on, and the image has {features[span.digest]} features. A prompt needs one token for "
                f"each feature of an image, in their order. Read the prompt and the image by the same processor."
            )
        if ends:
            place = 0


def keyed_ids(ids: Ids, spans: Sequence[ImageSpan]) -> Ids:
    """[T] → [T]: return the ids with each image token replaced by a number below 0 that stands for its feature.

    Two prompts have equal keys only if they have equal ids and equal images. The numbers come from all bits of an
    image's digest, some at each place.
    """
    if not spans:
        return ids
    keys = np.array(ids, np.int32)
    for span in spans:
        words = np.frombuffer(bytes.fromhex(span.digest), ">u4").astype(np.int64)
        places = np.arange(span.first, span.first + span.stop - span.start, dtype=np.int64)
        mixed = (words[places % len(words)] + places * _PLACE_STEP) & _KEY_BITS
        keys[span.start : span.stop] = -1 - mixed
    return keys
