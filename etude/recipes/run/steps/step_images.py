"""The images of a step: each is read from the journal once, and stored once where the ranks can read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from etude.batch import StoredBytes
from etude.errors import CollectionError
from etude.protocols import Crew
from etude.recipes.collect.rollouts import ScoredRollout
from etude.store import StoredImage

ReadImages = Callable[[Sequence[str]], Mapping[str, StoredImage]]
"""Returns the images with these digests, those that are stored."""

_READ_AT_ONCE = 32
"""The number of images that are in this process's memory at a time, where ranks have their own."""


def store_images(scored: Sequence[ScoredRollout], crew: Crew, read: ReadImages) -> list[dict[str, bytes | StoredBytes]]:
    """Return, of each rollout, its images by digest, as handles for the ranks of the crew."""
    owner = {digest: each.rollout.id for each in scored for digest in each.images}
    handles: dict[str, bytes | StoredBytes] = {}
    order = list(owner)
    for start in range(0, len(order), _READ_AT_ONCE):
        digests = order[start : start + _READ_AT_ONCE]
        found = read(digests)
        for digest in digests:
            if digest not in found:
                raise CollectionError(
                    f"Rollout {owner[digest]} shows the image {digest}, which the journal does not have. Continue from "
                    "an intact copy of the journal."
                )
            handles[digest] = crew.put_bytes(found[digest].content)
    return [{digest: handles[digest] for digest in each.images} for each in scored]
