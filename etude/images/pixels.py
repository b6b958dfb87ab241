"""Pixels as the processors of transformers prepare them: Pillow and numpy alone, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from etude.errors import ConfigError
from etude.images.layouts import FixedCount, ImageLayout, PatchGrid, Settings, Tiles, read_image_layout, read_processor


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """One image as a vision tower takes it."""

    arrays: Mapping[str, NDArray[Any]]
    """The tower's arguments by name, for this image alone. Example: `{"pixel_values": …, "image_grid_thw": …}`."""
    features: int
    """The number of features that the tower gives, one for each image token."""
    grid: tuple[int, int, int] | None = None
    """The features' extent in time, rows and columns, for a model that places them on a grid."""

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


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
        match self.layout:
            case PatchGrid():
                return self._read_patches(image, self.layout)
            case Tiles():
                return self._read_tiles(image, self.layout)
            case FixedCount():
                size = self.processor["size"]
                values = self._normalize(self._resize(image, size["width"], size["height"]))
                return Pixels({"pixel_values": values[None]}, self.layout.tokens)
        raise AssertionError(f"no reader for {self.layout}")

    def _resize(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), resample=self.processor["resample"])

    def _normalize(self, image: Image.Image) -> NDArray[np.float32]:
        """[3, height, width]: the colours, scaled and normalized in the types that transformers does it in."""
        values = (np.asarray(image).astype(np.float64) * self.processor["rescale_factor"]).astype(np.float32)
        values -= np.array(self.processor["image_mean"], np.float32)
        values /= np.array(self.processor["image_std"], np.float32)
        return np.ascontiguousarray(values.transpose(2, 0, 1))

    def _read_patches(self, image: Image.Image, layout: PatchGrid) -> Pixels:
        """The patches of each square together, square by square, each patch for all its time steps."""
        rows, columns = layout.squares(image.width, image.height)
        values = self._normalize(self._resize(image, columns * layout.square, rows * layout.square))
        patch = self.processor["patch_size"]
        merge = self.processor["merge_size"]
        times = self.processor["temporal_patch_size"]
        cells = values.reshape(3, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        cells = np.broadcast_to(cells[:, :, :, :, :, None], (*cells.shape[:5], times, patch, patch))
        arrays: dict[str, NDArray[Any]] = {
            "pixel_values": cells.reshape(rows * columns * merge**2, 3 * times * patch**2),
            "image_grid_thw": np.array([[1, rows * merge, columns * merge]], np.int64),
        }
        return Pixels(arrays, rows * columns, (1, rows, columns))

    def _read_tiles(self, image: Image.Image, layout: Tiles) -> Pixels:
        side = layout.tile
        width, height = layout.longest_size(image.width, image.height)
        image = self._resize(image, width, height)
        rows, columns = layout.tiles_of(width, height) if layout.splits else (0, 0)
        if rows:
            image = self._resize(image, columns * side, rows * side)
        parts = [
            image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        parts.append(self._resize(image, side, side))
        arrays: dict[str, NDArray[Any]] = {
            "pixel_values": np.stack([self._normalize(part) for part in parts]),
            "pixel_attention_mask": np.ones((len(parts), side, side), np.int64),
        }
        return Pixels(arrays, len(parts) * layout.tokens)
