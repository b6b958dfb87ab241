"""The images of a batch, and of one pass: their bytes once each, and the tokens that take their features.

    row r      P P I I I I P A A     columns `image` 0 0 0 0, `feature` 0 1 2 3 at I, and -1 elsewhere
    images     (picture 0, picture 1, …)

An image is named by the hash of its bytes, so a batch has each one once. Its content is the bytes, or a handle to bytes
that a crew has stored. The rank that computes its features reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from etude.errors import BatchError
from etude.records import Sample

if TYPE_CHECKING:
    from etude.batch.batch import Batch


class StoredBytes(Protocol):
    """A handle to bytes that are elsewhere: in memory that processes share, or on another machine."""

    def read(self) -> bytes:
        """Return the bytes."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ImageContent:
    """An image of a batch. Example: `ImageContent("9f86…", content)`."""

    digest: str
    content: bytes | StoredBytes

    def read(self) -> bytes:
        """Return the bytes of the image, as they were encoded."""
        return self.content if isinstance(self.content, bytes) else self.content.read()


@dataclass(frozen=True, eq=False)
class PackImages:
    """The images of one pass, and the packed tokens that take their features."""

    image: Tensor  # [P] int32: the place of each token's image in `contents`; -1 is none
    feature: Tensor  # [P] int32: the index of its feature among that image's; -1 is none
    contents: tuple[ImageContent, ...]


def image_columns(samples: Sequence[Sample], contents: Mapping[str, bytes | StoredBytes]) -> dict[str, Any]:
    """Return the fields of a batch of these rows that hold its images; none without images."""
    digests = list(dict.fromkeys(span.digest for sample in samples for span in sample.images))
    if not digests:
        return {}
    absent = [digest for digest in digests if digest not in contents]
    if absent:
        raise BatchError(
            f"The rows show {len(digests)} images, and the bytes of {len(absent)} were not given; the first is "
            f"{absent[0]}. Give `from_records` the bytes, or a handle to them, by digest in `images`."
        )
    place = {digest: index for index, digest in enumerate(digests)}
    tokens = sum(len(sample.ids) for sample in samples)
    image = np.full(tokens, -1, np.int32)
    feature = np.full(tokens, -1, np.int32)
    start = 0
    for sample in samples:
        for span in sample.images:
            image[start + span.start : start + span.stop] = place[span.digest]
            feature[start + span.start : start + span.stop] = np.arange(span.stop - span.start) + span.first
        start += len(sample.ids)
    return {
        "image": torch.from_numpy(image),
        "feature": torch.from_numpy(feature),
        "images": tuple(ImageContent(digest, contents[digest]) for digest in digests),
    }


def select_images(image: Tensor, feature: Tensor, images: tuple[ImageContent, ...]) -> dict[str, Any]:
    """Return the fields of a batch that has these tokens: only the images that they use."""
    image, feature, images = _kept(image, feature, images)
    if not images:
        return {"image": None, "feature": None, "images": ()}
    return {"image": image, "feature": feature, "images": images}


def _kept(
    image: Tensor, feature: Tensor, images: tuple[ImageContent, ...]
) -> tuple[Tensor, Tensor, tuple[ImageContent, ...]]:
    """Return tokens with the images that they use, in the same order."""
    used = torch.unique(image[image >= 0])
    place = image.new_full((len(images) + 1,), -1)  # the last entry is that of -1
    place[used.long()] = torch.arange(len(used), dtype=image.dtype, device=image.device)
    return place[image.long()], feature, tuple(images[index] for index in used.tolist())


def joined_images(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return, of each batch, the fields that hold its images as places in one tuple, which has each image once."""
    contents = {image.digest: image for batch in batches for image in batch.images}
    place = {digest: index for index, digest in enumerate(contents)}
    images = tuple(contents.values())
    fields: list[dict[str, Any]] = []
    for batch in batches:
        if batch.image is None or batch.feature is None:
            none = torch.full_like(batch.ids, -1, dtype=torch.int32)
            fields.append({"image": none, "feature": none, "images": images})
            continue
        places = batch.image.new_tensor([*(place[image.digest] for image in batch.images), -1])
        fields.append({"image": places[batch.image.long()], "feature": batch.feature, "images": images})
    return fields
