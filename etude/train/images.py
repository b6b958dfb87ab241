"""The images of a training pass: their bytes become pixels, and pixels features, each image once a pass.

    bytes ──► pixels, kept while there is room ──► tower ──► features ──► tokens of every row that shows the image

If the tower is frozen, autograd records nothing of it: the rows that share an image then share its features at the
price of one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from etude.batch import Pack, PackImages
from etude.errors import BatchError
from etude.images.pixel_cache import PixelCache
from etude.images.pixels import Pixels
from etude.models import Model, PackedAttention
from etude.models.vision import PassImages, axes_positions, place_features, small_pixels
from etude.models.whole_images import split_images

_small_image: ContextVar[bool] = ContextVar("small_image", default=False)


@contextmanager
def use_small_image(used: bool) -> Iterator[None]:
    """Pass a small image through the tower in each pass without images in this context, if `used` is true.

    Ranks exchange the weights of a trained tower block by block. So each of them passes the tower as often.
    """
    token = _small_image.set(used)
    try:
        yield
    finally:
        _small_image.reset(token)


def small_image(model: Model) -> PassImages | None:
    """Return an image whose features no token takes, if this context uses one. Their gradient is zero."""
    if not _small_image.get():
        return None
    none = torch.empty(0, dtype=torch.int64, device=model.device)
    return PassImages(model.encode_images([small_pixels(model.module.config)]), none, none)


def compute_hidden(model: Model, pack: Pack, pixels: PixelCache | None) -> Tensor:
    """[P, H]: compute the final hidden states of a pack, with the features of its images; differentiable.

    pixels: None for a model that takes text alone, or that is given rows without images.
    """
    if pack.images is None:
        return model.hidden(pack.ids, pack.positions, PackedAttention(pack), small_image(model))
    if pixels is None or not model.has_vision:
        raise BatchError(
            f"The rows show {len(pack.images.contents)} images, and this model takes text alone. Give a "
            f"vision-language model, or rows without images."
        )
    shown = pixels.read_all({each.digest: each.read for each in pack.images.contents})
    positions, images = _encode(model, pack, pack.images, shown)
    attend = PackedAttention(split_images(pack, model.image_attention))
    return model.hidden(pack.ids, positions, attend, images)


def _encode(model: Model, pack: Pack, shown: PackImages, pixels: list[Pixels]) -> tuple[Tensor, PassImages]:
    """Return the positions of a pack's tokens, and the features that some of them take."""
    image = shown.image.cpu().numpy()
    feature = shown.feature.cpu().numpy()
    counts = [each.features for each in pixels]
    beyond = np.flatnonzero((image >= 0) & (feature >= np.array(counts)[image]))
    if len(beyond):
        index = int(image[beyond[0]])
        raise BatchError(
            f"The image {shown.contents[index].digest[:12]} gives {counts[index]} features here, and a row has a token "
            f"for feature {int(feature[beyond[0]]) + 1}. The row was made with other settings of the image processor. "
            f"Train with the `vision.max_pixels` and the processor that it was made with."
        )
    tokens, rows = (torch.from_numpy(each).to(model.device) for each in place_features(image, feature, counts))
    positions = pack.positions
    grids = [each.grid for each in pixels if each.grid is not None]
    if grids:
        axes = axes_positions(image, feature, grids, pack.offsets.tolist(), pack.parent.tolist())
        positions = torch.from_numpy(axes).to(model.device)
    return positions, PassImages(model.encode_images(pixels), tokens, rows)
