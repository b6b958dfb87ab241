"""The images of a plan: as many as a prompt of maximum length has, each of one colour.

The dry run passes their true pixels through the tower. So the plan has their memory, that of the tower's activations,
and that of the features that the embedded engine keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import ImageError
from etude.images import ImageLayout, ImageSpan, PatchBudget, PatchGrid, Tiles
from etude.images.decoding import plain_png
from etude.images.pixel_cache import PixelCache
from etude.images.pixels import Pixels
from etude.models import Model
from etude.models.vision import Features, PassImages
from etude.models.vision_types import has_tower, reads_text_too
from etude.recipes.recipe import Recipe
from etude.recipes.run.rules.vision import shows_images
from etude.rollout.features import MAX_FEATURES


@dataclass(frozen=True)
class WorstImages:
    """The images of the prompts of a plan. Every prompt has as many, of the same size."""

    pixels: PixelCache
    content: bytes
    """The bytes of each image."""
    tokens: int
    """The tokens of each image."""
    count: int
    """The images of a prompt."""

    def spans(self, prompt: int) -> tuple[ImageSpan, ...]:
        """Return the places of the images of a prompt, which is the `prompt`-th of its batch."""
        return tuple(
            ImageSpan(f"{prompt}-{place}", place * self.tokens, (place + 1) * self.tokens)
            for place in range(self.count)
        )

    def contents(self, prompts: int) -> Mapping[str, bytes]:
        """Return the bytes of the images of so many prompts, by digest."""
        return {span.digest: self.content for prompt in range(prompts) for span in self.spans(prompt)}

    def read(self) -> Pixels:
        """Return the pixels of one image."""
        return self.pixels.read("0-0", self.content)


def find_worst_images(run: Recipe, prompt: int) -> WorstImages | None:
    """Return the images of prompts of this length; None for a model of text, or if no image fits.

    A model that is trained on text too has some only if the data files show images.
    """
    where = run.model.path
    if where is None or not has_tower(where, wanted=run.vision.tower):
        return None
    if reads_text_too(where) and not shows_images(run):
        return None
    pixels = PixelCache.load(where, run.max_pixels)
    layout = pixels.reader.layout
    for width, height in _sizes(layout, prompt):
        try:
            tokens = layout.count(width, height)
        except ImageError:  # too long and thin
            continue
        if tokens <= prompt:
            return WorstImages(
                pixels, plain_png(width, height), tokens, max(min(run.vision.max_images, prompt // tokens), 1)
            )
    return None


def _sizes(layout: ImageLayout, prompt: int) -> Iterator[tuple[int, int]]:
    """Yield sizes of images, those with more tokens first."""
    match layout:
        case PatchGrid():
            squares = min(prompt, layout.max_pixels // layout.square**2)
            side = math.isqrt(squares) * layout.square
            if side:
                yield side, side
        case Tiles():
            for part in (1, 2, 3, 4, 8):
                yield layout.longest, layout.longest // part
        case PatchBudget():
            rows = next(rows for rows in range(math.isqrt(layout.budget), 0, -1) if layout.budget % rows == 0)
            yield layout.budget // rows * layout.square, rows * layout.square
            yield 1, 1
        case _:
            yield 1, 1


def kept_features(model: Model, images: WorstImages) -> list[Tensor]:
    """Return the memory of the features that an embedded engine keeps."""
    levels = model.encode_images([images.read()]).levels()
    return [level.new_empty(MAX_FEATURES, level.shape[1]) for level in levels]


def pass_images(model: Model, images: WorstImages, tokens: int) -> PassImages:
    """Return the features of an engine's step that reads the tokens of images alone."""
    levels = model.encode_images([images.read()]).levels()
    joined = [level.new_empty(tokens, level.shape[1]) for level in levels]
    places = torch.arange(tokens, device=joined[0].device)
    return PassImages(Features(joined[0], tuple(joined[1:])), places, places)
