"""Pixels as the processors of transformers prepare them: Pillow and numpy alone, bit for bit.

    picture ──resize──► colours as bytes ──compute──► numbers, laid out in patches

Resizing takes most of the time, and the numbers most of the memory: four bytes a colour, for each time step. So what
is worth keeping is the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.images.layouts import (
    FixedCount,
    ImageLayout,
    PatchBudget,
    PatchGrid,
    Settings,
    Tiles,
    read_image_layout,
    read_processor,
)

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """One image as a vision tower takes it."""

    arrays: Mapping[str, NDArray[Any]]
    """The tower's arguments by name, for this image alone. Example: `{"pixel_values": …, "image_grid_thw": …}`."""
    features: int
    """The number of features that the tower gives, one for each image token."""
    grid: tuple[int, int, int] | None = None
    """The features' extent in time, rows and columns, for a model that places them on a grid."""


@dataclass(frozen=True, slots=True, eq=False)
class ResizedImage:
    """One image in the size that a vision tower takes."""

    parts: NDArray[np.uint8]  # [N, height, width, 3]: its tiles and the whole image as the last; without tiles one
    features: int
    """As `Pixels` has them; so is the grid."""
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class ResizedShape:
    """The extent of an image in the size that a vision tower takes."""

    parts: int
    """Its tiles, and the whole image as one more."""
    height: int
    """The height of each part; so is the width."""
    width: int
    features: int
    """As `Pixels` has them; so is the grid."""
    grid: tuple[int, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the resized image."""
        return self.parts * self.height * self.width * 3


@dataclass(frozen=True, slots=True)
class PixelReader:
    """The preparation of images for one model. Example: `PixelReader.load(directory).read(open_image(content))`."""

    layout: ImageLayout
    processor: Settings
    """The settings of the model's processor, complete."""

    @classmethod
    def load(cls, directory: Path, max_pixels: int | None = None) -> PixelReader:
        """Return the reader of the model in a directory. max_pixels: as for `read_image_layout`."""
        layout = read_image_layout(directory, max_pixels)
        processor = read_processor(directory, max_pixels)
        if layout is None or processor is None:
            raise ConfigError(f"The model in {directory} takes text alone. Give a vision-language model.")
        return cls(layout, processor)

    def read(self, image: Image.Image) -> Pixels:
        """Return the pixels of an image in RGB, as `open_image` returns it."""
        return self.compute(self.resize(image))

    def measure(self, width: int, height: int) -> ResizedShape:
        """Return the extent that an image of this width and height has after `resize`."""
        features = self.layout.count(width, height)
        match self.layout:
            case PatchGrid():
                rows, columns = self.layout.squares(width, height)
                square = self.layout.square
                return ResizedShape(1, rows * square, columns * square, features, (1, rows, columns))
            case PatchBudget():
                rows, columns = self.layout.squares(width, height)
                square = self.layout.square
                return ResizedShape(1, rows * square, columns * square, features)
            case Tiles():
                tile = self.layout.tile
                return ResizedShape(features // self.layout.tokens, tile, tile, features)
            case FixedCount():
                size = self.processor["size"]
                return ResizedShape(1, size["height"], size["width"], features)
        raise AssertionError(f"no reader for {self.layout}")

    def resize(self, image: Image.Image) -> ResizedImage:
        """Return an image in RGB in the size that the tower takes."""
        shape = self.measure(image.width, image.height)
        if isinstance(self.layout, Tiles):
            parts = np.stack(list(map(np.asarray, self._cut_tiles(image, self.layout))))
        else:
            parts = np.asarray(self._resized(image, shape.width, shape.height))[None]
        return ResizedImage(parts, shape.features, shape.grid)

    def compute(self, image: ResizedImage) -> Pixels:
        """Return the pixels of an image that was resized."""
        match self.layout:
            case PatchGrid():
                arrays = self._compute_patches(image)
            case PatchBudget():
                arrays = self._compute_lines(image, self.layout.budget)
            case Tiles():
                arrays = {
                    "pixel_values": self._compute_parts(image),
                    "pixel_attention_mask": np.ones(image.parts.shape[:3], np.int64),
                }
            case _:
                arrays = {"pixel_values": self._compute_parts(image)}
        return Pixels(arrays, image.features, image.grid)

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), resample=self.processor["resample"])

    def _cut_tiles(self, image: Image.Image, layout: Tiles) -> Iterator[Image.Image]:
        """Yield the tiles of an image line by line, if it has some, and the whole image in the size of one."""
        side = layout.tile
        width, height = layout.longest_size(image.width, image.height)
        image = self._resized(image, width, height)
        rows, columns = layout.tiles_of(width, height) if layout.splits else (0, 0)
        if rows:
            image = self._resized(image, columns * side, rows * side)
        for row in range(rows):
            for column in range(columns):
                yield image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
        yield self._resized(image, side, side)

    def _normalized_levels(self) -> NDArray[np.float32]:
        """[3, 256]: the number of each level of each colour, in the types that transformers computes it in."""
        levels = np.repeat(np.arange(256, dtype=np.float64)[:, None], 3, axis=1)
        values = (levels * self.processor["rescale_factor"]).astype(np.float32)
        if self.processor["do_normalize"]:
            values -= np.array(self.processor["image_mean"], np.float32)
            values /= np.array(self.processor["image_std"], np.float32)
        return np.ascontiguousarray(values.T)

    def _compute_parts(self, image: ResizedImage) -> NDArray[np.float32]:
        """[N, 3, height, width]: the numbers of each part."""
        count, height, width, _ = image.parts.shape
        values = np.empty((count, 3, height, width), np.float32)
        for colour, numbers in enumerate(self._normalized_levels()):
            values[:, colour] = np.take(numbers, image.parts[..., colour], mode="clip")
        return values

    def _compute_patches(self, image: ResizedImage) -> dict[str, NDArray[Any]]:
        """The patches of each square together, square by square, each patch for all its time steps."""
        patch = self.processor["patch_size"]
        merge = self.processor["merge_size"]
        times = self.processor["temporal_patch_size"]
        assert image.grid is not None, "a grid of patches has rows and columns"
        _, rows, columns = image.grid
        cells = image.parts.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = cells.reshape(rows * columns * merge**2, 3, patch**2)
        values = np.empty((len(patches), 3, times, patch**2), np.float32)
        for colour, numbers in enumerate(self._normalized_levels()):
            values[:, colour] = np.take(numbers, patches[:, colour], mode="clip")[:, None]
        return {
            "pixel_values": values.reshape(len(patches), -1),
            "image_grid_thw": np.array([[1, rows * merge, columns * merge]], np.int64),
        }

    def _compute_lines(self, image: ResizedImage, budget: int) -> dict[str, NDArray[Any]]:
        """The patches line by line, as many as a budget of tokens has: what is left is empty, at no place."""
        patch = self.processor["patch_size"]
        _, height, width, _ = image.parts.shape
        rows, columns = height // patch, width // patch
        count = budget * self.processor["pooling_kernel_size"] ** 2
        cells = image.parts.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        patches = cells.reshape(rows * columns, patch**2, 3)
        values = np.zeros((1, count, patch**2, 3), np.float32)
        for colour, numbers in enumerate(self._normalized_levels()):
            values[0, : len(patches), :, colour] = np.take(numbers, patches[..., colour], mode="clip")
        places = np.full((1, count, 2), -1, np.int64)
        places[0, : len(patches)] = np.stack(np.divmod(np.arange(len(patches)), columns)[::-1], axis=-1)
        return {"pixel_values": values.reshape(1, count, -1), "image_position_ids": places}
