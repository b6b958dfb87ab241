"""The model types whose images Etude computes. A model of any other type is one of text, also if its files have more.

This file loads no torch, so that options are checked before anything is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

ON_A_GRID = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""The model types that place an image's tokens in rows and columns."""
IN_TILES = frozenset({"smolvlm", "idefics3"})
"""The model types whose images are cut into tiles."""
VISION_TYPES = ON_A_GRID | IN_TILES


def has_tower(directory: Path) -> bool:
    """Return true if the model of a directory is computed with images."""
    file = directory / "config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("model_type") in VISION_TYPES
