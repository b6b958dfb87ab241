"""The tokens of an image in each family of models, from its width and height alone.

A chat template writes one placeholder for an image. It is replaced by as many image tokens as the model's vision tower
gives features, and each family has its own arithmetic::

    PatchGrid    <|image_pad|>      Qwen2-VL, Qwen2.5-VL, Qwen3-VL   one token for each square of patches
    Tiles        <image>            SmolVLM, Idefics3                tiles of one size, and the whole image as one more
    FixedCount   <start_of_image>   Gemma 3                          always the same number
    PatchBudget  <|image|>          Gemma 4                          as many squares as fit, in the image's shape

The settings are those of a model's directory. `max_pixels` changes them in one place, `read_processor`: the tokens,
the pixels and an exported processor follow it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from etude.errors import ConfigError, ImageError

Settings: TypeAlias = dict[str, Any]

LONGEST_RATIO = 200
"""The largest ratio of the longer to the shorter side of an image, for a grid of patches."""
BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of tokens that Gemma 4 allows for an image at most."""
LONGEST_SIDE = 4096
"""The longest side, in pixels, that a processor of tiles resizes an image to."""

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_ALWAYS = {"do_convert_rgb": True, "do_resize": True, "do_rescale": True, "do_normalize": True}
_COMMON = {**_ALWAYS, "rescale_factor": 1 / 255}

# What a processor has where its file says nothing, by the kind of its layout.
_PATCHES: Settings = {
    **_COMMON,
    **_CLIP,
    "resample": 3,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}
_TILES: Settings = {
    **_COMMON,
    **_HALF,
    "resample": 1,
    "do_image_splitting": True,
    "do_pad": True,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
}
_FIXED: Settings = {**_COMMON, **_HALF, "resample": 2, "do_pan_and_scan": False, "size": {"height": 224, "width": 224}}
_BUDGET: Settings = {
    **_COMMON,
    "do_normalize": False,
    "resample": 3,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
}
_DEFAULTS: dict[str, Settings] = {
    "qwen2_vl": _PATCHES,
    "qwen2_5_vl": _PATCHES,
    "qwen3_vl": _PATCHES,
    "qwen3_5": _PATCHES,
    "smolvlm": _TILES,
    "idefics3": _TILES,
    "gemma3": _FIXED,
    "gemma4": _BUDGET,
}
TOWER_ON_REQUEST = frozenset({"qwen3_5"})
"""The model types whose text part is a model by itself, which is loaded unless the tower is wanted too."""
_FIXED_SETTINGS = (*_ALWAYS, "do_pad", "do_pan_and_scan")
"""Settings of which one value is reproduced here, that of the defaults."""


class ImageLayout(Protocol):
    """The tokens of an image in one family of models."""

    @property
    def placeholder(self) -> str:
        """The text that the template writes once for each image."""
        ...

    @property
    def image_token(self) -> str:
        """The token that takes a feature of the vision tower."""
        ...

    def expand(self, width: int, height: int) -> str:
        """Return the text that replaces the placeholder of an image of this size."""
        ...

    def count(self, width: int, height: int) -> int:
        """Return the number of image tokens of an image of this size."""
        ...


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Qwen's layout: the image is resized to whole squares, within a range of pixels."""

    square: int
    """The side, in pixels, of the square that one token stands for."""
    min_pixels: int
    max_pixels: int
    placeholder: str = "<|image_pad|>"
    image_token: str = "<|image_pad|>"

    def expand(self, width: int, height: int) -> str:
        """Return one image token for each square."""
        return self.image_token * self.count(width, height)

    def count(self, width: int, height: int) -> int:
        """Return the number of squares."""
        rows, columns = self.squares(width, height)
        return rows * columns

    def squares(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of squares of an image of this size."""
        if max(width, height) > LONGEST_RATIO * min(width, height):
            raise ImageError(
                f"An image of {width} × {height} pixels is too long and thin: the longer side may be "
                f"{LONGEST_RATIO} times the shorter. Cut it."
            )
        square = self.square
        rows = round(height / square)
        columns = round(width / square)
        pixels = rows * columns * square**2
        if pixels > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            return max(1, math.floor(height / shrink / square)), max(1, math.floor(width / shrink / square))
        if pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / square), math.ceil(width * grow / square)
        return rows, columns


@dataclass(frozen=True, slots=True)
class Tiles:
    """The layout of SmolVLM and Idefics3: tiles of one size, and the whole image as one more."""

    tokens: int
    """The image tokens of a tile."""
    longest: int
    """The length, in pixels, to which the longer side is resized before it is cut."""
    tile: int
    """The side of a tile, in pixels."""
    splits: bool
    """Images are cut into tiles; else an image is one tile."""
    placeholder: str = "<image>"
    image_token: str = "<image>"

    def expand(self, width: int, height: int) -> str:
        """Return the tiles' tokens line by line, each behind its row and column, and those of the whole image."""
        around = "<fake_token_around_image>"
        features = self.image_token * self.tokens
        whole = f"{around}<global-img>{features}{around}"
        rows, columns = self.tiles(width, height)
        if not rows:
            return whole
        lines = (
            "".join(f"{around}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + whole

    def count(self, width: int, height: int) -> int:
        """Return the tokens of all tiles and of the whole image."""
        rows, columns = self.tiles(width, height)
        return (rows * columns + 1) * self.tokens

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tiles; 0 and 0 for an image that is not split."""
        return self.tiles_of(*self.longest_size(width, height)) if self.splits else (0, 0)

    def longest_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height once the longer side has its length."""
        ratio = width / height
        if width >= height:
            width = self.longest
            height = int(self.longest / ratio)
            height += height % 2
        else:
            height = self.longest
            width = int(self.longest * ratio)
            width += width % 2
        return max(width, 1), max(height, 1)

    def tiles_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of an image that has its longest size."""
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            rows = math.ceil(int(columns * self.tile / ratio) / self.tile)
        else:
            rows = math.ceil(height / self.tile)
            columns = math.ceil(int(rows * self.tile * ratio) / self.tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Gemma 3's layout: the same number of tokens for each size."""

    tokens: int
    placeholder: str = "<start_of_image>"
    image_token: str = "<image_soft_token>"

    def expand(self, width: int, height: int) -> str:
        """Return the tokens between the marks of an image, on lines of their own."""
        return f"\n\n<start_of_image>{self.image_token * self.count(width, height)}<end_of_image>\n\n"

    def count(self, width: int, height: int) -> int:
        """Return the number of tokens of an image."""
        del width, height
        return self.tokens


@dataclass(frozen=True, slots=True)
class PatchBudget:
    """Gemma 4's layout: the image keeps its shape, and is resized to as many whole squares as a budget has."""

    square: int
    """The side, in pixels, of the square that one token stands for."""
    budget: int
    """The most tokens of an image."""
    placeholder: str = "<|image|>"
    image_token: str = "<|image|>"

    def expand(self, width: int, height: int) -> str:
        """Return one image token for each square, between the marks of an image."""
        return f"<|image>{self.image_token * self.count(width, height)}<image|>"

    def count(self, width: int, height: int) -> int:
        """Return the number of squares."""
        rows, columns = self.squares(width, height)
        return rows * columns

    def squares(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of squares of an image of this size."""
        factor = math.sqrt(self.budget * self.square**2 / (height * width))
        rows = math.floor(factor * height / self.square)
        columns = math.floor(factor * width / self.square)
        if not rows:
            return 1, min(width // height, self.budget)
        return (rows, columns) if columns else (min(height // width, self.budget), 1)


def read_image_layout(directory: Path, max_pixels: int | None = None, *, tower: bool = True) -> ImageLayout | None:
    """Return the layout of the model in a directory; None for a model that takes no images.

    max_pixels: the most pixels that an image is resized to, in place of the processor's own limit. tower: with False,
    a model that is computed with images on request alone is refused.
    """
    config = _read(directory / "config.json")
    if config.get("model_type") in TOWER_ON_REQUEST and "vision_config" in config and not tower:
        raise ConfigError(
            f"This run loads the text part of the model in {directory} alone, and an image needs its vision tower. "
            "Set `vision.tower=true`."
        )
    processor = read_processor(directory, max_pixels)
    if processor is None:
        return None
    match config["model_type"]:
        case "smolvlm" | "idefics3":
            tile = processor["max_image_size"]["longest_edge"]
            side = tile // config["vision_config"]["patch_size"] // config["scale_factor"]
            return Tiles(side * side, processor["size"]["longest_edge"], tile, processor["do_image_splitting"])
        case "gemma3":
            return FixedCount(config["mm_tokens_per_image"])
        case "gemma4":
            return PatchBudget(processor["patch_size"] * processor["pooling_kernel_size"], processor["max_soft_tokens"])
    size = processor["size"]
    return PatchGrid(processor["patch_size"] * processor["merge_size"], size["shortest_edge"], size["longest_edge"])


def read_processor(directory: Path, max_pixels: int | None = None) -> Settings | None:
    """Return the settings of a model's image processor, complete; None for a model that takes no images.

    An export writes them as its `preprocessor_config.json`, so that servers resize images as training did.
    """
    config = _read(directory / "config.json")
    if "vision_config" not in config:
        return None
    kind = config["model_type"]
    if kind not in _DEFAULTS:
        raise ConfigError(
            f"The model in {directory} takes images in the way of `{kind}`, which Etude does not know. "
            "It knows Qwen2-VL to Qwen3-VL, SmolVLM, Idefics3, Gemma 3 and Gemma 4."
        )
    path = directory / "preprocessor_config.json"
    written = _read(path) or _read(directory / "processor_config.json").get("image_processor", {})
    processor = {**_DEFAULTS[kind], **{name: value for name, value in written.items() if value is not None}}
    for name in _FIXED_SETTINGS:
        expected = _DEFAULTS[kind].get(name)
        if processor.get(name) != expected and expected is not None:
            raise ConfigError(
                f"{path} has `{name}` {json.dumps(processor[name])}, and Etude prepares images with "
                f"{json.dumps(expected)} alone. Set it so if the model was trained so."
            )
    if _DEFAULTS[kind] is _PATCHES:
        _move_pixels(processor)
    if max_pixels is not None:
        _limit(processor, kind, max_pixels)
    return processor


def _move_pixels(processor: Settings) -> None:
    """Put the range of pixels under `size`, whichever of the three ways a file has it."""
    size = {**_PATCHES["size"], **processor["size"]}
    for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if name in size:
            size[edge] = size.pop(name)
        if name in processor:
            size[edge] = processor.pop(name)
    processor["size"] = size


def _limit(processor: Settings, kind: str, max_pixels: int) -> None:
    """Set the most pixels that an image is resized to."""
    if _DEFAULTS[kind] is _FIXED:
        raise ConfigError(
            f"A model of the kind `{kind}` takes every image in one size, so `vision.max_pixels` {max_pixels} "
            "would have no effect. Leave it out."
        )
    if _DEFAULTS[kind] is _BUDGET:
        square = (processor["patch_size"] * processor["pooling_kernel_size"]) ** 2
        if max_pixels < BUDGETS[0] * square:
            raise ConfigError(
                f"A model of the kind `{kind}` makes {BUDGETS[0]} tokens of an image at least, which are "
                f"{BUDGETS[0] * square} pixels, and `vision.max_pixels` is {max_pixels}. Raise it, or leave it out."
            )
        processor["max_soft_tokens"] = max(each for each in BUDGETS if each * square <= max_pixels)
        return
    size = processor["size"]
    if _DEFAULTS[kind] is _PATCHES:
        least = (processor["patch_size"] * processor["merge_size"]) ** 2
        processor["size"] = {
            **size,
            "longest_edge": max(max_pixels, least),
            "shortest_edge": min(size["shortest_edge"], max(max_pixels, least)),
        }
        return
    tile = processor["max_image_size"]["longest_edge"]
    tiles = min(math.isqrt(max_pixels), LONGEST_SIDE) // tile
    processor["size"] = {**size, "longest_edge": max(tiles, 1) * tile}


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
