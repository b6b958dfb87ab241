"""The model types whose images Etude computes. A model of any other type is one of text, also if its files have more.

This file loads no torch, so that options are checked before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.images.layouts import TOWER_ON_REQUEST

ON_A_GRID = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"})
"""The model types that place an image's tokens in rows and columns."""
IN_TILES = frozenset({"smolvlm", "idefics3"})
"""The model types whose images are cut into tiles."""
BY_BUDGET = frozenset({"gemma4"})
"""The model types whose layers may have embeddings of tokens too. An image token takes those of padding there."""
ImageAttention: TypeAlias = Literal["causal", "both ways", "in windows"]
"""The tokens of an image see those before them, or all of the image: in each layer, or in layers with a window."""
BOTH_WAYS = frozenset({"gemma3"})
"""The model types in which the tokens of an image attend to each other both ways in each layer."""
USED_FOR_TEXT = BOTH_WAYS | BY_BUDGET
"""The model types that are used for text alone too, so that what does not go with images is refused only where there
are some."""
VISION_TYPES = ON_A_GRID | IN_TILES | BY_BUDGET | BOTH_WAYS


def has_tower(directory: Path, *, wanted: bool) -> bool:
    """Return true if the model of a directory is computed with images. wanted: `vision.tower` of the run."""
    kind = _read_config(directory).get("model_type", "")
    return kind in VISION_TYPES and (wanted or kind not in TOWER_ON_REQUEST)


def reads_text_too(directory: Path) -> bool:
    """Return true if models of this type are used for text alone as well."""
    return _read_config(directory).get("model_type", "") in USED_FOR_TEXT


def _read_config(directory: Path) -> Mapping[str, Any]:
    file = directory / "config.json"
    config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config
