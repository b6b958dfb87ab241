"""Pixels are bit for bit those of transformers, and as many as the layout says."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.images import read_processor
from etude.images.pixels import PixelReader
from tests.images.processors import Family, families, picture, their_pixels

NAMES = sorted(families())


def compare(family: Family, directory: Path, images: int, max_pixels: int | None = None) -> None:
    """Compare images of random sizes with those of transformers."""
    reader = PixelReader.load(family.write(directory), max_pixels)
    sizes = random.Random(0)
    for seed in range(images):
        image = picture(seed, sizes.randint(3, 300), sizes.randint(3, 300))
        pixels = reader.read(image)
        theirs = their_pixels(family, image)
        assert pixels.arrays.keys() == theirs.keys()
        for name, array in pixels.arrays.items():
            assert array.dtype == theirs[name].dtype
            assert np.array_equal(array, theirs[name]), f"{name} of {image.size}"
        assert pixels.features == reader.layout.count(*image.size)


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    compare(families()[name], tmp_path, 12)


def test_a_smaller_limit_reaches_pixels_tokens_and_the_exported_settings(tmp_path: Path) -> None:
    for name, limit in (("qwen2_5_vl", 24 * 24), ("smolvlm", 64 * 64 + 100), ("gemma4", 139 * 12 * 12)):
        family = families()[name]
        directory = family.write(tmp_path / name)
        before = PixelReader.load(directory).read(picture(0, 300, 200)).features
        settings = read_processor(directory, limit)
        assert settings is not None
        smaller = Family(family.config, type(family.processor)(**settings))
        compare(smaller, tmp_path / f"{name}-exported", 4)
        reader = PixelReader.load(directory, limit)
        image = picture(0, 300, 200)
        assert np.array_equal(reader.read(image).arrays["pixel_values"], their_pixels(smaller, image)["pixel_values"])
        assert reader.read(image).features == reader.layout.count(300, 200) < before


def test_qwens_features_have_a_grid(tmp_path: Path) -> None:
    reader = PixelReader.load(families()["qwen3_vl"].write(tmp_path))
    assert reader.read(picture(0, 64, 32)).grid == (1, 2, 4)


def test_a_text_model_has_no_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r"takes text alone\. Give a vision-language model"):
        PixelReader.load(tmp_path)
