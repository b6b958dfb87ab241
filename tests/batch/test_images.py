"""A batch has each image of its rows once, and says which token takes which of its features."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from etude.batch import Batch, ImageContent, from_bytes, to_bytes
from etude.errors import BatchError
from etude.images import ImageSpan, image_digest
from etude.records import Rollout, Sample

CONTENTS = {image_digest(content): content for content in (b"red", b"green", b"blue")}
RED, GREEN, BLUE = CONTENTS


def shown(rollout: int, *images: ImageSpan) -> Sample:
    """Return a row of six tokens of context with these images, and two of an answer."""
    acts = np.arange(8) > 5
    none = np.zeros(8, np.int32)
    return Sample(np.arange(8, dtype=np.int32), acts, np.zeros(8, np.float32), none, none, rollout, images=images)


def pictures() -> Batch:
    """Return a batch of four rollouts: red and green, green, none, blue from its second feature."""
    rows = [
        shown(0, ImageSpan(RED, 0, 2), ImageSpan(GREEN, 3, 5)),
        shown(1, ImageSpan(GREEN, 1, 3)),
        shown(2),
        shown(3, ImageSpan(BLUE, 0, 3, first=1)),
    ]
    return Batch.from_records(rows, [Rollout(i, i, i // 2, 0.0) for i in range(4)], images=CONTENTS)


def places(batch: Batch) -> list[list[tuple[str, int] | None]]:
    """Return, of each rollout's tokens, the content and the feature that each takes."""
    assert batch.image is not None and batch.feature is not None
    taken = [
        None if image < 0 else (batch.images[image].read().decode(), feature)
        for image, feature in zip(batch.image.tolist(), batch.feature.tolist(), strict=True)
    ]
    ends = batch.rollout_token_offsets.tolist()
    return [taken[start:end] for start, end in pairwise(ends)]


EXPECTED: list[list[tuple[str, int] | None]] = [
    [("red", 0), ("red", 1), None, ("green", 0), ("green", 1), None, None, None],
    [None, ("green", 0), ("green", 1), None, None, None, None, None],
    [None] * 8,
    [("blue", 1), ("blue", 2), ("blue", 3), None, None, None, None, None],
]


def test_spans_become_columns() -> None:
    batch = pictures()
    assert places(batch) == EXPECTED
    assert [image.digest for image in batch.images] == [RED, GREEN, BLUE]
    assert batch.require("image").dtype == batch.require("feature").dtype == torch.int32


def test_a_selected_batch_keeps_the_images_of_its_rows_alone() -> None:
    batch = pictures()
    part = batch.select([3, 1])
    assert places(part) == [EXPECTED[3], EXPECTED[1]]
    assert [image.digest for image in part.images] == [GREEN, BLUE]
    bare = batch.select([2])
    assert bare.image is None and bare.feature is None and bare.images == ()
    first, second = batch.split(2)
    assert [image.digest for image in first.images + second.images] == [RED, GREEN, BLUE]


def test_a_joined_batch_has_a_shared_image_once() -> None:
    batch = pictures()
    parts = [batch.select([2]), batch.select([3, 1]), batch.select([0])]
    joined = Batch.concat(parts)
    assert places(joined) == [EXPECTED[2], EXPECTED[3], EXPECTED[1], EXPECTED[0]]
    assert sorted(image.digest for image in joined.images) == sorted(CONTENTS)
    assert Batch.concat([batch.select([2]), batch.select([2])]).image is None


class _Elsewhere:
    """Bytes that are not in the batch."""

    def read(self) -> bytes:
        return b"red"


def test_a_buffer_has_the_bytes_of_images() -> None:
    """Also of those that are elsewhere."""
    batch = pictures().select([0, 3])
    moved = batch.replace(images=(ImageContent(RED, _Elsewhere()), *batch.images[1:]))
    assert places(from_bytes(to_bytes(moved))) == [EXPECTED[0], EXPECTED[3]]
    wire = to_bytes(pictures().select([1]))
    assert b"green" in wire and b"blue" not in wire


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"images": ()}, "together, or none of them"),
        ({"image": None}, "together, or none of them"),
        ({"images": (ImageContent(RED, b"red"),) * 3}, "has an image twice"),
        ({"images": (ImageContent(RED, b"red"),)}, "Token 3 takes feature 0 of image 1; this batch has the images 0"),
        ({"feature": torch.full((32,), -1, dtype=torch.int32)}, "Token 0 takes feature -1 of image 0"),
        ({"image": torch.zeros(32, dtype=torch.int64)}, "must be int32"),
        ({"image": torch.zeros(31, dtype=torch.int32)}, "`image` has 31 entries"),
        ({"action": torch.arange(32) == 4}, "token 4 is marked as an action but takes a feature of an image"),
    ],
)
def test_images_that_do_not_fit_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        pictures().replace(**changes)


def test_an_image_without_bytes_is_refused() -> None:
    with pytest.raises(BatchError, match=f"the bytes of 1 were not given; the first is {BLUE}"):
        Batch.from_records([shown(0, ImageSpan(BLUE, 0, 2))], [Rollout(0, 0, 0, 0.0)], images={RED: b"red"})
