"""The tokens of an image follow transformers' arithmetic for all sizes; unknown ways are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.image_utils import SizeDict
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from etude.errors import ConfigError, ImageError
from etude.images import FixedCount, PatchBudget, PatchGrid, Tiles, read_image_layout, read_processor
from tests.images.processors import families


def sizes(count: int) -> Iterator[tuple[int, int]]:
    """Yield widths and heights from 5 to 9,000 pixels, as often small as large."""
    draw = random.Random(0)
    for _ in range(count):
        width = int(10 ** draw.uniform(0.7, 3.9))
        yield width, int(min(max(width * 10 ** draw.uniform(-1.2, 1.2), 5), 9000))


@pytest.mark.parametrize(
    ("square", "least", "most"), [(28, 3136, 12845056), (28, 3136, 1003520), (32, 65536, 16777216)]
)
def test_squares_are_those_of_qwen(square: int, least: int, most: int) -> None:
    layout = PatchGrid(square, least, most)
    for width, height in sizes(300):
        theirs = smart_resize(height, width, square, least, most)
        assert layout.squares(width, height) == (theirs[0] // square, theirs[1] // square), (width, height)


@pytest.mark.parametrize(("patch", "kernel", "budget"), [(16, 3, 280), (16, 3, 70), (16, 3, 1120), (4, 2, 140)])
def test_squares_are_those_of_gemma_4(patch: int, kernel: int, budget: int) -> None:
    layout = PatchBudget(patch * kernel, budget)
    for width, height in (*sizes(300), (1, 900), (900, 1), (1, 400), (5, 5)):
        theirs = get_aspect_ratio_preserving_size(height, width, patch, budget * kernel**2, kernel)
        assert layout.squares(width, height) == (theirs[0] // layout.square, theirs[1] // layout.square)


class SizesOnly(SmolVLMImageProcessorPil):
    """Their processor on images without pixels: only the sizes are computed."""

    def resize(self, image: NDArray[Any], size: SizeDict, *_: Any, **__: Any) -> NDArray[Any]:
        shape = (size.height or 0, size.width or 0)
        if size.longest_edge:
            shape = get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
        return np.broadcast_to(np.uint8(0), (3, *shape))


@pytest.mark.parametrize(("longest", "tile"), [(1536, 384), (2048, 512), (1456, 364), (512, 512), (4096, 512)])
def test_tiles_and_their_words_are_those_of_smolvlm(longest: int, tile: int) -> None:
    layout = Tiles(64, longest, tile, splits=True)
    theirs = SizesOnly()
    for width, height in sizes(60):
        image = theirs.resize(np.broadcast_to(np.uint8(0), (3, height, width)), SizeDict(longest_edge=longest))
        image = theirs.resize_for_vision_encoder(image, tile)
        _, rows, columns = theirs.split_images(image, {"longest_edge": tile})
        assert layout.tiles(width, height) == (rows, columns), (width, height)
        words = get_image_prompt_string(rows, columns, 64, "<fake_token_around_image>", "<image>", "<global-img>")
        assert layout.expand(width, height) == words
        assert layout.count(width, height) == words.count("<image>")


def test_gemma_has_one_number() -> None:
    layout = FixedCount(3)
    assert layout.expand(1, 9) == "\n\n<start_of_image>" + "<image_soft_token>" * 3 + "<end_of_image>\n\n"


def test_long_and_thin_is_refused() -> None:
    layout = PatchGrid(28, 3136, 12845056)
    assert layout.count(2000, 10) > 0
    with pytest.raises(
        ImageError, match="An image of 4000 × 10 pixels is too long and thin: the longer side may be 200"
    ):
        layout.expand(4000, 10)


def write(directory: Path, config: dict[str, Any], processor: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def test_each_way_of_writing_the_range_of_pixels_is_read(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_vl", "vision_config": {}}
    expected = PatchGrid(28, 3136, 50176)
    for written in (
        {"min_pixels": 3136, "max_pixels": 50176},
        {"size": {"min_pixels": 3136, "max_pixels": 50176}},
        {"size": {"shortest_edge": 3136, "longest_edge": 50176}, "min_pixels": None},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 3136, "max_pixels": 50176},
    ):
        assert read_image_layout(write(tmp_path, config, written)) == expected
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 50176}}')
    assert read_image_layout(tmp_path) == expected


def test_a_limit_below_the_least_moves_both(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_vl", "vision_config": {}}
    write(tmp_path, config, {"min_pixels": 3136, "max_pixels": 50176})
    assert read_image_layout(tmp_path, 1600) == PatchGrid(28, 1600, 1600)
    assert read_image_layout(tmp_path, 5) == PatchGrid(28, 784, 784), "one square is the least"


def test_other_models(tmp_path: Path) -> None:
    assert read_image_layout(write(tmp_path, {"model_type": "qwen3"}, {})) is None
    assert read_processor(tmp_path) is None
    with pytest.raises(ConfigError, match=r"in the way of `internvl`, which Etude does not know\. It knows Qwen2-VL"):
        read_image_layout(write(tmp_path, {"model_type": "internvl", "vision_config": {}}, {}))
    with pytest.raises(ConfigError, match=r"has `do_pan_and_scan` true, and Etude prepares images with false alone"):
        read_image_layout(write(tmp_path, dict(families()["gemma3"].config), {"do_pan_and_scan": True}))
    with pytest.raises(ConfigError, match=r"takes every image in one size, so `vision\.max_pixels` 100 would have no"):
        read_image_layout(write(tmp_path, dict(families()["gemma3"].config), {}), 100)
