"""Images whose tokens attend to each other both ways, and else as other tokens do: Gemma 3, and the large Gemma 4.

Each image becomes one segment. Its tokens see the tokens before it, and each other. Later tokens see all of it.

    text ──► image, both ways ──► text      in place of      text, image, text

In Gemma 4 layers without a window are causal for images too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from etude.batch import Pack
from etude.errors import BatchError
from etude.models.vision_types import ImageAttention


def split_images(pack: Pack, attention: ImageAttention) -> Pack:
    """Return a pack in which every image is a segment that attends both ways, if images do so in the model. Its tokens
    keep their order."""
    if pack.images is None or attention == "causal":
        return pack
    image, feature = pack.images.image.cpu(), pack.images.feature.cpu()
    inside = image >= 0
    cut = torch.zeros(len(image) + 1, dtype=torch.bool)
    cut[1:-1] = (image[1:] != image[:-1]) | (inside[1:] & (feature[1:] == 0))
    offsets = [0]
    parents = list[int]()
    both_ways = list[bool]()
    last = dict[int, int]()
    """The last new segment of each old one."""
    for segment, (start, stop) in enumerate(pairwise(pack.offsets.tolist())):
        if stop > start and bool(inside[start]) and int(feature[start]):
            raise BatchError(
                f"Segment {segment} begins inside an image, and this model reads an image as a whole. Give rows whose "
                f"images are whole."
            )
        above = last.get(int(pack.parent[segment]), -1)
        inner = (cut[start + 1 : stop].nonzero()[:, 0] + start + 1).tolist()
        for begin, end in pairwise([start, *inner, stop]):
            offsets.append(end)
            parents.append(above)
            both_ways.append(end > begin and bool(inside[begin]))
            above = len(parents) - 1
        last[segment] = above
    return replace(
        pack,
        offsets=torch.tensor(offsets),
        parent=torch.tensor(parents),
        both_ways=torch.tensor(both_ways),
        in_windows=attention == "in windows",
    )
