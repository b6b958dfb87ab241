"""The model types whose images Etude computes. A model of any other type is one of text, also if its files have more.

This file loads no torch, so that options are checked before anything is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from etude.images.layouts import TOWER_ON_REQUEST

ON_A_GRID = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}) | TOWER_ON_REQUEST
"""The model types that place an image's tokens in rows and columns."""
IN_TILES = frozenset({"smolvlm", "idefics3"})
"""The model types whose images are cut into tiles."""
BOTH_WAYS = frozenset({"gemma3"})
"""The model types in which the tokens of an image attend to each other both ways. Such models are used for text alone
too, so what does not go with images is refused only where there are some."""
VISION_TYPES = ON_A_GRID | IN_TILES | BOTH_WAYS


def has_tower(directory: Path, *, wanted: bool) -> bool:
    """Return true if the model of a directory is computed with images. wanted: `vision.tower` of the run."""
    kind = _model_type(directory)
    return kind in VISION_TYPES and (wanted or kind not in TOWER_ON_REQUEST)


def reads_text_too(directory: Path) -> bool:
    """Return true if models of this type are used for text alone as well."""
    return _model_type(directory) in BOTH_WAYS


def _model_type(directory: Path) -> str:
    file = directory / "config.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("model_type", "") if file.is_file() else ""
    return str(found)
