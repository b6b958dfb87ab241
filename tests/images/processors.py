"""Transformers' own image processors, each with the directory of a model that has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

_TILES = {"vision_config": {"image_size": 32, "patch_size": 4}, "scale_factor": 2}


@dataclass(frozen=True)
class Family:
    """A family's config, and its processor with settings for small images."""

    config: Mapping[str, Any]
    processor: BaseImageProcessor

    def write(self, directory: Path) -> Path:
        """Write a model's directory without its weights."""
        self.processor.save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(self.config))
        return directory


def families() -> dict[str, Family]:
    """Return the families by name; Qwen's two sizes of a patch stand for the three models."""
    tiles: dict[str, Any] = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    small: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 64 * 64}
    gemma = {"model_type": "gemma3", "vision_config": {}, "mm_tokens_per_image": 16}
    return {
        "qwen2_5_vl": Family({"model_type": "qwen2_5_vl", "vision_config": {}}, Qwen2VLImageProcessorPil(**small)),
        "qwen3_vl": Family(
            {"model_type": "qwen3_vl", "vision_config": {}},
            Qwen2VLImageProcessorPil(
                size={"shortest_edge": 32 * 32, "longest_edge": 96 * 96},
                patch_size=8,
                merge_size=2,
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            ),
        ),
        "smolvlm": Family({"model_type": "smolvlm", **_TILES}, SmolVLMImageProcessorPil(**tiles)),
        "idefics3": Family({"model_type": "idefics3", **_TILES}, Idefics3ImageProcessorPil(**tiles)),
        "whole": Family(
            {"model_type": "smolvlm", **_TILES}, SmolVLMImageProcessorPil(**tiles, do_image_splitting=False)
        ),
        "gemma3": Family(gemma, Gemma3ImageProcessorPil(size={"height": 32, "width": 32})),
        "gemma4": Family(
            {"model_type": "gemma4", "vision_config": {}, "text_config": {}},
            Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=140),
        ),
    }


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def their_pixels(family: Family, image: Image.Image) -> dict[str, NDArray[Any]]:
    """Return the arrays of transformers for one image."""
    arrays = family.processor(images=[image], return_tensors="np")
    one = "pixel_attention_mask" in arrays  # tiles have an axis for the images of a conversation
    counts = ("num_crops", "num_soft_tokens_per_image")
    return {name: arrays[name][0] if one else arrays[name] for name in arrays if name not in counts}
